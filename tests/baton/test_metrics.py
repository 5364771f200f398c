"""A page of metrics: what is published, observed, and read while the page is made."""

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.metrics import TABLE, Metrics


def values(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_histograms_have_the_labels_and_buckets_of_their_kind() -> None:
    metrics = Metrics()
    metrics.observe("request_hop_seconds", 0.2, "queue")
    metrics.observe("request_hop_seconds", 0.3, "queue")
    metrics.observe("request_hop_seconds", 5.0, "handoff")
    metrics.observe("iteration_tokens_total", 300)
    page = values(metrics)
    assert page["baton_request_hop_seconds_sum", ("queue",)] == 0.5
    assert page["baton_request_hop_seconds_count", ("handoff",)] == 1
    assert page["baton_request_hop_seconds_bucket", ("queue", "0.25")] == 1
    assert page["baton_iteration_tokens_total_bucket", ("256.0",)] == 0
    assert page["baton_iteration_tokens_total_bucket", ("512.0",)] == 1


def test_a_loop_that_hangs_shows_its_age_though_it_publishes_nothing() -> None:
    metrics = Metrics()
    assert ("baton_loop_age_seconds", ()) not in values(metrics)
    metrics.loop_turned()
    began = time.monotonic()
    before = values(metrics)["baton_loop_age_seconds", ()]
    threading.Event().wait(0.05)
    after = values(metrics)["baton_loop_age_seconds", ()]
    assert 0.05 <= after - before <= time.monotonic() - began


def test_values_are_read_when_a_page_is_made() -> None:
    metrics, ages = Metrics(), iter((1.5, 2.5))
    metrics.publish({"num_requests_running": 3})
    metrics.read_at_scrape(lambda: {"step_age_seconds": next(ages)})
    assert values(metrics)["baton_step_age_seconds", ()] == 1.5
    page = values(metrics)
    assert (page["baton_step_age_seconds", ()], page["baton_num_requests_running", ()]) == (2.5, 3)


def test_every_process_tells_its_memory_and_its_descriptors() -> None:
    page = values(Metrics())
    assert page["process_resident_memory_bytes", ()] > 1_000_000
    assert 0 < page["process_open_fds", ()] < page["process_max_fds", ()]


def test_a_name_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError):
        Metrics().publish({"made_up": 1.0})
    with pytest.raises(KeyError):
        Metrics().observe("made_up", 1.0)
    assert all(spec.help.endswith(".") for spec in TABLE.values())
