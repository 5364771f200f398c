"""Pages in FP8 on vLLM's runner: what they hold, that they are handed over, and the tokens that come of them.

The reference is transformers whose attention reads K and V as vLLM's kernels keep them (`tests.support.fp8_pages`).
A number on the edge between two codes may become the other one there, so near ties are allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from baton.client import Generated
from baton.errors import UnsupportedModel
from deploy.local import LocalCluster
from engine.step.batch import Chunk
from engine.vllm_runner.child_environment import child_environment
from engine.vllm_runner.pages import FP8, vllm_kv_dtype
from engine.vllm_runner.runner import VllmRunner
from kvstore.client.transfer import CopiedIn, CopyIn, CopyOut
from tests.support import checkpoints, fp8_pages, workload
from tests.support.cluster import Streams, at_rest, load
from tests.support.eventually import DEADLINE, eventually
from tests.support.fp8_pages import Fp8Cache, Scales
from tests.vllm_runner import driver
from tests.vllm_runner.driver import PAGE, Generation, Loaded, members, prompt_of, run, step, texts, untimed
from tests.vllm_runner.driver import load as load_runner
from tests.vllm_runner.test_cluster import SETTINGS, WIDE

EXACT = ("llama", "qwen3", "mistral-window", "gemma3")
COUNT, LENGTHS = 24, (70, 33, 5, 31, 64)
NEAR, LIKELIEST = 0.3, 0.98
"""Logits have a deviation above 1. Of the tokens that were tried, not one was another than the reference's."""
SCALES = tuple(Scales(0.02 * (layer + 1), 0.03) for layer in range(4))


def checkpoint_at(name: str, folder: Path) -> Path:
    return checkpoints.make(name, folder, hidden_size=128, head_dim=32)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by name; "scaled" and "scaled-otherwise" are "llama" with scales of K and V."""

    @cache
    def path(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if not name.startswith("scaled"):
            return checkpoint_at(name, folder)
        scales = SCALES if name == "scaled" else [Scales(0.5, 0.5), *SCALES[1:]]
        return fp8_pages.bring(checkpoint_at("llama", folder), scales)

    return path


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    """`runner(name, held, dtype, number)`: the model of that checkpoint, with pages in `held`."""

    def loaded(
        name: str = "llama", held: str = "fp8", dtype: str = "float32", number: int = 0, ranks: int = 1
    ) -> VllmRunner:
        kind = vllm_kv_dtype(json.loads((paths(name) / "config.json").read_text()), held)
        return load_runner(paths(name), dtype, ranks=ranks, kv_cache_dtype=kind)

    yield from driver.loaded_once(loaded)


compare = partial(driver.likely, near=NEAR, share=LIKELIEST)
arena = contextmanager(driver.arena_of)


@pytest.mark.technique("Pages in FP8")
@pytest.mark.parametrize(("name", "held"), [*((name, "fp8") for name in EXACT), ("llama", "fp8_e5m2")])
def test_tokens_are_those_of_what_fp8_pages_mean(
    name: str, held: str, paths: Callable[[str], Path], runner: Loaded
) -> None:
    model, sequences = runner(name, held), members(LENGTHS)
    assert model.layout.dtype == FP8[held]
    run(model, sequences, COUNT)
    compare(fp8_pages.reference(paths(name), getattr(torch, FP8[held])), texts(sequences))


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
path, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(
    path, dtype="float32", kv_cache_dtype="fp8", block_size=32, max_model_len=512, max_num_seqs=8, enforce_eager=True,
    skip_tokenizer_init=True, num_gpu_blocks_override=64, kv_cache_memory_bytes=2**26, enable_prefix_caching=False,
)
wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def test_tokens_are_those_of_vllm_alone(paths: Callable[[str], Path], runner: Loaded) -> None:
    """Its own engine, scheduler and sampler, with the same kernels."""
    sequences = members(LENGTHS)
    run(runner(), sequences, COUNT)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    arguments = [str(paths("llama")), json.dumps(prompts), str(COUNT)]
    environment = child_environment(os.environ, "cpu", 1)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert [drawn for _, drawn in texts(sequences)] == json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "held"), [("llama", "fp8"), ("llama", "fp8_e5m2"), ("scaled", "auto")])
def test_pages_hold_the_codes_of_k_and_v(name: str, held: str, paths: Callable[[str], Path], runner: Loaded) -> None:
    model = runner(name, held)
    layout = model.layout
    if layout.form != "cpu-vec":
        pytest.skip(f"the kernels here pack K and V as {layout.form}")
    scales = SCALES if name == "scaled" else (Scales(1.0, 1.0),) * layout.num_layers
    kind, prompt = getattr(torch, layout.dtype), prompt_of(PAGE, 4)
    step(model, Chunk(prompt, 0, [40]))
    with arena(model) as slots:
        mover = model.mover(verify=False)
        mover.attach(slots)
        mover.start([CopyOut(1, 0, 40, 2)]).wait()
        page = torch.frombuffer(bytearray(slots.slot(2)), dtype=torch.uint8)
    keys, values = page.view(layout.num_kv_heads, layout.num_layers, 2, -1).unbind(2)
    keys = keys.reshape(layout.num_kv_heads, layout.num_layers, layout.head_dim, PAGE).transpose(2, 3)
    values = values.reshape(layout.num_kv_heads, layout.num_layers, PAGE, layout.head_dim)
    right = Fp8Cache(kind, scales)
    with torch.inference_mode():
        checkpoints.reference(paths("llama")).model(torch.tensor([prompt]), past_key_values=right, use_cache=True)
    for layer, scale in enumerate(scales):
        expected = right.layers[layer]
        for codes, reference, one in ((keys, expected.keys, scale.k), (values, expected.values, scale.v)):
            meant = fp8_pages.meant(codes[:, layer].contiguous(), one, kind)
            assert (meant == reference[0]).float().mean() > 0.99
            assert meant.unique().numel() > 20


@pytest.mark.parametrize(("dtype", "makers", "takers"), [("float32", 1, 1), ("bfloat16", 1, 1), ("float32", 2, 1)])
def test_a_prompt_is_handed_over(dtype: str, makers: int, takers: int, runner: Loaded) -> None:
    """The bytes arrive as they are, and tokens are those of a runner that computed the prompt itself. The pages held
    NaN before."""
    prefill, decode = runner(dtype=dtype, number=1, ranks=makers), runner(dtype=dtype, ranks=takers)
    assert prefill.layout == decode.layout
    assert prefill.fingerprint == decode.fingerprint
    prompt, pages = prompt_of(3 * PAGE + 7, 3), (9, 3, 4)
    with arena(decode) as slots:
        out, into = prefill.mover(verify=True), decode.mover(verify=True)
        out.attach(slots)
        into.attach(slots)
        step(prefill, Chunk(prompt[: 2 * PAGE + 3], 0, pages))
        step(prefill, Chunk(prompt[2 * PAGE + 3 : 3 * PAGE], 2 * PAGE + 3, pages))
        copied = out.start([CopyOut(1, i, page, 10 + i) for i, page in enumerate(pages)]).wait()
        slots.slot(0)[:] = b"\xff" * decode.layout.page_bytes  # FP8 has a NaN there
        decode.mover(verify=False).start([CopyIn(2, i, 0, page, 0) for i, page in enumerate(range(20, 28))]).wait()
        copies = [CopyIn(3, i, 10 + i, 20 + i, checksum) for i, checksum in enumerate(copied.checksums)]
        assert untimed(into.start(copies).wait()) == CopiedIn(3, (0, 1, 2), ())
        into.start([CopyOut(4, i, 20 + i, 20 + i) for i in range(3)])  # type: ignore[arg-type]
        handed = Generation(prompt, range(20, 28))
        handed.chunk(3 * PAGE)  # takes the pages
        handed.computed = 3 * PAGE
        run(decode, [handed], COUNT)
        for i in range(3):
            assert bytes(slots.slot(10 + i)) == bytes(slots.slot(20 + i))
            assert len(set(slots.slot(10 + i))) > 100
    own = Generation(prompt, range(30, 38))
    for size in (2 * PAGE + 3, PAGE - 3):
        chunk = own.chunk(size)
        own.take(chunk, *step(prefill, chunk).sampled)
    run(prefill, [own], COUNT)
    assert handed.output == own.output


def test_scales_of_the_checkpoint(paths: Callable[[str], Path], runner: Loaded) -> None:
    """By "auto" such a checkpoint has FP8 pages. Pages of other scales, or computed in another dtype, have other
    names."""
    model, sequences = runner("scaled", "auto"), members(LENGTHS)
    assert model.layout.dtype == "float8_e4m3fn"
    run(model, sequences, COUNT)
    compare(fp8_pages.reference(paths("llama"), scales=SCALES), texts(sequences))
    others = [runner("scaled-otherwise", "auto"), runner(), runner(dtype="bfloat16")]
    assert len({one.fingerprint for one in (model, *others)}) == 4
    assert runner().fingerprint == runner(held="fp8_e5m2").fingerprint  # the dtype is in the namespace beside it


@pytest.mark.parametrize(
    ("settings", "held", "reason"),
    [({"head_dim": 80}, "fp8", "divisible by 32"), ({"scales": True, "head_dim": 32}, "fp8_e5m2", "fp8_e5m2")],
)
def test_what_the_kernels_do_not_take(settings: dict[str, int], held: str, reason: str, tmp_path: Path) -> None:
    path = checkpoints.make("llama", tmp_path, hidden_size=128, head_dim=settings["head_dim"])
    if "scales" in settings:
        fp8_pages.bring(path, SCALES)
    with pytest.raises(UnsupportedModel, match=rf"in {held}: (?s:.*){reason}"):
        load_runner(path, kv_cache_dtype=held)


PROMPTS = [prompt for prompt in workload.prompts(PAGE) if len(prompt) <= 1_100][::6]
CLUSTER = {**SETTINGS, "model.enforce_eager": True, "model.kv_cache_dtype": "fp8", "router.disaggregation": "always"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("wide"), **WIDE)


POOL = 128 * 2**20 // (4 * 2 * 2 * PAGE * 64)
"""The pages of a decode worker: layers, KV heads, K and V, tokens, elements, a byte each."""


def answers(path: Path, folder: Path, prefill: int) -> list[list[int]]:
    """The tokens of a cluster for one prompt after the other. Those of all at once are compared with the reference."""
    with LocalCluster(workload.settings(path, prefill, 1, **CLUSTER), folder) as cluster:
        replies = [workload.ask(cluster.address, prompt) for prompt in PROMPTS]
        shipped = sum(one.work.pages_shipped for one in replies)
        assert shipped > 30 if prefill else not shipped
        together = [one.token_ids for one in workload.ask_all(cluster.address, PROMPTS)]
        compare(fp8_pages.reference(path), list(zip(PROMPTS, together, strict=True)))
        eventually(lambda: load(cluster, "decode-0").pages_total == POOL, what=f"a pool of {POOL} pages")
        return [one.token_ids for one in replies]


def test_a_cluster_with_prefill_workers_has_the_tokens_of_a_colocated_one(wide: Path, tmp_path: Path) -> None:
    assert answers(wide, tmp_path / "1P+1D", 1) == answers(wide, tmp_path / "colocated", 0)


def test_streams_outlive_the_death_of_a_decode_worker(wide: Path, tmp_path: Path) -> None:
    with LocalCluster(workload.settings(wide, 1, 2, **CLUSTER), tmp_path, patience=200.0) as cluster:
        streams = Streams(cluster)
        prompts = [prompt for prompt in PROMPTS if len(prompt) > PAGE][:6]
        futures = [streams.start(prompt, 100) for prompt in prompts]
        eventually(lambda: all(len(seen) > 10 for seen in streams.seen), what="all streams under way")
        cluster.kill("decode-0" if load(cluster, "decode-0").running else "decode-1")
        finished: list[Generated] = [future.result(DEADLINE) for future in futures]
        assert any(len(one.work.decode_workers) > 1 for one in finished)
        compare(fp8_pages.reference(wide), list(zip(prompts, streams.seen, strict=True)))
        assert all(len(seen) == 100 for seen in streams.seen)
        eventually(lambda: at_rest(cluster), what="everything freed")
