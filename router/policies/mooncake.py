"""Mooncake's Algorithm 1: the prefill worker with the lowest predicted TTFT, including copies of longer prefixes.

Source: Qin et al., Mooncake, FAST '25 (arXiv:2407.00079), section 6. For each prefill worker

    prefix, transfer = (its own, 0)                                  where longest / own ≤ threshold
                       (the longest, time to send missing pages)     otherwise
    TTFT             = transfer + queue + prefill(prompt, prefix)

and then a decode worker by load, here the one with the shortest predicted step. The queue is the sum of the predicted
prefill times of its prompts. The published predictor was fitted offline. Ours are the cost models that the router
learns. A request is rejected if either prediction misses its objective.

Copied pages stay at the receiver. The algorithm's final copy of a hot prefix, on the same condition, is therefore the
transfer itself. Differences from the paper: its threshold is not published (2 here), and the ratio of a worker without
any page of the prefix counts as infinite.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest

_THRESHOLD = 2.0


class Mooncake(Rule):
    def __init__(self, seed: int, threshold: float = _THRESHOLD) -> None:
        self._random = Random(seed)
        self._threshold = threshold

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker | None:
        if stage == "decode":
            chosen = lowest(workers, lambda worker: _step(prompt, worker), self._random)
            return chosen if prompt.tpot is None or _step(prompt, chosen) <= prompt.tpot else None
        longest = max(worker.cached for worker in workers)
        chosen = lowest(workers, lambda worker: self.ttft(prompt, worker, longest), self._random)
        return chosen if prompt.ttft is None or self.ttft(prompt, chosen, longest) <= prompt.ttft else None

    def prefix(self, chosen: RuleWorker, workers: Sequence[RuleWorker]) -> int:
        longest = max(worker.cached for worker in workers)
        return longest if self.copies(chosen, longest) else chosen.cached

    def copies(self, worker: RuleWorker, longest: int) -> bool:
        """Whether this worker should fetch the longest prefix from its holder."""
        return worker.link > 0 and longest > self._threshold * worker.cached

    def ttft(self, prompt: RulePrompt, worker: RuleWorker, longest: int) -> float:
        """Return the predicted seconds until the prompt is computed."""
        prefix, transfer = worker.cached, 0.0
        if self.copies(worker, longest):
            prefix, transfer = longest, (longest - worker.cached) * prompt.page_bytes / worker.link
        known = prefix * prompt.page_size
        return transfer + worker.queue + worker.prefill.seconds(prompt.tokens - known, known)


def _step(prompt: RulePrompt, worker: RuleWorker) -> float:
    """Return the seconds of a step with this request in it."""
    return worker.step.seconds(worker.requests + 1, worker.context + prompt.tokens)
