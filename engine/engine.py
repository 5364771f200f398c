"""A model, its page pool, and one step of work on them.

Owns the weights and the device's pages. It never decides: which pages hold what, which chunks make a step and what
becomes of a token are its caller's. Not thread-safe: one thread calls it, or callers take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch.nn import functional

from baton.errors import ModelError, NotEnoughMemory, UnsupportedModel
from baton.messages import MAX_RING, AdapterCard, PromptTokenLogprob
from baton.trace import Tracer
from engine.attention.torch_sdpa import TorchAttention
from engine.checkpoint import rounding
from engine.cpu import build, features, forward, huge_pages, numerics
from engine.cpu.packed_linear import PackedLinears
from engine.cpu.thread_pool import ThreadPool
from engine.cuda.copies import CudaCopies
from engine.cuda.errors import device_errors
from engine.cuda.launcher import StepLauncher
from engine.cuda.mover import OverlappedMover
from engine.cuda.steps import StepWatch
from engine.cuda.streams import CudaStreams, Streams
from engine.device.gpus import resolve_device
from engine.device.page_mover import HostMover
from engine.device.page_pool import PagePool
from engine.models import weights
from engine.models.config import load_spec
from engine.models.config_file import DTYPES
from engine.models.heads import Heads
from engine.models.linear import LinearMaker, PlainLinears
from engine.models.transformer import NUMERICS_VERSION, Transformer
from engine.models.weights import TORCH_DTYPES, ModelWeights
from engine.numerics import torch_digest
from engine.runner import FinishedStep, Mover, PageWeights, PromptScores, StepHandle, VerifiedDraws
from engine.sampling import counter_rng
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.likely_draws import draw_likely
from engine.sampling.mask_threads import MasksUnderWay, MaskThreads
from engine.sampling.sampler import SCORED_AT_ONCE, sampler_for
from engine.spec import QUANTIZED_AT_LOAD, ModelSpec
from engine.step.batch import Batch, Chunk, Floats, HiddenRow, Sampled, TokenDraw, flatten
from engine.step.ring import RingBroken
from kvstore.arena.shared_slots import MARK_BYTES, LeaveRing
from kvstore.layout import CODES, PageLayout
from kvstore.window_groups import NO_GROUPS

FittingPages: TypeAlias = "Callable[[Callable[[int], Engine]], int]"
"""Returns the number of pages. Gets a function that makes an engine with so many pages on the same weights."""


class StepOutput(Struct, frozen=True, gc=False):
    """The results of a step, as in `StepResults`."""

    sampled: list[Sampled | None]
    scores: dict[int, list[PromptTokenLogprob]]
    verified: dict[int, list[Sampled | None]] = {}
    weights: PageWeights = {}


class _Cuda(NamedTuple):
    """What a device has that goes on beside its worker."""

    copies: CudaCopies
    launcher: StepLauncher
    watch: StepWatch


class Engine:
    """A runner (`engine.runner`) of the models that this package knows. `pool` is [num_pages, *layout.shape], and page
    i of it is what a `Chunk` calls device page i."""

    adapters: tuple[AdapterCard, ...] = ()
    writers: Sequence[int] = ()
    fixed_borders = False  # our kernels need none, and with torch's no borders would help

    def __init__(
        self,
        config: ModelSpec,
        model_weights: ModelWeights,
        fingerprint: bytes,
        layout: PageLayout,
        pool: torch.Tensor,
        threads: int = 1,
        native: bool = True,
        quantization: str = "",
    ) -> None:
        """With `native`, kernels of our own do what they can do here; without, torch does everything. `quantization` is
        that of `load`."""
        self.config = config
        self._quantization = quantization
        self.window = config.widest_window
        self.groups = NO_GROUPS
        self.layout = layout
        self.fingerprint = fingerprint
        self.numerics = f"torch-{NUMERICS_VERSION}/{torch_digest(str(pool.device))}"
        self.has_lm_head = model_weights.head is not None  # it can generate tokens
        self.pool = pool
        self.pages = PagePool(pool, layout.page_bytes, layout.num_kv_heads)
        self.num_pages = len(pool)
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.device = str(pool.device)
        on_cuda = pool.device.type == "cuda"
        self.overlaps = self.copies_overlap = self.launches_ahead = on_cuda
        self.no_kv_windows = ""
        if on_cuda:
            self.no_kv_windows = "this worker computes on CUDA, where no test has run it"
        elif any(window is not None for window in config.windows):
            self.no_kv_windows = "layers of this model attend to a window of their own"
        self._alarm: Callable[[], None] = lambda: None
        self.tracer = Tracer()  # of the loop that runs the steps
        self._mask_threads = MaskThreads()
        self._mover: HostMover | None = None  # of a CPU, the last one
        self._sampler = sampler_for(pool.device)
        self._threads: ThreadPool | None = None
        library = build.library() if native and forward.runs(config, model_weights, pool, threads) else None
        if library is not None:
            self._threads = ThreadPool(library, threads)
        self._cuda: _Cuda | None = None
        self._compute_with(model_weights)
        if on_cuda:
            launcher = self._launcher(CudaStreams(pool.device))
            self._cuda = _Cuda(CudaCopies(self.pages.bytes), launcher, StepWatch())

    def _compute_with(self, model_weights: ModelWeights) -> None:
        config, layout, pool = self.config, self.layout, self.pool
        self.dtype = model_weights.embedding.dtype
        self._embedding = model_weights.embedding
        self._model = Transformer(config, model_weights, TorchAttention(pool, layout, config.query_scale))
        self._native: forward.NativeForward | None = None
        if self._threads is not None and (library := build.library()) is not None:
            self._native = forward.NativeForward(library, self._threads, config, model_weights, layout, pool)
            self.numerics = numerics.probe(library, tuple(sorted(self._native.forms)))
        self.verifies = self._native is not None
        self.hidden = torch.empty(0) if self._native is None else self._native.hidden  # normed, of the last draws' rows
        self.no_page_weights = (
            "" if self.verifies else "only our own kernels for CPUs tell what tokens attend to, and they don't run here"
        )
        self.no_rings = self._lack_for_rings()
        if self._cuda is not None:
            self._cuda = self._cuda._replace(launcher=self._launcher(CudaStreams(pool.device)))

    def _lack_for_rings(self) -> str:
        if self._native is None:
            return "only our own kernels for CPUs hand layers on while they compute, and they don't run here"
        size = self.layout.page_bytes
        return (
            f"a page of {size} bytes has no room for marks" if size % MARK_BYTES or size < MAX_RING * MARK_BYTES else ""
        )

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: str,
        device: str,
        num_pages: int | FittingPages,
        page_size: int,
        head: bool,
        threads: int | None = None,
        native: bool = True,
        kv_cache_dtype: str = "auto",
        quantization: str = "",
    ) -> Engine:
        """Load the checkpoint in the directory `path` and make a pool of `num_pages` empty pages. A function decides
        on their number when the weights are loaded.

        `dtype` "auto" is the checkpoint's own; `kv_cache_dtype`, that of the pages, is the same by "auto". `device`
        "auto" is cuda where there is one. Without `head` the engine makes pages and never tokens.
        `threads` None is one for each CPU of this process: the setting is torch's, so it holds for the whole process.
        Without `native`, torch does all the work. `quantization` of the weights when they are loaded is int8, int4 or
        none: they are those that `baton quantize` writes.
        Raises ModelError (ModelNotFound, UnsupportedModel, CorruptWeights), NotEnoughMemory, and StartupError for a
        CUDA device that is not here.
        """
        # Ray sets OMP_NUM_THREADS to 1 in its actors, so leaving it to torch would use one core.
        threads = threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        config = load_spec(path)
        kind, layout = dtype_of(config, dtype), layout_of(config, dtype, page_size, kv_cache_dtype)
        device = resolve_device(device)
        if lack := quantization_lack(config, device, dtype, native, quantization):
            raise UnsupportedModel(lack)
        maker = linear_maker(device, config if native else None, quantization)
        try:
            loaded = weights.load(path, config, TORCH_DTYPES[kind], torch.device(device), head, maker)
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemory(f"the weights don't fit into {device}: {error}") from error
        torch.cuda.empty_cache()  # what stacking parts of the weights has needed; nothing on a CPU

        fingerprint = _fingerprint(loaded.fingerprint, kind, layout, quantization)

        def with_pages(count: int) -> Engine:
            pool = _make_pool(count, layout, device)
            return cls(config, loaded.weights, fingerprint, layout, pool, threads, native, quantization)

        engine = with_pages(num_pages if isinstance(num_pages, int) else num_pages(with_pages))
        _give_back()
        return engine

    @staticmethod
    def pages_for(memory_bytes: int, layout: PageLayout) -> int:
        return memory_bytes // layout.page_bytes

    # --- as a runner ------------------------------------------------------------------------------------------------

    def launch(self, chunks: Sequence[Chunk]) -> StepHandle:
        """Begin a step; on a CPU, make it. See `Runner`."""
        if self._cuda is None:
            return FinishedStep.timed(lambda: _results(self.run(chunks)))
        with device_errors(), self._stream_ends_with_errors():
            with self.tracer.span("inputs", "engine"):
                batch = self._flatten(chunks)
            step, ended = self._cuda.launcher.launch(chunks, batch, self._start_masks(chunks))
        self._cuda.watch.watch(ended)
        return step

    def _launcher(self, streams: Streams) -> StepLauncher:
        device = self.pool.device
        return StepLauncher(self._model, DeviceSampler(device), self._mask_threads, device, streams, self.tracer)

    @contextlib.contextmanager
    def _stream_ends_with_errors(self) -> Iterator[None]:
        """A step that can't be launched as a whole has ended when the error is told: the part that lies in the stream
        writes to pages."""
        try:
            yield
        except Exception:
            torch.cuda.synchronize(self.pool.device)
            raise

    def add_adapter(self, name: str, path: str) -> AdapterCard:
        raise UnsupportedModel(
            "LoRA adapters need vLLM's runner, and this worker's engine is native: set model.engine to vllm"
        )

    def remove_adapter(self, digest: str) -> None:
        raise UnsupportedModel(f"there is no LoRA adapter {digest} to remove")

    def duplicate(self, source: int, dest: int) -> None:
        if self._cuda is None:
            self.pages.duplicate(source, dest)
        else:
            self._cuda.copies.duplicate(source, dest)

    def same_contents(self, page: int, other: int) -> bool:
        with device_errors():
            return torch.equal(self.pages.view(page), self.pages.view(other))

    def mover(self, *, verify: bool) -> Mover:
        if self._cuda is None:
            self._mover = HostMover(self.pages, verify=verify)
            return self._mover
        return OverlappedMover(self._cuda.copies, lambda: self._alarm(), self.layout.num_kv_heads, verify=verify)

    def check_device(self) -> None:
        """It computes in this process."""

    def wake(self, alarm: Callable[[], None]) -> None:
        self._alarm = alarm
        if self._cuda is not None:
            self._cuda.watch.alarm = alarm

    def reload(self, path: Path) -> None:
        """Replace the weights by those of another checkpoint of the same model. The old ones go first, so
        that both need not fit into memory. Raises ModelError; nothing but `close` is called then."""
        device, spec = self.pool.device, load_spec(path)
        if spec.canonical != self.config.canonical:
            raise UnsupportedModel(f"config.json in {path} is of another model than the one that is served")
        maker = linear_maker(self.device, spec if self._threads is not None else None, self._quantization)
        weights.check(path, spec, self.dtype, maker)
        del self._model, self._native
        loaded = weights.load(path, spec, self.dtype, device, self.has_lm_head, maker)
        self._compute_with(loaded.weights)
        dtype = str(self.dtype).removeprefix("torch.")
        self.fingerprint = _fingerprint(loaded.fingerprint, dtype, self.layout, self._quantization)
        _give_back()

    def close(self) -> None:
        """Nothing is beside this process; its end gives the device back."""

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        """As `run`, for chunks without `scoring`."""
        return self.run(chunks).sampled

    def run(self, chunks: Sequence[Chunk]) -> StepOutput:
        """Compute the chunks' K and V into their pages; draw a token, or score prompt tokens, for each chunk that asks
        for that.

        The i-th result belongs to the i-th chunk: None without `sample`, where its mask is late, and always without a
        head.
        Raises ValueError, before it touches any page, for a chunk that this model and pool can't run.
        """
        if any(chunk.observed for chunk in chunks) and self.no_page_weights:
            raise ValueError(f"no token can be observed: {self.no_page_weights}")
        if self._cuda is not None:
            finished = self.launch(chunks).wait()
            return StepOutput(list(finished.sampled), {n: list(tokens) for n, tokens in finished.scores.items()})
        if not chunks:
            return StepOutput([], {})
        with self.tracer.span("inputs", "engine"):
            batch = self._flatten(chunks)
        if any(chunk.ring is not None for chunk in chunks):
            return self._run_in_ring(batch, *chunks)
        masks = self._start_masks(chunks)
        weights = _weights(chunks, batch)
        scores: dict[int, list[PromptTokenLogprob]] = {}
        if any(chunk.scoring is not None for chunk in chunks):
            logits, best = self._score(chunks, batch, scores, weights), None
        else:
            logits, best = self._logits(batch, weights)
        observed = {} if weights is None else _by_chunk(chunks, weights)
        if logits is None:
            return StepOutput([None] * len(chunks), scores, weights=observed)
        draws = [chunk.draws for chunk in chunks]
        drawn = iter(self._draw([draw for each in draws for draw in each], logits, best, masks))
        rows = [list(islice(drawn, len(each))) for each in draws]
        verified = {place: each[:-1] for place, each in enumerate(rows) if len(each) > 1}
        return StepOutput([each[-1] if each else None for each in rows], scores, verified, observed)

    def _run_in_ring(self, batch: Batch, chunk: Chunk) -> StepOutput:
        """Raises RingBroken; then what lies in the pages of this chunk, and in those that it waited for, is unknown."""
        ring, arena = chunk.ring, None if self._mover is None else self._mover.arena
        if ring is None or self.no_rings or arena is None or self._native is None:
            raise ValueError(f"a chunk of a ring can't be computed here: {self.no_rings or 'there is no store'}")
        copies = np.array([(chunk.pages[page], slot) for page, slot in (*ring.gives, *ring.takes)], np.int64)
        copies, at = copies.reshape(-1, 2), np.frombuffer(arena.view, np.uint8).__array_interface__["data"][0]
        if copies.size and not 0 <= copies[:, 1].min() <= copies[:, 1].max() < arena.slots:
            raise ValueError(f"slots {copies[:, 1].min()} to {copies[:, 1].max()} are not in an arena of {arena.slots}")
        gives = len(list(ring.gives))
        described = forward.Ring(
            at + ring.slots[0] * arena.page_bytes, at, ring.name, ring.plan.part.place, ring.number, ring.awaits,
            int(ring.patience * 1e9), gives, len(copies) - gives, copies.__array_interface__["data"][0],
        )  # fmt: skip
        with self.tracer.span("layers in a ring", "engine"):
            self._native.run(batch, ring=described)
        if described.broken:
            before = f"chunk {ring.number - 1} of {ring.plan.count}"
            raise RingBroken(f"{before} did not come within {ring.patience:.2f} s, or its worker has left")
        return StepOutput([None], {})

    def leave_ring(self, left: LeaveRing) -> None:
        if self._mover is not None and self._mover.arena is not None:
            left.mark(self._mover.arena.slot(left.header))

    def _draw(
        self,
        draws: Sequence[tuple[int, TokenDraw]],
        logits: torch.Tensor,
        best: Sequence[int] | None,
        masks: MasksUnderWay | None,
    ) -> list[Sampled | None]:
        """Draw a token from each row of logits, none where its mask is late."""
        if masks is not None:
            with self.tracer.span("masks", "engine"):
                self._mask_threads.wait(masks)
        late = {row for row, (_, draw) in enumerate(draws) if draw.mask is not None and not draw.mask.ready}
        with self.tracer.span("sampling", "engine"):
            unmasked = [replace(draw, mask=None) if row in late else draw for row, (_, draw) in enumerate(draws)]
            sampled = self._sampler.sample(logits, unmasked, [position for position, _ in draws], best)
        return [None if row in late else one for row, one in enumerate(sampled)]

    def _start_masks(self, chunks: Sequence[Chunk]) -> MasksUnderWay | None:
        """Have the masks of this step computed while the model runs."""
        masked = [chunk for chunk in chunks if chunk.sample is not None and chunk.sample.mask is not None]
        masks = [draw.mask for chunk in masked for _, draw in chunk.draws if draw.mask is not None]
        return self._mask_threads.start(masks) if masks else None

    @torch.inference_mode()
    def guess(self, heads: Heads, rows: Sequence[HiddenRow], count: int) -> list[list[int]]:
        """Return the next `count` tokens of each row as these heads guess them, drawn as the model would draw them."""
        state = heads.first(self.hidden[[each.row for each in rows]], rows)
        tokens, draws = [each.token for each in rows], [each.draw for each in rows]
        ahead = [
            (draw.seed, draw.index, each.position + head)
            for head in range(count)
            for draw, each in zip(draws, rows, strict=True)
        ]
        keys = counter_rng.keys(*zip(*ahead, strict=True)).reshape(count, -1)
        guesses: list[list[int]] = []
        for head in range(count):
            state = heads.advance(head, state, torch.tensor(tokens))
            guesses.append(tokens := draw_likely(heads.logits(head, state), draws, keys[head]))
        return [list(each) for each in zip(*guesses, strict=True)]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self._embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states → logits."""
        return (self._native or self._model).logits(hidden)

    def _flatten(self, chunks: Sequence[Chunk]) -> Batch:
        return flatten(chunks, self.layout.page_size, self.num_pages, self.vocab_size, self.window)

    def _logits(self, batch: Batch, weights: Floats | None = None) -> tuple[torch.Tensor | None, Sequence[int] | None]:
        """Run the model: logits of the rows that a token is drawn from, if there are any and there is a head; and the
        likeliest tokens, where they were found on the way."""
        if self._native is not None:
            with self.tracer.span("layers and head", "engine"):
                scores = self._native.run(batch, weights)
                self.hidden = self._native.hidden
            return (None, None) if scores is None else (scores.logits, scores.best)
        with torch.inference_mode():
            with self.tracer.span("layers", "engine"):
                hidden = self._model.forward(batch)
            if hidden is None:
                return None, None
            with self.tracer.span("head", "engine"):
                return self._model.logits(hidden), None

    @torch.inference_mode()
    def _score(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        scores: dict[int, list[PromptTokenLogprob]],
        weights: Floats | None,
    ) -> torch.Tensor | None:
        """Run the model and score prompt tokens. Return the logits of the rows that a token is drawn from, if any."""
        model = self._native or self._model
        with self.tracer.span("layers", "engine"):
            hidden = model.forward(batch) if self._native is None else self._native.forward(batch, weights)
        if hidden is None:
            return None
        drawn: list[int] = []
        row = 0
        with self.tracer.span("head", "engine"):
            for place, chunk in enumerate(chunks):
                if (scoring := chunk.scoring) is not None:
                    scores[place] = tokens = list[PromptTokenLogprob]()
                    for at in range(0, len(scoring.targets), SCORED_AT_ONCE):
                        targets = scoring.targets[at : at + SCORED_AT_ONCE]
                        tokens += self._sampler.score(
                            model.logits(hidden[row : row + len(targets)]), targets, scoring.top
                        )
                        row += len(targets)
                drawn += range(row, row + len(chunk.draws))
                row += len(chunk.draws)
            self.hidden = hidden[drawn]
            return model.logits(self.hidden) if drawn else None


def _results(output: StepOutput) -> tuple[Sequence[Sampled | None], PromptScores, VerifiedDraws, PageWeights]:
    return output.sampled, output.scores, output.verified, output.weights


def _weights(chunks: Sequence[Chunk], batch: Batch) -> Floats | None:
    """Room for what the observed rows of a batch attend to; none: no row is observed."""
    if not batch.num_observed:
        return None
    pages = max(-(-chunk.end // batch.page_size) for chunk in chunks if chunk.observed)
    return np.zeros((batch.num_observed, pages), np.float32)


def _by_chunk(chunks: Sequence[Chunk], weights: Floats) -> PageWeights:
    """The rows of each chunk that has observed ones, by its number."""
    counts = [chunk.observed for chunk in chunks]
    return {n: weights[sum(counts[:n]) :][:count].tolist() for n, count in enumerate(counts) if count}


def linear_maker(device: str, spec: ModelSpec | None, quantization: str = "") -> LinearMaker:
    """What makes the products of a device: "cpu", "cuda", or one with a number. On a CPU, weights stay in few bits if
    kernels of our own compute the model `spec`. `quantization` is one that has no lack."""
    if device != "cpu":
        return PlainLinears()
    groups = spec is not None and features.runs(spec) and build.can_compile()
    return PackedLinears(groups=groups, bits=QUANTIZED_AT_LOAD.get(quantization, 0))


def quantization_lack(spec: ModelSpec, device: str, dtype: str, native: bool, quantization: str) -> str:
    """Return why our own engine can't quantize a model in this way when it loads it; "" if it can, or need not."""
    if not quantization:
        return ""
    says, stored = f"model.quantization is {quantization}, and", spec.stored.method
    if quantization not in QUANTIZED_AT_LOAD:
        return f"{says} our own engine has {' and '.join(QUANTIZED_AT_LOAD)}"
    if device != "cpu":
        return f"{says} our own engine quantizes weights on CPUs only: leave it out, or take vLLM's runner"
    if stored != "plain":
        return f"{says} the checkpoint's weights are quantized already ({spec.stored}): leave it out"
    if not native or not build.can_compile():
        why = "there is no compiler, or no AVX2" if native else "model.native is false"
        return f"{says} only our own kernels compute with such weights, and {why}: leave it out"
    if not features.runs(spec):
        return f"{says} our own kernels don't compute this model of the family {spec.family}: leave it out"
    if dtype_of(spec, dtype) == "float16":
        return f"{says} our own kernels compute in float32 and bfloat16, not in float16: set model.dtype"
    if all(shape[1] % rounding.GROUP for _, _, shape in weights.matrices(spec)):
        return f"{says} no product of the model has a multiple of {rounding.GROUP} inputs: leave it out"
    return ""


def dtype_of(config: ModelSpec, dtype: str) -> str:
    """What a model is computed in; "auto" is the checkpoint's own. Raises ModelError for others than it can be."""
    if dtype == "auto":
        dtype = config.dtype or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    return dtype


def layout_of(config: ModelSpec, dtype: str, page_size: int, kv_cache_dtype: str = "auto") -> PageLayout:
    """The pages of a model that runs in `dtype`, and holds K and V in `kv_cache_dtype`, by "auto" in the same. Raises
    ModelError for others than these can be."""
    own = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    held = CODES.get(kv_cache_dtype) or dtype_of(config, own)
    return PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, held)


def _fingerprint(fingerprint: bytes, dtype: str, layout: PageLayout, quantization: str) -> bytes:
    """The name of a model that is computed in `dtype`, with weights that were quantized when they were loaded. If its
    pages hold another dtype, K and V differ by more than rounding from those that were computed in the pages' own."""
    for what in ("" if dtype == layout.dtype else dtype, quantization):
        if what:
            fingerprint = hashlib.blake2b(fingerprint + what.encode(), digest_size=len(fingerprint)).digest()
    return fingerprint


def _give_back() -> None:
    """Hand what only loading needed back to the kernel. glibc would keep it, and nothing later needs as much."""
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def _make_pool(num_pages: int, layout: PageLayout, device: str) -> torch.Tensor:
    """Zeros, since attention reads, behind a mask, what was never written."""
    try:
        kind = torch.int8 if layout.coded else TORCH_DTYPES[layout.dtype]
        pool = torch.empty((num_pages, *layout.shape), dtype=kind, device=device)
    except RuntimeError as error:
        size = num_pages * layout.page_bytes
        raise NotEnoughMemory(f"{num_pages} pages, {size:,} bytes, don't fit into {device}: {error}") from error
    if pool.device.type == "cpu":
        huge_pages.promise(pool.data_ptr(), pool.nbytes)
    return pool.zero_()
