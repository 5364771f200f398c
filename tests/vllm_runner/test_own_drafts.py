"""vLLM's own drafts: tokens are those without, and proposals are right. Needs an environment with vLLM."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel

pytest.importorskip("vllm")

from baton.config import DecodeConfig
from baton.membership import SendToRouter
from baton.messages import Message
from decode_worker.handed_proposals import HandedProposals
from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculation import accepted
from engine.runner import Mover
from engine.step.batch import Chunk
from engine.step.outcome import StepDone
from engine.vllm_runner.runner import VllmRunner
from kvstore.arena.memory import Arena
from kvstore.client.transfer import CopiedOut, CopyIn, CopyOut
from tests.decode_worker.test_scheduler_decisions import order, tokens_of
from tests.decode_worker.test_speculation import FREE_ROWS
from tests.support import checkpoints
from tests.vllm_runner.driver import PAGE, PAGES, Generation, Loaded, arena_of, load, loaded_once, prompt_of, run, step
from tests.vllm_runner.test_groups import GROUPS
from tests.vllm_runner.test_runner import paths as paths
from tests.vllm_runner.test_speculation import COUNT, DRAWS, alike, members, take, with_proposals

GUESSES = 3
LAYERS = {"draft_model": 4, "eagle": 1, "eagle3": 1, "medusa": 0}
"""What a draft of each method adds to pages."""
NORM = "input_layernorm"
PROJECTED = re.compile(r"\.[qkv]_proj\.")
WORDS = 300  # of EAGLE-3's own vocabulary: every third token


def write_draft(method: str, model: Path, folder: Path) -> Path:
    """Random heads or an EAGLE layer for a Llama; as a draft model, the model itself."""
    if method == "draft_model":
        return model
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    size, rng = config["hidden_size"], torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng) * 0.3

    if method == "medusa":
        config = {"model_type": "medusa", "hidden_size": size, "vocab_size": checkpoints.VOCAB, "num_heads": GUESSES}
        tensors = {f"blocks.{head}.layers.0.weight": weight(size, size) for head in range(GUESSES)}
        tensors |= {f"lm_heads.{head}.weight": weight(checkpoints.VOCAB, size) for head in range(GUESSES)}
    else:
        config |= {"num_hidden_layers": 1}
        own = {name.removeprefix("model."): tensor for name, tensor in weights.items() if ".layers.1." in name}
        tensors = {name.replace("layers.1.", "layers.0."): each for name, each in own.items() if NORM not in name}
        tensors["fc.weight"] = weight(size, 2 * size)
    if method == "eagle3":
        config |= {"draft_vocab_size": WORDS, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        tensors |= {name: weight(len(each), 2 * size) for name, each in tensors.items() if PROJECTED.search(name)}
        tensors |= {f"layers.0.{name}.weight": torch.ones(size) for name in (NORM, "hidden_norm")}
        tensors |= {"norm.weight": torch.ones(size), "fc.weight": weight(size, 3 * size)}
        tensors |= {"lm_head.weight": weight(WORDS, size), "d2t": 2 * torch.arange(WORDS)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def drafts(paths: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda method: write_draft(method, paths("llama"), tmp_path_factory.mktemp(method)))


@pytest.fixture(scope="module")
def runner(paths: Callable[[str], Path], drafts: Callable[[str], Path]) -> Iterator[Loaded]:
    """The model with a draft of that method; "" has none, and a second one stands behind a slash."""

    def loaded(name: str) -> VllmRunner:
        method = name.split("/")[0]
        own = {"method": method, "model": str(drafts(method)), "num_speculative_tokens": GUESSES} if method else {}
        return load(paths("llama"), drafts=own)

    yield from loaded_once(loaded)


def drafted(model: VllmRunner, sequences: Sequence[Generation], most: float = 1.0, seed: int = 0) -> tuple[int, int]:
    """Steps until all have drawn `COUNT`: of all members with all proposals; with `most` below one, of random members,
    with some proposals left out, some not made, some wrong, and some masks late. Return how many proposals there were,
    and how many were right."""
    rng, count, right = random.Random(seed), 0, 0
    guesses: dict[Generation, Sequence[int]] = {}
    while unfinished := [one for one in sequences if len(one.drawn) < COUNT]:
        running = unfinished if most == 1.0 else rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks: list[Chunk] = []
        for one in running:
            guess = list(guesses.pop(one, ()))
            late = None
            if guess and rng.random() > most:
                del guess[rng.randint(1, len(guess)) :]
                guess[rng.randrange(len(guess))] = 3
                guess += [3] * rng.choice((0, 13))  # n-grams propose more than a draft
                late = rng.randint(0, len(guess))
            guess = guess[: COUNT - len(one.drawn) - 1]
            chunks.append(with_proposals(one, guess, late) if one.drawn else one.chunk(rng.choice((16, 40))))
        model.guesses = GUESSES if rng.random() < most else rng.randrange(GUESSES)
        results = step(model, *chunks)
        guesses.clear()
        for number, (one, chunk) in enumerate(zip(running, chunks, strict=True)):
            drawn = accepted(chunk, (*results.verified.get(number, ()), results.sampled[number]))
            take(one, chunk, drawn) if chunk.sample is not None else one.take(chunk, None)
            assert (number in model.proposals) == bool(drawn)
            guesses[one] = model.proposals.get(number, ())
            assert len(guesses[one]) == model.guesses * bool(drawn)
            count, right = count + len(chunk.verify), right + max(0, len(drawn) - 1)
    model.guesses = GUESSES
    return count, right


@pytest.mark.technique("vLLM's own drafts, token-identical")
@pytest.mark.parametrize("method", LAYERS)
def test_tokens_are_those_without_drafts(method: str, runner: Loaded):
    """In mixed steps and prompts in chunks, with drawn and ruled tokens, and where masks are late."""
    single, several = members(), members()
    run(runner(""), single, COUNT)
    assert runner(method).verifies
    drafted(runner(method), several, 0.5)
    alike(several, single)
    assert runner(method).layout.num_layers == 4 + LAYERS[method]
    assert (runner(method).fingerprint == runner("").fingerprint) == (method == "medusa")


@pytest.mark.parametrize("method", LAYERS)
def test_fewer_guesses_are_the_first_of_more(method: str, runner: Loaded):
    guesses_fewer(runner(method))


def test_wrong_guesses_are_hardly_made(runner: Loaded):
    """By a decode worker's scheduler, which learns what guesses take. Random layers guess wrong."""
    model, outputs, guesses = runner("eagle"), list[list[list[int]]](), 0
    for drafter in (None, HandedProposals(model, GUESSES)):
        state = DecodeScheduler(DecodeConfig(), PAGE, PAGES, calibration=FREE_ROWS, drafter=drafter)
        for number in range(2):
            state.handle(order(prompt_of(20 + number, number), 100, str(number)), 0.0)
        model.guesses, messages = 0, list[Message]()
        while state.stats().running:
            state.prepare(0.0)
            plan = state.schedule(0.0)
            ended = step(model, *plan.values())
            guesses += sum(map(len, model.proposals.values()))
            done = StepDone(plan, ended.sampled, ended.scores, ended.seconds, ended.verified)
            messages += [each.message for each in state.handle(done, 0.0) if isinstance(each, SendToRouter)]
        outputs.append([tokens_of(messages, str(number)) for number in range(2)])
    assert outputs[0] == outputs[1]
    assert all(len(each) == 100 for each in outputs[0])
    assert 0 < guesses < 0.3 * 2 * 100 * GUESSES


def guesses_fewer(model: VllmRunner, page_size: int = PAGE) -> None:
    """A step with fewer of them, or none, leaves the draft the K and V from which it guesses after later ones."""
    more, fewer = (Generation(prompt_of(40, 40), range(at, at + 8), page_size=page_size) for at in (0, 8))
    for number in range(12):
        proposed: list[Sequence[int]] = []
        for one, model.guesses in ((more, GUESSES), (fewer, (GUESSES, 0, 1, 0, 2)[number % 5])):
            chunk = one.chunk()
            one.take(chunk, step(model, chunk).sampled[0])
            proposed.append(model.proposals[0])
            assert len(proposed[-1]) == model.guesses
            assert (model.guess_seconds > 0) == bool(model.guesses)
        assert proposed[1] == proposed[0][: model.guesses]
    model.guesses = GUESSES


@pytest.mark.parametrize(
    ("name", "method", "options", "groups"),
    [
        ("llama", "draft_model", {"kv_cache_dtype": "fp8"}, 0),
        ("llama", "eagle3", {"kv_cache_dtype": "fp8"}, 0),
        ("gemma3", "eagle", {}, 2),
        ("gpt-oss", "eagle3", {}, 0),
    ],
)
def test_pages_in_fp8_and_of_groups(
    name: str, method: str, options: dict[str, Any], groups: int, drafts: Callable[[str], Path], tmp_path: Path
):
    """The draft's layer stands in the group without a window. gpt-oss has then more layers without one than with one,
    and no groups."""
    path = checkpoints.make(name, tmp_path, hidden_size=128, head_dim=32, **GROUPS.get(name, {}))
    own = {"method": method, "model": str(drafts(method)), "num_speculative_tokens": GUESSES}
    single, several = members(), members()
    with closing(load(path, **options)) as plain:
        run(plain, single, COUNT)
    with closing(load(path, drafts=own, **options)) as model:
        drafted(model, several, 0.5)
        assert (model.groups.count, model.layout.num_layers) == (groups, 2 if groups else 4 + LAYERS[method])
    alike(several, single)


def test_a_model_that_drafts_for_itself_is_right(runner: Loaded):
    """Greedy and drawn. A guess beyond the pages of its sequence has no K and V. In a flat distribution one may fall
    on a token less likely than those that guesses are drawn from."""
    sequences = members(DRAWS[:2] * 2)
    count, right = drafted(runner("draft_model"), sequences)
    assert right > 0.9 * count


def guessed(model: VllmRunner, prompt: Sequence[int], size: int = 1_000) -> tuple[Generation, Sequence[int]]:
    """A sequence with its first token, and what is proposed after it."""
    one = Generation(prompt, range(6))
    while not one.drawn:
        chunk = one.chunk(size)
        one.take(chunk, step(model, chunk).sampled[0])
    return one, model.proposals[0]


@torch.inference_mode()
def test_medusas_heads_guess_from_the_last_hidden_state(paths: Callable, drafts: Callable, runner: Loaded):
    weights = load_file(drafts("medusa") / "model.safetensors")
    model = checkpoints.reference(paths("llama")).model
    for length in (40, 7):
        one, proposed = guessed(runner("medusa"), prompt_of(length, length))
        state = model.model(torch.tensor([one.tokens[:-1]])).last_hidden_state[0, -1]
        for head, token in enumerate(proposed):
            block = state + torch.nn.functional.silu(weights[f"blocks.{head}.layers.0.weight"] @ state)
            assert token == int((weights[f"lm_heads.{head}.weight"] @ block).argmax())


def test_eagle_3_has_a_vocabulary_of_its_own(runner: Loaded):
    for length in (40, 7):
        _, proposed = guessed(runner("eagle3"), prompt_of(length, length))
        assert len(proposed) == GUESSES
        assert all(token % 3 == 0 and token < 3 * WORDS for token in proposed)


@torch.inference_mode()
def test_eagles_layer_guesses_from_hidden_states_and_its_own(paths: Callable, drafts: Callable, runner: Loaded):
    weights = load_file(drafts("eagle") / "model.safetensors")
    layer: Any = LlamaModel(LlamaConfig.from_pretrained(drafts("eagle"))).eval()
    layer.layers[0].input_layernorm = layer.norm = torch.nn.Identity()
    layer.load_state_dict(weights, strict=False)
    model = checkpoints.reference(paths("llama")).model
    for length in (40, 7):
        one, proposed = guessed(runner("eagle"), prompt_of(length, length))
        states = model.model(torch.tensor([one.tokens[:-1]])).last_hidden_state[0]
        follows, expected = one.tokens[1:], list[int]()
        for _ in proposed:
            inputs = torch.cat([model.model.embed_tokens(torch.tensor(follows)), states], dim=-1)
            last = layer(inputs_embeds=(inputs @ weights["fc.weight"].T)[None]).last_hidden_state[0, -1]
            expected.append(int(model.lm_head(last).argmax()))
            follows, states = [*follows, expected[-1]], torch.cat([states, last[None]])
        assert list(proposed) == expected


@pytest.fixture
def arena(runner: Loaded) -> Iterator[Arena]:
    yield from arena_of(runner("draft_model"))


def test_after_a_hand_off_the_draft_knows_the_prompt(runner: Loaded, arena: Arena):
    """Its K and V are a part of pages, also of those that a prefill worker makes, which draws nothing."""
    prefill, decode = runner("draft_model"), runner("draft_model/decode")
    prompt = prompt_of(2 * PAGE + 7, 3)
    whole, proposed = guessed(prefill, prompt)
    step(prefill, Chunk(prompt[:PAGE], 0, [20]))
    step(prefill, Chunk(prompt[PAGE : 2 * PAGE], PAGE, [20, 21]))
    out, into = prefill.mover(verify=True), decode.mover(verify=True)
    out.attach(arena)
    into.attach(arena)
    sums = copied_out(out, 20, 21)
    into.start([CopyIn(1, number, number, number, each) for number, each in enumerate(sums)]).wait()
    other = Generation(prompt, range(6))
    other.chunk(2 * PAGE)  # takes the pages
    other.computed = 2 * PAGE
    chunk = other.chunk()
    other.take(chunk, step(decode, chunk).sampled[0])
    assert other.output == whole.output
    assert decode.proposals[0] == proposed


def copied_out(mover: Mover, *pages: int) -> Sequence[int]:
    """The checksums of pages that are copied into the first slots."""
    copied = mover.start([CopyOut(1, slot, page, slot) for slot, page in enumerate(pages)]).wait()
    assert isinstance(copied, CopiedOut)
    return copied.checksums


def test_a_guess_beyond_the_pages_of_a_sequence_touches_no_other_page(runner: Loaded, arena: Arena):
    """The sequence ends with its page. vLLM has cleared its row of the table, which had pages of another one."""
    model = runner("draft_model")
    mover = model.mover(verify=True)
    mover.attach(arena)
    before = Generation(prompt_of(2 * PAGE, 2), [50, 31])
    step(model, before.chunk(2 * PAGE))
    whole = copied_out(mover, 31)
    del before  # vLLM forgets it with the next step
    after, proposed = guessed(model, prompt_of(PAGE, 3))
    assert len(after.table) == 1
    assert proposed
    assert copied_out(mover, 31) == whole
