"""How fast pages go from one store to another, against bare ZMQ over TCP. Both are encrypted, as every link is.

    python -m bench.peer_speed [--quick]

Two processes on this machine talk over loopback. One reads a memory of 256 MiB page by page, the other writes into one
of its own; both have touched it before. They move `ROUND` bytes in one of three ways, then in the next, and so on: a
machine that others use, too, is slow to all of them alike. The first turn is not counted.

`store to store`  two page transports (`kvstore.transport.zmq_transport`) with a small stand-in for the stores' states
                  behind each, on its process's main thread: credit for `WINDOW` bytes, granted as pages land, `STEP` at
                  a time. Every page is sent from where it lies, copied to its slot, and its checksum compared with its
                  sender's.
`bare`            the limit: a ZMQ socket at each end, a frame per page, sent without copying; the receiver copies each
                  frame to its place. No messages, no checksums, no credit, one thread per process besides ZMQ's.
`bare, left in ZMQ's buffers`  the same without the receiver's copy, for comparison: such pages are unreadable.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Self

import zmq

from baton.messages import PageSource, Peer
from baton.peer_protocol import FetchCredit, FetchPages, SentPage
from baton.wire import ClusterKeys, use_keys
from baton.wire.sockets import bind, connect
from bench import report
from kvstore.checksum import page_checksum
from kvstore.transport.interface import AskPeer, ExpectPages, PagesLanded, PeerRequested, SendPages
from kvstore.transport.zmq_transport import ZmqTransport

KV_HEADS = 8  # of a page: each is hashed on its own
PAGES = (128 * 1024, 2**20)  # bytes
MEMORY = 2**28
ROUND = 2**28
WINDOW = 2**26  # of credit, granted anew
STEP = 2**23  # in steps of so much
TARGET = 0.8
_QUEUE = 2**26  # bytes that the bare sender may be ahead of its reader

_STORES, _BARE, _UNREAD = "store to store", "bare", "bare, left in ZMQ's buffers"
_KINDS = (_BARE, _STORES, _UNREAD)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns: a look, not a measurement")
    asked = parser.parse_args(argv)
    report.say(report.machine())
    for result in measure(7 if asked.quick else 31):
        report.emit(result)
    return 0


def measure(turns: int) -> list[report.Result]:
    """Medians over that many turns of each kind, for each size of page."""
    results: list[report.Result] = []
    for page in PAGES:
        taken = _turns(page, turns)
        ours, limit, unread = (
            report.median_of("peer_speed", f"{kind}, pages of {page // 1024} KiB", "GB/s", taken[kind])
            for kind in (_STORES, _BARE, _UNREAD)
        )
        ours = replace(ours, limit=limit.value, ratio=ours.value / limit.value)
        results += [report.judged(ours, TARGET, "high"), limit, unread]
    return results


def _turns(page: int, turns: int) -> dict[str, list[float]]:
    """GB/s of each turn, by kind."""
    spawn = multiprocessing.get_context("spawn")
    keys = ClusterKeys.generate().secret
    (sender, its_sender), (receiver, its_receiver) = spawn.Pipe(), spawn.Pipe()
    sides = [
        spawn.Process(target=_send_all, args=(its_sender, page, keys)),
        spawn.Process(target=_receive_all, args=(its_receiver, page, keys)),
    ]
    taken: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    try:
        for side in sides:
            side.start()
        receiver.send(sender.recv())  # where the sender listens
        receiver.recv()  # it is ready
        for turn in range(turns + 1):
            for kind in _KINDS:
                receiver.send(kind)
                sender.send(kind)
                speed = ROUND / receiver.recv() / 1e9
                if turn:
                    taken[kind].append(speed)
        for pipe, side in zip((sender, receiver), sides, strict=True):
            pipe.send("")
            side.join(10)
    finally:
        for side in sides:
            side.kill()
            side.join()
    return taken


def _send_all(parent: Connection, page_bytes: int, keys: str) -> None:
    use_keys(ClusterKeys(keys))
    memory = _memory()
    with _Served(memory, page_bytes) as store, zmq.Context() as context, context.socket(zmq.PUSH) as bare:
        bare.setsockopt(zmq.SNDHWM, _QUEUE // page_bytes)
        parent.send((store.transport.endpoint, bind(bare, "tcp://127.0.0.1:0")))
        while True:
            select.select([store.transport, parent], [], [])
            store.serve()
            if not parent.poll():
                continue
            kind = parent.recv()
            if not kind:
                return
            if kind != _STORES:
                for start in range(0, ROUND, page_bytes):
                    bare.send(memory[start : start + page_bytes], copy=False)


def _receive_all(parent: Connection, page_bytes: int, keys: str) -> None:
    use_keys(ClusterKeys(keys))
    memory = _memory()
    served, sent = parent.recv()
    with ExitStack() as cleanup:
        bare = cleanup.enter_context(cleanup.enter_context(zmq.Context()).socket(zmq.PULL))
        bare.setsockopt(zmq.RCVHWM, _QUEUE // page_bytes)
        connect(bare, sent)
        transport = ZmqTransport(Peer("store", "receiver", "b", "receiver", 2))
        cleanup.callback(transport.close)
        transport.use(memory, page_bytes, KV_HEADS)
        parent.send("ready")
        fetch = 0
        while kind := parent.recv():
            if kind == _STORES:
                fetch += 1
                start = time.perf_counter()
                _fetch(transport, PageSource("sender", served, 0), fetch, page_bytes)
                parent.send(time.perf_counter() - start)
            else:
                parent.send(_read_bare(bare, memory, page_bytes, copy=kind == _BARE))


def _memory() -> memoryview:
    memory = memoryview(mmap.mmap(-1, MEMORY))
    for start in range(0, MEMORY, 2**20):
        memory[start : start + 2**20] = (start // 2**20 + 1).to_bytes(4, "big") * 2**18
    return memory


# --- two stores -------------------------------------------------------------------------------------------------------


class _Served:
    """The store that has the pages: it sends as many as there is credit for."""

    def __init__(self, memory: memoryview, page_bytes: int) -> None:
        pages = [memory[start : start + page_bytes] for start in range(0, ROUND, page_bytes)]
        self._pages = tuple(SentPage(index, page_checksum(page, KV_HEADS)) for index, page in enumerate(pages))
        self._sent: dict[int, int] = {}  # by fetch
        self._number = 0
        self.transport = ZmqTransport(Peer("store", "sender", "a", "sender", 1))
        self.transport.use(memory, page_bytes, KV_HEADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def serve(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, PeerRequested) and isinstance(event.request, FetchPages | FetchCredit):
                fetch, credit = event.request.fetch, event.request.credit
                first, self._sent[fetch] = self._sent.get(fetch, 0), credit
                self._number += 1
                slots = tuple(range(first, credit))
                self.transport.submit(SendPages(self._number, event.peer, fetch, self._pages[first:credit], slots))


def _fetch(transport: ZmqTransport, source: PageSource, fetch: int, page_bytes: int) -> None:
    """Get every page, granting credit as they land."""
    pages, window, step = (size // page_bytes for size in (ROUND, WINDOW, STEP))
    landed = credit = 0
    while landed < pages:
        if landed + window >= min(pages, credit + step) and credit < pages:
            first, credit = credit, min(pages, landed + window)
            transport.submit(ExpectPages(fetch, tuple((index, index) for index in range(first, credit))))
            request = FetchCredit(fetch, credit) if first else FetchPages(fetch, page_bytes, b"", True, credit)
            transport.submit(AskPeer(source, request))
        select.select([transport], [], [])
        for event in transport.poll():
            if isinstance(event, PagesLanded):
                assert not event.damaged
                landed += len(event.pages)


# --- bare ZMQ ---------------------------------------------------------------------------------------------------------


def _read_bare(bare: zmq.Socket[bytes], memory: memoryview, page_bytes: int, copy: bool) -> float:
    """How long it takes, from the first frame on."""
    clock = 0.0
    for start in range(0, ROUND, page_bytes):
        frame = bare.recv(copy=False)
        clock = clock or time.perf_counter()
        if copy:
            memory[start : start + page_bytes] = frame.buffer
    return time.perf_counter() - clock


if __name__ == "__main__":
    sys.exit(main())
