"""Estimate a load's demand from a timing model, and simulate a cluster under the load."""

# pyright: strict

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.config import Config
from baton.errors import InvalidRequest
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.advice import Objectives, Trial, TrialResult
from simulator.cluster import Layout, SimulatedCluster
from simulator.mooncake import BLOCK, TraceLine
from simulator.sessions import Sessions, recordings, tokens_of_parent
from simulator.timing import ModelTiming
from simulator.workloads import Arrival, Wishes

WARM_UP = 0.2  # share of the requests that fill queues and caches and are not measured


@dataclass(frozen=True)
class Setting:
    """The settings that all trials share. `load` is at its own speed, ordered by time.

    With `sessions` there is no load: users play them in a closed loop, as many as the speed says. They begin `requests`
    turns, about.
    """

    load: Sequence[Arrival]
    timing: ModelTiming
    config: Config
    objectives: Objectives
    seed: int
    sessions: Sequence[TraceLine] = ()
    requests: int = 0
    groups: WindowGroups = NO_GROUPS  # of the model's layers


@dataclass(frozen=True)
class WorkDemand:
    """The work of a load without waits and without computing a block twice, in seconds of one worker."""

    prefill: float
    decode: float
    span: float  # duration of the load, in seconds; of sessions, with a single user
    within: float  # share of the requests that meet both objectives on an otherwise idle cluster

    def speed(self, layout: Layout) -> float:
        """Return the multiple of the load's own speed at which one role of such a cluster is saturated."""
        if not layout.prefill:
            return self.span * layout.decode / (self.prefill + self.decode)
        return self.span * min(layout.prefill / self.prefill, layout.decode / self.decode)


def demand(setting: Setting) -> WorkDemand:
    """Return the demand of the load. Raises InvalidRequest if the load is empty or comes all at once, without a speed.

    Decoding is counted at the largest batch whose step meets the objective and whose pages fit: the least cost of a
    token. Prompts are counted without blocks that occurred earlier.
    """
    timing, objectives = setting.timing, setting.objectives
    work = _work_of_sessions(setting) if setting.sessions else _work_of_load(setting.load)
    chunk = setting.config.prefill.max_num_batched_tokens
    computing = [timing.costs.prefill_cost.seconds(prompt - cached, cached, chunk) for prompt, cached, _ in work]
    prompts = np.array([prompt for prompt, _, _ in work])
    outputs = np.array([output for _, _, output in work], dtype=np.float64)
    contexts = prompts + outputs / 2
    mean = float((contexts * outputs).sum() / outputs.sum())
    each = timing.decode.row + timing.decode.context * mean
    seen = min(mean, setting.groups.tokens + setting.config.pages.page_size)
    held = mean + setting.groups.count * seen
    fitting = setting.config.decode.kv_cache_bytes.on_cpu / (timing.token_bytes * held)
    batch = max(1.0, min(fitting, (objectives.tpot - timing.decode.fixed) / each if each else fitting))
    steps = timing.decode.fixed + timing.decode.row + timing.decode.context * contexts
    lengths = prompts + outputs
    within = (np.array(computing) + steps <= objectives.ttft) & (lengths <= timing.max_context)
    within &= (steps <= objectives.tpot) | (outputs == 1)
    times = 1.0
    if setting.sessions:
        times = setting.requests / len(work)
        gaps = sum(turn.after_ms or 0.0 for turn in setting.sessions) / 1_000
        span = gaps + sum(computing) + float((steps * outputs).sum())
    else:
        span = setting.load[-1].at - setting.load[0].at
    return WorkDemand(
        prefill=times * sum(computing),
        decode=times * float(outputs.sum()) * (timing.decode.fixed / batch + each),
        span=times * span,
        within=float(within.mean()),
    )


_Work: TypeAlias = list[tuple[int, int, int]]
"""Of each request: the prompt, the part of it that a cache without limits has, and the output, in tokens."""


def _work_of_load(load: Sequence[Arrival]) -> _Work:
    if not load or load[-1].at <= load[0].at:
        raise InvalidRequest(f"a load of {len(load)} requests that come at once has no speed; take a longer one")
    seen: set[int] = set()
    work: _Work = []
    for arrival in load:
        known = next((i for i, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks))
        seen.update(arrival.blocks)
        work.append((arrival.prompt, min(known * BLOCK, arrival.prompt - 1), arrival.output))
    return work


def _work_of_sessions(setting: Setting) -> _Work:
    return [
        (turn.input_length, min(tokens_of_parent(turns, place), turn.input_length - 1), max(1, turn.output_length))
        for turns in recordings(setting.sessions)
        for place, turn in enumerate(turns)
    ]


def serve(setting: Setting, trial: Trial) -> TrialResult:
    cluster = SimulatedCluster(trial.layout, setting.timing, setting.config, setting.seed, groups=setting.groups)
    speed, objectives = trial.speed, setting.objectives
    if setting.sessions:
        users = max(1, round(speed))
        wishes = Wishes(ttft=objectives.ttft, tpot=objectives.tpot)
        load = Sessions(setting.sessions, wishes, setting.seed).users(users, demand(setting).span / users)
    else:
        load = (
            replace(arrival, at=arrival.at / speed, ttft=objectives.ttft, tpot=objectives.tpot)
            for arrival in setting.load
        )
    table = cluster.run(load).table()
    busy = cluster.utilisation()
    if "prefill" in busy:  # prefill workers idle while the last tokens are decoded
        began, last = table["arrived"].min(), float((table["arrived"] + np.nan_to_num(table["ttft"])).max())
        busy["prefill"] *= (cluster.agenda.now - began) / max(last - began, 1e-9)
    return judged(table, objectives, busy)


def judged(
    table: Mapping[str, npt.NDArray[np.float64]], objectives: Objectives, busy: Mapping[str, float]
) -> TrialResult:
    """Return the result of the requests in a `Measures.table`, without the warm-up."""
    arrived = np.sort(table["arrived"])
    arrived = arrived[min(int(WARM_UP * len(arrived)), len(arrived) - 2) :]
    rows = {name: column[table["arrived"] >= arrived[0]] for name, column in table.items()}
    finished = rows["finished"] > 0
    early = finished & (rows["ttft"] <= objectives.ttft)
    slow = early & (rows["tpot"] > objectives.tpot)  # NaN, for a single token, is not slow
    prompts = float(rows["prompt"][finished].sum())
    return TrialResult(
        rate=(len(arrived) - 1) / float(arrived[-1] - arrived[0]),
        late=float(1 - early.mean()),
        slow=float(slow.mean()),
        ttft=_spread(rows["ttft"][finished]),
        tpot=_spread(rows["tpot"][finished]),
        hits=float(rows["cached"][finished].sum()) / prompts if prompts else 0.0,
        busy={role: busy[role] for role in ("prefill", "decode") if role in busy},
    )


def _spread(values: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    known = values[~np.isnan(values)]
    return (float(np.percentile(known, 50)), float(np.percentile(known, 99))) if len(known) else None
