"""Workers whose steps and copies run on beside their turns, on devices that notice a page or slot which is touched by
two at a time. They launch one step ahead.

A launched operation reads and writes when its delay has passed, which a test chooses; a real device may do so at any
moment before. So what an operation touches is compared with all that are under way when it is launched, too. Writing
the same contents twice is no mistake: prompts that begin alike share pages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from baton.config import DecodeConfig, PrefillConfig
from baton.messages import Grammar, WorkerRole
from engine.step.batch import Bits, Chunk, Sampled
from engine.step.outcome import ScheduledBatch, StepDone, StepFailed, StepOutOfMemory
from kvstore.client.device_block_manager import DuplicatePage
from kvstore.client.transfer import Copy, CopyIn, CopyOut, batches
from kvstore.window_groups import NO_GROUPS, WindowGroups
from simulator.clock import Body
from simulator.device import digests
from simulator.transport import SlotMemory
from simulator.worker_shell import copied
from tests.support.workers_and_stores import PAGE, VOCAB, Device, Rig, RigStore, RigWorker, next_token
from worker.turn import CopyEnded

FAILS = -1
"""The delay of a step that raises."""

MISLEADS = -2
"""The delay of a step whose tokens the host corrects: a step launched ahead has gone on from others."""

EVEN, ODD_ENDS = Grammar("regex", "even", VOCAB), Grammar("regex", "odd ends", VOCAB)
FORCED = Grammar("regex", "forced", VOCAB)
"""Grammars whose masks allow even tokens. The second one is exhausted where an odd token would have come, and the third
one foretells the next tokens."""


class RigMask:
    """A `TokenMask` that is there when its delay has passed."""

    def __init__(self, owner: RigGrammar, tokens: Sequence[int], delay: int) -> None:
        self.tokens, self.delay = list(tokens), delay
        self._owner, self._begun = owner, False
        self.slow = owner.slow
        self.ready = False
        self.allowed: Bits | None = None
        self.may_end, self.failure = False, ""
        self.forced = forced(tokens, len(tokens) % 4 if owner.text == FORCED.text else 0)
        self.ends: Collection[int] = ()

    def begin(self) -> bool:
        begun, self._begun = self._begun, True
        return not begun

    def compute(self) -> None:
        self.delay -= 1
        if self.delay < 0:
            self.ready, self._owner.slow = True, self._owner.longest > 2

    def draw(self, token: int) -> Sampled:
        assert self.ready, "a mask is used before it is there"
        if token % 2 and self._owner.text == ODD_ENDS.text:
            return Sampled(0, finite=False, failure="the grammar is exhausted")
        return Sampled(even(token))


class RigGrammar:
    """An `OutputGrammar`: the same tokens have the same mask."""

    ready = True

    def __init__(self, text: str, delays: Iterator[int]) -> None:
        self.text, self._delays = text, delays
        self.slow, self.longest = False, 0
        self._mask: RigMask | None = None

    def mask(self, tokens: Sequence[int]) -> RigMask:
        if self._mask is None or self._mask.tokens != list(tokens):
            self.longest = next(self._delays)
            self._mask = RigMask(self, tokens, self.longest)
        return self._mask


@dataclass
class RigGrammars:
    rig: OverlappedRig

    def follow(self, grammar: Grammar, ends: Collection[int], tokens: Sequence[int], prompt: int) -> RigGrammar:
        return RigGrammar(grammar.text, self.rig.mask_delays)


def even(token: int) -> int:
    return token // 2 * 2


def forced(tokens: Sequence[int], count: int) -> Sequence[int]:
    """The next tokens, if none but even ones may be."""
    known = list(tokens)
    for _ in range(count):
        known.append(even(next_token(known)))
    return known[len(tokens) :]


Contents = Mapping[tuple[int, int], int]
"""What lies at (page, position in it)."""


@dataclass(eq=False)
class Operation:
    """What was launched. `do` is called once, when it is time."""

    do: Callable[[], Any]
    reads: Contents
    writes: Contents
    delay: int
    after: Sequence[Operation] = ()
    done: bool = False
    result: Any = None
    fed: Sequence[int | None] = ()  # of a step: the tokens that the device itself hands on to the next one
    void: dict[int, int] = field(default_factory=dict[int, int])
    """Of a step: block tables, by id, and the positions from which on it has left no K and V that count."""
    masks: Sequence[RigMask | None] = ()  # of a step: those of its draws, by chunk

    def assert_no_race(self, other: Operation) -> None:
        for mine, theirs in ((self.writes, other.writes), (self.writes, other.reads), (self.reads, other.writes)):
            for place in mine.keys() & theirs.keys():
                assert mine[place] == theirs[place], f"page {place[0]} is touched by two that are under way"


@dataclass
class OverlappedDevice(Device):
    """Three queues: steps and copies within the device, copies in, copies out. Each keeps its order."""

    num_pages: int
    delays: Iterator[int]
    slow_copies: int = 1  # by what the delays of copies are multiplied
    window: int | None = None
    groups: WindowGroups = NO_GROUPS
    steps: deque[Operation] = field(default_factory=deque[Operation])
    coming: deque[Operation] = field(default_factory=deque[Operation])
    leaving: deque[Operation] = field(default_factory=deque[Operation])
    masks: list[RigMask] = field(default_factory=list[RigMask])  # that are being computed

    def __post_init__(self) -> None:
        super().__init__(self.num_pages, PAGE, self.window, self.groups)

    @property
    def under_way(self) -> bool:
        return bool(self.steps or self.coming or self.leaving)

    def launch_step(
        self, known: Sequence[Sequence[int]], chunks: Sequence[Chunk], before: Operation | None = None
    ) -> Operation:
        """Launch a step over sequences of the tokens `known`, while `before` runs. They lack the token of a chunk that
        follows one of that step. Its result is what was drawn; none if it raised."""
        reads: dict[tuple[int, int], int] = {}
        writes: dict[tuple[int, int], int] = {}
        for number, (tokens, chunk) in enumerate(zip(known, chunks, strict=True)):
            expected = digests(tokens)
            if chunk.follows is not None:
                assert len(tokens) == chunk.start
                masked = before is not None and before.masks[chunk.follows] is not None
                assert not masked, "a chunk follows a draw that waits for its mask"
                expected.append(~number)  # whatever is drawn, so no other operation may touch the place
            for position in range(self.first_read(chunk), chunk.end):
                place, digest = (chunk.pages[position // PAGE], position % PAGE), expected[position]
                (reads if position < chunk.start else writes)[place] = digest
            for position, place, group in self.window_places(chunk):
                (reads if position < chunk.start else writes)[place] = self.in_window(expected[position], group)
        delay = next(self.delays)
        copied = [  # as they are when it is launched
            Chunk(
                each.tokens, each.start, list(each.pages), each.sample, follows=each.follows,
                window_pages=list(each.window_pages),
            )
            for each in chunks
        ]  # fmt: skip
        operation = Operation(lambda: None, reads, writes, max(delay, 0))
        operation.masks = [self._begin_mask(tokens, chunk) for tokens, chunk in zip(known, chunks, strict=True)]

        misleads = None if self.groups.states else MISLEADS  # vLLM's runner goes on from the token itself

        def do() -> list[Sampled | None] | None:
            if delay == FAILS:
                operation.void = {id(chunk.pages): chunk.start for chunk in chunks}
                return None
            drawn: list[Sampled | None] = []
            for tokens, chunk, as_launched, mask in zip(known, copied, chunks, operation.masks, strict=True):
                table = id(as_launched.pages)
                if self.groups.states and mask is not None and not mask.ready:
                    if len(chunk.tokens) > 1:  # the last one comes again, and a state takes each token once
                        self.compute(tokens, structs.replace(chunk, tokens=chunk.tokens[:-1]))
                    drawn.append(None)
                    continue
                void = before is not None and chunk.start > before.void.get(table, chunk.start)
                drawn.append(self._run(tokens, chunk, before, void=void))
                if drawn[-1] is None and (chunk.sample is not None or void):
                    operation.void[table] = chunk.start
            operation.fed = [
                None if each is None or mask is not None else (each.token + (delay == misleads)) % VOCAB
                for each, mask in zip(drawn, operation.masks, strict=True)
            ]
            return drawn

        operation.do = do
        return self._launch(self.steps, operation)

    def _begin_mask(self, tokens: Sequence[int], chunk: Chunk) -> RigMask | None:
        """Have the mask of a draw computed, if it has one."""
        if chunk.sample is None or (mask := chunk.sample.mask) is None:
            return None
        assert isinstance(mask, RigMask)
        assert chunk.follows is None, "a mask was made of tokens that were not known"
        assert mask.tokens == list(tokens), "a mask is of other tokens than those before the draw"
        if mask.begin():
            self.masks.append(mask)
        return mask

    def _run(self, known: Sequence[int], chunk: Chunk, before: Operation | None, *, void: bool) -> Sampled | None:
        """Run one chunk; return nothing, and leave rubbish, if it goes on from something wrong."""
        token = drawn = None
        if chunk.follows is not None and before is not None and before.fed:
            token, drawn = before.fed[chunk.follows], before.result[chunk.follows]
        if void or (chunk.follows is not None and (drawn is None or drawn.token != token)):
            for position in range(chunk.start, chunk.end):
                self.pages[chunk.pages[position // PAGE]][position % PAGE] = -1
            for position, (page, at), _ in self.window_places(chunk):
                self.pages[page][at] = -1 if position >= chunk.start else self.pages[page][at]
            return None
        if token is None:
            return self.run(known, chunk)
        return self.run([*known, token], structs.replace(chunk, tokens=[token]))

    def launch_duplicate(self, order: DuplicatePage) -> None:
        self._launch(self.steps, Operation(lambda: self.duplicate(order), {}, {}, next(self.delays)))

    def launch_copies(self, copies: Sequence[Copy], arena: SlotMemory, check: Callable[[Copy], None]) -> Operation:
        """Launch copies from or to an arena. `check` is called when they write to a slot."""
        inward = isinstance(copies[0], CopyIn)
        contents: dict[tuple[int, int], int] = {}
        for copy in copies:
            page = arena.read_slot(copy.slot, 0) if inward else self.pages[copy.page]
            contents |= {(copy.page, position): digest for position, digest in enumerate(page)}

        def do() -> None:
            for copy in copies:
                check(copy)
            self.copy(copies, arena)

        reads, writes = ({}, contents) if inward else (contents, {})
        after = [each for each in self.steps if not each.reads and not each.writes]  # copies within the device
        operation = Operation(do, reads, writes, self.slow_copies * next(self.delays), after if inward else ())
        return self._launch(self.coming if inward else self.leaving, operation)

    def advance(self) -> None:
        """A moment passes."""
        for mask in self.masks:
            mask.compute()
        self.masks = [mask for mask in self.masks if not mask.ready]
        for queue in (self.steps, self.coming, self.leaving):
            while queue and all(each.done for each in queue[0].after):
                first = queue[0]
                if first.delay > 0:
                    first.delay -= 1
                    break
                first.result, first.done = first.do(), True
                queue.popleft()

    def _launch(self, queue: deque[Operation], operation: Operation) -> Operation:
        for other in (self.steps, self.coming, self.leaving):
            for each in other if other is not queue else ():
                operation.assert_no_race(each)
        queue.append(operation)
        return operation


class OverlappedWorker(RigWorker):
    """A worker of the rig that goes on while its device works."""

    device: OverlappedDevice
    copies_overlap = True

    def __init__(
        self, rig: OverlappedRig, role: WorkerRole, num_pages: int, config: DecodeConfig | PrefillConfig,
        node: RigStore, window: int | None = None, recompute_share: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(rig, role, num_pages, config, node, window, recompute_share)
        self.device = OverlappedDevice(num_pages, itertools.cycle(rig.delays), rig.slow_copies, window, rig.groups)
        self._turn: Generator[float, None, bool] | None = None
        self.most_steps = 2
        self.ahead = 0  # chunks that were launched before their tokens were known
        self.late = 0  # rows without a token because of their masks
        self._running: deque[tuple[ScheduledBatch, Operation]] = deque()
        self._moving: list[tuple[int, Sequence[Copy], Operation]] = []

    def turn(self) -> bool:
        """Go on with the turn until it waits for a step, or ends. Tell whether there is more to do."""
        self.device.advance()
        self._turn = self._turn or self.make_turn()
        try:
            next(self._turn)
        except StopIteration:
            self._turn = None
        self.state.validate()
        return self._turn is not None or self.device.under_way or bool(self._moving)

    def step(self) -> bool:
        return self.turn()

    def copy(self) -> None:
        for batch in batches(self.state.take_copies(), 2):
            self._launch(batch, self.blocks.begin())

    def events(self) -> Iterator[Any]:
        for each in list(self._moving):
            epoch, copies, operation = each
            if operation.done:
                self._moving.remove(each)
                yield CopyEnded(epoch, copied(copies))
        yield from self.replies()

    def launch_copies(self, copies: Sequence[Copy], epoch: int) -> Generator[float, None, None]:
        self._launch(copies, epoch)
        yield from ()

    def _launch(self, copies: Sequence[Copy], epoch: int) -> None:
        operation = self.device.launch_copies(copies, self.node.arena, self._checker())
        self._moving.append((epoch, copies, operation))

    def _checker(self) -> Callable[[Copy], None]:
        arena, connection = self.node.arena, self.connection

        def check(copy: Copy) -> None:
            if not isinstance(copy, CopyOut) or self.node.arena is not arena or self.connection != connection:
                return  # the store is another one by now
            process = self.node.state._processes[self.pid, self.peer.incarnation]
            lease = process.leases.get(copy.lease)
            reserved = lease.reservations.get(copy.index) if lease is not None else None
            assert reserved is not None, f"slot {copy.slot} was given up while a copy may write to it"
            assert reserved.slot == copy.slot

        return check

    def duplicate_page(self, order: DuplicatePage) -> None:
        self.device.launch_duplicate(order)

    def run_step(self, plan: ScheduledBatch) -> Generator[float, None, StepOutOfMemory | None]:
        yield from ()
        if sum(len(chunk.tokens) for chunk in plan.values()) > self.most_tokens:
            return StepOutOfMemory(plan, "CUDA out of memory")  # nothing of it lies in the queue
        known = [list(tokens) for tokens in self.tokens_of(plan)]
        for chunk in plan.values():
            if chunk.follows is not None:
                self.ahead += 1
                assert chunk.sample.edits is None, "a rule was applied to tokens that were not known"
        before = self._running[-1][1] if self._running else None
        self._running.append((plan, self.device.launch_step(known, list(plan.values()), before)))
        return None

    def await_step(self) -> Body:
        yield 0.0

    def collect_step(self) -> StepDone | StepFailed | None:
        plan, operation = self._running[0]
        if not operation.done:
            return None
        self._running.popleft()
        if operation.result is None:
            return StepFailed(plan, "the device says so")
        if self.role == "prefill":
            return StepDone(plan, [None] * len(plan), seconds=0.01)
        drawn = [self._masked(each, mask) for each, mask in zip(operation.result, operation.masks, strict=True)]
        return StepDone(plan, drawn, seconds=0.01)

    def _masked(self, drawn: Sampled | None, mask: RigMask | None) -> Sampled | None:
        """What is drawn with a mask, at the last moment. A late one leaves its row without a token."""
        if mask is None:
            return drawn
        self.late += drawn is None or not mask.ready
        return mask.draw(drawn.token) if drawn is not None and mask.ready else None


class OverlappedRig(Rig):
    """A rig of such workers. `delays` are those of each worker's operations, in turns, over and over, and `mask_delays`
    those of grammars' masks."""

    worker_class = OverlappedWorker

    def __init__(
        self,
        delays: Sequence[int],
        *args: Any,
        slow_copies: int = 1,
        mask_delays: Sequence[int] = (0,),
        **settings: Any,
    ) -> None:
        self.delays, self.slow_copies = delays, slow_copies
        self.mask_delays = itertools.cycle(mask_delays)
        self.grammars = RigGrammars(self)
        super().__init__(*args, **settings)
