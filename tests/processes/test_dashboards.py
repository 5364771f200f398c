"""A real cluster under load, with a fault: every panel shows something, and every alert reads metrics that there are.

The first half needs nothing: the pages of all processes have every metric, label and label value that a query names.
The second half puts each query to a real Prometheus, with the committed configuration.
"""

import random
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import api_keys
from baton.api_keys import Identity
from baton.client import Client
from baton.errors import BatonError, ContextTooLong, ObjectiveUnreachable
from deploy.local import LocalCluster
from tests.deploy.test_grafana import BOARDS, PROMETHEUS, VARIABLES, alerts, choices, expressions
from tests.support import checkpoints, workload
from tests.support.eventually import DEADLINE, eventually
from tests.support.metrics_page import metric, page, parsed, samples, total
from tests.support.prometheus import find, program, query, scraping
from tests.support.promql import filled, selectors

PROCESSES = {"router": "router", "store-0": "store", "prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
ONLY_WITH_A_GPU = "baton_gpu_"
OF_PROMETHEUS = {"up", "ALERTS"}
VICTIM = "decode-1"
TWICE = ("127.0.0.1", "localhost")  # two names of the router, so that every process is discovered twice


@dataclass
class Site:
    """A cluster, and what its processes told after it had served, refused and lost something."""

    cluster: LocalCluster
    keys: Mapping[str, str]  # by tenant

    def ask(self, prompt: list[int], tenant: str = "one", count: int = 8, **options: Any) -> None:
        with Client(self.cluster.address, api_key=self.keys[tenant]) as client:
            client.generate(
                prompt, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=DEADLINE, **options
            ).result()

    def load(self) -> None:
        """Prompts of two tenants that share prefixes, more than the memory has room for; some of them again."""
        rng = random.Random(5)
        texts = [[rng.randrange(3, checkpoints.VOCAB) for _ in range(320)] for _ in range(8)]
        prompts = [[*text, rng.randrange(3, checkpoints.VOCAB)] for _ in range(2) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.ask, prompts, ["one", "two"] * 8))
        for tenant in ("one", "two"):  # of these, the disk has pages that no memory has
            for text in texts:
                self.ask(text, tenant)
        with pytest.raises(ObjectiveUnreachable):
            self.ask(texts[0] + texts[1] + texts[2], ttft_ms=1, cache_salt="none of it is cached")
        with pytest.raises(ContextTooLong):
            self.ask(texts[0] * 100)

    def lose_a_worker(self) -> None:
        """Kill one of two decode workers, and wait until the router tells of it."""
        self.cluster.kill(VICTIM)
        eventually(lambda: metric(self.cluster, "router", "peers_lost_total", peer_role="decode") == 1, "the loss")


@pytest.fixture(scope="module")
def site(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "api-keys.json"
    keys = {tenant: api_keys.add_key(file, Identity(name=tenant, tenant=tenant), "") for tenant in ("one", "two")}
    more = {
        **workload.SMALL_TIERS,
        "disk.path": str(folder / "disk"),
        "api.keys_file": str(file),
        "router.slo_classes": {0: {"ttft_ms": 600_000, "tpot_ms": 60_000}},  # kept on any machine, however busy
    }
    with LocalCluster(workload.settings(path, 1, 2, **more), folder) as cluster:
        yield Site(cluster, keys)


@pytest.fixture(scope="module")
def scraper(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """The address of a Prometheus that scrapes the cluster from now on. None: there is no Prometheus here."""
    if find("prometheus") is None:
        yield None
        return
    assert site.cluster.addresses is not None
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / file) for file in config["rule_files"]]
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    port = site.cluster.addresses.http.rpartition(":")[2]
    config["scrape_configs"][0]["http_sd_configs"] = [
        {**discovery, "url": f"http://{host}:{port}/discovery", "refresh_interval": "500ms"} for host in TWICE
    ]
    with scraping(config, tmp_path_factory.mktemp("prometheus")) as address:
        eventually(lambda: len(query(address, "up == 1")) == len(PROCESSES), "every process is scraped")
        yield address


@pytest.fixture(scope="module")
def pages(site: Site, scraper: str | None) -> Mapping[str, Mapping[str, set[str]]]:
    """After the load and the loss: the values of each label, of every metric that any process tells."""
    del scraper  # it sees the load come, and the loss
    site.load()
    values: dict[str, dict[str, set[str]]] = {}
    for name, role in PROCESSES.items():
        _take(values, site, name, role)
    site.lose_a_worker()
    _take(values, site, "router", "router")
    return values


@pytest.fixture
def prometheus(scraper: str | None, pages: object) -> str:
    """The address of the Prometheus that has seen all that."""
    if scraper is None:
        program("prometheus")
        raise AssertionError
    return scraper


def _take(values: dict[str, dict[str, set[str]]], site: Site, name: str, role: str) -> None:
    with Client(site.cluster.address, site.cluster.operator) as client:
        entry = next(each for each in client.status(timeout=DEADLINE).processes if each.name == name)
    for sample in parsed(page(entry.metrics_address)):
        labels = {**sample.labels, "name": name, "role": role, "node": entry.node, "job": "baton", "instance": "here:1"}
        for label, value in labels.items():
            values.setdefault(sample.name, {}).setdefault(label, set()).add(value)


def test_every_label_value_that_a_query_asks_for_is_told_by_a_process(
    pages: Mapping[str, Mapping[str, set[str]]],
) -> None:
    """Each alternative of a regular expression, too."""
    for place, expression, _ in expressions():
        for selector in selectors(filled(expression, VARIABLES)):
            if selector.metric in OF_PROMETHEUS or selector.metric.startswith(ONLY_WITH_A_GPU):
                continue
            assert selector.metric in pages, f"{place}: no process tells {selector.metric}"
            for operator, label, pattern in selector.matchers:
                values = pages[selector.metric].get(label, set())
                for one in pattern.split("|") if operator == "=~" else [pattern]:
                    assert any(re.fullmatch(one, value) for value in values), f"{place}: {label}={one}, not in {values}"


def test_every_panel_shows_something(prometheus: str) -> None:
    names = {rule["alert"] for rule in alerts()}
    missing = {
        place: filled(expression, VARIABLES)
        for place, expression, _ in expressions()
        if place not in names and ONLY_WITH_A_GPU not in expression
    }

    def all_show() -> bool:
        for place, expression in list(missing.items()):
            if any(not isnan(float(each["value"][1])) for each in query(prometheus, expression)):
                del missing[place]
        return not missing

    with suppress(AssertionError):
        eventually(all_show, "every panel shows something")
    assert not missing


def test_every_variable_of_a_dashboard_has_choices(prometheus: str) -> None:
    for board in BOARDS:
        for expression, label in choices(board):
            series = query(prometheus, filled(expression, VARIABLES))
            assert {each["metric"][label] for each in series}, board["uid"]


def test_every_alert_reads_what_there_is(prometheus: str) -> None:
    """Each of its selectors finds something, but for metrics of GPUs, and the whole is understood."""
    for rule in alerts():
        query(prometheus, rule["expr"])
        for selector in selectors(rule["expr"]):
            series = ONLY_WITH_A_GPU in selector.text or query(prometheus, selector.text)
            assert series, f"{rule['alert']}: {selector.text}"


def test_a_process_that_two_discoveries_list_is_scraped_once(prometheus: str) -> None:
    names = [each["metric"]["name"] for each in query(prometheus, 'up{job="baton"}')]
    assert len(names) == len(set(names)) >= len(PROCESSES) - 1


def test_the_hops_add_up_to_the_time_to_first_token(site: Site, pages: object) -> None:
    """Exactly: no request of this load has moved to another worker after its first token."""
    here = samples(site.cluster, "router")
    assert total(here, "request_hop_seconds_sum") == pytest.approx(total(here, "time_to_first_token_seconds_sum"))
    assert total(here, "handoff_seconds_count") > 0
    assert total(here, "handoff_bytes_total") > 0


def test_a_refused_request_is_no_goodput(site: Site, pages: object) -> None:
    met, missed = (
        metric(site.cluster, "router", "slo_requests_total", objective="all", met=each) for each in ("true", "false")
    )
    assert met >= 1
    assert missed >= 1
    with suppress(BatonError):
        site.ask([1, 2, 3])
    eventually(
        lambda: metric(site.cluster, "router", "slo_requests_total", objective="ttft") > met + missed, "it is judged"
    )
