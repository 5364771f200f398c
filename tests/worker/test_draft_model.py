"""The draft model and the heads that come with the demo model: they guess well, and no token is another one."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.config import Config, load
from baton.errors import ConfigError, CorruptWeights, ModelNotFound
from baton.membership import SendToRouter
from baton.messages import Decode, SamplingParams, Tokens
from decode_worker.drafter import Drafter
from decode_worker.scheduler import DecodeScheduler
from deploy.models import DEMO_MODEL, DRAFT_MODEL
from engine.engine import Engine
from engine.step.outcome import StepDone
from engine.vllm_runner import drafts
from kvstore.keys import pack_tokens
from tools.demo_model import evaluate
from worker import draft

pytestmark = pytest.mark.native

PAGES = 256
OUTPUT = 40
PROMPTS = evaluate.prompts(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), 300, 3)
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.5, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, logprobs=2),
]


def settings(**more: object) -> Config:
    return load(None, {"model.path": str(DEMO_MODEL), **more})


DRAFT = settings(**{"model.draft_model": str(DRAFT_MODEL)})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(DEMO_MODEL, "auto", "cpu", PAGES, 16, head=True, threads=1)


def outputs(engine: Engine, drafter: Drafter | None) -> tuple[list[list[int]], list[float]]:
    """The tokens of each sampling, all of them at once, and of each the share of right guesses."""
    state = DecodeScheduler(DRAFT.decode, 16, PAGES, drafter=drafter, verify_all=True)
    for number, sampling in enumerate(SAMPLING):
        prompt = PROMPTS[number].tokens
        state.handle(Decode(f"r{number}", 1, b"r" * 16, pack_tokens(prompt), len(prompt), OUTPUT, sampling), 0.0)
    drawn: list[list[int]] = [[] for _ in SAMPLING]
    shares = [0.0 for _ in SAMPLING]
    while state.stats().ended < len(SAMPLING):
        state.prepare(0.0)
        plan = state.schedule(0.0)
        results = engine.launch(list(plan.values())).wait()
        for command in state.handle(StepDone(plan, results.sampled, verified=results.verified), 0.0):
            assert isinstance(command, SendToRouter)
            assert isinstance(command.message, Tokens)
            for delta in command.message.deltas:
                drawn[int(delta.request[1:])] += delta.tokens
                shares[int(delta.request[1:])] = delta.accepted / max(1, delta.verified)
    return drawn, shares


@pytest.mark.technique("Speculation by a draft model, token-identical")
def test_tokens_are_those_without_and_most_guesses_are_right(engine: Engine) -> None:
    without, _ = outputs(engine, None)
    drafter = draft.load(DRAFT, engine)
    drafted, shares = outputs(engine, drafter)
    assert drafted == without
    assert min(shares) > 1 / 3
    engine.reload(DEMO_MODEL)
    assert outputs(engine, drafter) == (drafted, shares), "it no longer guesses for reloaded weights"


def test_a_model_that_drafts_for_itself_is_always_right(engine: Engine) -> None:
    """It computes the same bits, so a wrong guess was drawn with other random numbers or parameters."""
    itself = settings(**{"model.draft_model": str(DEMO_MODEL)})
    drafted, shares = outputs(engine, draft.load(itself, engine))
    assert shares == [1.0] * len(SAMPLING)
    assert drafted == outputs(engine, None)[0]


def test_a_draft_model_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no-such-folder"):
        draft.check(settings(**{"model.draft_model": str(tmp_path / "no-such-folder")}).model, DEMO_MODEL)
    other = shutil.copytree(DRAFT_MODEL, tmp_path / "other")
    draft.check(settings(**{"model.draft_model": str(other)}).model, DEMO_MODEL)
    whole = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptWeights, match=r"model\.safetensors can't be read"):
        draft.check(settings(**{"model.draft_model": str(other)}).model, DEMO_MODEL)
    (other / "model.safetensors").write_bytes(whole)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second, *_ = tokenizer["model"]["vocab"]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"tokenizer\.json with other tokens"):
        draft.check(settings(**{"model.draft_model": str(other)}).model, DEMO_MODEL)
    config = json.loads((other / "config.json").read_text()) | {"vocab_size": 4_000}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 4000 tokens and the model's vocabulary 2113"):
        draft.check(settings(**{"model.draft_model": str(other)}).model, DEMO_MODEL)


GROUPS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}


@pytest.mark.parametrize(
    ("method", "config", "why"),
    [
        ("draft_model", {}, ""),
        ("draft_model", {"vocab_size": 4_000}, "it has 4000 tokens and the model's vocabulary 2113"),
        ("eagle", {"num_key_value_heads": 4}, "its layers keep 4 KV heads of .* pages have layers of one kind"),
        ("draft_model", GROUPS, "its layers form groups, and vLLM keeps all layers of a draft in one"),
        ("medusa", {"num_heads": 2}, "it has 2 heads, and num_speculative_tokens is 3: lower that"),
        ("medusa", {"num_heads": 3, "hidden_size": 64}, "it is for a hidden size of 64"),
    ],
)
def test_a_draft_of_vllm_that_does_not_fit_is_refused_by_name(
    method: str, config: dict[str, object], why: str, tmp_path: Path
) -> None:
    other = shutil.copytree(DEMO_MODEL, tmp_path / "other")
    own = {"method": method, "model": str(other), "num_speculative_tokens": 3}
    model = settings(**{"model.speculative_config": own}).model
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | config))
    with pytest.raises(ConfigError, match=f"{other} does not fit the model: {why}") if why else nullcontext():
        draft.check(model, DEMO_MODEL)
    if not why:
        demo = json.loads((DEMO_MODEL / "config.json").read_text())
        latents = demo | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
        assert "only mtp" in drafts.lack(model.speculative_config, latents, latents)
        assert "pages of the first one" in drafts.lack(model.speculative_config, demo | GROUPS, demo)
        (other / "model.safetensors").rename(other / "pytorch_model.bin")
        with pytest.raises(ModelNotFound, match="safetensors"):
            draft.check(model, DEMO_MODEL)


MTP = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": None}, "MTP layers were tried of .*, and the model is "),
        ({}, "MTP layers were tried of .*, and the model is Qwen2ForCausalLM"),
        (MTP | {"num_nextn_predict_layers": 0}, r"its config\.json names no MTP layer \(num_nextn_predict_layers\)"),
        (MTP | {"num_nextn_predict_layers": 2}, "it has 2 MTP layers, and vLLM's first model runner asks the first"),
        (MTP, r"its checkpoint was saved without model\.mtp_layers\.0\.input_proj\.weight"),
    ],
)
def test_a_model_without_the_layer_that_is_asked_for_is_refused_by_name(
    config: dict[str, object], why: str, tmp_path: Path
) -> None:
    path = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    model = settings(**{"model.speculative_config": {"method": "mimo_mtp", "num_speculative_tokens": 1}}).model
    with pytest.raises(ConfigError, match=f"mimo_mtp does not fit the model: {why}"):
        draft.check(model, path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method": "ngram", "prompt_lookup_max": 4}, "method is 'ngram'; set model.speculation to ngram instead"),
        ({"method": "mtp"}, "mtp is a layer of the model's checkpoint: leave out model"),
        ({"method": "suffix"}, "method is 'suffix'; it must be one of draft_model, eagle, eagle3, medusa, mtp"),
        ({"model": ""}, "names no model"),
        ({"num_speculative_tokens": 17}, r"<= 16 - at `\$\.model\.speculative_config\.num_speculative_tokens`"),
        ({"parallel_drafting": True}, r"unknown field `parallel_drafting` - at `\$\.model\.speculative_config`"),
    ],
)
def test_what_vllm_is_not_told_of_a_draft_is_refused_by_name(change: dict[str, object], why: str) -> None:
    own = {"method": "eagle", "model": "m", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=why):
        load(None, {"model.speculative_config": own | change})
    with pytest.raises(ConfigError, match=r"model\.draft_model is 'd' and model\.speculative_config is .*name one of"):
        load(None, {"model.speculative_config": own, "model.draft_model": "d"})


@pytest.mark.parametrize(("speculation", "path"), [("draft", ""), ("ngram", "small"), ("off", "small")])
def test_a_draft_model_is_named_where_it_is_used(speculation: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.draft_model"):
        load(None, {"model.speculation": speculation, "model.draft_model": path})
