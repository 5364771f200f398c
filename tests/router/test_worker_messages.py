"""Workers that answer with figures that no worker in its right mind has: the client's answer never has them."""

from math import inf, nan

import pytest

from baton import messages as msg
from router.events import Finished
from tests.router.lab import Lab
from tests.router.model import VOCAB

HUGE = 2**63 - 1
SCORED = msg.SamplingParams(temperature=0, logprobs=1)
PROMPT = 40


def test_a_workers_account_tells_of_no_more_than_the_request_has(
    lab: Lab, decode: str, prefill: str, store: str
) -> None:
    lab.accepted(prompt=PROMPT)
    lab.say(prefill, msg.Prefilled("r", 1, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE, HUGE))
    lab.say(decode, msg.Started("r", 1, HUGE, HUGE, HUGE, HUGE))
    lab.tokens(decode, "r", 1, PROMPT, 1, 2, finish="length", computed=HUGE)
    end = lab.end()
    assert isinstance(end.outcome, Finished)
    work = end.summary.served
    pages = -(-PROMPT // lab.config.pages.page_size)
    assert work.tokens_computed <= 2 * PROMPT
    assert max(work.pages_hit, work.pages_shipped, work.pages_on_device, work.pages_fetched) <= pages + 1


@pytest.mark.parametrize(
    "scores",
    [
        (), (msg.TokenLogprob(1, -1.0), msg.TokenLogprob(2, -1.0)), (msg.TokenLogprob(2, -1.0),),
        (msg.TokenLogprob(1, nan),),
        (msg.TokenLogprob(1, -1.0, ((VOCAB, -1.0),)),), (msg.TokenLogprob(1, -1.0, ((-1, -1.0),)),),
        (msg.TokenLogprob(1, -1.0, ((3, nan),)),), (msg.TokenLogprob(1, -1.0, ((2**70, -1.0),)),),
    ],
    ids=str,
)  # fmt: skip
def test_log_probabilities_that_no_client_can_be_told_are_a_failed_attempt(
    lab: Lab, scores: tuple[msg.TokenLogprob, ...]
) -> None:
    one, other = lab.colocated(2)
    lab.submit(prompt=PROMPT, sampling=SCORED)
    (first,) = lab.sent(msg.Decode)
    lab.say(lab.to(first), msg.Accepted("r", 1))
    lab.tokens(lab.to(first), "r", 1, PROMPT, 1, logprobs=scores)
    assert lab.emitted() == []
    last = lab.sent(msg.Decode)[-1]
    assert (last.attempt, {lab.to(first), lab.to(last)}) == (2, {one, other})
    lab.say(lab.to(last), msg.Accepted("r", 2))
    lab.tokens(lab.to(last), "r", 2, PROMPT, 1, logprobs=(msg.TokenLogprob(1, -inf, ((2, -inf),)),))
    assert lab.emitted() == [1]


def test_log_probabilities_that_nothing_has_asked_for_are_a_failed_attempt(lab: Lab, decode: str) -> None:
    lab.accepted(prompt=PROMPT)
    lab.tokens(decode, "r", 1, PROMPT, 1, logprobs=(msg.TokenLogprob(1, -1.0),))
    assert lab.emitted() == []


@pytest.mark.parametrize(
    "score",
    [
        msg.PromptTokenLogprob(VOCAB, -1.0), msg.PromptTokenLogprob(1, nan),
        msg.PromptTokenLogprob(1, -1.0, rank=VOCAB + 1),
        msg.PromptTokenLogprob(1, -1.0, ((VOCAB, -1.0),)),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_of_a_prompts_log_probabilities(lab: Lab, score: msg.PromptTokenLogprob) -> None:
    lab.colocated(2)
    lab.submit(prompt=PROMPT, sampling=msg.SamplingParams(temperature=0, prompt_logprobs=1))
    (first,) = lab.sent(msg.Decode)
    lab.say(lab.to(first), msg.Accepted("r", 1))
    lab.say(lab.to(first), msg.PromptLogprobs("r", 1, 1, (score,)))
    assert lab.sent(msg.Decode)[-1].attempt == 2
