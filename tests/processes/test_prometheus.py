"""A real Prometheus discovers a real cluster, scrapes every process of it, and answers questions."""

import time
from pathlib import Path
from typing import Any

from deploy.local import LocalCluster
from tests.support import workload
from tests.support.prometheus import program, query, scraping

DEADLINE = 60.0


def until(address: str, expression: str, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + DEADLINE
    while len(series := query(address, expression)) < count:
        assert time.monotonic() < end, f"{expression} gave {series}"
        time.sleep(0.2)
    return series


def test_every_process_is_discovered_scraped_and_counted(path: Path, tmp_path: Path) -> None:
    program("prometheus")
    with LocalCluster(workload.settings(path, 1, 1), tmp_path / "cluster") as cluster:
        for _ in range(2):
            workload.ask(cluster.address, list(range(3, 203)), 8)
        discovery = {"url": f"http://{cluster.addresses.http}/discovery", "refresh_interval": "1s"}
        job = {"job_name": "baton", "http_sd_configs": [discovery]}
        with scraping({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}, tmp_path) as address:
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
