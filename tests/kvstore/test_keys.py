"""Page keys: the vectors of docs/page-keys.md, and what keys must and must not depend on."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest, MalformedMessage
from baton.messages import MIXED, Namespace
from kvstore.keys import (
    cacheable_pages,
    namespace_root,
    pack_tokens,
    page_keys,
    partial_key,
    prompt_keys,
    split_keys,
    system_fingerprint,
    unpack_tokens,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "page-keys.md"
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def vectors() -> list[dict[str, Any]]:
    blocks = re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 1
    return json.loads(blocks[0])


@pytest.mark.parametrize("vector", vectors())
def test_vectors_of_the_documentation(vector: dict[str, Any]) -> None:
    fields = vector["namespace"]
    namespace = Namespace(**{**fields, "model": bytes.fromhex(fields["model"])})
    root = namespace_root(namespace, vector["tenant"], vector.get("salt", ""))
    assert root.hex() == vector["root"]
    keys = page_keys(root, pack_tokens(vector["tokens"]), namespace.page_size)
    assert [key.hex() for key in split_keys(keys)] == vector["keys"]


def test_every_vector_has_a_root_of_its_own_unless_its_namespace_tenant_and_salt_are_equal() -> None:
    roots = {(json.dumps(v["namespace"]), v["tenant"], v.get("salt", "")): v["root"] for v in vectors()}
    assert len(set(roots.values())) == len(roots)


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_another_tenant_or_salt_gives_another_root(tenant: str, salt: str, tenant_2: str, salt_2: str) -> None:
    namespace = Namespace(bytes(16), "test", "bfloat16", 16, 1, "split", 8)
    one, other = namespace_root(namespace, tenant, salt), namespace_root(namespace, tenant_2, salt_2)
    assert (one == other) == ((tenant, salt) == (tenant_2, salt_2))


@given(*[st.text(min_size=1, max_size=6)] * 4)
def test_another_class_of_numerics_or_dtype_gives_another_root(
    numerics: str, dtype: str, numerics_2: str, dtype_2: str
) -> None:
    one, other = (
        Namespace(bytes(16), numerics, dtype, 16, 1, "split", 8),
        Namespace(bytes(16), numerics_2, dtype_2, 16, 1, "split", 8),
    )
    assert (namespace_root(one) == namespace_root(other)) == (one == other)


def test_a_fingerprint_stands_for_model_adapter_dtype_and_class_of_numerics() -> None:
    namespace = Namespace(bytes(16), "native-2/1f0c9d3e", "bfloat16", 16, 1, "split", 8)
    assert system_fingerprint(namespace) == "fp_d4e4513c9c75"  # the same in every release and process
    changes: list[dict[str, Any]] = [
        {"model": b"m" * 16}, {"numerics": "native-2/00000000"}, {"kv_dtype": "float32"}, {"adapter": "digest"},
    ]  # fmt: skip
    others = [system_fingerprint(msgspec.structs.replace(namespace, **change)) for change in changes]
    assert len({system_fingerprint(namespace), *others}) == 5
    assert system_fingerprint(msgspec.structs.replace(namespace, numerics=MIXED)) == ""


@given(TOKENS, st.integers(1, 8))
def test_one_key_per_full_page_and_a_chain_can_be_continued(tokens: list[int], page_size: int) -> None:
    root = bytes(16)
    packed = pack_tokens(tokens)
    keys = split_keys(page_keys(root, packed, page_size))
    assert len(keys) == len(tokens) // page_size
    for cut in range(1, len(keys)):
        rest = page_keys(keys[cut - 1], packed[cut * page_size * 4 :], page_size)
        assert split_keys(rest) == keys[cut:]


@given(TOKENS, st.integers(1, 8))
def test_what_fills_no_page_has_a_key_of_its_own(tokens: list[int], page_size: int) -> None:
    root, packed = bytes(16), pack_tokens(tokens)
    full = split_keys(page_keys(root, packed, page_size))
    every = prompt_keys(root, packed, page_size)
    assert every[: len(full)] == full
    assert len(every) == -(-len(tokens) // page_size)
    if len(every) > len(full):
        assert every[-1] == partial_key(full[-1] if full else root, packed[len(full) * page_size * 4 :])
        more = prompt_keys(root, packed + pack_tokens([1] * page_size), page_size)
        assert every[-1] not in more, "a page that has filled up since is another one"


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_as_far_as_tokens_are(left: list[int], right: list[int]) -> None:
    a, b = (split_keys(page_keys(bytes(16), pack_tokens(tokens), 2)) for tokens in (left, right))
    for page, (one, other) in enumerate(zip(a, b, strict=False)):
        assert (one == other) == (left[: 2 * page + 2] == right[: 2 * page + 2])


@given(TOKENS)
def test_tokens_survive_packing(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize(
    ("tokens", "page_size", "pages"),
    [(0, 16, 0), (1, 16, 0), (16, 16, 0), (17, 16, 1), (33, 16, 2), (32, 16, 1), (5, 1, 4)],
)
def test_the_last_token_is_in_no_cache(tokens: int, page_size: int, pages: int) -> None:
    assert cacheable_pages(tokens, page_size) == pages


def test_lengths_that_cannot_be_are_typed_errors() -> None:
    with pytest.raises(MalformedMessage):
        split_keys(bytes(17))
    with pytest.raises(MalformedMessage):
        unpack_tokens(bytes(5))
    with pytest.raises(MalformedMessage):
        page_keys(bytes(16), bytes(5), 16)
    with pytest.raises(MalformedMessage):
        page_keys(bytes(15), b"", 16)
    with pytest.raises(InvalidRequest):
        page_keys(bytes(16), b"", 0)
    for bad in ([-1], [2**32], [1.5], ["x"]):
        with pytest.raises(InvalidRequest):
            pack_tokens(bad)  # type: ignore[arg-type]
