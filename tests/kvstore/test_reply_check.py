"""Replies that no store in its right mind gives. `tests/kvstore/world.py` checks those that the real one gives."""

from dataclasses import dataclass

import pytest

from baton.errors import MalformedMessage
from baton.messages import KEY_BYTES, Peer, TierSpeed
from baton.store_protocol import (
    Acquire,
    Attached,
    AttachRefused,
    EndLease,
    LeasedPage,
    LowerTierHits,
    NotReserved,
    PagesReady,
    PagesUnavailable,
    Promote,
    Release,
    Released,
    Reserve,
    Reserved,
    Seal,
    Sealed,
    StoreCall,
    StoreHeartbeat,
    StoreReply,
    TierPages,
)
from kvstore.client.reply_check import ReplyCheck

SLOTS = 8
KEYS = bytes(range(3 * KEY_BYTES))
RESERVE, LOOKUP, HAND_OFF = Reserve(1, b"", KEYS), Acquire(2, KEYS), Acquire(2, KEYS, wait=True)
BOTH_SEALED = Seal(1, 0, (7, 8))


def ready(*indices: int, slot: int = 5) -> PagesReady:
    return PagesReady(2, tuple(LeasedPage(index, slot, 9) for index in indices))


def hits(first: int, *pages: int) -> LowerTierHits:
    return LowerTierHits(2, first, tuple(TierPages(TierSpeed("disk", 0.1, 1e6), each) for each in pages))


@dataclass
class Case:
    name: str
    fitting: list[StoreCall | StoreReply]
    wrong: StoreReply


WRONG = [
    Case("attached twice", [], Attached(Peer("store", "s", "n", "s-1", 1), SLOTS, 64)),
    Case("refused later", [], AttachRefused("x", "y")),
    Case("too few slots", [RESERVE], Reserved(1, (0, 1))),
    Case("too many slots", [RESERVE], Reserved(1, (0, 1, None, 2))),
    Case("a slot beyond the arena", [RESERVE], Reserved(1, (0, 1, SLOTS))),
    Case("a slot below the arena", [RESERVE], Reserved(1, (0, 1, -1))),
    Case("one slot for two pages", [RESERVE], Reserved(1, (0, 1, 1))),
    Case("reserved twice", [RESERVE, Reserved(1, (0, None, 1))], Reserved(1, (0, None, 1))),
    Case("refused after all", [RESERVE, Reserved(1, (0, 1, 2))], NotReserved(1, "full")),
    Case("reserved what was to be read", [LOOKUP], Reserved(2, (0, 1, 2))),
    Case("sealed what nothing has sealed", [RESERVE, Reserved(1, (0, 1, 2))], Sealed(1, 0, 1)),
    Case("sealed more", [RESERVE, Reserved(1, (0, 1, 2)), BOTH_SEALED], Sealed(1, 0, 3)),
    Case("sealed without end", [RESERVE, Reserved(1, (0, 1, 2)), BOTH_SEALED], Sealed(1, 0, 2**62)),
    Case("sealed twice", [RESERVE, Reserved(1, (0, 1, 2)), BOTH_SEALED, Sealed(1, 0, 2)], Sealed(1, 1, 1)),
    Case("a page beyond the chain", [HAND_OFF], ready(3)),
    Case("a page in no slot", [HAND_OFF], ready(0, slot=SLOTS)),
    Case("a page twice", [HAND_OFF, ready(1)], ready(1)),
    Case("a page twice at once", [HAND_OFF], ready(1, 1)),
    Case("a page that is to be written", [RESERVE], PagesReady(1, (LeasedPage(0, 0, 0),))),
    Case("lower tiers have more than is asked", [LOOKUP, ready(0)], hits(1, 1, 2)),
    Case("lower tiers have no end", [LOOKUP], hits(0, 2**62)),
    Case("lower tiers twice", [LOOKUP, hits(0, 3)], hits(0, 3)),
    Case("lower tiers of a hand-off", [HAND_OFF], hits(0, 3)),
    Case("released what is still read", [HAND_OFF, ready(0)], Released(2, (0,), (True,))),
    Case("released another", [HAND_OFF, ready(0, 1), Release(2, (0,))], Released(2, (1,), (True,))),
    Case("released twice", [HAND_OFF, ready(0), Release(2, (0,))], Released(2, (0, 0), (True, True))),
    Case("more held than released", [HAND_OFF, ready(0), Release(2, (0,))], Released(2, (0,), (True, True))),
    Case("fewer held than released", [HAND_OFF, ready(0), Release(2, (0,))], Released(2, (0,), ())),
    Case("a page below the chain", [HAND_OFF, ready(0), Release(2, (0,))], Released(2, (-1,), (True,))),
    Case("unavailable beyond the chain", [HAND_OFF], PagesUnavailable(2, 3)),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_reply_that_no_call_has_asked_for(case: Case) -> None:
    check = ReplyCheck(SLOTS)
    for each in case.fitting:
        if isinstance(each, StoreCall):
            check.called(each)
        else:
            check.heard(each)
    with pytest.raises(MalformedMessage):
        check.heard(case.wrong)


def test_what_is_said_of_an_ended_lease_counts_for_nothing() -> None:
    check = ReplyCheck(SLOTS)
    check.called(RESERVE)
    check.called(EndLease(1))
    check.heard(Reserved(1, (99,)))
    check.heard(StoreHeartbeat((1, 99)))
    check.called(BOTH_SEALED)
    check.heard(Sealed(1, 5, 9))


def test_every_answer_of_a_store_that_does_as_asked() -> None:
    check = ReplyCheck(SLOTS)
    for each in (
        RESERVE, Reserved(1, (0, None, 1)), Seal(1, 0, (7,)), Seal(1, 2, (8,)), Sealed(1, 0, 1), PagesUnavailable(1, 2),
        LOOKUP, ready(0), hits(1, 1), Promote(2, 2), PagesUnavailable(2, 2), ready(1), Release(2, (0, 1)),
        Released(2, (0, 1), (True, False)), EndLease(2), HAND_OFF, ready(2), ready(0, 1), Release(2, (2,)),
        Release(2, (0,)), Released(2, (2,), (True,)), Released(2, (0,), (True,)), EndLease(2), RESERVE, EndLease(1),
        RESERVE, NotReserved(1, "behind"),
    ):  # fmt: skip
        check.called(each) if isinstance(each, StoreCall) else check.heard(each)
