"""Groups of layers with a window, over real workers and stores: what is computed, what moves and what stays."""

from __future__ import annotations

from typing import Literal

import pytest

from baton.config import DecodeConfig, PrefillConfig
from baton.messages import AttemptFailed, Decode, Prefill, Prefilled, SamplingParams, Tokens
from kvstore.keys import pack_tokens
from kvstore.window_groups import WindowGroups
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, reference

GROUPS = WindowGroups(2, 2 * PAGE, PAGE)
PREFILL = PrefillConfig(max_num_batched_tokens=16)
PROMPT = [at * 7 % 50 for at in range(10 * PAGE + 1)]
OTHER = [*PROMPT[: 6 * PAGE], *[at * 11 % 50 for at in range(4 * PAGE)]]
THIRD = [*PROMPT[: 6 * PAGE], *[at * 13 % 50 for at in range(4 * PAGE)]]


STATES = WindowGroups(2, 2, PAGE, states=True)


def make_rig(groups: WindowGroups = GROUPS) -> Rig:
    rig = Rig(200)
    rig.groups = groups
    return rig


def prefill(worker: RigWorker, tokens: list[int]) -> Prefilled:
    """Have a prompt computed and stored."""
    worker.handle(Prefill(f"p{len(worker.messages)}", 1, ROOT, pack_tokens(tokens)))
    worker.rig.settle()
    message = worker.messages[-1]
    assert isinstance(message, Prefilled)
    return message


def order(worker: RigWorker, prompt: list[int], count: int, *, remote: bool) -> None:
    fetch = -(-(len(prompt) - 1) // PAGE) if remote else 0
    greedy = SamplingParams(temperature=0)
    worker.handle(Decode("r", 1, ROOT, pack_tokens(prompt), len(prompt), count, greedy, (), fetch, remote))


def drawn(worker: RigWorker) -> list[int]:
    messages = [message for message in worker.messages if isinstance(message, Tokens)]
    return [token for message in messages for delta in message.deltas for token in delta.tokens]


@pytest.mark.parametrize(("groups", "pages"), [(GROUPS, 2), (STATES, 1)])
def test_the_store_has_window_pages_of_the_window_alone(groups: WindowGroups, pages: int) -> None:
    rig = make_rig(groups)
    assert prefill(rig.worker("prefill", 60, PREFILL), PROMPT[:-1]).stored == 10 + pages * groups.count
    assert rig.store.stats(0.0).sealed == 10 + pages * groups.count


@pytest.mark.technique("Pages by groups of layers")
@pytest.mark.parametrize("groups", [GROUPS, STATES])
def test_a_decode_worker_holds_window_pages_of_the_window_alone(groups: WindowGroups) -> None:
    rig = make_rig(groups)
    decode = rig.worker("decode", 60, DecodeConfig())
    prefill(rig.worker("prefill", 60, PREFILL), PROMPT[:-1])
    order(decode, PROMPT, 24, remote=True)
    (sequence,) = decode.state._sequences.values()
    most = 0
    while sequence.finish is None:
        decode.turn()
        most = max(most, sequence.window_pages.num_held)
    assert drawn(decode) == reference(PROMPT, 24)
    assert most <= (2 if groups.states else 4) * groups.count


@pytest.mark.parametrize("groups", [GROUPS, STATES])
def test_a_prompt_that_leaves_another_in_its_middle_is_computed_once_from_its_start(groups: WindowGroups) -> None:
    """On workers without a cache of their own. The second finds no window pages where the prompts part, and stores
    them. The third goes on from there."""
    rig = make_rig(groups)
    computed = [prefill(rig.worker("prefill", 60, PREFILL), each).computed for each in (PROMPT, OTHER, THIRD, PROMPT)]
    assert computed == [len(PROMPT), len(OTHER), len(THIRD) - 6 * PAGE, 0]


@pytest.mark.parametrize("groups", [GROUPS, STATES])
def test_a_decode_worker_goes_on_from_what_another_has_stored(groups: WindowGroups) -> None:
    """All that the first one has generated is in the store, with the window pages behind it."""
    rig = make_rig(groups)
    first = rig.worker("decode", 80, DecodeConfig())
    order(first, PROMPT, 14, remote=False)  # ends within a page, so that the next one looks at what is stored
    rig.settle()
    tokens = PROMPT + drawn(first)
    rig.kill(first)
    again = prefill(rig.worker("prefill", 80, PREFILL), tokens[:-1])
    assert again.computed == (len(tokens) - 1) % PAGE


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_step_that_may_have_changed_states_is_run_again(role: Literal["prefill", "decode"]) -> None:
    rig = make_rig(STATES)
    worker = rig.worker(role, 60, PREFILL if role == "prefill" else DecodeConfig())
    worker.most_tokens = 1
    if role == "prefill":
        worker.handle(Prefill("r", 1, ROOT, pack_tokens(PROMPT)))
    else:
        order(worker, PROMPT, 4, remote=False)
    rig.settle()
    message = worker.messages[-1]
    assert isinstance(message, AttemptFailed)
    assert message.reason == "internal"
