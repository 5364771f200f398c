"""The sockets of stores and workers for pages and for KV events: stores and followers that ask for anything.

- A store's page server: requests of stores that have the cluster's keys.
- Replay sockets: questions for batches and snapshots, read, not read, or left.
- Publishers of KV events: subscriptions of any bytes.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from baton.messages import KEY_BYTES, SnapshotRequest
from baton.peer_protocol import FetchHeartbeat, PageRequest
from baton.wire import ClusterKeys
from tests.fuzz import links, values, wire_messages
from tests.fuzz.case import Case
from tests.fuzz.links import RouterLink

_EMPTY_END = (-1).to_bytes(8, "big", signed=True)


class StorePages:
    """Stores and followers of other nodes."""

    threads = 3

    def __init__(
        self, stores: Mapping[str, str], replays: Sequence[str], events: Sequence[str], page_bytes: int, keys: str
    ) -> None:
        """`stores` are page servers by incarnation; all others are endpoints."""
        self._stores, self._replays, self._events = dict(stores), list(replays), list(events)
        self._page_bytes, self._keys = page_bytes, ClusterKeys.read_file(Path(keys))

    def run(self, case: Case) -> str:
        match case.rng.randrange(6):
            case 0 | 1 | 2:
                return self._requests(case)
            case 3 | 4:
                return self._questions(case)
            case _:
                return self._subscribes(case)

    def _requests(self, case: Case) -> str:
        """Ask a store for pages, in any order; at the end it must still answer a heartbeat."""
        rng = case.rng
        store = rng.choice(list(self._stores))
        me = f"fuzz-{secrets.token_hex(8)}"
        with links.opened(zmq.DEALER, self._stores[store], self._keys, me.encode()) as socket:
            link = RouterLink(socket, me)
            keys = rng.randbytes(KEY_BYTES * rng.choice([1, 4, 100]))
            hints = {
                "fetch": [1, 1, 2], "keys": [keys, keys[:-1]], "page_bytes": [self._page_bytes], "index": [0, 1, 99],
                "number": [1, 2], "fetches": [(), (1,), (1, 2, 99)], "credit": [0, 1, 100, 2**40],
            }  # fmt: skip
            for _ in range(rng.choice([1, 5, 50])):
                sender = me if rng.random() < 0.95 else rng.choice(["", store, "x"])
                addressee = store if rng.random() < 0.95 else rng.choice(["", me])
                envelope = (sender, addressee, link.next_sequence())
                link.send(case, wire_messages.encoded(rng, PageRequest, hints, envelope))
            if rng.random() < 0.1:
                link.send(case, *(values.data(rng)[: links.PART] for _ in range(rng.randrange(1, 9))))
            number = rng.randrange(2**40)
            heartbeat = FetchHeartbeat(number, ())
            link.ask(
                case,
                lambda: wire_messages.sealed(me, store, link.next_sequence(), heartbeat),
                lambda message: message["type"] == "FetchStatus" and message["number"] == number,
            )
        return "requests"

    def _questions(self, case: Case) -> str:
        """Ask a publisher for batches or snapshots; it must still answer a good question."""
        rng = case.rng
        endpoint = rng.choice(self._replays)
        with links.opened(zmq.DEALER, endpoint, self._keys) as socket:
            for _ in range(rng.choice([1, 5, 60])):
                match rng.randrange(5):
                    case 0:
                        frames = [b"", min(rng.choice(values.INTEGERS[:20]), 2**63).__abs__().to_bytes(16, "big")[-8:]]
                    case 1:
                        frames = [b"", wire_messages.encoded(rng, SnapshotRequest, {})[: links.PART]]
                    case 2:
                        frames = [values.data(rng, 900)[: links.PART] for _ in range(rng.choice([1, 2, 3, 20]))]
                    case 3:
                        frames = [b"", b"\0" * 8]
                    case _:
                        frames = [b"", values.data(rng, 900)[: links.PART]]
                with suppress(zmq.Again):
                    socket.send_multipart([case.sending(frame) for frame in frames], zmq.NOBLOCK)
            if rng.random() < 0.4:
                return "questions left"
        with links.opened(zmq.DEALER, endpoint, self._keys) as socket:
            until = time.monotonic() + links.PATIENCE
            while time.monotonic() < until:
                with suppress(zmq.Again):
                    socket.send_multipart([b"", (2**62).to_bytes(8, "big")])  # none is so late: only the end comes
                if socket.poll(1_000) and socket.recv_multipart()[1:2] == [_EMPTY_END]:
                    return "questions"
            raise AssertionError(f"the publisher has not answered within {links.PATIENCE} s")

    def _subscribes(self, case: Case) -> str:
        """Subscribe to anything, and go."""
        rng = case.rng
        with links.opened(zmq.SUB, rng.choice(self._events), self._keys) as socket:
            for _ in range(rng.choice([1, 10, 200])):
                change = rng.choice([zmq.SUBSCRIBE, zmq.SUBSCRIBE, zmq.UNSUBSCRIBE])
                socket.setsockopt(change, case.sending(values.data(rng, 400)))
            socket.poll(rng.choice([1, 50]))
        return "subscribes"
