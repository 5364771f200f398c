"""Steps on their way to vLLM's process: draws with their arrays and masks arrive as they were sent."""

import numpy as np
import pytest

from engine.step.batch import Bits, ComputedMask, LogitsEdits, TokenDraw
from engine.vllm_runner.messages import Failed, Row, Step, decode_answer, decode_order, encode

MASK = np.arange(19) % 3 == 0
EDITS = LogitsEdits(
    allowed=np.array([5, 2**40]),
    bias=(np.array([1, 2]), np.array([0.5, -np.inf], np.float32)),
    repetition=1.25,
    lowered=(np.array([3]), np.array([1.5], np.float32)),
)


@pytest.mark.parametrize("allowed", [MASK, None])
def test_a_draw_arrives_with_its_edits_and_its_mask(allowed: Bits | None) -> None:
    mask = ComputedMask(allowed, True, failure="" if allowed is not None else "no such state", ends=(7, 8))
    sent = TokenDraw(temperature=0.5, top_k=3, seed=2**63, logprobs=2, edits=EDITS, mask=mask)
    order = decode_order(encode(Step([Row(1, False, [1, 2], 0, [0], [], sent)], [4])))
    assert isinstance(order, Step)
    draw = order.rows[0].draw
    assert draw.mask is not None
    assert draw.edits is not None
    assert (draw.temperature, draw.top_k, draw.seed, draw.logprobs) == (0.5, 3, 2**63, 2)
    np.testing.assert_equal([*_arrays(draw.edits)], [*_arrays(EDITS)])
    assert draw.edits.repetition == 1.25
    assert draw.mask.ready
    assert not draw.mask.begin()
    assert draw.mask.may_end
    assert (draw.mask.failure, draw.mask.ends) == (mask.failure, (7, 8))
    np.testing.assert_equal(draw.mask.allowed, allowed)


def test_an_answer_arrives() -> None:
    assert decode_answer(encode(Failed("StartupError", "why"))) == Failed("StartupError", "why")


def _arrays(edits: LogitsEdits) -> tuple[object, ...]:
    return edits.allowed, edits.forbidden, edits.bias, edits.repeated, edits.lowered
