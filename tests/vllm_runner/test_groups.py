"""Models whose layers form groups, some with a window: a page is one group's, and only pages in the window move."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from deploy.local import LocalCluster
from engine.step.batch import Chunk
from engine.vllm_runner.layers import of_groups
from engine.vllm_runner.pages import largest_page
from kvstore.arena.memory import Arena
from kvstore.checksum import page_checksum
from kvstore.client.transfer import CopiedIn, CopiedOut, CopyIn, CopyOut
from kvstore.window_groups import WindowGroups
from tests.support import checkpoints, workload
from tests.support.eventually import eventually
from tests.support.metrics_page import metric
from tests.vllm_runner import deaths, driver
from tests.vllm_runner.driver import PAGE, Generation, agree, prompt_of, run, with_windows

WINDOW = 70  # tokens
GROUPS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"sliding_window": WINDOW, "initializer_range": 0.1},
    "gemma3": {"sliding_window": WINDOW, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
}
EXACT = ("gpt-oss", "gemma3")
WORK = {"prefill-0": "prompt_tokens_computed_total", "decode-0": "generation_tokens_total"}
COUNT = {"gpt-oss": 1, "gemma3": 3}
"""Groups with a window, each of as many layers as the group without."""
PROMPTS = [prompt for prompt in workload.prompts() if len(prompt) <= 1_100][::4]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: checkpoints.make(name, tmp_path_factory.mktemp(name), **GROUPS[name]))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_greedy_tokens_are_those_of_transformers(name: str, eager: bool, paths: Callable[[str], Path]) -> None:
    """A page is the layers of one group, and the pool has as many more of them."""
    with closing(driver.load(paths(name), eager=eager)) as model:
        groups, raw = model.groups, checkpoints.config(name, **GROUPS[name]).to_dict()
        assert groups == WindowGroups(COUNT[name], WINDOW, PAGE)
        windows = [WINDOW if kind == "sliding_attention" else None for kind in raw["layer_types"]]
        assert of_groups(windows, PAGE) == (model.layout.num_layers, groups)
        assert model.layout.page_bytes * (1 + groups.count) == largest_page(raw, "float32", PAGE, "auto").page_bytes
        assert model.num_pages == driver.PAGES * (1 + groups.count)
        driver.exact(model, paths(name), (170, 33, 5))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("makers", "takers"), [(2, 1), (1, 2)])
def test_a_prompt_is_handed_over_between_degrees(
    name: str, makers: int, takers: int, paths: Callable[[str], Path]
) -> None:
    """Each rank copies its heads of a group's page. Window pages before the window hold NaN at the taker."""
    prompt, full = prompt_of(4 * PAGE + 7, 3), 4
    with (
        closing(driver.load(paths(name), ranks=makers)) as prefill,
        closing(driver.load(paths(name), ranks=takers)) as decode,
        closing(Arena.create(32 * prefill.layout.page_bytes)) as arena,
    ):
        assert prefill.layout == decode.layout
        assert prefill.groups == decode.groups
        arena.divide(prefill.layout.page_bytes)
        out, into = prefill.mover(verify=True), decode.mover(verify=True)
        out.attach(arena)
        into.attach(arena)
        driver.step(prefill, Chunk(prompt[: full * PAGE], 0, [9, 3, 4, 1]))
        one = Generation(prompt, range(full + 1))
        handed = one.chunk(full * PAGE)
        one.computed = handed.end
        behind = (handed.end - WINDOW + 1) // PAGE  # pages before the window, which stay behind
        ends = [with_windows(prefill, Chunk([], 0, [9, 3, 4, 1])), with_windows(decode, handed)]
        pages = [[*each.pages, *each.window_pages[behind * decode.groups.count :]] for each in ends]
        torch.frombuffer(arena.slot(0), dtype=torch.float32).fill_(float("nan"))
        checksum = page_checksum(arena.slot(0), decode.layout.num_kv_heads)
        into.start([CopyIn(1, page, 0, page, checksum) for page in range(decode.num_pages)]).wait()
        copied = out.start([CopyOut(2, slot, page, slot) for slot, page in enumerate(pages[0], 1)]).wait()
        assert isinstance(copied, CopiedOut)
        pairs = enumerate(zip(pages[1], copied.checksums, strict=True), 1)
        copies = [CopyIn(3, slot, slot, page, right) for slot, (page, right) in pairs]
        assert driver.untimed(into.start(copies).wait()) == CopiedIn(3, tuple(range(1, 1 + len(copies))), ())
        run(decode, [one], 20)
        agree(one, *checkpoints.reference(paths(name)).generate(prompt, 20))


@pytest.mark.parametrize(
    ("name", "shape", "more"),
    [
        *((name, shape, {}) for name in EXACT for shape in ((1, 1), (0, 1))),
        ("gpt-oss", (1, 1), {"prefill.tensor_parallel_size": 2, "model.numerics": "mixed"}),
        ("gpt-oss", (1, 1), {"decode.tensor_parallel_size": 2, "model.numerics": "mixed"}),
    ],
)
def test_requests_at_once_get_the_reference_tokens(
    name: str, shape: tuple[int, int], more: dict[str, object], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    driver.at_once(driver.settings(paths(name), *shape, **more), paths(name), tmp_path, PROMPTS)


@pytest.mark.technique("Pages by groups of layers")
@pytest.mark.parametrize("name", EXACT)
def test_a_hand_off_has_the_pages_of_the_window_only(name: str, paths: Callable[[str], Path], tmp_path: Path) -> None:
    """The store also has those that a prompt needs which goes on behind the last full page."""
    path, prompt, length = paths(name), prompt_of(1_000, 1), 999
    pages, full = -(-length // PAGE), length // PAGE * PAGE
    moved, stored = (pages + (pages - (end - WINDOW + 1) // PAGE) * COUNT[name] for end in (length, full))
    assert moved < stored < 0.6 * pages * (1 + COUNT[name])
    with LocalCluster(driver.settings(path), tmp_path, patience=200.0) as running:
        answer = workload.ask(running.address, prompt)
        workload.compare(path, [prompt], [answer], workload.references(path, [prompt]))
        assert metric(running, "prefill-0", "pages_copied_total", direction="out") == stored
        assert metric(running, "decode-0", "pages_copied_total", direction="in") == moved


@pytest.mark.parametrize(
    ("victim", "shape"),
    [("prefill-0", (2, 1)), ("decode-0", (1, 2)), ("vLLM of decode-0", (1, 2)), ("store-0", (1, 1))],
)
def test_streams_outlive_the_death_of_any_process(
    victim: str, shape: tuple[int, int], paths: Callable[[str], Path], tmp_path: Path
) -> None:
    path, process = paths("gpt-oss"), deaths.owner_of(victim)
    expected = workload.references(path, PROMPTS)
    with (
        LocalCluster(driver.settings(path, *shape), tmp_path, patience=200.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        busy = "decode-0" if victim == "store-0" else process
        answers = pool.submit(workload.ask_all, running.address, PROMPTS)
        eventually(lambda: metric(running, busy, WORK[busy]) > 0, what="the victim at work")
        deaths.kill(running, victim)
        workload.compare(path, PROMPTS, answers.result(timeout=300), expected)
        deaths.start_again(running, process)
        deaths.hand_over(running)
