"""The schemas of tools that a call is constrained to, without the keywords that no grammar can enforce.

Agents send tools whose schemas say more than a grammar can: `propertyNames`, `not`, look-ahead. One of them would
refuse each turn. So such a keyword is left out of what binds the call, unless the tool is `strict`. The model sees all
of it.
"""

# pyright: strict

from __future__ import annotations

import logging

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidGrammar, shown
from baton.logs import RateLimitedLog
from baton.messages import Grammar
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.structured_outputs import structured_output
from router.frontend.api.tools import Json, ToolPlan, constraint
from router.frontend.chat.repairs import Repairs
from router.frontend.generation import GenerationService
from router.frontend.grammar_parsing import grammar_of
from router.frontend.identity import caller

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines


async def fitted(
    fields: ChatCompletionRequest, plan: ToolPlan, service: GenerationService, repairs: Repairs
) -> ChatCompletionRequest:
    """Return a chat of this task's caller with a constraint that compiles. Raises InvalidGrammar with the tool's name
    and the keyword's path where none does, Overloaded and UnsupportedField."""
    if not plan.forced or plan.plain:
        return fields
    grammar = grammar_of(structured_output(fields), service.model, ignore_eos=bool(fields.ignore_eos))
    assert grammar is not None
    try:
        await service.grammars.check(grammar, caller.get().tenant)
    except InvalidGrammar:
        schemas = dict(plan.schemas)
        for name, schema in plan.schemas.items():
            alone = replace(grammar, text=msgspec.json.encode(schema).decode())
            schemas[name] = await _fitted(name, alone, plan, service, repairs) or schema
        return replace(fields, structured_outputs=constraint(plan, schemas))
    return fields


async def _fitted(
    name: str, schema: Grammar, plan: ToolPlan, service: GenerationService, repairs: Repairs
) -> Json | None:
    """Return one tool's schema as a grammar can enforce it; None if that is all of it."""
    tenant = caller.get().tenant
    try:
        if name in plan.exact or "schema" not in repairs.allowed:
            await service.grammars.check(schema, tenant)
            return None
        checked = await service.grammars.loosen(schema, tenant)
    except InvalidGrammar as error:
        named = InvalidGrammar(f"tools: {shown(name)!r}: {error}")
        named.field = "tools"
        raise named from None
    if not checked.left_out:
        return None
    repairs.make("schema")
    log.info("a call of the tool %r is not bound by %s", name, ", ".join(checked.left_out))
    return msgspec.json.decode(checked.grammar.text)
