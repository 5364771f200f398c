"""What is remembered of requests: each attempt's choice and course, bounded in number and in what was weighed."""

import msgspec
import pytest

from baton.errors import RequestNotFound
from baton.messages import MIXED, Accepted, KvCompression, Prefilled, Refused, Started
from baton.operator_api import NotCached
from kvstore.events.wire_format import BlockRemoved, KvEventBatch
from kvstore.keys import namespace_root, page_keys, split_keys
from router.dashboard import operator_views
from router.events import ClientGone, KvEvents
from router.placement.types import Candidate, Placement, PredictedTtft
from router.request import Attempt, Request
from router.requests.explain import SHOWN, ConsideredPlacements, Explanations, RequestRecord, reason
from tests.router.lab import Lab, lab_with, named
from tests.router.model import NAMESPACE, PAGE, card, submit


def explained(lab: Lab, name: str = "r") -> RequestRecord:
    return lab.state.explain(name)


# --- one request, from its coming to its end ---


def test_a_split_request_hop_by_hop(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.submit(prompt=50)
    account = explained(lab).attempts[0]
    assert (account.decode, account.prefill) == ("decode-0", "prefill-0")
    assert (account.cached, account.actually_cached) == (0, None)
    assert explained(lab).running
    lab.now += 1
    lab.say(decode, Accepted("r", 1, 0))
    lab.now += 1
    lab.say(prefill, Prefilled("r", 1, computed=48, hit=0, stored=12))
    lab.now += 1
    lab.say(decode, Started("r", 1, 0, 12))
    lab.now += 1
    lab.tokens(decode, "r", 1, 50, 9, 9, computed=2)
    assert account.actually_cached == 0
    lab.now += 3
    lab.tokens(decode, "r", 1, 52, 9, 9, 9, 9, finish="length", verified=3, accepted=2, saved=0.25)
    report = operator_views.explanation(explained(lab), lab.now)
    assert (report.attempts[0].proposals_accepted, report.attempts[0].speculation_saved_ms) == (2, 250)
    hops = ("placed", "accepted", "prefill_sent", "prefilled", "started", "first_token", "ended")
    assert report.attempts[0].hops == dict(zip(hops, (0, 1_000, 1_000, 2_000, 3_000, 4_000, 7_000), strict=True))
    assert (report.request.outcome, report.request.completion_tokens, report.request.attempts) == ("length", 6, 1)
    assert (report.request.ttft_ms, report.request.tpot_ms, report.request.e2e_ms) == (4_000, 600, 7_000)
    assert report.attempts[0].actual.ttft_ms == 4_000
    assert report.attempts[0].actual.start_ms == 4_000
    assert report.attempts[0].predicted.ttft_ms == pytest.approx(account.placement.predicted.total * 1_000)
    assert not explained(lab).running


def test_what_is_cached_is_predicted_and_found(lab: Lab) -> None:
    decode = lab.join("decode", "decode-0")
    order = submit("r", 50)
    lab.holds(decode, order, 10, medium="GPU")
    lab.submit(prompt=50)
    lab.say(decode, Accepted("r", 1, 10))
    lab.tokens(decode, "r", 1, 50, 9, computed=10)
    account = explained(lab).attempts[0]
    assert account.cached == account.actually_cached == 40


def test_attempts_keep_their_own_instants_and_why_they_ended(lab: Lab) -> None:
    first, second = lab.colocated(2)
    lab.submit(prompt=10)
    chosen = lab.to(lab.decode)
    lab.say(chosen, Refused("r", 1, "busy", "full"))
    other = second if chosen == first else first
    assert lab.to(lab.decode) == other
    lab.now += 1
    lab.say(other, Accepted("r", 2, 0))
    lab.tokens(other, "r", 2, 10, 9, computed=10)
    lab.now += 1
    lab.leaves(other)
    record = explained(lab)
    refused, died = record.attempts
    assert refused.end_reason == f"{refused.decode} is busy"
    assert refused.timeline.accepted is None
    assert died.timeline.accepted == lab.now - 1
    assert died.first_token == lab.now - 1
    assert "is gone" in died.end_reason
    assert not record.running
    assert record.waits
    lab.beat(chosen)  # it may have room again
    third = explained(lab).attempts[2]
    assert (third.start, third.resumes, third.predicted_ttft) == (11, True, None)
    report = operator_views.explanation(explained(lab), lab.now)
    assert [attempt.number for attempt in report.attempts] == [1, 2, 3]
    assert report.attempts[2].predicted.ttft_ms is None


def test_a_refusal_to_prefill_is_noted(lab: Lab) -> None:
    decode, _prefill, _store = lab.split()
    lab.join("prefill", "prefill-1")
    lab.submit(prompt=50)
    worker = explained(lab).attempts[0].prefill
    lab.say(decode, Accepted("r", 1, 0))
    lab.say(f"{worker}.1", Refused("r", 1, "busy", "two prompts here"))
    assert explained(lab).attempts[0].notes == [f"{worker} refuses to prefill: two prompts here"]


@pytest.mark.parametrize("numerics", ["test", MIXED])
def test_a_request_of_a_mixed_cluster_is_told_to_depend_on_its_path(lab: Lab, numerics: str) -> None:
    lab.join("decode", "decode-0", model=card(namespace=msgspec.structs.replace(NAMESPACE, numerics=numerics)))
    lab.submit()
    notes = operator_views.explanation(explained(lab), lab.now).attempts[0].notes
    assert ["model.numerics is mixed" in note for note in notes] == [True] * (numerics == MIXED)


def test_a_queued_request_tells_why(lab: Lab, decode: str) -> None:
    lab.submit()
    lab.say(decode, Refused("r", 1, "busy", "full"))
    lab.submit("s")
    lab.advance(0.1)
    assert not explained(lab).running
    lab.tell(ClientGone("r"))
    report = operator_views.explanation(explained(lab), lab.now)
    assert (report.request.outcome, report.request.waits_because) == ("the client went away", "")
    assert report.request.cached_tokens is None


# --- remembered requests ---


def test_the_last_are_remembered_also_by_the_names_of_clients() -> None:
    lab = lab_with(explain_requests=3)
    lab.colocated()
    for name in ("mine-1", "mine-2", "a-b-3", "yours-4"):
        lab.submit(name)
    assert [record.name for record in lab.state.recent(2)] == ["yours-4", "a-b-3"]
    assert explained(lab, "mine").name == "mine-2"
    assert explained(lab, "mine-2").name == "mine-2"
    assert explained(lab, "a-b").request_id == "a-b"
    with pytest.raises(RequestNotFound, match="explain_requests"):
        explained(lab, "mine-1")


def test_the_turns_of_a_session_tell_why_they_were_not_cached(lab: Lab, decode: str) -> None:
    turns = {"a-1": "agent", "b-2": "", "c-3": "agent"}
    for name, session in turns.items():
        order = lab.submit(name, 50, session=session, max_tokens=1)
        lab.say(decode, Accepted(name, 1, 0))
        lab.tokens(decode, name, 1, 50, 9, finish="length", computed=50 if name == "a-1" else 26)
        lab.holds(decode, order, 10, medium="GPU")
        keys = tuple(split_keys(page_keys(namespace_root(NAMESPACE), order.tokens, PAGE)))
        lab.now += 1
        lab.tell(KvEvents(KvEventBatch(decode, 1, (BlockRemoved(keys[6:10][::-1], "GPU"),))))
        lab.now += 2
    first, last = [operator_views.request_summary(one, lab.now) for one in lab.state.recent(9, "agent")[::-1]]
    assert (first.request_id, first.session, last.request_id) == ("a", "agent", "c")
    assert first.not_cached == NotCached(reason="new", page=0, token=0, tokens={"new": 48, "tail": 2})
    assert last.not_cached == NotCached(
        reason="evicted", page=6, token=24, tokens={"evicted": 24, "tail": 2}, tier="GPU", evicted_ms=2_000,
        other_request="b-2",
    )  # fmt: skip
    counts = lab.state.stats().counts
    assert counts.not_cached_tokens == {"new": 48, "evicted": 48, "tail": 6}
    assert sum(counts.not_cached_tokens.values()) + counts.cached_tokens == counts.prompt_tokens


def test_nothing_is_remembered_when_nothing_is_to_be() -> None:
    lab = lab_with(explain_requests=0)
    (decode,) = lab.colocated()
    lab.submit()
    lab.tokens(decode, "r", 1, 10, 9, finish="length")
    lab.end()
    assert lab.state.recent(9) == []


def test_a_request_that_outlives_its_record() -> None:
    lab = lab_with(explain_requests=1)
    (decode,) = lab.colocated()
    lab.submit("r")
    lab.submit("s")
    lab.tokens(decode, "r", 1, 10, 9, finish="length")
    lab.end("r")
    with pytest.raises(RequestNotFound):
        explained(lab, "r")


# --- what was weighed ---


def candidate(decode: str, prefill: str = "", why_not: str = "", **terms: float) -> Candidate:
    return Candidate(decode, prefill, 0, PredictedTtft(**terms), why_not)


def placed(explanations: Explanations, name: str, chosen: Candidate, weighed: ConsideredPlacements) -> None:
    request = Request(submit(name), 1, 0.0)
    explanations.submitted(request)
    plan = Placement(chosen.decode, predicted=chosen.predicted)
    request.attempt = Attempt(named(name, 1), plan, request.known, 0.0, chosen.decode, None)
    explanations.placed(request, chosen.decode, chosen.prefill, chosen.cached, weighed)


def test_the_best_are_shown_and_the_chosen_one_always() -> None:
    every = [candidate(f"decode-{i}", queue=float(i)) for i in range(100)]
    explanations = Explanations(10)
    placed(explanations, "r", every[70], ConsideredPlacements(100, lambda: every))
    record = explanations.find("r")
    shown, omitted = record.attempts[0].candidates()
    assert [one.decode for one in shown] == [*(f"decode-{i}" for i in range(SHOWN - 1)), "decode-70"]
    assert omitted == 100 - SHOWN


def test_what_was_weighed_is_bounded_and_the_rest_stays() -> None:
    explanations = Explanations(1_000)
    for i in range(150):
        placed(explanations, f"r-{i}", candidate("d"), ConsideredPlacements(1_000, lambda: [candidate("d")]))
    known = [record.attempts[0].considered is not None for record in explanations.last(1_000)]
    assert known == [True] * 100 + [False] * 50
    oldest = explanations.find("r-0")
    assert oldest.attempts[0].candidates() == ([], 0)


ALONE = candidate("a", queue=1.0, compute=0.5)
PAIR = candidate("a", "p", queue=1.0, compute=0.5)


@pytest.mark.parametrize(
    ("chosen", "others", "says"),
    [
        (ALONE, [], "the only way there was"),
        (ALONE, [candidate("b", why_not="is full")], "the only way there was"),
        (
            ALONE,
            [candidate("b", "p", queue=1.5, compute=0.6)],
            "600.0 ms quicker than b with p, most of it queueing (500.0 ms less)",
        ),
        (ALONE, [candidate("b", queue=1.5)], "as quick as b alone; less loaded, or next in turn"),
        (
            PAIR,
            [candidate("b", queue=1.0, compute=0.4)],
            "100.0 ms slower than b alone, where the prompt would hold up what decodes",
        ),
        (
            msgspec.structs.replace(PAIR, cached=16),
            [candidate("b", "p", queue=1.49)],
            "10.0 ms slower than b with p, with 16 tokens less to compute",
        ),
    ],
)
def test_the_choice_in_words(chosen: Candidate, others: list[Candidate], says: str) -> None:
    explanations = Explanations(1)
    placed(explanations, "r", chosen, ConsideredPlacements(1, lambda: [*others, chosen]))
    (record,) = explanations.last(1)
    account = record.attempts[0]
    assert reason(account, account.candidates()[0]) == says
    assert reason(account, others) == "", "what was weighed does not hold the choice"


def test_a_choice_that_is_not_laid_out_is_shown_by_its_plan() -> None:
    explanations = Explanations(1)
    placed(explanations, "r", ALONE, ConsideredPlacements(2, lambda: [candidate("b"), candidate("c")]))
    (record,) = explanations.last(1)
    shown, omitted = record.attempts[0].candidates()
    assert ({one.decode for one in shown}, omitted) == ({"a", "b", "c"}, 0)


def test_what_placement_weighed_can_still_be_read_when_workers_have_gone(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.join("decode", "decode-1")
    lab.submit(prompt=50)
    account = explained(lab).attempts[0]
    before = account.candidates()
    assert {(one.decode, one.prefill) for one in before[0]} >= {("decode-0", ""), ("decode-1", "")}
    (chosen,) = (one for one in before[0] if account.chose(one))
    assert chosen.predicted.total == pytest.approx(account.placement.predicted.total)
    assert reason(account, before[0])
    lab.leaves(prefill)
    lab.leaves(decode)
    lab.join("decode", "decode-0", incarnation="decode-0.2")
    assert account.candidates() == before


def test_a_wait_is_explained_by_what_was_weighed(lab: Lab, decode: str) -> None:
    lab.submit("r", prompt=40, ttft=0.000_001)
    report = operator_views.explanation(explained(lab), lab.now)
    assert report.request.state == "failed"
    assert [one.decode_worker for one in report.candidates] == ["decode-0"]
    assert report.candidates[0].cost.total_ms > 0
    assert not report.attempts
    lab.submit("s")
    lab.say(decode, Refused("s", 1, "busy", "full"))
    lab.join("decode", "decode-1", model=card(pool_pages=1))  # never large enough
    lab.submit("t")
    record = explained(lab, "t")
    assert record.waits
    lab.beat(decode)
    assert record.candidates() == ([], 0), "it has been placed"


def test_chosen_pages_are_told_once(lab: Lab) -> None:
    decode = lab.join("decode", "decode-0")
    lab.submit(prompt=50 * PAGE, kv_compression=KvCompression("snapkv", 20, 4, 40 * PAGE))
    for position in (50 * PAGE, 50 * PAGE, 50 * PAGE + 1):
        lab.tokens(decode, "r", 1, position, 9, chosen=tuple(range(3, 43)))
    (note,) = explained(lab).attempts[0].notes
    assert note.startswith("of the prompt's 50 pages the output keeps 40 beside sinks and window: 3, 4, 5")
    assert note.endswith(" 33, 34, …")
