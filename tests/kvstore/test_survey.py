"""The picture of the prefix map: it shows every page once, whatever the steps, and stays small."""

import hashlib
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.messages import Medium
from kvstore.keys import START
from kvstore.prefix_map import survey as surveying
from kvstore.prefix_map.prefix_map import PrefixMap
from kvstore.prefix_map.survey import PrefixNode, PrefixPicture, Survey

CHAIN = st.lists(st.integers(0, 2), min_size=1, max_size=8)
MEDIUM: st.SearchStrategy[Medium] = st.sampled_from(["GPU", "CPU", "DISK"])
STORED = st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), CHAIN, MEDIUM), max_size=12)


def keys_of(chain: Sequence[int]) -> list[bytes]:
    return [hashlib.blake2b(bytes(chain[: end + 1]), digest_size=16).digest() for end in range(len(chain))]


def filled(stored: Sequence[tuple[str, list[int], Medium]]) -> PrefixMap:
    prefixes = PrefixMap()
    for holder, chain, medium in stored:
        assert prefixes.stored(holder, START, keys_of(chain), medium)
    return prefixes


def looked_at(survey: Survey, most: int = 1_000) -> Survey:
    while not survey.step(most):
        pass
    return survey


def roots(picture: PrefixPicture) -> list[PrefixNode]:
    return [node for node in picture.nodes if node.parent < 0]


@given(STORED, st.integers(1, 5))
def test_every_page_is_drawn_once_where_it_stands(stored: list[tuple[str, list[int], Medium]], most: int) -> None:
    prefixes = filled(stored)
    survey = looked_at(prefixes.survey(), most)
    picture = survey.draw(10_000)
    every = {tuple(chain[: end + 1]) for _, chain, _ in stored for end in range(len(chain))}
    expected = Counter[tuple[int, str]]()
    for page in every:
        held = {holder for holder, chain, _ in stored if tuple(chain[: len(page)]) == page}
        expected[len(page) - 1, "".join(sorted(held))] += 1
    drawn = Counter[tuple[int, str]]()
    for node in picture.nodes:
        assert not node.merged
        names = "".join(sorted(prefixes.holders_of(node.mask)))
        drawn.update((node.depth + step, names) for step in range(node.length))
    assert drawn == expected
    leaves = {page for page in every if not any(other[:-1] == page for other in every)}
    assert sum(node.chains for node in roots(picture)) == len(leaves)
    assert sum(node.pages for node in roots(picture)) == len(every) == sum(survey.pages.values())
    for index, node in enumerate(picture.nodes):
        if node.parent >= 0:
            assert node.parent < index
            above = picture.nodes[node.parent]
            assert node.depth == above.depth + above.length


@given(STORED, st.integers(1, 6))
def test_a_small_picture_merges_the_small_and_loses_nothing(
    stored: list[tuple[str, list[int], Medium]], nodes: int
) -> None:
    survey = looked_at(filled(stored).survey())
    whole, small = survey.draw(10_000), survey.draw(nodes)
    assert len([node for node in small.nodes if not node.merged]) <= nodes
    assert len(small.nodes) <= 2 * nodes + 1
    for total in ("chains", "pages"):
        assert sum(getattr(node, total) for node in roots(small)) == sum(getattr(node, total) for node in roots(whole))


def test_a_large_map_is_drawn_from_some_of_its_runs_with_all_above_them() -> None:
    system = [9] * 40
    chains = [[*system, number // 250, number % 250, 7] for number in range(5_000)]
    prefixes = filled([("x", chain, "GPU") for chain in chains])
    survey = prefixes.survey()
    assert not survey.step(100)  # a step looks at no more than it was told
    picture = looked_at(survey).draw()
    assert survey.pages.total() == 40 + 20 + 2 * 5_000
    assert picture.drawn < picture.runs
    assert picture.drawn <= surveying._DRAWN_RUNS + 64
    assert len(picture.nodes) <= 2 * surveying.MAX_NODES + 1
    assert picture.nodes[0].length == 40


@given(STORED, STORED, st.integers(1, 3))
def test_a_map_that_changes_meanwhile_gives_a_picture_all_the_same(
    stored: list[tuple[str, list[int], Medium]], others: list[tuple[str, list[int], Medium]], most: int
) -> None:
    prefixes = filled(stored)
    survey = prefixes.survey()
    for holder, chain, medium in others:
        done = survey.step(most)
        if len(chain) % 2:
            prefixes.stored(holder, START, keys_of(chain), medium)
        else:
            prefixes.removed(holder, keys_of(chain)[::-1], medium)
        if done:
            break
    picture = looked_at(survey).draw(100)
    assert all(node.length > 0 for node in picture.nodes)
    for node in picture.nodes:
        prefixes.holders_of(node.mask)
