"""The worker's side of vLLM: a `Runner` that sends each step and copy to the child, and hears of their ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

import msgspec
import torch

from baton.checkpoint_files import read_config
from baton.errors import ModelError, NotEnoughMemory, StartupError, UnsupportedModel
from baton.messages import AdapterCard
from baton.trace import Tracer
from engine.checkpoint.safetensors_reader import TensorFiles
from engine.cpu.numerics import VERSION as KERNELS_VERSION
from engine.device import gpu_locks
from engine.device.gpus import gpu_uuids
from engine.numerics import digest, torch_digest
from engine.runner import StepResults
from engine.sampling.mask_threads import MaskThreads
from engine.step.batch import CHUNK_ALIGNMENT, Chunk, Sampled
from engine.step.block_table import BlockTable
from engine.vllm_runner import VLLM_VERSION, compiling, messages
from engine.vllm_runner.adapters import load_adapters
from engine.vllm_runner.child_environment import child_environment
from engine.vllm_runner.child_link import ChildLink, Pending
from engine.vllm_runner.drafts import layers
from engine.vllm_runner.leftovers import ProcessFolder
from engine.vllm_runner.mover import VllmMover
from engine.vllm_runner.process_watch import ProcessWatch
from engine.vllm_runner.requirements import Installation
from kvstore.arena.shared_slots import LeaveRing
from kvstore.layout import PageLayout
from kvstore.window_groups import WindowGroups

log = logging.getLogger(__name__)

NUMERICS_VERSION = 3
"""Raised whenever vLLM makes other bits of the same input here than with an earlier release of this."""

_PATIENCE = 600.0  # seconds for a model to load, and for others on the same GPU to have loaded theirs
_FAREWELL = 10.0  # seconds for the child to end
_UNSUPPORTED = ("unsupported_model", "ValueError", "ValidationError", "NotImplementedError")
"""What vLLM raises for a configuration that it can't serve."""


@dataclass
class _Known:
    """What vLLM knows of a sequence after its last step."""

    name: int
    end: int  # tokens computed
    pages: int  # of its table, as it was after so many exchanges
    exchanges: int
    window_pages: Sequence[int]
    token: int | None  # that was drawn then, once that is known


class ChildProcess(Protocol):
    """What vLLM runs in, with the methods of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def launch_child(fd: int, environment: Mapping[str, str]) -> ChildProcess:
    argv = [sys.executable, "-m", "engine.vllm_runner.child", str(fd)]
    return subprocess.Popen(argv, pass_fds=[fd], env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 - a list, no shell


class VllmRunner:
    """A model in a child process. `load` makes one."""

    launch_child: ClassVar[Callable[[int, Mapping[str, str]], ChildProcess]] = staticmethod(launch_child)
    """Starts the child. The tests have a faster one."""

    has_lm_head = True
    overlaps = True
    launches_ahead = True
    no_kv_windows = no_page_weights = "vLLM attends to every page of a context"
    no_rings = "vLLM hands no layer on before a step has ended"
    window: int | None = None  # vLLM reads pages of its own accord, so none is given back before a sequence ends

    def __init__(
        self,
        link: Connection,
        process: ChildProcess,
        folder: ProcessFolder,
        loaded: messages.Loaded,
        order: messages.Load,
        fingerprint: bytes,
        device: str = "cpu",
        adapters: tuple[AdapterCard, ...] = (),
    ) -> None:
        self._order = order
        # Two dtypes of the model may have pages of one dtype, and their K and V differ by more than rounding.
        held_otherwise = loaded.dtype != loaded.computed_in
        self.fingerprint = _digest(fingerprint, loaded.computed_in) if held_otherwise else fingerprint
        self.numerics = _numerics(device, order)
        self.fixed_borders = order.exact and order.device == "cuda"
        if self.fixed_borders and order.page_size % CHUNK_ALIGNMENT:
            log.warning(
                "a cached prefix may change low bits: pages.page_size is %d and no multiple of %d",
                order.page_size,
                CHUNK_ALIGNMENT,
            )
        self.adapters = adapters
        self._adapters = {"": 0} | {one.digest: number for number, one in enumerate(adapters, 1)}
        self._numbered = len(adapters)  # adapters ever: vLLM keeps what it knows of a number
        self.layout = PageLayout(
            loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, order.page_size, loaded.dtype, loaded.form
        )
        self.tracer = Tracer()
        self.num_pages = loaded.num_pages
        self.groups = WindowGroups(loaded.window_groups, loaded.window, order.page_size, loaded.states)
        if self.groups.count:
            self.fingerprint = _digest(self.fingerprint, f"{loaded.num_layers} layers to a group")
        if loaded.states and order.stage_ranks > 1:  # parts of two degrees are not the same range of a state
            self.fingerprint = _digest(self.fingerprint, f"states of {order.stage_ranks} ranks")
        self.device = device
        self.vocab_size = loaded.vocab_size
        self.max_positions = loaded.max_positions
        self._max_rows, self._max_tokens = order.max_rows, order.max_tokens
        self.verifies = loaded.verifies
        self.guesses = 0  # tokens that vLLM's draft proposes after each draw of the steps to come
        self.proposals: Mapping[int, Sequence[int]] = {}
        """What it proposes after the last step, by number of its chunk."""
        self.guess_seconds = 0.0  # and what it took for that
        self._process, self._folder = process, folder
        self._child = self._copies = ChildLink(link)
        self._duplicates = 0  # orders
        self.copies_overlap = loaded.copies_beside
        if loaded.copies_beside:
            ours, theirs = socket.socketpair()
            self._child.order(messages.Beside, theirs.detach())
            self._copies = ChildLink(Connection(ours.detach()))
        ranks = {f"rank {number}": pid for number, pid in enumerate(loaded.process_ids)}
        self._watch = ProcessWatch({"process": process.pid} | ranks, self._lost)
        self.writers: Sequence[int] = self._watch.pidfds
        self._masks = MaskThreads()
        self._known: weakref.WeakKeyDictionary[BlockTable, _Known] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._named = 0

    def _lost(self, name: str) -> None:
        """One of vLLM's processes has ended. The others are of no use without it."""
        for link in (self._child, self._copies):
            link.lose(f"vLLM's {name} has gone")
        self._process.kill()

    @property
    def process_id(self) -> int:
        """Of the child."""
        return self._process.pid

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: str,
        num_pages: int | None,
        page_size: int,
        *,
        max_rows: int,
        max_tokens: int,
        threads: int,
        device: str = "cpu",
        memory_share: float = 0.05,
        lora_modules: Mapping[str, str] = MappingProxyType({}),
        max_loras: int = 0,
        max_lora_rank: int = 16,
        ranks: int = 1,
        eager: bool = False,
        deadline: float = 60.0,
        kv_cache_dtype: str = "auto",
        exact: bool = True,
        attention_backend: str = "",
        max_model_len: int = 0,
        quantization: str = "",
        expert_parallel: bool = False,
        stages: int = 1,
        drafts: Mapping[str, str | int] = MappingProxyType({}),
    ) -> Self:
        """Start the child and have it load the checkpoint in `path`, with `num_pages` empty pages.

        A step has at most `max_rows` chunks and `max_tokens` tokens. `device` is "cpu" or a CUDA device. The child may
        use the part `memory_share` of that device's memory in all, and `num_pages` None means as many as fit there.
        `lora_modules` are directories of LoRA adapters by name, of at most `max_lora_rank` each. Others may be added,
        up to `max_loras` in all. All stay in memory until they are removed.
        `ranks` processes share the model, in `stages` of equally many, each with some layers. If they need more than
        `deadline` seconds for an order, all are lost. vLLM compiles the model, unless it is to be `eager`.
        `kv_cache_dtype` is "auto" or one of `pages.FP8`. With `exact`, the bits of a sequence depend on no other one
        and on no borders of chunks. No test has shown that on a GPU. On a GPU it waits while another process loads a
        model there (`engine.device.gpu_locks`). `attention_backend` names one of vLLM's; empty means that vLLM chooses.
        A sequence has at most `max_model_len` tokens; 0 means as many as the model takes. `quantization` of the weights
        at load is one of vLLM's, and empty means none. With `expert_parallel`, ranks divide the experts of a layer.
        Neither was run on a GPU. Raises ModelError (UnsupportedModel where vLLM or this runner can't serve the model),
        NotEnoughMemory, StartupError and FolderUntrusted.
        """
        adapters = load_adapters(path, lora_modules, max_lora_rank, device)
        order = messages.Load(
            str(path),
            dtype,
            num_pages,
            page_size,
            max_rows,
            max_tokens,
            threads,
            device.partition(":")[0],
            memory_share,
            [(one.card.name, str(one.path)) for one in adapters],
            max(max_loras, len(adapters)),
            max_lora_rank,
            ranks,
            eager,
            deadline,
            kv_cache_dtype,
            exact,
            attention_backend,
            max_model_len,
            quantization,
            expert_parallel,
            gpu_uuids(device, ranks),
            stages,
            dict(drafts),
        )
        fingerprint = _fingerprint(path)
        if drafts:
            fingerprint = _with_drafts(fingerprint, path, drafts)
        if quantization:
            fingerprint = _digest(fingerprint, quantization)
        environment = child_environment(os.environ, device, threads, order.stage_ranks, exact=exact)
        if not eager:
            environment |= compiling.environment(order.device)
        cards = tuple(one.card for one in adapters)
        with gpu_locks.locked(order.gpus, _PATIENCE):
            try:
                return cls._start(order, environment, fingerprint, device, cards)
            except NotEnoughMemory as error:
                if device == "cpu":
                    raise
                log.warning("vLLM is started once more, since others may have changed what was free: %s", error)
            return cls._start(order, environment, fingerprint, device, cards)

    @classmethod
    def _start(
        cls,
        order: messages.Load,
        environment: Mapping[str, str],
        fingerprint: bytes,
        device: str,
        cards: tuple[AdapterCard, ...],
    ) -> Self:
        with contextlib.ExitStack() as undo:
            folder = _folder()
            undo.callback(folder.remove)
            ours, theirs = Pipe()
            with theirs:
                process = cls.launch_child(theirs.fileno(), {**environment, **folder.environment})
            undo.callback(_end, process)
            try:
                ours.send_bytes(messages.encode(order))
                if not ours.poll(_PATIENCE):
                    raise StartupError(f"vLLM has not loaded {order.path} within {_PATIENCE:.0f} s")
                answer = messages.decode_answer(ours.recv_bytes())
            except (EOFError, OSError) as error:
                raise StartupError(f"vLLM's process ended while it loaded {order.path}; its log says why") from error
            if isinstance(answer, messages.Failed):
                raise _refusal(order, answer)
            assert isinstance(answer, messages.Loaded)
            try:
                runner = cls(ours, process, folder, answer, order, fingerprint, device, cards)
            except ProcessLookupError as error:
                raise StartupError(f"one of vLLM's processes ended as soon as it had loaded {order.path}") from error
            undo.pop_all()
        return runner

    def launch(self, chunks: Sequence[Chunk]) -> RunningStep:
        """Send a step. The child takes it up when those before it have ended. A mask that is late leaves its chunk
        without a token, and the one before it is not computed."""
        if len(chunks) > self._max_rows or sum(len(chunk.tokens) for chunk in chunks) > self._max_tokens:
            raise ValueError(f"a step has at most {self._max_rows} chunks and {self._max_tokens} tokens")
        self._make_room(chunks)
        gone = [self._gone.popleft() for _ in range(len(self._gone))]  # not the rows that this step alone has
        rows = [self._row(chunk) for chunk in chunks]
        known = [self._known.get(chunk.pages) if isinstance(chunk.pages, BlockTable) else None for chunk in chunks]
        masks = [draw.mask for chunk in chunks for _, draw in chunk.draws if draw.mask is not None]
        under_way, guesses = self._masks.start(masks) if masks else None, self.guesses

        def step() -> messages.Step:
            if under_way is not None:
                self._masks.wait(under_way)
            return messages.Step([_with_draw(*each) for each in zip(rows, chunks, strict=True)], gone, guesses)

        return RunningStep(self._child.order(step), list(zip(chunks, known, strict=True)), self)

    def add_adapter(self, name: str, path: str) -> AdapterCard:
        order, most = self._order, self._order.max_loras
        if len(self.adapters) >= most:
            raise UnsupportedModel(
                f"{len(self.adapters)} LoRA adapters are loaded, and model.max_loras allows {most}; unload one first"
            )
        (adapter,) = load_adapters(Path(order.path), {name: path}, order.max_lora_rank, order.device)
        card = adapter.card
        if (other := next((one for one in self.adapters if one.digest == card.digest), None)) is not None:
            raise UnsupportedModel(f"the LoRA adapter in {path} is loaded already, as {other.name}")
        self._numbered += 1
        number = self._numbered
        self._carry_out(messages.AddAdapter(number, name, str(adapter.path)))
        self._adapters[card.digest] = number
        self.adapters = tuple(sorted((*self.adapters, card), key=lambda one: one.name))
        return card

    def remove_adapter(self, digest: str) -> None:
        number = self._adapters.pop(digest)
        self.adapters = tuple(one for one in self.adapters if one.digest != digest)
        self._carry_out(messages.RemoveAdapter(number, [self._gone.popleft() for _ in range(len(self._gone))]))

    def _carry_out(self, order: messages.AddAdapter | messages.RemoveAdapter) -> None:
        """Have the child do it after the steps that were launched. Raises UnsupportedModel where vLLM refuses."""
        answer = self._child.order(lambda: order).wait()
        if isinstance(answer, messages.Failed):
            raise UnsupportedModel(f"vLLM can't do it: {answer.message}")

    def leave_ring(self, left: LeaveRing) -> None:
        """It is in none."""

    def duplicate(self, source: int, dest: int) -> None:
        self._child.tell(messages.Duplicate(source, dest))
        self._duplicates += 1

    def same_contents(self, page: int, other: int) -> bool:
        raise NotImplementedError("vLLM's pages are not compared; worker.engine_choice sees to it")

    def mover(self, *, verify: bool) -> VllmMover:
        return VllmMover(self._copies, lambda: self._duplicates, verify=verify)

    def wake(self, alarm: Callable[[], None]) -> None:
        self._child.alarm = self._copies.alarm = alarm

    def check_device(self) -> None:
        self._child.check_alive()

    def close(self) -> None:
        """End the child and its ranks, and remove what they have left."""
        self._copies.close()
        self._child.close()
        try:
            self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            _end(self._process)
        self._watch.await_ends(_FAREWELL)
        self._watch.close()
        self._folder.remove()

    def _make_room(self, chunks: Sequence[Chunk]) -> None:
        """Have vLLM forget all sequences that this step leaves out, if it would know more than it has places for. They
        come back as new ones. Its second model runner has one for each row of a step, whether it runs or not."""
        running = {id(chunk.pages) for chunk in chunks}
        idle = [table for table in self._known if id(table) not in running]
        if len(idle) + len(chunks) > self._max_rows:
            self._gone.extend(self._known.pop(table).name for table in idle)

    def _row(self, chunk: Chunk) -> messages.Row:
        """A chunk as the child is told of it, without its draw. Raises ValueError for one that it can't run."""
        end, page_size = chunk.end, self.layout.page_size
        covering = -(-end // page_size)
        if not chunk.tokens or chunk.start < 0 or end > self.max_positions:
            raise ValueError(
                f"a chunk needs tokens below {self.max_positions}, not {len(chunk.tokens)} at {chunk.start}"
            )
        if chunk.sample is not None and end >= (most := min(self.max_positions, self.num_pages * page_size)):
            raise ValueError(f"a token that is drawn needs a position below {most}, not {end}")
        if len(chunk.pages) < covering:
            raise ValueError(f"positions up to {end - 1} need {covering} pages, not {len(chunk.pages)}")
        if min(chunk.tokens) < 0 or max(chunk.tokens) >= self.vocab_size:
            raise ValueError(f"a token is not in 0 to {self.vocab_size - 1}")
        table = chunk.pages if isinstance(chunk.pages, BlockTable) else BlockTable(chunk.pages)
        table.check(self.num_pages)
        # What a worker measures at its start has pages alone: there all groups write to these, and nothing reads them.
        groups = self.groups.count
        window_pages: Sequence[int] = ()
        if groups:
            window_pages = list(chunk.window_pages[: covering * groups])
            window_pages = window_pages or [page for page in table[:covering] for _ in range(groups)]
        if chunk.window_pages and self.groups.longest_chunk(chunk.start, len(chunk.tokens)) < len(chunk.tokens):
            raise ValueError(f"{len(chunk.tokens)} tokens at {chunk.start} go beyond a page, which has one state")
        if len(window_pages) < covering * groups:
            raise ValueError(f"{covering} pages need {covering * groups} window pages, not {len(window_pages)}")
        if min(window_pages, default=0) < 0 or max(window_pages, default=0) >= self.num_pages:
            raise ValueError(f"a page is not in 0 to {self.num_pages - 1}")
        begun = -(-chunk.start // page_size)
        if all(draw.mask is None for _, draw in chunk.draws):  # else a late mask may leave any of them part empty
            begun = max(begun, end // page_size)
        fresh = [*table[begun:covering], *window_pages[begun * groups :]]
        if chunk.adapter not in self._adapters:
            raise ValueError(f"no LoRA adapter {chunk.adapter} is loaded")
        name, appends, first_new = self._follow(chunk, covering, window_pages)
        scoring = chunk.scoring
        targets, first, top = ((), 0, 0) if scoring is None else (scoring.targets, scoring.first, scoring.top)
        return messages.Row(
            name, appends, list(chunk.tokens), chunk.start, table[first_new:covering], fresh, None, list(targets),
            first, top, chunk.follows, adapter=self._adapters[chunk.adapter],
            window_pages=window_pages[first_new * groups :],
        )  # fmt: skip

    def _follow(self, chunk: Chunk, pages: int, window_pages: Sequence[int]) -> tuple[int, bool, int]:
        """The name of a row with so many pages, whether it goes on from its last step, and the first page that vLLM
        does not know. O(1), but for window pages: a context may have thousands of pages."""
        table = chunk.pages
        if not isinstance(table, BlockTable):
            self._named += 1
            self._gone.append(self._named)  # of the next step
            return self._named, False, 0
        known = self._known.get(table)
        appends = (
            known is not None
            and chunk.sample is not None
            and known.end == chunk.start
            and not (self.groups.states and chunk.start % self.layout.page_size == 0)  # its state moves on
            and (chunk.follows is not None or list(chunk.tokens[: chunk.known - chunk.start]) == [known.token])
            and (known.pages <= pages and known.exchanges == table.exchanges)
            and window_pages[: len(known.window_pages)] == known.window_pages
        )
        if known is None:
            self._named += 1
            known = self._known[table] = _Known(self._named, 0, 0, 0, (), None)
            weakref.finalize(table, self._gone.append, known.name)
        first_new = known.pages if appends else 0
        known.end, known.pages, known.exchanges = chunk.end, pages, table.exchanges
        known.window_pages, known.token = window_pages, None
        return known.name, appends, first_new


def _refusal(order: messages.Load, failed: messages.Failed) -> ModelError | NotEnoughMemory:
    """The error for a child that could not load."""
    held = "" if order.kv_cache_dtype == "auto" else f" in {order.kv_cache_dtype}"
    load = f"{order.path} with pages of {order.page_size} tokens{held}{_with_adapters(order)}"
    if failed.kind == NotEnoughMemory.reason:
        return NotEnoughMemory(f"vLLM has too little memory for {load}: {failed.message}")
    kind = UnsupportedModel if failed.kind in _UNSUPPORTED else ModelError
    return kind(f"vLLM can't serve {load}: {failed.message}")


def _with_adapters(order: messages.Load) -> str:
    """Name the adapters and the format of the weights below them, for an error."""
    if not order.adapters:
        return ""
    quantization = read_config(Path(order.path)).get("quantization_config") or {}
    weights = f"{quantization.get('quant_method')} weights" if quantization else "weights that are not quantized"
    return f" and LoRA adapters {', '.join(name for name, _ in order.adapters)} on {weights}"


def _folder() -> ProcessFolder:
    try:
        return ProcessFolder()
    except OSError as error:
        raise StartupError(f"vLLM's process needs a temporary folder: {error}") from error


def _end(process: ChildProcess) -> None:
    process.kill()
    process.wait()


def _with_draw(row: messages.Row, chunk: Chunk) -> messages.Row:
    """A row with its draws, up to the first whose mask is late: the tokens that come again are left out. Those are the
    proposals after that draw, and if it is the first, the token before it. A recurrent state takes each token once."""
    if chunk.sample is None:
        return row
    draws = [draw for _, draw in takewhile(lambda each: each[1].mask is None or each[1].mask.ready, chunk.draws)]
    tokens = row.tokens[: len(row.tokens) - len(chunk.draws) + len(draws)]
    return msgspec.structs.replace(row, tokens=tokens, draw=draws[-1] if draws else None, verify=draws[:-1])


class RunningStep:
    """A step that the child was sent."""

    def __init__(self, pending: Pending, chunks: Sequence[tuple[Chunk, _Known | None]], runner: VllmRunner) -> None:
        self._pending, self._chunks, self._runner = pending, chunks, runner

    def done(self) -> bool:
        return self._pending.done

    def wait(self) -> StepResults:
        answer = self._pending.wait()
        if isinstance(answer, messages.Failed):
            kind = torch.OutOfMemoryError if answer.kind == torch.OutOfMemoryError.__name__ else RuntimeError
            raise kind(f"vLLM: {answer.kind}: {answer.message}")
        assert isinstance(answer, messages.Drawn)
        self._runner.proposals, self._runner.guess_seconds = answer.proposals, answer.guess_seconds
        last: list[Sampled | None] = []
        verified: dict[int, Sequence[Sampled | None]] = {}
        for number, ((chunk, known), drawn) in enumerate(zip(self._chunks, answer.sampled, strict=True)):
            if known is not None:
                known.token = drawn[-1].token if drawn else None
            if known is not None and chunk.verify:
                known.end = chunk.known + len(drawn) - 1
            rows = [*drawn, *[None] * (1 + len(chunk.verify) - len(drawn))]
            last.append(rows[-1])
            if chunk.verify:
                verified[number] = rows[:-1]
        return StepResults(last, answer.scores, answer.seconds, verified)


def _numerics(device: str, order: messages.Load) -> str:
    """The class of vLLM's arithmetic. Ranks sum in another order than one, and a compiled model rounds less often. What
    stages send each other is what they would go on with, unless a compiler sees across that border."""
    how = "-eager" * order.eager + f"-{order.stage_ranks}-ranks" * (order.stage_ranks > 1)
    how += f"-{order.stages}-stages" * (order.stages > 1 and not order.eager)
    return f"vllm-{_release()}{how}/{digest(torch_digest(device), str(NUMERICS_VERSION), str(KERNELS_VERSION))}"


def _release() -> str:
    """The release of vLLM that computes. Others have other kernels."""
    return installation.release if (installation := Installation.find()) is not None else VLLM_VERSION


def _fingerprint(path: Path) -> bytes:
    """The checkpoint's content and vLLM's release: its K and V are not those of another engine to the last bit."""
    config = json.dumps(json.loads((path / "config.json").read_bytes()), sort_keys=True).encode()
    with TensorFiles(path) as files:
        content = files.fingerprint(config)
    return _digest(content, f"vllm {_release()}")


def _with_drafts(fingerprint: bytes, path: Path, drafts: Mapping[str, str | int]) -> bytes:
    """The same with the content of a draft, if pages have layers of it. MTP layers are a part of the checkpoint in
    `path`."""
    folder = Path(str(drafts.get("model", path)))
    if not layers(str(drafts["method"]), read_config(folder)):
        return fingerprint
    own = fingerprint if folder == path else _fingerprint(folder)
    return _digest(fingerprint, f"{drafts['method']} {own.hex()}")


def _digest(content: bytes, text: str) -> bytes:
    return hashlib.blake2b(content + text.encode(), digest_size=16).digest()
