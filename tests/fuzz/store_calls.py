"""The store's Unix socket: processes of the same user that attach and call anything, and hand over descriptors.

Every chain is of keys of its own, so no page that a worker uses is touched. At the end of a case the process takes
back what it reserved, as a worker does that leaves.
"""

import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from baton.messages import KEY_BYTES, Namespace, PageSource, Peer
from baton.peer_protocol import FetchedPages, PageReply, SentPage
from baton.store_protocol import Attach, LeaseHeartbeat, StoreCall
from baton.unix import MAX_PACKET_BYTES
from baton.wire import ClusterKeys
from tests.fuzz import links, values, wire_messages
from tests.fuzz.case import Case

_PATIENCE = 30.0  # seconds in which a live store must answer
_CHAINS = 64  # of up to 40 keys, that cases share
_KEYS = 40
_MAGIC_FD = 7


class StoreCalls:
    """Workers that hold to nothing, and the stores of other nodes that they name as sources."""

    threads = 3

    def __init__(self, address: str, namespace: str, page_bytes: int, keys: str, node: str) -> None:
        self._address = b"\0" + address.encode()
        self._namespace = msgspec.json.decode(namespace, type=Namespace)
        self._page_bytes, self._keys, self._node = page_bytes, ClusterKeys.read_file(Path(keys)), node
        drawn = random.Random(1)
        self._chains = [b"".join(drawn.randbytes(KEY_BYTES) for _ in range(_KEYS)) for _ in range(_CHAINS)]

    def run(self, case: Case) -> str:
        match case.rng.randrange(10):
            case 0:
                kind = self._garbage(case)
            case 1:
                kind = self._going_away(case)
            case 2 | 3:
                kind = self._brought(case)
            case _:
                kind = self._calls(case)
        self._answers(case)
        return kind

    # --- what it does ------------------------------------------------------------------------------------------------

    def _calls(self, case: Case) -> str:
        """Calls in any order, most of them with a meaning."""
        rng = case.rng
        attach = self._attach(f"fuzz-{secrets.token_hex(6)}")
        with self._connected() as connection:
            self._send(case, connection, msgspec.msgpack.encode(attach))
            for _ in range(rng.choice([3, 10, 60])):
                raw = wire_messages.encoded(rng, StoreCall, self._hints(rng))
                descriptors = [_MAGIC_FD] if rng.random() < 0.05 else []
                if not self._send(case, connection, raw, descriptors):
                    break
                if rng.random() < 0.2:
                    _read(connection, 0.01)
            _read(connection, 0.02)
        self._take_back(case, attach)
        return "calls"

    def _brought(self, case: Case) -> str:
        """An Acquire whose pages are to come from a store that sends anything but these."""
        rng = case.rng
        router, endpoint = links.listening(zmq.ROUTER, self._keys)
        store = f"fuzz-store-{secrets.token_hex(6)}"
        chain = b"".join(rng.randbytes(KEY_BYTES) for _ in range(rng.choice([1, 3, 20])))
        count = len(chain) // KEY_BYTES
        attach = self._attach(f"fuzz-{secrets.token_hex(6)}")
        requests = 0
        try:
            with self._connected() as connection:
                self._send(case, connection, msgspec.msgpack.encode(attach))
                sources = (PageSource(store, endpoint, rng.choice([count, count, 2**40])),)
                call = wire_messages.valid(rng, _kind("Acquire"), {"keys": [chain], "sources": [sources]})
                call = msgspec.structs.replace(
                    call, keys=chain, sources=sources, wait=True, parent=b"", lease=1, partial=rng.random() < 0.2
                )
                self._send(case, connection, msgspec.msgpack.encode(call))
                until = time.monotonic() + rng.choice([0.3, 1.0])
                while time.monotonic() < until:
                    if router.poll(50):
                        identity, body = router.recv_multipart()
                        requests += 1
                        self._send_pages(case, router, identity, body, store, count)
                _read(connection, 0.02)
            self._take_back(case, attach)
        finally:
            router.close(0)
        return "brought" if requests else "not asked"

    def _send_pages(self, case: Case, router: Any, identity: bytes, body: bytes, store: str, count: int) -> None:
        """Answer a request for pages with mutated replies and frames of any size."""
        rng = case.rng
        request = msgspec.msgpack.decode(body)
        fetch = request[3].get("fetch", 1)
        for sequence in range(rng.randrange(1, 6)):
            hints: dict[str, Any] = {
                "fetch": [fetch],
                "number": [request[3].get("number", 0)],
                "index": [0, count - 1, count],
            }
            pages = tuple(SentPage(rng.randrange(count + 2), rng.randrange(2**64)) for _ in range(rng.randrange(1, 5)))
            envelope = (store, identity.decode("utf-8", "replace"), sequence + 1)
            if rng.random() < 0.5:
                raw = wire_messages.encoded(rng, PageReply, hints | {"pages": [pages]}, envelope)
            else:
                raw = wire_messages.sealed(*envelope, FetchedPages(fetch, pages))
            size = rng.choice([self._page_bytes, self._page_bytes, 0, 1, self._page_bytes + 1, self._page_bytes * 3])
            frames = [b"\x07" * size] * rng.choice([len(pages), len(pages), 0, 1, 9])
            with suppress(zmq.ZMQError):
                router.send_multipart([identity, case.sending(raw), *frames], zmq.NOBLOCK)

    def _garbage(self, case: Case) -> str:
        """Packets that are no calls, with and without having attached."""
        rng = case.rng
        attach = self._attach(f"fuzz-{secrets.token_hex(6)}")
        with self._connected() as connection:
            if rng.random() < 0.5:
                self._send(case, connection, msgspec.msgpack.encode(attach))
            raw = rng.choice([values.data(rng) or b"\0", b"\0" * (MAX_PACKET_BYTES + 1), b"\x91" * 5_000])
            self._send(case, connection, raw, [_MAGIC_FD] * rng.choice([0, 1, 3, 30]))
            _until_closed(connection)
        self._take_back(case, attach)
        return "garbage"

    def _going_away(self, case: Case) -> str:
        """A process that closes at once, or attaches again and again under one name, or under another's namespace."""
        rng = case.rng
        attach = self._attach(f"fuzz-{secrets.token_hex(6)}")
        odd: list[Attach] = [
            attach,
            msgspec.structs.replace(attach, protocol=rng.choice([0, 1, 99])),
            msgspec.structs.replace(attach, page_bytes=rng.choice([1, 2**40, 2**63 - 1])),
            msgspec.structs.replace(attach, namespace=msgspec.structs.replace(self._namespace, kv_dtype="x" * 900)),
        ]
        for _ in range(rng.randrange(1, 5)):
            with self._connected() as connection:
                self._send(case, connection, msgspec.msgpack.encode(rng.choice(odd)))
                if rng.random() < 0.5:
                    _read(connection, 0.05)
        self._take_back(case, attach)
        return "gone"

    # --- the honest end of a case ------------------------------------------------------------------------------------

    def _take_back(self, case: Case, attach: Attach) -> None:
        """Attach again under the same name and list no lease: nothing will be written any more."""
        with self._connected() as connection:
            self._send(case, connection, msgspec.msgpack.encode(attach))
            self._send(case, connection, msgspec.msgpack.encode(LeaseHeartbeat()))
            assert self._attached(connection), "the store does not attach a worker that comes back"

    def _answers(self, case: Case) -> None:
        with self._connected() as connection:
            self._send(case, connection, msgspec.msgpack.encode(self._attach(f"fuzz-{secrets.token_hex(6)}")))
            assert self._attached(connection), "the store attaches no process any more"

    def _attached(self, connection: socket.socket) -> bool:
        connection.settimeout(_PATIENCE)
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, 4_096, 4)
        except OSError:
            return False
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(packet) and msgspec.msgpack.decode(packet)["type"] == "Attached"

    # --- calls -------------------------------------------------------------------------------------------------------

    def _attach(self, name: str) -> Attach:
        return Attach(Peer("prefill", "fuzz", self._node, name, os.getpid()), self._namespace, self._page_bytes)

    def _hints(self, rng: random.Random) -> dict[str, Sequence[Any]]:
        chain = rng.choice(self._chains)
        cut = KEY_BYTES * rng.randrange(_KEYS)
        return {
            "lease": [1, 1, 2, 3], "keys": [chain, chain[:cut], chain[cut:], chain[:KEY_BYTES], chain + chain],
            "parent": [b"", b"", chain[cut : cut + KEY_BYTES], b"k" * 15], "first": [0, 0, 1, cut // KEY_BYTES],
            "checksums": [tuple(range(rng.randrange(_KEYS)))], "until": [0, 1, 5, _KEYS], "prompt": [0, 0, 0, 1],
            "indices": [(), (0,), (0, 0), tuple(range(rng.randrange(_KEYS))), (-1,), (2**63 - 1,)],
            "leases": [(), (1,), (1, 2, 3)], "index": [0, 1, _KEYS], "incarnation": [f"fuzz-{rng.random()}"],
            "sources": [()],
        }  # fmt: skip

    def _connected(self) -> socket.socket:
        until = time.monotonic() + _PATIENCE
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.settimeout(_PATIENCE)
                connection.connect(self._address)
            except OSError:  # the backlog is full for a moment
                connection.close()
                if time.monotonic() > until:
                    raise AssertionError("the store takes no connection") from None
                time.sleep(0.01)
            else:
                return connection

    def _send(self, case: Case, connection: socket.socket, raw: bytes, descriptors: Sequence[int] = ()) -> bool:
        """Send a packet. False when the store has closed, as it may at any call that is none."""
        case.sending(raw)
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in descriptors]
        connection.settimeout(_PATIENCE)  # a read before may have had a shorter one
        try:
            if opened:
                socket.send_fds(connection, [raw], opened)
            else:
                connection.send(raw)
        except TimeoutError:
            raise AssertionError(f"the store has read nothing for {_PATIENCE} s") from None
        except OSError:
            return False
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return True


def _kind(name: str) -> type[Any]:
    return next(kind for kind in wire_messages.kinds(StoreCall) if kind.__name__ == name)


def _read(connection: socket.socket, seconds: float) -> None:
    """Take what has come; the arena that comes with the first answer is closed again."""
    connection.settimeout(seconds)
    with suppress(OSError):
        while True:
            packet, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if not packet:
                return


def _until_closed(connection: socket.socket) -> None:
    """Read until the store has closed the connection, which it must after what is no call."""
    connection.settimeout(_PATIENCE)
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 4)
        except TimeoutError:
            raise AssertionError(f"the store keeps a connection that speaks garbage for {_PATIENCE} s") from None
        except OSError:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if not packet:
            return
