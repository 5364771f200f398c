"""Compiles grammars before their requests are queued, in a process of its own (`grammar_process`).

Tenants take turns there. So a tenant's many slow grammars delay those of another one by one of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from baton.errors import BatonError, InvalidGrammar, from_reason
from baton.futures import looked_at
from baton.logs import RateLimitedLog
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.off_loop import HelperDied, HelperLate, HelperProcess
from router.frontend.served_model import ServedModel

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines

_DEADLINE = 3.0  # seconds for one grammar; most take less than a millisecond
_REMEMBERED = 4 * 2**20  # characters of grammars whose outcome is known


class _Order(msgspec.Struct, frozen=True):
    """What the process is asked. Of a lenient schema it may leave out what can't be enforced."""

    grammar: Grammar
    lenient: bool = False

    @property
    def size(self) -> int:
        return len(self.grammar.text) + len(self.grammar.frame)


class CheckedGrammar(NamedTuple):
    """A grammar as decode workers compile it, and the paths of the keywords that its schema lacks."""

    grammar: Grammar
    left_out: Sequence[str] = ()


class GrammarChecker:
    """Checks grammars, one after another, and remembers those that it has checked. One event loop may use it."""

    def __init__(self, model: ServedModel) -> None:
        file, end = model.tokenizer_file, model.grammar_end
        self._helper = None
        if file is not None and end is not None:
            self._helper = HelperProcess(
                "router.frontend.grammar_process", str(file), str(model.limits.vocab_size), str(end),
                deadline=_DEADLINE, most=MAX_GRAMMAR,
            )  # fmt: skip
        self._checking: dict[_Order, asyncio.Task[CheckedGrammar | BatonError]] = {}
        self._known: OrderedDict[_Order, CheckedGrammar | BatonError] = OrderedDict()
        self._size = 0

    async def check(self, grammar: Grammar, tenant: str) -> Grammar:
        """Return the grammar as decode workers compile it. Raises InvalidGrammar with the reason, ModelError, and
        Overloaded where too many of the tenant's wait or the process was interrupted."""
        return (await self._outcome(_Order(grammar), tenant)).grammar

    async def loosen(self, schema: Grammar, tenant: str) -> CheckedGrammar:
        """Return a JSON schema without the keywords that can't be enforced. Raises as `check` does where that does not
        help."""
        return await self._outcome(_Order(schema, lenient=True), tenant)

    async def close(self) -> None:
        """End the process."""
        if self._helper is not None:
            await self._helper.close()

    async def _outcome(self, order: _Order, tenant: str) -> CheckedGrammar:
        outcome = self._known.get(order)
        if outcome is None:
            checking = self._checking.get(order)
            if checking is None:
                checking = self._checking[order] = asyncio.create_task(self._checked(order, tenant))
                checking.add_done_callback(partial(self._ended, order))
            outcome = await asyncio.shield(checking)
        if isinstance(outcome, BatonError):
            raise type(outcome)(str(outcome))
        return outcome

    def _ended(self, order: _Order, checking: asyncio.Task[CheckedGrammar | BatonError]) -> None:
        del self._checking[order]
        looked_at(checking)
        if not checking.cancelled() and checking.exception() is None:
            self._remember(order, checking.result())

    async def _checked(self, order: _Order, tenant: str) -> CheckedGrammar | BatonError:
        assert self._helper is not None, "`grammar_of` refuses grammars for such a model"
        try:
            answer = await self._helper.ask(msgspec.json.encode(order), tenant)
        except HelperLate:
            log.warning("a grammar took longer than %g s to compile; its process was ended", _DEADLINE)
            return InvalidGrammar(f"the grammar takes longer than {_DEADLINE:g} s to compile; make it smaller")
        except HelperDied:
            log.warning("a grammar ended the process that compiles it")
            return InvalidGrammar("the grammar takes too much memory to compile, or is nested too deeply")
        if answer.text is not None:
            return CheckedGrammar(replace(order.grammar, text=answer.text), answer.left_out)
        return from_reason(answer.reason, answer.error)

    def _remember(self, order: _Order, outcome: CheckedGrammar | BatonError) -> None:
        self._known[order] = outcome
        self._size += order.size
        while self._size > _REMEMBERED:
            old, _ = self._known.popitem(last=False)
            self._size -= old.size
