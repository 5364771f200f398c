"""What prefill workers and stores say about prefixes that are to be pinned, and what follows from it. Pure."""

# pyright: strict

from __future__ import annotations

from baton import errors, messages
from baton.config import Config
from baton.messages import AttemptHeld, AttemptName, Heartbeat, PagesPinned, Refused, UnpinPages
from router.events import Failed
from router.members import MemberRecord
from router.outbox import Outbox
from router.prefix_pinning.pin import PinnedPrefix, PinPhase
from router.prefix_pinning.pinner import PrefixPinner

_SIGHTINGS = 2  # heartbeats after which we no longer wait for the message that would have said the same


class PinMessageHandler:
    """The workers' and stores' side of pinned prefixes."""

    def __init__(self, config: Config, pinner: PrefixPinner, outbox: Outbox) -> None:
        self._config = config
        self._pinner = pinner
        self._out = outbox

    # --- what prefill workers say ------------------------------------------------------------------------------------

    def answer(
        self, member: MemberRecord, message: messages.Prefilled | Refused | messages.AttemptFailed, now: float
    ) -> None:
        """Take a worker's message about an attempt. It is dropped if the attempt is over, or another worker's."""
        prefix = self._current(member, AttemptName(message.request, message.attempt))
        if prefix is None:
            return
        match message:
            case messages.Prefilled(computed=computed):
                if prefix.phase is PinPhase.PREFILLING:
                    self._pinner.prefilled(prefix, computed, now)
            case Refused(reason="too_large", message=text):
                self._pinner.end(prefix, Failed(errors.ContextTooLong(f"{member.peer.name}: {text}")))
            case Refused():
                member.mark_busy(prefix.attempt)
                self._pinner.wait(prefix, now, now)
            case messages.AttemptFailed(reason=reason, message=text):
                error = errors.from_reason(reason, text)
                if isinstance(error, errors.InvalidRequest | errors.DeadlineExpired):
                    self._pinner.end(prefix, Failed(error))
                else:
                    prefix.excluded.add(member.incarnation)
                    self._pinner.retry(prefix, f"{member.peer.name} failed: {reason}: {text}", now)

    def listed(self, member: MemberRecord, name: AttemptName, held: AttemptHeld, now: float) -> None:
        """Its worker has it: take from that what messages should have told and perhaps did not."""
        prefix = self._current(member, name)
        if prefix is None or prefix.phase is not PinPhase.PREFILLING:
            return
        prefix.gives_up_at = None
        if held.position > prefix.position:
            prefix.position, prefix.progress = held.position, now
        prefix.sightings += held.ended
        if prefix.sightings >= _SIGHTINGS:
            self._pinner.prefilled(prefix, None, now)

    def unread(self, member: MemberRecord, name: AttemptName, now: float) -> None:
        """Its worker's loop stands still and has not read it: the first worker that is free gets it."""
        prefix = self._current(member, name)
        if prefix is not None and prefix.phase is PinPhase.PREFILLING:
            self._pinner.wait(prefix, now, now)

    def lost(self, member: MemberRecord, name: AttemptName, now: float) -> None:
        """Its worker does not have it."""
        if (prefix := self._current(member, name)) is None:
            member.unassign(name)
        elif prefix.phase is PinPhase.PREFILLING:
            self._pinner.retry(prefix, f"{member.peer.name} does not have it", now)
        else:
            self._pinner.release(prefix)  # the pages may have been pinned in time; the store will say

    def _current(self, member: MemberRecord, name: AttemptName) -> PinnedPrefix | None:
        prefix = self._pinner.prefixes.get(name.request)
        if prefix is None or prefix.attempt != name or prefix.worker != member.incarnation:
            return None
        return prefix

    # --- what stores say ---------------------------------------------------------------------------------------------

    def pinned(self, store: MemberRecord, answer: PagesPinned, now: float) -> None:
        """Take a store's answer. The store unpins a prefix that is not order any more."""
        prefix = self._pinner.orders.get(answer.pin)
        if prefix is None or prefix.store != store.incarnation:
            self._out.send(store.incarnation, UnpinPages(answer.pin))
        elif answer.reason == "quota":
            self._pinner.end(prefix, Failed(self._over_quota(prefix)))
        elif answer.reason == "missing" or answer.pages != prefix.pages:
            self._missing(prefix, answer.pages, now)
        elif prefix.phase is PinPhase.PINNING:
            self._pinner.keep(prefix, now)

    def listed_pins(self, store: MemberRecord, beat: Heartbeat, now: float) -> None:
        """Compare the pins that a store lists with those it should have, and repair the difference. Another router's
        pins there serve all requests until their time is over."""
        listed = {held.request: held.position for held in beat.attempts}
        for pin in listed:
            order = self._pinner.orders.get(pin)
            if order is None or order.store != store.incarnation:
                self._out.send(store.incarnation, UnpinPages(pin))
        for pin, prefix in list(self._pinner.orders.items()):
            judged = prefix.phase is PinPhase.PINNED and prefix.store == store.incarnation and now < prefix.expires
            if judged and prefix.sequence <= beat.heard and listed.get(pin) != prefix.pages:
                self._pinner.log(
                    prefix, f"the store of node {prefix.node} has lost pages of it; it is made anew", warning=True
                )
                self._pinner.wait(prefix, now, now)

    def _missing(self, prefix: PinnedPrefix, pages: int, now: float) -> None:
        """Something was lost between making and pinning: an arena that is too full, most likely. Once is chance."""
        why = f"the store of node {prefix.node} has kept only {pages} of {prefix.pages} pages"
        if prefix.missed:
            self._pinner.end(prefix, Failed(errors.Overloaded(f"{why}, twice; its arena is too full, or too small")))
            return
        prefix.missed = True
        self._pinner.retry(prefix, why, now)

    def _over_quota(self, prefix: PinnedPrefix) -> errors.BatonError:
        whose = f"tenant {prefix.tenant!r}" if prefix.tenant else "a tenant"
        return errors.QuotaExceeded(
            f"{prefix.pages} pages of {prefix.page_bytes} bytes, with what is pinned already, are more than the "
            f"{self._config.store.pin_bytes} bytes that {whose} may pin on node {prefix.node}; remove some pins, or "
            "raise store.pin_bytes"
        )
