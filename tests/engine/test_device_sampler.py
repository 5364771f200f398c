"""The sampler for devices: the oracle's tokens, and what it may ask of the device."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import counter_rng, device_edits, device_rng, device_sampler
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.filter_edges import filters
from engine.sampling.host_sampler import HostSampler
from engine.sampling.sampler import sampler_for
from engine.step.batch import TokenDraw
from tests.engine.sampler_cases import assert_same_draws, assert_same_scores, random_draw, random_logits
from tests.support.thorough import examples

CPU = torch.device("cpu")


@examples(1200)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 12),
    vocab=st.sampled_from([1, 3, 17, 256, 257, 600]),
    prefix=st.sampled_from([1, 4, 32, 256]),
)
def test_the_tokens_and_log_probabilities_are_the_oracles(seed: int, rows: int, vocab: int, prefix: int) -> None:
    rng = random.Random(seed)
    logits = random_logits(rng, rows, vocab)
    before = logits.clone()
    draws = [random_draw(rng, vocab) for _ in range(rows)]
    assert_same_draws(DeviceSampler(CPU, prefix), logits, draws, [rng.randrange(10**6) for _ in range(rows)])
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


@examples(150)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), vocab=st.sampled_from([1, 3, 300]), top=st.integers(0, 400))
def test_the_scores_are_the_oracles(seed: int, rows: int, vocab: int, top: int) -> None:
    rng = random.Random(seed)
    logits = random_logits(rng, rows, vocab).nan_to_num()
    assert_same_scores(DeviceSampler(CPU), logits, [rng.randrange(vocab) for _ in range(rows)], top)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((device_sampler, "NUMBERS_AT_ONCE"), (device_edits, "NUMBERS_AT_ONCE")):
        monkeypatch.setattr(module, name, 700)  # two rows at a time
    monkeypatch.setattr(device_sampler, "_SORTED_AT_ONCE", 1)
    rng = random.Random(1)
    draws = [random_draw(rng, 300) for _ in range(41)]
    assert_same_draws(DeviceSampler(CPU, 8), random_logits(rng, 41, 300), draws, list(range(41)))


def test_a_mass_that_equals_top_p_is_cut_at_the_same_token() -> None:
    """Equal logits add up to top_p, or to a last bit more or less, as the order of addition has it."""
    for vocab in range(2, 90):
        logits = torch.zeros(vocab, vocab)
        draws = [TokenDraw(top_p=(row + 1) / vocab, seed=row) for row in range(vocab)]
        assert_same_draws(DeviceSampler(CPU, 16), logits, draws, [0] * vocab)
        drawn = HostSampler().sample(logits, draws, [0] * vocab)
        assert all(one.token <= row for row, one in enumerate(drawn))


@pytest.mark.parametrize("draw", [TokenDraw(min_p=1.0), TokenDraw(top_k=2), TokenDraw(top_p=0.4)], ids=str)
def test_equals_beyond_the_likeliest_tokens_pass_too(draw: TokenDraw) -> None:
    logits = torch.full((200, 50), -60.0)
    logits[:, 10:40] = 1.0
    draws = [replace(draw, seed=seed) for seed in range(200)]
    assert_same_draws(DeviceSampler(CPU, 8), logits, draws, [0] * 200)
    drawn = {one.token for one in DeviceSampler(CPU, 8).sample(logits, draws, [0] * 200)}
    assert drawn == set(range(10, 22 if draw.top_p < 1 else 40))


@given(
    words=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 2**31)), max_size=9),
    tokens=st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=50),
)
def test_the_noise_is_the_hosts_to_the_last_bit_of_its_integers(
    words: list[tuple[int, int, int]], tokens: list[int]
) -> None:
    keys = counter_rng.keys(*([word[place] for word in words] for place in range(3)))
    assert keys.tolist() == [counter_rng.key(*word) for word in words]
    ids = np.array(tokens)
    for key in keys:
        states = device_rng.counters(torch.from_numpy(ids)) + int(key.view(np.int64))
        noise = device_rng.gumbel(states)
        bits = states.numpy().view(np.uint64)  # what it was scrambled into
        assert (counter_rng.uniform_of(bits) == counter_rng.uniform(int(key), ids)).all()
        np.testing.assert_allclose(noise.numpy(), counter_rng.gumbel(int(key), ids), rtol=1e-14, atol=1e-15)


def test_the_engine_takes_the_sampler_of_the_device() -> None:
    assert isinstance(sampler_for(CPU), HostSampler)
    assert isinstance(sampler_for(torch.device("meta")), DeviceSampler)


class HostReads(TorchFunctionMode):
    """Counts the numbers that `cpu` copies, and refuses every other way to read a tensor that is not on the host yet.

    Without a device all tensors are in host memory. So a tensor counts as one of the host if `cpu` copied it, or if it
    was made empty for the host to fill.
    """

    OTHERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__", "to_dense")

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []
        self._host: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        on_host = bool(args) and any(args[0] is one for one in self._host)
        assert name not in self.OTHERS or on_host, f"{name} waits for the device"
        assert name != "numpy" or on_host, "numpy reads a tensor that is on the device"
        result = func(*args, **(kwargs or {}))
        if name == "cpu":
            result = result.clone()  # here `cpu` gives the tensor itself
            self.copied.append(result.numel())
        if name in ("cpu", "empty"):
            self._host.append(result)
        return result


class NoWaits(TorchDispatchMode):
    """Refuses operations that wait for a device: those that read a number, and those whose shape depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        assert name not in self.WAITS, f"{name} waits for the device"
        if name in ("index", "index_put"):  # an index of truth values becomes nonzero
            assert all(one is None or one.dtype == torch.int64 for one in args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[int]]:
    with HostReads() as reads, NoWaits():
        yield reads.copied


def every_kind_of_draw(vocab: int) -> list[TokenDraw]:
    rng = random.Random(5)
    return [random_draw(rng, vocab) for _ in range(60)]


def test_one_small_copy_comes_back_from_a_step() -> None:
    vocab, rng = 3000, random.Random(2)
    # Steep logits, so that the likeliest tokens decide all filters.
    logits = torch.stack([torch.arange(vocab).roll(rng.randrange(vocab)) * -0.5 for _ in range(60)])
    draws = [
        replace(draw, top_k=min(draw.top_k, 50), logprobs=None if draw.logprobs is None else min(draw.logprobs, 20))
        for draw in every_kind_of_draw(vocab)
    ]
    reported = sum(draw.logprobs is not None for draw in draws)
    filtered = sum(draw.temperature > 0 and filters(draw, vocab) for draw in draws)
    sampler = DeviceSampler(CPU)
    with counted() as copied:
        sampler.sample(logits, draws, list(range(60)))
    assert copied == [3 * 60 + filtered + reported * (1 + 2 * 20)]
    with counted() as copied:
        sampler.score(logits, [7] * 60, 5)
    assert copied == [60 * (2 + 2 * 5)]


def test_rows_that_the_likeliest_tokens_do_not_decide_take_a_second_copy_of_their_tokens() -> None:
    logits, sampler = torch.zeros(9, 3000), DeviceSampler(CPU)
    flat = TokenDraw(top_p=0.5, logprobs=0)
    draws = [flat, *[TokenDraw(top_k=3000)] * 6, TokenDraw(0.0), TokenDraw(top_k=2)]
    with counted() as copied:
        got = sampler.sample(logits, draws, [0] * 9)
    assert copied == [9 * 2 + 2 + 1, 2 + 1]  # two rows, one of which reports a log-probability
    assert got == HostSampler().sample(logits, draws, [0] * 9)


class Launches(TorchDispatchMode):
    """Counts what would be launched on a device: operations that return no view of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("draw", "most"), [(TokenDraw(0.0), 4), (TokenDraw(1.0), 36)])
def test_a_draw_launches_few_operations(draw: TokenDraw, most: int) -> None:
    """Each costs the host about 10 microseconds on a GPU, and a decode step of a small model takes two milliseconds."""
    logits, sampler = torch.zeros(8, 700), DeviceSampler(CPU)
    sampler.prepare(700)
    with Launches() as launches:
        sampler.launch(logits, [draw] * 8, range(8))
    assert launches.count <= most


def test_a_launch_computes_without_any_number_of_the_device() -> None:
    """On the meta device there are no numbers: whatever reads one fails."""
    for vocab in (5, 700):
        draws = every_kind_of_draw(vocab)
        launched = DeviceSampler(torch.device("meta")).launch(
            torch.empty(60, vocab, device="meta"), draws, list(range(60))
        )
        assert launched.packed.device.type == "meta"
        assert launched.packed.dtype == torch.int32
