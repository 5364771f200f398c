"""The seam between a worker and what computes: a runner with a model, device pages, steps and copies.

    worker ──▶ Runner.launch(chunks) ──▶ StepHandle ──▶ StepResults
           ──▶ Mover.start(copies)   ──▶ CopyHandle  ──▶ CopiedIn | CopiedOut

Schedulers, store and router know nothing of it. `engine.engine.Engine` is the first runner. A runner may do everything
at once, as on a CPU, or go on beside its worker. One thread calls a runner and what it returns.

Order on the device: a step sees what steps and duplicates launched before it have written. A copy into a page comes
after the duplicates launched before it. Nothing else is ordered; the worker waits for ends instead.
"""

# pyright: strict

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from baton.messages import AdapterCard, PromptTokenLogprob
from baton.trace import Tracer
from engine.step.batch import Chunk, Sampled
from kvstore.arena.memory import Arena
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.transfer import CopiedIn, CopiedOut, Copy
from kvstore.layout import PageLayout
from kvstore.window_groups import WindowGroups

PageWeights: TypeAlias = Mapping[int, Sequence[Sequence[float]]]
PromptScores: TypeAlias = Mapping[int, Sequence[PromptTokenLogprob]]
VerifiedDraws: TypeAlias = Mapping[int, Sequence[Sampled | None]]


class StepResults(Struct, frozen=True, gc=False):
    """The results of a step: for each chunk the token drawn by `sample`, None without it, and always None without a
    head; and by number of the chunk what it scored, the tokens drawn by `verify`, and what its observed tokens attend
    to, [tokens, pages]. `seconds` is what it took by the device's clock."""

    sampled: Sequence[Sampled | None]
    scores: PromptScores
    seconds: float
    verified: VerifiedDraws = {}
    weights: PageWeights = {}


class StepHandle(Protocol):
    """A step that was launched."""

    def done(self) -> bool:
        """Whether `wait` returns at once, or nearly so."""
        ...

    def wait(self) -> StepResults:
        """Return the results once the step has ended. To be called once. Raises whatever the step has raised."""
        ...


class CopyHandle(Protocol):
    """Copies that were started, of one lease and in one direction."""

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> CopiedIn | CopiedOut:
        """Return what came of the copies once they have been made."""
        ...


class Mover(Protocol):
    """Copies pages between a device and the arena of the node's store."""

    def attach(self, arena: Arena) -> None:
        """From now on copies are from and to this arena. Those that were started go on with the one before."""
        ...

    def start(self, copies: Sequence[Copy]) -> CopyHandle:
        """Start to copy pages of one lease in one direction, at consecutive indices. Copies into the device are made in
        the order in which they were started."""
        ...

    def close(self) -> bool:
        """Wait for what is under way, a few seconds at most, and let go of the arena. Return whether all has ended."""
        ...


class Runner(Protocol):
    """A model with its device pages. Loading one is a constructor's matter."""

    numerics: str  # class of its arithmetic: runners of one class make the same bits of the same input
    fingerprint: bytes  # of the weights
    layout: PageLayout  # of a page
    has_lm_head: bool  # it can draw tokens
    tracer: Tracer  # of the loop that uses it
    adapters: tuple[AdapterCard, ...]  # LoRA adapters that chunks may name
    writers: Sequence[int]  # pidfds of the other processes that copy its pages
    num_pages: int
    vocab_size: int
    max_positions: int
    window: int | None  # positions that no layer looks beyond, a token's own included; none: a layer attends to all
    groups: WindowGroups  # of its layers, with pages of their own
    device: str  # such as "cpu" or "cuda:1"
    overlaps: bool
    """Steps and copies go on beside the worker's loop. Steps are timed by the device's own clock."""
    copies_overlap: bool
    """Copies are made beside steps, and delay none. Else they are made between steps, and tell their seconds where they
    go on beside the worker's loop."""
    fixed_borders: bool
    """Bits may depend on where a chunk of several tokens begins. So it begins at a fixed position: a multiple of a
    page, or of `CHUNK_ALIGNMENT` within a page."""
    launches_ahead: bool
    """A step may be launched while another one runs, with chunks that follow its draws (`Chunk.follows`)."""
    no_kv_windows: str
    """Why no chunk may have a `kv_window`; empty: each may."""
    no_page_weights: str
    """Why no token of a chunk may be `observed`; empty: each may."""
    no_rings: str
    """Why no chunk may have a `ring`; empty: each may."""
    verifies: bool
    """Chunks may have proposals (`Chunk.verify`). The logits of each row are those that it would have alone."""

    def launch(self, chunks: Sequence[Chunk]) -> StepHandle:
        """Begin a step: compute the chunks' K and V into their pages and draw what they ask for. `chunks` may change
        once this has returned. Raises ValueError for a chunk that this model and pool can't run, and DeviceLost, as
        whatever reaches the device may."""
        ...

    def add_adapter(self, name: str, path: str) -> AdapterCard:
        """Load a LoRA adapter between steps. Raises ModelError: UnsupportedModel where it can't be served."""
        ...

    def remove_adapter(self, digest: str) -> None:
        """Remove a LoRA adapter. No chunk names it any more, launched or to be launched."""
        ...

    def leave_ring(self, left: LeaveRing) -> None:
        """Mark that a ring has been left. No step in it is under way."""
        ...

    def duplicate(self, source: int, dest: int) -> None:
        """Copy one device page to another, after the steps launched before and before those launched later."""
        ...

    def same_contents(self, page: int, other: int) -> bool:
        """Whether two device pages have the same bytes. No step or copy that touches them is under way."""
        ...

    def mover(self, *, verify: bool) -> Mover:
        """Return what copies its pages. With `verify`, pages copied in are compared with their checksums."""
        ...

    def wake(self, alarm: Callable[[], None]) -> None:
        """From now on call `alarm`, from any thread, whenever a step or a copy has ended that went on beside, and when
        the device is lost."""
        ...

    def check_device(self) -> None:
        """Raise DeviceLost if what computes has gone, as far as is known without asking it."""
        ...

    def close(self) -> None:
        """End what the runner has beside this process. Nothing is called after it."""
        ...


class FinishedStep:
    """A step that had ended when it was launched."""

    def __init__(self, finished: StepResults) -> None:
        self._finished = finished

    @classmethod
    def timed(
        cls, run: Callable[[], tuple[Sequence[Sampled | None], PromptScores, VerifiedDraws, PageWeights]]
    ) -> FinishedStep:
        began = time.perf_counter()
        sampled, scores, verified, weights = run()
        return cls(StepResults(sampled, scores, time.perf_counter() - began, verified, weights))

    def done(self) -> bool:
        return True

    def wait(self) -> StepResults:
        return self._finished


class FinishedCopy:
    """Copies that had been made when they were started."""

    def __init__(self, event: CopiedIn | CopiedOut) -> None:
        self._event = event

    def done(self) -> bool:
        return True

    def wait(self) -> CopiedIn | CopiedOut:
        return self._event


def copied_in(copies: Sequence[Copy], intact: Sequence[bool], seconds: float | None = None) -> CopiedIn:
    """Return the event for copies into the device, each intact or not."""
    good = tuple(copy.index for copy, each in zip(copies, intact, strict=True) if each)
    bad = tuple(copy.index for copy, each in zip(copies, intact, strict=True) if not each)
    return CopiedIn(copies[0].lease, good, bad, seconds)


def copied_out(copies: Sequence[Copy], checksums: Sequence[int], seconds: float | None = None) -> CopiedOut:
    """Return the event for copies out of the device, with the checksums of the slots."""
    return CopiedOut(copies[0].lease, copies[0].index, tuple(checksums), seconds)
