"""What work costs on each worker, in seconds, as fitted to the steps that it reports.

    a step that computes prompts   fixed + token · tokens + pair · pairs
    a decode step                  fixed + row · rows + context · tokens of all its sequences
    a step of both                 the sum of the two, with one `fixed`, and `mixed`

A placement takes `fixed` for `mixed`: each step of a prompt is priced with it, wherever that is computed.

A *pair* is a prompt token and a position that it attends to, itself included. Pairs make the end of a long prompt
slower than its beginning. `baton.step_cost_model` finds the coefficients, and workers plan their steps with the same
fit. A worker that has served no request yet is predicted from its calibration, which its Hello carries, and from other
workers of its role. All serve the same model.

How fast pages come from lower tiers and other nodes is measured by the stores that bring them, and told in their
heartbeats: see `kvstore.load_or_recompute`. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from baton.messages import LoadReport, Role, StepSample
from baton.step_cost_model import StepCoefficients, StepCostModel, pairs
from kvstore.load_or_recompute import DEFAULT_PREFILL_RATE
from router.placement.prediction_error import PredictionErrors

_FORGIVEN = 5.0  # seconds without a step
_SLOWER = 2.0  # times the others' drift


class PrefillCost(Struct, frozen=True):
    """Of computing prompts on one worker: seconds of a step, of a prompt token, of a pair."""

    fixed: float
    token: float
    pair: float

    def seconds(self, new: int, context: int = 0, chunk: int | None = None) -> float:
        """Computing `new` tokens behind `context` ones whose keys and values are there already, `chunk` tokens a step;
        by default all in one. Nothing new takes no time."""
        if new <= 0:
            return 0.0
        steps = -(-new // chunk) if chunk else 1
        return steps * self.fixed + new * self.token + pairs(new, context) * self.pair


class DecodeCost(Struct, frozen=True):
    """Of decoding on one worker: seconds of a step, of a sequence in it, of a token of their contexts."""

    fixed: float
    row: float
    context: float

    def seconds(self, rows: int, context: int) -> float:
        """A step of `rows` sequences of `context` tokens in all."""
        return self.fixed + rows * self.row + context * self.context


@dataclass
class _Worker:
    role: Role
    model: StepCostModel
    step: int = 0  # the last that was learned from
    rated: bool = False  # it has told how fast it computes prompts
    calibration: Sequence[StepSample] = ()
    calibrated: StepCoefficients = field(default_factory=StepCoefficients)  # what was known when it joined
    idle_step: int = 0  # its last step when that was last looked at,
    idle_since: float = inf  # and since when it has run no other, seconds

    @property
    def known(self) -> bool:
        """Whether there is any evidence of what prompts cost on it."""
        return self.rated or self.model.knows_prompts

    @property
    def drift(self) -> float:
        """How many times as long its steps take as when it joined."""
        work = {"rows": 1} if self.role == "decode" else {"tokens": 1}
        before = self.calibrated.of(**work)
        return self.model.cost.of(**work) / before if before else 1.0


class FittedCosts:
    """What work costs on each live worker. Scores what it says of steps that are reported."""

    def __init__(self, errors: PredictionErrors) -> None:
        self._workers: dict[str, _Worker] = {}  # by incarnation
        self._errors = errors

    def join(self, incarnation: str, role: Role, calibration: Sequence[StepSample]) -> None:
        """A worker is live from now on."""
        alike = [worker.model for worker in self._workers.values() if worker.role == role]
        elders = [model for model in alike if model.knows_anything]
        model = StepCostModel.from_peers(elders) if elders else StepCostModel(_rated(DEFAULT_PREFILL_RATE))
        model.calibrate(calibration)
        self._workers[incarnation] = _Worker(role, model, calibration=calibration, calibrated=model.cost)

    def observe(self, incarnation: str, step: int, load: LoadReport) -> None:
        """A heartbeat: the worker has run so many steps, of which it tells the last. Those known are skipped. Until
        there are any, it is as fast as it says."""
        worker = self._workers[incarnation]
        new = load.steps[-(step - worker.step) :] if step > worker.step else ()
        worker.step = max(worker.step, step)
        if new:
            for sample in new:
                predicted = worker.model.cost.of(sample.tokens, sample.pairs, sample.rows, sample.context)
                self._errors.add_pair("prefill" if sample.tokens else "step", predicted, sample.seconds)
            worker.model.observe(*new)
        elif load.prefill_rate and not worker.model.knows_anything:
            worker.model, worker.rated = StepCostModel(_rated(load.prefill_rate)), True

    def forgive(self, incarnation: str, now: float) -> None:
        """Take a worker that has become much slower than others for as fast as it was when it joined, once it has run
        no step for a while: the next request tells. Call with each heartbeat, after `observe`."""
        worker = self._workers[incarnation]
        if worker.idle_step != worker.step or worker.idle_since == inf:
            worker.idle_step, worker.idle_since = worker.step, now
        elif now - worker.idle_since > _FORGIVEN and worker.calibration:
            drifts = sorted(each.drift for each in self._workers.values() if each.role == worker.role)
            if worker.drift > _SLOWER * drifts[(len(drifts) - 1) // 2]:
                worker.model = StepCostModel(worker.calibrated)
                worker.model.calibrate(worker.calibration)

    def forget(self, incarnation: str) -> None:
        """A worker has gone."""
        self._workers.pop(incarnation, None)

    def prefill(self, incarnation: str) -> PrefillCost:
        """Of a live worker. One of which nothing is known passes for the quickest of all: or it would look slow beside
        those that have worked, and never be given the work that tells."""
        worker = self._workers[incarnation]
        cost = worker.model.cost
        if not worker.known:
            known = [other.model.cost for other in self._workers.values() if other.known]
            cost = min(known, key=lambda each: each.token, default=cost)
        return PrefillCost(cost.fixed, cost.token, cost.pair)

    def step(self, incarnation: str) -> DecodeCost:
        """Of a live worker."""
        return _decoding(self._workers[incarnation].model.cost)

    def calibrated_step(self, incarnation: str) -> DecodeCost:
        """Of a live worker, as it was when it joined."""
        return _decoding(self._workers[incarnation].calibrated)


def _decoding(cost: StepCoefficients) -> DecodeCost:
    return DecodeCost(cost.fixed, cost.row, cost.context)


def _rated(rate: float) -> StepCoefficients:
    """Of a worker of which nothing is known but the prompt tokens that it computes per second."""
    return StepCoefficients(token=1 / rate)
