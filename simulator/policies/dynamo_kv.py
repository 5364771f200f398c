"""NVIDIA Dynamo's KV router: the fewest blocks to compute and to keep.

Source: Dynamo's own documentation, `docs/components/router/` (router-concepts, router-disaggregated-serving):

    to compute = max(active prefill blocks + prompt's blocks − credits, 0)
    cost       = prefill_load_scale · to compute + (active decode blocks + prompt's blocks)

Credits are 1 for each block on the worker's device, 0.75 in its host's memory, 0.25 on its disk, and 0.5 for those
behind them that are on other nodes: the documentation's value for a pool shared by all, which the stores make here.
Active prefill blocks are those that were not cached when they were sent, and count in full until the first token. With
split pools the prefill stage ignores decode blocks, and the decode stage looks at these alone. The scale is 1 and the
temperature 0: the lowest cost, any of those that are equal.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from simulator.policies.rule import Rule, RulePrompt, RuleWorker, Stage, lowest

_DEVICE, _HOST, _DISK, _SHARED = 1.0, 0.75, 0.25, 0.5
_PREFILL_LOAD_SCALE = 1.0


class DynamoKv(Rule):
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, stage: Stage, prompt: RulePrompt, workers: Sequence[RuleWorker]) -> RuleWorker:
        longest = max(worker.cached for worker in workers)
        return lowest(workers, lambda worker: cost(stage, prompt, worker, longest), self._random)


def cost(stage: Stage, prompt: RulePrompt, worker: RuleWorker, longest: int = 0) -> float:
    """In blocks, which are our pages. `longest`: of the prompt, on any node."""
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
