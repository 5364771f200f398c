"""What a grammar costs: a decode step whose rows follow one, beside the same step without.

    python -m bench.grammar [--quick] [--models 100m,100m-128k]

`Engine.step` in a loop in this process, with 1 and 8 sequences that decode at once. The ways take turns round by round,
since a machine that others use is slow to all of them alike. `value` is the median of the rounds' median steps in
milliseconds, `limit` that of the same step without a grammar, and `ratio` their quotient. `CPU` is the same of the
process's CPU time, which others disturb less. On a CPU the masks compete with the model for the cores.

Also: the time of one mask by itself, and what the first grammar of a worker waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from baton.messages import Grammar
from bench import models, report
from engine.engine import Engine
from engine.sampling.grammars import FollowedGrammar, GrammarCompiler
from engine.step.batch import Chunk, TokenDraw

EOS = 1
PAGE = 16
PROMPT = 64
SCHEMA = {
    "type": "array",
    "minItems": 1_000,  # the output never ends
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 5, "maxLength": 60},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "JSON schema": Grammar("json_schema", json.dumps(SCHEMA), EOS),
    "regex": Grammar("regex", r"([a-z]{3,12} ){4,}\d+\.", EOS),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--models", default="100m,100m-128k", help="as bench/models.py knows them")
    asked = parser.parse_args(argv)
    report.say(report.machine())
    for name in asked.models.split(","):
        measure(name, rounds=3 if asked.quick else 9, steps=24 if asked.quick else 64)
    return 0


def measure(name: str, rounds: int, steps: int) -> None:
    """Emit every figure of one model."""
    threads = len(os.sched_getaffinity(0))
    engine = Engine.load(models.directory(name), "auto", "cpu", 8 * 16, PAGE, head=True, threads=threads)
    compiler = GrammarCompiler(models.directory(name), engine.config.vocab_size, lambda: None)
    for kind, grammar in GRAMMARS.items():  # the first one waits for the tokenizer
        began = time.perf_counter()
        followed = follow(compiler, grammar)
        report.emit(report.Result("grammar", f"{name}: ready, {kind}", (time.perf_counter() - began) * 1e3, "ms"))
        masks = sorted(mask_times(followed))
        report.emit(report.Result("grammar", f"{name}: one mask, {kind}", statistics.median(masks), "µs"))
        report.emit(report.Result("grammar", f"{name}: one mask, {kind}, p99", masks[len(masks) * 99 // 100], "µs"))
    for batch in (1, 8):
        for temperature in (0.0, 1.0):
            ways: dict[str, Grammar | None] = {"none": None, **GRAMMARS}
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way, grammar in ways.items():
                    seconds = steps_of(engine, compiler, grammar, batch, temperature, steps)
                    if number:  # the first round warms up
                        taken[way].append(seconds)
            plain = taken.pop("none")
            for way, runs in taken.items():
                for place, kind in enumerate(("", ", CPU")):
                    case = f"{name}: step of {batch}, temperature {temperature:g}, {way}{kind}"
                    made = report.median_of("grammar", case, "ms", [run[place] * 1e3 for run in runs])
                    limit = statistics.median(run[place] * 1e3 for run in plain)
                    report.emit(replace(made, limit=limit, ratio=made.value / limit))
    compiler.close()


def follow(compiler: GrammarCompiler, grammar: Grammar) -> FollowedGrammar:
    """Return a grammar that is ready, for a sequence without output."""
    followed = compiler.follow(grammar, (EOS,), range(PROMPT), PROMPT)
    while not followed.ready:
        time.sleep(0.0005)
    return followed


def mask_times(followed: FollowedGrammar) -> list[float]:
    """Microseconds of the masks of an output, without a model."""
    tokens, taken = list(range(PROMPT)), list[float]()
    for _ in range(420):
        mask = followed.mask(tokens)
        began = time.perf_counter()
        mask.compute()
        taken.append((time.perf_counter() - began) * 1e6)
        assert mask.allowed is not None, mask.failure
        likely = mask.allowed.nonzero()[0]
        tokens.append(int(likely[(len(tokens) * 7919) % len(likely)]))
    return taken[20:]


def steps_of(
    engine: Engine, compiler: GrammarCompiler, grammar: Grammar | None, batch: int, temperature: float, steps: int
) -> tuple[float, float]:
    """Return the medians of a step's seconds and CPU seconds."""
    pages = len(engine.pool) // 8
    rows = [[(7 * row + place) % 1_000 + 300 for place in range(PROMPT)] for row in range(batch)]
    follows = [None if grammar is None else follow(compiler, grammar) for _ in rows]
    computed, taken = [0] * batch, list[tuple[float, float]]()
    for _ in range(steps + 1):
        began, began_cpu = time.perf_counter(), time.process_time()
        chunks = [
            Chunk(tokens[computed[row] :], computed[row], range(row * pages, (row + 1) * pages), draw)
            for row, (tokens, follow_) in enumerate(zip(rows, follows, strict=True))
            for draw in [TokenDraw(temperature, seed=row, mask=None if follow_ is None else follow_.mask(tokens))]
        ]
        drawn = engine.step(chunks)
        taken.append((time.perf_counter() - began, time.process_time() - began_cpu))
        for row, (tokens, one) in enumerate(zip(rows, drawn, strict=True)):
            computed[row] = len(tokens) if one is not None else len(tokens) - 1  # none: its mask was late
            if one is not None:
                assert not one.failure, one.failure
                tokens.append(one.token)
    wall, cpu = zip(*taken[1:], strict=True)  # the first one computes the prompts
    return statistics.median(wall), statistics.median(cpu)


if __name__ == "__main__":
    sys.exit(main())
