"""A prompt that several prefill workers compute at a time, with a real store state, and devices that notice a wrong
page, under any order of their steps, newcomers, cancellations and deaths.

Whatever happens to the others, the worker at place 0 makes the whole prompt.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import Tick
from baton.config import PrefillConfig
from baton.messages import Cancel, Prefill, Prefilled, RingPart
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepOutOfMemory
from engine.step.ring import RingChunk
from kvstore.arena.shared_slots import LeaveRing
from kvstore.client.transfer import TransferEvent
from kvstore.keys import pack_tokens, page_keys, split_keys
from kvstore.server.events import StoreCommand
from kvstore.server.leases import Lease, SharedSlots
from kvstore.server.state import StoreState
from prefill_worker.prefill_request import PrefillRequest
from prefill_worker.ring import Ring
from prefill_worker.scheduler import PrefillCommand, PrefillScheduler
from simulator.device import digests
from tests.support.thorough import examples
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigStore, RigWorker


class RingWorker(RigWorker):
    """A ring's slots are those of the arena, which others overwrite as soon as they are free."""

    patient = True

    def schedule(self) -> ScheduledBatch:
        """While it waits for a layer nothing goes on here."""
        return {} if self.patient and self.waits else super().schedule()

    def leave_ring(self, left: LeaveRing) -> None:
        self.node.leave_ring(left)

    @property
    def waits(self) -> bool:
        """Its next chunk waits for another worker, which has neither come so far nor left."""
        plan = self.state._chunk_of_ring()
        rings = [chunk.ring for chunk in plan.values() if chunk.ring]
        return any(
            each.number and self.node.marks.get((each.name, each.awaits), -1) < each.number - 1 for each in rings
        )

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepDone | StepOutOfMemory | StepFailed | None]:
        (chunk, *_) = plan.values()
        if (ring := chunk.ring) is None:
            return (yield from super().run_step(plan))
        assert len(plan) == 1
        self.stepped = True
        arena = self.node.arena
        if ring.number and not ring.number - 1 <= self.node.marks.get((ring.name, ring.awaits), -1) < inf:
            for page in range(chunk.start // PAGE, len(chunk.pages)):
                self.device.pages[chunk.pages[page]] = [-7] * PAGE
            return StepFailed(plan, "the chunk before did not come")
        for page, slot in ring.takes:
            self.device.pages[chunk.pages[page]] = arena.read_slot(slot)
        done = self._done(plan)
        for page, slot in ring.gives:
            arena.write(slot, self.device.pages[chunk.pages[page]])
        self.node.marks[ring.name, ring.plan.part.place] = ring.number
        return done


class World:
    """Workers of one node. The first is at place 0."""

    def __init__(self, workers: int, tokens: int, first: int, pages: int, slots: int = 64, most: int = 64) -> None:
        self.rig = Rig(slots)
        self.rig.worker_class = RingWorker
        config = PrefillConfig(max_num_batched_tokens=most, max_num_seqs=4)
        self.workers: list[RingWorker] = []
        for _ in range(workers):
            worker = self.rig.worker("prefill", 60, config)
            assert isinstance(worker, RingWorker)
            worker.state._rings = True
            self.workers.append(worker)
        self.prompt = [*range(tokens)]
        self.request, self.first, self.pages = "r", first, pages

    def cache(self) -> None:
        """Have the first pages sealed, and in no worker's cache but the first one's."""
        if self.first:
            self.workers[0].handle(Prefill("before", 1, ROOT, pack_tokens(self.prompt[: self.first * PAGE])))
            self.rig.settle()
            self.workers[0].handle(Cancel("before", 1))
            self.rig.settle()
            self.workers[0].messages.clear()

    def order(self, place: int) -> None:
        part = RingPart(self.first, self.pages, place, len(self.workers))
        self.workers[place].handle(Prefill(self.request, 1, ROOT, pack_tokens(self.prompt), ring=part))

    def another(self) -> None:
        """Go on with another prompt, whose ring may get the same slots."""
        self.request, self.first = "t", 0
        self.prompt = [token + 1_000 for token in self.prompt]

    def accounts(self, place: int) -> list[Prefilled]:
        return [m for m in self.workers[place].messages if isinstance(m, Prefilled) and m.request == self.request]

    def turns(self, rng: random.Random, *, late: bool) -> None:
        """Let the workers go on in any order, until worker 0 is done. `late`: sometimes one has no patience. In the end
        none has, unless one has died: one that was cancelled before it heard of its slots can't mark that it has
        left."""
        for turn in range(2_000):
            live = [worker for worker in self.workers if worker.connection]
            worker = rng.choice(live)
            impatient = (late or (turn > 1_000 and live == self.workers)) and rng.random() < 0.1
            worker.patient = not impatient and not all(each.waits for each in live)
            worker.turn()
            if rng.random() < 0.2:
                self.rig.tick(0.05)
                worker.handle(Tick())
            if self.accounts(0):
                return
        raise AssertionError("the prompt was never computed")

    def check(self) -> None:
        keys = split_keys(page_keys(ROOT, pack_tokens(self.prompt), PAGE))
        expected = digests(self.prompt)
        for number, key in enumerate(keys):
            page = self.rig.store._pages.find(key)
            assert page is not None
            assert self.workers[0].node.arena.read_slot(page.slot) == expected[number * PAGE : (number + 1) * PAGE]
        self.rig.end([self.request, "s"])
        assert not any(worker.state._requests for worker in self.workers)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_each_worker_computes_a_part(workers: int, first: int) -> None:
    world = World(workers, 20 * PAGE + 3, first, 3)
    world.cache()
    before = [worker.state.stats().tokens_computed for worker in world.workers]
    for place in range(workers):
        world.order(place)
    world.turns(random.Random(1), late=False)
    (account,) = world.accounts(0)
    assert account.computed == len(world.prompt) - first * PAGE
    computed = [w.state.stats().tokens_computed - old for w, old in zip(world.workers, before, strict=True)]
    assert sum(computed) == account.computed
    assert max(computed) - min(computed) <= 3 * PAGE
    assert [[each.computed for each in world.accounts(place)] for place in range(1, workers)] == [
        [n] for n in computed[1:]
    ]
    world.check()


def test_a_ring_knows_nothing_of_the_one_before() -> None:
    world = World(3, 20 * PAGE + 3, 0, 3)
    for _ in range(2):
        for place in range(3):
            world.order(place)
        world.turns(random.Random(1), late=False)
        world.check()
        world.another()


def test_nothing_of_what_a_worker_helps_with_is_cached_or_sealed_there() -> None:
    world = World(2, 12 * PAGE, 0, 3)
    for place in (0, 1):
        world.order(place)
    for worker in (1, 0, 1, 1):
        world.workers[worker].turn()
        world.workers[1].messages.clear()
    assert world.workers[1].state.stats().tokens_computed
    assert world.rig.store.stats(0.0).sealed == 0
    world.workers[1].handle(Prefill("s", 1, ROOT, pack_tokens(world.prompt)))
    assert world.accounts(1)[0].computed == 3 * PAGE, "it gives up the other prompt"
    assert world.workers[1].state._requests["s"].computed == 0
    world.turns(random.Random(1), late=False)
    world.check()


def test_a_worker_whose_others_never_come_goes_on_alone() -> None:
    world = World(2, 12 * PAGE, 0, 3)
    world.order(0)
    world.workers[0].turn()
    assert world.workers[0].state.stats().tokens_computed == 0
    world.rig.tick(0.3)
    world.workers[0].handle(Tick())
    world.turns(random.Random(1), late=False)
    assert world.accounts(0)[0].computed == 12 * PAGE
    world.check()


@pytest.mark.parametrize(
    "part",
    [
        RingPart(0, 40, 1, 2),
        RingPart(12, 3, 1, 2),
        RingPart(2**40, 1, 1, 2),
        RingPart(0, 3, 7, 2),
        RingPart(0, 12, 1, 2),
    ],
    ids=["too long", "no chunk", "beyond", "no place", "one chunk"],
)
def test_a_part_that_can_not_be_done_is_given_back(part: RingPart) -> None:
    world = World(2, 12 * PAGE, 0, 3)
    world.workers[1].handle(Prefill("r", 1, ROOT, pack_tokens(world.prompt), ring=part))
    world.rig.settle()
    assert [each.computed for each in world.accounts(1)] == [0]
    assert not world.workers[1].state._requests


@examples(150)
@given(
    seed=st.integers(0, 2**32), workers=st.integers(2, 4), tokens=st.integers(9 * PAGE, 30 * PAGE),
    first=st.integers(0, 3), pages=st.integers(1, 4), late=st.booleans(), slots=st.sampled_from([40, 64]),
)  # fmt: skip
def test_the_prompt_is_made_whatever_happens_to_the_others(
    seed: int, workers: int, tokens: int, first: int, pages: int, late: bool, slots: int
) -> None:
    make_whatever_happens(random.Random(seed), World(workers, tokens, first, pages, slots), late=late)


def make_whatever_happens(rng: random.Random, world: World, *, late: bool) -> None:
    """Two prompts, one after the other."""
    world.cache()
    make(rng, world, late=late)
    if len(world.workers) > 1:
        world.another()
        make(rng, world, late=late)


def make(rng: random.Random, world: World, *, late: bool) -> None:
    workers = len(world.workers)
    order = rng.sample(range(workers), workers)
    for place in order:
        world.order(place)
        for _ in range(rng.randrange(3)):
            rng.choice(world.workers).turn()
    for _ in range(rng.randrange(12)):
        worker = rng.choice(world.workers)
        worker.turn()
    if not world.accounts(0):
        match rng.choice(["nothing", "newcomer", "cancel", "kill", "newcomer at 0"]):
            case "newcomer":
                rng.choice(world.workers[1:]).handle(Prefill("s", 1, ROOT, pack_tokens(world.prompt[: 5 * PAGE])))
            case "newcomer at 0":
                world.workers[0].handle(Prefill("s", 1, ROOT, pack_tokens(world.prompt[: 5 * PAGE])))
            case "cancel":
                rng.choice(world.workers[1:]).handle(Cancel(world.request, 1))
            case "kill":
                world.rig.kill(rng.choice(world.workers[1:]))
            case _:
                pass
    world.turns(rng, late=late)
    world.workers = [worker for worker in world.workers if worker.connection]
    world.check()


# --- mistakes, planted -----------------------------------------------------------------------------------------------


def a_chunk_counts_though_the_one_before_did_not_come(patch: pytest.MonkeyPatch) -> None:
    handle = PrefillScheduler._handle

    def hasty(self: PrefillScheduler, event: Any, router: str, now: float) -> list[PrefillCommand]:
        done = StepDone(event.plan, [None] * len(event.plan)) if isinstance(event, StepFailed) else event
        return handle(self, done, router, now)

    patch.setattr(PrefillScheduler, "_handle", hasty)


def only_the_chunk_before_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingChunk, "takes", property(lambda self: self._slots_of(self.number - 1) if self.number else ()))


def two_workers_write_to_one_region(patch: pytest.MonkeyPatch) -> None:
    def slots_of(self: RingChunk, number: int) -> Iterator[tuple[int, int]]:
        return zip(self.plan.pages(number), self.slots[1:], strict=False)

    patch.setattr(RingChunk, "_slots_of", slots_of)


def the_slots_go_with_the_first_that_leaves(patch: pytest.MonkeyPatch) -> None:
    leave = StoreState._leave_shared

    def hasty(self: StoreState, lease: Lease, shared: SharedSlots) -> None:
        if shared.leases:
            shared.leases[:] = [lease]
            leave(self, lease, shared)

    patch.setattr(StoreState, "_leave_shared", hasty)


def pages_of_others_count_before_they_are_taken(patch: pytest.MonkeyPatch) -> None:
    step_done = PrefillScheduler._step_done

    def hasty(self: PrefillScheduler, plan: ScheduledBatch, seconds: float, now: float) -> list[PrefillCommand]:
        commands = step_done(self, plan, seconds, now)
        for job in self._requests.values():
            if job.ring is not None and job.ring.slots and not job.helps:
                job.mark_complete(job.ring.plan.pages(job.ring.number).start)
                commands += self._offer_pages(job)
        return commands

    patch.setattr(PrefillScheduler, "_step_done", hasty)


def a_worker_counts_its_slots_from_its_own(patch: pytest.MonkeyPatch) -> None:
    heard = PrefillScheduler._ring_heard

    def turned(self: PrefillScheduler, job: PrefillRequest, ring: Ring, event: TransferEvent) -> list[PrefillCommand]:
        commands = heard(self, job, ring, event)
        own = ring.plan.part.place
        ring.slots = [*ring.slots[own:], *ring.slots[:own]]
        return commands

    patch.setattr(PrefillScheduler, "_ring_heard", turned)


def the_store_does_not_tell_of_a_death(patch: pytest.MonkeyPatch) -> None:
    carry_out = RigStore._carry_out

    def deaf(self: RigStore, command: StoreCommand) -> None:
        if not isinstance(command, LeaveRing):
            carry_out(self, command)

    patch.setattr(RigStore, "_carry_out", deaf)


def marks_of_the_prompt_before_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ring, "name_in_marks", 1)


@pytest.mark.parametrize(
    "mistake",
    [
        a_chunk_counts_though_the_one_before_did_not_come,
        only_the_chunk_before_is_taken,
        two_workers_write_to_one_region,
        the_slots_go_with_the_first_that_leaves,
        pages_of_others_count_before_they_are_taken,
        a_worker_counts_its_slots_from_its_own,
        the_store_does_not_tell_of_a_death,
        marks_of_the_prompt_before_count,
    ],
)
def test_it_notices(mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)

    def run(seed: int) -> None:
        rng = random.Random(seed)
        tokens, first, pages = rng.randint(9 * PAGE, 30 * PAGE), rng.randint(0, 3), rng.randint(1, 4)
        world = World(rng.randint(2, 4), tokens, first, pages)
        make_whatever_happens(rng, world, late=rng.random() < 0.5)

    with pytest.raises((AssertionError, ValueError)):
        deque(map(run, range(200)), maxlen=0)
