"""Sequences on vLLM's runner, a step at a time. For the tests of this folder; needs an environment with vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from baton.config import Config
from deploy.local import LocalCluster
from engine.runner import StepResults
from engine.step.batch import Chunk, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner.runner import RunningStep, VllmRunner
from kvstore.arena.memory import Arena
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut
from tests.support import checkpoints, workload

PAGE, PAGES, ROWS, TOKENS = 32, 64, 16, 256
GREEDY = TokenDraw(temperature=0.0)
Loaded = Callable[..., VllmRunner]


def load(
    path: Path, dtype: str = "float32", *, ranks: int = 1, rows: int = ROWS, pages: int = PAGES,
    page_size: int = PAGE, **options: Any,
) -> VllmRunner:  # fmt: skip
    """The model of a checkpoint, eager unless the options say otherwise. A draft proposes as much as it can."""
    options = {"eager": True, "max_tokens": TOKENS, "threads": 1} | options
    model = VllmRunner.load(path, dtype, pages, page_size, max_rows=rows, ranks=ranks, **options)
    model.guesses = options.get("drafts", {}).get("num_speculative_tokens", 0)
    return model


def loaded_once(load: Loaded) -> Iterator[Loaded]:
    """The body of a fixture: the model of some arguments is loaded once, and closed at the end."""
    with ExitStack() as stack:
        yield cache(lambda *arguments, **more: stack.enter_context(closing(load(*arguments, **more))))


def arena_of(model: VllmRunner) -> Iterator[Arena]:
    """The body of a fixture: 32 slots for pages of that model."""
    memory = Arena.create(32 * model.layout.page_bytes)
    memory.divide(model.layout.page_bytes)
    with closing(memory):
        yield memory


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

    @property
    def output(self) -> list[int]:
        return [sampled.token for sampled in self.drawn]

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


def members(lengths: Sequence[int], page_size: int = PAGE) -> list[Generation]:
    """Sequences of prompts with these lengths, each with eight pages."""
    return [Generation(prompt_of(n, n), range(8 * i, 8 * i + 8), page_size=page_size) for i, n in enumerate(lengths)]


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


def texts(sequences: Sequence[Generation]) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens[: -len(one.drawn)], one.output) for one in sequences]


def agree(one: Generation, expected: Sequence[int], gaps: Sequence[float]) -> None:
    """Compare tokens up to the first tie of the reference. Where it ties at once, nothing would be compared."""
    assert gaps[0] > 1e-3
    for sampled, right, gap in zip(one.drawn, expected, gaps, strict=True):
        if sampled.token != right:
            assert gap < 1e-3
            break


def exact(
    model: VllmRunner, path: Path, lengths: Sequence[int] = (70, 33, 5), count: int = 20, page_size: int = PAGE
) -> None:
    """Compare mixed batches of chunks with transformers."""
    reference, sequences = checkpoints.reference(path), members(lengths, page_size)
    run(model, sequences, count)
    for length, one in zip(lengths, sequences, strict=True):
        agree(one, *reference.generate(prompt_of(length, length), count))


def hand_over(prefill: VllmRunner, decode: VllmRunner, arena: Arena, path: Path, page_size: int = PAGE) -> None:
    """Pages that one model has copied out go on at another one, whose pages held NaN before."""
    assert prefill.layout == decode.layout
    out, into = prefill.mover(verify=True), decode.mover(verify=True)
    out.attach(arena)
    into.attach(arena)
    prompt, heads = prompt_of(3 * page_size + 7, 3), decode.layout.num_kv_heads
    step(prefill, Chunk(prompt[: 2 * page_size + 3], 0, [9, 3, 4]))
    step(prefill, Chunk(prompt[2 * page_size + 3 : 3 * page_size], 2 * page_size + 3, [9, 3, 4]))
    copied = out.start([CopyOut(1, i, page, 10 + i) for i, page in enumerate([9, 3, 4])]).wait()
    assert untimed(copied) == CopiedOut(1, 0, tuple(page_checksum(arena.slot(slot), heads) for slot in (10, 11, 12)))
    torch.frombuffer(arena.slot(0), dtype=torch.float32).fill_(float("nan"))
    nan = page_checksum(arena.slot(0), heads)
    into.start([CopyIn(2, i, 0, page, nan) for i, page in enumerate(range(20, 28))]).wait()
    copies = [CopyIn(3, i, 10 + i, 20 + i, checksum) for i, checksum in enumerate(copied.checksums)]
    assert untimed(into.start(copies).wait()) == CopiedIn(3, (0, 1, 2), ())
    one = Generation(prompt, range(20, 28), page_size=page_size)
    one.chunk(3 * page_size)  # takes the pages
    one.computed = 3 * page_size
    run(decode, [one], 20)
    agree(one, *checkpoints.reference(path).generate(prompt, 20))
    arena.slot(11)[-5] ^= 1  # the last rank's
    assert untimed(into.start(copies).wait()) == CopiedIn(3, (0, 2), (1,))


def settings(path: Path, prefill: int = 1, decode: int = 1, page_size: int = PAGE, **more: object) -> Config:
    """A cluster over vLLM, whose processes take their time to start."""
    own = {
        "model.engine": "vllm",
        "pages.page_size": page_size,
        "router.disaggregation": "always" if prefill else "auto",
        "router.queue_timeout_ms": 300_000,
        "router.attempt_timeout_ms": 300_000,
    }
    return workload.settings(path, prefill, decode, **(own | more))


def at_once(config: Config, path: Path, folder: Path, prompts: Sequence[list[int]]) -> None:
    """A cluster has the reference's tokens for prompts that come at once, and prefill workers have worked."""
    with LocalCluster(config, folder, patience=200.0) as running:
        answers = workload.ask_all(running.address, prompts)
        workload.compare(path, prompts, answers, workload.references(path, prompts))
        assert not config.cluster.prefill or any(answer.work.pages_fetched for answer in answers)
