"""What a heartbeat proves of a worker's attempts, and how the difference to what the worker should have is repaired.

Messages about attempts may get lost with their link. Each heartbeat lists the attempts that a worker has, with their
positions, and how far it has read the router's messages. So state is truth, and messages are hints. Pure.
"""

# pyright: strict

from baton import messages
from baton.config import Config
from baton.messages import AttemptHeld, AttemptName, Cancel, Heartbeat
from router.events import PIN
from router.members import ClusterMembership, MemberRecord
from router.outbox import Outbox
from router.prefix_pinning.worker_messages import PinMessageHandler
from router.request import RequestPhase
from router.requests.lifecycle import RequestManager
from router.requests.worker_messages import WorkerMessageHandler

_SIGHTINGS = 2  # heartbeats after which we no longer wait for the message that would have said the same


class AttemptCheck:
    """Compares the attempts that a worker lists with those that it was given."""

    def __init__(
        self,
        config: Config,
        members: ClusterMembership,
        manager: RequestManager,
        worker_messages: WorkerMessageHandler,
        pin_messages: PinMessageHandler,
        outbox: Outbox,
    ) -> None:
        self._config = config
        self._members = members
        self._manager = manager
        self._worker_messages = worker_messages
        self._pin_messages = pin_messages
        self._out = outbox

    def compare(self, member: MemberRecord, beat: Heartbeat, now: float, *, standing: bool) -> None:
        """Repair the difference between what it lists and what it should have. `standing`: its loop stands still."""
        listed = {AttemptName(held.request, held.attempt): held for held in beat.attempts}
        for name in listed:
            if name not in member.assigned:
                self._out.send(member.incarnation, Cancel(name.request, name.attempt))
        for name in list(member.assigned):
            work = member.assigned.get(name)  # what one of them leads to may take others away
            if work is None:
                continue
            if (held := listed.get(name)) is not None:
                work.missing_in_heartbeat = False
                self._listed(member, name, held, now)
            elif work.sequence <= beat.heard:
                # Heartbeats overtake other messages: only the second without it proves that no answer was on its way.
                if work.missing_in_heartbeat:
                    self._lost(member, name, now)
                else:
                    work.missing_in_heartbeat = True
            elif standing:
                self._unread(member, name, now, hangs=not beat.step_age_ms)

    def _listed(self, member: MemberRecord, name: AttemptName, held: AttemptHeld, now: float) -> None:
        """It has the attempt: take from that what messages should have told and perhaps did not."""
        if name.request.startswith(PIN):
            self._pin_messages.listed(member, name, held, now)
            return
        if current := self._manager.find_served(member, name.request, name.attempt, "decode"):
            request, attempt = current
            attempt.listed_incomplete = attempt.listed_incomplete + 1 if held.incomplete else 0
            if held.incomplete:
                if attempt.listed_incomplete >= _SIGHTINGS:
                    pages = held.computed // self._config.pages.page_size
                    have = messages.FetchIncomplete(
                        name.request, name.attempt, pages, "its heartbeats say that it waits"
                    )
                    self._worker_messages.fetch_incomplete(request, attempt, have, now)
                return
            if attempt.phase is RequestPhase.PLACED:
                attempt.listed_before_accepted += 1
                if attempt.listed_before_accepted >= _SIGHTINGS:
                    self._worker_messages.accepted(request, attempt, 0, now)
                return
            if held.computed > attempt.computed:  # it may be a long prompt that brings no token for a while
                attempt.progressed_at = now
            attempt.computed = held.computed
            ahead = held.position > request.known or held.ended
            if ahead and attempt.missing_from == request.awaited:
                self._worker_messages.resend(request, attempt)
            attempt.missing_from = request.awaited if ahead else None
            return
        current = self._manager.find_served(member, name.request, name.attempt, "prefill")
        if held.position > member.positions.get(name, 0):
            member.positions[name] = held.position
            if current:
                current[1].progressed_at = now
        if current and held.ended and not current[1].prefilled:
            current[1].listed_ended += 1
            if current[1].listed_ended >= _SIGHTINGS:
                self._worker_messages.prefill_ended(*current, now)

    def _lost(self, member: MemberRecord, name: AttemptName, now: float) -> None:
        if name.request.startswith(PIN):
            self._pin_messages.lost(member, name, now)
            return
        if current := self._manager.find_served(member, name.request, name.attempt, "decode"):
            self._manager.retry(current[0], f"{member.peer.name} does not have it", now)
        elif current := self._manager.find_served(member, name.request, name.attempt, "prefill"):
            request, attempt = current
            if not attempt.needs_prefill:  # should its pages go, the decode worker will say what it has
                attempt.prefill = None
                member.unassign(name)
            else:
                self._manager.retry(request, f"{member.peer.name} does not have it", now)
        elif current := self._manager.find_helped(member, name.request, name.attempt):
            self._manager.release_helpers(*current, f"{member.peer.name} does not have it")

    def _unread(self, member: MemberRecord, name: AttemptName, now: float, *, hangs: bool) -> None:
        """Its loop has stood still for cluster.heartbeat_timeout_ms and has not read this order: another worker gets
        it.

        A worker in a long step reads the order when the step ends, so its orders stay where no other worker could take
        them. A worker is tried once for each request, so an attempt moves no more often than there are workers. Neither
        counts against the request's attempts. `hangs`: no step runs there."""
        if name.request.startswith(PIN):
            self._pin_messages.unread(member, name, now)
            return
        if current := self._manager.find_served(member, name.request, name.attempt, "decode"):
            request, others = current[0], [each for each in self._members.schedulable("decode") if each.takes_sequences]
        else:
            current = self._manager.find_served(member, name.request, name.attempt, "prefill")
            if current is None or not current[1].needs_prefill:
                return
            request, most = current[0], self._config.prefill.max_num_seqs
            others = [each for each in self._members.schedulable("prefill") if each.free_prefill_slots(most) > 0]
            if hangs:
                others.append(self._members.require_live(current[1].decode))  # it computes the prompt itself if need be
        if any(other.incarnation not in request.history.excluded for other in others):
            request.history.excluded.add(member.incarnation)
            self._manager.retry(request, f"{member.peer.name} does not read: its loop stands still", now, free=True)
