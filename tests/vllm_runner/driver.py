"""Sequences on vLLM's runner, a step at a time. For the tests of this folder; needs an environment with vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from engine.runner import StepResults
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner.runner import RunningStep, VllmRunner
from kvstore.client.transfer import CopiedIn, CopiedOut
from tests.support import checkpoints

PAGE, PAGES, ROWS, TOKENS = 32, 64, 16, 256
GREEDY = TokenDraw(temperature=0.0)


def load(
    path: Path, dtype: str = "float32", *, ranks: int = 1, rows: int = ROWS, pages: int = PAGES,
    page_size: int = PAGE, **options: Any,
) -> VllmRunner:  # fmt: skip
    """The model of a checkpoint, eager unless the options say otherwise."""
    options = {"eager": True, "max_tokens": TOKENS, "threads": 1} | options
    return VllmRunner.load(path, dtype, pages, page_size, max_rows=rows, ranks=ranks, **options)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, checkpoints.VOCAB) for _ in range(length)]


def step(runner: VllmRunner, *chunks: Chunk) -> StepResults:
    return launch(runner, chunks).wait()


def launch(runner: VllmRunner, chunks: Sequence[Chunk]) -> RunningStep:
    """Launch a step. Groups of layers with a window have pages behind those that tests name."""
    return runner.launch([with_windows(runner, chunk) for chunk in chunks])


def with_windows(runner: VllmRunner, chunk: Chunk) -> Chunk:
    count = runner.groups.count
    first = runner.num_pages // (1 + count)
    window_pages = [first + page * count + group for page in chunk.pages for group in range(count)]
    return structs.replace(chunk, window_pages=window_pages)


def untimed(copied: CopiedIn | CopiedOut) -> CopiedIn | CopiedOut:
    """What came of copies, without the seconds that they took."""
    assert copied.seconds
    return structs.replace(copied, seconds=None)


class Generation:
    """One sequence of a test: tokens, pages, and what was drawn."""

    def __init__(
        self, prompt: Sequence[int], pages: Sequence[int], draw: TokenDraw = GREEDY, adapter: str = "",
        page_size: int = PAGE,
    ) -> None:  # fmt: skip
        self.adapter, self._page_size = adapter, page_size
        self.tokens, self.draw, self.computed = list(prompt), draw, 0
        self._free = list(pages)
        self.table = BlockTable()
        self.drawn: list[Sampled] = []
        self.misled = 0  # steps that had gone on from another token than the one that was drawn

    def chunk(self, size: int = TOKENS) -> Chunk:
        tokens = self.tokens[self.computed : self.computed + size]
        end = self.computed + len(tokens)
        while len(self.table) * self._page_size < end:
            self.table.extend([self._free.pop(0)])
        draw = self.draw if end == len(self.tokens) else None
        return Chunk(tokens, self.computed, self.table, draw, adapter=self.adapter)

    def follow(self, number: int) -> Chunk:
        """One token more than is known: the one that is drawn for that chunk of the step that runs."""
        while len(self.table) * self._page_size <= len(self.tokens):
            self.table.extend([self._free.pop(0)])
        return Chunk([0], len(self.tokens), self.table, self.draw, follows=number, adapter=self.adapter)

    def take(self, chunk: Chunk, sampled: Sampled | None) -> None:
        if sampled is None and chunk.follows is not None:
            self.misled += 1
            return
        assert (sampled is None) == (chunk.sample is None)
        self.computed = chunk.end
        if sampled is not None:
            self.drawn.append(sampled)
            self.tokens.append(sampled.token)


def run(runner: VllmRunner, sequences: Sequence[Generation], count: int, seed: int = 0) -> None:
    """Steps of random members and chunk sizes, until each sequence has drawn `count`."""
    rng = random.Random(seed)
    while unfinished := [one for one in sequences if len(one.drawn) < count]:
        members = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks = [one.chunk(rng.choice((1, 5, 16, 40))) for one in members]
        for one, chunk, sampled in zip(members, chunks, step(runner, *chunks).sampled, strict=True):
            one.take(chunk, sampled)


def run_ahead(runner: VllmRunner, sequences: Sequence[Generation], count: int, seed: int = 0) -> int:
    """The same with each step launched before the one before it is collected. Returns how many tokens were drawn of
    chunks that followed."""
    rng = random.Random(seed)
    followed = 0
    before: tuple[list[Generation], list[Chunk], RunningStep] | None = None
    while before or any(len(one.drawn) < count for one in sequences):
        running, chunks, launched = before or ([], [], None)
        drawing = {id(one): at for at, one in enumerate(running) if chunks[at].sample is not None}
        able = [one for one in sequences if len(one.drawn) + (id(one) in drawing) < count]
        able = [one for one in able if one not in running or id(one) in drawing]
        members = rng.sample(able, rng.randint(1, len(able))) if able else []
        places = [(one, drawing.get(id(one))) for one in members]
        ahead = [one.chunk(rng.choice((5, 40))) if at is None else one.follow(at) for one, at in places]
        before = (members, ahead, launch(runner, ahead)) if members else None
        for one, chunk, sampled in zip(running, chunks, launched.wait().sampled if launched else (), strict=True):
            one.take(chunk, sampled)
            followed += chunk.follows is not None and sampled is not None
    return followed


def likely(
    reference: checkpoints.Reference, texts: Sequence[tuple[Sequence[int], Sequence[int]]], near: float, share: float
) -> None:
    """Each token that follows a prompt is the likeliest, but for near ties: at least this share, and others by less
    than `near` below it."""
    likeliest = total = 0
    for prompt, drawn in texts:
        logits = reference.logits([*prompt, *drawn])[len(prompt) - 1 : -1]
        lost = logits.amax(dim=-1) - logits[range(len(drawn)), list(drawn)]
        assert lost.max() < near
        likeliest += int((lost == 0).sum())
        total += len(drawn)
        assert len(set(drawn)) > len(drawn) // 3
    assert likeliest >= share * total


def agree(one: Generation, expected: Sequence[int], gaps: Sequence[float]) -> None:
    """Compare tokens up to the first tie of the reference. Where it ties at once, nothing would be compared."""
    assert gaps[0] > 1e-3
    for sampled, right, gap in zip(one.drawn, expected, gaps, strict=True):
        if sampled.token != right:
            assert gap < 1e-3
            break
