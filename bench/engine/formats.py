"""Weights in bfloat16, int8, FP8 and int4 on our own engine, beside OpenVINO GenAI and llama.cpp with as few bits.

    python -m bench.engine.formats [--quick] [--threads 1 2] [--group 128] [--minutes 7]
    python -m bench.engine.formats --peers [--folder DIR]

The Llama of 100 M random parameters, what `baton quantize --head` makes of it, its rows in FP8, and a GGUF file of it
in Q4_K. Of each form and number of threads: output tokens per second of 1 and 8 sequences behind 128 tokens, and prompt
tokens per second of a prompt of 1,024. Then the bytes of weights that a step reads, one sequence's share of what the
machine can read a second, and how far logits are from those of bfloat16. `tools.demo_model.evaluate --quantized` has
the demo model's recall.

Each engine is a process. They take turns, and speeds stand beside those of our bfloat16 in the same round. A decoding
rate is that of the tokens after the first, which a job of one token is timed for. No round begins that would end after
`--minutes`. What peers need is made by the first run: environments of 6 GB, of which llama.cpp compiles for minutes.
A table in Markdown goes to stderr. It has the reason where a peer could not be had.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.checkpoints import hub
from bench import models, report
from bench.engine import gguf_form
from bench.engine.roofline import machine_limits
from bench.engine.speed import OPENVINO_STEP_TOKENS, converted
from bench.peers import environments
from bench.peers.adapter import Peer, PeerFailed
from bench.peers.cases import Case
from bench.peers.environments import LLAMA_CPP, OPENVINO, NotPrepared
from engine.engine import Engine, linear_maker
from engine.models.config import load_spec
from engine.models.memory import weight_bytes
from engine.models.quantize import quantize
from engine.step.batch import Chunk, TokenDraw

PLAIN, GGUF = "bfloat16", "Q4_K"
_CASES = (Case("decode 1", 1, 128, 48), Case("decode 8", 8, 128, 48), Case("prefill 1024", 1, 1_024, 1))
TARGETS = {
    "int8, decode 1": 1.7, "int8, decode 8": 1.0, "int8, prefill 1024": 1.0,
    "fp8, decode 1": 1.7, "fp8, decode 8": 1.0, "fp8, prefill 1024": 1.0,
    "int4, decode 1": 2.6, "int4, decode 8": 1.0, "int4, prefill 1024": 1.0,
}  # fmt: skip
"""Of our own bfloat16."""

Rates = dict[str, list[float]]
Command = list[str]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    plain = models.directory(args.model)
    paths = {PLAIN: plain} | {form: _quantized(plain, form, args.group) for form in ("int8", "int4")}
    paths["fp8"] = _in_fp8(plain)
    paths[GGUF] = hub.resolve(str(_gguf(plain, GGUF)))
    lacks: dict[str, str] = {}
    read = {name: _bytes(path) for name, path in paths.items()}
    peers = _peers(plain, args.folder, lacks) if args.peers else {}
    report.say(report.machine())
    share = args.minutes * 60 / len(args.threads)
    for number, threads in enumerate(args.threads):
        commands: dict[str, Callable[[int], Command]] = {name: _own(path) for name, path in paths.items()} | peers
        begun = time.monotonic()
        before = machine_limits(threads, torch.bfloat16)
        rates = _measured(commands, threads, args.rounds, begun + share, 100 * number, lacks)
        limit = before.best(machine_limits(threads, torch.bfloat16)).read
        for name, own in rates.items():
            for case in _CASES:
                words = f"{name}, {case.name}"
                figure = f"{words}, threads {threads}"
                result = report.beside("formats", figure, case.unit, own[case.name], rates[PLAIN][case.name])
                target = TARGETS.get(words)
                report.emit(result if target is None else report.judged(result, target, "high"))
        for name, size in read.items():
            speeds = [rate * size for rate in rates[name][_CASES[0].name]]
            figure = f"{name}, weights that {_CASES[0].name} reads, threads {threads}"
            report.emit(report.beside("formats", figure, "B/s", speeds, [limit] * len(speeds)))
        report.say(_table(rates, lacks, threads))
    logits = {name: _logits(path) for name, path in paths.items()}
    for name in paths:
        lost = float((logits[name] - logits[PLAIN]).square().mean().sqrt() / logits[PLAIN].std())
        report.emit(report.Result("formats", f"{name}, weights of a step", read[name], "B"))
        report.emit(report.Result("formats", f"{name}, logits' error", lost, "of their deviation"))
    return 0


def _quantized(plain: Path, form: str, group: int) -> Path:
    """Return the checkpoint in this form, made once."""
    folder = models.cache() / f"{plain.name}-{form}-{group}"
    if not folder.exists():
        report.say(f"quantizing to {form}")
        quantize(plain, folder, int(form.removeprefix("int")), group, True, lambda _: None)
    return folder


def _in_fp8(plain: Path) -> Path:
    """Return the checkpoint with its products and its head in E4M3, and a scale for each row, made once."""
    folder = models.cache() / f"{plain.name}-fp8"
    if folder.exists():
        return folder
    raw, tensors = json.loads((plain / "config.json").read_text()), load_file(plain / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    for name in [name for name in tensors if "_proj." in name or name.startswith("lm_head.")]:
        scale = (tensors[name].float().abs().amax(1, keepdim=True) / 448).bfloat16()
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    raw |= {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized", **groups}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _gguf(plain: Path, kind: str) -> Path:
    """Return the checkpoint as a GGUF file, made once."""
    file = models.cache() / f"{plain.name}-{kind}.gguf"
    if not file.exists():
        report.say(f"writing {file.name}")
        gguf_form.write(plain, kind, file)
    return file


def _own(path: Path) -> Callable[[int], Command]:
    return lambda threads: [sys.executable, "-m", "bench.bare", str(path), PLAIN, str(threads), "2048"]


def _peers(plain: Path, folder: Path, lacks: dict[str, str]) -> dict[str, Callable[[int], Command]]:
    """Return what starts each peer with a number of threads. Those that can't be had are told in `lacks`."""

    def openvino(form: str) -> Callable[[int], Command]:
        environments.prepare(OPENVINO, folder)
        words = [str(OPENVINO.python(folder)), "-m", "bench.peers.openvino_genai", str(converted(folder, plain, form))]
        return lambda threads: [*words, str(threads), str(OPENVINO_STEP_TOKENS)]

    def llama(kind: str) -> Callable[[int], Command]:
        environments.prepare(LLAMA_CPP, folder)
        words = [str(LLAMA_CPP.python(folder)), "-m", "bench.peers.llama_cpp", str(_gguf(plain, kind))]
        return lambda threads: [*words, str(threads)]

    starters: dict[str, Callable[[int], Command]] = {}
    for peer, make, forms in (("OpenVINO", openvino, ("int8", "int4")), ("llama.cpp", llama, ("Q8_0", "Q4_0", GGUF))):
        for form in forms:
            try:
                starters[f"{peer} {form}"] = make(form)
            except NotPrepared as error:
                lacks[f"{peer} {form}"] = str(error)
    return starters


def _measured(
    commands: Mapping[str, Callable[[int], Command]],
    threads: int,
    rounds: int,
    deadline: float,
    seed: int,
    lacks: dict[str, str],
) -> dict[str, Rates]:
    """Return the rates of all engines by case, a round to warm up left out. At least one round is measured. An engine
    that ends is left out. Raises PeerFailed if that is the one which the others stand beside."""
    engines: dict[str, Peer] = {}
    with ExitStack() as stack:
        for name, command in commands.items():
            try:
                engines[name] = stack.enter_context(Peer(name, command(threads), environments.variables({})))
            except PeerFailed as error:
                if name == PLAIN:
                    raise
                lacks[name] = str(error)
        rates: dict[str, Rates] = {name: {case.name: [] for case in _CASES} for name in engines}
        vocabulary = models.LLAMA_100M["vocab_size"]  # that of all our random models
        for number in range(rounds + 1):
            begun = time.monotonic()
            for case in _CASES:
                for name, engine in list(engines.items()):
                    try:
                        rate = _rate(engine, case, vocabulary, seed + number)
                    except PeerFailed as error:
                        if name == PLAIN:
                            raise
                        lacks[name] = str(error)
                        del engines[name], rates[name]
                        continue
                    if number:
                        rates[name][case.name].append(rate)
            took = time.monotonic() - begun
            report.say(f"threads {threads}, round {number} of {rounds}: {took:.0f} s")
            if number and time.monotonic() + took > deadline:
                break
    return rates


def _rate(engine: Peer, case: Case, vocabulary: int, seed: int) -> float:
    seconds = engine.generate(case.prompts(vocabulary, 2 * seed), case.output).seconds
    if case.output == 1:
        return case.rate(seconds)
    first = engine.generate(case.prompts(vocabulary, 2 * seed + 1), 1).seconds
    return case.sequences * (case.output - 1) / max(seconds - first, 1e-6)


def _table(rates: Mapping[str, Rates], lacks: Mapping[str, str], threads: int) -> str:
    lines = [f"| threads {threads}, tokens/s | " + " | ".join(case.name for case in _CASES) + " |", "|---|---|---|---|"]
    for name, own in rates.items():
        cells: list[str] = []
        for case in _CASES:
            runs, plain = own[case.name], rates[PLAIN][case.name]
            ratio = statistics.median(run / other for run, other in zip(runs, plain, strict=True))
            cells.append(f"{statistics.median(runs):,.0f} ({ratio:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"| {name} | not to be had: {why} | | |" for name, why in lacks.items())])


def _bytes(path: Path) -> int:
    """The bytes of a step's weights: all but the rows of the embedding that it does not need."""
    spec = load_spec(path)
    whole = weight_bytes(spec, torch.bfloat16, linear_maker("cpu", spec))
    return whole - spec.vocab_size * spec.hidden_size * 2


def _logits(path: Path) -> torch.Tensor:
    """The log-probabilities of all tokens behind a prompt."""
    engine = Engine.load(path, PLAIN, "cpu", num_pages=8, page_size=16, head=True)
    drawn = random.Random(1)
    prompt = [drawn.randrange(2, engine.vocab_size) for _ in range(64)]
    draw = TokenDraw(temperature=0, logprobs=engine.vocab_size)
    (sampled,) = engine.step([Chunk(prompt, 0, range(4), draw)])
    assert sampled is not None
    tokens, values = zip(*sampled.top, strict=True)
    return torch.empty(engine.vocab_size).scatter_(0, torch.tensor(tokens), torch.tensor(values))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--minutes", type=float, default=7, help="in which all rounds end, but for one of each")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads, one after another")
    parser.add_argument("--group", type=int, choices=(32, 128), default=128, help="inputs that share a scale")
    parser.add_argument(
        "--model", default="100m", help="100m, 1b (a billion parameters), or a checkpoint with as many tokens"
    )
    parser.add_argument("--peers", action="store_true", help="beside OpenVINO GenAI and llama.cpp")
    parser.add_argument("--folder", type=Path, default=models.cache() / "peers", help="of their environments")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    return args


if __name__ == "__main__":
    sys.exit(main())
