"""How fast pages go from one store to another, against bare ZMQ over TCP.

    python -m bench.peer_speed [--quick]

Each run is two processes on this machine, talking over loopback, one of them reading a memory of 256 MiB page by page
and the other writing into one of its own, round and round. Both have touched their memory before the clock starts, and
have moved an eighth of the bytes.

`store to store`  two page transports (`kvstore.peers`) with a small stand-in for the stores' states behind each, on
                  its process's main thread: credit is granted as pages land, `WINDOW` bytes ahead. Every page is sent
                  from where it lies, copied to its slot, and its checksum is compared with that of its sender.
`bare`            the limit: a ZMQ socket at each end, a frame per page, sent without copying; the receiver copies each
                  frame to its place. No messages, no checksums, no credit, one thread per process besides ZMQ's.
`bare, left in ZMQ's buffers`  the same without the receiver's copy, for comparison: nobody could read such pages.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import zmq

from baton.messages import Credit, PageRequest, Peer, SentPage, Source, Want
from bench import report
from kvstore.checksum import page_checksum
from kvstore.peers import ZmqTransport
from kvstore.tiers import Ask, Expect, Landed, PeerAsked, Serve

PAGES = (128 * 1024, 2**20)  # bytes
MEMORY = 2**28
WINDOW = 2**26  # of credit, granted anew
STEP = 2**23  # in steps of so much
TARGET = 0.8
_QUEUE = 2**26  # bytes that the bare sender may be ahead of its reader

_Side = Callable[[Connection, int, int], None]  # told the other end's address; page bytes; pages


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less to move, fewer runs: a look, not a measurement")
    asked = parser.parse_args(argv)
    report.say(report.machine())
    for result in measure(2**29, 3) if asked.quick else measure(2**31, 5):
        report.emit(result)
    return 0


def measure(total: int, runs: int) -> list[report.Result]:
    """Medians of that many runs of each kind, taken in turns, for each size of page."""
    results: list[report.Result] = []
    for page in PAGES:
        taken: dict[str, list[float]] = {"store to store": [], "bare": [], "bare, left in ZMQ's buffers": []}
        for _ in range(runs):
            taken["bare"].append(_speed(_bare_sender, _bare_copier, page, total))
            taken["store to store"].append(_speed(_serving_store, _wanting_store, page, total))
            taken["bare, left in ZMQ's buffers"].append(_speed(_bare_sender, _bare_reader, page, total))
        medians = {
            kind: report.median_of("peer_speed", f"{kind}, pages of {page // 1024} KiB", "GB/s", values)
            for kind, values in taken.items()
        }
        limit = medians["bare"].value
        ours = replace(medians["store to store"], limit=limit, ratio=medians["store to store"].value / limit)
        results += [report.judged(ours, TARGET, "high"), medians["bare"], medians["bare, left in ZMQ's buffers"]]
    return results


def _speed(send: _Side, receive: _Side, page: int, total: int) -> float:
    """GB/s from a process that runs `send` to one that runs `receive`."""
    spawn = multiprocessing.get_context("spawn")
    (here_sender, sender), (here_receiver, receiver) = spawn.Pipe(), spawn.Pipe()
    sides = [
        spawn.Process(target=send, args=(sender, page, total // page)),
        spawn.Process(target=receive, args=(receiver, page, total // page)),
    ]
    try:
        for side in sides:
            side.start()
        here_receiver.send(here_sender.recv())  # where the sender listens
        seconds: float = here_receiver.recv()
        here_sender.send("done")
        for side in sides:
            side.join(10)
    finally:
        for side in sides:
            side.kill()
            side.join()
    return total / page // 1 * page / seconds / 1e9


def _memory() -> memoryview:
    memory = memoryview(mmap.mmap(-1, MEMORY))
    for start in range(0, MEMORY, 2**20):
        memory[start : start + 2**20] = (start // 2**20 + 1).to_bytes(4, "big") * 2**18
    return memory


# --- two stores -------------------------------------------------------------------------------------------------------


def _serving_store(parent: Connection, page_bytes: int, _pages: int) -> None:
    memory = _memory()
    slots = MEMORY // page_bytes
    checksums = [page_checksum(memory[slot * page_bytes : (slot + 1) * page_bytes]) for slot in range(slots)]
    transport = ZmqTransport(Peer("store", "sender", "a", "sender", 1))
    transport.use(memory, page_bytes)
    parent.send(transport.endpoint)
    sent: dict[int, int] = {}  # by fetch
    number = 0
    while not parent.poll():
        select.select([transport, parent], [], [])
        for event in transport.poll():
            if not isinstance(event, PeerAsked) or not isinstance(event.request, Want | Credit):
                continue
            fetch, credit = event.request.fetch, event.request.credit
            indices = range(sent.get(fetch, 0), credit)
            sent[fetch] = credit
            number += 1
            served = tuple(SentPage(index, checksums[index % slots]) for index in indices)
            transport.submit(Serve(number, event.peer, fetch, served, tuple(index % slots for index in indices)))
    transport.close()


def _wanting_store(parent: Connection, page_bytes: int, pages: int) -> None:
    memory = _memory()
    transport = ZmqTransport(Peer("store", "receiver", "b", "receiver", 2))
    transport.use(memory, page_bytes)
    source = Source("sender", parent.recv(), 0)
    _fetch(transport, source, 1, page_bytes, max(1, pages // 8))
    start = time.perf_counter()
    _fetch(transport, source, 2, page_bytes, pages)
    parent.send(time.perf_counter() - start)
    transport.close()


def _fetch(transport: ZmqTransport, source: Source, fetch: int, page_bytes: int, pages: int) -> None:
    slots = MEMORY // page_bytes
    step = STEP // page_bytes
    landed = credit = 0

    def extend(request: Callable[[int], PageRequest]) -> None:
        nonlocal credit
        first, credit = credit, min(pages, landed + WINDOW // page_bytes)
        if credit > first:
            transport.submit(Expect(fetch, tuple((index, index % slots) for index in range(first, credit))))
            transport.submit(Ask(source, request(credit)))

    extend(lambda room: Want(fetch, page_bytes, b"", True, room))
    while landed < pages:
        select.select([transport], [], [])
        before = landed
        for event in transport.poll():
            if isinstance(event, Landed):
                assert not event.damaged
                landed += len(event.pages)
        if landed // step > before // step or landed == pages:
            extend(lambda room: Credit(fetch, room))


# --- bare ZMQ ---------------------------------------------------------------------------------------------------------


def _bare_sender(parent: Connection, page_bytes: int, pages: int) -> None:
    memory = _memory()
    slots = MEMORY // page_bytes
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, _QUEUE // page_bytes)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        parent.send(f"tcp://127.0.0.1:{port}")
        for index in range(max(1, pages // 8) + pages):
            start = index % slots * page_bytes
            socket.send(memory[start : start + page_bytes], copy=False)
        parent.recv()


def _bare_copier(parent: Connection, page_bytes: int, pages: int) -> None:
    _bare_receive(parent, page_bytes, pages, copy=True)


def _bare_reader(parent: Connection, page_bytes: int, pages: int) -> None:
    _bare_receive(parent, page_bytes, pages, copy=False)


def _bare_receive(parent: Connection, page_bytes: int, pages: int, copy: bool) -> None:
    memory = _memory()
    slots = MEMORY // page_bytes
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, _QUEUE // page_bytes)
        socket.connect(parent.recv())
        start_clock = 0.0
        for index in range(-max(1, pages // 8), pages):
            if index == 0:
                start_clock = time.perf_counter()
            frame = socket.recv(copy=False)
            if copy:
                start = index % slots * page_bytes
                memory[start : start + page_bytes] = frame.buffer
        parent.send(time.perf_counter() - start_clock)


if __name__ == "__main__":
    sys.exit(main())
