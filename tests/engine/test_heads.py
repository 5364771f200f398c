"""The heads that come with the demo model guess well, and no token is another one, whatever heads guess."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import load
from baton.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedModel
from deploy.models import DEMO_MODEL, DRAFT_MODEL, HEADS
from engine.engine import Engine
from engine.models import heads
from engine.step.batch import Chunk, HiddenRow, TokenDraw
from tests.engine.test_draft_model import PAGES, PROMPTS, engine, outputs, settings
from worker import draft

pytestmark = pytest.mark.native
__all__ = ["engine"]


@pytest.mark.technique("Speculation by heads, token-identical")
@pytest.mark.parametrize("kind", ["trained", "random"])
def test_tokens_are_those_without(engine: Engine, tmp_path: Path, kind: str) -> None:
    """Greedy and drawn. Trained heads are often right, also behind the answers, and random ones hardly ever."""
    folder = HEADS
    if kind == "random":
        folder = shutil.copytree(HEADS, tmp_path / "random")
        tensors = load_file(folder / "model.safetensors")
        save_file({name: torch.randn_like(each) for name, each in tensors.items()}, folder / "model.safetensors")
    without, _ = outputs(engine, None)
    drafted, shares = outputs(engine, draft.load(settings(**{"model.speculation_heads": str(folder)}), engine))
    assert drafted == without
    assert min(shares) > 1 / 8 if kind == "trained" else max(shares) < 1 / 20


def test_heads_of_the_weights_before_change_no_token_of_reloaded_ones(tmp_path: Path) -> None:
    """`baton reload` keeps the heads. They guess worse, and each guess is verified by the new weights."""
    other = shutil.copytree(DEMO_MODEL, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    torch.manual_seed(3)
    save_file(
        {name: each + 0.3 * each.std() * torch.randn_like(each) for name, each in tensors.items()},
        other / "model.safetensors",
    )
    engine = Engine.load(DEMO_MODEL, "auto", "cpu", PAGES, 16, head=True, threads=1)
    drafter = draft.load(settings(**{"model.speculation_heads": str(HEADS)}), engine)
    before, right = outputs(engine, drafter)
    digest = engine.fingerprint
    engine.reload(other)
    assert engine.fingerprint != digest
    drafted, shares = outputs(engine, drafter)
    assert drafted == outputs(Engine.load(other, "auto", "cpu", PAGES, 16, head=True, threads=1), None)[0] != before
    assert sum(shares) < sum(right)


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

    loaded = heads.Heads.load(tmp_path, torch.float32, heads.PlainLinear)
    hidden_states, tokens = torch.randn((4, hidden), generator=rng), torch.tensor([0, 7, 49, 7])
    state = loaded.first(hidden_states)
    expected = normed(hidden_states) / 2**0.5 if tied else hidden_states
    old, new = 0.5 ** (0.5 / count), ((1 - 0.5 ** (1 / count)) * inner / 2) ** 0.5
    for head, (emb, proj, weight, bias, output) in enumerate([[each.float() for each in part] for part in parts]):
        state = loaded.advance(head, state, tokens)
        expected = torch.nn.functional.gelu(normed(expected @ proj.T * old + emb[tokens] * new) * weight + bias)
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded.logits(head, state), expected @ output.T, atol=1e-3, rtol=1e-3)
        tokens = (tokens + 11) % vocab


def test_heads_that_are_the_model_itself_draw_its_tokens(engine: Engine) -> None:
    """A head with the model's output embedding that passes the hidden state on gives the model's logits. So with the
    position of the token before, its draw is that token."""
    prompt, draw = PROMPTS[0].tokens, TokenDraw(temperature=1.0, seed=11)
    (drawn,) = engine.step([Chunk(prompt, 0, range(-(-len(prompt) // 16)), draw)])
    assert drawn is not None

    class Echo(heads.Heads):
        def __init__(self) -> None:
            self.spec = heads.load_spec(HEADS)

        def advance(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return state

        def logits(self, head: int, state: torch.Tensor) -> torch.Tensor:
            assert engine._native is not None
            return engine._native.logits(state)

    assert engine.guess(Echo(), [HiddenRow(0, drawn.token, len(prompt), draw)], 1) == [[drawn.token]]


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    def check(path: Path) -> None:
        draft.check(settings(**{"model.speculation_heads": str(path)}).model, DEMO_MODEL)

    def write(**more: object) -> None:
        (other / "config.json").write_text(json.dumps(config | more))

    check(HEADS)
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        check(tmp_path / "no-such-folder")
    with pytest.raises(UnsupportedModel, match="'qwen2'; heads are of 'mlp_speculator'"):
        check(DRAFT_MODEL)
    other = shutil.copytree(HEADS, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    write(vocab_size=4_000)
    with pytest.raises(
        ConfigError, match="is for 4000 tokens and a hidden size of 192, and the model has 2113 and 192"
    ):
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


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path: Path) -> None:
    other = shutil.copytree(HEADS, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = "speculator.head.0.weight"
    for wrong, why in (({name: torch.zeros(3, 4)}, r"has shape \[3, 4\]"), ({}, "has no tensor")):
        save_file(
            {each: tensor for each, tensor in tensors.items() if each != name} | wrong, other / "model.safetensors"
        )
        with pytest.raises(CorruptWeights, match=f"{name}.*{why}|{why} {name}"):
            heads.Heads.load(other, torch.float32, heads.PlainLinear)


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
