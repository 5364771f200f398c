"""Measure how often a draft model says the same next token: `python -m tools.demo_model.agreement MODEL DRAFT`.

The model answers fresh conversations of the small world greedily, in float32, by transformers. The draft then reads
each conversation with that answer. Agreement is the share of the answer's tokens, its end included, that the draft
would have chosen. A run is how many tokens the draft gets right in a row, of at most `RUN`: what one step of
speculation may save.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.demo_model import world
from tools.demo_model.conversation import BEGIN, render

SEED = 2_000_003
"""Neither training nor `evaluate` draws with it."""
MAX_TOKENS = 64
TOKENS = 400
"""About so many tokens has a conversation."""
RUN = 4


def prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return token ids of `count` conversations that end where the assistant is to speak, the same ones every time."""
    draw = random.Random(SEED)
    token_lists: list[list[int]] = []
    while len(token_lists) < count:
        whole = world.sample(draw, TOKENS)
        turns = [number for number, message in enumerate(whole.messages) if message.role == "assistant" and number]
        cut = replace(whole, messages=whole.messages[: draw.choice(turns)])
        token_lists.append(tokenizer.encode(f"{render(cut).text}{BEGIN}assistant\n").ids)
    return token_lists


def answers(model: Any, questions: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each prompt's greedy answer by a transformers model, with the token that ends it."""
    token_lists: list[list[int]] = []
    for prompt in questions:
        inputs = torch.tensor([list(prompt)])
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=MAX_TOKENS, do_sample=False)
        token_lists.append(out[0, inputs.shape[1] :].tolist())
    return token_lists


def agreements(draft: Any, questions: Sequence[Sequence[int]], answered: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Return for each token of each answer whether the draft would have chosen it."""
    marks: list[list[bool]] = []
    for prompt, answer in zip(questions, answered, strict=True):
        chosen = draft(torch.tensor([[*prompt, *answer]])).logits[0].argmax(-1).tolist()
        marks.append([a == b for a, b in zip(chosen[len(prompt) - 1 :], answer, strict=False)])
    return marks


def mean_run(agreed: Sequence[Sequence[bool]], most: int = RUN) -> float:
    """Return how many of `most` drafted tokens one verification accepts on average."""
    runs: list[int] = []
    for answer in agreed:
        at = 0
        while at < len(answer):
            run = next((length for length, right in enumerate(answer[at : at + most]) if not right), None)
            runs.append(len(answer[at : at + most]) if run is None else run)
            at += runs[-1] + 1  # the model's own token follows
    return sum(runs) / len(runs)


def main() -> int:
    """Print the agreement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    arguments = parser.parse_args()
    if (arguments.model / "tokenizer.json").read_bytes() != (arguments.draft / "tokenizer.json").read_bytes():
        raise SystemExit("the two checkpoints have different tokenizers")
    model, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (arguments.model, arguments.draft)
    )
    questions = prompts(Tokenizer.from_file(str(arguments.model / "tokenizer.json")), arguments.prompts)
    with torch.inference_mode():
        answered = answers(model, questions)
        agreed = agreements(draft, questions, answered)
    right, tokens = sum(map(sum, agreed)), sum(map(len, agreed))
    print(f"{right:,} of {tokens:,} tokens agree: {right / tokens:.1%}")
    print(f"of {RUN} drafted tokens {mean_run(agreed):.2f} are right in a row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
