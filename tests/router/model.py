"""A model that exists only as data: its card, its tokens, and requests for it.

A token is a function of the request's seed and its position. A test therefore knows every request's output beforehand,
whichever worker computes it and however often it is restarted.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton import config as settings
from baton import messages as msg
from kvstore.keys import pack_tokens, page_keys, split_keys
from router.generation_request import GenerationRequest

EMPTY: Mapping[str, str] = MappingProxyType({})
PAGE = 4  # tokens
PAGE_BYTES = 1_024
VOCAB = 1_000
EOS = 7
CONTEXT = 4_096
NAMESPACE = msg.Namespace(
    model=b"m" * 16, numerics="test", kv_dtype="float32", page_size=PAGE, layout=1, form="split", kv_heads=1
)
CONFIG = settings.Config(
    cluster=settings.ClusterConfig(heartbeat_ms=250, heartbeat_timeout_ms=1_000, step_timeout_ms=5_000),
    pages=settings.PagesConfig(page_size=PAGE),
    router=settings.RouterConfig(max_attempts=3, max_queued=20, queue_timeout_ms=5_000, attempt_timeout_ms=4_000),
    prefill=settings.PrefillConfig(max_num_seqs=2),
)
ROUTER = msg.Peer("router", "router", "a", "router.1", 1)


def card(
    pool_pages: int = 64,
    namespace: msg.Namespace = NAMESPACE,
    *,
    head: bool = True,
    adapters: Mapping[str, str] = EMPTY,
) -> msg.ModelCard:
    """`adapters`: digests by name."""
    return msg.ModelCard(
        namespace, page_bytes=PAGE_BYTES, vocab_size=VOCAB, max_context=CONTEXT, pool_pages=pool_pages, lm_head=head,
        adapters=tuple(msg.AdapterCard(*each) for each in adapters.items()),
    )  # fmt: skip


def load_of(peer: msg.Peer) -> msg.LoadReport:
    """Prefill workers compute prompts so much quicker than decode workers that they are worth waiting for."""
    return msg.LoadReport(prefill_rate={"prefill": 10_000.0, "decode": 500.0}.get(peer.role, 0.0))


def token_at(seed: int, position: int) -> int:
    """The model: never end of sequence but where `position` and seed say so."""
    if (seed * 31 + position) % 23 == 0:
        return EOS
    return 8 + (seed * 7 + position * 13) % (VOCAB - 8)


def expected(seed: int, prompt: int, max_tokens: int) -> tuple[list[int], str]:
    """A request's whole output, and why it ends."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(seed, prompt + len(tokens)))
        if tokens[-1] == EOS:
            return tokens, "stop"
    return tokens, "length"


def logprob_at(position: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token there, and its alternatives: tokens 1, 2, …"""
    return -position / 8, tuple((token, -token / 4) for token in range(1, top + 1))


def submit(name: str, prompt: int = 10, max_tokens: int | None = 6, seed: int = 1, **more: Any) -> GenerationRequest:
    tokens = pack_tokens([1 + (seed + i) % 100 for i in range(prompt)])
    sampling = more.pop("sampling", msg.SamplingParams(seed=seed))
    received = more.pop("received", 0.0)
    return GenerationRequest(name, tokens, sampling, received, max_tokens, stop_token_ids=(EOS,), **more)


def chain_of(root: bytes, tokens: bytes, pages: int) -> list[bytes]:
    return split_keys(page_keys(root, tokens[: pages * PAGE * msg.TOKEN_BYTES], PAGE))
