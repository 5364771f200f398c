"""Profiles, as the router's state knows them: one trace at a time, whichever messages are lost."""

import pytest

from baton.clock import Tick
from baton.errors import ProcessNotFound, TraceConflict
from baton.messages import Heartbeat, LoadReport, StartTrace, StopTrace
from router.events import ProfileProcess, StopProfile
from tests.router.lab import Lab


def beat(lab: Lab, sender: str, tracing: str, heard: int | None = None) -> None:
    heard = lab.counts[sender] if heard is None else heard
    lab.say(sender, Heartbeat(heard, LoadReport(), tracing=tracing))


def test_a_second_trace_waits_until_the_first_is_written(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.tell(ProfileProcess("decode-0", "a1", 5))
    assert lab.sent(StartTrace, decode) == [StartTrace("a1", 5)]
    for process in ("decode-0", "prefill-0", "store-0"):
        with pytest.raises(TraceConflict, match=r"decode-0 makes a trace already \(decode-0-a1.json\).*--stop"):
            lab.tell(ProfileProcess(process, "b2", 5))
    beat(lab, decode, "a1")
    beat(lab, prefill, "")
    with pytest.raises(TraceConflict, match="decode-0 makes a trace"):
        lab.tell(ProfileProcess("store-0", "b2", 5))
    beat(lab, decode, "")
    lab.tell(ProfileProcess("store-0", "b2", 5))
    assert lab.sent(StartTrace, store) == [StartTrace("b2", 5)]
    assert len(lab.sent(StartTrace)) == 2


def test_a_heartbeat_from_before_the_wish_ends_nothing(lab: Lab, decode: str) -> None:
    before = lab.counts[decode]
    lab.tell(ProfileProcess("decode-0", "a1", 5))
    beat(lab, decode, "", heard=before)
    with pytest.raises(TraceConflict):
        lab.tell(ProfileProcess("decode-0", "b2", 5))


def test_a_wish_that_was_lost_blocks_nothing_once_a_later_message_is_heard(lab: Lab, decode: str) -> None:
    lab.tell(ProfileProcess("decode-0", "a1", 5))
    lab.now += 0.3
    lab.tell(Tick())  # a heartbeat of the router's, which arrives
    beat(lab, decode, "")
    lab.tell(ProfileProcess("decode-0", "b2", 5))


def test_a_trace_of_another_router_or_of_a_processs_first_steps_counts(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    beat(lab, decode, "c3")
    with pytest.raises(TraceConflict, match=r"decode-0-c3.json"):
        lab.tell(ProfileProcess("prefill-0", "b2", 5))


def test_a_process_that_goes_takes_its_trace_along(lab: Lab, decode: str, prefill: str, store: str) -> None:
    lab.tell(ProfileProcess("decode-0", "a1", 5))
    lab.leaves(decode)
    lab.tell(ProfileProcess("prefill-0", "b2", 5))


def test_a_stop_names_the_trace_that_is_made(lab: Lab, decode: str, prefill: str, store: str) -> None:
    with pytest.raises(TraceConflict, match="decode-0 makes no trace"):
        lab.tell(StopProfile("decode-0"))
    with pytest.raises(ProcessNotFound, match="decode-7"):
        lab.tell(StopProfile("decode-7"))
    lab.tell(ProfileProcess("decode-0", "a1", 5))
    assert lab.state.profiles.tracing("decode-0") == ("a1", "a")
    lab.tell(StopProfile("decode-0"))
    assert lab.sent(StopTrace, decode) == [StopTrace("a1")]
    with pytest.raises(TraceConflict):  # until its file is written
        lab.tell(ProfileProcess("decode-0", "b2", 5))
    beat(lab, decode, "")
    lab.tell(ProfileProcess("decode-0", "b2", 5))
