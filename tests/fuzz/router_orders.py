"""A router that orders anything of workers and a store: mutated messages of `ToDecode`, `ToPrefill` and `ToStore`.

After each case the process must read on, drop all work that the router does not list, and say so in its heartbeats. A
store keeps pins until the router ends them.
"""

import random
from pathlib import Path
from typing import Any

from baton import messages as msg
from baton.wire import ClusterKeys
from kvstore.keys import pack_tokens
from tests.fuzz import links, wire_messages
from tests.fuzz.case import Case
from tests.fuzz.false_router import FalseRouter, Member, order

_HEARS: dict[str, Any] = {"decode": msg.ToDecode, "prefill": msg.ToPrefill, "store": msg.ToStore}


class RouterOrders:
    threads = 1

    def __init__(self, endpoint: str, keys: str, processes: int) -> None:
        self._router = FalseRouter(endpoint, ClusterKeys.read_file(Path(keys)), processes)

    def start(self) -> None:
        self._router.joined()

    def run(self, case: Case) -> str:
        router, rng = self._router, case.rng
        member = rng.choice(router.by_name)
        for _ in range(rng.choice([1, 3, 10])):
            self._order(case, member)
            if rng.random() < 0.3:
                router.pump(0.02)
        last = member.sequence
        router.until(lambda: self._rests(member, last), links.PATIENCE, f"{member.name} does not come to rest")
        return member.role

    def _order(self, case: Case, member: Member) -> None:
        """Send one message, valid or not."""
        rng = case.rng
        if member.role in ("decode", "prefill") and rng.random() < 0.5:
            kind = msg.Decode if member.role == "decode" else msg.Prefill
            order(case, self._router, member, wire_messages.valid(rng, kind, self._hints(rng)))
        else:
            envelope = (self._router.me, member.incarnation, self._router.next(member))
            raw = wire_messages.encoded(rng, _HEARS[member.role], self._hints(rng), envelope)
            self._router.send(member, case.sending(raw))

    def _hints(self, rng: random.Random) -> dict[str, Any]:
        tokens = [rng.randrange(1_000) for _ in range(rng.choice([1, 2, 16, 17, 33, 100]))]
        packed = bytes(pack_tokens(tokens))
        sampling = msg.SamplingParams(temperature=rng.choice([0.0, 1.0]), logprobs=rng.choice([None, 3]))
        return {
            "request": [f"r-{rng.randrange(6)}"], "attempt": [1, 1, 2], "root": [b"r" * msg.KEY_BYTES],
            "tokens": [packed, packed, packed, packed[:-1], b"", packed + b"\xff" * 4],
            "prompt": [len(tokens), len(tokens), 1, len(tokens) + 1, 2**40], "max_tokens": [1, 4, 20, 2**40],
            "fetch": [0, 0, 1, len(tokens) // 16, 2**30], "sampling": [sampling, sampling],
            "sources": [(), ()], "deadline_ms": [None, 1, 10_000], "position": [0, 1, len(tokens), 2**40],
            "mark": ["ab"], "steps": [1, 10], "pin": ["p", "q"], "keys": [rng.randbytes(msg.KEY_BYTES * 3), b"k" * 5],
            "protocol": [msg.PROTOCOL_VERSION], "heartbeat_ms": [100],
            "heartbeat_timeout_ms": [10_000], "attempts": [()],
            "kv_compression": [
                None, *(msg.KvCompression(kind, 20, 4, 40) for kind in ("window", "snapkv", "h2o"))
            ],
        }  # fmt: skip

    def _rests(self, member: Member, last: int) -> bool:
        """Whether a process has read all up to that message, and has no work; or is another incarnation now."""
        if member.incarnation not in self._router.members:
            return self._router.complete
        for pin in member.beat.get("attempts", ()) if member.role == "store" else ():
            self._router.say(member, msg.UnpinPages(pin["request"]))
        return member.idle_since(last)
