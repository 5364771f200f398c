"""The page at /dashboard in a real browser, in front of a real cluster under load."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton import api_keys
from baton.api_keys import Identity
from deploy.local import LocalCluster
from tests.support import workload
from tests.support.browser import Watched, launched
from tests.support.eventually import eventually

pytestmark = pytest.mark.alone  # a browser draws with the processor, and beside other clusters it gets none
HOSTILE = "<img/src=x/onerror=alert('xss')>"  # a request's name: clients choose it
HOSTILE_MODEL = "<script>alert('model')</script>"
CLIENTS = 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


class Loaded:
    """A cluster with API keys, to which clients send requests all the time."""

    def __init__(self, cluster: LocalCluster, operator: str, tenant: str) -> None:
        self.cluster, self.operator, self.tenant = cluster, operator, tenant
        self.base = f"http://{cluster.addresses.api}"
        self.answered = 0
        self._ended = threading.Event()
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(CLIENTS)

    def __enter__(self) -> Loaded:
        for _ in range(CLIENTS):
            self._pool.submit(self._ask_on)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown()

    def ask(self, name: str, tokens: int = 12) -> None:
        prompt = [5 + number % 3 for number in range(200)] + [7 + next(self._numbers) % 900] * 40
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}).encode()
        headers = {"authorization": f"Bearer {self.tenant}", "content-type": "application/json", "x-request-id": name}
        request = urllib.request.Request(f"{self.base}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        self.answered += 1

    def _ask_on(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):  # a request may fail while its worker is killed
                self.ask(f"load-{next(self._numbers)}")


@pytest.fixture(scope="module")
def loaded(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("cluster")
    operator = api_keys.add_key(folder / "api-keys.json", Identity(name="ops", operator=True), "")
    tenant = api_keys.add_key(folder / "api-keys.json", Identity(name="app", tenant="acme"), "")
    settings = workload.settings(path, 1, 2, **{"model.served_model_name": [HOSTILE_MODEL]})
    with LocalCluster(settings, folder) as cluster, Loaded(cluster, operator, tenant) as running:
        yield running


@contextlib.contextmanager
def opened(browser: Any, loaded: Loaded, key: str | None = None, **options: Any) -> Iterator[Watched]:
    """The page, with an operator's key unless told otherwise. At its end it has made no mistake."""
    watched = Watched(browser, **options)
    try:
        own_key = loaded.operator if key is None else key
        if own_key:
            watched.page.add_init_script(f"sessionStorage.setItem('baton-operator-key', {json.dumps(own_key)})")
        watched.page.goto(f"{loaded.base}/dashboard")
        if own_key == loaded.operator:
            watched.until("document.body.dataset.sequence > 0")
        yield watched
        assert not watched.mistakes
    finally:
        watched.close()


def test_the_page_keeps_up_with_a_cluster_under_load(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        page = watched.page
        watched.until("document.querySelectorAll('#rows tr').length >= 12")
        assert page.locator("#status-text").inner_text() == "Serving"
        for name in ("router", "prefill-0", "store-0", "decode-0", "decode-1"):
            page.locator(f".proc[data-key='{name}'][data-state='live']").wait_for()
        first = int(page.evaluate("document.body.dataset.sequence"))
        watched.until(f"document.body.dataset.sequence >= {first + 4}")
        latest = json.loads(
            urllib.request.urlopen(
                urllib.request.Request(
                    f"{loaded.base}/dashboard/api/snapshot", headers={"authorization": f"Bearer {loaded.operator}"}
                ),
                timeout=30,
            ).read()
        )["sequence"]
        watched.until(f"document.body.dataset.sequence >= {latest}")  # it has not fallen behind
        page.locator("#prefix-map rect").first.wait_for()
        page.locator("#chart-ttft .line.p50[d^=M]").wait_for(state="attached")
        watched.until("document.querySelectorAll('#links .busy').length >= 2")
        assert page.evaluate("window.shifted") < 0.1


def test_a_request_is_explained_by_keyboard_alone(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        page = watched.page
        watched.until("document.querySelectorAll('#rows .open').length >= 3")
        page.locator("#hold").focus()
        page.keyboard.press("Space")
        page.keyboard.press("Tab")  # the table's box scrolls, or the first request
        watched.until("(document.activeElement.matches('.open') || (document.querySelector('.open').focus(), true))")
        name = page.evaluate("document.activeElement.textContent")
        page.keyboard.press("Enter")
        page.locator("#explain .attempt").first.wait_for()
        assert page.locator("#explain-title").inner_text() == name
        assert "Predicted" in page.locator("#explain").inner_text()
        page.keyboard.press("Escape")
        page.locator("#explain").wait_for(state="hidden")
        assert page.evaluate("document.activeElement.textContent") == name


def test_names_that_clients_choose_are_shown_and_never_run(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        page = watched.page
        page.locator("#model", has_text=HOSTILE_MODEL).wait_for()

        find = "(name) => [...document.querySelectorAll('.open')].find((one) => one.textContent === name)"

        def clicked() -> bool:
            """Rows come and go while there is load, so finding one and clicking it is one step."""
            loaded.ask(HOSTILE)
            return page.evaluate(f"(name) => {{ const one = ({find})(name); one?.click(); return !!one; }}", HOSTILE)

        eventually(clicked, "a hostile name among the requests")
        page.locator("#explain-title", has_text=HOSTILE).wait_for()
        page.locator("#explain .attempt").first.wait_for()
        assert page.locator("#rows img, #explain img, #events img, #model script").count() == 0
        # Even if a name were taken for markup, the page's policy has the browser run nothing of it.
        page.evaluate(
            "() => { try { document.body.innerHTML += '<p>'; } catch (error) { window.refused = error.name; } }"
        )
        assert page.evaluate("window.refused") == "TypeError"
        watched.mistakes.clear()  # the browser's own report of that


def test_the_data_is_behind_an_operators_key(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded, key="") as watched:
        page = watched.page
        page.locator("#key").wait_for()
        assert page.locator("#board").is_hidden()
        for key, error in (("nonsense", "not known"), (loaded.tenant, "operator"), ("no key at all", "no API key")):
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
            page.locator("#key-error", has_text=error).wait_for()
        page.locator("#key").fill(loaded.operator)
        page.get_by_role("button", name="Open").click()
        page.locator(".proc[data-key='store-0']").wait_for()
        assert page.locator("#door").is_hidden()
        page.reload()
        page.locator(".proc[data-key='store-0']").wait_for()  # this tab has the key still
        assert loaded.operator not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        page.get_by_role("button", name="Forget key").click()
        page.locator("#key").wait_for()


def test_a_lost_router_an_empty_and_a_draining_cluster_are_told(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        page = watched.page
        change: Callable[[Any], None] | None = None
        lost = True

        def answer(route: Any) -> None:
            if lost:
                route.abort()
                return
            shown = route.fetch().json()
            if change is not None:
                change(shown)
            route.fulfill(json=shown)

        page.route("**/dashboard/api/snapshot*", answer)
        page.locator("#status-text", has_text="Connection lost").wait_for()
        assert "Trying again" in page.locator("#banner").inner_text()
        assert page.locator(".proc[data-key='store-0']").is_visible()  # what was known stays
        lost = False
        page.locator("#status-text", has_text="Serving").wait_for()
        assert page.locator("#banner").is_hidden()

        def empty(shown: Any) -> None:
            shown.update(processes=[], unready="no decode worker is live", requests=[], notices=[])
            shown["prefixes"] = {"nodes": [], "holdings": [], "runs": 0, "drawn": 0}

        change = empty
        page.locator("#status-text", has_text="No worker has joined").wait_for()
        page.locator("#col-decode + .rest", has_text="none has joined").wait_for()
        page.locator("#rows-empty", has_text="No request has come yet").wait_for()
        page.locator("#prefix-map .empty", has_text="No page is cached yet").wait_for()

        def draining(shown: Any) -> None:
            next(one for one in shown["processes"] if one["name"] == "decode-0").update(state="draining", attempts=3)

        change = draining
        page.locator("#status-text", has_text="1 draining").wait_for()
        page.locator(".proc[data-key='decode-0'] .doing", has_text="drains: 3 left").wait_for()
        page.unroute_all(behavior="wait")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_and_colours_follow_the_reader(browser: Any, loaded: Loaded, width: int) -> None:
    size = {"width": width, "height": 800}
    with opened(browser, loaded, viewport=size, color_scheme="dark", reduced_motion="reduce") as watched:
        page = watched.page
        page.locator("#prefix-map rect").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.evaluate(
            "[...document.querySelectorAll('.board > *')].filter((one) =>"
            " one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.className)"
        )
        assert wide == []
        assert page.locator("#particles").is_hidden()
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.locator("#theme label", has_text="Light").click()
        light = page.evaluate(ground)
        assert light != dark
        page.reload()
        watched.until("document.body.dataset.sequence > 0")
        assert page.evaluate(ground) == light  # the choice stays
        page.locator("#theme label", has_text="Auto").click()
        assert page.evaluate(ground) == dark


@pytest.mark.parametrize("width", [1280, 1920])
def test_figures_are_whole_and_rates_agree(browser: Any, loaded: Loaded, width: int) -> None:
    with opened(browser, loaded, viewport={"width": width, "height": 900}) as watched:
        page = watched.page
        watched.until("document.querySelectorAll('#rows tr').length >= 12")
        page.locator("#filter label", has_text="Slowest").click()  # rows with every column
        page.evaluate("document.querySelector('#rows .prompt').textContent = '9,999 (100% cached)'")  # the longest
        cut = (
            "[...document.querySelectorAll('.requests .num, .chart .now')]"
            ".filter((one) => one.scrollWidth > one.clientWidth)"
        )
        assert page.evaluate(f"{cut}.map((one) => one.textContent)") == []
        # One reading of all three, between two samples.
        rates = page.evaluate(
            "[document.querySelector('#tiles .number'), document.querySelector('#col-router .flow'),"
            " document.querySelector('#chart-rate .now')].map((one) => parseFloat(one.textContent))"
        )
        assert len(set(rates)) == 1
        assert page.locator("#events li", has_text="decode-1 joins as a decode worker on node").count() >= 1


def test_the_numbers_of_an_axis_have_equally_many_digits(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        labels = watched.page.evaluate(
            "import('/dashboard/static/format.js').then(({ ticksText }) =>"
            " [[0, 5, 10], [0, 2.5, 5], [0, 0.125, 0.25], [0, 10_000, 20_000]].map(ticksText))"
        )
    assert labels == [["0", "5", "10"], ["0.0", "2.5", "5.0"], ["0.000", "0.125", "0.250"], ["0", "10K", "20K"]]


def test_dots_stay_on_their_ways_when_these_move(browser: Any, loaded: Loaded) -> None:
    script = """import('/dashboard/static/topology.js').then(({ Particles }) => {
        const particles = new Particles(document.createElement('canvas'));
        const way = (title, y) => {
            const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
            path.setAttribute('d', `M0 ${y}L100 ${y}`);
            return { title, kind: 'prefill', flow: 5, path };
        };
        particles.follow([way('a', 10), way('b', 20)], { width: 200, height: 100 });
        particles.dots = particles.ways.map((one) => ({ way: one, since: 0 }));
        particles.follow([way('a', 30)], { width: 300, height: 100 });
        return particles.dots.map((dot) => dot.way.points[0].y);
    })"""
    with opened(browser, loaded) as watched:
        assert watched.page.evaluate(script) == [30]


def test_the_death_of_a_worker_is_seen_as_it_happens(browser: Any, loaded: Loaded) -> None:
    with opened(browser, loaded) as watched:
        page = watched.page
        page.locator(".proc[data-key='decode-1'][data-state='live']").wait_for()
        loaded.cluster.kill("decode-1")
        page.locator("#events [data-level='error']", has_text=re.compile(r"^\W*decode-1 ")).first.wait_for()
        card = page.locator(".proc[data-key='decode-1']")
        watched.until("document.querySelector(\".proc[data-key='decode-1']\").dataset.state !== 'live'")
        assert "gone" in card.inner_text()
        page.locator("#chart-ttft .fault").first.wait_for(state="attached")
        loaded.cluster.start("decode-1")
        page.locator(".proc[data-key='decode-1'][data-state='live']").wait_for()
        before = loaded.answered
        eventually(lambda: loaded.answered > before + 5, "the load goes on")
