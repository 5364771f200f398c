"""From rows to what vLLM's model runner is told of a step, and back. For the child alone.

The protocol is the part that vLLM's two model runners share. A row that goes on with the token drawn for it is cached.
Every other row is a new request with all its blocks and the number of tokens that are computed. Those tokens are sent
as zeros: only their number is looked at.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from baton.errors import DeviceLost
from baton.messages import PromptTokenLogprob
from engine.step.batch import Sampled
from engine.vllm_runner.bring_up import NULL_BLOCKS, add_adapter, lora_request
from engine.vllm_runner.messages import Drawn, Row, Step
from engine.vllm_runner.ranks import Ranks

_PATIENCE = 600.0  # seconds, as for any order
_COMPANION = Row(-1, False, [0], 0, [-NULL_BLOCKS], (), None)  # it fills the first token of the block for padding


class StartedStep:
    """A step that the ranks were told to run. While one thread waits for its end, another may start the next one."""

    def __init__(self, began: float, rows: Mapping[int, Row], before: StartedStep | None, count: int) -> None:
        """`rows`: those of `count` that are run, by number. `before`: the step that they may follow."""
        self.rows, self.began, self.ended = rows, began, 0.0
        self.names: Sequence[str] = ()
        self.answers: Callable[[], list[Any]] | None = None
        self.sampled: list[Sequence[Sampled]] = [()] * count
        self.corrected: set[int] = set()  # rows with another token on the device
        self._before = before
        self._collected = threading.Event()

    @property
    def before(self) -> StartedStep:
        return self._before or _NONE

    @property
    def seconds(self) -> float:
        """What it took, once it is collected, since the step before it had ended."""
        return self.ended - self.began

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Its results are found out."""
        try:
            yield
        finally:
            self.ended = time.perf_counter()
            self.began = max(self.began, self.before.ended)
            self._collected.set()
            self._before = None

    def wait(self) -> None:
        """Wait until it is collected. Raises DeviceLost if it is not in time."""
        if not self._collected.wait(_PATIENCE):
            raise DeviceLost(f"a step has not ended within {_PATIENCE:.0f} s")

    def gives(self, number: int) -> bool:
        """Whether a row has drawn a token, or will, as far as is known, that the device goes on from."""
        before, row = self.before, self.rows.get(number)
        if row is None or row.draw is None:
            return False
        if self._collected.is_set():
            return bool(self.sampled[number]) and number not in self.corrected
        return row.follows is None or before.gives(row.follows)

    def token(self, number: int) -> int:
        """The token that a row has drawn, or 0 if that is not known."""
        drawn = self.sampled[number]
        return drawn[-1].token if drawn else 0


_NONE = StartedStep(0.0, {}, None, 0)
with _NONE.collecting():
    pass


class Steps:
    """Runs steps on all ranks. Remembers which requests vLLM knows."""

    def __init__(
        self,
        ranks: Ranks,
        adapters: dict[int, Any],
        windows: Sequence[int],
        *,
        companion: bool,
        state_page: int,
        states_only: bool,
        drafts: int,
    ) -> None:
        """`adapters`: vLLM's LoRA requests by the numbers that rows have. `windows`: of its groups of layers, 0 for the
        one without. `companion`: no step has a single row. `state_page`: the tokens of a page, if the other groups have
        recurrent states; else 0. `states_only`: the main group has states too. `drafts`: the most proposals
        that vLLM makes for a row."""
        self._ranks, self._adapters, self._companion = ranks, adapters, companion
        self._main, self._groups, self._state_page = windows.index(0), len(windows) - 1, state_page
        self._states_only, self._drafts = states_only, drafts
        self._companion_row = structs.replace(_COMPANION, window_pages=[-NULL_BLOCKS] * self._groups)
        self._names: dict[int, str] = {}  # what vLLM calls a row that it knows
        self._outputs: dict[int, int] = {}  # tokens drawn for it, as vLLM has counted
        self._named = 0
        self._before = _NONE  # the last step
        self._left: set[str] = set()  # vLLM has not been told yet that these are gone

    def launch(self, step: Step) -> StartedStep:
        """Begin a step. At most one before it is not collected yet. Raises whatever vLLM raises; its rows are new to
        vLLM after that."""
        began = time.perf_counter()
        for row in step.gone:
            self._forget(row)
        before, self._before = self._before, _NONE
        if any(row.follows is not None and not row.appends for row in step.rows):
            before.wait()  # such a row is new to vLLM, and its token comes from here
        rows = {
            number: row if row.follows is None else structs.replace(row, tokens=[before.token(row.follows)])
            for number, row in enumerate(step.rows)
            if (row.tokens if row.follows is None else before.gives(row.follows))
        }
        started = StartedStep(began, rows, before, len(step.rows))
        if rows or self._left:
            started.names, started.answers = self._start(list(rows.values()), min(step.guesses, self._drafts))
        self._before = started
        return started

    def collect(self, started: StartedStep) -> Drawn:
        """Wait for a step. Steps are collected in order, on any one thread. Raises whatever vLLM raises."""
        with started.collecting():
            drawn: Mapping[str, Sequence[Sampled]] = {}
            scored: Mapping[str, list[PromptTokenLogprob]] = {}
            corrected: Sequence[str] = ()
            drafted: Mapping[str, Sequence[int]] = {}
            drafting = 0.0
            if started.answers is not None:
                drawn, scored, corrected, drafted, drafting = self._ranks.agreed(started.answers(), _tokens)
            scores: dict[int, list[PromptTokenLogprob]] = {}
            proposals: dict[int, Sequence[int]] = {}
            for (number, row), name in zip(started.rows.items(), started.names, strict=False):
                if name in scored:
                    scores[number] = scored[name]
                if name in drafted:
                    proposals[number] = drafted[name]
                if row.verify:
                    self._outputs[row.name] += len(drawn[name]) - 1
                if row.follows is None or started.before.gives(row.follows):
                    started.sampled[number] = drawn.get(name, ())
                if name in corrected:
                    started.corrected.add(number)
        return Drawn(started.sampled, scores, started.seconds - drafting, proposals, drafting)

    def add_adapter(self, number: int, name: str, path: str) -> None:
        """Load an adapter for rows to come."""
        request = lora_request(name, number, path)
        add_adapter(self._ranks.executor, request)
        self._adapters[number] = request

    def remove_adapter(self, number: int, gone: Sequence[int]) -> None:
        """Remove an adapter whose rows are gone. vLLM would load one again that a row of a step names."""
        for row in gone:
            self._forget(row)
        del self._adapters[number]
        self._ranks.executor.remove_lora(number)

    def _start(self, rows: Sequence[Row], guesses: int) -> tuple[list[str], Callable[[], list[Any]]]:
        """Have the ranks begin to run these rows, and propose so many tokens after each that draws. Return their names,
        and what waits for the ranks."""
        rows = [*rows, *[self._companion_row] * (self._companion and len(rows) == 1)]
        try:
            order, names = self._order(rows, guesses)
            answers = self._ranks.start(
                "baton_step",
                order,
                [page + NULL_BLOCKS for row in rows for page in row.fresh],
                [copy for row in rows for copy in self._state_copies(row)],
                dict(zip(names, rows, strict=True)),
            )
        except BaseException:
            for row in rows:
                self._forget(row.name)
            raise
        for row in rows:
            if row.draw is None:
                self._forget(row.name)  # it comes back as new: vLLM knows one token that is none
            else:
                self._outputs[row.name] += 1
        return names, answers

    def _order(self, rows: Sequence[Row], guesses: int) -> tuple[Any, list[str]]:
        """What vLLM calls a scheduler's output, and its names of the rows."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        new: list[Any] = []
        cached = CachedRequestData.make_empty()
        names: list[str] = []
        for row in rows:
            blocks = self._blocks(row)
            if row.appends and row.name in self._names:
                name = self._names[row.name]
                cached.req_ids.append(name)
                cached.new_token_ids.append(list(row.tokens))  # a stage but the last has not seen its draw
                cached.num_computed_tokens.append(row.start)
                cached.num_output_tokens.append(self._outputs[row.name])
                cached.new_block_ids.append(blocks if row.pages else None)
            else:
                assert not row.appends, "a row that vLLM does not know can't go on"
                self._forget(row.name)
                self._named += 1
                name = self._names[row.name] = f"{row.name}-{self._named}"
                self._outputs[row.name] = 0
                # Where nothing is drawn there is one token more than is computed, so that vLLM forgets its draw.
                tokens = [0] * row.start + list(row.known) + ([] if row.draw is not None else [0])
                parameters = SamplingParams(temperature=0.0, max_tokens=1 << 20)
                new.append(
                    NewRequestData(
                        req_id=name,
                        prompt_token_ids=tokens,
                        mm_features=[],
                        sampling_params=parameters,
                        pooling_params=None,
                        block_ids=blocks,
                        num_computed_tokens=row.start,
                        lora_request=self._adapters[row.adapter],
                        prefill_token_ids=tokens,
                    )
                )
            names.append(name)
        scheduled = {name: len(row.tokens) for name, row in zip(names, rows, strict=True)}
        left, self._left = self._left, set()
        order = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={
                name: list(row.proposals) for name, row in zip(names, rows, strict=True) if row.verify
            },
            scheduled_encoder_inputs={},
            finished_req_ids=left,
            free_encoder_mm_hashes=[],
            num_spec_tokens_to_schedule=guesses if any(row.draw is not None for row in rows) else 0,
        )
        return order, names

    def _blocks(self, row: Row) -> tuple[list[int], ...]:
        """The blocks of a row's pages, for each of vLLM's groups in its order."""
        blocks, window_blocks = ([page + NULL_BLOCKS for page in pages] for pages in (row.pages, row.window_pages))
        if self._state_page:
            window_blocks = window_blocks[-self._groups :]  # vLLM knows one state of a sequence, and changes it
        groups = [window_blocks[group :: self._groups] for group in range(self._groups)]
        groups.insert(self._main, blocks[-1:] if self._states_only else blocks)
        return tuple(groups)

    def _state_copies(self, row: Row) -> list[tuple[int, int]]:
        """A row that begins a page has its state there from now on: that of the page before it is kept as it is."""
        if not self._state_page or not row.start or row.start % self._state_page:
            return []
        blocks, count = [page + NULL_BLOCKS for page in row.window_pages], self._groups
        copies = list(zip(blocks[-2 * count : -count], blocks[-count:], strict=True))
        return [(row.pages[-2] + NULL_BLOCKS, row.pages[-1] + NULL_BLOCKS), *copies] if self._states_only else copies

    def _forget(self, row: int) -> None:
        if (name := self._names.pop(row, None)) is not None:
            self._left.add(name)
            self._outputs.pop(row, None)


def _tokens(answer: tuple[Mapping[str, Sequence[Sampled]], object, object, object, object]) -> dict[str, list[int]]:
    return {name: [one.token for one in each] for name, each in answer[0].items()}
