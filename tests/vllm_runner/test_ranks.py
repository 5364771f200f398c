"""Several ranks to a worker: each holds some KV heads, or those of some layers, copies them to and from the arena, and
dies with the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("vllm")

from baton.config import Config
from baton.errors import DeviceLost, UnsupportedModel
from baton.unix import readable
from deploy.local import LocalCluster
from engine.step.batch import Chunk, PromptScoring, TokenDraw
from engine.vllm_runner import leftovers
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedIn, CopyIn, CopyOut
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.vllm_runner import driver
from tests.vllm_runner.driver import PAGE, Generation, Loaded, load, members, prompt_of, run, step, texts, untimed

PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::4]
SEEDED = TokenDraw(temperature=0.9, top_p=0.95, seed=77)
FAMILIES = (
    "qwen2", "qwen3", "mistral", "mistral-window", "phi3", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3-moe",
    "gpt-oss",
)  # fmt: skip
"""Besides Llama, whose ranks are looked at more closely."""
LENGTHS = (70, 33, 5)
STAGED = ("qwen2", "qwen3", "mistral", "mistral-window", "phi3", "olmo2", "mixtral", "qwen3-moe")
"""Besides Llama, whose layers form no groups."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"), hidden_size=128, head_dim=32, **heads)


@pytest.fixture(scope="module")
def runner(path: Path) -> Iterator[Loaded]:
    """`runner(ranks, stages)`: the model on so many ranks, in that many stages."""
    yield from driver.loaded_once(lambda ranks, stages=1: load(path, ranks=ranks, stages=stages))


@pytest.fixture
def arena(runner: Loaded) -> Iterator[Arena]:
    yield from driver.arena_of(runner(2))


@pytest.mark.technique("Tensor parallelism")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_transformers_and_of_one_rank(ranks: int, path: Path, runner: Loaded) -> None:
    sequences = members(LENGTHS)
    run(runner(ranks), sequences, 20)
    for prompt, output in texts(sequences):
        assert output == checkpoints.reference(path).generate(prompt, 20)[0]
    outputs: list[list[int]] = []
    for count in (1, ranks):
        seeded = Generation(prompt_of(70, 70), range(30, 38), SEEDED)
        run(runner(count), [seeded], 20)
        outputs.append(seeded.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_have_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    path = checkpoints.make(name, tmp_path, hidden_size=128, head_dim=32)
    with closing(load(path, ranks=2)) as model:
        driver.exact(model, path)


@pytest.mark.technique("Pipeline parallelism")
@pytest.mark.parametrize(("ranks", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_stages_have_the_tokens_of_transformers_and_of_one_rank(
    ranks: int, stages: int, path: Path, runner: Loaded
) -> None:
    """In mixed batches of chunks, launched one before the other's end. Prompt tokens are scored on the last stage."""
    staged, prompt, sequences = runner(ranks, stages), prompt_of(70, 70), members(LENGTHS)
    assert driver.run_ahead(staged, sequences, 20)
    for each, output in texts(sequences):
        assert output == checkpoints.reference(path).generate(each, 20)[0]
    scored: list[object] = []
    for model in (staged, runner(ranks // stages)):
        seeded = Generation(prompt, range(30, 38), SEEDED)
        run(model, [seeded], 20)
        chunk = Chunk(prompt, 0, range(40, 43), scoring=PromptScoring(0, prompt[1:], 2))
        scored.append((seeded.output, step(model, chunk).scores))
    assert scored[0] == scored[1]


@pytest.mark.parametrize("name", STAGED)
def test_two_stages_have_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    path = checkpoints.make(name, tmp_path, hidden_size=128, head_dim=32)
    with closing(load(path, ranks=2, stages=2)) as model:
        driver.exact(model, path)


@pytest.mark.technique("Tensor parallelism")
@pytest.mark.parametrize(
    ("makers", "takers"),
    [
        ((1,), (2,)), ((2,), (1,)), ((2,), (2,)), ((4,), (2,)), ((1,), (4,)),
        ((2, 2), (1,)), ((1,), (2, 2)), ((3, 3), (2, 2)), ((2,), (2, 2)), ((4, 2), (1,)),
    ],
)  # fmt: skip
def test_a_prompt_is_handed_over_between_degrees(
    makers: Sequence[int], takers: Sequence[int], path: Path, runner: Loaded, arena: Arena
) -> None:
    driver.hand_over(runner(*makers), runner(*takers), arena, path)


BESIDE = """
import sys
import msgspec
from engine.vllm_runner import child
loaded = child.Child.loaded
child.Child.loaded = lambda self: msgspec.structs.replace(loaded(self), copies_beside=True)
child.main(int(sys.argv[1]))
"""
"""The child of vLLM's process, whose ranks copy beside their steps as on GPUs."""


def test_ranks_copy_beside_their_steps(path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """By orders of their own, while a step is under way. Then one of them dies."""

    def launch(fd: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", BESIDE, str(fd)], pass_fds=[fd], env=environment)

    monkeypatch.setattr(VllmRunner, "launch_child", staticmethod(launch))
    prompt = prompt_of(3 * PAGE + 7, 3)
    with closing(load(path, ranks=2)) as model:
        assert model.copies_overlap
        mover = model.mover(verify=True)
        mover.attach(arena)
        step(model, Chunk(prompt[: 3 * PAGE], 0, [9, 3, 4]))
        beside = model.launch([Chunk(prompt_of(8 * PAGE, 5), 0, range(40, 48))])
        copied = mover.start([CopyOut(1, i, page, 10 + i) for i, page in enumerate([9, 3, 4])]).wait()
        copies = [CopyIn(2, i, 10 + i, 20 + i, checksum) for i, checksum in enumerate(copied.checksums)]
        assert untimed(mover.start(copies).wait()) == CopiedIn(2, (0, 1, 2), ())
        beside.wait()
        one = Generation(prompt, range(20, 28))
        one.chunk(3 * PAGE)  # takes the pages
        one.computed = 3 * PAGE
        run(model, [one], 20)
        assert one.output == checkpoints.reference(path).generate(prompt, 20)[0]
        os.kill(ranks_of(model)[1], signal.SIGKILL)
        with pytest.raises(DeviceLost):
            mover.start(copies).wait()


def test_pages_of_two_ranks_are_those_of_one_up_to_rounding(runner: Loaded, arena: Arena) -> None:
    """Those of stages have the same bits."""
    prompt = prompt_of(PAGE, 4)
    pages: list[torch.Tensor] = []
    for slot, model in enumerate((runner(1), runner(2), runner(3, 3))):
        step(model, Chunk(prompt, 0, [40]))
        mover = model.mover(verify=False)
        mover.attach(arena)
        mover.start([CopyOut(1, 0, 40, slot)]).wait()
        pages.append(torch.frombuffer(arena.slot(slot), dtype=torch.float32).clone())
    torch.testing.assert_close(pages[0], pages[1], atol=1e-4, rtol=1e-4)
    assert torch.equal(pages[0], pages[2])
    assert pages[0].abs().max() > 0.1


def test_more_ranks_than_kv_heads(path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="4 KV heads can't be shared evenly by 8 ranks"):
        load(path, ranks=8)


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_groups_of_layers_are_not_divided_among_stages(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="which pipeline stages don't divide"):
        load(checkpoints.make(name, tmp_path), ranks=2, stages=2)


def ranks_of(model: VllmRunner) -> list[int]:
    return [
        each.pid
        for each in psutil.Process(model.process_id).children(recursive=True)
        if "resource_tracker" not in " ".join(each.cmdline())
    ]


def until_lost(model: VllmRunner) -> float:
    """Steps until the device is lost; the seconds that took."""
    began = time.monotonic()
    with pytest.raises(DeviceLost, match="vLLM"):
        step_on(model, began + 30)
    return time.monotonic() - began


def step_on(model: VllmRunner, until: float) -> None:
    while time.monotonic() < until:
        step(model, Chunk(prompt_of(9, 1), 0, [1], TokenDraw(temperature=0.0)))


def shared_memory() -> set[str]:
    """The names that ranks and their libraries could leave."""
    names = (file.name for file in leftovers.SHARED_MEMORY.iterdir())
    return {name for name in names if name.startswith(("vllm_dist_", "__KMP_"))}


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, with a short path, of the folders of vLLM's processes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(leftovers, "parent", lambda: Path(name))
        yield Path(name)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_rank_ends_all_within_three_seconds(stages: int, path: Path, parent: Path) -> None:
    """Nothing of them stays on the machine."""
    before = shared_memory()
    model = load(path, ranks=2, stages=stages)
    assert not [name for name in shared_memory() - before if name.startswith("vllm_dist_")]
    (folder,) = parent.iterdir()
    assert list(folder.iterdir()), "vLLM keeps its files elsewhere"
    processes = [model.process_id, *ranks_of(model)]
    assert len(model.writers) == len(processes)
    os.kill(processes[2], signal.SIGKILL)
    assert until_lost(model) < 3
    assert all(readable(pidfd, 3) for pidfd in model.writers), "a rank has outlived the child"
    with pytest.raises(DeviceLost):
        model.check_device()
    model.close()
    assert not list(parent.iterdir())
    assert not [name for name in shared_memory() for process in processes if f"_{process}_" in name]


def test_a_stopped_rank_is_lost_after_the_deadline(path: Path) -> None:
    model = load(path, ranks=2, deadline=2.0)
    os.kill(ranks_of(model)[1], signal.SIGSTOP)
    assert until_lost(model) < 10
    assert all(readable(pidfd, 3) for pidfd in model.writers), "the stopped rank has outlived the child"
    model.close()


# --- whole clusters -----------------------------------------------------------------------------------------------

SHAPES = {
    "TP 1 → 2": (1, 1, 1, 2), "TP 2 → 1": (1, 1, 2, 1), "colocated TP 2": (0, 1, 0, 2),
    "PP 2 → 1": (1, 1, 1, 1, 2), "PP 1 → 2": (1, 1, 1, 1, 1, 2), "colocated PP 2": (0, 1, 0, 1, 1, 2),
}  # fmt: skip


def config_of(
    checkpoint: Path, prefill: int, decode: int, makers: int, takers: int, first: int = 1, then: int = 1
) -> Config:
    """`makers` and `takers` are the ranks of a stage, `first` and `then` the stages of either role."""
    own = {
        "model.numerics": "mixed" if prefill and (makers, first) != (takers, then) else "exact",
        "prefill.tensor_parallel_size": makers,
        "decode.tensor_parallel_size": takers,
        "prefill.pipeline_parallel_size": first,
        "decode.pipeline_parallel_size": then,
    }
    return driver.settings(checkpoint, prefill, decode, **own)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **{**checkpoints.WIDE, "head_dim": 64})


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_at_once_get_the_reference_tokens(shape: str, wide: Path, tmp_path: Path) -> None:
    driver.at_once(config_of(wide, *SHAPES[shape]), wide, tmp_path, PROMPTS)


@pytest.mark.parametrize(
    ("name", "shape"), [("decode-0", (0, 2, 0, 2)), ("prefill-0", (2, 1, 1, 1, 2))], ids=["TP 2", "PP 2"]
)
def test_streams_outlive_the_death_of_a_rank(name: str, shape: tuple[int, ...], wide: Path, tmp_path: Path) -> None:
    """Its worker ends, and another goes on with the same tokens."""
    with (
        LocalCluster(config_of(wide, *shape), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        worker = psutil.Process(running.pids[name])
        (vllm,) = worker.children()
        victim = [each for each in vllm.children() if each.name() != "python_resource_tracker"][-1]
        before = victim.cpu_times().user
        answers = pool.submit(workload.ask_all, running.address, PROMPTS)
        eventually(lambda: victim.cpu_times().user > before, what="the rank at work")
        pidfd = os.pidfd_open(worker.pid)
        victim.kill()
        assert readable(pidfd, 30.0), "the worker has outlived its rank by half a minute"
        os.close(pidfd)
        workload.compare(wide, PROMPTS, answers.result(timeout=300), workload.references(wide, PROMPTS))
