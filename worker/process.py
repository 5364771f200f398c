"""A worker's life: the model is loaded once, and what is served around it may change.

    load ──▶ incarnation, prefill ──ChangeRole──▶ incarnation, decode ──LoadWeights──▶ incarnation, decode ──▶ …

Each role, and each change of weights, is a new incarnation. Whatever is still on its way to the one before is dropped,
as after a restart. Routers hear of it as of any process that joins. Only what is dear stays: the weights of a worker
that changes its role, the page pool with the size that it was given at the start, the engine's threads. What the pool
held is forgotten.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from baton.config import Config
from baton.errors import DeviceLost
from baton.hosts import LOOPBACK
from baton.messages import WorkerRole
from baton.process import settle
from baton.samples import Sample
from decode_worker.drafter import Drafter
from decode_worker.handed_proposals import HandedProposals
from decode_worker.proposers import NgramProposer
from decode_worker.scheduler import DecodeScheduler, DecodeStats
from prefill_worker.scheduler import PrefillScheduler, PrefillStats
from worker import draft
from worker.load_runner import load, reload
from worker.loop import WorkerLoop

log = logging.getLogger(__name__)


def run(
    role: WorkerRole,
    config: Config,
    name: str,
    node: str,
    routers: Sequence[str],
    stop: threading.Event,
    host: str = LOOPBACK,
) -> None:
    """Serve until `stop` is set, at first as `role`. `routers` are ZMQ endpoints, `node` names the store to use, `host`
    is this node's address. Raises ModelError, NotEnoughMemory or StartupError when it can't start, and DeviceLost when
    its device does nothing more for this process."""
    serves: WorkerRole | None = role
    with contextlib.ExitStack() as held:
        runner = held.enter_context(contextlib.closing(load(config, role)))
        drafter: Drafter | None = None
        while serves is not None:
            if serves == "decode" and drafter is None and runner.verifies:
                drafter = draft.load(config, runner)
            with WorkerLoop(config, serves, name, node, routers, host, runner) as worker:
                settle()
                log.info("%s worker %s serves with %d pages", serves, worker.peer.incarnation, worker.num_pages)
                try:
                    _SERVE[serves](worker, config, drafter, stop)
                except DeviceLost as error:
                    log.error("this process ends and must be replaced: %s", error)
                    raise
                if worker.next_weights and not stop.is_set():
                    held.pop_all()  # `reload` takes it over
                    runner = worker.load_weights(
                        partial(reload, runner, _with_model(config, worker.next_weights), role)
                    )
                    held.enter_context(contextlib.closing(runner))
                    if isinstance(drafter, HandedProposals):
                        drafter = None  # it is the old runner's
                serves = None if stop.is_set() else worker.next_role or serves


def _with_model(config: Config, path: str) -> Config:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def _serve_prefill(worker: WorkerLoop, config: Config, _: Drafter | None, stop: threading.Event) -> None:
    state = PrefillScheduler(
        config.prefill,
        config.pages.page_size,
        worker.num_pages,
        event_tokens=config.store.event_tokens,
        calibration=worker.calibration,
        vocab_size=worker.runner.vocab_size,
        copies_overlap=worker.runner.copies_overlap,
        groups=worker.runner.groups,
        fixed_borders=worker.runner.fixed_borders,
        adapters=worker.adapters.digests,
        recompute_share=config.pages.recompute_share,
        rings=not worker.runner.no_rings,
    )
    worker.serve(state, lambda: _prefill_samples(state.stats()), stop)


def _prefill_samples(stats: PrefillStats) -> Mapping[str, Sample]:
    return _samples(stats) | {
        "num_requests_running": stats.running - stats.waiting,
        "prompt_tokens_computed": stats.tokens_computed,
        "prompt_pages_cached": {
            ("device",): stats.pages_hit - stats.pages_hit_in_store,
            ("host",): stats.pages_hit_in_store,
        },
    }


def _serve_decode(worker: WorkerLoop, config: Config, drafter: Drafter | None, stop: threading.Event) -> None:
    state = DecodeScheduler(
        config.decode,
        config.pages.page_size,
        worker.num_pages,
        event_tokens=config.store.event_tokens,
        calibration=worker.calibration,
        vocab_size=worker.runner.vocab_size,
        grammars=worker.grammars,
        copies_overlap=worker.runner.copies_overlap,
        window=worker.runner.window,
        groups=worker.runner.groups,
        fixed_borders=worker.runner.fixed_borders,
        adapters=worker.adapters.digests,
        recompute_share=config.pages.recompute_share,
        proposer=NgramProposer if worker.speculates and config.model.speculation in ("auto", "ngram") else None,
        drafter=drafter if worker.speculates else None,
        verify_all=config.model.speculation != "auto",
        no_kv_windows=worker.runner.no_kv_windows,
        no_page_weights=worker.runner.no_page_weights,
    )
    worker.serve(state, lambda: _decode_samples(state.stats()), stop)


def _decode_samples(stats: DecodeStats) -> Mapping[str, Sample]:
    return _samples(stats) | {
        "num_requests_running": stats.running,
        "num_preemptions": stats.preemptions,
        "growth_reserve_pages": stats.growth_reserve,
        "generation_tokens": stats.tokens_generated,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "prompt_pages_cached": {("device",): stats.prompt_pages_device, ("host",): stats.prompt_pages_fetched},
        "kv_loads_incomplete": stats.kv_loads_incomplete,
        "write_through_refused": stats.writes_refused,
        "spec_decode_num_drafts": stats.speculation.drafts,
        "spec_decode_num_draft_tokens": stats.speculation.draft_tokens,
        "spec_decode_num_accepted_tokens": stats.speculation.accepted_tokens,
    }


def _samples(stats: PrefillStats | DecodeStats) -> dict[str, Sample]:
    used = stats.pages_total - stats.pages_free
    return {
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": {("device",): used / stats.pages_total},
        "kv_pages": {("device", "used"): used, ("device", "free"): stats.pages_free},
        "prefix_tokens_copied": stats.tokens_copied,
        "pages_refilled": stats.pages_refilled,
        "pages_recomputed": stats.pages_recomputed,
        "pages_differing": stats.pages_differing,
        "load_regret_seconds": {(tier,): seconds for tier, seconds in stats.load_regret.items()},
    }


_SERVE: Mapping[WorkerRole, Callable[[WorkerLoop, Config, Drafter | None, threading.Event], None]] = {
    "prefill": _serve_prefill,
    "decode": _serve_decode,
}
