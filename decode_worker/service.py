"""The decode worker's loop: it owns the engine, the sockets and the clock, and does what `DecodeState` says."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from baton.config import Config
from baton.metrics import Sample
from decode_worker.state import DecodeState, DecodeStats
from engine.worker import Worker


def serve(worker: Worker, config: Config, stop: threading.Event) -> None:
    """Serve until `stop` is set or the worker is to become something else."""
    state = DecodeState(
        config.decode,
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
            worker.hear_store(state, copying=False)
            with worker.tracer.span("prepare", "scheduler"):
                worker.do(state.prepare(worker.clock.now()))
            if plan := worker.plan(state):
                worker.handle(state, worker.step(state, plan))
            worker.publish(state, lambda: _values(state.stats()))


def _values(stats: DecodeStats) -> Mapping[str, Sample]:
    used = stats.pages_total - stats.pages_free
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": {("device",): used / stats.pages_total},
        "kv_pages": {("device", "used"): used, ("device", "free"): stats.pages_free},
        "num_preemptions": stats.preemptions,
        "headroom_pages": stats.headroom,
        "generation_tokens": stats.tokens_generated,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "load_regret_seconds": {(tier,): seconds for tier, seconds in stats.load_regret.items()},
        "prompt_pages_cached": {("device",): stats.prompt_pages_device, ("host",): stats.prompt_pages_fetched},
        "fetches_short": stats.fetches_short,
        "pages_not_written": stats.ships_refused,
    }
