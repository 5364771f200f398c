"""MTP layers of a model's own checkpoint: tokens are those without, and guesses are the layer's. Needs vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")

from engine.vllm_runner.requirements import LATENT_PAGE
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopyIn
from tests.support import checkpoints
from tests.vllm_runner import test_latents
from tests.vllm_runner.driver import PAGE, Generation, load, prompt_of, run, step
from tests.vllm_runner.test_own_drafts import copied_out, drafted, guesses_fewer
from tests.vllm_runner.test_speculation import COUNT, DRAWS, LENGTHS, alike, keeps_tokens_while_a_worker_dies

GUESSES = 3
CONFIG = {"method": "mtp", "num_speculative_tokens": GUESSES}
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Layer:
    """How an architecture calls the parts of its MTP layer, and what it does with them."""

    recipe: str  # of the model; the block of its layer `source` is the MTP layer's, too
    source: int
    block: str  # prefixes of the names
    others: str
    words: str  # norms of the next token's embedding, of hidden states, and of the result; the projection
    states: str
    last: str
    projection: str
    architecture: str = ""
    page: int = PAGE
    sizes: Any = ()
    states_first: bool = False
    goes_on_with_normed: bool = False


_SHARED = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
LAYERS = {
    "mimo": Layer(
        "qwen2", 3, "model.mtp_layers.0.", "model.mtp_layers.0.",
        "token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj", "MiMoForCausalLM",
        states_first=True, goes_on_with_normed=True,
    ),
    "glm4-moe": Layer("glm4-moe", 3, "model.layers.4.", "model.layers.4.", *_SHARED),
    "deepseek-v3": Layer(
        "deepseek-v3", 3, "model.layers.4.", "model.layers.4.", *_SHARED, "", LATENT_PAGE, test_latents.WIDE,
        goes_on_with_normed=True,
    ),
}  # fmt: skip


def write(name: str, folder: Path, **sizes: Any) -> Path:
    """A model with an MTP layer: one of its own blocks behind a random projection and random norms."""
    layer, rng = LAYERS[name], torch.Generator().manual_seed(7)
    path = checkpoints.make(layer.recipe, folder, **SIZES | dict(layer.sizes) | sizes)
    weights, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    size, source = config["hidden_size"], f"model.layers.{layer.source}."
    block = {layer.block + key.removeprefix(source): each for key, each in weights.items() if key.startswith(source)}
    norms = {key: torch.rand(size, generator=rng) + 0.5 for key in (layer.words, layer.states, layer.last)}
    own = {**norms, layer.projection: torch.randn(size, 2 * size, generator=rng) * 0.1}
    weights |= {key: each.clone() for key, each in block.items()}
    weights |= {f"{layer.others}{key}.weight": each for key, each in own.items()}
    save_file(weights, path / "model.safetensors")
    config |= {"num_nextn_predict_layers": 1}
    config |= {"architectures": [layer.architecture]} if layer.architecture else {}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write(name, tmp_path_factory.mktemp(name)))


Loaded = Callable[..., VllmRunner]


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path]) -> Iterator[Loaded]:
    """The model with its MTP layer or without; a second one by another `role`."""
    runners: list[VllmRunner] = []

    @cache
    def loaded(name: str, drafts: bool = True, role: str = "") -> VllmRunner:
        runners.append(load(paths(name), page_size=LAYERS[name].page, drafts=CONFIG if drafts else {}))
        return runners[-1]

    yield loaded
    for one in runners:
        one.close()


def members(name: str) -> list[Generation]:
    size = LAYERS[name].page
    pairs = zip(LENGTHS, DRAWS, strict=True)
    return [
        Generation(prompt_of(n, n), range(8 * i, 8 * i + 8), draw, page_size=size) for i, (n, draw) in enumerate(pairs)
    ]


@pytest.mark.technique("vLLM's own drafts, token-identical")
@pytest.mark.parametrize("name", LAYERS)
def test_tokens_are_those_without_drafts(name: str, runner: Loaded):
    """In mixed steps and prompts in chunks, with drawn and ruled tokens, and where masks are late."""
    single, several = members(name), members(name)
    run(runner(name, drafts=False), single, COUNT)
    assert runner(name).verifies
    drafted(runner(name), several, 0.5)
    alike(several, single)
    assert runner(name).layout.num_layers == runner(name, drafts=False).layout.num_layers + 1
    assert runner(name).fingerprint != runner(name, drafts=False).fingerprint


def guessed(name: str, model: VllmRunner, length: int) -> tuple[Generation, Sequence[int]]:
    """A sequence with its first token, and what is proposed after it."""
    one = Generation(prompt_of(length, length), range(8), page_size=LAYERS[name].page)
    chunk = one.chunk(1_000)
    one.take(chunk, step(model, chunk).sampled[0])
    return one, model.proposals[0]


@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_guesses_are_those_of_the_layer(name: str, paths: Callable[[str], Path], runner: Loaded):
    layer, weights = LAYERS[name], load_file(paths(name) / "model.safetensors")
    model: Any = checkpoints.reference(paths(name), LAYERS[name].recipe).model
    block, norm = model.model.layers[layer.source], model.model.norm
    if name == "mimo":  # its layer is given what the model has not normed yet
        model.model.norm = torch.nn.Identity()

    def normed(states: torch.Tensor, key: str) -> torch.Tensor:
        weight = weights[f"{layer.others}{key}.weight"]
        return torch.nn.functional.rms_norm(states, weight.shape, weight, norm.variance_epsilon)

    for length in (40, 7):
        one, proposed = guessed(name, runner(name), length)
        states = model.model(torch.tensor([one.tokens[:-1]])).last_hidden_state[0]
        follows, expected = one.tokens[1:], list[int]()
        for _ in proposed:
            words = model.model.embed_tokens(torch.tensor(follows))
            words[0] = 0  # no layer looks at the first one
            inputs = [normed(words, layer.words), normed(states, layer.states)]
            rows = torch.cat(inputs[:: -1 if layer.states_first else 1], dim=-1)
            rows = (rows @ weights[f"{layer.others}{layer.projection}.weight"].T)[None]
            positions = torch.arange(len(follows))[None]
            mask = torch.full((len(follows), len(follows)), float("-inf")).triu(1)[None, None]
            more = {"position_ids": positions, "position_embeddings": model.model.rotary_emb(rows, positions)}
            last = block(rows, attention_mask=mask, **more)[0, -1]
            expected.append(int(model.lm_head(normed(last, layer.last)).argmax()))
            last = normed(last, layer.last) if layer.goes_on_with_normed else last
            follows, states = [*follows, expected[-1]], torch.cat([states, last[None]])
        assert list(proposed) == expected


@pytest.mark.parametrize("name", LAYERS)
def test_fewer_guesses_are_the_first_of_more(name: str, runner: Loaded):
    guesses_fewer(runner(name), LAYERS[name].page)


@pytest.mark.parametrize("name", ["mimo", "deepseek-v3"])
def test_after_a_hand_off_the_layer_knows_the_prompt(name: str, runner: Loaded):
    """Its K and V are a part of pages, also of those that a prefill worker makes, which draws nothing."""
    prefill, decode, size = runner(name), runner(name, role="decode"), LAYERS[name].page
    arena = Arena.create(2 * prefill.layout.page_bytes)
    arena.divide(prefill.layout.page_bytes)
    prompt = prompt_of(2 * size + 7, 2 * size + 7)
    one, other = (Generation(prompt, range(8), page_size=size) for _ in range(2))
    step(prefill, one.chunk(2 * size))
    out, into = prefill.mover(verify=True), decode.mover(verify=True)
    out.attach(arena)
    into.attach(arena)
    sums = copied_out(out, 0, 1)
    into.start([CopyIn(1, number, number, number, each) for number, each in enumerate(sums)]).wait()
    arena.close()
    other.chunk(2 * size)  # takes the pages
    for model, each in ((prefill, one), (decode, other)):
        each.computed = 2 * size
        chunk = each.chunk()
        each.take(chunk, step(model, chunk).sampled[0])
    assert [each.token for each in other.drawn] == [each.token for each in one.drawn]
    assert decode.proposals[0] == prefill.proposals[0]


WIDE = {"mimo": {**checkpoints.WIDE, "head_dim": 64}, "deepseek-v3": {}}


@pytest.mark.parametrize("name", WIDE)
def test_a_cluster_has_the_tokens_that_it_has_without_while_a_worker_dies(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model", **WIDE[name])
    size = {"pages.page_size": LAYERS[name].page}
    keeps_tokens_while_a_worker_dies(path, tmp_path, {"vllm": {"model.speculative_config": CONFIG}}, right=0, **size)
