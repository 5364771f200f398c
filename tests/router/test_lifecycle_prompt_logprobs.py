"""Log-probabilities of a prompt: a decode worker alone computes them, and each is emitted once and in order."""

from baton.messages import Accepted, Prefill, PromptLogprobs, PromptTokenLogprob, Resend, SamplingParams
from router.events import Emit, Finished
from router.generation_request import GenerationRequest
from tests.router import model
from tests.router.lab import Lab, held

SCORED = SamplingParams(temperature=0, prompt_logprobs=1)
PROMPT = 40


def scores(position: int, count: int) -> PromptLogprobs:
    return PromptLogprobs(
        "r", 1, position, tuple(PromptTokenLogprob(at, -float(at)) for at in range(position, position + count))
    )


def emitted(lab: Lab) -> list[int]:
    return [one.token for c in lab.log if isinstance(c, Emit) for one in c.prompt_logprobs]


def submit(lab: Lab, **more: object) -> GenerationRequest:
    order = lab.submit(prompt=PROMPT, sampling=SCORED, **more)
    lab.say(lab.to(lab.decode), Accepted("r", 1))
    return order


def test_a_decode_worker_computes_the_whole_prompt_although_its_pages_are_cached(
    lab: Lab, decode: str, prefill: str, store: str
):
    order = model.submit("r", PROMPT)
    lab.holds(store, order, 2)
    lab.holds(decode, order, 2, "GPU")
    submit(lab)
    assert lab.decode.fetch == 0
    assert lab.decode.sampling.prompt_logprobs == 1
    assert not lab.sent(Prefill)


def test_each_is_emitted_once_and_before_the_output(lab: Lab, decode: str):
    submit(lab)
    lab.say(decode, scores(1, 20))
    lab.say(decode, scores(11, 20))
    lab.say(decode, scores(31, PROMPT - 31))
    lab.tokens(decode, "r", 1, PROMPT, 1, 2, finish="length")
    assert emitted(lab) == list(range(1, PROMPT))
    assert lab.emitted() == [1, 2]
    assert isinstance(lab.end().outcome, Finished)


def test_a_gap_is_asked_for_and_no_token_comes_before_it_is_filled(lab: Lab, decode: str):
    submit(lab)
    lab.say(decode, scores(1, 9))
    lab.say(decode, scores(20, 5))
    assert lab.sent(Resend) == [Resend("r", 1, 10)]
    lab.tokens(decode, "r", 1, PROMPT, 1)
    assert lab.emitted() == []
    lab.say(decode, scores(10, PROMPT - 10))
    lab.tokens(decode, "r", 1, PROMPT, 1)
    assert emitted(lab) == list(range(1, PROMPT))
    assert lab.emitted() == [1]


def test_heartbeats_show_what_was_lost(lab: Lab, decode: str):
    submit(lab)
    lab.say(decode, scores(1, 9))
    for _ in range(2):
        lab.beat(decode, held("r", 1, PROMPT + 1))
    assert lab.sent(Resend) == [Resend("r", 1, 10)]


def test_a_fail_over_within_the_prompt_scores_it_again_and_emits_the_rest(lab: Lab):
    first, second = lab.colocated(2)
    submit(lab)
    one = lab.to(lab.decode)
    other = second if one == first else first
    lab.say(one, scores(1, 15))
    lab.leaves(one)
    assert (lab.to(lab.decode), lab.decode.attempt) == (other, 2)
    assert lab.decode.sampling.prompt_logprobs == 1
    again = PromptLogprobs("r", 2, 1, scores(1, PROMPT - 1).logprobs)
    lab.say(other, Accepted("r", 2))
    lab.say(other, again)
    lab.tokens(other, "r", 2, PROMPT, 3)
    assert emitted(lab) == list(range(1, PROMPT))
    lab.leaves(other)
    third = lab.join("decode", "decode-9")
    assert (lab.to(lab.decode), lab.decode.attempt) == (third, 3)
    assert lab.decode.sampling.prompt_logprobs is None, "what has been emitted is not computed again"


def test_more_than_the_prompt_has_is_a_fault_of_the_worker(lab: Lab):
    lab.colocated(2)
    submit(lab)
    one = lab.to(lab.decode)
    lab.say(one, scores(1, PROMPT))
    assert emitted(lab) == []
    assert lab.decode.attempt == 2
    assert lab.to(lab.decode) != one
