"""Clusters whose workers go on while their devices work, and whose decode workers launch a step ahead: the tokens are
those of transformers."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from baton.client import Generated
from baton.messages import Grammar
from deploy.local import LocalCluster
from engine.engine import Engine
from engine.sampling.grammars import GrammarCompiler
from engine.step.batch import Chunk, TokenDraw
from tests.support import workload
from tests.support.checkpoints import EOS
from tests.support.cluster import at_rest
from tests.support.eventually import eventually
from tests.support.metrics_page import metric, nothing_held

PROMPTS = workload.prompts()
OVERLAPPED = {role: ["tests.support.threaded_worker", role] for role in ("prefill", "decode")}
WORDS = "[a-f ]{60,70}"


def test_64_requests_at_once_get_the_reference_tokens(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("wide-llama")
    settings = workload.settings(path, **{"store.verify_pages": True})
    with patch.dict("deploy.local._MODULES", OVERLAPPED), LocalCluster(settings, tmp_path) as cluster:
        fetched = 0
        for prompts in (PROMPTS, PROMPTS[:16]):
            answers = workload.ask_all(cluster.address, prompts)
            workload.compare(path, prompts, answers, workload.references(path, prompts))
            fetched += sum(answer.work.pages_fetched for answer in answers)
        assert fetched
        eventually(lambda: metric(cluster, "decode-0", "steps_launched_ahead_total") > 100, what="steps ahead")
        eventually(lambda: at_rest(cluster), what="everything freed")
        eventually(lambda: nothing_held(cluster, "store-0"), what="nothing held in the store")


def test_a_few_that_follow_grammars_among_many_get_the_tokens_of_a_cpu(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Steps go ahead of those few, whose draws come when their masks are there."""
    path = checkpoint("wide-llama")
    plain, ruled = PROMPTS[:20], [[7, 30 + number, 9] for number in range(2)]
    with patch.dict("deploy.local._MODULES", OVERLAPPED), LocalCluster(workload.settings(path), tmp_path) as cluster:
        with ThreadPoolExecutor(len(ruled)) as pool:
            structured = pool.map(lambda prompt: _ask_in_words(cluster.address, prompt), ruled)
            answers = workload.ask_all(cluster.address, plain, 60)
            texts = [(answer.token_ids, answer.text) for answer in structured]
        workload.compare(path, plain, answers, workload.references(path, plain, 60))
        ahead = metric(cluster, "decode-0", "steps_launched_ahead_total")
        assert ahead > 20
    engine = Engine.load(path, "float32", "cpu", 16, 16, True, 1, native=False)
    compiler = GrammarCompiler(path, engine.vocab_size, lambda: None)
    try:
        for prompt, (tokens, text) in zip(ruled, texts, strict=True):
            assert re.fullmatch(WORDS, text)
            assert tokens == _drawn_one_by_one(engine, compiler, prompt, len(tokens))
    finally:
        compiler.close()


def _ask_in_words(address: str, prompt: list[int]) -> Generated:
    return workload.ask(address, prompt, 40, structured_output={"regex": WORDS}, temperature=1.0, seed=prompt[1])


def _drawn_one_by_one(engine: Engine, compiler: GrammarCompiler, prompt: list[int], count: int) -> list[int]:
    """Each token drawn by a step of its own over all before it, which waits for its mask."""
    tokens = list(prompt)
    grammar = compiler.follow(Grammar("regex", WORDS, EOS, ignore_eos=True), (EOS,), prompt, len(prompt))
    eventually(lambda: grammar.ready, what="the grammar")
    while len(tokens) < len(prompt) + count:
        mask = grammar.mask(tokens)
        assert mask.begin()
        mask.compute()
        draw = TokenDraw(temperature=1.0, seed=prompt[1], mask=mask)
        (one,) = engine.step([Chunk(tokens, 0, range(16), draw)])
        tokens.append(one.token)
    return tokens[len(prompt) :]
