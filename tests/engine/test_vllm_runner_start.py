"""vLLM's processes as they start and fail, without vLLM: a script stands for the child."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import DeviceLost, NotEnoughMemory, StartupError, UnsupportedModel
from engine import numerics
from engine.device import gpu_locks, gpus
from engine.device.gpus import Gpu, VisibleGpus
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner import device_memory
from engine.vllm_runner.device_memory import lacks_of_memory
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut

SHAPE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": "float32", "form": "paired"}
SHAPE |= {"computed_in": "float32", "vocab_size": 100, "max_positions": 512}

ON_ONE_GPU = f"""
import fcntl, json, sys, time
from multiprocessing.connection import Connection
import msgspec

TOTAL, WEIGHTS, PAGE, MEETING = 1000, 100, 1, 3.0
link, memory = Connection(int(sys.argv[1])), open(sys.argv[2], "r+")

def used(more=0, starts=0):
    '''What all processes have taken of the GPU's memory, and how many have started.'''
    fcntl.flock(memory, fcntl.LOCK_EX)
    memory.seek(0)
    state = json.load(memory)
    state = [state[0] + more, state[1] + starts]
    memory.seek(0)
    memory.truncate()
    json.dump(state, memory)
    memory.flush()
    fcntl.flock(memory, fcntl.LOCK_UN)
    return state

load = msgspec.msgpack.decode(link.recv_bytes())
free = TOTAL - used(starts=1)[0]
until = time.monotonic() + MEETING
while used()[1] % 2 and time.monotonic() < until:  # another may start now
    time.sleep(0.02)
taken, _ = used(WEIGHTS)
while used()[0] < 2 * WEIGHTS and time.monotonic() < until:
    time.sleep(0.02)
pages = (int(load["memory_share"] * TOTAL) - (free - (TOTAL - used()[0]))) // PAGE
used(pages * PAGE)
answer = dict(type="Loaded", num_pages=pages, **{SHAPE!r})
link.send_bytes(msgspec.msgpack.encode(answer))
try:
    link.recv_bytes()
except EOFError:
    pass
"""
"""Takes memory as vLLM does: what the GPU has lost since this process's start counts as this process's own."""

REFUSES = """
import sys
from multiprocessing.connection import Connection
import msgspec
link = Connection(int(sys.argv[1]))
link.recv_bytes()
with open(sys.argv[2], "a") as tries:
    tries.write("x")
link.send_bytes(msgspec.msgpack.encode({"type": "Failed", "kind": sys.argv[3], "message": "No available memory"}))
"""

BESIDE = f"""
import os, sys, threading
from types import SimpleNamespace
from engine.vllm_runner import child, messages

class Child(child.Child):
    has_ranks = launches_ahead = False

    def __init__(self, order):
        self._null, self._duplicates = 1, child.Fence()
        self._ranks = self._copiers = SimpleNamespace(call=self.call, checksums=self.call, stages=1)
        self.copied, self.dups = threading.Event(), []

    def loaded(self):
        return messages.Loaded(num_pages=8, copies_beside=sys.argv[2] == "beside", **{SHAPE!r})

    def call(self, method, *args):
        if method == "baton_duplicate":
            self.dups.append(args)
        if method == "baton_in":
            return [len(self.dups)] * len(args[0])
        if method == "baton_out":
            self.copied.set()
            return [7] * len(args[0])

    def carry_out(self, order):
        if not isinstance(order, messages.Step):
            return super().carry_out(order)
        copied = self.copied.wait(2.0)
        self.copied.clear()
        return messages.Drawn([()], {{}}, float(copied))

child.Child = Child
child.main(int(sys.argv[1]))
"""
"""A step that lasts until pages have been copied out, or two seconds. The checksum of a page that is copied in is the
number of duplicates made before."""

FAILS = f"""
import sys
import torch
from engine.vllm_runner import child, messages

class Accelerator(torch.AcceleratorError):
    def __init__(self, message, code):
        super().__init__(message)
        self.error_code = code

ERRORS = dict(full=torch.OutOfMemoryError("CUDA out of memory"), full_later=Accelerator("out of memory", 2),
              dead=Accelerator("illegal memory access", 700), bad=ValueError("a bad row"))

class Child:
    has_ranks = False
    launches_ahead = sys.argv[3] == "ahead"

    def __init__(self, order):
        pass

    def loaded(self):
        return messages.Loaded(num_pages=8, **{SHAPE!r})

    def launch(self, order):
        return lambda: self.carry_out(order)

    def carry_out(self, order):
        raise ERRORS[sys.argv[2]]

child.Child = Child
child.main(int(sys.argv[1]))
"""
"""The child of vLLM's process with a model whose steps fail."""

TELLS = f"""
import sys
from engine.step.batch import Sampled
from engine.vllm_runner import child, messages

class Child:
    has_ranks = launches_ahead = False

    def __init__(self, order):
        pass

    def loaded(self):
        return messages.Loaded(num_pages=8, **{SHAPE!r})

    def carry_out(self, order):
        return messages.Drawn([[Sampled(50 * row.appends + len(row.pages))] for row in order.rows], {{}}, 0.0)

child.Child = Child
child.main(int(sys.argv[1]))
"""
"""A row's token says how many pages it was sent, and is 50 or more if it goes on."""


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    visible = VisibleGpus((Gpu("H100", 2**36, "GPU-a"), Gpu("H100", 2**36, "GPU-b")))
    for module in (gpus, numerics):
        monkeypatch.setattr(module, "visible_gpus", lambda: visible)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`child(script, *arguments)`: what runs in vLLM's place."""

    def take(script: str, *arguments: str | Path) -> None:
        def launch(fd: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", script, str(fd), *map(str, arguments)]
            return subprocess.Popen(command, pass_fds=[fd], env=environment, stdin=subprocess.DEVNULL)

        monkeypatch.setattr(VllmRunner, "launch_child", staticmethod(launch))

    return take


def load(path: Path, device: str = "cuda", ranks: int = 1) -> VllmRunner:
    return VllmRunner.load(
        path, "auto", None, 16, max_rows=4, max_tokens=64, threads=1, device=device, memory_share=0.45, ranks=ranks
    )


def test_two_that_start_on_one_gpu_at_once_have_their_pages(
    model: Path, child: Callable[..., None], tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.write_text(json.dumps([0, 0]))
    child(ON_ONE_GPU, memory)
    with ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(load, [model, model]))
    for each in runners:
        each.close()
    assert [each.num_pages for each in runners] == [350, 350]
    assert json.loads(memory.read_text())[0] == 900


def test_it_notices_two_that_start_without_a_lock(
    model: Path, child: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_locks, "locked", lambda gpus, seconds: nullcontext())
    with pytest.raises(AssertionError, match="350"):
        test_two_that_start_on_one_gpu_at_once_have_their_pages(model, child, tmp_path)


@pytest.mark.parametrize(("device", "tries"), [("cuda", "xx"), ("cpu", "x")])
def test_too_little_memory_is_told_as_such_after_another_try_on_a_gpu(
    device: str, tries: str, model: Path, child: Callable[..., None], tmp_path: Path
) -> None:
    child(REFUSES, tmp_path / "tries", NotEnoughMemory.reason)
    with pytest.raises(NotEnoughMemory, match=r"too little memory for .* with pages of 16 tokens: No available memory"):
        load(model, device)
    assert (tmp_path / "tries").read_text() == tries
    child(REFUSES, tmp_path / "others", "ValueError")
    with pytest.raises(UnsupportedModel):
        load(model, device)
    assert (tmp_path / "others").read_text() == "x"


def test_what_vllm_says_of_memory_is_no_lack_of_the_model() -> None:
    texts = "No available memory for the cache blocks. Try increasing", "Error in memory profiling. Initial free memory"
    for error in (ValueError(texts[0]), AssertionError(texts[1])):
        with pytest.raises(NotEnoughMemory), lacks_of_memory():
            raise error
    with pytest.raises(ValueError, match="rope"), lacks_of_memory():
        raise ValueError("rope is unknown")


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        ("full", torch.OutOfMemoryError),
        ("full_later", torch.OutOfMemoryError),
        ("dead", DeviceLost),
        ("bad", RuntimeError),
    ],
)
@pytest.mark.parametrize("when", ["at once", "ahead"])
def test_what_a_step_on_a_gpu_ends_with(
    error: str, error_type: type[Exception], when: str, model: Path, child: Callable[..., None]
) -> None:
    """Out of memory has the worker run smaller steps. A dead context ends the process: all later steps would fail."""
    child(FAILS, error, when)
    loaded = load(model)
    with pytest.raises(error_type) as raised:
        loaded.launch([Chunk([1], 0, [0])]).wait()
    assert type(raised.value) is error_type
    if error_type is DeviceLost:
        with pytest.raises(DeviceLost):
            loaded.check_device()
    else:
        loaded.check_device()
    loaded.close()


def test_a_row_that_goes_on_is_sent_its_new_pages_unless_one_was_exchanged(
    model: Path, child: Callable[..., None]
) -> None:
    child(TELLS)
    loaded, table = load(model), BlockTable(range(5))
    greedy = TokenDraw(temperature=0.0)

    def token(start: int, *tokens: int) -> int:
        (sampled,) = loaded.launch([Chunk(tokens, start, table, greedy)]).wait().sampled
        assert sampled is not None
        return sampled.token

    assert token(0, *[1] * 31) == 2
    assert token(31, 2) == 50
    assert token(32, 50) == 51
    table.exchange(0, 6)
    assert token(33, 51) == 3
    assert token(34, 3) == 50
    table.exchange(4, 8)
    with pytest.raises(ValueError, match="page 8 is not in 0 to 7"):
        token(35, 50)
    loaded.close()


@pytest.mark.parametrize("beside", [True, False])
def test_copies_go_on_beside_a_step_where_the_device_can(beside: bool, model: Path, child: Callable[..., None]) -> None:
    child(BESIDE, "beside" if beside else "between")
    loaded, arena = load(model), Arena.create(4_096)
    arena.divide(1_024)
    mover = loaded.mover(verify=True)
    mover.attach(arena)
    step = loaded.launch([Chunk([1], 0, [0])])
    copies = mover.start([CopyOut(1, 0, 3, 1)])
    assert (step.wait().seconds, loaded.copies_overlap) == (float(beside), beside)
    copied = copies.wait()
    assert isinstance(copied, CopiedOut)
    assert copied.checksums == (7,)
    step = loaded.launch([Chunk([1], 0, [0])])
    loaded.duplicate(1, 2)  # behind the step, and on another socket than copies
    copied = mover.start([CopyIn(2, 0, 0, 1, 1)]).wait()
    assert isinstance(copied, CopiedIn)
    assert (copied.indices, copied.corrupt) == ((0,), ()), "a copy into a page comes behind all duplicates before it"
    step.wait()
    assert mover.close()
    loaded.close()
    arena.close()


def test_the_memory_of_all_ranks_is_awaited_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of CUDA in the process that starts the ranks would stay."""
    free = {"GPU-a": [90], "GPU-b": [10, 10, 90]}

    def memory(gpu: str) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=free[gpu].pop(0) if len(free[gpu]) > 1 else free[gpu][0])

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=str, nvmlDeviceGetMemoryInfo=memory, NVMLError=OSError
    )
    monkeypatch.setitem(sys.modules, "vllm.third_party.pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(device_memory, "_POLL", 0.01)
    device_memory.await_memory(["GPU-a", "GPU-b"], 0.8)
    assert free["GPU-b"] == [90]
    assert not torch.cuda.is_initialized()
    monkeypatch.setattr(device_memory, "_PREDECESSOR", 0.05)
    device_memory.await_memory(["GPU-a"], 0.95)  # vLLM says so then
    nvml.nvmlDeviceGetHandleByUUID = os.stat  # fails, as for a GPU that NVML does not know
    device_memory.await_memory(["GPU-a"], 0.95)


def test_all_gpus_of_the_ranks_are_locked_and_no_others(tmp_path: Path) -> None:
    with gpu_locks.locked(["GPU-b", "GPU-a"], 0.0):
        for gpu in ("GPU-a", "GPU-b"):
            with pytest.raises(StartupError, match=f"loading a model on {gpu} for 0 s"), gpu_locks.locked([gpu], 0.0):
                pass
        with gpu_locks.locked(["GPU-c"], 0.0), gpu_locks.locked([], 0.0):
            pass
    with gpu_locks.locked(["GPU-a", "GPU-b"], 0.0):
        pass
    assert gpus.gpu_uuids("cuda", 2) == ["GPU-a", "GPU-b"]
    assert gpus.gpu_uuids("cuda:1", 1) == ["GPU-b"]
    assert not gpus.gpu_uuids("cpu", 2)
