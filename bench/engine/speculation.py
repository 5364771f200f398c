"""Decoding with speculation beside decoding without, in one run: the scheduler and the engine in one loop.

    python -m bench.engine.speculation [--model 100m] [--dtype bfloat16] [--threads 2] [--rounds 3] [--tokens 256]

The weights are random, so the text is given: every row is computed and drawn, and then counts as the token that the
text has there. Texts are files of this checkout in the tokens of the demo model: `edit` repeats a source file of its
prompt with changes, as agents do, and `open` goes on with a document. `draft` is the same text with a draft model
besides: two layers of random weights, a tenth of the parameters. Its steps are computed, too, and its guesses are
given: each is right with the share that the demo model's draft has (`docs/demo-model.md`). `heads` is the same text
with four tied heads of random weights and an inner size of 256, whose guesses are given in the same way, and `eagle`
with a layer of random weights. `demo` is the demo model with its draft at temperature 1: its own draws are the text.
`all` is the same with every guess of the draft verified, whatever it costs. `demo-heads` is the demo model with its
heads, or with those that `--heads` names. `--kind` runs only the cases of that name. `--session` names a recorded
agent session instead, JSON of one request a line: it keeps the first `keep` messages of the one before and has `append`
after them. Each answer of the assistant is an output, with its calls as a chat template has them. The 6,000 tokens
before it are its prompt. A ratio is tokens per second with over without. With one thread, seconds are those of the
processor, so that other processes count less.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.config import DecodeConfig
from baton.messages import Decode, SamplingParams, StepSample
from bench import models, report
from decode_worker.draft_model import DraftModel
from decode_worker.drafter import Drafter
from decode_worker.heads import HeadsDrafter
from decode_worker.proposers import NgramProposer
from decode_worker.scheduler import DecodeScheduler, DecodeStats
from decode_worker.speculation import SpeculationStats
from deploy.models import DEMO_MODEL, DRAFT_MODEL, HEADS
from engine.cpu.packed_linear import PackedLinears
from engine.engine import Engine
from engine.models.heads import Heads
from engine.models.heads import load as load_heads
from engine.models.heads.eagle import Eagle, EagleSpec
from engine.models.heads.mlp_speculator import MlpSpec, MlpSpeculator
from engine.models.linear import Dense
from engine.models.weights import read_layer
from engine.step.batch import Chunk, DrawnRows, HiddenRow, Sampled
from engine.step.outcome import ScheduledBatch, StepDone
from kvstore.keys import pack_tokens
from worker.calibration import calibrate

_ROOT = Path(__file__).parents[2]
_TOKENIZER = _ROOT / "deploy/models/baton-demo/tokenizer.json"
_PAGE, _PAGES = 16, 4_096
_PROMPTS = {1: 700, 32: 200}  # tokens, by sequences
_CASES = {
    ("edit", 1): 1.6, ("open", 1): 0.98, ("draft", 1): 1.3, ("edit", 32): 0.97, ("open", 32): 0.97, ("draft", 32): 0.97,
    ("demo", 1): 1.3, ("all", 1): 0.0, ("demo", 32): 0.97, ("all", 32): 0.0,
    ("heads", 1): 1.3, ("heads", 32): 0.97, ("eagle", 1): 1.3, ("eagle", 32): 0.97,
    ("demo-heads", 1): 0.97, ("demo-heads", 32): 0.97,
}  # and the least ratios  # fmt: skip
_DEMO = ("demo", "all", "demo-heads")
_CHAT = "<|im_start|>user\nTell me many stories about a {}.<|im_end|>\n<|im_start|>assistant\n"
_ANIMALS = ("fox", "cat", "dog", "bear", "owl", "hen", "cow", "goat")
_FILES = {"edit": ("decode_worker", ".py"), "open": ("docs", ".md"), "draft": ("docs", ".md"), "heads": ("docs", ".md"),
          "eagle": ("docs", ".md")}  # fmt: skip
_AGREES, _HEADS_AGREE = 0.94, 0.78  # share of the guesses that are right: of a draft model, of heads
_WRONG = 31_999  # a token of no text
_RECORDED = 6_000  # tokens before an answer of a recorded session
_SHORTEST = 16  # tokens of an answer that is measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="100m")
    parser.add_argument("--draft", default="100m-draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of an output")
    parser.add_argument("--heads", type=Path, default=HEADS, help="of the demo model")
    parser.add_argument("--kind", choices=sorted({kind for kind, _ in _CASES}))
    parser.add_argument("--session", type=Path, help="recorded agent sessions (JSONL, or that in gzip)")
    parser.add_argument("--answers", type=int, default=29, help="of these, so many")
    args = parser.parse_args(argv)
    now = time.process_time if args.threads == 1 else time.perf_counter

    def load(path: Path) -> tuple[Engine, Sequence[StepSample]]:
        engine = Engine.load(path, args.dtype, "cpu", _PAGES, _PAGE, head=True, threads=args.threads)
        return engine, calibrate(lambda each: _seconds(engine, each, now), now, _PAGE, _PAGES, 4_096, decodes=True)

    if args.session is not None:
        answers = [each for each in recorded(args.session, args.tokens) if len(each[0]) - each[1] >= _SHORTEST]
        return _session(*load(models.directory(args.model)), answers[: args.answers], args.rounds, now)
    large = load(models.directory(args.model)), load(models.directory(args.draft))
    demo = load(DEMO_MODEL), load(DRAFT_MODEL)
    heads = _random_heads(large[0][0])
    heads["demo-heads"] = load_heads(args.heads, demo[0][0].dtype, PackedLinears(groups=False), demo[0][0])
    report.say(report.machine())
    for (kind, batch), target in _CASES.items():
        if args.kind not in (None, kind):
            continue
        (engine, steps), (small, small_steps) = demo if kind in _DEMO else large
        texts = [text(kind, number, _PROMPTS[batch], args.tokens) for number in range(batch)]
        speeds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(args.rounds):
            for speculates in (number % 2 == 0, number % 2 == 1):
                drafter: Drafter | None = None
                if kind in heads and speculates:
                    own, fixed = heads[kind], None if kind in _DEMO else texts
                    keep = partial(_keep, engine, own) if own.remembers else None
                    drafter = HeadsDrafter(partial(_headed, engine, own, now, fixed), own.spec.count, keep)
                elif kind not in ("edit", "open") and speculates:
                    guess = partial(_guesses, small, now, None if kind in _DEMO else texts)
                    drafter = DraftModel(guess, _PAGES, _PAGE, small.max_positions, small_steps)
                prompt = None if kind in _DEMO else _PROMPTS[batch]
                speed, stats = run(
                    engine, steps, texts, prompt, now, drafter, speculates=speculates, tokens=args.tokens,
                    verify_all=kind == "all",
                )  # fmt: skip
                speeds[speculates].append(speed)
                if speculates:
                    report.say(f"{kind}-{batch}: {stats.speculation}")
        result = report.beside("speculation", f"{kind}-{batch}", "tokens/s", speeds[True], speeds[False])
        report.emit(report.judged(result, target, "high"))
    return 0


def _random_heads(engine: Engine) -> dict[str, Heads]:
    """The heads of each case that has some of random weights."""
    maker, spec, dtype = PackedLinears(groups=False), MlpSpec(32_000, 768, 256, 4, tied=True), engine.dtype

    def some(name: str, shape: Sequence[int], dtypes: object = ()) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    layer = EagleSpec(replace(engine.config, layers=engine.config.layers[:1]))
    fc = maker.linear(Dense(some("fc", (768, 2 * 768)), None))
    return {
        "heads": MlpSpeculator(spec, {name: some(name, shape) for name, shape in spec.shapes().items()}, maker.linear),
        "eagle": Eagle(layer, fc, read_layer(layer.layer, maker, some, dtype), engine),
    }


def _keep(engine: Engine, heads: Heads, drawn: Sequence[DrawnRows]) -> None:
    heads.keep(engine.hidden, drawn)


def _session(
    engine: Engine, steps: Sequence[StepSample], answers: Sequence[tuple[list[int], int]], rounds: int,
    now: Callable[[], float],
) -> int:  # fmt: skip
    """Each answer of the recorded sessions in turn, with and without n-grams."""
    report.say(report.machine())
    outputs = sum(len(tokens) - prompt for tokens, prompt in answers)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for speculates in (number % 2 == 0, number % 2 == 1):
            seconds, counts = 0.0, SpeculationStats()
            for tokens, prompt in answers:
                count = len(tokens) - prompt
                speed, stats = run(engine, steps, [tokens], prompt, now, speculates=speculates, tokens=count)
                seconds += (count - 1) / speed
                if speculates:
                    counts.drafts += stats.speculation.drafts
                    counts.draft_tokens += stats.speculation.draft_tokens
                    counts.accepted_tokens += stats.speculation.accepted_tokens
            speeds[speculates].append((outputs - len(answers)) / seconds)
            if speculates:
                report.say(f"{len(answers)} answers of {outputs} tokens: {counts}")
    result = report.beside("speculation", "session-1", "tokens/s", speeds[True], speeds[False])
    report.emit(report.judged(result, _CASES["edit", 1], "high"))
    return 0


def recorded(path: Path, most: int) -> Iterator[tuple[list[int], int]]:
    """Yield the first tokens of each answer with those before it, and how many these are."""
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    lines = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).splitlines()
    history: list[tuple[str, str]] = []
    for row in map(json.loads, lines):
        del history[row["keep"] :]
        for message in row["append"]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            parts = [message["content"] or "", *(f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": '
                     f'{call["arguments"]}}}</tool_call>' for call in calls)]  # fmt: skip
            if message["role"] == "assistant":
                before = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in history)
                known = tokenizer.encode(f"{before}<|im_start|>assistant\n").ids[-_RECORDED:]
                yield [*known, *tokenizer.encode("\n".join(filter(None, parts))).ids[:most]], len(known)
            history.append((message["role"], "\n".join(filter(None, parts))))


def _seconds(engine: Engine, chunks: Sequence[Chunk], now: Callable[[], float]) -> float:
    began = now()
    engine.run(chunks)
    return now() - began


def _guesses(
    small: Engine, now: Callable[[], float], texts: Sequence[Sequence[int]] | None, chunks: Sequence[Chunk]
) -> tuple[Sequence[Sampled | None], float]:
    """A step of the draft model, with the tokens of the texts, if given, in place of most that it draws."""
    began = now()
    drawn = small.launch(chunks).wait().sampled
    seconds = now() - began
    if texts is None:
        return drawn, seconds
    guesses: list[Sampled | None] = []
    for chunk in chunks:
        guess: Sampled | None = None
        if chunk.sample is not None:
            seed = chunk.sample.seed
            guess = Sampled(_text_token(texts[seed], seed, chunk.end, _AGREES))
        guesses.append(guess)
    return guesses, seconds


def _text_token(text: Sequence[int], seed: int, at: int, share: float) -> int:
    """The text's token there, or in a share of the places another one."""
    return text[at] if at < len(text) and random.Random(f"{seed} {at}").random() < share else _WRONG


def _headed(
    engine: Engine, heads: Heads, now: Callable[[], float], texts: Sequence[Sequence[int]] | None,
    rows: Sequence[HiddenRow], count: int,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """The guesses of heads, with the tokens of the texts, if given, in place of most."""
    began = now()
    guesses = engine.guess(heads, rows, count)
    seconds = now() - began
    if texts is not None:
        places = [range(row.position, row.position + count) for row in rows]
        guesses = [
            [_text_token(texts[row.draw.seed], row.draw.seed, at, _HEADS_AGREE) for at in each]
            for row, each in zip(rows, places, strict=True)
        ]
    return guesses, seconds


def text(kind: str, number: int, prompt: int, output: int) -> list[int]:
    """Return the tokens of a prompt and its output; for the demo model those of a prompt."""
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    if kind in _DEMO:
        return tokenizer.encode(_CHAT.format(_ANIMALS[number % len(_ANIMALS)])).ids
    folder, suffix = _FILES[kind]
    files = sorted(file for file in (_ROOT / folder).iterdir() if file.suffix == suffix)
    files = [file for file in files if file.stat().st_size > 12_000]
    source = files[number % len(files)].read_text()
    whole: list[int] = tokenizer.encode(source).ids
    at = 97 * number % max(1, len(whole) - prompt - output)
    if kind != "edit":
        return whole[at : at + prompt + output]
    before = whole[at : at + prompt]
    lines = tokenizer.decode(before).splitlines(keepends=True)
    edited = "".join(line for place, line in enumerate(lines) if place % 4 != 3).replace("sequence", "stream")
    return before + tokenizer.encode(edited + source).ids[:output]


def run(
    engine: Engine,
    steps: Sequence[StepSample],
    texts: Sequence[Sequence[int]],
    prompt: int | None,
    now: Callable[[], float],
    drafter: Drafter | None = None,
    *,
    speculates: bool,
    tokens: int,
    verify_all: bool = False,
) -> tuple[float, DecodeStats]:
    """Return tokens per second while all sequences decode, and what the scheduler has counted. `prompt`: tokens of each
    text that are the prompt, which the others follow; none: all are, and so many `tokens` are drawn."""
    proposer: Callable[[], NgramProposer] | None = NgramProposer if speculates and not verify_all else None
    config = DecodeConfig(itl_ms=60_000, max_num_batched_tokens=2_048)  # the prompts first
    state = DecodeScheduler(
        config, _PAGE, _PAGES, calibration=steps, proposer=proposer, drafter=drafter, verify_all=verify_all
    )
    for number, each in enumerate(texts):
        known = each[:prompt]
        sampling = SamplingParams(temperature=1 if prompt is None else 0, seed=number)
        order = Decode(f"r{number}", 1, b"r" * 16, pack_tokens(known), len(known), tokens, sampling)
        state.handle(order, now())
    began, before = 0.0, 0
    while not state.stats().ended:
        state.prepare(now())
        plan = state.schedule(now())
        results = engine.launch(list(plan.values())).wait()
        done = StepDone(plan, results.sampled, verified=results.verified)
        state.handle(done if prompt is None else _as_text(plan, texts, done), now())
        if not began and state.stats().tokens_generated >= len(texts) and all(c.sample for c in plan.values()):
            began, before = now(), state.stats().tokens_generated
    return (state.stats().tokens_generated - before) / (now() - began), state.stats()


def _as_text(plan: ScheduledBatch, texts: Sequence[Sequence[int]], done: StepDone) -> StepDone:
    """The step, with the tokens of the texts in place of those drawn."""
    rows = [
        [Sampled(texts[int(name.request[1:])][min(at, len(texts[0]) - 1)]) for at, _ in chunk.draws]
        for name, chunk in plan.items()
    ]
    verified = {number: each[:-1] for number, each in enumerate(rows) if number in done.verified}
    return StepDone(plan, [each[-1] if each else None for each in rows], verified=verified)


if __name__ == "__main__":
    raise SystemExit(main())
