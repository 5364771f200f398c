"""The protocol of `bench.peers.adapter`, with the course of every step besides: `python -m bench.peers.steps SIDE …`.

- `vllm MODEL DEVICE`: vLLM's own `LLM.generate`, in one process. `vllm MODEL DEVICE eager`: nothing is compiled.
- `baton MODEL DEVICE THREADS [mixed]`: Baton's `VllmRunner`, bare, in a loop. `mixed`: bits may depend on other rows.
- `native MODEL DEVICE THREADS`: our own engine.

An answer also has `ends`, when each step ended, and `model`, what the model runner took of it, both in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.peers import adapter

PAGE_SIZE = 32  # tokens; vLLM's kernels for CPUs take multiples of it
STEP_TOKENS = 2_048
GPU_SHARE = 0.25  # of a GPU's memory: all sides are loaded at once
_GPU_POOL = 4 * 2**30  # bytes of vLLM's pages there: so it need not measure what is free, which others change
_MAX_TOKENS = 4_096  # of one sequence
_ROWS, _PAGES = 64, 1_024


class Course(NamedTuple):
    """What came of a job: its tokens, when each step ended, and what the model runner took of each. Seconds."""

    tokens: adapter.Tokens
    ends: list[float]
    model: list[float]


class Decoding(NamedTuple):
    """The steps of a job that only decode, as medians in seconds: of a whole step, and of the model's part."""

    step: float
    model: float

    @classmethod
    def of(cls, course: Course, count: int) -> Decoding:
        """`count` tokens were generated for each prompt, so the last `count` - 1 steps had no prompt in them."""
        gaps = [later - earlier for earlier, later in pairwise(course.ends)][-(count - 1) :]
        return cls(median(gaps), median(course.model[-(count - 1) :]))


Run = Callable[[adapter.Tokens, int], Course]


def serve(load: Callable[[], Run]) -> None:
    """A side's process: load it, then answer every job with its course."""

    def loaded() -> Callable[[adapter.Tokens, int], dict[str, Any]]:
        run = load()
        return lambda prompts, count: run(prompts, count)._asdict()

    adapter.serve_answers(loaded)


def vllm(model: str, device: str, how: str = "compiled") -> Run:
    """vLLM as it is by default, with pages of the same size."""
    library = import_module("vllm")  # by name: only one environment has it
    llm: Any = library.LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=_MAX_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=_ROWS,
        block_size=PAGE_SIZE,
        disable_log_stats=True,
        enforce_eager=how == "eager",
        **({"gpu_memory_utilization": GPU_SHARE, "kv_cache_memory_bytes": _GPU_POOL} if device != "cpu" else {}),
    )
    engine = llm.llm_engine
    executor = engine.engine_core.engine_core.model_executor
    ends: list[float] = []
    model_seconds: list[float] = []
    spent = [0.0]

    def timed(name: str) -> None:
        call = getattr(executor, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            spent[0] += time.perf_counter() - began
            return result

        setattr(executor, name, wrapper)

    timed("execute_model")
    timed("sample_tokens")
    step = engine.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        spent[0] = 0.0
        result = step(*args, **kwargs)
        ends.append(time.perf_counter())
        model_seconds.append(spent[0])
        return result

    engine.step = noted

    def run(prompts: adapter.Tokens, count: int) -> Course:
        ends.clear()
        model_seconds.clear()
        sampling = library.SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return Course([list(one.outputs[0].token_ids) for one in outputs], list(ends), list(model_seconds))

    return run


def baton(model: str, device: str, threads: str, numerics: str = "exact") -> Run:
    """vLLM's runner as a worker has it, without worker, store and router."""
    from engine.vllm_runner.runner import VllmRunner

    runner = VllmRunner.load(
        Path(model),
        "auto",
        _PAGES,
        PAGE_SIZE,
        max_rows=_ROWS,
        max_tokens=STEP_TOKENS,
        threads=int(threads),
        device=device,
        memory_share=GPU_SHARE,
        exact=numerics == "exact",
    )
    return _looped(runner)


def native(model: str, device: str, threads: str) -> Run:
    """Our own engine, in the same loop."""
    from engine.engine import Engine

    return _looped(Engine.load(Path(model), "auto", device, _PAGES, PAGE_SIZE, True, int(threads)))


def _looped(runner: Any) -> Run:
    """Each step is launched ahead of the results of the one before, where the runner does that, as a worker does it."""
    from engine.step.batch import Chunk, TokenDraw
    from engine.step.block_table import BlockTable

    greedy = TokenDraw(temperature=0.0)

    def run(prompts: adapter.Tokens, count: int) -> Course:
        tokens = [list(prompt) for prompt in prompts]
        each = -(-(max(map(len, tokens)) + count) // PAGE_SIZE)
        tables = [BlockTable(range(row * each, (row + 1) * each)) for row in range(len(tokens))]
        course: list[tuple[float, float]] = []

        def finish(rows: Sequence[list[int]], step: Any) -> None:
            finished = step.wait()
            for row, drawn in zip(rows, finished.sampled, strict=True):
                assert drawn is not None
                row.append(drawn.token)
            course.append((time.perf_counter(), finished.seconds))

        at_once = max(1, STEP_TOKENS // max(map(len, tokens)))
        for first in range(0, len(tokens), at_once):
            part = slice(first, first + at_once)
            chunks = [Chunk(list(row), 0, table, greedy) for row, table in zip(tokens[part], tables[part], strict=True)]
            finish(tokens[part], runner.launch(chunks))

        def launch(ahead: int) -> Any:
            """Launch a step behind `ahead` others of this kind whose tokens are not known yet."""
            rows = enumerate(zip(tokens, tables, strict=True))
            return runner.launch(
                [
                    Chunk([0], len(row), table, greedy, follows=number)
                    if ahead
                    else Chunk([row[-1]], len(row) - 1, table, greedy)
                    for number, (row, table) in rows
                ]
            )

        running = launch(0) if count > 1 else None
        for left in range(count - 2, -1, -1):
            ahead = launch(1) if left and runner.launches_ahead else None
            finish(tokens, running)
            running = launch(0) if left and ahead is None else ahead
        ends, seconds = zip(*course, strict=True)
        return Course([row[-count:] for row in tokens], list(ends), list(seconds))

    return run


if __name__ == "__main__":
    side, *arguments = sys.argv[1:]
    serve(lambda: {"vllm": vllm, "baton": baton, "native": native}[side](*arguments))
