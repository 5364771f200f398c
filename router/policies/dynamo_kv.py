"""NVIDIA Dynamo's KV router: the worker with the fewest blocks to compute and to keep.

Source: Dynamo's own documentation, `docs/components/router/` (router-concepts, router-disaggregated-serving):

    to compute = max(active prefill blocks + prompt's blocks − credits, 0)
    cost       = prefill_load_scale · to compute + (active decode blocks + prompt's blocks)

Credits are 1 for each block on the worker's device, 0.75 in its host's memory, and 0.25 on its disk. Later blocks on
other nodes count 0.5, the documentation's value for a shared pool, since the stores form one here. Active prefill
blocks are those that were not cached when the request was sent. They count in full until the first token. With split
pools the prefill stage ignores decode blocks, and the decode stage uses only these. The scale is 1 and the temperature
0: the lowest cost wins, and ties are broken at random.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from router.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest

_DEVICE, _HOST, _DISK, _SHARED = 1.0, 0.75, 0.25, 0.5
_PREFILL_LOAD_SCALE = 1.0


class DynamoKv(Rule):
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        longest = max(worker.cached for worker in workers)
        return lowest(workers, lambda worker: cost(stage, prompt, worker, longest), self._random)


def cost(stage: Stage, prompt: RulePrompt, worker: RuleWorker, longest: int = 0) -> float:
    """Return the cost in blocks, which are our pages. `longest`: the longest cached prefix of the prompt on any
    node."""
    credits = _DEVICE * worker.device + _HOST * worker.host + _DISK * worker.disk
    credits += _SHARED * max(0, longest - worker.cached)
    compute = max(worker.prompt_tokens / prompt.page_size + prompt.pages - credits, 0.0)
    keep = worker.pages + prompt.pages
    match stage:
        case "prefill":
            return _PREFILL_LOAD_SCALE * compute
        case "decode":
            return keep
        case "both":
            return _PREFILL_LOAD_SCALE * compute + keep
