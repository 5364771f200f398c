"""The prefill worker's loop: it owns the engine, the sockets and the clock, and does what `PrefillState` says."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from baton.config import Config
from baton.metrics import Sample
from engine.worker import Worker
from prefill_worker.state import PrefillState, PrefillStats


def serve(worker: Worker, config: Config, stop: threading.Event) -> None:
    """Serve until `stop` is set or the worker is to become something else."""
    state = PrefillState(
        config.prefill,
        config.pages.page_size,
        worker.num_pages,
        event_tokens=config.store.event_tokens,
        calibration=worker.calibration,
        vocab_size=worker.engine.config.vocab_size,
    )
    while not (stop.is_set() or worker.becomes):
        with worker.turn():
            for event in worker.events(state):
                worker.handle(state, event)
            worker.copy(state)
            worker.hear_store(state, copying=True)
            if plan := worker.plan(state):
                worker.handle(state, worker.step(state, plan))
                worker.copy(state)  # somebody may wait for what this step has made
            worker.publish(state, lambda: _values(state.stats()))


def _values(stats: PrefillStats) -> Mapping[str, Sample]:
    used = stats.pages_total - stats.pages_free
    return {
        "num_requests_running": stats.running - stats.waiting,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": {("device",): used / stats.pages_total},
        "kv_pages": {("device", "used"): used, ("device", "free"): stats.pages_free},
        "prompt_tokens_computed": stats.tokens_computed,
        "load_regret_seconds": {(tier,): seconds for tier, seconds in stats.load_regret.items()},
        "prompt_pages_cached": {
            ("device",): stats.pages_hit - stats.pages_hit_in_store,
            ("host",): stats.pages_hit_in_store,
        },
    }
