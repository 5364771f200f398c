"""What a request's stream says, as plain typed values. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from baton.operator_api import Process

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from baton.v1 import generation_pb2

FinishReason: TypeAlias = Literal["stop", "length", ""]
_PREFIX = "FINISH_REASON_"


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability, and the likeliest alternatives as (token id, log-probability).

    `rank` counts from 1, the likeliest token; 0: not told, as of output tokens."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class OutputDelta:
    """New output. `text` may lag behind `token_ids`. `index` counts the samples of a request with several."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] = ()
    index: int = 0
    prompt_logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class TokenUsage:
    """Tokens of a request. `cached_tokens` of its prompt came from caches."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Milliseconds since the router received the request, as in `baton.v1.Timing`; None: not reached."""

    submitted: float | None = None
    placed: float | None = None
    accepted: float | None = None
    prefilled: float | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prefill_queue: float | None = None
    prefill_compute: float | None = None
    load_predicted: float | None = None
    load: float | None = None
    prefill_sent: float | None = None


@dataclass(frozen=True)
class Work:
    """The workers of a request and what they did, as in `baton.v1.Work`."""

    attempts: int = 0
    prefill_worker: str = ""
    decode_workers: tuple[str, ...] = ()
    tokens_computed: int = 0
    pages_hit: int = 0
    pages_shipped: int = 0
    pages_on_device: int = 0
    pages_fetched: int = 0


@dataclass(frozen=True)
class Generated:
    """One finished output. A request with several samples has one for each, in the order of `index`.

    `prompt_logprobs` are those of the prompt's tokens from the second on."""

    text: str
    token_ids: list[int]
    logprobs: list[ScoredToken]
    finish_reason: FinishReason
    usage: TokenUsage
    timing: Timing
    work: Work
    request_id: str
    seed: int
    index: int = 0
    prompt_logprobs: list[ScoredToken] = field(default_factory=list[ScoredToken])


@dataclass
class _Output:
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[ScoredToken] = field(default_factory=list[ScoredToken])
    prompt_logprobs: list[ScoredToken] = field(default_factory=list[ScoredToken])


class OutputCollector:
    """Puts the messages of one stream together."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self._finished: dict[int, Generated] = {}

    @property
    def finished(self) -> tuple[Generated, ...]:
        """The samples that have ended, in their order."""
        return tuple(self._finished[index] for index in sorted(self._finished))

    def add_message(self, message: generation_pb2.GenerateResponse) -> OutputDelta | None:
        """Add a message; return its delta, or None if it ends a sample."""
        if message.HasField("finished"):
            self._finish(message.finished)
            return None
        delta = _delta(message.delta)
        output = self._outputs.setdefault(delta.index, _Output())
        output.text.append(delta.text)
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        output.prompt_logprobs += delta.prompt_logprobs
        return delta

    def _finish(self, end: generation_pb2.Finished) -> None:
        index = end.index
        output = self._outputs.get(index, _Output())
        self._finished[index] = Generated(
            text="".join(output.text),
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=_name(end),
            usage=TokenUsage(**_values(end.usage)),
            timing=Timing(**{field.name: value for field, value in end.timing.ListFields()}),
            work=Work(**_values(end.work)),
            request_id=end.request_id,
            seed=end.seed,
            index=index,
            prompt_logprobs=output.prompt_logprobs,
        )


def _delta(delta: generation_pb2.Delta) -> OutputDelta:
    return OutputDelta(
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(map(_scored, delta.logprobs)),
        index=delta.index,
        prompt_logprobs=tuple(map(_scored, delta.prompt_logprobs)),
    )


def _scored(one: generation_pb2.TokenLogprob) -> ScoredToken:
    return ScoredToken(one.token_id, one.logprob, tuple((other.token_id, other.logprob) for other in one.top), one.rank)


def _values(message: Message) -> dict[str, Any]:
    values = ((field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields)
    return {field.name: tuple(value) if field.is_repeated else value for field, value in values}


def _name(end: generation_pb2.Finished) -> Any:
    from baton.v1 import generation_pb2 as pb

    name = pb.FinishReason.Name(end.finish_reason).removeprefix(_PREFIX).lower()
    return "" if name == "unspecified" else name


def is_up(process: Process) -> bool:
    """Whether a process in a cluster's status runs and is healthy: it is live, or drains."""
    return process.state in ("live", "draining")
