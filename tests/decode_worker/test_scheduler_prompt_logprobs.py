"""Log-probabilities of prompt tokens: computed here alone, whatever is cached, and told once and in order."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.config import DecodeConfig
from baton.messages import Accepted, Decode, PromptLogprobs, PromptTokenLogprob, Resend, SamplingParams, Tokens
from engine.step.outcome import ScheduledBatch, StepDone
from kvstore.keys import pack_tokens
from tests.support.workers_and_stores import PAGE, ROOT, Rig, RigWorker, digests, reference

PROMPT = [7, 3, 9, 1, 4, 4, 2, 8, 5, 6, 1, 3, 3, 9, 7, 5, 2, 6, 8]
SCORED = SamplingParams(temperature=0, prompt_logprobs=2)


class ScoringWorker(RigWorker):
    """A worker whose device also scores prompt tokens. A score says which tokens it was computed from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pages_of: dict[tuple[str, bool], set[int]] = {}  # by request, and whether the chunk scored
        self.chunks: list[tuple[int, bool]] = []  # where each ended, and whether it scored

    def _done(self, plan: ScheduledBatch) -> StepDone:
        done = super()._done(plan)
        scores: dict[int, list[PromptTokenLogprob]] = {}
        for number, (name, chunk) in enumerate(plan.items()):
            self.chunks.append((chunk.end, chunk.scoring is not None))
            pages = self.pages_of.setdefault((name.request, chunk.scoring is not None), set())
            pages |= set(chunk.pages[: chunk.end // PAGE])
            if chunk.scoring is not None:
                known = digests(self.state._sequences[name.request].tokens)
                first = chunk.start + chunk.scoring.first
                scores[number] = [
                    PromptTokenLogprob(token, -float(abs(known[first + i]) % 1_000))
                    for i, token in enumerate(chunk.scoring.targets)
                ]
        return StepDone(done.plan, done.sampled, scores)


def expected(prompt: list[int]) -> list[PromptTokenLogprob]:
    known = digests(prompt)
    return [PromptTokenLogprob(token, -float(abs(known[i]) % 1_000)) for i, token in enumerate(prompt[1:])]


def order(prompt: list[int], count: int, request: str, sampling: SamplingParams = SCORED, attempt: int = 1) -> Decode:
    return Decode(request, attempt, ROOT, pack_tokens(prompt), len(prompt), count, sampling)


def worker(pages: int = 32, **config: Any) -> ScoringWorker:
    rig = Rig(64)
    one = ScoringWorker(rig, "decode", pages, DecodeConfig(**config), rig.stores["n0"])
    one.attach()
    return one


def scores_of(one: RigWorker, request: str) -> list[PromptTokenLogprob]:
    """What was told of it, which must begin at 1 and have no gap."""
    scores: list[PromptTokenLogprob] = []
    tokens_came = False
    for message in one.messages:
        if isinstance(message, Tokens):
            tokens_came |= any(delta.request == request for delta in message.deltas)
        if isinstance(message, PromptLogprobs) and message.request == request:
            assert message.position == len(scores) + 1
            assert not tokens_came, "a token came before the prompt's log-probabilities"
            scores += message.logprobs
    return scores


def tokens_of(one: RigWorker, request: str) -> list[int]:
    deltas = [delta for m in one.messages if isinstance(m, Tokens) for delta in m.deltas if delta.request == request]
    return [token for delta in deltas for token in delta.tokens]


def test_every_token_but_the_first_is_scored_before_the_output() -> None:
    one = worker(max_num_batched_tokens=8)
    one.handle(order(PROMPT, 4, "r"))
    one.rig.settle()
    assert scores_of(one, "r") == expected(PROMPT)
    assert tokens_of(one, "r") == reference(PROMPT, 4)


def test_a_prompt_is_scored_from_no_page_that_another_request_has_made() -> None:
    """Such a page may have other low bits, and which pages are cached is chance."""
    one = worker(max_num_batched_tokens=8)
    one.handle(order(PROMPT, 1, "plain", SamplingParams(temperature=0)))
    one.rig.settle()
    cached = one.state.blocks.stats().cached
    one.handle(order(PROMPT, 1, "r"))
    one.rig.settle()
    pages = one.pages_of["plain", False]
    assert len(pages) == len(PROMPT) // PAGE
    assert not pages & one.pages_of["r", True]
    assert scores_of(one, "r") == expected(PROMPT)
    assert one.state.blocks.stats().cached == cached


def test_a_prompt_of_one_token_has_no_scores() -> None:
    one = worker()
    one.handle(order([7], 3, "r"))
    one.rig.settle()
    assert scores_of(one, "r") == []
    assert tokens_of(one, "r") == reference([7], 3)


def test_a_prompt_is_scored_without_its_last_token_which_is_a_step_of_its_own() -> None:
    """The rows that score are those of the prompt without its last token, whatever budget a step has."""
    for budget in (8, 32):
        one = worker(max_num_batched_tokens=budget)
        one.handle(order(PROMPT, 3, "r"))
        one.rig.settle()
        scored = [end for end, scores in one.chunks if scores]
        assert scored[-1] == len(PROMPT) - 1
        assert (len(PROMPT), False) in one.chunks
        assert tokens_of(one, "r") == reference(PROMPT, 3)


def test_a_resend_within_the_prompt_says_the_rest_of_it_and_the_output_again() -> None:
    one = worker()
    one.handle(order(PROMPT, 4, "r"))
    one.step()  # scores the prompt
    one.step()  # computes its last token
    one.messages.clear()
    one.handle(Resend("r", 1, 5))
    (scores, tokens) = one.messages
    assert isinstance(scores, PromptLogprobs)
    assert (scores.position, list(scores.logprobs)) == (5, expected(PROMPT)[4:])
    assert isinstance(tokens, Tokens)
    assert tokens.deltas[0].position == len(PROMPT)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=5),
    st.integers(8, 14),
    st.integers(2, 12),
)
def test_scores_are_told_once_under_preemption(requests: list[tuple[int, int, bool]], pages: int, budget: int) -> None:
    """Many sequences in a small pool preempt each other in the middle of their prompts."""
    one = worker(pages, max_num_batched_tokens=budget)
    prompts: dict[str, tuple[list[int], int, bool]] = {}
    for number, (length, count, scored) in enumerate(requests):
        length = min(length, pages * 4 - count - 4)
        prompt = (
            [(number + position * 7) % 50 for position in range(length)] if scored else PROMPT[: max(1, length // 3)]
        )
        name = f"r{number}"
        prompts[name] = (prompt, count, scored)
        one.handle(order(prompt, count, name, SCORED if scored else SamplingParams(temperature=0)))
        one.step()
    one.rig.settle()
    accepted = {message.request for message in one.messages if isinstance(message, Accepted)}
    for name in accepted:
        prompt, count, scored = prompts[name]
        assert tokens_of(one, name) == reference(prompt, count)
        assert scores_of(one, name) == (expected(prompt) if scored else [])
