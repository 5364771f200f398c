"""Baton's draw in the place of vLLM's sampler, for each of vLLM's two model runners. For the child alone."""

# pyright: reportMissingImports=false

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, takewhile
from typing import Any

import numpy as np
import torch

from baton.messages import PromptTokenLogprob
from engine.device.uploads import upload
from engine.sampling.device_sampler import DeviceSampler, LaunchedDraws
from engine.sampling.sampler import Sampler, sampler_for
from engine.step.batch import Sampled, TokenDraw
from engine.vllm_runner.messages import Row

_LARGEST_DRAW = Row(0, False, [0], 0, (), (), TokenDraw(temperature=1.0, top_p=0.9, logprobs=20))


class BatonDraw(ABC):
    """Stands in the place of vLLM's sampler. The tokens of rows without a draw mean nothing; vLLM forgets them."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._own = runner, runner.sampler
        self._sampler: Sampler = sampler_for(runner.device)
        self.rows: Mapping[str, Row] = {}  # of the step, by request
        self.drawn: dict[str, Sequence[Sampled]] = {}
        self.hidden: torch.Tensor | None = None  # of the step, [tokens, hidden], if more than its last rows count
        self.measured = True
        """vLLM measures the memory of steps, and warms up: each row has the draw that takes most."""

    def __getattr__(self, name: str) -> Any:
        """What else vLLM asks of its sampler is its own."""
        return getattr(self._own, name)

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The requests of the step that has run its model, in the order of their tokens."""

    def tell(self, rows: Mapping[str, Row]) -> None:
        """Take a step's rows."""
        self.rows, self.drawn = rows, {}

    def scores(self) -> Mapping[str, list[PromptTokenLogprob]]:
        """Return the log-probabilities of the targets of rows, by request."""
        scores: dict[str, list[PromptTokenLogprob]] = {}
        for name, end in self._ends().items() if self.hidden is not None else ():
            if (row := self.rows[name]).targets:
                begin = end - len(row.tokens) + row.first
                logits = self._logits(list(range(begin, begin + len(row.targets))))
                scores[name] = self._sampler.score(logits, row.targets, row.top)
        return scores

    def _ends(self) -> Mapping[str, int]:
        """Where the tokens of each request end in the step."""
        return dict(zip(self.names, accumulate(len(self.rows[name].tokens) for name in self.names), strict=True))

    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after these tokens of the step."""
        assert self.hidden is not None
        return self._runner.model.compute_logits(self.hidden[tokens])

    def _tokens(self, logits: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Draw for the rows of `names` that have a draw. `logits` are [requests, vocab]; or of each row, if vLLM has a
        draft and the step proposals. Else those of rows with proposals are computed here. Return [requests, tokens] on
        their device, with -1 behind the last."""
        if self.measured:
            names = list(map(str, range(len(logits))))
            self.rows = dict.fromkeys(names, _LARGEST_DRAW)
        rows = {name: row for name in names if (row := self.rows[name]).draw is not None}
        if rows:
            counts = [1 + len(self.rows[name].verify) for name in names]
            if len(logits) == sum(counts) > len(names):
                drawing = [name in rows for name, count in zip(names, counts, strict=True) for _ in range(count)]
                logits = logits[drawing]
            elif any(row.verify for row in rows.values()):
                ends = self._ends()
                logits = self._logits([at for name, row in rows.items() for at in row.drawn_after(ends[name])])
            elif len(rows) < len(names):
                logits = logits[[at for at, name in enumerate(names) if name in rows]]
            draws = [draw for row in rows.values() for draw in row.draws]
            sampled = iter(self._sampler.sample(logits, [draw for _, draw in draws], [at for at, _ in draws], None))
            self.drawn = {name: _counting(row, list(islice(sampled, len(row.draws)))) for name, row in rows.items()}
        tokens = [[one.token for one in self.drawn[name]] if name in rows else [0] for name in names]
        widest = max(map(len, tokens), default=1)
        filled = [each + [-1] * (widest - len(each)) for each in tokens]
        return torch.tensor(filled, dtype=torch.int64, device=logits.device)


class FirstDraw(BatonDraw):
    """For the model runner that vLLM calls V1."""

    @property
    def names(self) -> Sequence[str]:
        return self._runner.input_batch.req_ids

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        tokens = self._tokens(logits, self.names)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=None)

    def accept(self, metadata: Any, probabilities: object, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """vLLM's rejection sampler. It is called where a step has proposals and vLLM knows a draft, with the logits of
        all rows."""
        return self(logits, sampling_metadata)


class SecondDraw(BatonDraw):
    """For the model runner that vLLM calls V2. It is told how many tokens each row has drawn.

    Tokens stay on the device, where the next step takes them. They come to the host when the step is collected."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._on_device = DeviceSampler(runner.device)
        self.launched: tuple[Sequence[str], LaunchedDraws] | None = None
        """Of the step: the requests that draw, and their draws."""
        self._ones = self._zeros = torch.empty(0)  # int32 on the device, as many as rows so far

    @property
    def names(self) -> Sequence[str]:
        return self._runner.execute_model_state.input_batch.req_ids

    def tell(self, rows: Mapping[str, Row]) -> None:
        """Take a step's rows. The token of a row that goes on is on the device. One that the host knows is put there
        again: some draws are corrected as they are collected."""
        self.rows, self.launched = rows, None
        tokens = {name: row.tokens[0] for name, row in rows.items() if row.appends and row.follows is None}
        if tokens:
            states = self._runner.req_states
            with torch.inference_mode():
                places = self._upload([states.req_id_to_index[name] for name in tokens])
                states.last_sampled_tokens[places, 0] = self._upload(list(tokens.values()))

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        names: Sequence[str] = input_batch.req_ids
        if self.measured:
            self.rows = dict.fromkeys(names, _LARGEST_DRAW)
        drawing = [at for at, name in enumerate(names) if self.rows[name].draw is not None]
        if len(self._ones) < len(names):
            self._ones, self._zeros = (
                torch.full((len(names),), number, dtype=torch.int32, device=logits.device) for number in (1, 0)
            )
        ones, zeros = self._ones[: len(names)], self._zeros[: len(names)]
        if len(drawing) == len(names):  # mostly so: nothing is launched for the counts
            counts, tokens = ones, self._launch(logits, names)
        else:
            places = self._upload(drawing)
            counts = zeros.index_fill(0, places, 1)
            tokens = torch.zeros(len(names), 1, dtype=torch.int64, device=logits.device)
            if drawing:
                tokens.index_copy_(0, places, self._launch(logits[places], [names[at] for at in drawing]))
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=counts,
            num_rejected=zeros,
        )

    def _launch(self, logits: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Launch a draw for each of these requests. Return their tokens on the device, [requests, 1]."""
        draws = [draw for name in names for draw in self.rows[name].draws]
        both = [  # the draws of two steps are in memory at a time, so vLLM measures as many
            self._on_device.launch(logits, [draw for _, draw in draws], [at for at, _ in draws])
            for _ in range(1 + self.measured)
        ]
        if self.measured:
            both[0].collect()
        else:
            self.launched = names, both[-1]
        return both[-1].tokens[:, None]

    def _upload(self, numbers: Sequence[int]) -> torch.Tensor:
        return upload(np.array(numbers, np.int64), self._runner.device)


def _counting(row: Row, drawn: Sequence[Sampled]) -> Sequence[Sampled]:
    """Of the tokens drawn for a row, those up to the first that is not the proposal after it."""
    pairs = zip(drawn, row.proposals, strict=False)
    return drawn[: 1 + sum(1 for _ in takewhile(lambda pair: pair[0].token == pair[1], pairs))]


def make_draw(runner: Any, *, second: bool) -> BatonDraw:
    """Return the draw for that model runner of vLLM's, `second` if it is V2."""
    return SecondDraw(runner) if second else FirstDraw(runner)
