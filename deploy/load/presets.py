"""Workloads under the names of inference-perf's workload catalogue, and the conversations drawn from them. Pure.

A conversation is what one user does: turns one after the other, each of which continues the tokens of the last.
Where the catalogue gives a mean and a standard deviation, lengths are log-normal with the same two. The shape of
agentic-trace-replay is one that has the trace's means: 49,100 prompt tokens, 659 output tokens, 92 % shared.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from baton.errors import ConfigError
from deploy.load.figures import Objectives
from simulator.lengths import Lengths

_SHARED, _SHAPES, _TOKENS = range(3)  # names of the random streams
_SHORTEST_TURN = 4  # tokens of prompt and of output that a scaled turn keeps


@dataclass(frozen=True)
class Preset:
    """One workload. Lengths are in tokens, gaps in seconds."""

    name: str
    about: str
    prompt: Lengths  # new tokens of the first turn
    output: Lengths
    shared: int = 0  # tokens of a system prompt that all conversations begin with
    turns: int = 1
    growth: int = 0  # new tokens of each later turn
    gap: Lengths | None = None  # between an answer and the next turn
    objectives: Objectives = field(default_factory=Objectives)

    @property
    def longest(self) -> int:
        """Tokens of a long conversation at its end: twice the mean of each length that varies."""
        prompt, output = (mean(each) * (1 if each.kind == "fixed" else 2) for each in (self.prompt, self.output))
        return math.ceil(self.shared + prompt + output * self.turns + self.growth * (self.turns - 1))


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: its new tokens, the length of its output, and the wait before it, in seconds."""

    tokens: tuple[int, ...]
    output: int
    gap: float


def spread(average: float, deviation: float) -> Lengths:
    """Return the log-normal distribution with this mean and standard deviation."""
    variance = math.log(1 + (deviation / average) ** 2)
    return Lengths("lognormal", average / math.exp(variance / 2), math.sqrt(variance))


def fixed(length: int) -> Lengths:
    return Lengths("fixed", length)


def mean(lengths: Lengths) -> float:
    match lengths.kind:
        case "fixed":
            return lengths.first
        case "uniform":
            return (lengths.first + lengths.second) / 2
        case "lognormal":
            return lengths.first * math.exp(lengths.second**2 / 2)


_ALL = (
    Preset(
        "interactive-chat",
        "a shared system prompt, 4 turns with pauses between them",
        spread(4_000, 2_500), spread(300, 150), shared=1_000, turns=4, growth=50, gap=spread(45, 40),
        objectives=Objectives(ttft=1.0),
    ),
    Preset(
        "code-generation", "very long prompts of very different lengths",
        spread(160_000, 233_600), spread(425, 825), gap=fixed(15), objectives=Objectives(ttft=30.0, tpot=0.1),
    ),
    Preset("reasoning", "short prompts, long outputs", fixed(1_000), fixed(8_000), objectives=Objectives(ttft=2.0)),
    Preset(
        "deep-research", "long prompts that grow over 15 turns",
        fixed(45_000), fixed(300), turns=15, growth=1_000, objectives=Objectives(ttft=10.0, tpot=0.1),
    ),
    Preset(
        "batch-summarization-rag", "long prompts, short outputs, no pauses",
        fixed(15_000), fixed(500), objectives=Objectives(ttft=15.0),
    ),
    Preset("batch-synthetic-data", "short prompts, long outputs, no pauses", fixed(500), fixed(4_000)),
    Preset(
        "agentic-trace-replay", "22 calls, each of which continues the last, 92 % of a prompt shared with it",
        spread(7_500, 3_000), spread(659, 600), turns=22, growth=3_300, gap=fixed(13),
    ),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}


def named(name: str) -> Preset:
    """Return the preset of that name. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def scaled(preset: Preset, lengths: float, times: float) -> Preset:
    """Return the preset with its lengths and its pauses multiplied; objectives stay as they are."""

    def longer(each: Lengths) -> Lengths:
        second = each.second * lengths if each.kind == "uniform" else each.second
        return replace(each, first=max(_SHORTEST_TURN, each.first * lengths), second=second)

    gap = None if preset.gap is None else replace(preset.gap, first=preset.gap.first * times)
    return replace(
        preset, prompt=longer(preset.prompt), output=longer(preset.output), shared=round(preset.shared * lengths),
        growth=max(_SHORTEST_TURN, round(preset.growth * lengths)) if preset.turns > 1 else 0, gap=gap,
    )  # fmt: skip


def scale_to(preset: Preset, context: int) -> float:
    """Return the factor, 1 at most, by which lengths shrink so that a long conversation fits into the context."""
    return min(1.0, context / preset.longest)


def conversations(preset: Preset, vocab: int, context: int, seed: int) -> Iterator[list[Turn]]:
    """Yield conversations without end, the same for the same seed. A conversation ends before the context is full."""
    shared = tuple(_draw(np.random.default_rng([seed, _SHARED]), preset.shared, vocab))
    number = 0
    while True:
        shapes, tokens = (np.random.default_rng([seed, stream, number]) for stream in (_SHAPES, _TOKENS))
        number += 1
        prompt = preset.prompt.draw(1, shapes)[0]
        outputs = preset.output.draw(preset.turns, shapes)
        gaps = [_seconds(preset.gap, shapes) for _ in range(preset.turns)]
        turns: list[Turn] = []
        length = 0
        for output, gap in zip(outputs, gaps, strict=True):
            new = preset.growth if turns else preset.shared + prompt
            room = context - length - _SHORTEST_TURN
            if turns and new + _SHORTEST_TURN > room:
                break
            new = min(new, room)
            output = min(output, context - length - new)
            begin = () if turns else shared[:new]
            turns.append(Turn((*begin, *_draw(tokens, new - len(begin), vocab)), output, gap if turns else 0.0))
            length += new + output
        yield turns


def _seconds(gap: Lengths | None, rng: np.random.Generator) -> float:
    """Draw a pause. Unlike lengths, pauses may be below 1."""
    if gap is None:
        return 0.0
    return gap.first if gap.kind == "fixed" else gap.first * float(rng.lognormal(0.0, gap.second))


def _draw(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, count).tolist()
