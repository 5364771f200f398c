"""The store on one node: what a hand-off costs beside copying the same bytes, and how many calls it answers.

    python -m bench.store.hand_off [--quick]

A hand-off is what two workers do with a prompt's pages: device page → arena slot, checksum, Seal; PagesReady, arena
slot → device page, Release. It goes through a real store process, with the transfers that workers use; its limit is
copying the same bytes twice between the same memories, without anything else, moments before. At last the same tokens
are handed over in pages of int8 and of bfloat16, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from baton import store_protocol as protocol
from baton.config import ArenaBytes, ClusterConfig, Config, StoreConfig, dump
from baton.errors import StoreGone
from baton.messages import Namespace, Peer
from baton.wire import ClusterKeys
from bench import report
from deploy.load.figures import percentile
from engine.device.page_pool import PagePool
from engine.runner import Mover, Runner
from kvstore.checksum import page_checksum
from kvstore.client.connection import StoreClient, store_address
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy, CopyIn, CopyOut, PageFetch, StorePages, batches
from kvstore.layout import PageLayout

_PATIENCE = 30.0  # seconds
KV_HEADS = 8  # of a page: each is hashed on its own
PAGE_SIZES = (128 * 2**10, 2**20)  # bytes
SEALING, VERIFYING = 0.7, 0.6  # of copying the same bytes
INT8_TIME = 0.65  # of the same tokens' hand-off in bfloat16
PAGES = 512  # in one hand-off, of prompts with
_PROMPT = 64  # pages each
_WORD = 64  # pages that one message tells of


Out: TypeAlias = Callable[[Sequence[Copy]], CopiedOut]
In: TypeAlias = Callable[[Sequence[Copy]], CopiedIn]


@dataclass(frozen=True)
class HandOff:
    """Bytes per second of one run: the limit, and the hand-off with checksums made, and with them made and verified."""

    copying: float
    sealing: float
    verifying: float


@contextmanager
def store_process(host_cache_bytes: int) -> Iterator[str]:
    """A store of its own, without a router; yields the cluster's name."""
    name = f"bench-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as folder:
        path, keys = Path(folder) / "config.yaml", Path(folder) / "cluster.key"
        ClusterKeys.generate().write(keys)
        place = ClusterConfig(name=name, key_file=str(keys), log_dir=folder)
        path.write_text(dump(Config(cluster=place, store=StoreConfig(ArenaBytes(host_cache_bytes), writer_share=1.0))))
        command = [sys.executable, "-m", "kvstore", "--config", str(path), "--name", "store-0", "--node", "bench"]
        with subprocess.Popen([*command, "--router", "tcp://127.0.0.1:1"], cwd=Path(__file__).parents[2]) as process:
            try:
                yield name
            finally:
                process.kill()


class Worker:
    """One attachment to the store that waits for its answers."""

    def __init__(self, cluster: str, page_bytes: int, kv_heads: int = KV_HEADS) -> None:
        peer = Peer("decode", "bench", "bench", f"bench-{secrets.token_hex(4)}", os.getpid())
        namespace = Namespace(bytes(16), "test", "float32", 16, page_bytes, form="split", kv_heads=kv_heads)
        self.store = StoreClient(store_address(cluster, "bench"), peer, namespace, page_bytes, _PATIENCE)
        self.leases = itertools.count(1)
        deadline = time.monotonic() + _PATIENCE
        while not self.store.connected:
            try:
                self.store.connect()
            except StoreGone:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._unread: list[protocol.StoreReply] = []

    def hear(self) -> protocol.StoreReply:
        """The next answer about a lease."""
        while not self._unread:
            if not select.select([self.store.fileno()], [], [], _PATIENCE)[0]:
                raise StoreGone(f"no answer for {_PATIENCE} s")
            self._unread = [reply for reply in self.store.receive() if hasattr(reply, "lease")]
        return self._unread.pop(0)

    def ask(self, call: protocol.StoreCall) -> protocol.StoreReply:
        self.store.call(call)
        return self.hear()

    def close(self) -> None:
        self.store.close()


def hand_offs(page_bytes: int, runs: int) -> list[HandOff]:
    """Several runs, each of all three kinds, between pools of this process."""
    torch.set_num_threads(1)  # a second one would spin for a while after every comparison, on the store's core
    ours, theirs = _pools(page_bytes)
    with _workers(page_bytes) as (writer, reader):
        out = _from_pool(writer, ours)
        kinds = {verify: (out, _to_pool(reader, theirs, verify)) for verify in (False, True)}
        measured = _measure(writer, reader, kinds, page_bytes, runs)
        assert all(torch.equal(ours.view(page), theirs.view(page)) for page in range(PAGES)), "other bytes"
        return measured


def between_runners(ours: Runner, theirs: Runner, runs: int) -> list[HandOff]:
    """The same between two runners with `PAGES` pages each, whose pages have the same layout."""
    with _workers(ours.layout.page_bytes, ours.layout.num_kv_heads) as (writer, reader):
        kinds = {
            verify: (_by_mover(writer, ours.mover(verify=verify)), _by_mover(reader, theirs.mover(verify=verify)))
            for verify in (False, True)
        }
        return _measure(writer, reader, kinds, ours.layout.page_bytes, runs)


@contextmanager
def _workers(page_bytes: int, kv_heads: int = KV_HEADS) -> Iterator[tuple[Worker, Worker]]:
    """The two ends of a hand-off, at a store of their own."""
    with store_process(3 * PAGES * page_bytes) as cluster:
        writer, reader = Worker(cluster, page_bytes, kv_heads), Worker(cluster, page_bytes, kv_heads)
        try:
            yield writer, reader
        finally:
            writer.close()
            reader.close()


def _pools(page_bytes: int) -> tuple[PagePool, PagePool]:
    memory = torch.randint(0, 256, (PAGES, page_bytes), dtype=torch.uint8)
    return PagePool(memory, page_bytes, KV_HEADS), PagePool(torch.zeros_like(memory), page_bytes, KV_HEADS)


def _measure(
    writer: Worker, reader: Worker, kinds: Mapping[bool, tuple[Out, In]], page_bytes: int, runs: int
) -> list[HandOff]:
    """`kinds`: how pages are copied, without and with verification."""
    ours, theirs = _pools(page_bytes)

    def hand_off(verify: bool) -> float:
        keys = [secrets.token_bytes(16) for _ in range(PAGES)]
        return _timed(lambda: _hand_off(writer, reader, *kinds[verify], keys))

    for _ in range(4):
        hand_off(verify=True)  # every slot is touched once
    measured: list[HandOff] = []
    for _ in range(runs):
        copying = _timed(lambda: _copy(ours, writer, reader, theirs))
        sealing, verifying = hand_off(verify=False), hand_off(verify=True)
        size = PAGES * page_bytes
        measured.append(HandOff(size / copying, size / sealing, size / verifying))
    return measured


def round_trips(calls: int) -> dict[str, list[float]]:
    """Seconds of each call to an otherwise idle store, by kind: one page at a time."""
    page_bytes = 4_096
    with store_process(1_024 * page_bytes) as cluster:
        worker = Worker(cluster, page_bytes)
        times: dict[str, list[float]] = {"Reserve": [], "Seal": [], "Acquire": [], "Release": []}

        def timed(kind: str, call: protocol.StoreCall, answer: type[protocol.StoreReply]) -> None:
            began = time.perf_counter()
            reply = worker.ask(call)
            times[kind].append(time.perf_counter() - began)
            assert isinstance(reply, answer), reply

        try:
            for _ in range(calls):
                key, writing, reading = secrets.token_bytes(16), next(worker.leases), next(worker.leases)
                timed("Reserve", protocol.Reserve(writing, b"", key), protocol.Reserved)
                timed("Seal", protocol.Seal(writing, 0, (1,)), protocol.Sealed)
                timed("Acquire", protocol.Acquire(reading, key), protocol.PagesReady)
                timed("Release", protocol.Release(reading, (0,)), protocol.Released)
                worker.store.call(protocol.EndLease(writing))
                worker.store.call(protocol.EndLease(reading))
            return times
        finally:
            worker.close()


def _copy(ours: PagePool, writer: Worker, reader: Worker, theirs: PagePool) -> None:
    """Copy the same bytes between the same memories, each through its own process's mapping: the limit of a hand-off.

    No lease covers these slots: the store does not use them meanwhile.
    """
    for page in range(PAGES):
        ours.copy_out(page, writer.store.slot(page))
    for page in range(PAGES):
        theirs.copy_in(reader.store.slot(page), page)


def _hand_off(writer: Worker, reader: Worker, out: Out, into: In, keys: Sequence[bytes]) -> None:
    """Every prompt is known from the start, as to workers with a queue: the store reserves the slots of one while the
    pages of another are copied."""
    starts = range(0, PAGES, _PROMPT)
    fetches = [PageFetch(reader.leases, keys[at : at + _PROMPT], range(at, at + _PROMPT), wait=True) for at in starts]
    ships = [StorePages(next(writer.leases), b"", keys[at : at + _PROMPT], hold=True) for at in starts]
    fetching = {lease: fetch for fetch in fetches for lease in fetch.leases}
    shipping = {write.lease: write for write in ships}
    for write, at in zip(ships, starts, strict=True):
        _call(writer, write.start())
        for index in range(_PROMPT):
            write.offer(index, at + index)
    for fetch in fetches:
        _call(reader, fetch.start())
    while not all(write.done for write in ships):
        reply = writer.hear()
        write = shipping[_lease(reply)]
        for batch in batches(_copies(write.handle(reply)), _WORD):
            _call(writer, write.handle(out(batch)))
    while not all(fetch.complete for fetch in fetches):
        reply = reader.hear()
        fetch = fetching[_lease(reply)]
        for batch in batches(_copies(fetch.handle(reply)), _WORD):
            _call(reader, fetch.handle(into(batch)))
    _call(writer, [protocol.EndLease(write.lease) for write in ships])
    _call(reader, [protocol.EndLease(lease) for fetch in fetches for lease in fetch.leases])


def _lease(reply: protocol.StoreReply) -> int:
    assert not isinstance(reply, protocol.Attached | protocol.AttachRefused | protocol.StoreHeartbeat)
    return reply.lease


def _call(worker: Worker, calls: Sequence[protocol.StoreCall | Copy]) -> None:
    for call in calls:
        assert not isinstance(call, CopyIn | CopyOut)
        worker.store.call(call)


def _copies(commands: Sequence[protocol.StoreCall | Copy]) -> list[Copy]:
    return [copy for copy in commands if isinstance(copy, CopyIn | CopyOut)]


def _from_pool(writer: Worker, ours: PagePool) -> Out:
    def out(copies: Sequence[Copy]) -> CopiedOut:
        checksums: list[int] = []
        for copy in copies:
            slot = writer.store.slot(copy.slot)
            ours.copy_out(copy.page, slot)
            checksums.append(page_checksum(slot, KV_HEADS))
        return CopiedOut(copies[0].lease, copies[0].index, tuple(checksums))

    return out


def _to_pool(reader: Worker, theirs: PagePool, verify: bool) -> In:
    def one(copy: Copy) -> bool:
        slot = reader.store.slot(copy.slot)
        if verify:
            return isinstance(copy, CopyIn) and theirs.copy_in_checked(slot, copy.page) == copy.checksum
        theirs.copy_in(slot, copy.page)
        return True

    return lambda copies: CopiedIn(copies[0].lease, tuple(copy.index for copy in copies if one(copy)))


def _by_mover(worker: Worker, mover: Mover) -> Callable[[Sequence[Copy]], Any]:
    """Copies by a runner's mover, each batch waited for: the limit does nothing meanwhile either."""
    mover.attach(worker.store.arena)
    return lambda copies: mover.start(copies).wait()


def _timed(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def results(bench: str, measured: Sequence[HandOff], page_bytes: int) -> list[report.Result]:
    """Return both kinds of hand-off beside their limit."""
    limits = [run.copying for run in measured]
    return [
        report.beside(bench, f"hand-off {name}, {page_bytes // 1_024} KiB pages", "B/s", speeds, limits)
        for name, speeds in (
            ("sealing", [run.sealing for run in measured]), ("verifying", [run.verifying for run in measured])
        )
    ]  # fmt: skip


def int8_beside_bfloat16(runs: int) -> report.Result:
    """Seconds to hand over the same tokens, K and V of a Llama of 100 M parameters, in pages of either kind."""
    seconds: dict[str, list[float]] = {"int8": [], "bfloat16": []}
    for _ in range(runs):
        for dtype, each in seconds.items():
            size = PageLayout(num_layers=12, num_kv_heads=4, head_dim=64, page_size=16, dtype=dtype).page_bytes
            each.append(statistics.median(PAGES * size / run.verifying for run in hand_offs(size, 5)))
    case = f"hand-off verifying, {16 * PAGES:,} tokens in int8 beside bfloat16"
    return report.beside("hand_off", case, "s", seconds["int8"], seconds["bfloat16"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    quick = parser.parse_args(argv).quick
    report.say(report.machine())
    for page_bytes in PAGE_SIZES:
        measured = hand_offs(page_bytes, 3 if quick else 9)
        for result, target in zip(results("hand_off", measured, page_bytes), (SEALING, VERIFYING), strict=True):
            report.emit(report.judged(result, target, "high"))
    report.emit(report.judged(int8_beside_bfloat16(3 if quick else 9), INT8_TIME, "low"))
    for kind, times in round_trips(300 if quick else 3_000).items():
        report.emit(report.Result("hand_off", f"{kind}, calls", 1 / statistics.median(times), "1/s"))
        report.emit(report.Result("hand_off", f"{kind}, p99", percentile(times, 99), "s"))


if __name__ == "__main__":
    main()
