"""lm_eval's command, but local-completions adds up the log-probabilities of an ending in float32, as its hf model does.

lm-eval 0.4.13 adds them in double precision there. Neither sum tells whether the log-probabilities themselves had the
same bits. Runs in lm-eval's environment, without Baton's packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

_parse_logprobs = LocalCompletionsAPI.parse_logprobs


def parse_logprobs(
    outputs: dict[str, Any] | list[dict[str, Any]], tokens: Any = None, ctxlens: Sequence[int] = (), **more: Any
) -> list[tuple[float, bool]]:
    """As lm-eval's, with sums in float32. `ctxlens`: tokens before each ending."""
    parsed = _parse_logprobs(outputs=outputs, tokens=tokens, ctxlens=ctxlens, **more)
    sums = [
        float(torch.tensor(choice["logprobs"]["token_logprobs"][length:-1], dtype=torch.float32).sum())
        for out in (outputs if isinstance(outputs, list) else [outputs])
        for choice, length in zip(sorted(out["choices"], key=itemgetter("index")), ctxlens, strict=True)
    ]
    return [(total, greedy) for total, (_, greedy) in zip(sums, parsed, strict=True)]


if __name__ == "__main__":
    LocalCompletionsAPI.parse_logprobs = staticmethod(parse_logprobs)
    cli_evaluate()
