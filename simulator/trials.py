"""What a load would take of workers, by the sums of a timing model; and what a cluster makes of it, by simulation."""

# pyright: strict

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.config import Config
from baton.errors import InvalidRequest
from simulator.advice import Objectives, Trial, TrialResult
from simulator.cluster import Layout, SimulatedCluster
from simulator.mooncake import BLOCK
from simulator.timing import Timing
from simulator.workloads import Arrival

WARM_UP = 0.2  # of the requests: they fill queues and caches, and are not judged


@dataclass(frozen=True)
class Setting:
    """All that trials have in common. `load` comes at its own speed, in order of time."""

    load: Sequence[Arrival]
    timing: Timing
    config: Config
    objectives: Objectives
    seed: int


@dataclass(frozen=True)
class WorkDemand:
    """What a load takes if nothing waits and nothing is computed twice, in seconds of one worker."""

    prefill: float
    decode: float
    span: float  # seconds over which the load comes
    within: float  # share of the requests that meet both objectives where nobody else is served

    def speed(self, layout: Layout) -> float:
        """The multiple of the load's own speed at which one side of such a cluster has no time left."""
        if not layout.prefill:
            return self.span * layout.decode / (self.prefill + self.decode)
        return self.span * min(layout.prefill / self.prefill, layout.decode / self.decode)


def demand(setting: Setting) -> WorkDemand:
    """Raises InvalidRequest if the load is empty, or comes all at once, so that it has no speed.

    Decoding is counted at the largest batch whose step keeps the objective and whose pages fit: that is what a token
    costs at least. Prompts are counted without the blocks that came before.
    """
    load, timing, objectives = setting.load, setting.timing, setting.objectives
    if not load or load[-1].at <= load[0].at:
        raise InvalidRequest(f"a load of {len(load)} requests that come at once has no speed; take a longer one")
    chunk = setting.config.prefill.max_num_batched_tokens
    seen: set[int] = set()
    computing: list[float] = []
    for arrival in load:
        known = next((i for i, block in enumerate(arrival.blocks) if block not in seen), len(arrival.blocks))
        seen.update(arrival.blocks)
        cached = min(known * BLOCK, arrival.prompt - 1)
        computing.append(timing.prefill_cost.seconds(arrival.prompt - cached, cached, chunk))
    outputs = np.array([arrival.output for arrival in load], dtype=np.float64)
    contexts = np.array([arrival.prompt for arrival in load]) + outputs / 2
    mean = float((contexts * outputs).sum() / outputs.sum())
    each = timing.decode.row + timing.decode.context * mean
    fitting = setting.config.decode.kv_cache_bytes / (timing.token_bytes * mean)
    batch = max(1.0, min(fitting, (objectives.tpot - timing.decode.fixed) / each if each else fitting))
    steps = timing.decode.fixed + timing.decode.row + timing.decode.context * contexts
    lengths = np.array([arrival.prompt + arrival.output for arrival in load])
    within = (np.array(computing) + steps <= objectives.ttft) & (lengths <= timing.max_context)
    within &= (steps <= objectives.tpot) | (outputs == 1)
    return WorkDemand(
        prefill=sum(computing),
        decode=float(outputs.sum()) * (timing.decode.fixed / batch + each),
        span=load[-1].at - load[0].at,
        within=float(within.mean()),
    )


def serve(setting: Setting, trial: Trial) -> TrialResult:
    """Simulate a trial."""
    cluster = SimulatedCluster(trial.layout, setting.timing, setting.config, setting.seed)
    speed, objectives = trial.speed, setting.objectives
    wishes = (
        replace(arrival, at=arrival.at / speed, ttft=objectives.ttft, tpot=objectives.tpot) for arrival in setting.load
    )
    table = cluster.run(wishes).table()
    busy = cluster.utilisation()
    if "prefill" in busy:  # has nothing to do while the last tokens are decoded
        began, last = table["arrived"].min(), float((table["arrived"] + np.nan_to_num(table["ttft"])).max())
        busy["prefill"] *= (cluster.agenda.now - began) / max(last - began, 1e-9)
    return judged(table, objectives, busy)


def judged(
    table: Mapping[str, npt.NDArray[np.float64]], objectives: Objectives, busy: Mapping[str, float]
) -> TrialResult:
    """What came of the requests of a `Measures.table`, without those that warmed up."""
    arrived = np.sort(table["arrived"])
    arrived = arrived[min(int(WARM_UP * len(arrived)), len(arrived) - 2) :]
    rows = {name: column[table["arrived"] >= arrived[0]] for name, column in table.items()}
    finished = rows["finished"] > 0
    early = finished & (rows["ttft"] <= objectives.ttft)
    slow = early & (rows["tpot"] > objectives.tpot)  # NaN, of a single token, is not slow
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
