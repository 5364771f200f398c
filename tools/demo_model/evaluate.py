"""Measure recall by distance: `python -m tools.demo_model.evaluate CHECKPOINT [--prompts N] [--seed N]`.

Each prompt is a chat that tells one fact, then as many tokens of other facts and sentences as the distance says, and
then asks for the fact. An answer counts only if it is the expected sentence, which may go on. A local Baton cluster
answers, greedily, in float32. transformers answers some of the prompts; the script fails if one token differs.

With `--kv-cache-dtype int8` the cluster keeps its pages so, and with `--quantized CHECKPOINT` it serves that one, which
`baton quantize` made. A second cluster computes all in float32. The script then fails if they differ in a token on more
than one prompt of a hundred.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.client import Client
from bench.clusters import local
from tools.demo_model.conversation import BEGIN, Conversation, Message, render
from tools.demo_model.facts import Fact, facts
from tools.demo_model.stories import sentence

SEED = 1_000_003
"""Training draws from seeds of another form, so these prompts are fresh."""
DISTANCES = (100, 200, 300, 400, 500, 750, 1_000, 1_500)
MAX_TOKENS = 24
_ENDS = (0, 2)
GOAL = 0.95
UNCHANGED = 0.99  # of the prompts, by pages of few bits


@dataclass(frozen=True)
class Prompt:
    """A question about a fact. `distance` counts the tokens from the end of its statement to the answer."""

    tokens: tuple[int, ...]
    fact: Fact
    distance: int


def prompt(draw: random.Random, tokenizer: Tokenizer, distance: int) -> Prompt:
    """Return a prompt whose fact stands at least `distance` tokens, and at most a sentence more, before the answer."""
    target = facts(draw, 1)[0]
    before = "Please remember these notes. " + " ".join(sentence(draw) for _ in range(3))
    statements = f"{before} {draw.choice(target.statements)}"
    others = [one for one in facts(draw, 200) if one.key[0] != target.key[0]]
    after = ""
    question = draw.choice(target.questions)
    end = len(tokenizer.encode(f"{BEGIN}user\n{statements}").ids)
    while True:
        tokens = _chat(tokenizer, statements + after, question)
        if len(tokens) - end >= distance:
            return Prompt(tuple(tokens), target, len(tokens) - end)
        # Most of the missing tokens at once: a sentence has 7 to 14.
        for _ in range(max(1, (distance - len(tokens) + end) // 15)):
            line = draw.choice(others.pop().statements) if others and draw.random() < 0.5 else sentence(draw)
            after += f" {line}"


def _chat(tokenizer: Tokenizer, text: str, question: str) -> list[int]:
    chat = (Message("user", text), Message("assistant", "I will remember that."), Message("user", question))
    return tokenizer.encode(f"{render(Conversation(chat)).text}{BEGIN}assistant\n").ids


def prompts(tokenizer: Tokenizer, distance: int, count: int, seed: int = SEED) -> list[Prompt]:
    """Return `count` prompts, the same ones every time. Another seed gives fresh ones."""
    draw = random.Random(repr((seed, distance)))
    return [prompt(draw, tokenizer, distance) for _ in range(count)]


def by_transformers(checkpoint: Path, batch: Sequence[Prompt]) -> list[list[int]]:
    """Return each answer's tokens by transformers, greedily, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers: list[list[int]] = []
    with torch.inference_mode():
        for one in batch:
            inputs = torch.tensor([one.tokens])
            mask = torch.ones_like(inputs)
            out = model.generate(inputs, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
            answers.append(out[0, inputs.shape[1] :].tolist())
    return answers


def by_baton(checkpoint: Path, batch: Sequence[Prompt], kv_cache_dtype: str = "auto") -> list[list[int]]:
    """Return each answer's tokens by a local cluster of one prefill and one decode worker, greedily, in float32."""
    settings: dict[str, object] = {
        "model.dtype": "float32",
        "model.kv_cache_dtype": kv_cache_dtype,
        "prefill.kv_cache_bytes": "256MiB",
        "decode.kv_cache_bytes": "256MiB",
        "router.queue_timeout_ms": 300_000,  # a busy machine is slow, and no prompt may be left out
    }
    with (
        local(checkpoint, 1, 1, settings) as cluster,
        Client(cluster.address) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def answer(one: Prompt) -> list[int]:
            generated = client.generate(one.tokens, max_tokens=MAX_TOKENS, temperature=0.0, timeout=300).result()
            return list(generated.token_ids)

        return list(threads.map(answer, batch))


def right(tokenizer: Tokenizer, one: Prompt, tokens: Sequence[int]) -> bool:
    """Whether an answer begins as the expected sentence does, with the fact's values. It may tell more."""
    text = tokenizer.decode(list(tokens)).strip()
    return re.match(rf"{re.escape(one.fact.answer.removesuffix('.'))}\b", text) is not None


def report(rows: Sequence[tuple[int, float]], count: int) -> str:
    """Return the table of `docs/demo-model.md`."""
    lines = [f"| tokens between fact and answer | recall on {count} prompts |", "|---:|---:|"]
    lines += [f"| {distance:,} | {share:.1%} |" for distance, share in rows]
    reached = 0
    for distance, share in rows:
        if share < GOAL:
            break
        reached = distance
    return "\n".join(
        [*lines, "", f"Longest distance with at least {GOAL:.0%} there and at all shorter ones: {reached:,}"]
    )


def main() -> int:
    """Print recall by distance; 1 if Baton and transformers disagree, or pages in few bits change too many answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=200, help="prompts for each distance")
    parser.add_argument("--compared", type=int, default=20, help="of them transformers answers so many, too")
    parser.add_argument("--distances", type=int, nargs="+", default=DISTANCES)
    parser.add_argument("--seed", type=int, default=SEED, help="of the prompts; another one gives fresh prompts")
    parser.add_argument("--misses", type=int, default=0, help="wrong answers to print for each distance")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of pages; other than auto, both are compared")
    parser.add_argument("--quantized", type=Path, help="the same model with weights of few bits; both are compared")
    arguments = parser.parse_args()
    held, quantized = arguments.kv_cache_dtype, arguments.quantized
    plain = held == "auto" and quantized is None
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    by_distance = {
        distance: prompts(tokenizer, distance, arguments.prompts, arguments.seed) for distance in arguments.distances
    }
    batch = [one for group in by_distance.values() for one in group]
    answers = by_baton(quantized or arguments.checkpoint, batch, held)
    rows: list[tuple[int, float]] = []
    differ = compared = 0
    for number, (distance, group) in enumerate(by_distance.items()):
        generated = answers[number * arguments.prompts :][: arguments.prompts]
        marks = [right(tokenizer, one, tokens) for one, tokens in zip(group, generated, strict=True)]
        rows.append((distance, sum(marks) / len(marks)))
        wrong = [(one, tokens) for one, tokens, mark in zip(group, generated, marks, strict=True) if not mark]
        for one, tokens in wrong[: arguments.misses]:
            print(f"{distance}: {one.fact.answer!r} was answered as {tokenizer.decode(tokens)!r}")
        if not plain:
            continue
        theirs = by_transformers(arguments.checkpoint, group[: arguments.compared])
        differ += sum(_spoken(one) != _spoken(other) for one, other in zip(generated, theirs, strict=False))
        compared += len(theirs)
    print(report(rows, arguments.prompts))
    if not plain:
        same = sum(a == b for a, b in zip(answers, by_baton(arguments.checkpoint, batch), strict=True))
        print(f"answers that have the same tokens in these formats and in float32: {same} of {len(batch)}")
        return int(same < UNCHANGED * len(batch))
    print(f"answers in which Baton and transformers differ: {differ} of {compared}")
    return int(differ > 0)


def _spoken(tokens: Sequence[int]) -> list[int]:
    """Return an answer without its end, which transformers counts as a part of it."""
    return [token for token in tokens if token not in _ENDS]


if __name__ == "__main__":
    sys.exit(main())
