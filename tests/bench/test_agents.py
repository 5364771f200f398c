"""Recorded sessions in the benches: figures by hand, and what a real turn can reuse."""

import numpy as np
import pytest

from bench.cluster import agents as real
from bench.router import agents as simulated
from simulator.mooncake import TraceLine
from tests.simulator.test_sessions import TURNS


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
    assert simulated.main(["/no/such/file"]) == real.main(["/no/such/file"]) == 1
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
