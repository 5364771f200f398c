"""Recorded sessions in the benches: orders of eviction over pages, figures by hand, and what a real turn can reuse."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from bench.cluster import agents as real
from bench.router import agents as simulated
from bench.store import retention
from bench.store.retention import PAGE, Use, hits, ranks, s3_fifo, uses
from simulator.mooncake import TraceLine
from tests.simulator.test_sessions import OTHER, TURNS


def requests(seed: int) -> list[Use]:
    """Make users of a few conversations, which grow by a page or two at a time, and of prompts that never return."""
    rng = random.Random(seed)
    chains: list[list[int]] = [[100 * i] for i in range(6)]
    sequence: list[Use] = []
    for at in range(80):
        chain = rng.choice(chains)
        read = chain[:]
        chain.extend(range(chain[-1] + 1, chain[-1] + 1 + rng.randint(1, 2)))
        sequence.append(Use(float(at), str(chain[0]), PAGE * len(read) + 1, read, chain[:]))
    return sequence


@pytest.mark.parametrize("seed", range(8))
def test_no_order_keeps_more_than_the_one_that_knows_the_future(seed: int) -> None:
    sequence = requests(seed)
    for capacity in (5, 12, 30, 60):
        shares = {name: hits(sequence, capacity, rank) for name, rank in ranks(sequence).items()}
        assert max(shares.values()) == shares["belady"]
        assert s3_fifo(sequence, capacity) <= shares["belady"]
        assert shares["returning"] >= shares["lru"]
    endless = [hits(sequence, 10_000, rank) for rank in ranks(sequence).values()]
    assert endless == [endless[0]] * len(endless)
    assert endless[0] == s3_fifo(sequence, 10_000)


@pytest.mark.parametrize("seed", range(4))
def test_lru_is_the_stores_order(seed: int) -> None:
    sequence = requests(seed)
    cached: OrderedDict[int, None] = OrderedDict()
    hit = 0
    for use in sequence:
        known = next((i for i, page in enumerate(use.read) if page not in cached), len(use.read))
        hit += known * PAGE
        for page in reversed(use.left):
            cached.pop(page, None)
            cached[page] = None
        while len(cached) > 20:
            cached.popitem(last=False)
    assert hits(sequence, 20, ranks(sequence)["lru"]) == pytest.approx(hit / sum(use.prompt for use in sequence))


def test_turns_read_the_pages_of_the_answers_before() -> None:
    first, second, third, _ = uses(TURNS, 1, 40.0, 1)[:4]
    assert (first.prompt, first.at + 0.3 + 0.025 * 100 + 2.0) == (1_300, pytest.approx(second.at))
    assert second.read == first.left[:2]
    assert third.read[:2] == second.left[:2]
    assert len(uses(TURNS + OTHER, 3, 40.0, 1)) > len(uses(TURNS + OTHER, 1, 40.0, 1))


def test_figures_of_a_round() -> None:
    table = {
        "arrived": np.array([0.0, 10.0, 20.0]),
        "ttft": np.array([1.0, 3.0, 9.0]),
        "prompt": np.array([1_000.0, 1_000.0, 5_000.0]),
        "cached": np.array([0.0, 512.0, 0.0]),
        "possible": np.array([100.0, 1_030.0, 5_000.0]),
        "gap": np.array([0.0, 400.0, 0.0]),
        "finished": np.array([1.0, 1.0, 0.0]),
    }
    got = {each.name: each for each in simulated.figures(table, table["arrived"] >= 0, 512, 2.0)}
    assert (got["reuse"].value, got["reuse"].limit) == (0.256, 0.512)
    assert got["TTFT p50"].value == 2.0
    assert got["goodput within 2 s"].value == 0.1
    assert got["lost after 300 or more s"].value == 0.256
    assert not list(simulated.figures(table, table["arrived"] > 15, 512, 2.0))


def test_a_trace_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert retention.main(["/no/such/file"]) == simulated.main(["/no/such/file"]) == real.main(["/no/such/file"]) == 1
    assert not capsys.readouterr().out


def test_pages_that_a_real_turn_could_reuse() -> None:
    pages = real.Pages(4)
    pages.add(range(10))
    assert pages.count(range(10)) == 8
    assert pages.count(range(8)) == 4, "the last token is computed"
    assert pages.count([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert pages.count([9, *range(1, 10)]) == 0


def test_a_real_turn_goes_on_where_the_recording_did() -> None:
    before = [real.Message("system", "s", 500), real.Message("user", "u", 1_300), real.Message("assistant", "a", 1_400)]
    continued = real.Player._continued  # pyright: ignore[reportPrivateUsage]
    assert continued(before, TURNS, 1) == before
    assert continued(before, TURNS, 3) == before[:1]
    nearly = [TURNS[0], TraceLine(0, 1_500, 1, (), "fix", 0, 1_277, 0)]
    assert continued(before, nearly, 1) == before, "the end of a template does not count"


def test_events_of_both_doors() -> None:
    chat, anthropic = real._chat, real._anthropic  # pyright: ignore[reportPrivateUsage]
    assert chat({"choices": [{"delta": {"content": "x"}}]}) == ("x", None)
    assert chat({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}}) == ("", 7)
    assert anthropic({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}) == ("x", None)
    assert anthropic({"type": "message_delta", "delta": {}, "usage": {"cache_read_input_tokens": 7}}) == ("", 7)
