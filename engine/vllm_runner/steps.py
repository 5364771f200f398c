"""From rows to what vLLM's model runner is told of a step, and back. For the child alone.

The protocol is the part that vLLM's two model runners share. A row that goes on with the token drawn for it is cached.
Every other row is a new request with all its blocks and the number of tokens that are computed. Those tokens are sent
as zeros: only their number is looked at.
"""

# pyright: reportMissingImports=false

import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from baton.messages import PromptTokenLogprob
from engine.step.batch import Sampled
from engine.vllm_runner.bring_up import NULL_BLOCKS, add_adapter, lora_request
from engine.vllm_runner.messages import Drawn, Row, Step
from engine.vllm_runner.ranks import Ranks

_COMPANION = Row(-1, False, [0], 0, [-NULL_BLOCKS], (), None)  # it fills the first token of the block for padding


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
    ) -> None:
        """`adapters`: vLLM's LoRA requests by the numbers that rows have. `windows`: of its groups of layers, 0 for the
        one without. `companion`: no step has a single row. `state_page`: the tokens of a page, if the other groups have
        recurrent states; else 0. `states_only`: the main group has states too."""
        self._ranks, self._adapters, self._companion = ranks, adapters, companion
        self._main, self._groups, self._state_page = windows.index(0), len(windows) - 1, state_page
        self._states_only = states_only
        self._companion_row = structs.replace(_COMPANION, window_pages=[-NULL_BLOCKS] * self._groups)
        self._names: dict[int, str] = {}  # what vLLM calls a row that it knows
        self._outputs: dict[int, int] = {}  # tokens drawn for it, as vLLM has counted
        self._named = 0
        self._drawn: list[int | None] = []  # in the last step, by row
        self._left: set[str] = set()  # vLLM has not been told yet that these are gone

    def run(self, step: Step) -> Drawn:
        """Run a step. Raises whatever vLLM raises; its rows are new to vLLM after that."""
        began = time.perf_counter()
        for row in step.gone:
            self._forget(row)
        rows = self._with_tokens(step.rows)
        sampled: list[Sequence[Sampled]] = [()] * len(step.rows)
        scores: dict[int, list[PromptTokenLogprob]] = {}
        if rows or self._left:
            names, drawn = self._run(rows, scores)
            for number, name in zip(rows, names, strict=True):
                sampled[number] = drawn.get(name, ())
        self._drawn = [each[-1].token if each else None for each in sampled]
        return Drawn(sampled, scores, time.perf_counter() - began)

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

    def _with_tokens(self, pending: Sequence[Row]) -> dict[int, Row]:
        """The rows that can be run, by number, with the tokens that the step before has drawn for them."""
        drawn, self._drawn = self._drawn, []
        rows: dict[int, Row] = {}
        for number, row in enumerate(pending):
            if row.follows is None:
                if row.tokens:
                    rows[number] = row
            elif row.follows < len(drawn) and (token := drawn[row.follows]) is not None:
                rows[number] = structs.replace(row, tokens=[token])
        return rows

    def _run(
        self, numbered: Mapping[int, Row], scores: dict[int, list[PromptTokenLogprob]]
    ) -> tuple[list[str], Mapping[str, Sequence[Sampled]]]:
        """Run these rows. Return their names, and by name the tokens drawn; add to the scores by number."""
        rows = [*numbered.values(), *[self._companion_row] * (self._companion and len(numbered) == 1)]
        try:
            order, names = self._order(rows)
            answers = self._ranks.call(
                "baton_step",
                order,
                [page + NULL_BLOCKS for row in rows for page in row.fresh],
                [copy for row in rows for copy in self._state_copies(row)],
                dict(zip(names, rows, strict=True)),
            )
            drawn, scored = self._ranks.agreed(answers, _tokens)
        except BaseException:
            for row in rows:
                self._forget(row.name)
            raise
        for row, name in zip(rows, names, strict=True):
            if row.draw is None:
                self._forget(row.name)  # it comes back as new: vLLM knows one token that is none
            else:
                self._outputs[row.name] += len(drawn[name])
        names = names[: len(numbered)]
        scores |= {number: scored[name] for number, name in zip(numbered, names, strict=True) if name in scored}
        return names, drawn

    def _order(self, rows: Sequence[Row]) -> tuple[Any, list[str]]:
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


def _tokens(answer: tuple[Mapping[str, Sequence[Sampled]], object]) -> dict[str, list[int]]:
    return {name: [one.token for one in each] for name, each in answer[0].items()}
