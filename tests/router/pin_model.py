"""The model cluster with stores that keep pages: prefill workers seal and hold them, stores pin and evict them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton import config as settings
from baton import messages as msg
from baton.operator_api import NewPin
from kvstore.keys import pack_tokens, page_keys, split_keys
from router.events import PIN, Cancelled, PinAnswered, PinPrefix, UnpinPrefix
from router.events import Failed as Ended
from router.prefix_pinning.pin import PinnedPrefix, PinPhase
from tests.router.model import CONFIG, PAGE, Cluster, Job, Process

PAGE_BYTES = 1_024  # as `model.card` has it


@dataclass
class KeptPin:
    """One pin, as a store has it."""

    order: msg.PinPages
    expires: float


@dataclass
class Pages:
    """What one store process has."""

    sealed: set[bytes] = field(default_factory=set)
    held: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)  # by worker and request
    pins: dict[str, KeptPin] = field(default_factory=dict)

    @property
    def kept(self) -> set[bytes]:
        held = {key for keys in self.held.values() for key in keys}
        return held | {key for kept in self.pins.values() for key in split_keys(kept.order.keys)}


class PinCluster(Cluster):
    """Prefixes come beside requests. Answers are kept by the name of the wish."""

    def __init__(self, config: settings.Config = CONFIG) -> None:
        super().__init__(config)
        self.pages: dict[str, Pages] = {}  # by incarnation of the store
        self.wishes: dict[str, PinPrefix] = {}
        self.answers: dict[str, NewPin | Ended | Cancelled] = {}

    # --- clients ---

    def pin_prefix(self, pin: str = "p", pages: int = 3, ttl: float = 60.0, seed: int = 0, **more: Any) -> str:
        name = f"{PIN}{len(self.wishes) + 1}"
        tokens = more.pop("tokens", [1 + (seed + i) % 100 for i in range(pages * PAGE + 1)])
        order = self.wishes[name] = PinPrefix(name, pin, pack_tokens(tokens), ttl, **more)
        self.tell(order)
        return name

    def unpin_prefix(self, pin: str = "p") -> None:
        self.tell(UnpinPrefix(pin))

    def prefixes(self) -> list[PinnedPrefix]:
        return list(self.state._pinner.prefixes.values())

    def kept_at(self, prefix: PinnedPrefix) -> KeptPin | None:
        """The pin of a prefix that counts as pinned; none: its store has gone."""
        assert prefix.phase is PinPhase.PINNED
        assert prefix.store is not None
        if prefix.store not in self.processes:
            return None
        pin = self.pages[prefix.store].pins.get(self.state._pinner._pin_name(prefix))
        assert pin is not None, f"{prefix.name} counts as pinned, and its store does not have it"
        assert set(split_keys(pin.order.keys)) <= self.pages[prefix.store].sealed
        assert pin.order.keys == prefix.keys
        return pin

    def answer_pin(self, answer: PinAnswered) -> None:
        assert answer.name not in self.answers, f"{answer.name} was answered twice"
        self.answers[answer.name] = answer.outcome

    # --- stores ---

    def start(self, role: Any, name: str, node: str = "a", pool_pages: int = 256, slots: int = 100) -> Process:
        process = super().start(role, name, node, pool_pages, slots)
        if role == "store":
            self.pages[process.peer.incarnation] = Pages()
        return process

    def kill(self, process: Process) -> None:
        super().kill(process)
        self.pages.pop(process.peer.incarnation, None)
        for pages in self.pages.values():
            for owner in [owner for owner in pages.held if owner[0] == process.peer.incarnation]:
                del pages.held[owner]

    def store_of(self, node: str) -> Pages | None:
        """What workers of a node are attached to: the store that was started last."""
        stores = [
            p for p in self.processes.values() if p.peer.role == "store" and p.peer.node == node and not p.stopped
        ]
        return self.pages[stores[-1].peer.incarnation] if stores else None

    def evict(self) -> None:
        """Have every store evict the pages that no pin keeps."""
        for pages in self.pages.values():
            pages.sealed &= pages.kept

    def _obey(self, process: Process, message: msg.Message) -> None:
        match message:
            case msg.PinPages():
                process.say(self._pin(self.pages[process.peer.incarnation], message))
            case msg.UnpinPages(pin=pin):
                self.pages[process.peer.incarnation].pins.pop(pin, None)
            case _:
                super()._obey(process, message)

    def _pin(self, pages: Pages, order: msg.PinPages) -> msg.PagesPinned:
        keys = split_keys(order.keys)
        here = next((i for i, key in enumerate(keys) if key not in pages.sealed), len(keys))
        if here < len(keys):
            return msg.PagesPinned(order.pin, here, "missing")
        others = [kept for pin, kept in pages.pins.items() if pin != order.pin and kept.order.tenant == order.tenant]
        all_keys = {key for kept in others for key in split_keys(kept.order.keys)} | set(keys)
        if len(all_keys) * PAGE_BYTES > self.config.store.pin_bytes:
            return msg.PagesPinned(order.pin, 0, "quota")
        pages.pins[order.pin] = KeptPin(order, self.now + order.ttl_ms / 1_000)
        return msg.PagesPinned(order.pin, len(keys))

    def beat(self, process: Process) -> None:
        if process.peer.role != "store":
            super().beat(process)
            return
        pages = self.pages[process.peer.incarnation]
        held = []
        for pin, kept in pages.pins.items():
            here = sum(key in pages.sealed for key in split_keys(kept.order.keys))
            held.append(msg.AttemptHeld(pin, 1, here))
        beat = msg.Heartbeat(
            process.membership.heard, msg.LoadReport(), step_age_ms=process.step_age_ms, attempts=tuple(held)
        )
        process.latest = msg.Envelope(process.peer.incarnation, process.membership.router or "", 0, beat)
        self.send(process.latest)

    # --- prefill workers ---

    def _prefill(self, process: Process, order: msg.Prefill) -> None:
        if not order.request.startswith(PIN):
            super()._prefill(process, order)
            return
        old = process.jobs.get(order.request)
        if old is not None and old.order.attempt >= order.attempt:
            return
        process.jobs.pop(order.request, None)
        if self.store_of(process.peer.node) is None:
            process.say(
                msg.AttemptFailed(order.request, order.attempt, "store_gone", "this worker's node has no store now")
            )
        elif process.full or len(process.jobs) >= process.slots:
            process.say(msg.Refused(order.request, order.attempt, "busy"))
        else:
            process.jobs[order.request] = Job(order, left=1 + len(order.tokens) // 4 // 16)

    def step(self, process: Process) -> None:
        self._seal(process)
        super().step(process)

    def _seal(self, process: Process) -> None:
        """What is about to be done lies in the store and is held there: as long as the worker knows of it."""
        store = self.store_of(process.peer.node)
        for name, job in list(process.jobs.items()):
            if not name.startswith(PIN):
                continue
            owner = (process.peer.incarnation, name)
            if job.done and (store is None or owner not in store.held):
                del process.jobs[name]
                process.say(msg.AttemptFailed(name, job.order.attempt, "store_gone", "the node's store is gone"))
            elif not job.done and job.left <= 1 and store is not None:
                keys = split_keys(page_keys(job.order.root, job.order.tokens, PAGE))
                store.sealed |= set(keys)
                store.held[owner] = keys
            elif not job.done and job.left <= 1:
                job.left += 1  # it waits for a store

    # --- time ---

    def round(self, seconds: float = 0.02, loss: float = 0.0, lag: float = 0.0) -> None:
        super().round(seconds, loss, lag)
        self.reconcile()

    def reconcile(self) -> None:
        """What stores do by themselves: pins end, and holds of what a worker has forgotten."""
        for incarnation, pages in self.pages.items():
            for worker, name in list(pages.held):
                process = self.processes.get(worker)
                if process is None or name not in process.jobs:
                    del pages.held[(worker, name)]
            if not self.processes[incarnation].stopped:
                pages.pins = {pin: kept for pin, kept in pages.pins.items() if self.now < kept.expires}

    def finish(self, limit: float = 300.0) -> None:
        """No more faults: every wish is answered, then heartbeats repair the rest; and nothing is left over."""
        for process in self.processes.values():
            process.stopped = process.full = False
            process.step_age_ms, process.hung_since = 0, None
        deadline = self.now + limit
        while len(self.answers) < len(self.wishes):
            assert self.now < deadline, f"still alive: {set(self.wishes) - set(self.answers)}"
            self.round()
        self.settle()
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """Stores have exactly what counts as pinned. One that was replaced, and lives, belongs to no router and hears
        nothing: it keeps its pins until their time is over."""
        pinned = {self.state._pinner._pin_name(p): p for p in self.prefixes() if p.phase is PinPhase.PINNED}
        for incarnation, pages in self.pages.items():
            if self.state._members.get(incarnation) is None:
                continue
            wanted = {pin for pin, prefix in pinned.items() if prefix.store == incarnation}
            assert set(pages.pins) == wanted, incarnation
