"""The reference of streams that deaths disturb: what the same engine answers in a cluster that nothing disturbs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import Generated
from deploy.local import LocalCluster
from tests.support import checkpoints, workload

TIE_OF_EXPERTS = 1e-3  # of their logits: routers' differ by so much between implementations


@dataclass(frozen=True)
class Stream:
    """A prompt, and how tokens are drawn: greedily, or with a seed. `repeats`: mostly the same token, so that proposals
    are right and wrong."""

    prompt: tuple[int, ...]
    seed: int | None = None
    repeats: bool = False

    def ask(self, address: str, count: int, timeout: float = 120.0) -> Generated:
        drawn: dict[str, Any] = {} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        drawn |= {"logit_bias": {7: 30.0, 9: 27.0}} if self.repeats else {}
        return workload.ask(address, self.prompt, count, timeout=timeout, **drawn)


def undisturbed(
    path: Path, folder: Path, streams: Sequence[Stream], count: int, **settings: object
) -> dict[Stream, list[int]]:
    """Ask a colocated cluster for one stream after the other. In float32 the greedy tokens must be those of
    transformers, too, but where its two best logits tie, or two experts of a mixture."""
    config = workload.settings(path, 0, 1, **{"router.disaggregation": "auto", **settings})
    with LocalCluster(config, folder) as cluster:
        answers = {stream: stream.ask(cluster.address, count) for stream in streams}
    if config.model.dtype == "float32":
        model = checkpoints.reference(path)
        greedy = [
            stream
            for stream in streams
            if stream.seed is None
            and not stream.repeats
            and model.expert_gap([*stream.prompt, *answers[stream].token_ids]) > TIE_OF_EXPERTS
        ]
        prompts = [stream.prompt for stream in greedy]
        expected = workload.references(path, prompts, count)
        workload.compare(path, prompts, [answers[stream] for stream in greedy], expected)
    return {stream: answer.token_ids for stream, answer in answers.items()}
