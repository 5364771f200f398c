"""SGLang's `cache_aware`: whoever was sent the longest prefix lately, unless load is out of balance.

Source: sgl-router (`policies/cache_aware.rs` of sgl-project/sglang, now smg), whose launcher's defaults these are. The
router remembers what it sent where, and never asks what a worker still has.

    out of balance   max − min > 64  and  max > 1.5 · min, of the requests that workers have: the least loaded
    otherwise        matched / prompt > 0.3: who was sent the longest match, most recently;
                     else who was sent least in all

With split pools its manual has prefill by `cache_aware` and decode by power of two. Its history forgets what is beyond
2²⁶ characters a worker, the oldest first; no trace here comes near that, and ours forgets nothing.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simulator.policies.balance import PowerOfTwo
from simulator.policies.rule import Rule, RulePrompt, RuleWorker, Stage


class CacheAware(Rule):
    """The rule, with its history: a page's key names all that comes before it, so a table of keys is a prefix tree."""

    def __init__(self, seed: int, threshold: float = 0.3, most_apart: int = 64, most_times: float = 1.5) -> None:
        self._threshold = threshold
        self._most_apart = most_apart
        self._most_times = most_times
        self._sent: dict[bytes, dict[str, None]] = {}  # to whom each page was sent; the last one comes last
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
