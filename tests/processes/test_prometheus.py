"""A real Prometheus discovers a real cluster, scrapes every process of it, and answers questions."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.local import LocalCluster
from tests.support import workload

DEADLINE = 60.0


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server: installed, or unpacked from Debian's package, which runs as any user."""
    if installed := shutil.which("prometheus"):
        return Path(installed)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip("no prometheus on PATH, and no apt-get to fetch Debian's package with")
    folder = tmp_path_factory.mktemp("prometheus")
    for command in (
        ["apt-get", "download", "prometheus"],
        ["apt-get", "update"],
        ["apt-get", "download", "prometheus"],
    ):
        fetched = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
        if package := next(folder.glob("prometheus_*.deb"), None):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, timeout=60)
            return folder / "usr" / "bin" / "prometheus"
    pytest.skip(f"Debian's prometheus package can't be fetched: {fetched.stderr.decode(errors='replace')[-200:]}")


@contextmanager
def scraping(server: Path, discovery: str, folder: Path) -> Iterator[str]:
    """Run Prometheus against a discovery endpoint; gives its own address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {"job_name": "baton", "http_sd_configs": [{"url": discovery, "refresh_interval": "1s"}]}
                ],
            }
        )
    )
    command = [
        str(server),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(timeout=20)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to it now; nothing while it isn't up."""
    try:
        with urllib.request.urlopen(
            f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=5
        ) as answer:
            return json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return []


def until(address: str, expression: str, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + DEADLINE
    while len(found := query(address, expression)) < count:
        assert time.monotonic() < end, f"{expression} gave {found}"
        time.sleep(0.2)
    return found


def test_every_process_is_discovered_scraped_and_counted(
    prometheus: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with LocalCluster(workload.settings(checkpoint("llama"), 1, 1), tmp_path / "cluster") as cluster:
        for _ in range(2):
            workload.ask(cluster.address, list(range(3, 203)), 8)
        assert cluster.addresses is not None
        with scraping(prometheus, f"http://{cluster.addresses.http}/discovery", tmp_path) as address:
            up = until(address, "up == 1", 4)
            assert {(each["metric"]["role"], each["metric"]["name"]) for each in up} == {
                ("router", "router"),
                ("store", "store-0"),
                ("prefill", "prefill-0"),
                ("decode", "decode-0"),
            }
            for expression in (
                "baton_time_to_first_token_seconds_count == 2",
                "baton_inter_token_latency_seconds_count > 0",
                "baton_generation_tokens_total{role='decode'} == 16",
                "baton_request_success_total{finished_reason='length'} == 2",
                "baton_prefix_cache_hits_total > 0",
                "baton_prompt_tokens_computed_total{role='prefill'} == 199",
                "baton_pages_copied_total{role='prefill',direction='out'} == 13",
                "baton_pages_copied_total{role='decode',direction='in'} == 13",
                "baton_kv_cache_usage_perc{tier='host'} == 0",
                "baton_kv_pages{tier='host',state='sealed'} > 0",
                "baton_num_preemptions_total == 0",
            ):
                until(address, expression, 1)
