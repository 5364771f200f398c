"""Where the time of a prompt goes between its order to a prefill worker and the end of its hand-off.

    python -m bench.cluster.prompt_account [--engine vllm] [--tokens 2000] [--prompts 8] [--load 16]

One prefill and one decode worker. The model computes next to nothing, and its pages are those of Qwen3-0.6B: 28 layers,
8 KV heads of 128 elements, in bfloat16 112 KiB a token. `--model` names another one. Prompts come one at a time, and
then `--load` of them at once. The parts are read from the prefill worker's trace:

    order ─▶ first step launched ─▶ last step ended ─▶ last page copied ─▶ last page sealed, `Prefilled` sent
             steps, and gaps between them

Of copies, only the time after the last step counts. On a device that copies beside steps, the others lie within it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from baton.client import Client
from baton.config import parse_override
from bench import clusters, models, report
from bench.processes import Neighbours

BENCH = "prompt_account"
_SHAPE = models.LLAMA_100M | {
    "vocab_size": 4_096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
_STEPS = 10_000  # of a trace at most
_SETTINGS: Mapping[str, object] = {
    "router.disaggregation": "always", "store.host_cache_bytes": "2GiB", "cluster.trace_steps": _STEPS,
}  # fmt: skip
_ON_CPU: Mapping[str, object] = {
    "model.device": "cpu", "prefill.kv_cache_bytes": "700MiB", "decode.kv_cache_bytes": "700MiB", "prefill.threads": 1,
    "decode.threads": 1,
}  # fmt: skip


class Span(NamedTuple):
    """A span of the worker's loop. Milliseconds."""

    name: str
    start: float
    end: float
    args: Mapping[str, Any]


class Part(NamedTuple):
    """A part of a prompt's time, in milliseconds."""

    name: str
    took: float


def spans(trace: Path) -> list[Span]:
    """The spans of a trace, by their starts."""
    events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event["ph"] == "X"]
    read = (Span(one["name"], one["ts"] / 1e3, (one["ts"] + one["dur"]) / 1e3, one.get("args", {})) for one in events)
    return sorted(read, key=lambda span: span.start)


def account(own: Sequence[Span]) -> list[Part]:
    """The parts of one prompt's time, of the spans from its order to the next one's. They add up to the whole."""
    launched, ended, copied, sealed = (
        [span for span in own if span.name == name] for name in ("step", "results", "handle CopiedOut", "handle Sealed")
    )
    ends = [own[0].start, *(span.end for span in ended)]
    gaps = [max(0.0, step.start - before) for step, before in zip(launched, ends, strict=False)]
    last_copy, last_word = max(ends[-1], copied[-1].start), sealed[-1].end
    return [
        Part("order to first step", gaps[0]),
        Part("steps", ends[-1] - ends[0] - sum(gaps)),
        Part("gaps between steps", sum(gaps[1:])),
        Part("last step to last page copied", last_copy - ends[-1]),
        Part("last page copied to sealed", last_word - last_copy),
        Part("in all", last_word - ends[0]),
    ]


def _by_prompt(trace: Sequence[Span]) -> list[list[Span]]:
    starts = [span.start for span in trace if span.name == "handle Prefill"]
    return [
        [span for span in trace if since <= span.start < until] for since, until in pairwise([*starts, float("inf")])
    ]


def measure(model: Path, arguments: argparse.Namespace) -> Iterator[report.Result]:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    settings = {**_SETTINGS, **({} if arguments.device == "cuda" else _ON_CPU), "model.engine": arguments.engine}
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory(prefix="baton-account-") as folder:
        settings |= {"cluster.trace_dir": folder, **arguments.settings}
        with (
            clusters.local(model, 1, 1, settings, arguments.patience) as cluster,
            Client(cluster.address, operator=cluster.operator) as client,
        ):
            first: list[float] = []
            for number in range(arguments.prompts + 1):
                neighbours.lap()
                began = time.perf_counter()
                stream = client.generate(_prompt(number, arguments.tokens, vocabulary), max_tokens=2, ignore_eos=True)
                next(iter(stream))
                first.append((time.perf_counter() - began) * 1e3)
                stream.result()
                report.say(f"prompt {number}: {first[-1]:.1f} ms; others used {neighbours.lap():.2f} cores")
            yield report.median_of(BENCH, "first token at the client", "ms", first[1:])
            began = time.perf_counter()
            numbers = range(len(first), len(first) + arguments.load)
            prompts = [_prompt(number, arguments.tokens, vocabulary) for number in numbers]
            for one in [client.generate(prompt, max_tokens=2, ignore_eos=True) for prompt in prompts]:
                one.result()
            if arguments.load:
                each = (time.perf_counter() - began) / arguments.load * 1e3
                yield report.Result(BENCH, f"{arguments.load} at once: each", each, "ms")
        (trace,) = Path(folder).glob("prefill-0-*.json")
        alone = _by_prompt(spans(trace))[1 : arguments.prompts + 1]
    tokens = [[span.args["tokens"] for span in own if span.name == "step"] for own in alone]
    report.say(f"tokens of the steps: {tokens}")
    for parts in zip(*map(account, alone), strict=True):
        yield report.median_of(BENCH, parts[0].name, "ms", [part.took for part in parts])


def _prompt(number: int, length: int, vocabulary: int) -> list[int]:
    return [3 + (number * 7_919 + place * 31) % (vocabulary - 3) for place in range(length)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="native", choices=("native", "vllm"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", type=Path, help="the directory of another checkpoint")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--prompts", type=int, default=8, help="one at a time, after one to warm up")
    parser.add_argument("--load", type=int, default=16, help="prompts at once")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for the cluster to start")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.SETTING=VALUE")
    arguments = parser.parse_args(argv)
    arguments.settings = dict(map(parse_override, arguments.settings))
    report.say(report.machine())
    with ExitStack() as stack:
        if (model := arguments.model) is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-model-")))
            model = models.write_shape(folder, _SHAPE)
        for result in measure(model, arguments):
            report.emit(result)


if __name__ == "__main__":
    sys.exit(main())
