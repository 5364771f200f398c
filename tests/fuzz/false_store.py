"""A store that a fuzzer is: workers attach to it, and it answers as it likes.

An honest answer is right in form: what it says of bytes is whatever lies in the arena.
"""

import os
import random
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton import store_protocol as protocol
from baton.messages import KEY_BYTES, Peer, TierSpeed
from baton.unix import MAX_PACKET_BYTES
from kvstore.arena.memory import Arena
from tests.fuzz import values, wire_messages
from tests.fuzz.case import Case

_SLOTS = 64
_SPEED = TierSpeed("remote", 0.001, 1e9)


@dataclass(eq=False)
class Worker:
    connection: socket.socket
    name: str = ""  # of its process; empty: it has not said Attach
    attached: bool = False
    leases: dict[int, int] = field(default_factory=dict[int, int])  # pages of those that it has not ended
    listed: tuple[int, ...] | None = None  # leases in its last heartbeat


class FalseStore:
    """One listener with all its connections. Not thread-safe."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(b"\0" + address.encode())
        self._listener.listen(16)
        self.page_bytes = 0
        self._arena: Arena | None = None
        self._peer = Peer("store", "fuzz", "victims", "", os.getpid())
        self.workers: list[Worker] = []
        self._decoder = msgspec.msgpack.Decoder(protocol.StoreCall)

    # --- in -----------------------------------------------------------------------------------------------------------

    def calls(self) -> list[tuple[Worker, Any]]:
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self.workers.append(Worker(connection))
        heard: list[tuple[Worker, Any]] = []
        for worker in list(self.workers):
            with suppress(BlockingIOError):
                while packet := self._packet(worker):
                    call = self._decoder.decode(packet)
                    self._note(worker, call)
                    heard.append((worker, call))
                self.hang_up(worker)
        return heard

    def _packet(self, worker: Worker) -> bytes:
        """The next packet; empty when the worker has gone. Raises BlockingIOError."""
        try:
            return worker.connection.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            return b""

    def _note(self, worker: Worker, call: Any) -> None:
        match call:
            case protocol.Attach(peer=peer, page_bytes=page_bytes):
                worker.name, self.page_bytes = peer.name, page_bytes
            case protocol.Reserve(lease=lease, keys=keys) | protocol.Acquire(lease=lease, keys=keys):
                worker.leases[lease] = len(keys) // KEY_BYTES
            case protocol.EndLease(lease=lease):
                worker.leases.pop(lease, None)
            case protocol.LeaseHeartbeat(leases=leases):
                worker.listed = leases
            case _:
                pass

    def hang_up(self, worker: Worker) -> None:
        worker.connection.close()
        if worker in self.workers:
            self.workers.remove(worker)

    # --- out ----------------------------------------------------------------------------------------------------------

    def send(self, worker: Worker, raw: bytes, descriptors: int = 0) -> None:
        """Send a packet, with so many descriptors of no use. One that the worker does not read is dropped."""
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors)]
        try:
            socket.send_fds(worker.connection, [raw], opened)
        except BlockingIOError:
            pass
        except OSError:
            self.hang_up(worker)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def attach(self, case: Case, worker: Worker) -> None:
        """Hand over the arena, filled with anything."""
        if self._arena is None:
            self._arena = Arena.create(_SLOTS * self.page_bytes)
            self._arena.divide(self.page_bytes)
        for slot in range(0, _SLOTS, 7):
            self._arena.slot(slot)[:] = case.rng.randbytes(self.page_bytes)
        peer = msgspec.structs.replace(self._peer, incarnation=f"fuzz-store.{secrets.token_hex(8)}")
        raw = msgspec.msgpack.encode(protocol.Attached(peer, _SLOTS, self.page_bytes))
        with suppress(OSError):
            socket.send_fds(worker.connection, [raw], [self._arena.fd])
        worker.attached = True

    def attach_falsely(self, case: Case, worker: Worker) -> None:
        """Hand over what is no arena, or anything else."""
        rng = case.rng
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        try:
            os.truncate(fd, rng.choice([0, 1, self.page_bytes, self.page_bytes * 9, 2**62]))
            slots, size = rng.choice([0, 1, 9, 2**40]), rng.choice([0, 1, self.page_bytes, self.page_bytes, 2**40])
            raw = msgspec.msgpack.encode(
                protocol.Attached(msgspec.structs.replace(self._peer, incarnation="x"), slots, size)
            )
            if rng.random() < 0.3:
                raw = wire_messages.encoded(rng, protocol.StoreReply, {})
            with suppress(OSError):
                socket.send_fds(worker.connection, [case.sending(raw)], [fd] * rng.choice([0, 1, 1, 2, 30]))
        finally:
            os.close(fd)

    def answer(self, case: Case, worker: Worker, call: Any) -> None:
        """Answer a call as a store does: with what is asked for, or without."""
        for reply in self._honest(case.rng, call):
            self.send(worker, case.sending(msgspec.msgpack.encode(reply)))

    def answer_falsely(self, case: Case, worker: Worker, call: Any = None) -> None:
        """Say anything, most often about one of the worker's leases."""
        rng = case.rng
        for _ in range(rng.choice([1, 1, 3, 20])):
            raw = wire_messages.encoded(rng, protocol.StoreReply, self._hints(rng, worker, call))
            if rng.random() < 0.02:
                raw = values.data(rng, 4_000) or b"\0"
            self.send(worker, case.sending(raw), rng.choice([0, 0, 0, 0, 1, 4]))

    def _honest(self, rng: random.Random, call: Any) -> list[protocol.StoreReply]:
        slot = rng.randrange(_SLOTS)
        match call:
            case protocol.Reserve(lease=lease, keys=keys):
                count = len(keys) // KEY_BYTES
                if count > _SLOTS or rng.random() < 0.1:
                    return [protocol.NotReserved(lease, rng.choice(["full", "orphan", "quota", "behind"]))]
                slots = rng.sample(range(_SLOTS), count)
                return [protocol.Reserved(lease, tuple(None if rng.random() < 0.1 else each for each in slots))]
            case protocol.Seal(lease=lease, first=first, checksums=checksums):
                return [protocol.Sealed(lease, first, len(checksums))]
            case protocol.Acquire(lease=lease, keys=keys, wait=wait):
                count = len(keys) // KEY_BYTES
                have = rng.choice([0, count // 2, count, count])
                ready = protocol.PagesReady(lease, tuple(protocol.LeasedPage(index, slot, 0) for index in range(have)))
                if have == count:
                    return [ready]
                below = rng.random() < 0.5 and not wait
                hits = protocol.LowerTierHits(lease, have, (protocol.TierPages(_SPEED, count - have),))
                return [*([ready] if have else []), hits if below else protocol.PagesUnavailable(lease, have)]
            case protocol.Promote(lease=lease, until=until):
                return [protocol.PagesUnavailable(lease, max(0, until - 1))]
            case protocol.Release(lease=lease, indices=indices):
                return [protocol.Released(lease, indices, tuple(rng.random() < 0.9 for _ in indices))]
            case protocol.LeaseHeartbeat(leases=leases):
                return [protocol.StoreHeartbeat(leases)]
            case _:
                return []

    def _hints(self, rng: random.Random, worker: Worker, call: Any) -> dict[str, Any]:
        lease = getattr(call, "lease", None) or rng.choice([*worker.leases, 1])
        count = worker.leases.get(lease, 3)
        some = tuple(range(rng.randrange(count + 2)))
        slots = tuple(rng.choice([each, each, None, _SLOTS, -1]) for each in some)
        pages = tuple(protocol.LeasedPage(each, rng.choice([0, each, _SLOTS]), rng.choice([0, 2**64])) for each in some)
        return {
            "lease": [lease], "slots": [slots, tuple(range(count)), tuple(range(count))], "first": [0, 0, 1, count],
            "count": [1, count, count + 1, 2**62], "pages": [pages, pages, count, 0], "index": [0, count - 1, count],
            "indices": [some, some, (-1,), (2**62,)], "held": [(True,) * len(some), (True,), (False,) * len(some)],
            "runs": [(protocol.TierPages(_SPEED, count),), (protocol.TierPages(_SPEED, 2**62),), ()],
            "slot": [0, _SLOTS - 1, _SLOTS],
            "leases": [tuple(worker.leases), ()],
        }  # fmt: skip
