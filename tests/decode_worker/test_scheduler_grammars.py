"""Sequences that follow a grammar: they wait for it, keep their tokens over fail-overs, and fail alone."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import AttemptFailed, AttemptName, Decode, Grammar, Message, Refused, SamplingParams
from decode_worker.proposers import Proposer
from decode_worker.scheduler import DecodeScheduler
from engine.sampling.grammars import FollowedGrammar, GrammarCompiler
from engine.sampling.host_sampler import HostSampler
from engine.step.batch import Sampled, TokenDraw
from engine.step.outcome import StepDone
from kvstore.keys import pack_tokens
from tests.decode_worker.load import OnePageEach
from tests.decode_worker.test_scheduler_decisions import finishes, tokens_of
from tests.decode_worker.test_speculation import FREE_ROWS
from tests.router import tokenizers
from tests.support.eventually import eventually
from tests.support.workers_and_stores import PAGE, ROOT

VOCAB, EOS = 400, 1
PROMPT = [7, 3, 9, 11, 4]
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 999},
                "b": {"enum": ["x", "yy", "zzz"]},
                "c": {"type": "boolean"},
            },
            "required": ["a", "b", "c"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
    EOS,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizers.byte_level().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def compiler(folder: Path) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(folder, VOCAB, lambda: None)
    yield grammars
    grammars.close()


def order(request: str, grammar: Grammar, known: Sequence[int] = (), attempt: int = 1, seed: int = 5) -> Decode:
    sampling = SamplingParams(temperature=1.0, seed=seed, grammar=grammar)
    tokens = pack_tokens([*PROMPT, *known])
    return Decode(request, attempt, ROOT, tokens, len(PROMPT), 100, sampling, stop_token_ids=(EOS,))


class Worker:
    """A scheduler whose engine has logits that follow from the tokens."""

    def __init__(self, grammars: Any, pages: int = 64, proposer: Callable[[], Proposer] | None = None) -> None:
        self.state = DecodeScheduler(
            DecodeConfig(), PAGE, pages, vocab_size=VOCAB, grammars=grammars, growth_reserve=OnePageEach(),
            calibration=FREE_ROWS if proposer else (), proposer=proposer,
        )  # fmt: skip
        self.messages: list[Message] = []
        self.late: Collection[str] = ()  # requests whose masks are late in the next step
        self.now = 0.0
        self.known: dict[str, list[int]] = {}

    def handle(self, event: Any) -> None:
        if isinstance(event, Decode):
            self.known[event.request] = []
        commands = self.state.handle(event, self.now)
        self.messages += [each.message for each in commands if isinstance(each, SendToRouter)]
        self.state.validate()

    def step(self) -> dict[AttemptName, Any]:
        self.now += 0.01
        self.messages += [one.message for one in self.state.prepare(self.now) if isinstance(one, SendToRouter)]
        plan = self.state.schedule(self.now)
        rows: list[list[Sampled | None]] = []
        for name, chunk in plan.items():
            known = self.known[name.request]
            known[chunk.start :] = chunk.tokens
            if chunk.sample is None or name.request in self.late:
                rows.append([None])
                continue
            for _, draw in chunk.draws:
                if draw.mask is not None and draw.mask.begin():
                    draw.mask.compute()
            rows.append([self._drawn(known[:position], draw) for position, draw in chunk.draws])
        if plan:
            verified = {number: each[:-1] for number, each in enumerate(rows)}
            self.handle(StepDone(plan, [each[-1] for each in rows], verified=verified))
        return plan

    def _drawn(self, known: Sequence[int], draw: TokenDraw) -> Sampled:
        seed = int.from_bytes(hashlib.sha256(str(known).encode()).digest()[:4], "big")
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
        return HostSampler().sample(logits, [draw], [len(known)])[0]

    def run(self, *requests: str) -> None:
        """Until these have ended."""
        for _ in range(600):
            self.step()
            if len(finishes(self.messages)) == len(requests):
                return
        raise AssertionError("not at its end")

    def ready(self) -> None:
        eventually(lambda: self.state.busy, "the grammar is compiled")


def whole(compiler: GrammarCompiler, seed: int = 5) -> list[int]:
    one = Worker(compiler)
    one.handle(order("r", SCHEMA, seed=seed))
    one.ready()
    one.run("r")
    return tokens_of(one.messages)


def test_an_output_ends_with_its_grammar(compiler: GrammarCompiler) -> None:
    tokens = whole(compiler)
    assert tokens[-1] == EOS
    text = tokenizers.byte_level().decode(tokens, skip_special_tokens=True)
    assert set(json.loads(text)) == {"a", "b", "c"}


def test_a_fail_over_continues_with_the_same_tokens(compiler: GrammarCompiler, folder: Path) -> None:
    tokens = whole(compiler)
    for cut in range(len(tokens)):
        other = GrammarCompiler(folder, VOCAB, lambda: None)  # of another process, which compiles for itself
        two = Worker(other)
        two.handle(order("r", SCHEMA, tokens[:cut], attempt=2))
        two.ready()
        two.run("r")
        assert tokens_of(two.messages, attempt=2) == tokens[cut:], cut
        assert finishes(two.messages) == ["stop"]
        other.close()


def test_a_preempted_sequence_continues_with_the_same_tokens(compiler: GrammarCompiler) -> None:
    one = Worker(compiler, pages=28)
    requests = {f"r{seed}": seed for seed in range(6)}
    for request, seed in requests.items():
        one.handle(order(request, SCHEMA, seed=seed))
    assert not [m for m in one.messages if isinstance(m, Refused)]
    one.ready()
    one.run(*requests)
    assert one.state.stats().preemptions > 0
    for request, seed in requests.items():
        assert tokens_of(one.messages, request) == whole(compiler, seed)


class Scripted:
    """Proposes the rest of an output, with wrong tokens among it."""

    def __init__(self, rng: random.Random, output: Sequence[int]) -> None:
        self._rng, self._text = rng, [*PROMPT, *output]

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        rest = self._text[len(tokens) :][: self._rng.randint(0, most)]
        return [token if self._rng.random() < 0.8 else self._rng.randrange(VOCAB) for token in rest]


def test_proposals_have_masks_of_their_own_and_change_no_token(compiler: GrammarCompiler) -> None:
    for seed in range(6):
        tokens, rng = whole(compiler, seed), random.Random(seed)
        one = Worker(compiler, proposer=partial(Scripted, rng, tokens))
        one.handle(order("r", SCHEMA, seed=seed))
        one.ready()
        for _ in range(400):
            one.late = ("r",) if rng.random() < 0.2 else ()
            one.step()
        assert tokens_of(one.messages) == tokens, seed
        stats = one.state.stats().speculation
        assert stats.draft_tokens > stats.accepted_tokens > 3, stats


class Slow:
    """Grammars that are ready when the test says so."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.grammars: list[Unready] = []

    def follow(self, grammar: Grammar, ends: Collection[int], tokens: Sequence[int], prompt: int) -> Unready:
        self.grammars.append(Unready(self._compiler.follow(grammar, ends, tokens, prompt)))
        return self.grammars[-1]


class Unready:
    def __init__(self, followed: FollowedGrammar) -> None:
        self._followed = followed
        self.ready = False

    def mask(self, tokens: Sequence[int]) -> Any:
        eventually(lambda: self._followed.ready)
        return self._followed.mask(tokens)


def test_a_sequence_waits_for_its_grammar_and_no_other_one_does(compiler: GrammarCompiler) -> None:
    slow = Slow(compiler)
    one = Worker(slow)
    one.handle(order("r", SCHEMA))
    assert not one.state.busy  # else the worker's loop would turn without rest
    assert one.step() == {}
    one.handle(Decode("plain", 1, ROOT, pack_tokens(PROMPT), len(PROMPT), 100, SamplingParams(temperature=0)))
    assert [name.request for name in one.step()] == ["plain"]
    slow.grammars[0].ready = True
    assert {name.request for name in one.step()} == {"plain", "r"}
    one.run("r", "plain")
    assert tokens_of(one.messages) == whole(compiler)


def test_a_late_mask_costs_a_step_and_no_token(compiler: GrammarCompiler) -> None:
    tokens = whole(compiler)
    one = Worker(compiler)
    one.handle(order("r", SCHEMA))
    one.ready()
    for number in range(400):
        one.late = ("r",) if number % 3 != 2 else ()
        one.step()
        if finishes(one.messages):
            break
    assert tokens_of(one.messages) == tokens
    assert one.state.stats().prompt_tokens_computed == len(PROMPT)


def test_what_fails_with_a_grammar_fails_its_request_alone(compiler: GrammarCompiler) -> None:
    one = Worker(compiler)
    one.handle(order("good", SCHEMA))
    one.handle(order("wrong", Grammar("regex", "(", EOS)))
    one.handle(order("other", SCHEMA, [300, 300, 300], attempt=2))  # an output that the grammar does not allow
    eventually(lambda: all(s.steps for s in one.state._sequences.values()), "all are compiled")
    while len([m for m in one.messages if isinstance(m, AttemptFailed)]) < 2:
        assert one.step()
    one.run("good")
    failed = {m.request: m for m in one.messages if isinstance(m, AttemptFailed)}
    assert {(m.request, m.reason) for m in failed.values()} == {
        ("wrong", "invalid_grammar"),
        ("other", "invalid_grammar"),
    }
    assert "regular expression" in failed["wrong"].message
    assert "satisfy" in failed["other"].message
    assert tokens_of(one.messages, "good") == whole(compiler)


def test_a_worker_without_grammars_says_so() -> None:
    one = Worker(None)
    one.handle(order("r", SCHEMA))
    (failed,) = one.messages
    assert isinstance(failed, AttemptFailed)
    assert failed.reason == "invalid_grammar"
