"""Closed loops: prompts that continue answers, times after them, users, and the front before the router."""

import msgspec
import pytest

from baton.errors import ConfigError
from simulator.advice import Objectives, Trial
from simulator.cluster import Layout
from simulator.mooncake import TraceLine
from simulator.sessions import Play, Sessions, recordings
from simulator.timing import FrontTimes
from simulator.trials import Setting, demand, serve
from simulator.workloads import Arrival, Wishes, scripted_answer
from tests.simulator.simulated import PAGE, STEP, cluster, timing

TURNS = [
    TraceLine(0, 1_300, 100, (7, 8, 9), "fix", after_ms=None),
    TraceLine(9_000, 1_500, 60, (7, 8, 10), "fix", 0, 1_300, 2_000),  # the whole answer, then 100 tokens
    TraceLine(9_000, 1_550, 60, (7, 8, 10, 11), "fix", 1, 1_500, 3_000),  # a cut answer: 50 of 60 tokens
    TraceLine(9_000, 1_400, 5, (7, 8, 12), "fix", 0, 1_100, 1_000),  # another branch of the first prompt
]
OTHER = [TraceLine(0, 1_100, 10, (7, 20, 21), "ask")]


def play(sessions: Sessions, count: int) -> tuple[list[Arrival], list[bytes]]:
    """Play the first turns of one session by hand."""
    arrivals, answers = [sessions.begin(0.0, 1e9)], []
    for number in range(count):
        last = arrivals[-1]
        answers.append(scripted_answer(last.output, 50 + number, 99))
        following = last.play.next(last, answers[-1], 0.0)
        assert following is not None
        arrivals.append(following)
    return arrivals, answers


def test_a_prompt_continues_the_answer_to_its_parent() -> None:
    arrivals, answers = play(Sessions(TURNS, Wishes(), 1), 3)
    first, second, third, fourth = (arrival.text for arrival in arrivals)
    assert [len(arrival.text) // 4 for arrival in arrivals] == [arrival.prompt for arrival in arrivals]
    assert second[: 4 * 1_400] == first + answers[0]
    assert third == second + answers[1][: 4 * 50]
    assert fourth[: 4 * 1_100] == first[: 4 * 1_100]
    assert fourth[4 * 1_100 : 4 * 1_300] != first[4 * 1_100 :]
    assert [arrival.at for arrival in arrivals] == [0.0, 2.0, 3.0, 1.0]
    assert [arrival.possible for arrival in arrivals] == [0, 1_400, 1_549, 1_100]


def test_plays_share_what_recordings_share_and_nothing_else() -> None:
    sessions = Sessions(TURNS + OTHER, Wishes(), 1)
    begins = [sessions.begin(0.0, 1e9) for _ in range(4)]
    assert [arrival.possible for arrival in begins] == [0, PAGE, PAGE, PAGE]
    assert len({arrival.text[: 4 * PAGE] for arrival in begins}) == 1
    assert len({arrival.text[: 4 * (PAGE + 2)] for arrival in begins}) == 4
    assert {arrival.prompt for arrival in begins[:2]} == {1_300, 1_100}, "every recording before one repeats"


@pytest.mark.parametrize(("parent", "shared"), [(1, 10), (-2, 0), (0, 1_301), (0, -1), (-1, 5)])
def test_turns_that_do_not_fit_their_parents(parent: int, shared: int) -> None:
    with pytest.raises(ConfigError, match="turn 1 of session 'fix'"):
        recordings([TURNS[0], TraceLine(1, 1_400, 5, (7,), "fix", parent, shared, 0)])


def test_a_turn_follows_the_answer_after_its_gap_and_finds_its_pages() -> None:
    served = cluster("1P+1D")
    measures = served.run(Sessions(TURNS, Wishes(), 1).users(1, 50.0))
    table = measures.table()
    turns = len(table["arrived"])
    assert turns > len(TURNS)
    assert (table["finished"] == 1).all()
    ends = table["arrived"] + table["seconds"]
    assert (table["arrived"] < 52.0 + 1e-6).all()
    gaps = [late - early for early, late in zip(ends, table["arrived"][1:], strict=False)]
    assert gaps[:3] == pytest.approx([2.0, 3.0, 1.0])
    assert table["cached"][1] == 1_399  # all that was computed, the beginning of a page among it
    assert (table["cached"][:4] <= table["possible"][:4]).all()
    assert (table["possible"][:4] - table["cached"][:4] < PAGE).all()


def test_a_session_ends_with_an_answer_that_is_missing() -> None:
    first = Sessions(TURNS, Wishes(), 1).begin(0.0, 1e9)
    assert isinstance(first.play, Play)
    following = first.play.next(first, b"", 5.0)
    assert following.play is not first.play
    assert following.at > 0
    assert Sessions(TURNS, Wishes(), 1).begin(0.0, 0.0).play.next(first, b"", 5.0) is None  # pyright: ignore[reportOptionalMemberAccess]


def test_a_front_reads_one_request_after_another() -> None:
    model = msgspec.structs.replace(timing(), front=FrontTimes(request=0.5, token=1e-3))
    load = [Arrival(0.0, (1, 2), 1_000, 5, 10), Arrival(0.0, (3, 4), 1_000, 5, 10)]

    def first_tokens(front: bool) -> list[float]:
        served = cluster("1P+2D", model=model if front else timing())
        return sorted(served.run(iter(load)).table()["ttft"])

    plain, behind = first_tokens(False), first_tokens(True)
    assert behind[0] == pytest.approx(1.5 + plain[0], abs=0.05)
    assert behind[1] == pytest.approx(3.0 + plain[0], abs=0.2)


def test_advice_counts_users() -> None:
    model = timing()
    setting = Setting([], model, model.configuration(PAGE, {}), Objectives(2.0, 0.05), 1, TURNS, 40)
    offered = demand(setting)
    new = 1_300 + 100 + 1 + 300
    assert offered.prefill == pytest.approx(10 * (4 * STEP.fixed + STEP.token * new))
    assert offered.span > 10 * 6.0
    few, many = serve(setting, Trial(Layout(1, 1), 0)), serve(setting, Trial(Layout(1, 1), 20))
    assert few == serve(setting, Trial(Layout(1, 1), 0))
    assert many.rate > 1.5 * few.rate
