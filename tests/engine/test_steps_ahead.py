"""Steps as they lie in a GPU's stream, run on a CPU: launched ahead, with the tokens of steps that wait."""

import random
from collections.abc import Callable, Sequence

import pytest

from baton.trace import Tracer
from engine.cuda.launcher import StepLauncher
from engine.cuda.steps import LaunchedStep
from engine.engine import Engine
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.mask_threads import MaskThreads
from engine.step.batch import Chunk, PromptScoring, Sampled, TokenDraw
from engine.step.block_table import BlockTable
from tests.engine.test_device_sampler import counted
from tests.support import checkpoints
from tests.support.threaded_device import EmptyStreams

PAGE, PAGES = 16, 64
DRAWS = [
    TokenDraw(temperature=0.0),
    TokenDraw(temperature=0.9, top_p=0.95, seed=7, logprobs=2),
    TokenDraw(temperature=1.0, seed=9),
    TokenDraw(temperature=1.2, top_k=20, seed=11),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = checkpoints.make("llama", tmp_path_factory.mktemp("llama"))
    return Engine.load(path, "float32", "cpu", PAGES, PAGE, True, 1, native=False)


@pytest.fixture
def launch(engine: Engine) -> Callable[..., LaunchedStep]:
    return launcher(engine)


def launcher(engine: Engine, prefix: int = 256) -> Callable[..., LaunchedStep]:
    device = engine.pool.device
    steps = StepLauncher(engine._model, DeviceSampler(device, prefix), MaskThreads(), device, EmptyStreams(), Tracer())

    def launch(*chunks: Chunk) -> LaunchedStep:
        return steps.launch(chunks, engine._flatten(chunks), engine._start_masks(chunks))[0]

    return launch


def prompts(count: int = len(DRAWS)) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, checkpoints.VOCAB) for _ in range(5 + 7 * number)] for number in range(count)]


def begun(number: int) -> BlockTable:
    return BlockTable(range(8 * number, 8 * number + 8))


def expected(engine: Engine, prompt: Sequence[int], draw: TokenDraw, count: int) -> list[Sampled]:
    """Each token drawn by a step of its own over all before it."""
    tokens, draws = list(prompt), list[Sampled]()
    for _ in range(count):
        (one,) = engine.step([Chunk(tokens, 0, begun(7), draw)])
        assert one is not None
        draws.append(one)
        tokens.append(one.token)
    return draws


@pytest.mark.technique("Steps launched ahead")
def test_each_step_is_launched_before_the_one_before_is_collected(
    engine: Engine, launch: Callable[..., LaunchedStep]
) -> None:
    known, tables = prompts(), [begun(number) for number in range(len(DRAWS))]
    chunks = [Chunk(each, 0, table, draw) for each, table, draw in zip(known, tables, DRAWS, strict=True)]
    drawn: list[list[Sampled]] = [[] for _ in DRAWS]
    running, order = launch(*chunks), list(range(len(DRAWS)))
    rng = random.Random(1)
    for _ in range(12):
        places = {sequence: place for place, sequence in enumerate(order)}
        ends = {sequence: chunks[place].end for place, sequence in enumerate(order)}
        order = rng.sample(range(len(DRAWS)), len(DRAWS))
        chunks = [Chunk([0], ends[each], tables[each], DRAWS[each], follows=places[each]) for each in order]
        ahead = launch(*chunks)
        sampled = running.wait().sampled
        for sequence, place in places.items():
            one = sampled[place]
            assert one is not None
            drawn[sequence].append(one)
        running = ahead
    for prompt, draw, own in zip(known, DRAWS, drawn, strict=True):
        reference = expected(engine, prompt, draw, 12)
        assert [one.token for one in own] == [one.token for one in reference]
        for one, other in zip(own, reference, strict=True):
            assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))


def test_a_launch_reads_nothing_from_the_device(launch: Callable[..., LaunchedStep]) -> None:
    (prompt, *_), table = prompts(), begun(0)
    scored = Chunk(prompts()[3], 0, begun(1), DRAWS[0], PromptScoring(2, prompts()[3][3:], 2))
    chunks = [Chunk(prompt, 0, table, DRAWS[1]), scored]
    with counted() as copied:
        first = launch(*chunks)
        second = launch(Chunk([0], len(prompt), table, DRAWS[1], follows=0))
        assert copied == []
        first.wait()
        second.wait()
    assert len(copied) == 3  # two steps, and the scores


def test_scores_are_those_of_a_step_that_waits(engine: Engine, launch: Callable[..., LaunchedStep]) -> None:
    prompt = prompts()[3]
    chunk = Chunk(prompt, 0, begun(1), DRAWS[0], PromptScoring(2, prompt[3:], 2))
    reference, output = engine.run([chunk]), launch(Chunk(prompts()[1], 0, begun(0)), chunk).wait()
    assert output.sampled == [None, reference.sampled[0]]
    assert list(output.scores) == [1]
    for one, other in zip(output.scores[1], reference.scores[0], strict=True):
        assert (one.token, one.rank) == (other.token, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_what_follows_a_token_that_the_host_corrects_draws_none_and_is_computed_again(engine: Engine) -> None:
    """Filters that look at two tokens first have to look again, and the device has gone on from another token."""
    launch, draw = launcher(engine, prefix=2), TokenDraw(temperature=3.0, top_p=0.99, seed=5)
    prompt = prompts()[2]
    reference = [one.token for one in expected(engine, prompt, draw, 12)]
    tokens, table, computed, void = list(prompt), begun(0), 0, 0
    while len(tokens) < len(prompt) + 12:
        first = launch(Chunk(tokens[computed:], computed, table, draw))
        second = launch(Chunk([0], len(tokens), table, draw, follows=0))
        third = launch(Chunk([0], len(tokens) + 1, table, draw, follows=0))
        drawn = [step.wait().sampled[0] for step in (first, second, third)]
        assert drawn[0] is not None
        void += drawn[1] is None
        assert drawn[1] is not None or drawn[2] is None, "it went on from a token that does not count"
        tokens += [one.token for one in drawn if one is not None]
        computed = len(tokens) - 1
    assert void == 1, "later rows of an output are sorted whole at once"
    assert tokens[len(prompt) :][:12] == reference


def test_a_step_may_follow_one_that_was_collected(engine: Engine, launch: Callable[..., LaunchedStep]) -> None:
    prompt, table = prompts()[2], begun(0)
    first = launch(Chunk(prompt, 0, table, DRAWS[1])).wait().sampled[0]
    second = launch(Chunk([0], len(prompt), table, DRAWS[1], follows=0)).wait().sampled[0]
    reference = expected(engine, prompt, DRAWS[1], 2)
    assert [one and one.token for one in (first, second)] == [one.token for one in reference]


def test_what_follows_a_chunk_without_a_token_draws_none(engine: Engine, launch: Callable[..., LaunchedStep]) -> None:
    one, other = prompts()[1], prompts()[2]
    tables = begun(0), begun(1)
    launch(Chunk(one, 0, tables[0]), Chunk(other, 0, tables[1], DRAWS[0]))
    ends = len(one), len(other)
    none, token = launch(*[Chunk([0], ends[n], tables[n], DRAWS[0], follows=n) for n in (0, 1)]).wait().sampled
    assert none is None
    assert token.token == expected(engine, other, DRAWS[0], 2)[1].token
