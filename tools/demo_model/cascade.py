"""Measure a cascade on questions about facts: `python -m tools.demo_model.cascade SMALL LARGE [--prompts N]`.

The prompts are those of `evaluate.py`. A local cluster serves both checkpoints in float32, each with one decode worker,
and a cascade for each bound. For each bound, the table has the share of requests that the large model answered, recall,
and the cost beside that of the large model alone. A token costs the parameters of its model, in prompts and outputs.
First answers that were repeated count, too. No prompt is cached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
from safetensors import safe_open
from tokenizers import Tokenizer

from baton import config
from baton.client import Client
from baton.config import CascadeConfig, FurtherModel
from deploy.local import LocalCluster
from tools.demo_model.evaluate import MAX_TOKENS, SEED, Prompt, prompts, right

DISTANCES = (300, 500, 1_000, 1_500)
BOUNDS = (-0.5, -0.2, -0.1, -0.05, -0.02, -0.01)
TOKENS = 16


@dataclass(frozen=True)
class Row:
    """The answers of one model's name."""

    name: str
    escalated: float  # share of the requests that the large model answered after the small one
    recall: float
    cost: int


def settings(small: Path, large: Path) -> config.Config:
    """Return the configuration of a cluster with both models, and a cascade for each bound."""
    pool = "256MiB"
    first = config.load(
        None,
        {
            **{f"router.{kind}_port": 0 for kind in ("grpc", "internal", "http")}, "api.port": 0,
            "model.path": str(small), "model.served_model_name": "small", "model.dtype": "float32",
            "model.speculation": "off", "cluster.prefill": 0, "decode.kv_cache_bytes": pool,
            "store.host_cache_bytes": pool, "router.explain_requests": 10_000,
        },
    )  # fmt: skip
    second = msgspec.structs.replace(first.model, path=str(large), served_model_name="large")
    cascades = {
        str(bound): CascadeConfig(small="small", large="large", min_logprob=bound, tokens=TOKENS) for bound in BOUNDS
    }
    return msgspec.structs.replace(first, models=(FurtherModel(model=second, prefill=0),), cascades=cascades)


def parameters(checkpoint: Path) -> int:
    """Return how many parameters a checkpoint has."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 it is no mapping


def measure(client: Client, tokenizer: Tokenizer, name: str, batch: Sequence[Prompt], sizes: dict[str, int]) -> Row:
    """Ask all prompts, greedily."""

    def ask(one: Prompt) -> tuple[bool, bool, int]:
        answer = client.generate(
            one.tokens, model=name, max_tokens=MAX_TOKENS, temperature=0.0, cache_salt=name, timeout=300
        ).result()
        choice = client.explain(answer.request_id).request.cascade
        cost = (len(one.tokens) + len(answer.token_ids)) * sizes[choice.chosen if choice else name]
        if choice is not None and choice.reason == "unsure":
            first = client.explain(choice.first).request
            cost += (first.prompt_tokens + first.completion_tokens) * sizes["small"]
        return right(tokenizer, one, answer.token_ids), choice is not None and choice.reason == "unsure", cost

    with ThreadPoolExecutor(8) as threads:
        hits, unsure, costs = zip(*threads.map(ask, batch), strict=True)
    return Row(name, sum(unsure) / len(batch), sum(hits) / len(batch), sum(costs))


def report(rows: Sequence[Row]) -> str:
    """Return the table of `docs/deploy.md`. The large model's row is the last."""
    lines = ["| `min_logprob` | large answered | recall | cost |", "|---|---:|---:|---:|"]
    for row in rows:
        share = 1.0 if row is rows[-1] else row.escalated
        lines.append(f"| {row.name} | {share:.1%} | {row.recall:.1%} | {row.cost / rows[-1].cost:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--prompts", type=int, default=100, help="prompts for each distance")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    parser.add_argument("--seed", type=int, default=SEED, help="of the prompts; another one gives fresh prompts")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.small / "tokenizer.json"))
    batch = [
        one
        for distance in arguments.distances
        for one in prompts(tokenizer, distance, arguments.prompts, arguments.seed)
    ]
    sizes = {"small": parameters(arguments.small), "large": parameters(arguments.large)}
    with (
        LocalCluster(settings(arguments.small, arguments.large)) as cluster,
        Client(cluster.address, cluster.operator) as client,
    ):
        names = ("small", *map(str, BOUNDS), "large")
        rows = [measure(client, tokenizer, name, batch, sizes) for name in names]
    print(f"{len(batch)} prompts; parameters: small {sizes['small']:,}, large {sizes['large']:,}; {TOKENS} tokens")
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
