"""The bare engine of this checkout beside that of another, such as the commit before.

    git worktree add --detach /tmp/before HEAD~1
    python -m bench.commits /tmp/before [--model 100m] [--dtype bfloat16] [--threads 2] [--restarts 4] [--cases …]

A case is `decode-ROWS-CONTEXT` or `prefill-PROMPTS-TOKENS`. Both engines live in processes of their own and take turns
at every case. They are restarted several times, in changing order, since where the kernel puts a process's memory is
worth several percent. Prints medians, and the geometric mean of the restarts' ratios: above one, this checkout is the
faster.
`CXX`, a command that adds `-march=x86-64-v3`, makes both compile for AVX2 alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import models, report

CASES = ["decode-1-300", "decode-8-300", "decode-32-300", "prefill-1-512", "prefill-8-128", "prefill-1-4000"]
_PAGES, _PAGE = 2_400, 16
_STEPS = 12  # of decoding, whose median counts
_STEP_TOKENS = 512  # of prompts in one step
_TURNS = 4  # of each engine at each case after a restart; the first warms up


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--model", default="100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=4)
    arguments = parser.parse_args(argv)
    cases = arguments.cases.split(",")
    engine = [str(models.directory(arguments.model)), arguments.dtype, str(arguments.threads)]
    here, there = Path(__file__).parents[1], arguments.other.resolve()
    medians: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for restart in range(arguments.restarts):
        order = (here, there) if restart % 2 else (there, here)
        engines = {checkout: _start(checkout, engine) for checkout in order}
        for case in cases:
            turns = {checkout: [_ask(engines[checkout], case) for _ in range(_TURNS)][1:] for checkout in order}
            medians[case].append((statistics.median(turns[there]), statistics.median(turns[here])))
        for process in engines.values():
            process.communicate()
    report.say(report.machine())
    for case, pairs in medians.items():
        before, now = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.geometric_mean(one / other for one, other in pairs)
        report.say(f"{case:16} {before:9.2f} ms there {now:9.2f} ms here {ratio:7.3f}")
    return 0


def _start(checkout: Path, engine: Sequence[str]) -> subprocess.Popen[str]:
    """The engine of a checkout, loaded; this file's other half drives it."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), "--serve", *engine], cwd=checkout, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", f"the engine of {checkout} did not start"
    return process


def _ask(process: subprocess.Popen[str], case: str) -> float:
    """Milliseconds of a case."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def serve(path: str, dtype: str, threads: str) -> None:
    """Time the cases that stdin names, by the engine of the checkout that PYTHONPATH names."""
    from engine.engine import Engine
    from engine.step.batch import Chunk, TokenDraw

    engine = Engine.load(Path(path), dtype, "cpu", _PAGES, _PAGE, True, threads=int(threads))
    greedy, rng = TokenDraw(temperature=0), random.Random(1)

    def pages(sequence: int, tokens: int) -> range:
        count = tokens // _PAGE + 2
        first = sequence * count % (_PAGES - count)
        return range(first, first + count)

    def decode(rows: int, context: int) -> float:
        tables, times = [pages(row, context + _STEPS) for row in range(rows)], list[float]()
        for step in range(_STEPS):
            chunks = [Chunk([5 + step], context + step, table, greedy) for table in tables]
            begin = time.perf_counter()
            engine.step(chunks)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def prefill(prompts: int, length: int) -> float:
        tokens = [[rng.randrange(engine.vocab_size) for _ in range(length)] for _ in range(prompts)]
        at_once, begin = max(1, _STEP_TOKENS // length), time.perf_counter()
        for first in range(0, prompts, at_once):
            for at in range(0, length, _STEP_TOKENS):
                last = at + _STEP_TOKENS >= length
                engine.step(
                    [
                        Chunk(tokens[i][at : at + _STEP_TOKENS], at, pages(i, length), greedy if last else None)
                        for i in range(first, min(prompts, first + at_once))
                    ]
                )
        return time.perf_counter() - begin

    print("ready", flush=True)
    for line in sys.stdin:
        kind, first, second = line.split("-")
        print(1e3 * {"decode": decode, "prefill": prefill}[kind](int(first), int(second)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
