"""A scheduler of a few lines, for tests: keeps sequences' pages, cuts prompts into chunks, appends what is drawn."""

import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.cpu import build
from engine.engine import Engine
from engine.step.batch import Chunk, Sampled, TokenDraw

GREEDY = TokenDraw(temperature=0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


@dataclass
class Running:
    """One sequence: its tokens so far, how many of them are computed, and the pages it may fill."""

    tokens: list[int]
    pages: Sequence[int]
    draw: TokenDraw | None = GREEDY
    computed: int = 0
    drawn: list[Sampled] = field(default_factory=list)

    def chunk(self, size: int) -> Chunk:
        """The next `size` tokens, or as many as there are; the last of them asks for a draw."""
        tokens = self.tokens[self.computed : self.computed + size]
        whole = self.computed + len(tokens) == len(self.tokens)
        return Chunk(tokens, self.computed, self.pages, self.draw if whole else None)

    def take(self, chunk: Chunk, sampled: Sampled | None) -> None:
        assert (sampled is not None) == (chunk.sample is not None)
        self.computed = chunk.end
        if sampled is not None:
            self.drawn.append(sampled)
            self.tokens.append(sampled.token)


def generate(
    engine: Engine, prompt: Sequence[int], count: int, sizes: Iterable[int] = (), pages: Sequence[int] | None = None
) -> list[int]:
    """`count` greedy tokens, the prompt cut into chunks of `sizes`, the rest of it in one."""
    running = Running(list(prompt), range(len(engine.pool)) if pages is None else pages)
    cuts: Iterator[int] = iter(sizes)
    while len(running.drawn) < count:
        chunk = running.chunk(next(cuts, len(running.tokens)))
        running.take(chunk, engine.step([chunk])[0])
    return [sampled.token for sampled in running.drawn]


def generate_together(engine: Engine, sequences: Sequence[Running], count: int, seed: int) -> None:
    """Run all sequences until each has drawn `count`, in steps of random members and random chunk sizes."""
    rng = random.Random(seed)
    while unfinished := [one for one in sequences if len(one.drawn) < count]:
        members = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks = [one.chunk(rng.choice((1, 2, 5, 16, 40))) for one in members]
        for one, chunk, sampled in zip(members, chunks, engine.step(chunks), strict=True):
            one.take(chunk, sampled)


def assert_same_tokens(got: Sequence[int], expected: Sequence[int], gaps: Sequence[float]) -> None:
    """Token for token, unless the reference itself was undecided (docs: what "the same tokens" means)."""
    for i, (ours, theirs, gap) in enumerate(zip(got, expected, gaps, strict=True)):
        if ours != theirs:
            assert gap < 1e-3, f"token {i}: {ours} instead of {theirs}, whose logit leads by {gap}"
            return  # from here on the two continue different texts


def plant(edits: Iterable[tuple[str, str, str]], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have engines that are loaded from now on use kernels with a mistake. An edit says in which file, what, and what
    instead."""
    sources = folder / "sources"
    shutil.copytree(build.SOURCES, sources)
    for file, what, instead in edits:
        text = (sources / file).read_text()
        assert what in text
        (sources / file).write_text(text.replace(what, instead))
    patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS))
    (folder / "cache").mkdir(mode=0o700)
    library = build.load(sources, folder / "cache")
    patch.setattr(build, "library", lambda: library)
