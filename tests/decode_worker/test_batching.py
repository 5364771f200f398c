"""What a step holds: decoding sequences, short and long tails, in which order and how much of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.config import DecodeConfig
from baton.messages import AttemptName, SamplingParams, StepSample
from decode_worker.batching import BatchBudget, build_batch, chunk_alignment
from decode_worker.sequence import Sequence, SequencePhase
from decode_worker.step_planner import StepPlanner
from engine.step.block_table import BlockTable
from engine.step.outcome import ScheduledBatch

PAGE = 16
NEVER = -1.0


def sequence(
    name: str, known: int, computed: int, arrival: int = 0, urgency: float = 0.0, joined: float = 0.0, page: int = PAGE
) -> Sequence:
    pages = BlockTable(range(-(-known // page)))
    result = Sequence(
        AttemptName(name, 1), b"", [7] * known, known, 100, SamplingParams(temperature=0), frozenset(), urgency, 0,
        arrival, page, phase=SequencePhase.RUNNING, pages=pages, computed=computed, running_since=joined,
    )  # fmt: skip
    result.remaining_prefill = result.pending
    return result


def decoding(name: str, arrival: int = 0) -> Sequence:
    return sequence(name, 40, 39, arrival)


def budget(
    tokens: int = 512, prompts: int = 64, tails: int = 64, overdue: float = NEVER, rate: float = 1_000.0,
    grain: int = PAGE,
) -> BatchBudget:  # fmt: skip
    return BatchBudget(tokens, prompts, tails, overdue, rate, grain)


def planned(running: list[Sequence], limits: BatchBudget) -> ScheduledBatch:
    decodes, has_tail = ([s for s in running if (s.pending > 1) == tail] for tail in (False, True))
    return build_batch(decodes, has_tail, limits)


def run(plan: ScheduledBatch, sequences: list[Sequence], step: int) -> None:
    """What the engine and the state do about a plan: decoding sequences have one token more, and its page."""
    by_name = {each.name: each for each in sequences}
    for name, chunk in plan.items():
        each = by_name[name]
        each.computed, each.last_step = chunk.end, step
        if chunk.sample is not None:
            each.tokens.append(7)
            each.pages.extend(range(len(each.pages), each.pages_needed))


def sizes(plan: ScheduledBatch) -> dict[str, int]:
    return {name.request: len(chunk.tokens) for name, chunk in plan.items()}


@pytest.mark.technique("Continuous batching")
def test_decoding_never_waits_for_a_prompt() -> None:
    plan = planned([sequence("long", 4_000, 0), decoding("a"), decoding("b")], budget(prompts=48))
    assert sizes(plan) == {"a": 1, "b": 1, "long": 48}


def test_a_short_tail_goes_before_a_long_one_that_came_earlier() -> None:
    tails = [sequence("long", 4_000, 0), sequence("short", 40, 32, arrival=1)]
    assert sizes(planned(tails, budget(prompts=48))) == {"short": 8, "long": 32}


@pytest.mark.technique("Chunked prefill")
def test_short_tails_leave_half_to_a_long_one() -> None:
    tails = [sequence(f"s{i}", 47, 32, i) for i in range(20)] + [sequence("long", 4_000, 0, 20)]
    plan = sizes(planned(tails, budget(prompts=128)))
    assert [name for name in plan if name != "long"] == ["s0", "s1", "s2", "s3"]
    assert plan["long"] == 64


def test_short_tails_take_what_long_ones_leave() -> None:
    tails = [sequence(f"s{i}", 47, 32, i) for i in range(20)] + [sequence("middle", 20, 0, 20)]
    assert sum(sizes(planned(tails, budget(prompts=128))).values()) > 128 - PAGE


def test_without_a_long_one_short_tails_come_in_parts() -> None:
    everybody = [decoding("d"), *(sequence(f"s{i}", 44, 32, 1 + i) for i in range(2))]
    seen: list[dict[str, int]] = []
    while any(each.pending > 1 for each in everybody):
        plan = planned(everybody, budget(tails=5))
        run(plan, everybody, len(seen))
        seen.append(sizes(plan))
    rest = [{"s0": 5}, {"s0": 5}, {"s0": 2, "s1": 3}, {"s0": 1, "s1": 5}, {"s0": 1, "s1": 4}]
    assert seen == [{"d": 1} | others for others in rest]
    late = [sequence("s", 47, 32, joined=1.0)]
    assert sizes(planned(late, budget(tails=5, overdue=2.0))) == {"s": 15}


def test_chunks_that_must_begin_at_fixed_borders_are_never_cut() -> None:
    tails = [sequence(f"s{i}", 47, 32, i) for i in range(2)]
    assert sizes(planned(tails, budget(tails=20))) == {"s0": 15, "s1": 5}
    assert sizes(planned(tails, replace(budget(tails=20), whole=True))) == {"s0": 15}
    planner = StepPlanner(DecodeConfig(), PAGE, [StepSample(0, 0, 1, 40, 0.01)] * 8, fixed_borders=True)
    assert sizes(planner.plan([decoding("d"), *tails], now=0.0)) == {"d": 1, "s0": 15}


def test_a_shorter_prompt_overtakes_a_much_longer_one_but_not_for_ever() -> None:
    tails = [sequence("long", 4_000, 0), sequence("middle", 100, 0, arrival=1, urgency=10.0)]
    assert next(iter(sizes(planned(tails, budget())))) == "middle"  # it takes 0.1 s, the other one 4
    tails[1].priority_time = 20.0
    assert next(iter(sizes(planned(tails, budget())))) == "long"


def test_a_tail_that_has_waited_too_long_is_run_whatever_it_costs_the_others() -> None:
    tails = [sequence(f"s{i}", 47, 32, i, joined=float(i)) for i in range(20)]
    long = [sequence("long", 4_000, 0, 20)]
    assert len(planned(tails + long, budget(prompts=32, overdue=9.5))) == 10 + 1
    assert len(planned(tails + long, budget(prompts=32, overdue=99.0))) == 20 + 1


def test_chunks_of_long_tails_end_with_a_page() -> None:
    assert sizes(planned([sequence("long", 4_000, 32)], budget(prompts=50))) == {"long": 48}


def test_large_pages_do_not_make_chunks_large() -> None:
    assert chunk_alignment(PAGE) == PAGE
    small = chunk_alignment(512)
    assert small < 512
    tails = [sequence("long", 4_000, 0, page=512), sequence("short", 4_100, 4_000, arrival=1, page=512)]
    assert sizes(planned(tails, budget(prompts=2 * small, grain=small))) == {"short": 100, "long": small}


def test_more_that_decode_than_a_step_holds_take_turns() -> None:
    everybody = [decoding(f"d{i}", i) for i in range(10)]
    turns = dict.fromkeys((each.name.request for each in everybody), 0)
    for step in range(1, 11):
        plan = planned(everybody, budget(tokens=4))
        assert len(plan) == 4
        for name in plan:
            turns[name.request] += 1
        run(plan, everybody, step)
    assert set(turns.values()) <= {3, 4, 5}


tails = st.builds(
    lambda pages, tail, joined: (pages * PAGE + tail, pages * PAGE, joined),
    st.integers(0, 5), st.integers(2, 200), st.floats(0, 10),
)  # fmt: skip


@given(
    st.integers(0, 20), st.lists(tails, max_size=12), st.integers(1, 64), st.integers(32, 300), st.integers(1, 40),
    st.floats(-1, 11),
)  # fmt: skip
def test_plans_keep_their_budget_and_starve_none(
    rows: int, prefilling: list[tuple[int, int, float]], tokens: int, prompts: int, parts: int, overdue: float
) -> None:
    sequences = [decoding(f"d{i}", i) for i in range(rows)]
    sequences += [
        sequence(f"t{i}", known, computed, rows + i, joined=joined)
        for i, (known, computed, joined) in enumerate(prefilling)
    ]
    prompts = max(2 * PAGE, min(prompts, tokens - rows))
    limits = BatchBudget(tokens, prompts, parts, overdue, 1_000.0, PAGE)
    waiting = {each.name.request for each in sequences if each.pending > 1}
    work = sum(each.pending for each in sequences if each.pending > 1)
    steps = 0
    while waiting:
        steps += 1
        by_name = {each.name: each for each in sequences}
        plan = planned(sequences, limits)
        ones = sum(by_name[name].pending == 1 for name in plan)
        others = sum(len(chunk.tokens) for name, chunk in plan.items() if by_name[name].pending > 1)
        assert ones == min(tokens, sum(each.pending == 1 for each in sequences))
        all_short = all(each.pending <= PAGE for each in sequences)
        assert others <= max(parts if all_short else prompts, tokens - ones)
        for name, chunk in plan.items():
            each = by_name[name]
            assert chunk.start == each.computed
            assert chunk.end == len(each.tokens) if chunk.sample else all_short or chunk.end % PAGE == 0
            assert chunk.pages is each.pages
            assert len(chunk.pages) >= -(-chunk.end // PAGE)
            if chunk.sample:
                waiting.discard(name.request)
        run(plan, sequences, steps)
        turns = 1 + -(-len(sequences) // tokens)  # a last token that a part has left comes in its turn
        most = len(prefilling) * (turns + -(-PAGE // parts)) + work // PAGE
        assert steps <= most, "somebody waits too long"


@given(st.integers(1, 30), st.integers(32, 256))
def test_the_first_token_after_a_hand_off_comes_within_a_bounded_number_of_steps(shorts: int, prompts: int) -> None:
    """However much prefills want: one that k short tails stand before waits for k / (half the budget in pages)."""
    everybody = [sequence(f"long{i}", 100_000, 0, i) for i in range(3)]
    everybody += [sequence(f"s{i}", 48, 32, 3 + i) for i in range(shorts)]
    each_step = max(1, prompts // 2 // PAGE)
    for step in range(1, -(-shorts // each_step) + 1):
        plan = planned(everybody, budget(prompts=prompts))
        run(plan, everybody, step)
        assert any(name.request.startswith("long") for name in plan)
    assert not [each for each in everybody if 1 < each.pending <= PAGE]


def test_no_step_has_more_rows_than_it_may_and_every_kind_gets_on() -> None:
    """What runs the model has memory for so many."""
    alone = [decoding(f"d{i}", i) for i in range(9)]
    short = [sequence(f"s{i}", 47, 32, i) for i in range(6)]
    long = [sequence(f"l{i}", 4_000, 0, i) for i in range(3)]
    limits = replace(budget(prompts=4_000, tails=4_000), rows=6)
    assert len(planned(alone, limits)) == 6
    seen: set[str] = set()
    for step in range(1, 5):
        plan = planned([*alone, *short, *long], limits)
        assert len(plan) == 6
        assert {name.request[0] for name in plan} == {"d", "s", "l"}
        seen |= {name.request for name in plan}
        for each in alone:
            each.last_step = step if each.name in plan else each.last_step
    assert {f"d{i}" for i in range(9)} <= seen
    assert len(planned(short, limits)) == 6
    assert len(planned([*long, *alone], limits)) == 5, "the first long one takes all tokens of prompts"
