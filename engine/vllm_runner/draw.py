"""Baton's draw in the place of vLLM's sampler, for each of vLLM's two model runners. For the child alone."""

# pyright: reportMissingImports=false

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baton.messages import PromptTokenLogprob
from engine.sampling.sampler import Sampler, sampler_for
from engine.step.batch import Sampled, TokenDraw
from engine.vllm_runner.messages import Row

_LARGEST_DRAW = TokenDraw(temperature=1.0, top_p=0.9, logprobs=20)


class BatonDraw(ABC):
    """Stands in the place of vLLM's sampler. The tokens of rows without a draw mean nothing; vLLM forgets them."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._own = runner, runner.sampler
        self._sampler: Sampler = sampler_for(runner.device)
        self.draws: Mapping[str, tuple[TokenDraw, int]] = {}  # of the step, by request: and the new token's position
        self.drawn: dict[str, Sampled] = {}
        self.measured = True
        """vLLM measures the memory of steps, and warms up: each row has the draw that takes most."""

    def __getattr__(self, name: str) -> Any:
        """What else vLLM asks of its sampler is its own."""
        return getattr(self._own, name)

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The requests of the step that has run its model, in the order of their tokens."""

    def score(self, hidden: torch.Tensor, row: Row, first: int) -> list[PromptTokenLogprob]:
        """Log-probabilities of a row's targets. `hidden` is [tokens, hidden] of the step, `first` the row's first."""
        begin = first + row.first
        logits = self._runner.model.compute_logits(hidden[begin : begin + len(row.targets)])
        return self._sampler.score(logits, row.targets, row.top)

    def _tokens(self, logits: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Draw from `logits`, [requests, vocab], the rows of `names` that have a draw. Return [requests] on their
        device."""
        if self.measured:
            names = list(map(str, range(len(logits))))
            self.draws = dict.fromkeys(names, (_LARGEST_DRAW, 1))
        rows = [row for row, name in enumerate(names) if name in self.draws]
        tokens = torch.zeros(len(names), dtype=torch.int64, device=logits.device)
        if rows:
            chosen = logits if len(rows) == len(names) else logits[rows]
            draws = [self.draws[names[row]] for row in rows]
            sampled = self._sampler.sample(chosen, [draw for draw, _ in draws], [at for _, at in draws], None)
            self.drawn = {names[row]: one for row, one in zip(rows, sampled, strict=True)}
            tokens[rows] = torch.tensor([one.token for one in sampled], dtype=torch.int64, device=logits.device)
        return tokens


class FirstDraw(BatonDraw):
    """For the model runner that vLLM calls V1."""

    @property
    def names(self) -> Sequence[str]:
        return self._runner.input_batch.req_ids

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        tokens = self._tokens(logits, self.names)
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32).unsqueeze(1), logprobs_tensors=None)


class SecondDraw(BatonDraw):
    """For the model runner that vLLM calls V2. It is told how many tokens each row has drawn."""

    @property
    def names(self) -> Sequence[str]:
        return self._runner.execute_model_state.input_batch.req_ids

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        names: Sequence[str] = input_batch.req_ids
        counts = torch.tensor(
            [self.measured or name in self.draws for name in names], dtype=torch.int32, device=logits.device
        )
        return SamplerOutput(
            sampled_token_ids=self._tokens(logits, names).unsqueeze(1),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=counts,
            num_rejected=torch.zeros_like(counts),
        )


def make_draw(runner: Any, *, second: bool) -> BatonDraw:
    """Return the draw for that model runner of vLLM's, `second` if it is V2."""
    return SecondDraw(runner) if second else FirstDraw(runner)
