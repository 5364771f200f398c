"""Who takes work at this moment, and what the live stores have of a prefix. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Mapping

from baton.messages import LowerTier, TierSpeed
from kvstore.cost import DEFAULT_SPEEDS
from kvstore.prefix_map import Match
from router.peers import Member, Members
from router.reach import Store

_NOTHING = Match(0)
_UNANSWERED = 16  # Decodes on their way to one worker; were there no limit, a full worker would refuse a whole queue


def takes_work(member: Member) -> bool:
    """Whether a decode worker may have room."""
    return not member.unresponsive and member.busy_since is None and len(member.unanswered) < _UNANSWERED


def another_maker(members: Members, node: str, most: int, avoid: Collection[str]) -> Member | None:
    """The prefill worker of `node` that has least to compute, of those that take a prompt now. Each takes `most`."""
    able = [
        member
        for member in members.open("prefill")
        if member.peer.node == node and member.incarnation not in avoid
        if slots(member, most) > 0
    ]
    return min(able, key=lambda m: (sum(prompt.new for prompt in m.slots.values()), m.peer.name), default=None)


def slots(member: Member, most: int) -> int:
    """Prompts that a prefill worker which takes `most` may still be given, other routers' counted. Where we have none
    it is worth asking all the same: who was refused is next (`baton.turns`), and who never asks never is."""
    if member.unresponsive or member.busy_since is not None:
        return 0
    return max(most - len(member.slots) - member.strangers, 0 if member.slots else 1)


def stores(members: Members, held: Mapping[str, Match], avoid: Collection[str]) -> list[Store]:
    """The live store of each node, unless its loop hangs. Those to `avoid` serve their own node and no other."""
    able = [member for member in members.of("store") if not member.unresponsive]
    return [store_of(member, held, serves=member.incarnation not in avoid) for member in able]


def store_of(member: Member, held: Mapping[str, Match], *, serves: bool) -> Store:
    """What that store has. An arena is evicted from the leaves, so what is only on the disk follows what is in it."""
    match = held.get(member.incarnation, _NOTHING)
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
