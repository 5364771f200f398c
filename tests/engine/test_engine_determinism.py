"""The same bits of pages and logits by every path: whatever the chunks of a prompt, the sequences beside it, the number
of threads, and the processor's vectors."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu import build
from engine.engine import Engine, _by_chunk, _weights
from engine.step.batch import Chunk, Sampled, TokenDraw
from kvstore.kv_window import KvWindow
from tests.engine.driver import GREEDY, plant, prompt_of
from tests.support import checkpoints, quantized_checkpoints
from tests.support.checkpoints import RECIPES, VOCAB
from tests.support.coded_pages import token_rows
from tests.support.thorough import cases, examples

Engines = Callable[..., Engine]

PAGE = 16
PAGES = 192
MOST = 1_100  # tokens of a sequence: three segments of a context
OWN = MOST // PAGE + 1  # pages of a sequence

pytestmark = pytest.mark.skipif(not build.can_compile(), reason="no compiler, or no AVX2: torch does the work here")
both = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
TILE_ORDER = "-DBATON_TILE_ORDER"
AMX = "amx_bf16" in build.cpu_description().split()
NARROW = ("-march=x86-64-v3", TILE_ORDER) if AMX else ("-march=x86-64-v3",)
ODD = {"hidden_size": 72, "head_dim": 18, "intermediate_size": 131, "num_attention_heads": 6}
CODED = [
    *product(["llama", "gemma3"], ["bfloat16, int8"]),
    ("mistral-window", "float32, int8"),
    ("llama", "float32, fp8"),
    ("mistral-window", "bfloat16, fp8"),
]


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`path(name)`: a checkpoint. Nothing of "odd" fills a tile. Codes have products of several blocks of inputs."""

    @cache
    def path(name: str) -> Path:
        form, _, recipe = name.partition(" of ")
        if name == "odd":
            return checkpoints.make("llama-bias", tmp_path_factory.mktemp("model"), **ODD)
        if not recipe:
            return checkpoint(name)
        folder = tmp_path_factory.mktemp("model")
        return quantized_checkpoints.make(form, folder, recipe, initializer_range=0.1, intermediate_size=320)

    return path


@pytest.fixture(scope="module")
def engines(path: Callable[[str], Path]) -> Engines:
    """`engines(name, dtype, threads, head, flags)`; `flags`: compiled for AVX2 alone, or otherwise. "float32, int8":
    the model's dtype and that of its pages."""

    @cache
    def other_library(flags: tuple[str, ...]) -> build.Library:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
            return build.load(build.SOURCES, build.cache_root())

    @cache
    def loaded(name: str, dtype: str, threads: int = 1, head: bool = True, flags: tuple[str, ...] = ()) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            if flags:
                patch.setattr(build, "library", lambda: other_library(flags))
            computed, _, held = dtype.partition(", ")
            engine = Engine.load(path(name), computed, "cpu", PAGES, PAGE, head, threads, True, held or "auto")
        assert engine._native is not None
        return engine

    return loaded


class Computed(NamedTuple):
    """The bits of a sequence's K and V, [tokens, …], those of logits by the number of tokens before them, and what its
    observed tokens attend to."""

    pages: torch.Tensor
    logits: dict[int, torch.Tensor]
    weights: Sequence[Sequence[float]] = ()


class Computing:
    """A sequence that an engine computes in whatever chunks."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], pages: Sequence[int], window: KvWindow | None = None
    ) -> None:
        self.engine, self.tokens, self.pages, self.window = engine, tokens, pages, window
        self.at = 0
        self.logits = dict[int, torch.Tensor]()
        self.weights = list[Sequence[float]]()

    def chunk(self, size: int) -> Chunk:
        tokens = self.tokens[self.at : self.at + size]
        end = self.at + len(tokens)
        observed = 0 if self.window is None else max(0, end - max(self.at, self.window.observed_from))
        draw = GREEDY if self.engine.has_lm_head else None
        return Chunk(tokens, self.at, self.pages, draw, kv_window=self.window, observed=observed)

    def computed(self) -> Computed:
        pages = self.engine.pool[torch.tensor(list(self.pages))]
        return Computed(token_rows(pages, self.engine.layout)[: self.at].clone(), self.logits, self.weights)


def step(sequences: Sequence[Computing], sizes: Sequence[int]) -> None:
    """Compute some tokens of each. One engine has all of them."""
    engine = sequences[0].engine
    chunks = [one.chunk(size) for one, size in zip(sequences, sizes, strict=True)]
    batch = engine._flatten(chunks)
    weights = _weights(chunks, batch)
    logits, _ = engine._logits(batch, weights)
    observed = {} if weights is None else _by_chunk(chunks, weights)
    for number, (one, chunk) in enumerate(zip(sequences, chunks, strict=True)):
        one.at += len(chunk.tokens)
        one.weights += [row[: len(one.tokens) // PAGE] for row in observed.get(number, ())]
        if logits is not None:
            one.logits[one.at] = logits[number].view(torch.int32).clone()


def assert_same_bits(one: Computed, other: Computed) -> None:
    """As far as both are known."""
    tokens = (one.pages != other.pages).flatten(1).any(1).nonzero().flatten().tolist()
    assert not tokens, f"K or V of the tokens {tokens[:10]} differ"
    for at in one.logits.keys() & other.logits.keys():
        assert torch.equal(one.logits[at], other.logits[at]), f"logits after {at} tokens differ"


def fill_with_anything(engine: Engine) -> None:
    """Fill the pool as others would leave it behind."""
    if engine.pool.is_floating_point():
        engine.pool.normal_()
    else:
        engine.pool.random_(-128, 128)


def whole(engine: Engine, tokens: Sequence[int], window: KvWindow | None = None) -> Computed:
    """One chunk, with nothing beside it."""
    engine.pool.zero_()
    alone = Computing(engine, tokens, range(OWN), window)
    step([alone], [len(tokens)])
    return alone.computed()


def mixed(engine: Engine, tokens: Sequence[int], rng: random.Random, window: KvWindow | None = None) -> Computed:
    """Random chunks, and other sequences beside them."""
    pages = rng.sample(range(PAGES), PAGES)
    mine = Computing(engine, tokens, pages[:OWN], window)
    sizes = rng.choice([[1], [1, 2, 5], [6, 7, 12, 33], [16, 32, 64], [40, 100, 300], [1, 3, 65, 320, 500]])
    others = [
        Computing(engine, prompt_of(200, seed=rng.randrange(99)), pages[OWN + 13 * i : OWN + 13 * i + 13])
        for i in range(rng.choice([0, 0, 1, 4]))
    ]
    fill_with_anything(engine)
    if len(sizes) < 3 and len(tokens) > 200:  # the many tokens before them in one go
        step([mine], [len(tokens) - rng.randrange(5, 80)])
    while mine.at < len(tokens):
        beside = [one for one in others if one.at < len(one.tokens) and rng.random() < 0.7]
        batch = [mine, *beside]
        rng.shuffle(batch)
        step(batch, [rng.choice(sizes if one is mine else [1, 1, 1, 5, 40]) for one in batch])
    return mine.computed()


@pytest.mark.technique("The same bits by every path")
@pytest.mark.technique("Pages in codes, with a scale for each token and head")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *product(
            [*RECIPES, "odd", "int8 of llama", "int4 of qwen3", "awq of phi3", "fp8 of llama"], ["bfloat16", "float32"]
        ),
        *CODED,
        ("int8 of llama", "bfloat16, int8"),
        ("gptq-act-order of llama", "bfloat16"),
    ],
)
@examples(24)
@given(data=st.data())
def test_no_path_changes_a_bit(name: str, dtype: str, data: st.DataObject, engines: Engines) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    length = rng.choice([5, 64, 65, 130, 300, 520, MOST])
    tokens = [rng.randrange(VOCAB) for _ in range(length)]
    first = whole(engines(name, dtype), tokens)
    other = engines(name, dtype, rng.choice([1, 2, 3]), rng.random() < 0.8, NARROW if rng.random() < 0.3 else ())
    assert_same_bits(first, mixed(other, tokens, rng))


@pytest.mark.technique("Attention sinks with a window, of a request")
@pytest.mark.parametrize(
    ("name", "dtype"), [*product(["llama", "qwen3", "int4 of qwen3"], ["bfloat16", "float32"]), CODED[0]]
)
@examples(12)
@given(data=st.data())
def test_no_path_changes_a_bit_of_a_window(name: str, dtype: str, data: st.DataObject, engines: Engines) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([65, 130, 300, 700, MOST]))]
    window = KvWindow(rng.randint(1, len(tokens)), rng.choice([0, 1, 3]), rng.choice([1, 16, 17, 40, 600]), PAGE)
    first = whole(engines(name, dtype), tokens, window)
    assert_same_bits(first, mixed(engines(name, dtype, rng.choice([1, 2, 3])), tokens, rng, window))
    plain = whole(engines(name, dtype), tokens)
    assert_same_bits(Computed(first.pages[: window.exact], {}), Computed(plain.pages[: window.exact], {}))
    assert (window.exact >= len(tokens)) == torch.equal(first.pages, plain.pages)


@pytest.mark.technique("Attention sinks, a window and pages chosen by attention, of a request")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(["llama", "qwen3", "int4 of qwen3"], ["bfloat16", "float32"]), CODED[0], ("llama", "float32, fp8")],
)
@examples(12)
@given(data=st.data())
def test_no_path_changes_a_bit_of_what_tokens_attend_to(
    name: str, dtype: str, data: st.DataObject, engines: Engines
) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([17, 64, 130, 300, 700, MOST]))]
    size = rng.choice([5, 40])
    window = KvWindow(len(tokens), 0, size, PAGE, keep=1)
    if again := len(tokens) > size and rng.random() < 0.5:  # all before the last ones was the prompt
        since = len(tokens) - size
        between = range(1, max(1, (since + 1 - size) // PAGE))
        chosen = tuple(sorted(rng.sample(between, min(2, len(between)))))
        window = KvWindow(since, 1, size, PAGE, 2, chosen, again=True, since=since)
    first = whole(engines(name, dtype), tokens, window)
    other = mixed(engines(name, dtype, rng.choice([1, 2, 3])), tokens, rng, window)
    assert len(first.weights) == min(16, window.tokens)
    assert first.weights == other.weights
    assert_same_bits(first, other)
    if not again:
        assert_same_bits(first, whole(engines(name, dtype), tokens))


@pytest.mark.technique("The same bits by every path")
@pytest.mark.parametrize("name", ["llama", "int8 of llama", "int4 of qwen3", "fp8 of llama"])
@examples(8)
@given(data=st.data())
def test_the_order_of_tiles_is_the_same_without_them(name: str, data: st.DataObject, engines: Engines) -> None:
    """Where AMX is, its tiles beside vectors of both kinds, and else these beside each other."""
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([64, 130, 520]))]
    first = whole(engines(name, "bfloat16", flags=(TILE_ORDER,)), tokens)
    flags = rng.choice([(TILE_ORDER, "-mno-amx-bf16"), ("-march=x86-64-v3", TILE_ORDER)])
    assert_same_bits(first, mixed(engines(name, "bfloat16", rng.choice([1, 2]), flags=flags), tokens, rng))


@pytest.mark.technique("Prefixes shared within a page")
@pytest.mark.parametrize("name", RECIPES)
@both
@examples(6)
@given(data=st.data())
def test_a_page_that_is_copied_in_part_changes_no_bit(
    name: str, dtype: str, data: st.DataObject, engines: Engines
) -> None:
    """Two sequences part in the middle of a page. The second has the full pages by reference, and copies that one."""
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    engine, common, pages = engines(name, dtype), rng.choice([3, 70, 300, 525]), rng.sample(range(PAGES), PAGES)
    common += common % PAGE == 0
    tokens = [rng.randrange(VOCAB) for _ in range(common + 40)]
    first, full = whole(engine, tokens), common // PAGE
    engine.pool.normal_()
    source = Computing(engine, [*tokens[:common], *prompt_of(30, seed=1)], pages[:OWN])
    step([source], [len(source.tokens)])
    second = Computing(engine, tokens, [*pages[:full], *pages[OWN : 2 * OWN - full]])
    engine.duplicate(pages[full], second.pages[full])
    second.at = common
    while second.at < len(tokens):
        step([second], [rng.choice([1, 3, 40])])
    assert_same_bits(first, second.computed())


MISTAKES: dict[str, list[tuple[str, str, str]]] = {  # in which file, what, and what instead
    "a residual stream in bf16, of many rows": [
        (
            "forward.cpp",
            "store16(x + at, load16(x + at, left) + sum, left);",
            "{ bf16 rounded[kLanes]; store16(x + at, load16(x + at, left) + sum, left);"
            "store16(rounded, load16(x + at, left));"
            "if (rows > 40) store16(x + at, load16(rounded), left); }",
        )
    ],
    "a context divided by threads": [
        ("attention.h", "constexpr int kSegment = 512;", "inline int kSegment = 512;"),
        ("forward.cpp", "qkv_size_ = round_up(", "kSegment = threads_ > 1 ? 256 : 512; qkv_size_ = round_up("),
    ],
    "keys in another order, for few queries": [
        (
            "attention.h",
            "[&](int64_t w, Part<T>(&part)[Q][P]) {",
            "[&](int64_t i, Part<T>(&part)[Q][P]) { const int64_t w = Q < 4 ? words() - 1 - i : i;",
        )
    ],
    "products by blocks, with a companion": [
        ("forward.cpp", "sum[r][j] = first ? zeros()", "sum[r][j] = first || R > 1 ? zeros()"),
        (
            "forward.cpp",
            "store16(sums + r * kTile + column + j * kLanes, sum[r][j]);",
            "store16(sums + r * kTile + column + j * kLanes, "
            "first || R == 1 ? sum[r][j] : sum[r][j] + load16(sums + r * kTile + column + j * kLanes));",
        ),
        ("forward.cpp", "kBlockSteps = 64;", "kBlockSteps = 16;"),
    ],
}
if AMX:
    del MISTAKES["products by blocks, with a companion"]  # a block of 16 is a span, and sums of spans are right there
    MISTAKES |= {
        "tiles: rows of another stride": [("tiles.h", "x + 16 * stride, stride);", "x + 16 * stride, stride + 64);")],
        "tiles: without the last row": [("tiles.h", "rows - 16", "least(rows - 16, 15)")],
        "tiles: without what is left of a span": [("forward.cpp", "if (!rest) return;", "return;")],
        "tiles: a part of a sum added first": [
            ("vector.h", "sum + (part.even + part.odd)", "(sum + part.even) + part.odd")
        ],
        "tiles: spans in another order": [
            (
                "tiles.h",
                "for (int64_t span = 0; span < spans; ++span, weights += words * row, x += step)",
                "weights += (spans - 1) * words * row, x += (spans - 1) * step;"
                "for (int64_t span = 0; span < spans; ++span, weights -= words * row, x -= step)",
            )
        ],
        "tiles: keys at a block's end left out": [
            ("attention.h", "halves = (count + kTiledRows - 1) / kTiledRows", "halves = std::max(1, count / 32)")
        ],
        "tiles: keys that are not seen": [("attention.h", "key < count ? last : filled(-1)", "filled(INT32_MAX)")],
        "tiles: the two values of a word swapped": [
            ("attention.h", "beside(values[key + 2 * k] + i, values[key + 2 * k + 1] + i",
             "beside(values[key + 2 * k + 1] + i, values[key + 2 * k] + i")
        ],
        "tiles: an output that does not shrink": [
            ("attention.h", "store16(to, load16(to) * shrink);", "store16(to, load16(to));")
        ],
        "codes in tiles: those of the group before": [
            ("forward.cpp", "tile + span / spans * bytes +", "tile + span / spans / 2 * bytes +")
        ],
        "codes in tiles: a scale of another group": [("forward.cpp", "tile + g * group_bytes(weight)}", "tile}")],
        "codes in tiles: minimums left out": [("forward.cpp", "weight.minimums ? add_groups<some, true> :", "")],
        "codes in tiles: totals of the first rows": [
            ("forward.cpp", "totals.at + row * totals.stride + first", "totals.at + first")
        ],
        "codes in tiles: a block's sums left out": [
            ("forward.cpp", "begin == 0, sums + row * kTile);", "true, sums + row * kTile);")
        ],
        "codes in tiles: a sum scaled last": [
            ("forward.cpp", "load16(part + (g * rows + r) * columns + c + v * kLanes), scale[g][v], so_far[v])",
             "load16(part + (g * rows + r) * columns + c + v * kLanes) * scale[g][v], filled(1.0f), so_far[v])")
        ],
        "codes in tiles: the next block's made too early": [("forward.cpp", "row + n == rows && column", "column")],
        "inputs in rows that overlap": [("forward.cpp", "stride = stride_of<T>(inner)](", "stride = inner - 2](")],
    }  # fmt: skip


@pytest.mark.technique("The same bits by every path")
@pytest.mark.parametrize("mistake", cases(list(MISTAKES), ["keys in another order, for few queries"]))
def test_a_mistake_in_the_kernels_is_found(
    mistake: str, path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(MISTAKES[mistake], tmp_path, monkeypatch)
    model = path({"tiles": "odd", "codes in tiles": "awq of llama"}.get(mistake.partition(":")[0], "llama"))
    engines = [Engine.load(model, "bfloat16", "cpu", PAGES, PAGE, True, threads=n) for n in (1, 2)]

    def compare(seed: int) -> None:
        rng = random.Random(seed)
        tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([70, 300, MOST]))]
        assert_same_bits(whole(engines[0], tokens), mixed(engines[1], tokens, rng))

    with pytest.raises(AssertionError, match="differ"):
        deque(map(compare, range(20)), maxlen=0)


@pytest.mark.technique("Speculation by n-grams, token-identical")
@pytest.mark.parametrize(("name", "dtype"), [*product(RECIPES, ["bfloat16", "float32"]), *CODED])
@examples(6)
@given(data=st.data())
def test_rows_of_proposals_have_the_bits_of_single_rows(
    name: str, dtype: str, data: st.DataObject, engines: Engines
) -> None:
    """Right proposals are computed as if they came one by one. Wrong ones leave nothing that counts."""
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    start = rng.choice([1, 5, 60, 130, 300, 520])
    tokens = [rng.randrange(VOCAB) for _ in range(start + 20)]
    singly = Computing(engines(name, dtype), tokens, range(OWN))
    singly.engine.pool.zero_()
    step([singly], [start])
    while singly.at < len(tokens):
        step([singly], [1])
    first = singly.computed()
    engine = engines(name, dtype, rng.choice([1, 2, 3]))
    pages = rng.sample(range(PAGES), PAGES)
    mine, beside = (Computing(engine, tokens, some) for some in (pages[:OWN], pages[OWN : 2 * OWN]))
    fill_with_anything(engine)
    for one in (mine, beside):
        step([one], [start])
    while mine.at < len(tokens):
        right = rng.randint(0, min(6, len(tokens) - mine.at - 1))
        wrong = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
        rows = [*tokens[mine.at : mine.at + 1 + right], *wrong]
        verifying = Chunk(rows, mine.at, mine.pages, GREEDY, verify=[GREEDY] * (len(rows) - 1))
        chunks = [verifying, *([beside.chunk(1)] if beside.at < len(tokens) else [])]
        logits, _ = engine._logits(engine._flatten(chunks))
        assert logits is not None
        for row in range(1 + right):
            mine.logits[mine.at + 1 + row] = logits[row].view(torch.int32).clone()
        mine.at += 1 + right
        if len(chunks) > 1:
            beside.at += 1
            beside.logits[beside.at] = logits[-1].view(torch.int32).clone()
    assert_same_bits(first, mine.computed())
    assert_same_bits(Computed(first.pages[: beside.at], first.logits), beside.computed())


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draws_of_proposals_are_those_of_single_rows(dtype: str, temperature: float, engines: Engines) -> None:
    engine, rng = engines("llama", dtype, 2), random.Random(3)
    draw = TokenDraw(temperature=temperature, seed=11, logprobs=2)

    def drawn(proposals: Callable[[int], Sequence[int]]) -> list[Sampled]:
        """Generate from random pages. `proposals` for the tokens after so many."""
        fill_with_anything(engine)
        prompt, results = prompt_of(70), list[Sampled]()
        engine.step([Chunk(prompt[:-1], 0, range(OWN))])
        tokens = list(prompt)
        while len(results) < 50:
            guess = list(proposals(len(results) + 1))
            chunk = Chunk([tokens[-1], *guess], len(tokens) - 1, range(OWN), draw, verify=[draw] * len(guess))
            output = engine.run([chunk])
            rows = [*output.verified.get(0, ()), output.sampled[0]]
            for row, proposal in zip(rows, [*guess, None], strict=True):
                assert row is not None
                results.append(row)
                tokens.append(row.token)
                if row.token != proposal:
                    break
        return results[:50]

    single = drawn(lambda at: [])
    right = [each.token for each in single]
    assert drawn(lambda at: right[at : at + rng.randint(0, 5)] + [rng.randrange(VOCAB)] * rng.randint(0, 3)) == single
