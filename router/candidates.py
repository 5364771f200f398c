"""Whom placement may choose from at this moment: live members, with their work and their share of a prefix. Pure."""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Mapping

from router.peers import Member, Members
from router.placement import DecodeCandidate, PrefillCandidate

_UNANSWERED = 16  # Decodes on their way to one worker; were there no limit, a full worker would refuse a whole queue


def takes_work(member: Member) -> bool:
    """Whether a decode worker may have room."""
    return member.busy_since is None and len(member.unanswered) < _UNANSWERED


def decode_candidates(
    members: Members, held: Mapping[str, int], needs: int, avoid: Collection[str]
) -> list[DecodeCandidate]:
    """Decode workers that may have room now and whose pool could ever hold `needs` pages; those to `avoid` only when
    there is no other. `held`: pages of the prefix by holder."""
    able = [
        member
        for member in members.of("decode")
        if takes_work(member) and member.hello.model and member.hello.model.pool_pages >= needs
    ]
    candidates: list[DecodeCandidate] = []
    for member in [member for member in able if member.incarnation not in avoid] or able:
        store = members.store_of(member.peer.node)
        candidates.append(
            DecodeCandidate(
                incarnation=member.incarnation,
                name=member.peer.name,
                node=member.peer.node,
                busy_pages=member.pages,
                device_pages=held.get(member.incarnation, 0),
                store_pages=held.get(store.incarnation, 0) if store else None,
            )
        )
    return candidates


def prefill_candidates(
    members: Members, held: Mapping[str, int], most: int, avoid: Collection[str]
) -> list[PrefillCandidate]:
    """Live prefill workers, also those without a slot; each takes `most` prompts. Those to `avoid` are never asked:
    the decode worker can always do without."""
    return [
        PrefillCandidate(
            incarnation=member.incarnation,
            name=member.peer.name,
            node=member.peer.node,
            busy_pages=member.pages,
            device_pages=held.get(member.incarnation, 0),
            slots=0 if member.busy_since is not None else most - len(member.slots),
        )
        for member in members.of("prefill")
        if member.incarnation not in avoid
    ]
