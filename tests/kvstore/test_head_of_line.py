"""Whose turn it is when slots are short: at most one prompt of a node holds pages while it waits for slots."""

from baton.store_protocol import EndLease, LeaseHeartbeat, NotReserved, Reserve, StoreReply
from kvstore.server.events import Disconnected
from tests.kvstore.chains import keys
from tests.kvstore.store_fixtures import Rig


def reserve(rig: Rig, connection: int, lease: int, chain: str, prompt: int) -> StoreReply:
    """Ask for the slots of a chain, as a prompt does."""
    (reply,) = rig.say(connection, Reserve(lease, b"", b"".join(keys(chain)), prompt=prompt))
    return reply


def refused(reply: StoreReply) -> str:
    assert isinstance(reply, NotReserved), reply
    return reply.reason


def busy() -> tuple[Rig, int, int, int]:
    """A store whose slots are taken but for one, and two workers that want more. The first has asked."""
    rig = Rig(slots=4)
    holder, first, second = (rig.attach(pid) for pid in (1, 2, 3))
    rig.write(holder, 1, "zzz", hold=True)
    assert refused(reserve(rig, first, 10, "ab", 9)) == "full"
    return rig, holder, first, second


def test_while_a_prompt_waits_others_get_no_slots_and_give_back_what_they_hold() -> None:
    rig, holder, first, second = busy()
    assert refused(reserve(rig, second, 20, "c", 8)) == "behind", "there would be a slot"
    assert not isinstance(reserve(rig, second, 21, "z", 8), NotReserved), "what is sealed already needs none"
    assert not isinstance(reserve(rig, second, 22, "d", 0), NotReserved), "a write-through holds nothing"
    rig.say(second, EndLease(22))
    rig.say(second, EndLease(21))
    rig.say(holder, EndLease(1))
    assert not isinstance(reserve(rig, first, 11, "ab", 9), NotReserved)
    assert not isinstance(reserve(rig, second, 23, "c", 8), NotReserved), "the head waits no longer"
    assert refused(reserve(rig, second, 24, "efg", 7)) == "behind", "it is the head still"
    rig.say(first, EndLease(9))
    assert refused(reserve(rig, second, 25, "efg", 7)) == "full", "now another prompt is"


def test_the_place_is_free_when_its_worker_forgets_it_or_does_not_list_it_or_is_gone() -> None:
    for ending in ("forgotten", "not listed", "disconnected"):
        rig, _, first, second = busy()
        match ending:
            case "forgotten":
                rig.say(first, EndLease(9))
            case "not listed":
                rig.say(first, LeaseHeartbeat((10,)))
            case _:
                rig.do(Disconnected(first))
        assert not isinstance(reserve(rig, second, 20, "c", 8), NotReserved), ending


def test_a_listed_place_stays_as_long_as_its_prompt_asks_again() -> None:
    rig, _, first, second = busy()
    rig.say(first, LeaseHeartbeat((9,)))
    for _ in range(3):
        rig.now += 2.0
        assert refused(reserve(rig, second, 20, "c", 8)) == "behind"
        assert refused(reserve(rig, first, 11, "ab", 9)) == "full"
    rig.now += 3.1
    assert not isinstance(reserve(rig, second, 21, "c", 8), NotReserved), "the first has not asked for too long"
    assert refused(reserve(rig, second, 22, "cde", 8)) == "full", "and lost its place"
    assert refused(reserve(rig, first, 12, "ab", 9)) == "behind"
