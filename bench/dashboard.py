"""Measure what an open page at /dashboard costs the requests: 50 a second, with the page open and closed in turns.

    bench/dashboard.py [--quick] [--rounds N] [--seconds S] [--rate R] [--only OPENING] [--no-browser]

One cluster, 1P+1D of the tiny model, serves the same load in turns of some seconds. The turns are closed, one viewer,
closed, 32 viewers, closed, Chromium, and so on. A viewer asks what the page asks, once a second, and draws nothing.
A viewer's browser runs on another machine, so both get only the time that the cluster leaves idle (SCHED_IDLE, as
`chrt -i 0` does). A turn is compared with the mean of the two closed turns around it. The median of these ratios is
reported. Turns are short, so that what other processes do meanwhile is much the same in all three.

The router's CPU time hardly depends on what else the machine does, so its difference is what the page costs the router.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import secrets
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import aiohttp
import msgspec
import psutil

from baton import config
from baton.errors import BatonError
from baton.messages import (
    Decode,
    Delta,
    Envelope,
    Hello,
    ModelCard,
    Namespace,
    Peer,
    SamplingParams,
    Tokens,
    WorkerRole,
)
from baton.process import settle
from bench import cluster, models, report
from bench.neighbours import Neighbours
from deploy.load import sender
from deploy.load.workload import Lengths, Planned, Workload, poisson
from deploy.local import LocalCluster
from kvstore.keys import pack_tokens
from kvstore.prefix_map.prefix_map import PrefixMap
from router.dashboard.monitor import DashboardMonitor
from router.events import MessageReceived, RequestEnded, SendMessage, Submit
from router.frontend.dashboard_feed import SLICE
from router.queueing.admission import ModelLimits
from router.state import RouterState

TARGET = 1.03
_QUICK, _FULL = (6, 3.0), (30, 3.0)  # rounds, seconds of a turn
_VIEWERS = 32
_TIMEOUT = 60.0
_FIGURES = (  # of a turn: its field, what it is, its unit, and whether the target is for it
    ("e2e", "a request p50", "ms", True),
    ("first", "TTFT p50", "ms", False),
    ("gap", "ITL p99", "ms", False),
    ("cpu", "router's CPU", "ms/s", True),
)
_VOCABULARY = 512
_WORKERS, _RECORDS = 32, 1_000  # of each role, and requests, whose router a snapshot is made of
_CHAINS, _CHAIN = 10_000, 120  # chains of so many pages, whose first 20 pages are those of 50 prefixes


@dataclass(frozen=True)
class Turn:
    """One turn: seconds for each request, of the router's CPU each second, and cores that others used."""

    e2e: float  # median, from sending to the end
    first: float  # median time to first token
    gap: float  # 99th percentile between two tokens
    cpu: float
    others: float


@dataclass(frozen=True)
class Paired:
    """A turn with the page open, between two with it closed."""

    before: Turn
    open: Turn
    after: Turn

    @property
    def others(self) -> float:
        return max(turn.others for turn in (self.before, self.open, self.after))

    def closed(self, figure: str) -> float:
        return (getattr(self.before, figure) + getattr(self.after, figure)) / 2


Opening = Callable[[], contextlib.AbstractContextManager[None]]


def measure(running: LocalCluster, plan: Sequence[Planned]) -> Turn:
    """Serve a plan. Raises BatonError if a request fails."""
    router, neighbours = psutil.Process(running.pids["router"]), Neighbours()
    before = router.cpu_times()
    outcomes = asyncio.run(sender.open_loop(running.address, plan, _TIMEOUT))
    after, others = router.cpu_times(), neighbours.lap()
    if failed := next((outcome.failed for outcome in outcomes if outcome.failed), ""):
        raise BatonError(f"a request failed: {failed}")
    gaps = sorted(gap for outcome in outcomes for gap in outcome.gaps)
    seconds = max(outcome.ended for outcome in outcomes)
    return Turn(
        statistics.median(outcome.e2e for outcome in outcomes),
        statistics.median(outcome.tokens[0] - outcome.sent for outcome in outcomes),
        gaps[len(gaps) * 99 // 100],
        (after.user + after.system - before.user - before.system) / seconds,
        others,
    )


@contextlib.contextmanager
def viewers(base: str, count: int) -> Iterator[None]:
    """So many pages that draw nothing, in a process of their own."""
    context = multiprocessing.get_context("spawn")
    opened = context.Event()
    process = context.Process(target=_view, args=(base, count, opened), daemon=True)
    process.start()
    try:
        if not opened.wait(60):
            raise BatonError("the viewers got no snapshot within 60 s")
        yield
    finally:
        process.kill()
        process.join()


def _take_idle_time_only() -> None:
    """Let any other process that can run go before this one and its children."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
    _lower_session(os.getpid())


def _lower_session(pid: int) -> None:
    """Give the session of this process the least share. Where the kernel groups processes by session (autogroup),
    priorities hold within a session alone."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")


def _view(base: str, count: int, opened: Event) -> None:
    os.setsid()
    _take_idle_time_only()

    async def one(session: aiohttp.ClientSession) -> None:
        headers = {"x-baton-viewer": secrets.token_hex(8)}
        while True:
            async with session.get(f"{base}/dashboard/api/snapshot", headers=headers) as answer:
                answer.raise_for_status()
                await answer.read()
            opened.set()
            await asyncio.sleep(1.0)

    async def every() -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(session))
                await asyncio.sleep(number / count**2)  # pages were not opened at the same instant

    asyncio.run(every())


@contextlib.contextmanager
def chromium(base: str) -> Iterator[Opening]:
    """A browser, in a process of its own. What it yields opens the page, and closes it again. Raises BatonError."""
    if (path := shutil.which("chromium")) is None:
        raise BatonError("there is no chromium on PATH: `apt-get install chromium`, or --no-browser")
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=_browse, args=(base, path, theirs))
    process.start()

    def order(what: str) -> str:
        orders.send(what)
        if not orders.poll(120):
            raise BatonError(f"Chromium did not {what} the page within 120 s")
        return orders.recv()

    @contextlib.contextmanager
    def opening() -> Iterator[None]:
        order("open")
        yield
        report.say(f"Chromium shows snapshot {order('close')}")

    try:
        yield opening
    finally:
        with contextlib.suppress(OSError):
            orders.send("end")
        process.join(30)
        if process.is_alive():
            process.kill()


def _browse(base: str, path: str, orders: Connection) -> None:
    from playwright.sync_api import sync_playwright

    os.setsid()
    _take_idle_time_only()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for each in psutil.Process().children(recursive=True):
            _lower_session(each.pid)
        page = None
        while (order := orders.recv()) != "end":
            if order == "open":
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(f"{base}/dashboard", timeout=100_000)
                page.locator("#rows tr").first.wait_for(timeout=100_000)
                orders.send("")
            elif page is not None:
                orders.send(page.evaluate("document.body.dataset.sequence"))
                page.close()
        browser.close()


def alternate(side: Callable[[], Turn], openings: Mapping[str, Opening], rounds: int) -> dict[str, list[Paired]]:
    """Measure each opening so many times, each between two turns with the page closed. The first round warms up."""
    paired: dict[str, list[Paired]] = {name: [] for name in openings}
    before = side()
    for number in range(rounds + 1):
        for name, opening in openings.items():
            with opening():
                opened = side()
            after = side()
            if number:
                paired[name].append(Paired(before, opened, after))
            before = after
            report.say(
                f"round {number} of {rounds}, {name}: {opened.e2e * 1e3:.2f} ms a request, "
                f"closed {after.e2e * 1e3:.2f}; others used {opened.others:.2f} cores"
            )
    return paired


def results(paired: Mapping[str, Sequence[Paired]]) -> list[report.Result]:
    """Every figure with the page open beside that with it closed."""
    found: list[report.Result] = []
    for name, turns in paired.items():
        for figure, title, unit, judged in _FIGURES:
            runs = [getattr(turn.open, figure) * 1_000 for turn in turns]
            ratio = statistics.median(getattr(turn.open, figure) / turn.closed(figure) for turn in turns)
            limit = statistics.median(turn.closed(figure) * 1_000 for turn in turns)
            made = report.Result(
                "dashboard", f"{name}: {title}", statistics.median(runs), unit,
                limit=limit, ratio=ratio, runs=tuple(runs),
            )  # fmt: skip
            found.append(report.judged(made, TARGET, "low") if judged else made)
        others = [turn.others for turn in turns]
        found.append(report.median_of("dashboard", f"{name}: used by others meanwhile", "cores", others))
    return found


# --- what a snapshot takes --------------------------------------------------------------------------------------------


def costs() -> Iterator[report.Result]:
    """The CPU time of what the loop of the router does for the page: samples, snapshots, slices of a survey."""
    monitor = busy_monitor()
    now = iter(range(1_000, 1_000_000))

    def result(case: str, work: Callable[[], object], count: int) -> report.Result:
        runs = [_cpu_ms(work) for _ in range(count)]
        return report.median_of("dashboard", case, "ms", runs)

    yield result("a sample", lambda: monitor.sample(next(now), 0), 300)
    where = f"{2 * _WORKERS} workers, {_RECORDS:,} requests remembered"
    yield result(f"a snapshot as JSON, {where}", lambda: msgspec.json.encode(monitor.snapshot(next(now), 0, None)), 50)
    size = len(msgspec.json.encode(monitor.snapshot(next(now), 0, None)))
    yield report.Result("dashboard", f"its size, {where}", size / 1_000, "kB")
    prefixes = PrefixMap()
    for chain in range(_CHAINS):
        keys = [
            hashlib.blake2b(f"{chain % 50 if page < 20 else chain} {page}".encode(), digest_size=16).digest()
            for page in range(_CHAIN)
        ]
        prefixes.stored(f"store-{chain % 8}", b"", keys, "CPU")
    settle()  # as the router does: what is there by now, Python's collector never looks at again
    survey, slices, done = prefixes.survey(), list[float](), False
    while not done:
        began = time.thread_time()
        done = survey.step(SLICE)
        slices.append((time.thread_time() - began) * 1_000)
    pages = f"{prefixes.stats().pages:,} pages"
    yield report.Result("dashboard", f"the longest of {len(slices)} slices of a survey, {pages}", max(slices), "ms")
    yield report.Result("dashboard", f"drawing it, on a thread, {pages}", _cpu_ms(survey.draw), "ms")


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1_000


def busy_monitor() -> DashboardMonitor:
    """The monitor of a router with many workers that has served many requests."""
    me = Peer("router", "router", "a", "router.1", 1)
    settings = config.load(None, {"model.path": "/none"})
    state = RouterState(me, settings, ModelLimits(_VOCABULARY, 4_096))
    namespace = Namespace(bytes(16), "test", "float32", settings.pages.page_size, 1, form="split", kv_heads=1)
    card = ModelCard(namespace, 16_384, _VOCABULARY, 4_096, 100_000)
    roles: list[WorkerRole] = ["prefill", "decode"]
    for number in range(_WORKERS):
        for role in roles:
            peer = Peer(role, f"{role}-{number}", f"node-{number % 8}", f"{role}-{number}.1", number)
            state.handle(MessageReceived(Envelope(peer.incarnation, "", 1, Hello(peer, model=card))), 0.0)
    monitor = DashboardMonitor(me, settings, "model", state)
    tokens = pack_tokens([7] * 500)
    for number in range(_RECORDS):
        order = Submit(f"chat-{number}-1.{number}", tokens, SamplingParams(), received=1.0, max_tokens=16)
        waiting = deque(state.handle(order, 1.0))
        while waiting:
            match waiting.popleft():
                case SendMessage(incarnation=worker, message=Decode(request=request, attempt=attempt)):
                    delta = Delta(request, attempt, 500, (7, 7, 7), finish="length")
                    waiting += state.handle(
                        MessageReceived(Envelope(worker, me.incarnation, 2, Tokens(1, (delta,)))), 1.1
                    )
                case RequestEnded() as end:
                    monitor.ended(end)
                case _:
                    pass
    assert state.stats().finished["length"] == _RECORDS
    return monitor


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    plans = Workload(
        Lengths("fixed", 64), Lengths("fixed", 16), _VOCABULARY, groups=8, prefix=128,
        arrivals=poisson(asked.rate, round(asked.rate * asked.seconds), seed=1),
    )  # fmt: skip
    settings: dict[str, object] = {
        "store.host_cache_bytes": "64MiB",
        "prefill.kv_cache_bytes": "64MiB",
        "decode.kv_cache_bytes": "64MiB",
    }
    settings |= {"prefill.threads": 1, "decode.threads": 1, "router.disaggregation": "always"}
    report.say(report.machine())
    for result in costs():
        report.emit(result)
    try:
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(cluster.local(models.directory("tiny"), 1, 1, settings))
            base = f"http://{running.api_of('router')}"
            openings: dict[str, Opening] = {
                "one viewer": partial(viewers, base, 1),
                f"{_VIEWERS} viewers": partial(viewers, base, _VIEWERS),
            }
            if asked.browser:
                openings["Chromium"] = stack.enter_context(chromium(base))
            openings = {name: openings[name] for name in asked.only or openings}
            turns = iter(range(1, 1_000_000))
            asyncio.run(sender.closed_loop(running.address, plans.plan(100, seed=0), 2, _TIMEOUT))  # a cold start

            def side() -> Turn:
                return measure(running, plans.plan(len(plans.arrivals), seed=next(turns)))

            for result in results(alternate(side, openings, asked.rounds)):
                report.emit(result)
    except BatonError as error:
        report.say(f"dashboard: {error}")
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="{} rounds of {:g} s, instead of {} of {:g}".format(*_QUICK, *_FULL)
    )
    parser.add_argument("--rounds", type=int, help="turns of each kind")
    parser.add_argument("--seconds", type=float, help="of a turn")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second (default 50)")
    parser.add_argument("--only", action="append", choices=("one viewer", f"{_VIEWERS} viewers", "Chromium"))
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="leave Chromium out")
    asked = parser.parse_args(argv)
    rounds, seconds = _QUICK if asked.quick else _FULL
    asked.rounds, asked.seconds = asked.rounds or rounds, asked.seconds or seconds
    return asked


if __name__ == "__main__":
    sys.exit(main())
