"""A store that answers its workers wrongly: mutated messages of `StoreReply`, arenas that are none, and silence.

The fuzzer is the workers' router, too, so that they have something to ask their store. After each case a worker must
attach anew, be done with all leases, and have every page of its device free. A prompt that never needs the store must
give the same tokens as before.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.messages import KEY_BYTES, AttemptName, Decode, PageSource, Prefill, SamplingParams
from baton.wire import ClusterKeys
from kvstore.keys import pack_tokens
from tests.fuzz import links
from tests.fuzz.case import Case
from tests.fuzz.false_router import START, FalseRouter, Member, order
from tests.fuzz.false_store import FalseStore, Worker

_ROOT, _OTHER_ROOT = b"r" * KEY_BYTES, b"o" * KEY_BYTES
_PROMPT = [5, 6, 7, 8, 9] * 7  # of the request that compares
_TOKENS = 5  # that it generates
_AT_ONCE = 0.005  # seconds between two looks at the sockets


class StoreReplies:
    """The only router and the only store of a prefill and a decode worker."""

    threads = 1

    def __init__(self, endpoint: str, keys: str, processes: int, address: str) -> None:
        self._router = FalseRouter(endpoint, ClusterKeys.read_file(Path(keys)), processes)
        self._router.heard = self._heard
        self._store = FalseStore(address)
        self._expected: list[int] | None = None
        self._tokens: dict[str, list[int]] = {}  # by request
        self._ended: set[str] = set()  # requests
        self._number = 0
        self._last = 0  # sequence of the last message that a worker must have read

    def start(self) -> None:
        self._until(Case(0, "replies", -1), lambda: self._router.complete, START, "a process said no Hello")

    def run(self, case: Case) -> str:
        router, rng = self._router, case.rng
        member = rng.choice(router.by_name)
        names = [self._give_work(case, member) for _ in range(rng.choice([1, 2, 5]))]
        lying_until = time.monotonic() + rng.choice([0.05, 0.2, 0.6])
        lies = rng.choice([0.1, 0.5, 0.9])
        while time.monotonic() < lying_until and not self._ended.issuperset(names):
            self._turn(case, lies)
        self._end(case, member)
        if member.role == "decode":
            self._check_tokens(case, member)
        self._tokens.clear()
        self._ended.clear()
        return member.role

    # --- the router --------------------------------------------------------------------------------------------------

    def _give_work(self, case: Case, member: Member) -> str:
        """Have a worker read from its store, or write to it."""
        rng = case.rng
        self._number += 1
        name = AttemptName(f"w-{self._number}", 1)
        tokens = [rng.randrange(3, 900) for _ in range(rng.choice([17, 33, 100, 400]))]
        if rng.random() < 0.5:
            tokens = [3] * len(tokens)  # pages that others have, too
        sources = (PageSource("x", "tcp://127.0.0.1:1", rng.choice([1, 99])),) if rng.random() < 0.3 else ()
        packed = bytes(pack_tokens(tokens))
        message: Any
        if member.role == "prefill":
            message = Prefill(name.request, 1, _ROOT, packed, sources)
        else:
            message = Decode(
                name.request, 1, _ROOT, packed, len(tokens), rng.choice([1, 40]), _greedy(),
                fetch=rng.choice([0, 1, len(tokens) // 16, 99]), prefilled_remotely=rng.random() < 0.5, sources=sources,
            )  # fmt: skip
        member.attempts.add(name)
        order(case, self._router, member, message)
        return name.request

    def _heard(self, incarnation: str, message: Mapping[str, Any]) -> None:
        for delta in message.get("deltas", ()):
            self._tokens.setdefault(delta["request"], []).extend(delta["tokens"])
            if delta.get("finish"):
                self._ended.add(delta["request"])
        if message["type"] in ("Prefilled", "AttemptFailed", "Refused"):
            self._ended.add(message["request"])

    def _check_tokens(self, case: Case, member: Member) -> None:
        """Have a prompt of other pages computed; its tokens never change."""
        self._number += 1
        name = AttemptName(f"w-{self._number}", 1)
        member.attempts.add(name)
        packed = bytes(pack_tokens(_PROMPT))
        order(
            case, self._router, member, Decode(name.request, 1, _OTHER_ROOT, packed, len(_PROMPT), _TOKENS, _greedy())
        )
        self._until(case, lambda: name.request in self._ended, links.PATIENCE, "a good request does not end")
        tokens = self._tokens[name.request]
        self._expected = self._expected or tokens
        assert len(tokens) == _TOKENS, f"{len(tokens)} tokens instead of {_TOKENS}"
        assert tokens == self._expected, f"{tokens} instead of {self._expected}"
        self._end(case, member)

    def _end(self, case: Case, member: Member) -> None:
        """List no attempt of a worker any more, and wait until it has dropped all of them."""
        member.attempts.clear()
        self._last = member.sequence
        self._until(case, lambda: self._rests(member), links.PATIENCE, f"{member.name} does not come to rest")

    def _rests(self, member: Member) -> bool:
        """Whether a worker has ended all work, every lease at a store, and every use of a device page."""
        if member.incarnation not in self._router.members:
            return False
        load = member.beat.get("load", {})
        free = load.get("pages_free", 0) == load.get("pages_total", 1)
        listed = [worker.listed for worker in self._store.workers if worker.name == member.name and worker.attached]
        return member.idle_since(self._last) and free and bool(listed) and listed[-1] == ()

    # --- the store ---------------------------------------------------------------------------------------------------

    def _until(self, case: Case, condition: Any, seconds: float, what: str) -> None:
        """Go on without a lie until that is so. Raises AssertionError when it is not in time."""
        until = time.monotonic() + seconds
        for worker in self._store.workers:
            worker.listed = None  # it must say again what it cares about
        while not condition():
            assert time.monotonic() < until, f"{what}: {self._router.members} {self._store.workers}"
            self._turn(case, 0.0)

    def _turn(self, case: Case, lies: float) -> None:
        """Hear what came in, and answer it; with that share of lies, said without a question as well."""
        self._router.pump(_AT_ONCE)
        rng = case.rng
        for worker, call in self._store.calls():
            if worker.connection.fileno() < 0:
                continue
            if not worker.attached:
                (self._store.attach_falsely if rng.random() < lies / 2 else self._store.attach)(case, worker)
            elif rng.random() < lies:
                self._lie(rng, case, worker, call)
            else:
                self._store.answer(case, worker, call)
        for worker in list(self._store.workers) if rng.random() < lies / 4 else ():
            self._lie(rng, case, worker, None)

    def _lie(self, rng: random.Random, case: Case, worker: Worker, call: Any) -> None:
        match rng.randrange(8):
            case 0:
                pass  # no answer
            case 1:
                self._store.hang_up(worker)
            case 2:
                self._store.answer(case, worker, call)
                self._store.answer(case, worker, call)
            case _:
                self._store.answer_falsely(case, worker, call)


def _greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)
