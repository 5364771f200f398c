"""The router's socket for workers and stores: peers with the cluster's keys that say anything under names of their own.

A peer joins as a store of another node, or as a worker that can hold no request. The router places nothing on it. What
it says of requests of other workers must change nothing. A peer without keys sends raw bytes instead (`plain_ports`).
"""

import random
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton.client import Client
from baton.messages import Hello, Message, ModelCard, Namespace, Peer, Role, ToRouter
from baton.wire import ClusterKeys
from tests.fuzz import links, values, wire_messages
from tests.fuzz.case import Case
from tests.fuzz.links import RouterLink

_LOOK = 0.5  # seconds between two looks at the requests that there are


class RouterPeer:
    threads = 3

    def __init__(self, endpoint: str, keys: str, card: str, operator: str, incarnations: dict[str, int]) -> None:
        """`keys` is the file with the cluster's, `card` the model's, as JSON. `incarnations` are those of live
        processes, with their pids; `operator` tells the names of requests."""
        self._endpoint, self._keys = endpoint, ClusterKeys.read_file(Path(keys))
        self._card = msgspec.json.decode(card, type=ModelCard)
        self._client = Client(operator=operator)
        self._known: dict[str, list[Any]] = {
            "request": ["x"], "incarnation": [*incarnations, "x"], "pid": [*incarnations.values(), 1],
        }  # fmt: skip
        self._look_at = 0.0

    def run(self, case: Case) -> str:
        rng = case.rng
        name = f"fuzz-{rng.randrange(20)}"
        me = f"{name}.{secrets.token_hex(8)}"
        with (
            links.opened(zmq.DEALER, self._endpoint, self._keys, me.encode()) as socket,
            links.opened(zmq.DEALER, self._endpoint, self._keys, f"{me}/heart".encode()) as heart,
        ):
            link = RouterLink(socket, me, heart)
            if rng.random() < 0.1:
                self._garbage(case, link)
                return "garbage"
            hello = self._hello(rng, name, me)
            answer = self._says_hello(case, link, hello)
            self._talk(case, link)
            # Whatever that was, the router still answers.
            self._says_hello(case, link, hello)
            return f"{hello.peer.role} {answer}"

    def _hello(self, rng: random.Random, name: str, me: str) -> Hello:
        """Words that let it in, or that almost do."""
        roles: list[Role] = ["store", "decode", "prefill"]
        role = rng.choice(roles)
        peer = Peer(role, name, f"node-{name}", me, rng.choice([0, 1, 2**22, 2**63 - 1]))
        card = msgspec.structs.replace(self._card, pool_pages=0) if role != "store" else None
        hello = Hello(peer, model=card)
        match rng.randrange(6):
            case 0:  # another namespace
                fields: dict[str, Any] = {
                    "numerics": f"test-{rng.randrange(99)}",
                    "kv_dtype": values.STRINGS[rng.randrange(9)],
                }
                other = msgspec.structs.replace(self._card.namespace, **fields)
                return msgspec.structs.replace(hello, model=msgspec.structs.replace(self._card, namespace=other))
            case 1:  # another protocol, or another size of pages
                odd: Any = wire_messages.valid(rng, Namespace, {})
                card = msgspec.structs.replace(self._card, namespace=odd, pool_pages=0)
                return msgspec.structs.replace(hello, protocol=rng.choice([0, 1, 99, 2**40]), model=card)
            case 2:  # endpoints that are none
                odd = [rng.choice([*values.STRINGS[:12], "tcp://127.0.0.1:1", "tcp://[::", "x"]) for _ in range(4)]
                texts = [text.encode("utf-8", "replace").decode() for text in odd]
                return Hello(peer, model=card, events=texts[0], replay=texts[1], metrics=texts[2], data=texts[3])
            case _:
                return hello

    def _says_hello(self, case: Case, link: RouterLink, hello: Hello) -> str:
        answer = link.ask(
            case,
            lambda: wire_messages.sealed(link.me, "", link.next_sequence(), hello),
            lambda message: message["type"] in ("Welcome", "Rejected"),
        )
        return answer["type"]

    def _look(self) -> None:
        """Learn the names of requests that run now."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK
            names = [each.name for each in self._client.requests(20, timeout=links.PATIENCE)]
            self._known = {**self._known, "request": [*names, "x"]}

    def _talk(self, case: Case, link: RouterLink) -> None:
        """Say anything that a process may say, about itself and about others."""
        rng = case.rng
        self._look()
        list(link.receive(0.0))
        hints: dict[str, Any] = {**self._known, "attempt": [1, 1, 2, 3]}
        for _ in range(rng.choice([1, 5, 40])):
            addressee = link.router if rng.random() < 0.95 else rng.choice(["", "x", link.me])
            sender = link.me if rng.random() < 0.95 else rng.choice(["", "x", *self._known["incarnation"]])
            raw = wire_messages.encoded(rng, ToRouter, hints, (sender, addressee, link.next_sequence()))
            if not _takes_another_name(raw, link.me):
                link.send(case, raw, heart=rng.random() < 0.2)
        list(link.receive(0.0))

    def _garbage(self, case: Case, link: RouterLink) -> None:
        rng = case.rng
        for _ in range(rng.choice([1, 10, 100])):
            frames = [values.data(rng)[: links.PART] for _ in range(rng.choice([1, 1, 2, 3, 30]))]
            link.send(case, *frames)


def _takes_another_name(raw: bytes, me: str) -> bool:
    """Whether this is a Hello of a process that may replace a live one: with the keys it would have the right to."""
    try:
        message: Message = msgspec.msgpack.decode(raw)[3]
        return message["type"] == "Hello" and message["peer"]["incarnation"] == me  # type: ignore[index]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False
