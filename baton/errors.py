"""Every error that Baton raises on purpose, each with the gRPC status a client sees.

BatonError                        INTERNAL
├── InvalidRequest                INVALID_ARGUMENT     the client's request can't be served as written
│   ├── ContextTooLong            INVALID_ARGUMENT     prompt + max_tokens exceed the model's context or every pool
│   ├── UnsupportedField          INVALID_ARGUMENT     a field of another server's API that would change the output
│   ├── InvalidGrammar            INVALID_ARGUMENT     a grammar that can't be compiled, or that leaves no token
│   ├── PayloadTooLarge           INVALID_ARGUMENT     a body of more bytes than any prompt takes, or its key allows
│   ├── UnsupportedEncoding       INVALID_ARGUMENT     a body that is compressed
│   └── BodyTimeout               INVALID_ARGUMENT     a body that did not come in time
├── ModelMismatch                 NOT_FOUND            the client named a model this cluster does not serve
├── Unauthenticated               UNAUTHENTICATED      the client has no API key, or one that is not known
├── PermissionDenied              PERMISSION_DENIED    the client's key is no operator's
├── KeyNotFound                   NOT_FOUND            no API key has that name
├── PinNotFound                   NOT_FOUND            the client named a pin that there is not
├── ProcessNotFound               NOT_FOUND            the client named a worker or store that is not live
├── RequestNotFound               NOT_FOUND            the client named a request that nobody remembers
├── BatchNotFound                 NOT_FOUND            the client named a file or batch that its tenant does not have
├── BatchConflict                 FAILED_PRECONDITION  a batch has ended, or another process writes its results
├── TraceConflict                 FAILED_PRECONDITION  a trace runs already, or none runs that could be stopped
├── Overloaded                    RESOURCE_EXHAUSTED   no room now; carries when to try again
│   ├── ObjectiveUnreachable      RESOURCE_EXHAUSTED   the first token can't come in the time that was asked for
│   ├── RateLimited               RESOURCE_EXHAUSTED   a tenant has used up its quota of this minute
│   └── TooManyStreams            RESOURCE_EXHAUSTED   a client has as many requests at a time as its key allows
├── QuotaExceeded                 RESOURCE_EXHAUSTED   a tenant may not pin as much as that
├── DeadlineExpired               DEADLINE_EXCEEDED    the client's deadline passed first
├── RequestCancelled              CANCELLED            the client went away
├── Unavailable                   UNAVAILABLE          no live worker can take the request, or its router is stopping
│   └── AttemptsExhausted         UNAVAILABLE          every attempt, the decode-local one included, failed
├── DeviceLost                    UNAVAILABLE          a worker's GPU can't be used by its process any more, which ends
├── NonFiniteLogits               INTERNAL             the model's logits are NaN or infinite: no attempt would help
├── ProtocolError                 INTERNAL             a peer said what the protocol does not allow
│   ├── MalformedMessage          INVALID_ARGUMENT     bytes that are no message of this link
│   └── Incompatible              FAILED_PRECONDITION  Hello with another protocol, layout or namespace
├── ConfigError                   INVALID_ARGUMENT     a setting that is unknown or impossible
├── StartupError                  FAILED_PRECONDITION  a process can't start here
│   ├── PortInUse                 FAILED_PRECONDITION
│   ├── NotEnoughMemory           RESOURCE_EXHAUSTED
│   ├── KeysUnusable              FAILED_PRECONDITION  the cluster's keys, or its clients', are broken or not secret
│   ├── FolderUntrusted           FAILED_PRECONDITION  another user could exchange files that are run from there
│   └── RayUnusable               FAILED_PRECONDITION  Ray is absent, unreachable or wants another authentication
├── ModelError                    FAILED_PRECONDITION  a checkpoint can't be served
│   ├── ModelNotFound             NOT_FOUND
│   ├── UnsupportedModel          UNIMPLEMENTED
│   └── CorruptWeights            DATA_LOSS
└── StoreError                    UNAVAILABLE          the node's store did not do as asked
    └── StoreGone                 UNAVAILABLE          its process is gone, or it no longer answers

A message says what was wrong, with the value, and what to do.
"""

from collections.abc import Iterator
from typing import ClassVar


class BatonError(Exception):
    """Root of the tree. `status` is the name of a `grpc.StatusCode`; `reason` is a bounded metric label."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "internal"

    def __init_subclass__(cls, *, reason: str, status: str = "") -> None:
        """Set both of a class. Without a `status` it is its parent's."""
        cls.reason = reason
        if status:
            cls.status = status


class InvalidRequest(BatonError, status="INVALID_ARGUMENT", reason="invalid_request"):
    """A request that no state of the cluster could serve as written."""

    def __init__(self, message: str = "", field: str = "") -> None:
        """`field` is the one that is wrong, where the error knows."""
        super().__init__(message)
        self.field = field


class ContextTooLong(InvalidRequest, reason="context_too_long"):
    """Prompt and output together exceed the model's context, or the page pool of every decode worker."""

    def __init__(self, message: str = "", *, prompt: int = 0, output: int = 0, context: int = 0) -> None:
        """The counts are tokens, where they are known; without a message they make one, in vLLM's words."""
        super().__init__(
            message
            or f"This model's maximum context length is {context} tokens. However, "
            + (f"you requested {output} output tokens and " if output else "")
            + f"your prompt contains {prompt} input tokens. Please reduce the length of the prompt"
            + (" or the number of requested output tokens." if output else ".")
        )
        self.prompt, self.output, self.context = prompt, output, context


class UnsupportedField(InvalidRequest, reason="unsupported_field"):
    """A field that other servers know, and that would change the output if it were served here."""


class InvalidGrammar(InvalidRequest, reason="invalid_grammar"):
    """A grammar that can't be compiled or is too complex, or that leaves no token with the request's other rules."""


class PayloadTooLarge(InvalidRequest, reason="payload_too_large"):
    """A body with more bytes than any prompt of this model takes, or than its client's key allows."""


class UnsupportedEncoding(InvalidRequest, reason="unsupported_encoding"):
    """A body that is compressed."""


class BodyTimeout(InvalidRequest, reason="body_timeout"):
    """A body that did not come in time."""


class ModelMismatch(BatonError, status="NOT_FOUND", reason="model_mismatch"):
    """The client asked for a model by a name that this cluster does not serve."""


class Unauthenticated(BatonError, status="UNAUTHENTICATED", reason="invalid_api_key"):
    """The client sent no API key, or one that is not known."""


class PermissionDenied(BatonError, status="PERMISSION_DENIED", reason="permission_denied"):
    """The client is known, and may not do that."""


class KeyNotFound(BatonError, status="NOT_FOUND", reason="key_not_found"):
    """The operator named an API key that does not exist."""


class PinNotFound(BatonError, status="NOT_FOUND", reason="pin_not_found"):
    """The client named a pin that does not exist, or has ended."""


class ProcessNotFound(BatonError, status="NOT_FOUND", reason="process_not_found"):
    """The client named a worker or store that is not live."""


class RequestNotFound(BatonError, status="NOT_FOUND", reason="request_not_found"):
    """The client named a request that this router never served, or has forgotten."""


class BatchNotFound(BatonError, status="NOT_FOUND", reason="batch_not_found"):
    """The client named a file or a batch that its tenant does not have."""


class BatchConflict(BatonError, status="FAILED_PRECONDITION", reason="batch_conflict"):
    """A batch has ended, so it can't be cancelled; or another process writes its results."""


class TraceConflict(BatonError, status="FAILED_PRECONDITION", reason="trace_conflict"):
    """A cluster makes one trace at a time: another one runs, or none runs that could be stopped."""


class Overloaded(BatonError, status="RESOURCE_EXHAUSTED", reason="overloaded"):
    """No room at present. `retry_after_ms` says when another try is worth it."""

    def __init__(self, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class ObjectiveUnreachable(Overloaded, reason="objective"):
    """No placement can bring the first token in time. A request without that objective would be served."""


class RateLimited(Overloaded, reason="rate_limited"):
    """A tenant has used up what it may ask for in a minute."""


class TooManyStreams(Overloaded, reason="too_many_streams"):
    """A client has as many requests at a time as its API key allows."""


class QuotaExceeded(BatonError, status="RESOURCE_EXHAUSTED", reason="quota_exceeded"):
    """More than a tenant may have. Trying again is no use before something of it has ended."""


class DeadlineExpired(BatonError, status="DEADLINE_EXCEEDED", reason="deadline"):
    """The client's deadline passed before the request ended."""


class RequestCancelled(BatonError, status="CANCELLED", reason="cancelled"):
    """The client cancelled, or its connection went away."""


class Unavailable(BatonError, status="UNAVAILABLE", reason="unavailable"):
    """No process can take the request: no live worker, or a router that is stopping."""


class AttemptsExhausted(Unavailable, reason="attempts_exhausted"):
    """Every attempt at a request failed, the decode-local one included."""


class DeviceLost(BatonError, status="UNAVAILABLE", reason="device_lost"):
    """An error after which a device does nothing more for its process, such as a bad address in a CUDA context."""


class NonFiniteLogits(BatonError, reason="non_finite_logits"):
    """The model computed NaN or infinity for this request. Another attempt would compute the same."""


class ProtocolError(BatonError, reason="protocol"):
    """A peer said something the protocol does not allow."""


class MalformedMessage(ProtocolError, status="INVALID_ARGUMENT", reason="malformed_message"):
    """Bytes that are no message of this link."""


class Incompatible(ProtocolError, status="FAILED_PRECONDITION", reason="incompatible"):
    """A Hello whose protocol version, page layout or namespace differs from ours."""


class ConfigError(BatonError, status="INVALID_ARGUMENT", reason="config"):
    """A setting that is unknown, of the wrong type or impossible."""


class StartupError(BatonError, status="FAILED_PRECONDITION", reason="startup"):
    """A process or a cluster that can't start on this machine."""


class FolderUntrusted(StartupError, reason="folder_untrusted"):
    """A folder of files to run that another user could have written to, or no place for one."""


class PortInUse(StartupError, reason="port_in_use"):
    """Another program listens at the configured port."""


class NotEnoughMemory(StartupError, status="RESOURCE_EXHAUSTED", reason="not_enough_memory"):
    """The arena or a page pool would not fit into what the machine or its cgroup has left."""


class KeysUnusable(StartupError, reason="keys"):
    """The file with the cluster's keys, or its clients', is missing, holds none, or can be read by others."""


class RayUnusable(StartupError, reason="ray"):
    """Ray is absent, does not answer in time, or asks for another kind of authentication."""


class ModelError(BatonError, status="FAILED_PRECONDITION", reason="model"):
    """A checkpoint that can't be served."""


class ModelNotFound(ModelError, status="NOT_FOUND", reason="model_not_found"):
    """No checkpoint lies where the model's name points."""


class UnsupportedModel(ModelError, status="UNIMPLEMENTED", reason="unsupported_model"):
    """An architecture, or a variant of one, that the engine does not run."""


class CorruptWeights(ModelError, status="DATA_LOSS", reason="corrupt_weights"):
    """Safetensors that are missing, truncated, or hold other tensors than the config asks for."""


class StoreError(BatonError, status="UNAVAILABLE", reason="store"):
    """The node's store refused, or failed at, what it was asked for."""


class StoreGone(StoreError, reason="store_gone"):
    """The store's process is gone, or has stopped answering."""


def shown(text: str, most: int = 80) -> str:
    """Cut a client's text to what an error may repeat of it. Errors travel in headers, of which gRPC's clients take 16
    KiB: beyond that the client sees RESOURCE_EXHAUSTED instead of the error."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def all_errors() -> Iterator[type[BatonError]]:
    """Every class of the tree, parents first."""
    waiting: list[type[BatonError]] = [BatonError]
    while waiting:
        error = waiting.pop(0)
        yield error
        waiting.extend(error.__subclasses__())


def from_reason(reason: str, message: str) -> BatonError:
    """Rebuild an error that a peer reported by its `reason` label; an unknown reason becomes a plain BatonError."""
    for error in all_errors():
        if error.reason == reason:
            return error(message)
    return BatonError(message)
