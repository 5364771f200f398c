"""The workloads of `baton bench`."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from deploy.commands.load_report import render
from deploy.load.figures import Objectives, Outcome, figures
from deploy.load.presets import PRESETS, Preset, conversations, fixed, mean, named, scale_to, scaled, spread

presets = st.sampled_from(list(PRESETS.values()))


@given(presets, st.integers(64, 200_000), st.integers(0, 1_000))
def test_no_conversation_leaves_the_context(preset: Preset, context: int, seed: int):
    fitting = scaled(preset, scale_to(preset, context), 0.0)
    for talk in islice(conversations(fitting, 1_000, context, seed), 3):
        assert talk
        assert len(talk) <= preset.turns
        assert sum(len(turn.tokens) + turn.output for turn in talk) <= context
        assert all(turn.tokens and turn.output >= 1 for turn in talk)
        assert talk[0].gap == 0.0


@given(presets, st.integers(0, 1_000))
def test_the_same_seed_makes_the_same_conversations(preset: Preset, seed: int):
    small = scaled(preset, scale_to(preset, 512), 1.0)
    first, second = (list(islice(conversations(small, 1_000, 512, seed), 2)) for _ in range(2))
    assert first == second
    other = list(islice(conversations(small, 1_000, 512, seed + 1), 2))
    assert first != other


def test_all_users_share_the_system_prompt():
    chat = scaled(named("interactive-chat"), 0.1, 1.0)
    begins = {talk[0].tokens[:100] for talk in islice(conversations(chat, 1_000, 4_096, 1), 5)}
    assert chat.shared == 100
    assert len(begins) == 1


def test_a_spread_has_its_mean_and_deviation():
    import numpy as np

    drawn = spread(4_000, 2_500).draw(200_000, np.random.default_rng(1))
    assert np.mean(drawn) == pytest.approx(4_000, rel=0.02)
    assert np.std(drawn) == pytest.approx(2_500, rel=0.03)
    assert mean(spread(4_000, 2_500)) == pytest.approx(4_000)


def test_a_preset_that_fits_is_not_scaled():
    assert scale_to(Preset("x", "", fixed(10), fixed(10)), 20) == 1.0
    with pytest.raises(ConfigError, match="interactive-chat"):
        named("interactive")


def test_the_report_needs_nothing_else_and_escapes_names():
    users = [[Outcome(0, 0, 2, (1.0, 1.5, 2.0), "", 10, 5)], [Outcome(0, 0, 1, (), failed="unavailable")], []]
    values = figures([one for own in users for one in own], Objectives(ttft=1.0))
    page = render("<b>title</b>", {"cluster": "<script>"}, values, users)
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "TTFT" in page
