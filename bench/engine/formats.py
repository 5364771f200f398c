"""Weights in bfloat16, int8 and int4 on our own engine, in turns, in one process.

    python -m bench.engine.formats [--quick] [--threads 2] [--group 128]

The Llama of 100 M random parameters, and what `baton quantize --head` makes of it. Of each form: tokens per second of 1
and 8 sequences behind 128 tokens, and of a prompt of 1,024. Then the bytes of weights that a step reads, and how far
logits are from those of bfloat16. Speeds stand beside those of bfloat16 in the same round.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from bench import models, report
from bench.bare import generate
from engine.engine import Engine, linear_maker
from engine.models.config import load_spec
from engine.models.memory import weight_bytes
from engine.models.quantize import quantize
from engine.step.batch import Chunk, TokenDraw

PLAIN, FORMS = "bfloat16", ("int8", "int4")
_PAGE_SIZE, _PAGES = 16, 256
_PROMPT, _TOKENS, _LONG = 128, 32, 1_024
TARGETS = {"int8, decode 1": 1.7, "int4, decode 1": 2.6}
"""Of our own bfloat16."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    plain = models.directory(args.model)
    paths = {PLAIN: plain} | {form: _quantized(plain, form, args.group) for form in FORMS}
    report.say(report.machine())
    engines = {
        name: Engine.load(path, PLAIN, "cpu", _PAGES, _PAGE_SIZE, True, threads=args.threads)
        for name, path in paths.items()
    }
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for round_number in range(args.rounds + 1):
        for case, measure in _CASES.items():
            for name, engine in engines.items():
                rate = measure(engine, round_number)
                if round_number:  # the first one warms up
                    rates[name].setdefault(case, []).append(rate)
        shown = {name: [f"{runs[-1]:,.0f}" for runs in own.values()] for name, own in rates.items() if own}
        report.say(f"round {round_number} of {args.rounds}: {shown}")
    for name in engines:
        for case, unit in (("decode 1", "tokens/s"), ("decode 8", "tokens/s"), ("prefill 1024", "tokens/s")):
            result = report.beside("formats", f"{name}, {case}", unit, rates[name][case], rates[PLAIN][case])
            target = TARGETS.get(f"{name}, {case}")
            report.emit(result if target is None else report.judged(result, target, "high"))
        report.emit(report.Result("formats", f"{name}, weights of a step", _bytes(paths[name]), "B"))
        lost = 0.0 if name == PLAIN else _lost(engines[PLAIN], engines[name])
        report.emit(report.Result("formats", f"{name}, logits' error", lost, "of their deviation"))
    return 0


def _quantized(plain: Path, form: str, group: int) -> Path:
    """Return the checkpoint in this form, made once."""
    folder = models.cache() / f"{plain.name}-{form}-{group}"
    if not folder.exists():
        report.say(f"quantizing to {form}")
        quantize(plain, folder, int(form.removeprefix("int")), group, True, lambda _: None)
    return folder


def _prompt(engine: Engine, length: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(2, engine.vocab_size) for _ in range(length)]


def _decode(sequences: int) -> Callable[[Engine, int], float]:
    def measure(engine: Engine, seed: int) -> float:
        prompts = [_prompt(engine, _PROMPT, 100 * seed + number) for number in range(sequences)]
        return sequences / statistics.median(generate(engine, prompts, _TOKENS).gaps)

    return measure


def _prefill(engine: Engine, seed: int) -> float:
    chunk = Chunk(_prompt(engine, _LONG, seed), 0, range(_LONG // _PAGE_SIZE), TokenDraw(temperature=0))
    begun = time.perf_counter()
    engine.step([chunk])
    return _LONG / (time.perf_counter() - begun)


_CASES: Mapping[str, Callable[[Engine, int], float]] = {
    "decode 1": _decode(1),
    "decode 8": _decode(8),
    "prefill 1024": _prefill,
}


def _bytes(path: Path) -> int:
    """The bytes of a step's weights: all but the rows of the embedding that it does not need."""
    spec = load_spec(path)
    whole = weight_bytes(spec, torch.bfloat16, linear_maker("cpu", spec))
    return whole - spec.vocab_size * spec.hidden_size * 2


def _lost(plain: Engine, engine: Engine) -> float:
    """The root of the mean square between the logits of a prompt's last tokens, by their deviation."""
    prompt = _prompt(plain, 64, 1)

    def logits(of: Engine) -> torch.Tensor:
        draw = TokenDraw(temperature=0, logprobs=of.vocab_size)
        (sampled,) = of.step([Chunk(prompt, 0, range(4), draw)])
        assert sampled is not None
        tokens, values = zip(*sampled.top, strict=True)
        return torch.empty(of.vocab_size).scatter_(0, torch.tensor(tokens), torch.tensor(values))

    right, ours = logits(plain), logits(engine)
    return float((ours - right).square().mean().sqrt() / right.std())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--group", type=int, choices=(32, 128), default=128, help="inputs that share a scale")
    parser.add_argument("--model", default="100m", help="a checkpoint (bench/models.py)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    return args


if __name__ == "__main__":
    sys.exit(main())
