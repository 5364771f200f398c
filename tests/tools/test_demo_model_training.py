"""Training resumes where it ended, and its checkpoint is what transformers and Baton read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.config import load
from deploy.models import DEMO_MODEL, DRAFT_MODEL
from engine.models.config import load_spec
from tools.demo_model import agreement, checkpoint, evaluate, heads, train
from tools.demo_model import tokenizer as tokenizers
from tools.demo_model.batches import draw_batch
from tools.demo_model.conversation import BEGIN, Conversation, Message, render
from tools.demo_model.network import Network, Shape, start
from worker import draft

pytestmark = pytest.mark.slow

PLAN = train.Plan(64, 64, 2, 2, 32, 1e-3, (train.Stage(2, 2, 64), train.Stage(2, 1, 128)))
TOKENIZER = tokenizers.train()
SHAPE = Shape(TOKENIZER.get_vocab_size(), 128, 128, 3, 4, 64)


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def trained(folder: Path, steps: int) -> train.Trainer:
    folder.mkdir(exist_ok=True)
    trainer = train.Trainer(folder, PLAN, 0, 1)
    while trainer.step < steps:
        trainer.train_step()
    trainer.save()
    return trainer


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", PLAN.steps)
    trained(tmp_path / "parts", 1)
    trained(tmp_path / "parts", 3)
    parts = trained(tmp_path / "parts", PLAN.steps)
    assert parts.step == whole.step == PLAN.steps
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(parts.network.state_dict()[name], tensor), name


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    trainer = train.Trainer(tmp_path, replace(PLAN, stages=(train.Stage(40, 4, 64),)), 0, 1)
    while trainer.step < trainer.plan.steps:
        trainer.train_step()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40]
    assert lines[1]["loss"] < lines[0]["loss"] - 0.5


def test_plans_stay_within_their_bounds() -> None:
    """12 M parameters at most, and 0.3 M for the draft; all have one tokenizer."""
    for name, most in (("large", 12_000_000), ("small", 2_000_000), ("draft", 300_000)):
        plan = train.PLANS[name]
        shape = Shape(
            TOKENIZER.get_vocab_size(), plan.hidden, plan.intermediate, plan.layers, plan.heads, plan.head_dim
        )
        assert sum(parameter.numel() for parameter in Network(shape).parameters()) <= most


def test_first_weights_look_back() -> None:
    """Before any training the model prefers the token that followed the last time to all others but two."""
    network = Network(SHAPE)
    start(network, TOKENIZER, 1)
    once = torch.randperm(SHAPE.vocabulary)[:40]
    tokens = torch.cat([once, once])[None]
    with torch.inference_mode():
        logits = network.logits(network(tokens))[0, 41:-1]
    true = logits.gather(1, tokens[0, 42:, None])
    others = logits.scatter(1, tokens[0, 41:-1, None], -torch.inf)  # the present token is likely, too
    assert (others > true).sum(1).float().median() < 3


def test_transformers_reads_the_checkpoint(tmp_path: Path) -> None:
    network = Network(SHAPE)
    start(network, TOKENIZER, 1)
    checkpoint.write(tmp_path, network, TOKENIZER)
    network.load_state_dict({name: t.to(torch.bfloat16).float() for name, t in network.state_dict().items()})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, SHAPE.vocabulary, (1, 50))
    with torch.inference_mode():
        torch.testing.assert_close(network.logits(network(tokens)), theirs(tokens).logits, atol=2e-3, rtol=1e-3)
    spec = load_spec(tmp_path)
    assert (spec.family, spec.head_dim, spec.tied_embeddings) == ("qwen2", 64, True)


def test_transformers_tokenizes_and_renders_a_chat_as_training_does(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, Network(SHAPE), TOKENIZER)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = Conversation((Message("system", "Be kind."), Message("user", "Where does Mara live?")))
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render(chat).text + f"{BEGIN}assistant\n"
    assert theirs(text)["input_ids"] == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("distance", [50, 700])
def test_prompts_ask_for_a_fact_told_as_far_back_as_said(distance: int) -> None:
    for one in evaluate.prompts(TOKENIZER, distance, 10):
        text = TOKENIZER.decode(list(one.tokens), skip_special_tokens=False)
        statements = [statement for statement in one.fact.statements if statement in text]
        assert len(statements) == 1
        after = text[text.index(statements[0]) + len(statements[0]) :]
        assert len(TOKENIZER.encode(after).ids) == one.distance
        assert distance <= one.distance <= distance + 20
        assert any(question in text for question in one.fact.questions)


@pytest.mark.parametrize(
    ("ending", "right"), [("", True), (".", True), (" near the mill.", True), ("4.", False), (None, False)]
)
def test_an_answer_must_have_the_value(ending: str | None, right: bool) -> None:
    one = evaluate.prompts(TOKENIZER, 50, 1)[0]
    text = "I do not know that." if ending is None else one.fact.answer.removesuffix(".") + ending
    assert evaluate.right(TOKENIZER, one, TOKENIZER.encode(text).ids) == right


def test_a_model_agrees_with_itself_and_not_with_another(tmp_path: Path) -> None:
    network = Network(SHAPE)
    start(network, TOKENIZER, 1)
    folders = (DEMO_MODEL, checkpoint.write(tmp_path, network, TOKENIZER))
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    prompts = agreement.prompts(TOKENIZER, 3)
    assert prompts == agreement.prompts(TOKENIZER, 3)
    assert all(TOKENIZER.decode(one, skip_special_tokens=False).endswith(f"{BEGIN}assistant\n") for one in prompts)
    with torch.inference_mode():
        answered = agreement.answers(models[0], prompts)
        own, other = (agreement.agreements(model, prompts, answered) for model in models)
    assert [len(answer) for answer in own] == [len(answer) for answer in answered]
    assert all(map(all, own))
    assert sum(map(sum, other)) < sum(map(len, other)) / 2


def test_the_bundled_draft_agrees_with_the_bundled_model() -> None:
    """At least 90 % of the tokens of 20 answers; 94.2 % of 100."""
    tokenizer = (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert (DRAFT_MODEL / "tokenizer.json").read_bytes() == tokenizer
    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (DEMO_MODEL, DRAFT_MODEL)
    ]
    assert models[1].num_parameters() <= 300_000
    prompts = agreement.prompts(Tokenizer.from_buffer(tokenizer), 20)
    with torch.inference_mode():
        agreed = agreement.agreements(models[1], prompts, agreement.answers(models[0], prompts))
    assert sum(map(sum, agreed)) >= 0.9 * sum(map(len, agreed))


def test_a_run_ends_with_the_first_token_that_differs() -> None:
    right, wrong = True, False
    assert agreement.mean_run([[right, right, right, right, right, right]], 4) == (4 + 1) / 2
    assert agreement.mean_run([[right, wrong, wrong, right, right]], 4) == (1 + 0 + 2) / 3


@pytest.mark.parametrize("form", ["mlp_speculator", "medusa", "eagle"])
def test_heads_learn_to_guess_what_the_model_says(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "ROWS", 2)
    monkeypatch.setattr(heads, "LENGTH", 128)
    network = heads.read_network(DRAFT_MODEL)
    tokenizer = Tokenizer.from_file(str(DRAFT_MODEL / "tokenizer.json"))
    spec = heads.spec_of(form, network.shape)
    drawn = draw_batch(tokenizer, (1, 0, 0), 2, 128)
    losses: list[float] = []
    for steps in (1, 40):
        heads.write(tmp_path, spec, heads.train(network, tokenizer, spec, steps))
        draft.check(
            load(None, {"model.speculation_heads": str(tmp_path), "model.speculation": "heads"}).model, DRAFT_MODEL
        )
        tensors, losses_of = heads.start(network, spec)
        for name, trained in load_file(tmp_path / "model.safetensors").items():
            tensors[name].data.copy_(trained)
        losses.append(losses_of(*drawn)[0].mean().item())
    assert losses[1] < losses[0] - 1
