"""llm-d's scorers: a weighted sum of scores between 0 and 1. The highest sum wins, and ties are broken at random.

Source: the plugins of llm-d's scheduler and of the Gateway API Inference Extension, with the weights of their example
configurations:

    3 · prefix   pages that match / pages of the prompt; a page in host memory counts 0.8 (precise-prefix-cache-scorer)
    2 · KV       1 − share of the pool in use (kv-cache-utilization-scorer)
    2 · queue    (longest − own) / (longest − shortest) of the queues, 1 where all are as long (queue-scorer)

The prefix score counts for the prefill stage and not for the decode stage, and every prompt is sent to a prefill
worker. (An example configuration that scores it for both skips prefill workers if at most 16 tokens are not cached.
That is less than a page of the traces.) The queue is vLLM's: requests whose prefill has not begun. llm-d reads queue
and KV use from metrics that are up to 50 ms old. Here they are current.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest

_PREFIX, _KV, _QUEUE = 3.0, 2.0, 2.0
_HOST = 0.8


class LlmD(Rule):
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        queues = [_queue(worker) for worker in workers]
        shortest, longest = min(queues), max(queues)

        def score(worker: RuleWorker) -> float:
            queue = (longest - _queue(worker)) / (longest - shortest) if longest > shortest else 1.0
            kv = 1.0 - min(1.0, worker.pages / worker.pool_pages)
            prefix = (worker.device + _HOST * worker.host) / prompt.pages if prompt.pages else 0.0
            return (_PREFIX * prefix if stage != "decode" else 0.0) + _KV * kv + _QUEUE * queue

        return lowest(workers, lambda worker: -score(worker), self._random)


def _queue(worker: RuleWorker) -> int:
    """Return the number of prompts without the one that is being computed."""
    return max(0, worker.prompts - 1)
