"""Pinned prefixes: computed before anybody asks for them, and pinned. See `router.prefix_pinning.pin` for the
automaton.

Owns every prefix that is to be pinned or is. An attempt is work of a prefill worker like a request's, so heartbeats
list it and lost messages are repaired. Its name begins with `PIN`, which no request's does. The worker holds the pages
until the store has said that they are pinned.

Requests go first. A prefix is begun only while no request waits for a worker, one at a time on each prefill worker. It
leaves a prompt's place there free wherever there is more than one.

A store answers every PinPages, and is asked again when the answer does not come; its heartbeats list what it has pinned
for us. Pins are named anew with each attempt, so a late answer never counts for another. What another router pins is
its own: both may pin the same pages, under one name even, and neither sees or ends the other's. Pure.
"""

# pyright: strict

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from baton import errors
from baton.config import Config
from baton.messages import TOKEN_BYTES, AttemptName, Cancel, PinPages, Prefill, UnpinPages
from baton.operator_api import Pin
from kvstore.keys import namespace_root, split_keys
from router.events import PIN, Cancelled, Failed, PinAnswered, PinPrefix, UnpinPrefix
from router.members import AssignedAttempt, ClusterMembership, MemberRecord, PendingPrefill
from router.outbox import Outbox
from router.placement.cached_prefix import node_cache
from router.placement.kv_index import KvIndex
from router.prefix_pinning.pin import PinnedPrefix, PinPhase
from router.queueing.admission import ModelLimits, check_tokens
from router.queueing.waiting_queue import WaitingQueue

_LEAST_URGENT = 2**31 - 1  # the least urgent that a request can be
_MOST = 4_096  # prefixes; each costs its tokens, and a moment of every tick


class PrefixPinner:
    """Every prefix that is to be pinned or is."""

    def __init__(
        self,
        config: Config,
        limits: ModelLimits,
        members: ClusterMembership,
        pages: KvIndex,
        queue: WaitingQueue,
        outbox: Outbox,
    ) -> None:
        """`pages` has the holders of each page. `queue`: the requests that wait, which go first."""
        self._config = config
        self._limits = limits
        self._members = members
        self._pages = pages
        self._queue = queue
        self._out = outbox
        self._shut = False
        self._arrivals = 0
        self.prefixes: dict[str, PinnedPrefix] = {}  # by name
        self._waiting: dict[str, PinnedPrefix] = {}  # by name
        self.orders: dict[str, PinnedPrefix] = {}  # by what its store calls the pin

    # --- what clients want -------------------------------------------------------------------------------------------

    def pin_prefix(self, order: PinPrefix, now: float) -> None:
        """Everything that is wrong with the wish is told by its PinAnswered."""
        try:
            self._check(order)
        except errors.BatonError as error:
            self._out.put(PinAnswered(order.name, Failed(error)))
            return
        self._arrivals += 1
        give_up = now + self._config.router.queue_timeout_ms / 1_000
        prefix = PinnedPrefix.of(order, self._arrivals, self._config.pages.page_size, give_up)
        self.prefixes[prefix.name] = self._waiting[prefix.name] = prefix

    def unpin_prefix(self, order: UnpinPrefix, now: float) -> None:
        """Raises PinNotFound."""
        prefixes = [prefix for prefix in self.prefixes.values() if prefix.owner == (order.tenant, order.pin)]
        if not prefixes:
            raise errors.PinNotFound(
                f"there is no pin {errors.shown(order.pin)!r}; it may have ended, or belong to an earlier router"
            )
        for prefix in prefixes:
            self.end(prefix, Cancelled("the pin was removed"))

    def abandon(self, name: str, why: str) -> None:
        """The client has gone before the answer."""
        if (prefix := self.prefixes.get(name)) is not None and prefix.awaited:
            self.end(prefix, Cancelled(why))

    def _check(self, order: PinPrefix) -> None:
        """Raises BatonError for what could not, or may not, be pinned."""
        if self._shut:
            raise errors.Unavailable("this router is stopping")
        check_tokens(order.tokens, self._limits.vocab_size)
        tokens, size = len(order.tokens) // TOKEN_BYTES, self._config.pages.page_size
        card = self._members.card
        context = min(self._limits.max_context, card.max_context) if card else self._limits.max_context
        if tokens > context:
            raise errors.ContextTooLong(prompt=tokens, context=context)
        if tokens < size:
            raise errors.InvalidRequest(
                f"a prefix of {tokens} tokens has no full page of {size}; only full pages are kept"
            )
        if any(prefix.owner == (order.tenant, order.pin) and prefix.awaited for prefix in self.prefixes.values()):
            raise errors.InvalidRequest(f"pin {order.pin!r} is being made already")
        if len(self.prefixes) >= _MOST:
            raise errors.QuotaExceeded(f"{_MOST} prefixes are pinned, and a router keeps no more; remove some")
        if len(self._waiting) > self._config.router.max_queued:
            raise errors.Overloaded(f"{len(self._waiting)} prefixes wait to be pinned already")
        pin_bytes = self._config.store.pin_bytes
        if card is not None and (needed := tokens // size * card.page_bytes) > pin_bytes:
            raise errors.QuotaExceeded(
                f"the prefix takes {needed} bytes, and store.pin_bytes lets a tenant pin {pin_bytes} on one node"
            )
        if not self._config.cluster.prefill and not self._members.with_role("prefill"):
            raise errors.Unavailable(
                "this cluster has no prefill worker to compute a prefix; `baton scale --prefill 1`"
            )

    # --- attempts begin ----------------------------------------------------------------------------------------------

    def start_waiting(self, now: float) -> None:
        """Begin what can be: call when an event has been handled, after requests have been placed."""
        if not self._waiting or len(self._queue):
            return
        for prefix in sorted(self._waiting.values(), key=lambda prefix: prefix.arrival):
            free = self._free()
            if not free:
                return
            if now >= prefix.not_before:
                self._begin(prefix, free, now)

    def _free(self) -> list[tuple[MemberRecord, MemberRecord]]:
        """Prefill workers that may be given a prefix, each with its node's store."""
        most = max(1, self._config.prefill.max_num_seqs - 1)
        return [
            (worker, store)
            for worker in self._members.schedulable("prefill")
            if not worker.unresponsive
            and worker.busy_since is None
            and len(worker.pending_prefills) + worker.other_routers_requests < most
            if not any(name.request.startswith(PIN) for name in worker.pending_prefills)
            if (store := self._members.store_of(worker.peer.node)) is not None and not store.unresponsive
        ]

    def _begin(self, prefix: PinnedPrefix, free: list[tuple[MemberRecord, MemberRecord]], now: float) -> None:
        """Where most of it is already, so that little is computed and pages pinned twice count once."""
        card, size = self._members.card, self._config.pages.page_size
        assert card is not None, "a prefill worker without a model"
        namespace = card.namespace_of(prefix.adapter)
        root = namespace_root(namespace, prefix.tenant, prefix.salt)
        prefix.derive_keys(root, size)
        prefix.page_bytes = card.page_bytes
        matches = self._pages.map.match(split_keys(prefix.keys))
        held = {holder: match.pages for holder, match in matches.items()}

        def cost(pair: tuple[MemberRecord, MemberRecord]) -> tuple[bool, int, int, str]:
            worker, store = pair
            return (
                worker.incarnation in prefix.excluded,
                -held.get(store.incarnation, 0),
                worker.pages,
                worker.peer.name,
            )

        worker, store = min(free, key=cost)
        prefix.begin(worker.incarnation, store.incarnation, store.peer.node, now)
        del self._waiting[prefix.name]
        here = held.get(store.incarnation, 0)
        missing = prefix.pages - here
        node = node_cache(self._members, store, matches)
        message = Prefill(
            request=prefix.name,
            attempt=prefix.attempts,
            root=root,
            tokens=prefix.tokens,
            sources=node.sources(here, prefix.pages),
            priority=_LEAST_URGENT,
            deadline_ms=prefix.left_ms(now),
            adapter=namespace.adapter,
        )
        worker.assign_prefill(prefix.attempt, PendingPrefill(missing * size, here * size), now)
        worker.assign(prefix.attempt, AssignedAttempt(self._out.send(worker.incarnation, message), missing))
        self.log(prefix, f"attempt {prefix.attempts} on {worker.peer.name}: {prefix.pages} pages, {missing} missing")

    # --- attempts go on ----------------------------------------------------------------------------------------------

    def prefilled(self, prefix: PinnedPrefix, computed: int | None, now: float) -> None:
        """Every page is in the store, and held by the worker until it is pinned."""
        assert prefix.worker is not None, prefix.name
        worker = self._members.require_live(prefix.worker)
        worker.prefill_done(prefix.attempt)
        worker.assigned[prefix.attempt].pages = 0
        worker.clear_busy()
        prefix.phase, prefix.computed, prefix.progress, prefix.gives_up_at = PinPhase.PINNING, computed, now, None
        self._ask(prefix, now)

    def _ask(self, prefix: PinnedPrefix, now: float) -> None:
        """Have it pinned. Asked again, it is the same pin, which then begins anew."""
        assert prefix.store is not None, prefix.name
        if prefix.awaited:
            prefix.expires = now + prefix.ttl
        prefix.last_request = now
        name = self._pin_name(prefix)
        self.orders[name] = prefix
        ttl_ms = max(1, int((prefix.expires - now) * 1_000))
        prefix.sequence = self._out.send(prefix.store, PinPages(name, prefix.tenant, prefix.keys, ttl_ms))

    def keep(self, prefix: PinnedPrefix, now: float) -> None:
        """Its store has it pinned. If a client waits for that, it takes the place of what had its name before."""
        self.release(prefix)
        prefix.phase, prefix.failures, prefix.missed = PinPhase.PINNED, 0, False
        prefix.excluded.clear()
        self.log(prefix, f"{prefix.pages} pages are pinned on node {prefix.node}")
        if prefix.awaited:
            prefix.awaited, prefix.deadline = False, None
            self._out.put(PinAnswered(prefix.name, prefix.new(now)))
            for other in list(self.prefixes.values()):
                if other.owner == prefix.owner and other is not prefix:
                    self.end(other, Cancelled("another of its name has taken its place"))

    # --- attempts end ------------------------------------------------------------------------------------------------

    def member_gone(self, member: MemberRecord, now: float) -> None:
        """`member` is no longer listed. What only it had is made anew."""
        for prefix in list(self.prefixes.values()):
            why = f"{member.peer.name} is gone: {member.gone}"
            if prefix.store == member.incarnation:
                if prefix.phase is PinPhase.PINNED:
                    self.log(prefix, f"{why}; the prefix is made anew", warning=True)
                    self.wait(prefix, now, now)
                else:
                    self.retry(prefix, why, now)
            elif prefix.worker == member.incarnation:
                if prefix.phase is PinPhase.PREFILLING:
                    self.retry(prefix, why, now)
                else:
                    self.release(prefix)

    def retry(self, prefix: PinnedPrefix, why: str, now: float) -> None:
        """The attempt has come to nothing. The next one waits a little: what a death leaves behind is noticed by one
        process after the other, and each would fail us meanwhile."""
        prefix.failures += 1
        self.log(prefix, f"attempt {prefix.attempts} is over: {why}", warning=True)
        if prefix.failures >= self._config.router.max_attempts:
            message = f"{prefix.failures} attempts failed; the last because {why}"
            self.end(prefix, Failed(errors.AttemptsExhausted(message)))
        else:
            self.wait(prefix, now + self._patience / 2, now)

    def wait(self, prefix: PinnedPrefix, until: float, now: float) -> None:
        """Back to where it came from; not to be tried before `until`."""
        self._withdraw(prefix)
        prefix.phase, prefix.not_before = PinPhase.WAITING, until
        if prefix.awaited and prefix.gives_up_at is None:
            prefix.gives_up_at = now + self._config.router.queue_timeout_ms / 1_000
        self._waiting[prefix.name] = prefix

    def renew(self, now: float) -> None:
        """Make all anew: the model is being replaced, and its pages are of no use."""
        for prefix in self.prefixes.values():
            self.wait(prefix, now, now)

    def _withdraw(self, prefix: PinnedPrefix) -> None:
        """Withdraw the current attempt from every process involved."""
        self._waiting.pop(prefix.name, None)
        self.release(prefix)
        pin, store, prefix.store = self._pin_name(prefix), prefix.store, None
        if self.orders.pop(pin, None) is not None and store is not None and self._members.get(store) is not None:
            self._out.send(store, UnpinPages(pin))

    def release(self, prefix: PinnedPrefix) -> None:
        """The worker forgets it, done or not."""
        incarnation, prefix.worker = prefix.worker, None
        worker = self._members.get(incarnation) if incarnation is not None else None
        if worker is not None and worker.unassign(prefix.attempt):
            self._out.send(worker.incarnation, Cancel(prefix.name, prefix.attempts))

    def end(self, prefix: PinnedPrefix, outcome: Failed | Cancelled) -> None:
        """End it, the one way out, and answer its client with the reason."""
        self._withdraw(prefix)
        del self.prefixes[prefix.name]
        why = str(outcome.error) if isinstance(outcome, Failed) else outcome.why
        self.log(prefix, f"ended: {why}", warning=isinstance(outcome, Failed))
        if prefix.awaited:
            self._out.put(PinAnswered(prefix.name, outcome))

    # --- time --------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Everything that has lasted, or waited, for long enough."""
        progress = self._config.router.attempt_timeout_ms / 1_000
        for prefix in list(self.prefixes.values()):
            working = prefix.phase in (PinPhase.PREFILLING, PinPhase.PINNING)
            if not prefix.awaited and now >= prefix.expires:
                self.end(prefix, Cancelled("its time is over"))
            elif prefix.deadline is not None and now >= prefix.deadline:
                self.end(prefix, Failed(errors.DeadlineExpired("the deadline passed before the prefix was pinned")))
            elif prefix.gives_up_at is not None and now >= prefix.gives_up_at:
                self.end(prefix, Failed(self._no_worker()))
            elif working and now - prefix.progress >= progress:
                if prefix.worker is not None:
                    prefix.excluded.add(prefix.worker)
                self.retry(prefix, f"no progress for {self._config.router.attempt_timeout_ms} ms", now)
            elif prefix.phase is PinPhase.PINNING and now - prefix.last_request >= self._patience:
                self._ask(prefix, now)

    def _no_worker(self) -> errors.BatonError:
        waited = f"no prefill worker took the prefix within {self._config.router.queue_timeout_ms} ms"
        workers = self._members.with_role("prefill")
        if not workers:
            return errors.Unavailable(f"{waited}: none is live")
        if not any(self._members.store_of(worker.peer.node) for worker in workers):
            return errors.Unavailable(f"{waited}: no store is live on a node of theirs")
        return errors.Overloaded(waited)

    def extend(self, seconds: float) -> None:
        """We stood still for so long. Pins and clients' deadlines do not wait for us; all else does."""
        for prefix in self.prefixes.values():
            prefix.progress += seconds
            prefix.last_request += seconds
            if prefix.gives_up_at is not None:
                prefix.gives_up_at += seconds

    def shut(self) -> None:
        """Answer no more clients. Pins last until their time is over, and serve the next router."""
        self._shut = True
        for prefix in list(self.prefixes.values()):
            if prefix.phase is PinPhase.PINNED:
                del self.prefixes[prefix.name], self.orders[self._pin_name(prefix)]
            else:
                self.end(prefix, Failed(errors.Unavailable("this router is stopping")))

    # --- what others read --------------------------------------------------------------------------------------------

    def pins(self, now: float) -> list[Pin]:
        """The pins by name, also those that are being made anew."""
        prefixes = [prefix for prefix in self.prefixes.values() if not prefix.awaited]
        return [prefix.view(now) for prefix in sorted(prefixes, key=lambda prefix: (prefix.pin, prefix.tenant))]

    def count(self) -> Counter[PinPhase]:
        return Counter(prefix.phase for prefix in self.prefixes.values())

    @property
    def _patience(self) -> float:
        """Seconds in which a live process answers."""
        return self._config.cluster.heartbeat_timeout_ms / 1_000

    def _pin_name(self, prefix: PinnedPrefix) -> str:
        """Unlike any that another attempt has given."""
        return f"{prefix.name}.{prefix.attempts}"

    def log(self, prefix: PinnedPrefix, text: str, *, warning: bool = False) -> None:
        self._out.log(f"pin {prefix.pin}: {text}", warning=warning, kind=f"pin, {warning}")

    def validate(self) -> None:
        at_work: set[tuple[str, AttemptName]] = set()
        computing: set[tuple[str, AttemptName]] = set()
        for prefix in self.prefixes.values():
            waits = prefix.phase is PinPhase.WAITING
            assert waits == (prefix.name in self._waiting), prefix.name
            assert waits == (prefix.store is None), prefix.name
            assert (self._pin_name(prefix) in self.orders) == (prefix.phase in (PinPhase.PINNING, PinPhase.PINNED)), (
                prefix.name
            )
            assert prefix.phase is not PinPhase.PINNED or not prefix.awaited, prefix.name
            assert not waits or not prefix.awaited or prefix.gives_up_at is not None, (
                f"{prefix.name} waits without a limit"
            )
            if prefix.worker is not None:
                at_work.add((prefix.worker, prefix.attempt))
                assert prefix.phase in (PinPhase.PREFILLING, PinPhase.PINNING), prefix.name
            if prefix.phase is PinPhase.PREFILLING:
                assert prefix.worker is not None, prefix.name
                computing.add((prefix.worker, prefix.attempt))
        assert len(self.orders) == sum(p.phase in (PinPhase.PINNING, PinPhase.PINNED) for p in self.prefixes.values())
        assert at_work == {(m.incarnation, n) for m in self._members for n in _pin_names(m.assigned)}
        assert computing == {(m.incarnation, n) for m in self._members for n in _pin_names(m.pending_prefills)}
        owners = Counter(prefix.owner for prefix in self.prefixes.values() if not prefix.awaited)
        assert not owners or max(owners.values()) == 1, owners


def _pin_names(names: Collection[AttemptName]) -> list[AttemptName]:
    return [name for name in names if name.request.startswith(PIN)]
