"""Mooncake's Algorithm 1: the prefill worker with the lowest predicted TTFT, where a prefix much longer than its own is
worth being copied to it.

Source: Qin et al., Mooncake, FAST '25 (arXiv:2407.00079), section 6. For each prefill worker

    prefix, transfer = (its own, 0)                                  where longest / own ≤ threshold
                       (the longest, time to send what it lacks)     elsewhere
    TTFT             = transfer + queue + prefill(prompt, prefix)

and then a decode worker by load, here the one with the shortest predicted step. The queue is the sum of what its
prompts take to compute; the published predictor was fitted offline, ours are the cost models that the router learns. A
request is rejected where either prediction misses its objective.

What is copied stays where it went, so the copy of a hot prefix that ends the algorithm, on the same condition, is
the transfer itself. Different from the paper: which threshold it used is not published (2 here); where a worker has
nothing of the prefix, its ratio counts as infinite.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from simulator.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest

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
        """Whether this worker is to get the longest prefix from whoever has it."""
        return worker.link > 0 and longest > self._threshold * worker.cached

    def ttft(self, prompt: RulePrompt, worker: RuleWorker, longest: int) -> float:
        """Predicted seconds until the prompt is computed."""
        prefix, transfer = worker.cached, 0.0
        if self.copies(worker, longest):
            prefix, transfer = longest, (longest - worker.cached) * prompt.page_bytes / worker.link
        known = prefix * prompt.page_size
        return transfer + worker.queue + worker.prefill.seconds(prompt.tokens - known, known)


def _step(prompt: RulePrompt, worker: RuleWorker) -> float:
    """Seconds of a step with this request in it."""
    return worker.step.seconds(worker.requests + 1, worker.context + prompt.tokens)
