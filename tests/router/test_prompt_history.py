"""Why pages of a prompt are not cached, told from the prompts and removals that a router remembers."""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages import Medium, SamplingParams
from baton.timeline import Timeline
from kvstore.events.wire_format import BlockRemoved
from kvstore.keys import cacheable_pages, namespace_root, pack_tokens, page_keys, split_keys
from router.generation_request import GenerationRequest
from router.not_cached import NotCached
from router.placement.prompt_history import PlacedPrompt, PromptHistory
from tests.router.model import NAMESPACE

PAGE = 16
SLOTS = 1 << 14


class Prompts:
    def __init__(self, slots: int = SLOTS) -> None:
        self.history = PromptHistory(PAGE, seed=3, slots=slots)
        self.now = 10.0

    def keys(self, tokens: Sequence[int], **more: Any) -> list[bytes]:
        namespace = msgspec.structs.replace(more.get("namespace", NAMESPACE), adapter=more.get("adapter", ""))
        root = namespace_root(namespace, more.get("tenant", ""), more.get("salt", ""))
        pages = cacheable_pages(len(tokens), PAGE)
        return split_keys(page_keys(root, pack_tokens(tokens)[: pages * PAGE * 4], PAGE))

    def add(self, name: str, tokens: Sequence[int], cached: int = 0, *, done: bool = True, **more: Any) -> NotCached:
        keys = self.keys(tokens, **more)
        namespace = more.pop("namespace", NAMESPACE)
        spec = GenerationRequest(name, pack_tokens(tokens), SamplingParams(), **more)
        timeline = Timeline(self.now, first_token=self.now + 0.5 if done else None)
        root = namespace_root(msgspec.structs.replace(namespace, adapter=spec.adapter), spec.tenant, spec.salt)
        self.now += 1
        why = self.history.add_prompt(PlacedPrompt(name, spec, root, keys, namespace, timeline), cached, self.now)
        assert sum(why.tokens.values()) == len(tokens) - cached * PAGE
        assert why.token == cached * PAGE
        return why

    def removed(self, keys: Sequence[bytes], tier: Medium) -> None:
        self.now += 1
        self.history.note_removals([BlockRemoved(tuple(keys), tier)], self.now)


def text(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


def test_a_prompt_that_was_never_seen() -> None:
    why = Prompts().add("first", text(1, 1_003))
    assert (why.reason, why.page, why.other) == ("new", 0, "")
    assert why.tokens == {"new": 992, "tail": 11}


def test_the_next_turn_of_a_conversation_is_new() -> None:
    prompts, turn = Prompts(), text(1, 1_003)
    prompts.add("first", turn)
    why = prompts.add("second", turn + text(2, 600), cached=62)
    assert (why.reason, why.page) == ("new", 62)
    assert set(why.tokens) == {"new", "tail"}


@pytest.mark.parametrize("line", [[5] * 9, [5] * 10, [5] * 11, [5] * 200, []], ids=len)
def test_a_changed_line_near_the_head(line: list[int]) -> None:
    """Whether the line has as many tokens as before or not: page borders behind it have moved."""
    prompts, head, rest = Prompts(), text(1, 100), text(2, 3_000)
    prompts.add("first", [*head, *text(3, 10), *rest])
    why = prompts.add("second", [*head, *line, *rest, *text(4, 500)], cached=6)
    assert (why.reason, why.page, why.other) == ("changed", 6, "first")
    assert why.tokens["changed"] == pytest.approx(3_000, rel=0.15)
    assert why.tokens["new"] == pytest.approx(500 + len(line), abs=450)


def test_tools_in_another_order() -> None:
    prompts, tools, rest = Prompts(), [text(seed, 150) for seed in range(6)], text(9, 2_000)
    prompts.add("first", [*chain(*tools), *rest])
    why = prompts.add("second", [*chain(*tools[::-1]), *rest])
    assert (why.reason, why.page, why.other) == ("changed", 0, "first")


def test_pages_that_were_evicted_are_told_with_time_and_tier() -> None:
    prompts, turn = Prompts(), text(1, 1_003)
    prompts.add("first", turn)
    keys = prompts.keys(turn)
    prompts.removed(keys[20:], "GPU")
    prompts.removed(keys[20:], "CPU")
    when = prompts.now
    why = prompts.add("second", turn + text(2, 100), cached=20)
    assert (why.reason, why.page, why.tier, why.evicted, why.other) == ("evicted", 20, "CPU", when, "first")
    assert why.tokens == {"evicted": 42 * PAGE, "new": 96, "tail": 15}


def test_output_that_was_evicted_was_in_no_prompt() -> None:
    prompts, turn = Prompts(), text(1, 512)
    prompts.add("first", turn[:256])
    prompts.removed(prompts.keys(turn)[20:], "DISK")
    assert prompts.add("second", turn, cached=20).tier == "DISK"


def test_pages_of_a_process_that_died_are_lost() -> None:
    prompts, turn = Prompts(), text(1, 1_003)
    prompts.add("first", turn)
    why = prompts.add("second", turn)
    assert (why.reason, why.tier, why.evicted) == ("evicted", None, None)


def test_a_prompt_that_another_request_computes() -> None:
    prompts, turn = Prompts(), text(1, 1_003)
    prompts.add("first", turn, done=False)
    why = prompts.add("second", turn)
    assert (why.reason, why.other) == ("concurrent", "first")


@pytest.mark.parametrize(
    ("reason", "first", "second"),
    [
        ("tenant", {"tenant": "a"}, {"tenant": "b"}),
        ("tenant", {"tenant": "a", "salt": "x"}, {"tenant": "b", "salt": "x"}),
        ("salt", {"tenant": "a", "salt": "x"}, {"tenant": "a"}),
        ("adapter", {}, {"adapter": "french"}),
        ("model", {}, {"namespace": msgspec.structs.replace(NAMESPACE, model=b"n" * 16)}),
        ("model", {}, {"namespace": msgspec.structs.replace(NAMESPACE, kv_dtype="bfloat16")}),
    ],
)
def test_the_same_prompt_of_another_kind(reason: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    prompts, turn = Prompts(), text(1, 1_003)
    prompts.add("first", turn, **first)
    why = prompts.add("second", turn, **second)
    assert (why.reason, why.page, why.other) == (reason, 0, "first")
    shown = why.for_client()
    assert shown.other == ""
    assert shown.reason == ("new" if reason in ("tenant", "salt") else reason)
    assert sum(shown.tokens.values()) == len(turn)


@pytest.mark.parametrize("theirs", [{"tenant": "a"}, {"tenant": "b", "salt": "x"}], ids=["tenant", "salt"])
@pytest.mark.parametrize("seed", range(15))
def test_prompts_of_others_change_nothing_of_what_a_client_is_told(seed: int, theirs: dict[str, Any]) -> None:
    """The same requests of a client, with and without another tenant that sends parts of the same texts between."""
    reasons: list[list[NotCached]] = []
    for crowded in (False, True):
        rng, prompts = random.Random(seed), Prompts(1 << 19)
        reasons.append([])
        for number in range(20):
            mine = rng.random() < 0.5
            tokens = text(rng.randrange(3), rng.randrange(200)) + text(rng.randrange(9), rng.randrange(400))
            tokens.append(1)
            adapter, cached = rng.choice(["", "french"]), rng.randrange(len(prompts.keys(tokens)) + 1)
            actual, evict = rng.randrange(len(tokens)), rng.random() < 0.3
            whose: dict[str, Any] = {"tenant": "b"} if mine else theirs
            if mine or crowded:
                why = prompts.add(str(number), tokens, cached, adapter=adapter, **whose)
                if mine:
                    reasons[-1].append(why.settled(len(tokens), actual).for_client())
                if evict:
                    prompts.removed(prompts.keys(tokens, adapter=adapter, **whose), "CPU")
    assert [(why.reason, why.page, why.tokens, [*why.tokens]) for why in reasons[0]] == [
        (why.reason, why.page, why.tokens, [*why.tokens]) for why in reasons[1]
    ]
    assert not any(why.other for why in reasons[1])


def test_another_template_around_the_same_messages() -> None:
    prompts, messages = Prompts(), [text(seed, 300) for seed in range(5)]
    prompts.add("first", [*chain(*([1, 2, *each] for each in messages))], template="one")
    why = prompts.add("second", [*chain(*([3, 4, 5, 6, *each] for each in messages))], template="two")
    assert (why.reason, why.other) == ("template", "first")


def test_all_tokens_are_computed_for_log_probabilities_of_the_prompt() -> None:
    prompts = Prompts()
    spec = GenerationRequest("r", pack_tokens(text(1, 100)), SamplingParams(prompt_logprobs=0))
    keys = prompts.keys(text(1, 100))
    why = prompts.history.add_prompt(PlacedPrompt("r", spec, b"r" * 16, keys, NAMESPACE, Timeline(0.0)), 0, 1.0)
    assert why.tokens == {"prompt_logprobs": 100}


def test_what_was_computed_although_it_was_cached_is_recomputed() -> None:
    why = NotCached("new", 64, {"new": 32, "tail": 4}, PAGE)
    assert why.settled(100, 64) is why
    early = why.settled(100, 40)
    assert (early.reason, early.page, early.tokens) == ("recomputed", 2, {"recomputed": 24, "new": 32, "tail": 4})
    late = why.settled(100, 98)
    assert (late.reason, late.page, late.tokens) == ("tail", 6, {"tail": 2})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(1, 300), st.booleans()), max_size=12),
    st.sampled_from([1, 64, SLOTS]),
    st.data(),
)
def test_every_token_has_one_reason_whatever_came_before(
    turns: list[tuple[int, int, int, bool]], slots: int, data: st.DataObject
) -> None:
    """Prompts of a few conversations are cut and continued anywhere, and pages go. In tables as small as one entry the
    reasons add up, and the first one is of the page behind those that are cached."""
    prompts = Prompts(slots)
    for number, (seed, shared, more, evict) in enumerate(turns):
        tokens = text(seed, shared) + text(number + 10, more)
        keys = prompts.keys(tokens, tenant=str(seed % 2))
        cached = data.draw(st.integers(0, len(keys)))
        why = prompts.add(str(number), tokens, cached, tenant=str(seed % 2), done=data.draw(st.booleans()))
        assert why.reason == next(iter(why.tokens))
        assert all(count > 0 for count in why.tokens.values())
        actual = data.draw(st.integers(0, len(tokens)))
        settled = why.settled(len(tokens), actual)
        assert sum(settled.tokens.values()) == len(tokens) - actual
        assert sum(settled.for_client().tokens.values()) == len(tokens) - actual
        if evict:
            prompts.removed(keys[::-1], "CPU")
