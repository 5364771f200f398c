"""What `model.numerics: exact` costs over vLLM's runner on a CPU: processor time of vLLM's process, a step.

    .venv-vllm/bin/python -m bench.engine.exact_steps [--rounds 15]

A Llama of 100 M random parameters in bfloat16, one thread, eager. A runner with `exact` and one without take turns.
Decode cases have 64 tokens of context. The figure is the quickest tenth of the rounds, `limit` that without `exact`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

import psutil

from bench import models, report
from engine.step.batch import Chunk, TokenDraw
from engine.step.block_table import BlockTable
from engine.vllm_runner.runner import VllmRunner

PAGE, CONTEXT, STEPS = 32, 64, 20
GREEDY = TokenDraw(temperature=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(argv).rounds
    report.say(report.machine())
    path = models.directory("100m")
    runners = [
        VllmRunner.load(path, "bfloat16", 256, PAGE, max_rows=32, max_tokens=2048, threads=1, eager=True, exact=exact)
        for exact in (True, False)
    ]
    cases: dict[str, Callable[[VllmRunner], float]] = {
        f"decode-{rows}": lambda runner, rows=rows: decode(runner, rows) for rows in (1, 8, 32)
    }
    cases |= {f"prefill-{size}": lambda runner, size=size: prefill(runner, size) for size in (128, 1024)}
    try:
        for name, case in cases.items():
            quickest = [sorted(case(runner) for _ in range(rounds))[rounds // 10] for runner in runners]
            report.emit(report.beside("exact_steps", name, "ms", quickest[:1], quickest[1:]))
    finally:
        for runner in runners:
            runner.close()
    return 0


def decode(runner: VllmRunner, rows: int) -> float:
    """Processor time of a step in which so many sequences go on, in milliseconds."""
    tables = [BlockTable() for _ in range(rows)]
    for number, table in enumerate(tables):
        table.extend(range(number * 3, number * 3 + 3))
    prompt = _tokens(CONTEXT)
    chunks = [Chunk(prompt, 0, table, GREEDY) for table in tables]
    begun = 0.0
    for end in range(CONTEXT, CONTEXT + STEPS + 1):
        sampled = runner.launch(chunks).wait().sampled
        begun = begun or _seconds(runner)
        chunks = [Chunk([one.token], end, table, GREEDY) for one, table in zip(sampled, tables, strict=True) if one]
    return (_seconds(runner) - begun) / STEPS * 1e3


def prefill(runner: VllmRunner, size: int) -> float:
    """Processor time of a chunk of so many tokens, in milliseconds."""
    chunk = Chunk(_tokens(size), 0, list(range(-(-size // PAGE))), None)
    begun = _seconds(runner)
    runner.launch([chunk]).wait()
    return (_seconds(runner) - begun) * 1e3


def _tokens(count: int) -> list[int]:
    return random.Random(count).choices(range(3, models.LLAMA_100M["vocab_size"]), k=count)


def _seconds(runner: VllmRunner) -> float:
    times = psutil.Process(runner.process_id).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    raise SystemExit(main())
