"""The text that the demo's model is trained on: the same for a seed, true, and written as servers write it."""

import json
import random
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model import tokenizer as tokenizers
from tools.demo_model import world
from tools.demo_model.batches import draw_batch, weighed
from tools.demo_model.conversation import PROSE, TEMPLATE, VALUE, Conversation, Message, render
from tools.demo_model.facts import OTHER, PERSONAL, facts

TOKENIZER = tokenizers.train()
SEEDS = st.integers(0, 2**32)


def template(conversation: Conversation) -> str:
    def call(one: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": one}

    messages = [
        {"role": m.role, "content": m.content} | ({"tool_calls": [call(c) for c in m.calls]} if m.calls else {})
        for m in conversation.messages
    ]
    environment = jinja2.Environment(autoescape=False)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(TEMPLATE.read_text()).render(messages=messages, tools=list(conversation.tools))


@given(SEEDS)
def test_text_is_what_the_template_renders(seed: int) -> None:
    draw = random.Random(seed)
    for conversation in (world.sample(draw, 300), world.tool_use(draw), world.storytelling(draw)):
        assert render(conversation).text == template(conversation)


def test_system_message_and_tools_share_one_block() -> None:
    tools = world.tool_use(random.Random(1)).tools
    conversation = Conversation((Message("system", "Be kind."), Message("user", "Hello!")), tools)
    assert render(conversation).text == template(conversation)
    assert render(conversation).text.count("<|im_start|>system") == 1


@given(SEEDS)
def test_a_seed_gives_one_text_and_another_seed_another(seed: int) -> None:
    assert world.text(random.Random(seed), 400).text == world.text(random.Random(seed), 400).text
    assert world.text(random.Random(seed), 400).text != world.text(random.Random(seed + 1), 400).text


@given(SEEDS)
def test_every_answer_is_told_by_a_statement_before(seed: int) -> None:
    """Each value that an answer holds stands in the text before the question."""
    conversation = world.conversation(random.Random(seed), 600)
    before = ""
    for message in conversation.messages:
        assert all(value in before for value in message.values), message
        before += message.content + "\n"


@given(SEEDS)
def test_no_two_facts_of_a_conversation_answer_one_question(seed: int) -> None:
    drawn = facts(random.Random(seed), 40)
    assert len({fact.key for fact in drawn}) == 40
    questions = [question for fact in drawn for question in set(fact.questions)]
    assert len(questions) == len(set(questions))


@pytest.mark.parametrize("kind", range(len(PERSONAL) + len(OTHER)))
def test_facts_vary(kind: int) -> None:
    """Drawn 200 times for one subject, a fact has several values, so that none can be learned by heart."""
    draw = random.Random(3)
    samples = [
        PERSONAL[kind](draw, "Mara") if kind < len(PERSONAL) else OTHER[kind - len(PERSONAL)](draw) for _ in range(200)
    ]
    assert len({fact.values for fact in samples}) >= 7
    for fact in samples:
        assert all(value in fact.answer for value in fact.values)
        assert all(any(value in statement for statement in fact.statements) for value in fact.values)


@given(SEEDS)
def test_weights_cover_exactly_the_values(seed: int) -> None:
    rendered = world.text(random.Random(seed), 300)
    ids, kinds = weighed(TOKENIZER, rendered)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == rendered.text
    weighted = "".join(TOKENIZER.decode([i]) for i, kind in zip(ids, kinds, strict=True) if kind == VALUE)
    expected = "".join(rendered.text[begin:end] for begin, end, weight in rendered.parts if weight == VALUE)
    assert weighted.replace(" ", "") == expected.replace(" ", "")
    assert PROSE in kinds or rendered.text.endswith("<|endoftext|>")


def test_a_batch_is_the_same_for_a_step_and_differs_between_ranks() -> None:
    one, again, other = (draw_batch(TOKENIZER, (1, 2, rank), 2, 128) for rank in (0, 0, 1))
    assert one[0].shape == (2, 129)
    assert torch.equal(one[0], again[0])
    assert torch.equal(one[1], again[1])
    assert not torch.equal(one[0], other[0])


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_goes_in_and_comes_out(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_a_name_is_one_token_anywhere(tmp_path: Path) -> None:
    for name in (*world.words.NAMES, *world.words.TOWNS):
        assert len(TOKENIZER.encode(f" {name}").ids) == len(TOKENIZER.encode(name).ids) == 1
