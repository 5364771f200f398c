"""The same engine on CUDA: one code path, so what is exact on the CPU must be exact there."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from baton import config
from engine.cuda.copies import CudaCopies
from engine.device.gpu_memory import worker_bytes
from engine.device.gpus import resolve_device, visible_gpus
from engine.engine import Engine
from engine.sampling import counter_rng, device_rng
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.filter_edges import PREFIX
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut
from tests.engine.sampler_cases import assert_same_draws, assert_same_scores, random_draw, random_logits
from tests.engine.test_steps_masked import HeldMask
from tests.support import checkpoints
from worker.load_runner import load
from worker.pool_size import CudaMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("default:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(family)
    engine = Engine.load(path, "float32", "cuda", 64, 16, head=True)
    prompt = list(range(3, 203))
    expected, gaps = checkpoints.reference(path).generate(prompt, 24)
    tokens, pages = list(prompt), list(range(20))
    engine.step([Chunk(prompt[:-1], 0, pages)])
    for token, gap in zip(expected, gaps, strict=True):
        (drawn,) = engine.step([Chunk(tokens[-1:], len(tokens) - 1, pages, TokenDraw(temperature=0.0))])
        assert drawn.token == token or gap < 1e-3
        tokens.append(token)


def test_a_page_survives_the_way_to_host_memory_and_back(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 8, 16, head=False)
    engine.step([Chunk(list(range(3, 35)), 0, [0, 1])])
    there = memoryview(bytearray(engine.layout.page_bytes))
    engine.pages.copy_out(1, there)
    engine.pages.copy_in(there, 5)
    assert torch.equal(engine.pages.view(1).cpu(), engine.pages.view(5).cpu())


def test_a_launched_step_draws_the_same_and_is_timed_by_the_device(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=True)
    rung = threading.Event()
    engine.wake(rung.set)
    chunks = [Chunk(list(range(3, 203)), 0, list(range(13)), TokenDraw(temperature=0.0))]
    expected = engine.step(chunks)
    assert rung.wait(30)
    rung.clear()
    running = engine.launch(chunks)
    assert rung.wait(30)
    assert running.done()
    time.sleep(0.2)  # the loop looks late
    finished = running.wait()
    assert finished.sampled == expected
    assert 0 < finished.seconds < 0.2


def test_a_step_ahead_goes_on_from_tokens_that_stay_on_the_device(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=True)
    prompt, table, draw = list(range(3, 43)), BlockTable(range(8)), TokenDraw(temperature=0.9, seed=3)
    running = engine.launch([Chunk(prompt, 0, table, draw)])
    tokens = list(prompt)
    for _ in range(20):
        ahead = engine.launch([Chunk([0], len(tokens), table, draw, follows=0)])
        (one,) = running.wait().sampled
        tokens.append(one.token)
        running = ahead
    for end in range(len(prompt), len(tokens)):
        (one,) = engine.step([Chunk(tokens[:end], 0, BlockTable(range(8, 16)), draw)])
        assert one.token == tokens[end]


def test_masked_draws_come_beside_a_step_ahead(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=True)
    prompts, tables = (list(range(3, 43)), list(range(50, 70))), (BlockTable(range(8)), BlockTable(range(8, 16)))
    draws = [TokenDraw(temperature=0.9, seed=3), TokenDraw(temperature=0.9, top_p=0.9, seed=4, logprobs=2)]
    for come in ("before the launch", "before the step ahead", "after it"):
        held = HeldMask(prompts[1])
        held.ready = come == "before the launch"
        chunks = [
            Chunk(prompts[0], 0, tables[0], draws[0]),
            Chunk(prompts[1], 0, tables[1], replace(draws[1], mask=held)),
        ]
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = engine.launch(chunks)
            held.ready = come != "after it"
            ahead = engine.launch([Chunk([0], len(prompts[0]), tables[0], draws[0], follows=0)])
            held.ready = True
            running.done()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        first, other = running.wait().sampled
        (second,) = ahead.wait().sampled
        assert held.allowed[other.token]
        assert engine.step(chunks) == [first, other]
        tokens = [*prompts[0], first.token]
        assert engine.step([Chunk(tokens, 0, BlockTable(range(16, 24)), draws[0])]) == [second], come


@pytest.mark.parametrize("pins", [True, False])
def test_pages_move_beside_steps(
    pins: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the device into an arena and back, while a step runs; with pinned slots and through buffers."""
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 64, 16, head=False)
    if not pins:
        monkeypatch.setattr(CudaCopies, "pin", lambda self, memory: False)
    arena = Arena.create(64 * engine.layout.page_bytes)
    arena.divide(engine.layout.page_bytes)
    engine.step([Chunk(list(range(3, 163)), 0, list(range(10)))])
    before = [engine.pages.view(page).cpu() for page in range(10)]
    mover = engine.mover(verify=True)
    mover.attach(arena)
    running = engine.launch([Chunk(list(range(3, 163)), 0, list(range(20, 30)))])
    out = mover.start([CopyOut(1, index, index, 2 * index) for index in range(10)]).wait()
    assert isinstance(out, CopiedOut)
    engine.duplicate(11, 40)
    copies = [CopyIn(2, index, 2 * index, 40 + index, checksum) for index, checksum in enumerate(out.checksums)]
    assert mover.start(copies).wait() == CopiedIn(2, tuple(range(10)))
    running.wait()
    for page, expected in enumerate(before):
        assert torch.equal(engine.pages.view(40 + page).cpu(), expected)
    assert mover.close()


@pytest.mark.parametrize("prefix", [4, PREFIX])
def test_the_draws_and_scores_are_those_of_a_cpu(prefix: int) -> None:
    sampler = DeviceSampler(torch.device("cuda"), prefix)
    for seed in range(300):
        rng = random.Random(seed)
        rows, vocab = 16, rng.choice([3, 257, 5000, 128_256] if seed % 20 == 0 else [3, 257, 5000])
        logits = random_logits(rng, rows, vocab).cuda()
        draws = [random_draw(rng, vocab) for _ in range(rows)]
        assert_same_draws(sampler, logits, draws, [rng.randrange(10**6) for _ in range(rows)])
        assert_same_scores(sampler, logits.nan_to_num(), [rng.randrange(vocab) for _ in range(rows)], 20)


def test_the_noise_is_that_of_a_cpu() -> None:
    ids = torch.arange(200_000)
    keys = counter_rng.keys(range(50), [1] * 50, range(50))
    for key in keys:
        bits = device_rng.counters(ids.cuda()) + int(key.view(np.int64))
        noise = device_rng.gumbel(bits).cpu().numpy()
        states = counter_rng.counters(200_000) + key
        assert (bits.cpu().numpy().view(np.uint64) == counter_rng.scramble(states, np.empty_like(states))).all()
        np.testing.assert_allclose(noise, counter_rng.gumbel(int(key), ids.numpy()), rtol=1e-14, atol=1e-15)


def test_nothing_waits_for_the_device_before_the_draws_are_collected() -> None:
    rng = random.Random(3)
    sampler, logits = DeviceSampler(torch.device("cuda")), random_logits(rng, 64, 128_256).cuda()
    draws = [random_draw(rng, 128_256) for _ in range(64)]
    expected = sampler.sample(logits, draws, range(64))
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = sampler.launch(logits, draws, range(64))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.collect() == expected


def test_the_device_is_where_both_ways_to_ask_find_it() -> None:
    visible = visible_gpus()
    assert len(visible.gpus) == torch.cuda.device_count()
    assert [gpu.name for gpu in visible.gpus] == [torch.cuda.get_device_name(i) for i in range(len(visible.gpus))]
    assert visible.gpus[0].memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert resolve_device("auto") == "cuda"


def test_attention_never_asks_cudnn(checkpoint: Callable[[str], Path]) -> None:
    """Not even for shapes that only cuDNN would be quick at."""
    engine = Engine.load(checkpoint("llama"), "bfloat16", "cuda", 64, 16, head=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.step([Chunk(list(range(3, 131)), 0, range(8)), Chunk([5], 63, range(8, 12), TokenDraw(temperature=0.0))])
    assert not [event.key for event in profile.key_averages() if "cudnn_attention" in event.key]


def test_pages_fill_what_a_worker_may_use_and_no_more(checkpoint: Callable[[str], Path]) -> None:
    settings = {
        "model.path": str(checkpoint("llama")), "model.device": "cuda", "decode.gpu_memory_utilization": 0.2,
        "decode.num_gpus": 0.5,
    }  # fmt: skip
    before = CudaMemory("cuda").read()
    engine = load(config.load(None, settings), "decode")
    assert isinstance(engine, Engine)
    memory = CudaMemory("cuda").read()
    used = before.free - memory.free
    assert 0.8 < used / worker_bytes(memory.total, 0.2, 0.5) < 1.05
    (drawn,) = engine.step([Chunk(list(range(3, 35)), 0, [len(engine.pool) - 1, 0], TokenDraw(temperature=0.0))])
    assert drawn is not None


def test_an_engine_goes_on_after_a_step_that_ran_out_of_memory(checkpoint: Callable[[str], Path]) -> None:
    engine = Engine.load(checkpoint("llama"), "float32", "cuda", 256, 16, head=True)
    chunk = Chunk([3 + i % 50 for i in range(1_024)], 0, range(64), TokenDraw(temperature=0.0))
    expected = engine.step([chunk])
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )
    tensors = _all_that_is_reserved()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            engine.step([chunk])
    finally:
        tensors.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.step([chunk]) == expected


def _all_that_is_reserved() -> list[torch.Tensor]:
    """Tensors in all the room of torch's segments, so that the next allocation needs a new one."""
    tensors: list[torch.Tensor] = []
    for size in (2**20, 2**16, 512):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_wait_for_nothing(dtype: str, checkpoint: Callable[[str], Path]) -> None:
    """Where torch has a kernel for groups, that of bfloat16; else in blocks."""
    engine = Engine.load(checkpoint("mixtral"), dtype, "cuda", 64, 16, head=True)
    chunks = [Chunk(list(range(3, 203)), 0, list(range(13)), TokenDraw(temperature=0.0))]
    expected = engine.step(chunks)
    torch.cuda.set_sync_debug_mode("error")
    try:
        running = engine.launch(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running.wait().sampled == expected
