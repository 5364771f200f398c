"""What the draw of a token costs: the sampler for CPUs beside the one for devices, or beside that of another commit.

    python -m bench.sampling [--quick] [--device cpu] [--rows 1,8,64] [--vocab 128256] [--threads 2]
    git show COMMIT:engine/sampling/sampler.py > /tmp/before.py && python -m bench.sampling --against /tmp/before.py

One case is a step's `sample` on random logits. `value` is the sampler for CPUs, `limit` the other one, in milliseconds
a step, and `ratio` the median of their quotients. Both take turns, since a machine that others use is slow to both
alike. `CPU` is the same of the process's CPU time, in which threads that wait for each other count too.

With `--device cuda` the other one is the sampler for devices, with logits that are there. Its time includes the copy of
the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import engine  # noqa: F401 - before torch: it says how OpenMP's threads wait

# isort: split
import torch
from msgspec.structs import replace as with_fields

from bench import report
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import TokenDraw

CASES = {
    "greedy": (TokenDraw(temperature=0.0), 4.0),
    "temperature 1": (TokenDraw(), 4.0),
    "0.7, top_p 0.9": (TokenDraw(temperature=0.7, top_p=0.9), 4.0),
    "0.7, top_p 0.9, flat logits": (TokenDraw(temperature=0.7, top_p=0.9), 1.0),
    "top_k 50": (TokenDraw(top_k=50), 4.0),
    "greedy, logprobs 5": (TokenDraw(temperature=0.0, logprobs=5), 4.0),
}
"""The draw, and the standard deviation of the logits."""

Sample: TypeAlias = Callable[[torch.Tensor, Sequence[TokenDraw], Sequence[int]], Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--device", default="cpu", help="of the sampler for devices")
    parser.add_argument("--against", type=Path, help="measure beside this file's `sample`, not the sampler for devices")
    parser.add_argument("--rows", default="1,8,64", help="sequences in a step")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch")
    asked = parser.parse_args(argv)
    torch.set_num_threads(asked.threads)
    report.say(f"{report.machine()}, {asked.threads} threads")
    ours: Sample = HostSampler().sample
    device = torch.device(asked.device)
    other: Sample = _sample_of(asked.against) if asked.against else DeviceSampler(device).sample
    name = "before" if asked.against else asked.device
    for rows in map(int, asked.rows.split(",")):
        rounds = max(3, min(60, 400 // rows)) // (4 if asked.quick else 1) + 1
        for case, (draw, spread) in CASES.items():
            logits = torch.randn(rows, asked.vocab, generator=torch.Generator().manual_seed(rows)) * spread
            there = logits.to(device)
            walls, cpus = list[tuple[float, float]](), list[tuple[float, float]]()
            for number in range(rounds + 1):
                draws = [with_fields(draw, seed=row) for row in range(rows)]
                positions = [number] * rows
                one = _seconds(lambda: ours(logits, draws, positions))  # noqa: B023 - it is called here
                two = _seconds(lambda: other(there, draws, positions))  # noqa: B023
                if number:  # the first round warms up
                    walls.append((one[0], two[0]))
                    cpus.append((one[1], two[1]))
            _emit(f"{rows} rows, {case}, beside {name}", walls)
            _emit(f"{rows} rows, {case}, beside {name}, CPU", cpus)
    return 0


def _emit(case: str, pairs: Sequence[tuple[float, float]]) -> None:
    made = report.median_of("sampling", case, "ms", [one * 1e3 for one, _ in pairs])
    limit = statistics.median(two * 1e3 for _, two in pairs)
    ratio = statistics.median(one / two for one, two in pairs)
    report.emit(replace(made, limit=limit, ratio=ratio, runs=None))


def _seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    began, began_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - began_cpu


def _sample_of(file: Path) -> Sample:
    """Return the function `sample` of another commit's module, which imports what is here now."""
    spec = importlib.util.spec_from_file_location("sampler_before", file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.sample


if __name__ == "__main__":
    sys.exit(main())
