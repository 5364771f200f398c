"""LoRA adapters on vLLM's runner: tokens are those of merged weights, in mixed batches and over whole clusters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from baton.client import Client
from baton.errors import BatonError, ModelMismatch, UnsupportedModel
from deploy.local import LocalCluster
from engine.vllm_runner.runner import VllmRunner
from tests.support import adapters, checkpoints, workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held
from tests.vllm_runner.driver import GREEDY, Generation, agree, load, loaded_once, prompt_of, run, run_ahead
from tests.vllm_runner.test_cluster import SETTINGS

COUNT = 20
FAMILIES = ("mistral-window", "qwen2", "qwen3", "phi3", "gemma3", "olmo2")
"""Recipes whose adapters are tried, beside Llama's."""
RANKS_OF = ("phi3", "gemma3")
"""Those that are tried on two ranks as well, beside Llama's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("model"), hidden_size=128, head_dim=32)


@pytest.fixture(scope="module")
def modules(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of different ranks and products."""
    folder = tmp_path_factory.mktemp("adapters")
    first = adapters.make(folder / "first", model, 5)
    second = adapters.make(folder / "second", model, 6, 4, ("v_proj", "gate_proj", "up_proj", "down_proj"))
    return {"first": str(first), "second": str(second)}


@pytest.fixture(scope="module")
def runner(model: Path, modules: dict[str, str]) -> Iterator[Callable[[int], VllmRunner]]:
    """`runner(ranks)`: the model with its adapters on so many ranks."""
    yield from loaded_once(lambda ranks: load(model, ranks=ranks, lora_modules=modules, max_lora_rank=8))


@pytest.mark.technique("Many adapters in one batch")
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_one_batch_have_their_own_adapters(
    ranks: int, model: Path, modules: dict[str, str], runner: Callable[[int], VllmRunner]
):
    digests = {"": ""} | {one.name: one.digest for one in runner(ranks).adapters}
    assert len(set(digests.values())) == 3
    prompt = prompt_of(45, 1)
    sequences: dict[str, Generation] = {}
    for number, (name, digest) in enumerate(digests.items()):
        sequences[name] = Generation(prompt, range(8 * number, 8 * number + 8), GREEDY, digest)
    assert run_ahead(runner(ranks), list(sequences.values()), COUNT) > 0
    texts = {name: sequence.output for name, sequence in sequences.items()}
    assert texts[""] == checkpoints.reference(model).generate(prompt, COUNT)[0]
    for name, path in modules.items():
        assert texts[name] == adapters.merged(model, Path(path)).generate(prompt, COUNT)[0]
    assert len({tuple(text) for text in texts.values()}) == 3


@pytest.mark.parametrize(("name", "ranks"), [*product(FAMILIES, [1]), *product(RANKS_OF, [2])])
def test_adapters_of_each_family(name: str, ranks: int, tmp_path: Path):
    """A row with an adapter of all products beside a plain one. Phi-3 has several products in one tensor, which ranks
    divide."""
    model = checkpoints.make(name, tmp_path / "model", hidden_size=128, head_dim=32)
    products = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if name == "phi3" else adapters.ALL
    path = adapters.make(tmp_path / "adapter", model, 7, products=products)
    runner = load(model, ranks=ranks, lora_modules={"one": str(path)}, max_lora_rank=8)
    prompt = prompt_of(45, 1)
    plain = Generation(prompt, range(8))
    adapted = Generation(prompt, range(8, 16), GREEDY, runner.adapters[0].digest)
    run(runner, [plain, adapted], COUNT)
    runner.close()
    for reference, one in ((checkpoints.reference(model), plain), (adapters.merged(model, path), adapted)):
        agree(one, *reference.generate(prompt, COUNT))
    assert plain.output != adapted.output


def test_an_unknown_adapter_is_refused_and_touches_nothing(model: Path, runner: Callable[[int], VllmRunner]):
    one = Generation(prompt_of(40, 2), range(8))
    run(runner(1), [one], 3)
    with pytest.raises(ValueError, match="adapter"):
        runner(1).launch([Generation(prompt_of(9, 3), range(20, 22), GREEDY, "0" * 32).chunk()])
    run(runner(1), [one], 8)
    assert one.output == checkpoints.reference(model).generate(prompt_of(40, 2), 8)[0]


# --- whole clusters ---

PROMPTS = [prompt_of(length, length) for length in (20, 33, 70, 150, 151, 300)]
OUTPUT = 12

AdapterPrompt = tuple[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(model: Path, modules: dict[str, str]) -> dict[AdapterPrompt, list[int]]:
    references = {"": checkpoints.reference(model)}
    references |= {name: adapters.merged(model, Path(path)) for name, path in modules.items()}
    return {
        (name, tuple(prompt)): references[name].generate(prompt, OUTPUT)[0]
        for name, prompt in product(references, PROMPTS)
    }


def cluster(
    model: Path, modules: dict[str, str], prefill: int, decode: int, folder: Path, **more: object
) -> LocalCluster:
    own = {"model.lora_modules": modules, "model.max_lora_rank": 8, "router.disaggregation": "always"}
    return LocalCluster(workload.settings(model, prefill, decode, **SETTINGS | own | more), folder, patience=200.0)


def ask(address: str, prompt: AdapterPrompt) -> list[int]:
    with Client(address) as client:
        generation = client.generate(
            prompt[1], model=prompt[0], max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, timeout=200
        )
        return list(generation.result().token_ids)


@pytest.mark.parametrize(("makers", "takers"), [(1, 1), (1, 2), (2, 1)])
def test_a_prompt_has_other_pages_with_each_adapter(
    makers: int, takers: int, model: Path, modules: dict[str, str], expected: dict[AdapterPrompt, list[int]],
    tmp_path: Path,
):  # fmt: skip
    """Each prompt comes with each adapter and with none, all at once and then again, when it is cached. A page of
    another adapter would change tokens. The two workers have so many ranks."""
    ranks: dict[str, int | str] = {"prefill.tensor_parallel_size": makers, "decode.tensor_parallel_size": takers}
    ranks |= {"model.numerics": "exact" if makers == takers else "mixed"}
    with cluster(model, modules, 1, 1, tmp_path, **ranks) as running, ThreadPoolExecutor(len(expected)) as pool:
        for _ in range(2):
            answers = pool.map(lambda prompt: ask(running.address, prompt), expected)
            assert dict(zip(expected, answers, strict=True)) == expected
        models = f"http://{running.api_of('router')}/v1/models"
        with urllib.request.urlopen(models) as page:
            parents = {card["id"]: card["parent"] for card in json.load(page)["data"]}
        (base,) = (name for name, parent in parents.items() if parent is None)
        assert parents == {base: None, "first": base, "second": base}
        with pytest.raises(ModelMismatch):
            ask(running.address, ("third", tuple(PROMPTS[0])))


def test_an_adapter_stays_with_its_request_when_a_worker_dies(
    model: Path, modules: dict[str, str], expected: dict[AdapterPrompt, list[int]], tmp_path: Path
):
    with cluster(model, modules, 2, 2, tmp_path) as running, ThreadPoolExecutor(len(expected)) as pool:
        answers = [pool.submit(ask, running.address, prompt) for prompt in expected]
        answers[0].result()
        os.kill(running.pids["decode-0"], signal.SIGKILL)
        assert {prompt: one.result() for prompt, one in zip(expected, answers, strict=True)} == expected


LONG = 120  # tokens of output
POOL = "3MiB"  # 48 pages; each of the prompts below takes up to 9 in the end


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_sequence_keeps_its_adapter(ranks: int, model: Path, modules: dict[str, str], tmp_path: Path):
    """First come short outputs, of which the router learns to expect more of the kind. Then come too many long ones, in
    three classes of priority. Those whose pages are taken go on with pages from the store and with their adapter."""
    references = {"": checkpoints.reference(model)}
    references |= {name: adapters.merged(model, Path(path)) for name, path in modules.items()}
    names = list(references)
    orders = [(names[i % 3], prompt_of(40 + 7 * i, i), i // 3 % 3 - 1) for i in range(18)]
    expected = [references[name].generate(prompt, LONG) for name, prompt, _ in orders]
    small = {"decode.kv_cache_bytes": POOL, "model.tensor_parallel_size": ranks}
    with cluster(model, modules, 1, 1, tmp_path, **small) as running:
        short = prompt_of(8, 99)
        stop = references[""].generate(short, 1)[0]
        for _ in range(100):
            assert workload.ask(running.address, short, LONG, stop_token_ids=stop).token_ids == stop
        with ThreadPoolExecutor(len(orders)) as pool:
            answers = pool.map(
                lambda one: workload.ask(running.address, one[1], LONG, model=one[0], priority=one[2]), orders
            )
            for answer, (right, gaps) in zip(answers, expected, strict=True):
                compared = next((at for at, gap in enumerate(gaps) if gap < workload.TIE), LONG)
                assert answer.token_ids[:compared] == right[:compared]
        eventually(lambda: metric(running, "decode-0", "num_preemptions_total") > 0, what="preemptions on the page")
        eventually(lambda: at_rest(running), what="everything freed")
        eventually(lambda: nothing_held(running, "store-0"), what="nothing held in the store")


# --- at run time ---


def greedy(runner: VllmRunner, prompt: list[int], digest: str, pages: range) -> list[int]:
    one = Generation(prompt, pages, GREEDY, digest)
    run(runner, [one], COUNT)
    return one.output


@pytest.mark.technique("Adapters at run time")
def test_adapters_come_and_go_between_steps(model: Path, modules: dict[str, str], tmp_path: Path):
    """A sequence under way keeps its tokens. The name and folder of an adapter that has gone may get other weights."""
    folder = tmp_path / "changing"
    shutil.copytree(modules["first"], folder)
    prompt = prompt_of(45, 1)
    plain = checkpoints.reference(model).generate(prompt, COUNT)[0]
    with closing(load(model, max_loras=2, max_lora_rank=8)) as runner:
        under_way = Generation(prompt, range(8))
        run(runner, [under_way], 5)
        first = runner.add_adapter("changing", str(folder))
        texts = [adapters.merged(model, folder).generate(prompt, COUNT)[0]]
        assert greedy(runner, prompt, first.digest, range(8, 16)) == texts[0] != plain
        with pytest.raises(UnsupportedModel, match="already"):
            runner.add_adapter("again", str(folder))
        second = runner.add_adapter("second", modules["second"])
        with pytest.raises(UnsupportedModel, match="max_loras"):
            runner.add_adapter("third", modules["first"])
        runner.remove_adapter(first.digest)
        with pytest.raises(ValueError, match="adapter"):
            runner.launch([Generation(prompt, range(8, 16), GREEDY, first.digest).chunk()])
        shutil.rmtree(folder)
        shutil.copytree(adapters.make(tmp_path / "other", model, 9), folder)
        third = runner.add_adapter("changing", str(folder))
        assert len({first.digest, second.digest, third.digest}) == 3
        texts.append(adapters.merged(model, folder).generate(prompt, COUNT)[0])
        assert greedy(runner, prompt, third.digest, range(8, 16)) == texts[1] != texts[0]
        second_text = adapters.merged(model, Path(modules["second"])).generate(prompt, COUNT)[0]
        assert greedy(runner, prompt, second.digest, range(16, 24)) == second_text
        run(runner, [under_way], COUNT)
        assert under_way.output == plain


@pytest.mark.technique("Adapters at run time")
def test_a_cluster_loads_and_unloads_an_adapter_under_load(model: Path, modules: dict[str, str], tmp_path: Path):
    prompts = [tuple(prompt) for prompt in PROMPTS]
    texts = {"": checkpoints.reference(model), "late": adapters.merged(model, Path(modules["first"]))}
    with (
        cluster(model, {}, 1, 2, tmp_path, **{"model.max_loras": 2}) as local,
        Client(local.address, local.operator) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        assert client.adapters() == []
        before = [threads.submit(ask, local.address, ("", prompt)) for prompt in prompts]
        client.load_adapter("late", modules["first"])
        assert [one.name for one in client.adapters()] == ["late"]
        late = [threads.submit(ask, local.address, ("late", prompt)) for prompt in prompts]
        for name, answers in (("", before), ("late", late)):
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.result() == texts[name].generate(list(prompt), OUTPUT)[0]
        os.kill(local.pids["decode-0"], signal.SIGKILL)
        for prompt in prompts:
            assert ask(local.address, ("late", prompt)) == texts["late"].generate(list(prompt), OUTPUT)[0]
        with pytest.raises(BatonError, match=r"adapter_config\.json"):
            client.load_adapter("nothing", str(tmp_path))
        client.unload_adapter("late")
        assert client.adapters() == []
        with pytest.raises(ModelMismatch):
            ask(local.address, ("late", prompts[0]))
        assert ask(local.address, ("", prompts[0])) == texts[""].generate(list(prompts[0]), OUTPUT)[0]
        script = Path(__file__).parents[2] / "examples" / "adapters.py"
        command = [sys.executable, str(script), local.address, local.operator, "example", modules["first"]]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert "\nexample: '" in printed
        assert client.adapters() == []
