"""The prompts that exactness is tested with, what transformers says to them, and the comparison."""

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from baton import config
from baton.client import Client, Generated
from tests.support import checkpoints
from tests.support.engines import ENGINE

TIE = 1e-4  # two best logits closer than this may swap between implementations
TIES_ALLOWED = 0.005  # of all tokens
OUTPUT = 24  # tokens


PAGE = ENGINE.page_size  # tokens
PAGE_BYTES = 4 * 2 * 2 * PAGE * ENGINE.head_dim * 4
"""Of the "llama" checkpoint: layers, K and V, heads, tokens, dimensions, float32."""

SLOW_ENGINE = {"model.native": False}
"""Native kernels compute a prompt of this small a model before a disk could have read it, or anybody could have killed
a process in the middle of it."""

SMALL_TIERS = {
    **SLOW_ENGINE,  # so that loading a page is worth it
    "cluster.heartbeat_ms": 100,
    "cluster.heartbeat_timeout_ms": 1_000,
    "store.host_cache_bytes": 96 * PAGE_BYTES,
    "prefill.kv_cache_bytes": 64 * PAGE_BYTES,
    "decode.kv_cache_bytes": 112 * PAGE_BYTES,
    "disk.admit_after": 1,
    "disk.max_bytes": "64MiB",
}
"""So small that pages leave them, and come back from the disk."""


def settings(path: Path, prefill: int = 1, decode: int = 1, **more: object) -> config.Config:
    return config.load(
        None,
        {
            "model.path": str(path),
            "model.dtype": "float32",
            "cluster.prefill": prefill,
            "cluster.decode": decode,
            "router.grpc_port": 0,
            "router.internal_port": 0,
            "router.http_port": 0,
            "api.port": 0,
            "router.shutdown_timeout_ms": 1_000,
            "router.disaggregation": "always",  # models this small are not worth it, and this is what is to be tested
            "store.host_cache_bytes": "128MiB",
            "prefill.kv_cache_bytes": "64MiB",
            "decode.kv_cache_bytes": "128MiB",
            "prefill.max_num_batched_tokens": 128,
            "decode.max_num_batched_tokens": 128,
            "prefill.threads": 1,
            "decode.threads": 1,
            **ENGINE.settings,
            **more,
        },
    )


def prompts(page_size: int = PAGE, chunk: int = 128, seed: int = 0) -> list[list[int]]:
    """64 prompts of 1 to 2,000 tokens: page and chunk boundaries and their neighbours, shared prefixes, repeats."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, checkpoints.VOCAB) for _ in range(count)]

    edges = [page_size, 2 * page_size, 5 * page_size, chunk, 2 * chunk, 4 * chunk]
    lengths = [1, 2, *(edge + step for edge in edges for step in (-1, 0, 1)), 700, 1_024, 1_500, 1_999, 2_000]
    result = [some(length) for length in lengths]
    shared = some(400)
    result += [shared[: page_size * rng.randrange(3, 400 // page_size)] + some(rng.randrange(1, 60)) for _ in range(20)]
    result += [shared[: rng.randrange(40, 400)] for _ in range(5)]
    result += [list(rng.choice(result)) for _ in range(64 - len(result))]
    rng.shuffle(result)
    assert len(result) == 64
    return result


def references(path: Path, prompts: Sequence[Sequence[int]], count: int = OUTPUT) -> dict[tuple[int, ...], list[int]]:
    """transformers' greedy tokens for each prompt."""
    model = checkpoints.reference(path)
    return {key: model.generate(key, count)[0] for key in {tuple(prompt) for prompt in prompts}}


def ask(address: str, prompt: Sequence[int], count: int = OUTPUT, **settings: Any) -> Generated:
    """One request by token ids, past any end-of-sequence token; greedy unless told otherwise."""
    settings = {"temperature": 0.0, "ignore_eos": True, "timeout": 120.0, **settings}
    with Client(address) as client:
        return client.generate(prompt, max_tokens=count, **settings).result()


def ask_all(address: str, prompts: Sequence[Sequence[int]], count: int = OUTPUT, **settings: Any) -> list[Generated]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(address, prompt, count, **settings), prompts))


def compare(
    path: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Generated],
    expected: Mapping[tuple[int, ...], list[int]],
) -> None:
    """Every token must be the reference's; where the two best logits all but tie, the reference follows ours and goes
    on. Ties are printed, and more than a few of them fail."""
    ties: list[dict[str, object]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        right = expected[tuple(prompt)]
        assert len(answer.token_ids) == len(right), f"{len(answer.token_ids)} tokens instead of {len(right)}"
        while answer.token_ids != right:
            at = next(i for i, (a, b) in enumerate(zip(answer.token_ids, right, strict=True)) if a != b)
            model = checkpoints.reference(path)
            logits = model.logits([*prompt, *right[:at]])[-1]
            ours = answer.token_ids[at]
            gap = float(logits[right[at]] - logits[ours])
            tie = {"prompt": len(prompt), "position": at, "ours": ours, "reference": right[at], "gap": gap}
            assert abs(gap) < TIE, f"a wrong token: {json.dumps(tie)}"
            ties.append(tie)
            forced = answer.token_ids[: at + 1]
            rest = model.generate([*prompt, *forced], len(right) - at - 1)[0] if at + 1 < len(right) else []
            right = forced + rest
    for tie in ties:
        print(json.dumps(tie))
    total = sum(len(answer.token_ids) for answer in answers)
    assert len(ties) <= TIES_ALLOWED * total, f"{len(ties)} ties among {total} tokens"
