"""Whom placement may choose from at this moment: live members, with their work, their rates and their share of a
prefix. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from baton.messages import LowerTier, TierSpeed
from kvstore.cost import DEFAULT_SPEEDS
from kvstore.prefix_map import Match
from router.peers import Member, Members
from router.reach import Store

_NOTHING = Match(0)
_UNANSWERED = 16  # Decodes on their way to one worker; were there no limit, a full worker would refuse a whole queue


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A live decode worker. Pages are those of the prefix at hand, without a gap from the first."""

    incarnation: str
    name: str
    node: str
    busy_pages: int  # of everything that was dispatched to it and has not ended
    device_pages: int  # of the prefix, on its device
    rate: float = 0.0  # prompt tokens that it computes per second; 0: not measured


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A live prefill worker. `slots` are the prompts it may still be given."""

    incarnation: str
    name: str
    node: str
    busy_pages: int
    device_pages: int
    slots: int
    rate: float = 0.0


def takes_work(member: Member) -> bool:
    """Whether a decode worker may have room."""
    return member.busy_since is None and len(member.unanswered) < _UNANSWERED


def decode_candidates(
    members: Members, held: Mapping[str, Match], needs: int, avoid: Collection[str]
) -> list[DecodeCandidate]:
    """Decode workers that may have room now and whose pool could ever hold `needs` pages; those to `avoid` only when
    there is no other. `held`: who has how much of the prefix."""
    able = [
        member
        for member in members.open("decode")
        if takes_work(member) and member.hello.model and member.hello.model.pool_pages >= needs
    ]
    return [
        DecodeCandidate(
            incarnation=member.incarnation,
            name=member.peer.name,
            node=member.peer.node,
            busy_pages=member.pages,
            device_pages=held.get(member.incarnation, _NOTHING).pages,
            rate=member.load.prefill_rate,
        )
        for member in [member for member in able if member.incarnation not in avoid] or able
    ]


def prefill_candidates(
    members: Members, held: Mapping[str, Match], most: int, avoid: Collection[str]
) -> list[PrefillCandidate]:
    """Live prefill workers, also those without a slot; each takes `most` prompts. Those to `avoid` are never asked:
    the decode worker can always do without."""
    return [
        PrefillCandidate(
            incarnation=member.incarnation,
            name=member.peer.name,
            node=member.peer.node,
            busy_pages=member.pages,
            device_pages=held.get(member.incarnation, _NOTHING).pages,
            slots=0 if member.busy_since is not None else most - len(member.slots),
            rate=member.load.prefill_rate,
        )
        for member in members.open("prefill")
        if member.incarnation not in avoid
    ]


def stores(members: Members, held: Mapping[str, Match], avoid: Collection[str]) -> list[Store]:
    """The live store of each node. Those to `avoid` serve their own node and no other."""
    return [
        _store(member, held.get(member.incarnation, _NOTHING), serves=member.incarnation not in avoid)
        for member in members.of("store")
    ]


def _store(member: Member, match: Match, *, serves: bool) -> Store:
    """An arena is evicted from the leaves, so what is only on the disk follows what is in the arena."""
    speeds: dict[LowerTier, TierSpeed] = {**DEFAULT_SPEEDS, **{speed.tier: speed for speed in member.load.tiers}}
    on_disk = match.tiers.get("DISK", 0)
    return Store(
        incarnation=member.incarnation,
        node=member.peer.node,
        endpoint=member.hello.data if serves else "",
        host=match.pages - on_disk,
        disk=on_disk,
        disk_speed=speeds["disk"],
        remote_speed=speeds["remote"],
    )
