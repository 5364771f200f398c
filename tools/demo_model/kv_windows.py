"""What `kv_compression` costs in recall and saves in memory: scheduler and engine in one loop, on the demo model.

    python -m tools.demo_model.kv_windows [--prompts 100] [--tokens 20000] [--window 1024] [--threads 1]

Recall: the prompts of `tools.demo_model.evaluate`, each a question about a fact that stands so many tokens before the
answer. The prompt attends to all of itself, so the first token of an answer knows the fact. The others know it as far
as the window reaches, or as its page is chosen. Memory: one greedy output of `--tokens` tokens with a window, past the
model's own context, and the same without a window. Then one output of 200 tokens behind the prompts that are the
longest, with each choice and the median between two tokens, in time of the processor. It fails if a window holds more
pages than `KvWindow.held` says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import Cancel, Decode, KvCompression, SamplingParams, Tokens
from bench import report
from decode_worker.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.step.batch import Chunk
from engine.step.block_table import BlockTable
from engine.step.outcome import StepDone
from kvstore.client.device_block_manager import DuplicatePage
from kvstore.keys import pack_tokens
from kvstore.kv_window import MOST_OBSERVED, KvWindow
from tools.demo_model import evaluate

_MODEL = Path(__file__).parents[2] / "deploy/models/baton-demo"
_PAGE, _PAGES, _SINKS = 16, 2_048, 4
_WINDOWS = (None, *(KvCompression("window", tokens, _SINKS) for tokens in (512, 256, 128, 64, 32, 16)))
_CHOICES = (None, *(KvCompression("snapkv", 32, _SINKS, keep) for keep in (512, 256, 128, 64, 32)))
_AGAIN = tuple(KvCompression("h2o", 32, _SINKS, keep) for keep in (1_024, 512, 256, 128, 64))
_DISTANCES = (100, 300, 500)
_FAR = (300, 500, 1_000, 1_500)
_NAME = "one"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100, help="of each distance; 0: no recall")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the long output")
    parser.add_argument("--window", type=int, default=1_024, help="of the long output")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    engine = Engine.load(_MODEL, "float32", "cpu", _PAGES, _PAGE, head=True, threads=args.threads)
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    print(report.machine())
    passes = ((_WINDOWS, _DISTANCES, 0), (_CHOICES, _FAR, 0), ((None, *_AGAIN), _FAR, 50))
    for orders, distances, length in passes if args.prompts else ():
        print("\nof the output itself" if length else "")
        print("\n| keep | window | " + " | ".join(f"recall at {distance}" for distance in distances) + " |")
        print("|---:|---:|" + "---:|" * len(distances))
        for order in orders:
            shares = [_recall(engine, tokenizer, distance, args.prompts, order, length) for distance in distances]
            print(f"| {_named(order)} | " + " | ".join(f"{share:.0%}" for share in shares) + " |", flush=True)
    prompt = evaluate.prompts(tokenizer, _FAR[-1], 1)[0].tokens
    plain, observed = _end_of_prompt(engine, len(prompt))
    print(f"\nThe last 16 of {len(prompt):,} tokens take {plain:.2f} ms, and {observed:.2f} ms if they are observed.")
    print("\n| keep | window | pages held after 1 token | after 199 | ms per token |\n|---:|---:|---:|---:|---:|")
    for order in (*_CHOICES, *_AGAIN):
        held, times = [], []
        for pages, _ in generate(engine, prompt, 200, order):
            held.append(pages)
            times.append(time.process_time())
        milliseconds = median(b - a for a, b in pairwise(times)) * 1e3
        print(f"| {_named(order)} | {held[0]} | {held[-2]} | {milliseconds:.2f} |", flush=True)
    print("\n| output tokens | window | pages held | ms per token since the last row |\n|---:|---:|---:|---:|")
    for window in (args.window, None):
        most = min(args.tokens, engine.num_pages * _PAGE - 64) if window is None else args.tokens
        _long(engine, most, None if window is None else KvCompression("window", window, _SINKS))
    return 0


def _named(order: KvCompression | None) -> str:
    if order is None:
        return "all | all"
    return f"{order.keep or 'none'}{' again' * (order.kind == 'h2o')} | {order.window}"


def _recall(
    engine: Engine, tokenizer: Tokenizer, distance: int, count: int, order: KvCompression | None, length: int
) -> float:
    right = 0
    for one in evaluate.prompts(tokenizer, distance, count):
        answer = [token for _, token in generate(engine, one.tokens, evaluate.MAX_TOKENS, order, length)]
        right += evaluate.right(tokenizer, one, answer)
    return right / count


def _end_of_prompt(engine: Engine, length: int) -> tuple[float, float]:
    """Milliseconds of the chunk of a prompt's last tokens, without and with what they attend to. In turns."""
    pages = BlockTable(range(-(-length // _PAGE)))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(80):
        chunk = Chunk([5] * MOST_OBSERVED, length - MOST_OBSERVED, pages, observed=turn % 2 * MOST_OBSERVED)
        began = time.process_time()
        engine.run([chunk])
        seconds[turn % 2].append(time.process_time() - began)
    return median(seconds[0]) * 1e3, median(seconds[1]) * 1e3


def _long(engine: Engine, count: int, order: KvCompression | None) -> None:
    rows = {round((count - 1) * share) for share in (0.1, 0.25, 0.5, 1.0)}
    began, done = time.perf_counter(), 0
    for number, (held, _) in enumerate(generate(engine, range(3, 103), count, order), 1):
        if number in rows:
            now = time.perf_counter()
            window = order.window if order else "none"
            print(f"| {number:,} | {window} | {held} | {(now - began) * 1e3 / (number - done):.2f} |", flush=True)
            began, done = time.perf_counter(), number


def generate(
    engine: Engine, prompt: Sequence[int], count: int, compression: KvCompression | None, length: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield the greedy tokens of one request, each with the pages that it holds. Past any end of a sequence. `length`:
    so many tokens are the prompt, and the rest is its output so far; 0: all. Raises AssertionError if these are more
    than they may be."""
    length = length or len(prompt)
    state = DecodeScheduler(DecodeConfig(), _PAGE, engine.num_pages, vocab_size=engine.vocab_size)
    bound = KvWindow.of(compression, length, _PAGE)
    order = Decode(
        _NAME, 1, b"r" * 16, pack_tokens(prompt), length, count + len(prompt) - length, SamplingParams(temperature=0.0),
        kv_compression=compression,
    )  # fmt: skip
    commands = [*state.handle(order, 0.0)]
    drawn = 0
    while drawn < count:
        commands += state.prepare(time.perf_counter())
        for command in commands:
            match command:
                case DuplicatePage(source=source, dest=dest):
                    engine.duplicate(source, dest)
                case SendToRouter(message=Tokens(deltas=deltas)):
                    sequence = state._sequences[_NAME]
                    held = sequence.pages.num_held
                    for token in (token for delta in deltas for token in delta.tokens):
                        drawn += 1
                        assert bound is None or held <= bound.held(sequence.pages.first, sequence.apart), held
                        yield held, token
                case _:
                    pass
        if drawn < count:
            plan = state.schedule(time.perf_counter())
            output = engine.run(list(plan.values()))
            done = StepDone(plan, output.sampled, {}, 0.001, weights=output.weights)
            commands = state.handle(done, time.perf_counter())
    state.handle(Cancel(_NAME, 1), 0.0)


if __name__ == "__main__":
    raise SystemExit(main())
