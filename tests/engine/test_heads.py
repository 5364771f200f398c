"""The heads that come with the demo model guess well, and no token is another one, whatever heads of any form guess."""

import json
import random
import shutil
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from baton.config import load
from baton.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedModel
from deploy.models import DEMO_MODEL, DRAFT_MODEL, HEADS
from engine.engine import Engine
from engine.models import heads
from engine.models.heads import eagle, mlp_speculator
from engine.models.linear import PlainLinears
from engine.step.batch import Chunk, DrawnRows, HiddenRow, TokenDraw
from tests.worker.test_draft_model import PAGES, PROMPTS, engine, outputs, settings
from tools.demo_model.heads import first_heads
from worker import draft

pytestmark = pytest.mark.native
__all__ = ["engine"]


FORMS = pytest.mark.parametrize("form", ["mlp_speculator", "medusa", "eagle"])


@pytest.mark.technique("Speculation by heads, token-identical")
def test_tokens_are_those_without(engine: Engine) -> None:
    """Greedy and drawn. The heads that come with the model are often right, also behind the answers."""
    without, _ = outputs(engine, None)
    drafted, shares = outputs(engine, draft.load(settings(**{"model.speculation_heads": str(HEADS)}), engine))
    assert drafted == without
    assert min(shares) > 1 / 8


@pytest.mark.technique("Speculation by heads, token-identical")
@pytest.mark.technique("Speculation by Medusa heads, token-identical")
@pytest.mark.technique("Speculation by EAGLE, token-identical")
@FORMS
def test_random_heads_change_no_token(engine: Engine, tmp_path: Path, form: str) -> None:
    folder = first_heads(form, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.randn_like(each) for name, each in tensors.items()}, folder / "model.safetensors")
    drafted, shares = outputs(engine, draft.load(settings(**{"model.speculation_heads": str(folder)}), engine))
    assert drafted == outputs(engine, None)[0]
    assert max(shares) < 1 / 20


@FORMS
def test_heads_of_the_weights_before_change_no_token_of_reloaded_ones(tmp_path: Path, form: str) -> None:
    """`baton reload` keeps the heads. Trained ones guess worse, and each guess is verified by the new weights."""
    folder = HEADS if form == "mlp_speculator" else first_heads(form, tmp_path / form)
    other = shutil.copytree(DEMO_MODEL, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    torch.manual_seed(3)
    save_file(
        {name: each + 0.3 * each.std() * torch.randn_like(each) for name, each in tensors.items()},
        other / "model.safetensors",
    )
    engine = Engine.load(DEMO_MODEL, "auto", "cpu", PAGES, 16, head=True, threads=1)
    drafter = draft.load(settings(**{"model.speculation_heads": str(folder)}), engine)
    before, right = outputs(engine, drafter)
    digest = engine.fingerprint
    engine.reload(other)
    assert engine.fingerprint != digest
    drafted, shares = outputs(engine, drafter)
    assert drafted == outputs(Engine.load(other, "auto", "cpu", PAGES, 16, head=True, threads=1), None)[0] != before
    assert sum(shares) < sum(right) or form != "mlp_speculator"


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_in_its_published_form_guesses_by_its_formula(tmp_path: Path, tied: bool) -> None:
    """Of 16 bits, with fields and tensors that mean nothing here. An inner size of 0 is the hidden one."""
    hidden, vocab, count = 24, 50, 3
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": hidden, "inner_dim": 16 if tied else 0,
        "model_type": "mlp_speculator", "n_candidates": 5, "n_predict": count, "scale_input": tied,
        "tie_weights": tied, "top_k_tokens_per_head": [4, 3, 2], "torch_dtype": "float16",
        "transformers_version": "4.38.2", "vocab_size": vocab,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    inner = config["inner_dim"] or hidden
    rng = torch.Generator().manual_seed(5)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).half()

    first = [some(vocab, inner), some(inner, hidden), some(inner), some(inner), some(vocab, inner)]
    parts = [first]
    for head in range(1, count):
        fresh = [some(*(each.shape if at != 1 else (inner, inner))) for at, each in enumerate(first)]
        parts.append([*first[:1], (parts[1] if head > 1 else fresh)[1], *first[2:]] if tied else fresh)
    names = ("emb.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight")
    tensors = {
        f"speculator.{name.format(n)}": each
        for n, head in enumerate(parts)
        for name, each in zip(names, head, strict=True)
    }
    save_file({name: each.clone() for name, each in tensors.items()}, tmp_path / "model.safetensors")

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    loaded = heads.load(tmp_path, torch.float32, PlainLinears(), engine_of(1, 1))
    hidden_states, tokens = torch.randn((4, hidden), generator=rng), torch.tensor([0, 7, 49, 7])
    state = loaded.first(hidden_states, ())
    expected = normed(hidden_states) / 2**0.5 if tied else hidden_states
    old, new = 0.5 ** (0.5 / count), ((1 - 0.5 ** (1 / count)) * inner / 2) ** 0.5
    for head, (emb, proj, weight, bias, output) in enumerate([[each.float() for each in part] for part in parts]):
        state = loaded.advance(head, state, tokens)
        expected = torch.nn.functional.gelu(normed(expected @ proj.T * old + emb[tokens] * new) * weight + bias)
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded.logits(head, state), expected @ output.T, atol=1e-3, rtol=1e-3)
        tokens = (tokens + 11) % vocab


@pytest.mark.parametrize("kind", ["plain", "bias", "map", "shared", "cut"])
def test_medusa_guesses_by_its_formula(tmp_path: Path, kind: str) -> None:
    """As vLLM reads it: layers with a bias or without, one output embedding or several, and some of the tokens or all,
    whose embeddings may be cut already."""
    hidden, vocab, count, known = 24, 50, 3, torch.tensor([3, 49, 0, 17])
    config = {
        "architectures": ["MedusaModel"], "hidden_size": hidden, "max_paths": 64, "medusa_fc_bias": kind == "bias",
        "model_type": "medusa", "num_heads": count, "num_hidden_layers": 2, "original_lm_head": kind == "shared",
        "topk": 10, "vocab_size": vocab,
    }  # fmt: skip
    rng = torch.Generator().manual_seed(5)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    names = [f"blocks.{head}.layers.{layer}" for head in range(count) for layer in range(2)]
    tensors = {f"{name}.weight": some(hidden, hidden) / 5 for name in names}
    if kind == "bias":
        tensors |= {f"{name}.bias": some(hidden) for name in names}
    tensors |= {f"lm_heads.{head}.weight": some(vocab, hidden) for head in range(1 if kind == "shared" else count)}
    stored = dict(tensors)
    if kind in ("map", "cut"):
        config["truncated_vocab_size"] = len(known)
        stored["token_map"] = known
        if kind == "cut":
            stored |= {name: each[known] for name, each in tensors.items() if "lm_heads" in name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    loaded = heads.load(tmp_path, torch.float32, PlainLinears(), engine_of(vocab, hidden))
    assert loaded.spec.count == count
    hidden_states = some(4, hidden)
    state = loaded.first(hidden_states, ())
    for head in range(count):
        state = loaded.advance(head, state, torch.tensor([0, 7, 49, 7]))
        expected = hidden_states
        for layer in range(2):
            name = f"blocks.{head}.layers.{layer}"
            product = expected @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", torch.zeros(hidden))
            expected = expected + product * product.sigmoid()
        logits = expected @ tensors[f"lm_heads.{0 if kind == 'shared' else head}.weight"].T
        if "token_map" in stored:
            cut = torch.full_like(logits, -torch.inf)
            cut[:, known] = logits[:, known]
            logits = cut
        torch.testing.assert_close(loaded.logits(head, state), logits, atol=1e-4, rtol=1e-4)


def engine_of(vocab: int, hidden: int) -> Any:
    """A model that is nothing but random embeddings."""
    rng = torch.Generator().manual_seed(9)
    embedding, output = torch.randn((2, vocab, hidden), generator=rng)
    return SimpleNamespace(embed=lambda tokens: embedding[tokens], logits=lambda states: states @ output.T)


def test_eagle_guesses_as_transformers_computes_its_layer(tmp_path: Path) -> None:
    """Two sequences, of which one is longer than the window, in steps of one token and of several. What a guess has
    left is not there for the next one."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40,
        "max_position_embeddings": 512, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False,
        "vocab_size": 50,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(4)
    llama = LlamaConfig(**{name: value for name, value in config.items() if name != "architectures"})
    llama._attn_implementation = "eager"
    layer, turns = LlamaDecoderLayer(llama, 0), LlamaRotaryEmbedding(llama)
    layer.register_module("input_layernorm", torch.nn.Identity())
    for each in layer.parameters():
        torch.nn.init.normal_(each, 0.0, 0.3)
    fc = torch.randn(24, 48) / 5
    named = {f"layers.0.{name}": each.detach().clone() for name, each in layer.state_dict().items()}
    save_file({**named, "fc.weight": fc, "embed_tokens.weight": torch.zeros(50, 24)}, tmp_path / "model.safetensors")
    model = engine_of(50, 24)
    loaded = heads.load(tmp_path, torch.float32, PlainLinears(), model)

    @torch.no_grad()
    def after(states: torch.Tensor, tokens: list[int], first: int) -> torch.Tensor:
        """The state that the layer guesses after the last of these."""
        x = (torch.cat((model.embed(torch.tensor(tokens)), states), -1) @ fc.T)[None]
        at = torch.arange(first, first + len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        return layer(x, attention_mask=mask, position_ids=at, position_embeddings=turns(x, at))[0, -1:]

    rng = random.Random(6)
    past: dict[Hashable, tuple[list[torch.Tensor], list[int]]] = {"a": ([], []), "b": ([], [])}
    prompts: dict[Hashable, int] = {"a": 5, "b": 130}
    for step in range(60):
        states, drawn = torch.randn(8, 24), list[DrawnRows]()
        for name, (known, tokens) in past.items():
            if name == "b" and step < 40:
                continue
            row, count = 4 * len(drawn), rng.choice([1, 1, 3])
            new = [rng.randrange(50) for _ in range(count)]
            drawn.append(DrawnRows(name, row, new, prompts[name] + len(tokens)))
            known += states[row : row + count].unbind()
            tokens += new
        loaded.keep(states, drawn)
        if step not in (0, 3, 4, 45, 46, 50, 57, 58, 59):
            continue
        rows = [
            HiddenRow(each.name, each.row + len(each.tokens) - 1, each.tokens[-1], each.position + len(each.tokens),
                      TokenDraw())
            for each in drawn
        ]  # fmt: skip
        state = loaded.first(states[[each.row for each in rows]], rows)
        guesses = torch.tensor([each.token for each in rows])
        after_each = {each.name: [*zip(*past[each.name], strict=True)] for each in rows}
        for head in range(3):
            state = loaded.advance(head, state, guesses)
            expected = list[torch.Tensor]()
            for at, each in enumerate(rows):
                seen = after_each[each.name]
                begin = max(0, len(past[each.name][1]) - 1 - eagle.WINDOW)
                guessed = after(torch.stack([one for one, _ in seen[begin:]]), [one for _, one in seen[begin:]],
                                prompts[each.name] - 1 + begin)  # fmt: skip
                expected.append(guessed)
                seen.append((guessed[0], rng.randrange(50)))
                guesses[at] = seen[-1][1]
            logits = model.logits(torch.cat(expected))
            torch.testing.assert_close(loaded.logits(head, state), logits, atol=1e-3, rtol=1e-3)
    assert len(past["a"][1]) > eagle.WINDOW + 10


def test_heads_that_are_the_model_itself_draw_its_tokens(engine: Engine) -> None:
    """A head with the model's output embedding that passes the hidden state on gives the model's logits. So with the
    position of the token before, its draw is that token."""
    prompt, draw = PROMPTS[0].tokens, TokenDraw(temperature=1.0, seed=11)
    (drawn,) = engine.step([Chunk(prompt, 0, range(-(-len(prompt) // 16)), draw)])
    assert drawn is not None

    class Echo(mlp_speculator.MlpSpeculator):
        def __init__(self) -> None:
            pass

        def first(self, hidden: torch.Tensor, rows: object = ()) -> torch.Tensor:
            return hidden

        def advance(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return state

        def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
            return engine.logits(state)

    assert engine.guess(Echo(), [HiddenRow("one", 0, drawn.token, len(prompt), draw)], 1) == [[drawn.token]]


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        draft.check(settings(**{"model.speculation_heads": str(path)}).model, DEMO_MODEL)

    def write(**more: object) -> None:
        (other / "config.json").write_text(json.dumps(config | more))

    check(HEADS)
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        check(tmp_path / "no-such-folder")
    with pytest.raises(UnsupportedModel, match="2 layers, and EAGLE's heads have one"):
        check(DRAFT_MODEL)
    other = shutil.copytree(HEADS, tmp_path / "other")
    (other / "model.safetensors").rename(other / "medusa_lm_head.pt")
    with pytest.raises(ModelNotFound, match="pickled weights are never loaded"):
        check(other)
    config = json.loads((other / "config.json").read_text())
    write(model_type="gpt2")
    with pytest.raises(UnsupportedModel, match="'gpt2'; heads are of 'mlp_speculator', 'medusa', 'llama', 'qwen2'"):
        check(other)
    write(architectures=["LlamaForCausalLMEagle3"], model_type="llama")
    with pytest.raises(UnsupportedModel, match="heads of EAGLE-3"):
        check(other)
    write(vocab_size=4_000)
    with pytest.raises(ConfigError, match="is for 4000 tokens and a hidden size of 192, and the model has 2113 and"):
        check(other)
    for name, value in (
        ("n_predict", 17),
        ("n_predict", 0),
        ("emb_dim", "192"),
        ("inner_dim", -1),
        ("vocab_size", None),
    ):
        write(**{name: value})
        with pytest.raises(ModelError, match=f"{name} is {value!r}; it must be an integer above 0"):
            check(other)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("mlp_speculator", "speculator.head.0.weight"),
        ("medusa", "blocks.2.layers.0.weight"),
        ("medusa", "lm_head.weight"),
        ("eagle", "fc.weight"),
        ("eagle", "layers.0.self_attn.k_proj.weight"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path, form: str, name: str) -> None:
    other = first_heads(form, tmp_path)
    tensors = load_file(other / "model.safetensors")
    for wrong, why in (({name: torch.zeros(3, 4)}, r"has shape \[3, 4\]"), ({}, "has no tensor")):
        save_file(
            {each: tensor for each, tensor in tensors.items() if each != name} | wrong, other / "model.safetensors"
        )
        known = name if wrong or name != "lm_head.weight" else "lm_heads.0.weight"
        with pytest.raises(CorruptWeights, match=f"{known}.*{why}|{why} {known}"):
            heads.load(other, torch.float32, PlainLinears(), engine_of(1, 1))


def test_a_map_to_tokens_that_there_are_not_is_refused(tmp_path: Path) -> None:
    other = first_heads("medusa", tmp_path)
    config = json.loads((other / "config.json").read_text()) | {"truncated_vocab_size": 2}
    (other / "config.json").write_text(json.dumps(config))
    tensors = load_file(other / "model.safetensors")
    for known in ([0, config["vocab_size"]], [-1, 0]):
        save_file(tensors | {"token_map": torch.tensor(known)}, other / "model.safetensors")
        with pytest.raises(CorruptWeights, match=f"token_map names tokens that are not below {config['vocab_size']}"):
            heads.load(other, torch.float32, PlainLinears(), engine_of(1, 1))


@pytest.mark.parametrize(
    "more",
    [
        {"model.speculation": "heads"},
        {"model.speculation": "ngram", "model.speculation_heads": "h"},
        {"model.speculation": "draft", "model.draft_model": "d", "model.speculation_heads": "h"},
        {"model.draft_model": "d", "model.speculation_heads": "h"},
    ],
)
def test_heads_are_named_where_they_are_used(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model\.speculation_heads"):
        load(None, more)
