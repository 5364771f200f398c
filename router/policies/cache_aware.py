"""SGLang's `cache_aware`: the worker that was last sent the longest prefix, unless load is out of balance.

Source: sgl-router (`policies/cache_aware.rs` of sgl-project/sglang, now smg), with its launcher's defaults. The router
records the prefixes it has sent to each worker. It never asks for the pages that a worker still has.

    out of balance   max − min > 64  and  max > 1.5 · min, of the workers' requests: the least loaded worker
    otherwise        matched / prompt > 0.3: the worker that was sent the longest match, most recently;
                     else the worker that was sent the fewest pages in all

For split pools its manual uses `cache_aware` for prefill and power of two for decode. Its history evicts the oldest
entries beyond 2²⁶ characters a worker. No trace here comes near that, and our history evicts nothing.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from router.policies.balance import PowerOfTwo
from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage


class CacheAware(Rule):
    """The rule with its history. A page's key identifies its whole prefix, so a table of keys is a prefix tree."""

    def __init__(self, seed: int, threshold: float = 0.3, most_apart: int = 64, most_times: float = 1.5) -> None:
        self._threshold = threshold
        self._most_apart = most_apart
        self._most_times = most_times
        self._sent: dict[bytes, dict[str, None]] = {}  # the workers that each page was sent to, the most recent last
        self._size: Counter[str] = Counter()  # pages
        self._decode = PowerOfTwo(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        if stage == "decode":
            return self._decode.choose(stage, prompt, workers)
        chosen = self._choose(prompt, workers)
        for key in prompt.keys:
            holders = self._sent.setdefault(key, {})
            self._size[chosen.name] += chosen.name not in holders
            holders.pop(chosen.name, None)
            holders[chosen.name] = None
        return chosen

    def _choose(self, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        by_name = {worker.name: worker for worker in workers}
        loads = [worker.requests for worker in workers]
        if max(loads) - min(loads) > self._most_apart and max(loads) > self._most_times * min(loads):
            return min(workers, key=lambda worker: (worker.requests, worker.name))
        matched, holder = 0, None
        for page, key in enumerate(prompt.keys, 1):
            live = [name for name in self._sent.get(key, ()) if name in by_name]
            if not live:
                break
            matched, holder = page, live[-1]
        if holder is not None and matched * prompt.page_size > self._threshold * prompt.tokens:
            return by_name[holder]
        return min(workers, key=lambda worker: (self._size[worker.name], worker.name))
