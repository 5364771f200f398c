"""A GPU made of CPU memory. It works late, in any order that streams and events allow, and is checked for races.

Tensors on it are torch's fake tensors of device cuda. So torch itself notices devices that do not meet, and shapes that
depend on values. Each operation goes into the queue of its stream. It is carried out on bytes behind the fake tensors
when a random number generator says so, at the latest when the host waits for it.

A clock for each stream and thread tells which accesses are ordered by launches, events and waits. Two accesses to one
page, of which one writes, and which nothing orders, are a race, whatever order they came in. The end of a tensor counts
as a write of the stream that it was allocated in: torch's allocator gives its memory to what is launched there next.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from engine.device.gpus import Gpu, VisibleGpus
from kvstore.checksum import copy_heads, head_checksums
from tests.cuda.host_threads import Clock, Condition, HostThread, HostThreads, join

aten = torch.ops.aten
CUDA = 1  # torch's number of that kind of device
READS = (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.unique_consecutive)
WHOLE = (aten.scaled_dot_product_attention.default, aten._fused_rms_norm.default)
"""Operations that a build with CUDA has kernels for, and others make of other operations."""
ROWS = {aten.index_copy_.default: 2, aten.index_fill_.int_Scalar: 2, aten.embedding.default: 1}
"""Operations on some rows of their first argument, and the place of the argument that has their numbers."""
GARBAGE = 0xFF  # of memory that was never written; as floats they are NaN


class Race(AssertionError):
    """Two accesses to the same memory that nothing orders."""


class HostWaits(RuntimeError):
    """The host would wait for the device, as torch's sync debug mode tells it."""


@dataclass(eq=False)
class Access:
    """What touches memory. `clock`: what of other agents comes before it."""

    name: str
    agent: object
    clock: Clock

    def after(self, other: Access) -> bool:
        return self.clock.get(other.agent, 0) >= other.clock[other.agent]


@dataclass
class Cell:
    """The last accesses to one page, or to one tensor that is none of pages."""

    wrote: Access | None = None
    read: dict[object, Access] = field(default_factory=dict[object, Access])


class Memory:
    """A piece of memory, divided into cells of `grain` bytes."""

    def __init__(self, name: str, size: int, grain: int = 0) -> None:
        self.name, self.size, self.grain = name, size, grain or max(1, size)
        self.streams: set[object] = set()  # in which it is used
        self._cells: dict[int, Cell] = {}

    def touch(self, cells: Iterable[int], access: Access, *, writes: bool) -> None:
        for number in cells:
            cell = self._cells.setdefault(number, Cell())
            for other in (cell.wrote, *(cell.read.values() if writes else ())):
                if other is not None and not access.after(other):
                    raise Race(f"{access.name} and {other.name} at {self.name} {number}: nothing orders them")
            if writes:
                cell.wrote, cell.read = access, {}
            else:
                cell.read[access.agent] = access

    def between(self, first: int, last: int) -> range:
        return range(first // self.grain, -(-last // self.grain))


class DeviceMemory(Memory):
    """What lies behind a fake storage."""

    def __init__(self, size: int, stream: Stream, values: bool) -> None:
        super().__init__("tensor", size)
        self.stream = stream
        self.bytes = torch.full((size,), GARBAGE, dtype=torch.uint8) if values else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a fake tensor lies."""

    memory: DeviceMemory
    dtype: torch.dtype
    offset: int
    size: Sequence[int]
    stride: Sequence[int]

    @property
    def tensor(self) -> torch.Tensor:
        storage = self.memory.bytes.untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def cells(self) -> range:
        last = sum((count - 1) * stride for count, stride in zip(self.size, self.stride, strict=True)) + 1
        first, size = self.offset * self.dtype.itemsize, self.dtype.itemsize
        return self.memory.between(first, first + last * size if 0 not in self.size else first)

    def rows(self, numbers: torch.Tensor) -> set[int]:
        width, first = self.stride[0] * self.dtype.itemsize, self.offset * self.dtype.itemsize
        starts = (first + number * width for number in set(numbers.flatten().tolist()))
        return {cell for start in starts for cell in self.memory.between(start, start + width)}


@dataclass(eq=False)
class Operation:
    """Something in a stream."""

    access: Access
    run: Callable[[], None]
    after: Sequence[Operation] = ()
    done: bool = False
    moment: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.queue: deque[Operation] = deque()
        self.clock: Clock = {self: 0}

    def __repr__(self) -> str:
        return self.name

    def launch(self, name: str, run: Callable[[Access], None], after: Sequence[Operation] = ()) -> Operation:
        join(self.clock, self.gpu.clock)
        self.clock[self] += 1
        access = Access(f"{name} ({self})", self, dict(self.clock))
        operation = Operation(access, lambda: run(access), after)
        self.queue.append(operation)
        return operation

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            join(self.clock, event.mark.access.clock)
            self.launch("wait", lambda _: None, [event.mark])


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.mark: Operation | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.mark = (stream or self._gpu.stream).launch("event", lambda _: None)

    def query(self) -> bool:
        self._gpu.pass_time()
        if self.mark is None or not self.mark.done:
            return self.mark is None
        join(self._gpu.clock, self.mark.access.clock)
        return True

    def synchronize(self) -> None:
        if (mark := self.mark) is not None:
            self._gpu.wait_for(mark)

    def elapsed_time(self, end: Event) -> float:
        return float(end.mark.moment - self.mark.moment)


class FakeGpu:
    """A GPU. Within its context `torch.cuda` is this one. Without `values` it computes nothing, and counts."""

    current: FakeGpu | None = None

    def __init__(self, seed: int = 0, *, values: bool = True) -> None:
        self.values = values
        self.rng = random.Random(seed)
        self.eager = self.rng.choice([0.0, 0.2, 0.6, 0.95])  # how much it does before the host waits
        self.kernels: Counter[str] = Counter()
        self.uploads = 0
        self.faults: list[AssertionError] = []
        self.pinnable = 1_000  # pieces of memory that the driver pins
        self.sync_debug = "default"
        self.page_bytes = 0  # memory that is a multiple of it is watched page by page
        self._moment = 0
        self._owner = threading.current_thread()
        self._clocks: dict[object, Clock] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._memories: dict[int, tuple[StorageWeakRef, DeviceMemory]] = {}
        self._pinned: list[tuple[StorageWeakRef | None, int, Memory]] = []
        self._current = threading.local()
        self._streams: list[Stream] = []
        self._default = self._stream()
        self._stack = contextlib.ExitStack()
        self._threads = HostThreads(self)

    # --- torch.cuda -------------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeGpu:
        _let_torch_have_fake_cuda()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") copies then, as it does on a GPU
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        self._stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # work on small tensors is slower when threads divide it
        self._stack.enter_context(mock.patch("torch.set_num_threads"))
        gpus = VisibleGpus((Gpu("H100", 80 * 2**30, "GPU-a"),))
        names = {
            "Stream": self._stream, "Event": lambda **_: Event(self), "current_stream": lambda _=None: self.stream,
            "stream": self._within, "device": lambda _: self._within(self.stream), "synchronize": self.synchronize,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin),
            "_lazy_init": lambda: None, "is_available": lambda: True, "get_device_capability": lambda _=None: (9, 0),
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_debug", mode), "empty_cache": lambda: None,
        }  # fmt: skip
        self._stack.enter_context(mock.patch.multiple("torch.cuda", **names))
        for module in ("engine.device.gpus", "engine.numerics"):
            self._stack.enter_context(mock.patch(f"{module}.visible_gpus", return_value=gpus))
        threads = SimpleNamespace(local=threading.local, Condition=lambda: Condition(self))
        hosts = {
            "ThreadPoolExecutor": self._threads.executor, "threading": threads, "head_checksums": self._checksums,
            "copy_heads": self._copy_heads,
        }  # fmt: skip
        self._stack.enter_context(mock.patch.multiple("engine.cuda.mover", **hosts))
        self._stack.callback(self._threads.stop)
        self._stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _address))
        self._stack.enter_context(mock.patch.object(FakeGpu, "current", self))
        self._stack.enter_context(_Dispatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        with contextlib.suppress(AssertionError):  # it is among the faults
            self._finish()
        if error[0] is None and self.faults:
            raise self.faults[0]

    def _stream(self, _device: object = None, priority: int = 0) -> Stream:
        self._streams.append(Stream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    @property
    def stream(self) -> Stream:
        return getattr(self._current, "stream", self._default)

    @contextlib.contextmanager
    def _within(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.stream, stream
        try:
            with _Dispatch(self):
                yield
        finally:
            self._current.stream = before

    def synchronize(self, _device: object = None) -> None:
        """Wait for all streams."""
        for stream in self._streams:
            self.wait_for(stream.launch("event", lambda _: None))

    def _pin(self, address: int, size: int, _flags: int) -> int:
        if not self.pinnable:
            return 1
        self.pinnable -= 1
        self._pinned.append((None, address, Memory("arena", size, self._grain(size))))
        return 0

    @property
    def pins(self) -> bool:
        """Whether some of an arena is pinned."""
        return any(storage is None for storage, _, _ in self._pinned)

    def _unpin(self, address: int) -> int:
        (memory,) = (memory for _, at, memory in self._pinned if at == address)
        self._pinned = [each for each in self._pinned if each[2] is not memory]
        self._touch("the end of pinning", memory, memory.between(0, memory.size), writes=True)
        return 0

    def _grain(self, size: int) -> int:
        return self.page_bytes if self.page_bytes and size % self.page_bytes == 0 else 0

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """What comes before that which this thread does next."""
        return self._clocks.setdefault(threading.current_thread(), {threading.current_thread(): 0})

    def pass_time(self) -> None:
        """The device goes on for a while, or does not."""
        self._note_ends()
        thread = threading.current_thread()
        if thread is self._owner:
            while self.rng.random() < self.eager and self._advance():
                pass
        elif isinstance(thread, HostThread):
            thread.pause()

    def wait_for(self, operation: Operation) -> None:
        """The host waits for an operation of the device."""
        thread = threading.current_thread()
        if thread is self._owner:
            self._note_ends()
            self.drive(lambda: operation.done)
        elif isinstance(thread, HostThread):
            self._note_ends()
            thread.pause(lambda: operation.done)
        else:  # it only looks on
            operation.ended.wait()
        join(self.clock, operation.access.clock)

    def drive(self, until: Callable[[], bool]) -> None:
        """Let the device, and threads of the host, go on in any order until something holds."""
        while not until():
            ways = [self._advance, lambda: self._threads.step(self.rng)]
            self.rng.shuffle(ways)
            assert any(way() for way in ways), "the host waits for what never comes"

    def _advance(self) -> bool:
        """Carry out one operation."""
        ready = [each for each in self._streams if each.queue and all(one.done for one in each.queue[0].after)]
        if not ready:
            return False
        operation = self.rng.choice(ready).queue.popleft()
        self._moment += 1
        operation.done, operation.moment = True, self._moment
        try:
            with _disable_current_modes(), torch.inference_mode():
                operation.run()
        except AssertionError as fault:
            self.faults.append(fault)
            raise
        finally:
            operation.ended.set()
        return True

    def _finish(self) -> None:
        while self._advance():
            pass

    # --- memory -----------------------------------------------------------------------------------------------------

    def watch_pages(self, pool: torch.Tensor, page_bytes: int) -> None:
        """Watch a tensor, and what is pinned from now on, page by page."""
        self.page_bytes = self._memory(pool).grain = page_bytes

    def _checksums(self, part: memoryview, heads: int) -> list[int]:
        self._touch_host("a checksum", part, writes=False)
        return head_checksums(part, heads)

    def _copy_heads(self, target: memoryview, source: memoryview, heads: int) -> list[int]:
        self._touch_host("a copy within the host", source, writes=False)
        self._touch_host("a copy within the host", target, writes=True)
        return copy_heads(target, source, heads)

    def _touch_host(self, name: str, memory: memoryview, *, writes: bool) -> None:
        if (there := self._pinned_at(torch.frombuffer(memory, dtype=torch.uint8))) is not None:
            self._touch(name, *there, writes=writes)

    def _touch(self, name: str, memory: Memory, cells: Iterable[int], *, writes: bool) -> None:
        clock, thread = self.clock, threading.current_thread()
        clock[thread] += 1
        try:
            memory.touch(cells, Access(f"{name} ({thread.name})", thread, dict(clock)), writes=writes)
        except Race as fault:
            self.faults.append(fault)
            raise

    def _memory(self, tensor: torch.Tensor) -> DeviceMemory:
        storage = tensor.untyped_storage()
        if (known := self._memories.get(storage._cdata)) is not None:
            return known[1]
        memory = DeviceMemory(storage.nbytes(), self.stream, self.values)
        self._memories[storage._cdata] = StorageWeakRef(storage), memory
        return memory

    def _place(self, tensor: torch.Tensor) -> Place:
        memory = self._memory(tensor)
        memory.streams.add(self.stream)
        return Place(memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.size()), tensor.stride())

    def _pinned_at(self, tensor: torch.Tensor) -> tuple[Memory, range] | None:
        first = tensor.data_ptr()
        for _, address, memory in self._pinned:
            if address <= first < address + memory.size:
                return memory, memory.between(first - address, first - address + tensor.nbytes)
        return None

    def _note_ends(self) -> None:
        """Tensors that nothing holds any more: what is allocated next in their stream may have their memory."""
        if not self.values:
            return
        self._pinned = [each for each in self._pinned if each[0] is None or not each[0].expired()]
        for key in [key for key, (storage, _) in self._memories.items() if storage.expired()]:
            memory = self._memories.pop(key)[1]
            if memory.streams - {memory.stream}:
                memory.stream.launch("the end of a tensor", _touching(memory, memory.between(0, memory.size)))

    # --- operations -------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Launch an operation of torch's, or run it if it is one of the host's."""
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        there = any(isinstance(each, FakeTensor) for each in tensors)
        devices = {each.type for each in leaves if isinstance(each, torch.device)}
        if func.namespace == "prim":  # asks for a property
            with _disable_current_modes():
                return func(*args, **kwargs)
        if not there and "cuda" not in devices:
            with _disable_current_modes():
                return self._on_host(func, args, kwargs)
        if func not in WHOLE and _is_made_of_others(func):
            with _Dispatch(self):
                return func.decompose(*args, **kwargs)
        self.pass_time()
        with _disable_current_modes():
            if func is aten._to_copy.default and (not there or "cpu" in devices):
                return self._copy(None, args[0], kwargs)
            if func is aten.copy_.default and not all(isinstance(each, FakeTensor) for each in args[:2]):
                return self._copy(args[0], args[1], {"non_blocking": len(args) > 2 and args[2], **kwargs})
            if func.overloadpacket in READS:
                return self._read(func, args, kwargs)
            if any(not isinstance(each, FakeTensor) and each.dim() for each in tensors):
                raise HostWaits(f"{func} takes a tensor of the host, which is copied first")
            return self._launch(func, args, kwargs)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        pins = kwargs.pop("pin_memory", False) or func.overloadpacket is aten.pin_memory
        result = args[0].clone() if func.overloadpacket is aten.pin_memory else func(*args, **kwargs)
        if pins:
            memory = Memory("pinned memory", result.nbytes, self._grain(result.nbytes))
            self._pinned.append((StorageWeakRef(result.untyped_storage()), result.data_ptr(), memory))
        elif func.overloadpacket in (aten.to, aten._to_copy) and (there := self._pinned_at(args[0])) is not None:
            self._touch("a read", *there, writes=False)
        return result

    def _copy(self, dest: torch.Tensor | None, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Copy from the host to the device or back."""
        inward = not isinstance(source, FakeTensor)
        if dest is None:
            with self._fake if inward else contextlib.nullcontext():
                kind = options.get("dtype") or source.dtype
                dest = torch.empty(source.shape, dtype=kind, device="cuda" if inward else "cpu")
        pinned = self._pinned_at(source if inward else dest)
        waits = (pinned is None and source.numel() > 0) or not options.get("non_blocking")
        if waits:
            self._refuse("a copy of pageable memory" if pinned is None else "a copy that blocks")
        self.uploads += inward
        if not self.values:
            self._memory(dest if inward else source)
            return dest
        fake, host = (dest, source) if inward else (source, dest)
        place = self._place(fake)

        def run(access: Access) -> None:
            place.memory.touch(place.cells, access, writes=inward)
            if pinned is not None:
                pinned[0].touch(pinned[1], access, writes=not inward)
            if inward:
                place.tensor.copy_(host)
            else:
                host.copy_(place.tensor)

        operation = self.stream.launch("a copy in" if inward else "a copy out", run)
        if waits:
            self.wait_for(operation)
        return dest

    def _read(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation whose result, or whose size, the host waits for."""
        self._refuse(str(func))
        assert self.values, f"{func} reads a number that nothing has computed"
        places = tree_map(lambda each: self._place(each) if isinstance(each, FakeTensor) else each, args)
        self.wait_for(self.stream.launch(str(func), lambda _: None))
        return func(*tree_map(_values, places), **kwargs)

    def _refuse(self, name: str) -> None:
        if self.sync_debug == "error":
            raise HostWaits(f"the host waits for the device: {name}")

    def _launch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._fake:
            result = func(*args, **kwargs)
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        fresh = [each for each in results if each.untyped_storage()._cdata not in self._memories]
        name = func.overloadpacket.__name__
        if (fresh or func._schema.is_mutable) and "empty" not in name:
            self.kernels[name] += 1
            if self.values:
                places = {id(each): self._place(each) for each in fresh}
                self._queue(func, args, kwargs, [places.get(id(each)) for each in results])
        for each in fresh:
            self._memory(each)
        return result

    def _queue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], fresh: Sequence[Place | None]) -> None:
        """`fresh`: for each tensor that the operation returns, where it lies if it is new."""
        kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
        places = tree_map(lambda each: self._place(each) if isinstance(each, FakeTensor) else each, (args, kwargs))
        written = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        ]

        def run(access: Access) -> None:
            for number, argument in enumerate(places[0]):
                for place in (each for each in tree_leaves(argument) if isinstance(each, Place)):
                    cells = place.cells
                    if number == 0 and func in ROWS:
                        cells = place.rows(places[0][ROWS[func]].tensor)
                    place.memory.touch(cells, access, writes=written[number])
            outcome = func(*tree_map(_values, places[0]), **tree_map(_values, places[1]))
            outcomes = [each for each in tree_leaves(outcome) if isinstance(each, torch.Tensor)]
            for place, value in zip(fresh, outcomes, strict=True):
                if place is not None:
                    place.memory.touch(place.cells, access, writes=True)
                    place.tensor.copy_(value)

        self.stream.launch(func.overloadpacket.__name__, run)


class _Dispatch(TorchDispatchMode):
    """Takes a thread's operations to a fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return self._gpu.dispatch(func, args, dict(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    """Of a fake tensor: apart for each storage, and right within one."""
    return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.element_size()


def _touching(memory: Memory, cells: Iterable[int]) -> Callable[[Access], None]:
    return lambda access: memory.touch(cells, access, writes=True)


def _values(each: Any) -> Any:
    return each.tensor if isinstance(each, Place) else each


def _is_made_of_others(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _let_torch_have_fake_cuda() -> None:
    """A build without CUDA knows no guard of its devices. Torch has one that does nothing, and takes it in the place of
    one that counts no devices: here, one whose methods all return 0."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[CUDA]:
        method = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
        methods = (type(method) * 64)(*[method] * 64)
        guard = ctypes.pointer(ctypes.c_void_p(ctypes.addressof(methods)))
        guards[CUDA] = ctypes.addressof(guard.contents)
        torch._C._ensureCUDADeviceGuardSet()
