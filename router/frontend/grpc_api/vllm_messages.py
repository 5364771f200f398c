"""vLLM's engine protocol as messages: its requests become ours, outputs become its answers. Pure.

Its numbers are proto3's: a 0 is a field that is left out, and stands for what changes nothing. A gateway fills in the
model's recommended values itself (`GetModelInfo` tells them), so none is filled in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from smg_grpc_proto import vllm_engine_pb2 as vllm

from baton.errors import ContextTooLong, InvalidRequest, RequestCancelled
from baton.messages import FinishReason, TokenLogprob
from baton.v1 import generation_pb2 as pb
from router.events import Finished, Summary
from router.frontend.api.parameters import SEEDS, affinity_of
from router.frontend.api.protocol import unsupported
from router.frontend.generation import Generation
from router.frontend.output_stream import Output
from router.frontend.served_model import ServedModel

_GRAMMARS: Mapping[str, str] = {"json_schema": "json_schema", "regex": "regex", "grammar": "grammar"}
_UNSERVED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def generate_request(
    asked: vllm.GenerateRequest, model: ServedModel, metadata: Mapping[str, str]
) -> pb.GenerateRequest:
    """Our request for one of theirs. Raises InvalidRequest, and UnsupportedField with the name of a field that can't be
    served; `request_parsing` checks the rest."""
    _refuse_unserved(asked)
    params = asked.sampling_params
    request = pb.GenerateRequest(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop=params.include_stop_str_in_output,
        special_tokens=not params.skip_special_tokens,
        affinity=affinity_of(None, metadata),
    )
    if params.HasField("max_tokens"):
        request.max_tokens = params.max_tokens
    if params.n:
        request.n = params.n
    if params.HasField("seed"):
        request.seed = params.seed % SEEDS
    _set_logprobs("logprobs", params, request)
    _set_logprobs("prompt_logprobs", params, request)
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise InvalidRequest(f"logit_bias has token {token}; token ids are 0 or more")
        request.logit_bias[token] = bias
    _set_grammar(params, request)
    _set_prompt(asked, request, model)
    return request


def _refuse_unserved(asked: vllm.GenerateRequest) -> None:
    for name in _UNSERVED:
        if asked.HasField(name):
            raise unsupported(name, "set")
    if asked.extra_mm_inputs:
        raise unsupported("extra_mm_inputs", "set")
    if asked.data_parallel_rank:
        raise unsupported("data_parallel_rank", asked.data_parallel_rank, "the cluster is one rank, 0")


def _set_logprobs(
    name: Literal["logprobs", "prompt_logprobs"], params: vllm.SamplingParams, request: pb.GenerateRequest
) -> None:
    if not params.HasField(name):
        return
    if (count := getattr(params, name)) < 0:
        raise unsupported(name, count, "ask for at most 20 alternatives")
    setattr(request, name, count)


def _set_grammar(params: vllm.SamplingParams, request: pb.GenerateRequest) -> None:
    kind = params.WhichOneof("constraint")
    match kind:
        case None:
            pass
        case "structural_tag":
            raise unsupported("structural_tag", params.structural_tag, "send a JSON schema, a regex or a grammar")
        case "choice":
            request.structured_output.choice.texts.extend(params.choice.choices)
        case "json_object":
            request.structured_output.json_object = params.json_object
        case _:
            setattr(request.structured_output, _GRAMMARS[kind], getattr(params, kind))


def _set_prompt(asked: vllm.GenerateRequest, request: pb.GenerateRequest, model: ServedModel) -> None:
    params, context = asked.sampling_params, model.limits.max_context
    truncates = params.HasField("truncate_prompt_tokens")
    if truncates:
        request.truncate_prompt_tokens = params.truncate_prompt_tokens
    match asked.WhichOneof("input"):
        case "tokenized":
            ids: Sequence[int] = asked.tokenized.input_ids
            if not truncates and len(ids) > context:  # before any work for each token
                raise ContextTooLong(f"a prompt of {len(ids)} tokens exceeds the model's context of {context}")
            request.token_ids.ids.extend(ids)
        case "text":
            request.text = asked.text
        case None:
            raise InvalidRequest("the request has no prompt; set tokenized or text")


@dataclass
class _Sample:
    """One output so far."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_scored: bool = False  # the client has been told of its prompt's log-probabilities


class EngineRendering:
    """The answer to a call of `VllmEngine.Generate`: for each sample chunks and one `complete`, or `complete` alone."""

    def __init__(self, asked: vllm.GenerateRequest, model: ServedModel, metadata: Mapping[str, str]) -> None:
        self._asked = asked
        self._model = model
        self._metadata = metadata
        self._generations: Sequence[Generation] = ()
        self._samples: list[_Sample] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._aborted = False

    def abort(self) -> None:
        """End the request. It is no error: `complete` says so."""
        self._aborted = True
        for generation in self._generations:
            generation.close()

    def request(self) -> pb.GenerateRequest:
        return generate_request(self._asked, self._model, self._metadata)

    def started(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._samples = [_Sample() for _ in generations]
        if self._aborted:
            self.abort()

    def piece(self, output: Output, index: int) -> Iterator[vllm.GenerateResponse]:
        sample = self._samples[index]
        self._prompt_logprobs += output.prompt_logprobs
        sample.tokens += output.tokens
        if not self._asked.stream:
            sample.logprobs += output.logprobs
            return
        if not output.tokens:
            return
        chunk = vllm.GenerateStreamChunk(
            token_ids=output.tokens,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(output.tokens),
            output_logprobs=_output_logprobs(output.logprobs),
            input_logprobs=self._input_logprobs(sample),
            index=index,
        )
        yield vllm.GenerateResponse(chunk=chunk)

    def finished(self, finished: Finished, summary: Summary, index: int) -> Iterator[vllm.GenerateResponse]:
        yield self._complete(finished.reason, summary, index)

    def cancelled(self, why: str, summary: Summary, index: int) -> Iterator[vllm.GenerateResponse]:
        if not self._aborted:
            raise RequestCancelled(why)
        yield self._complete("abort", summary, index)

    def _complete(self, reason: FinishReason | Literal["abort"], summary: Summary, index: int) -> vllm.GenerateResponse:
        sample, stream = self._samples[index], self._generations[index].stream
        complete = vllm.GenerateComplete(
            output_ids=sample.tokens,
            finish_reason=reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(sample.tokens),
            cached_tokens=summary.usage.cached,
            output_logprobs=_output_logprobs(sample.logprobs),
            input_logprobs=self._input_logprobs(sample),
            index=index,
        )
        if stream.stop_string is not None:
            complete.matched_stop_str = stream.stop_string
        elif reason == "stop" and sample.tokens and sample.tokens[-1] in self._asked.sampling_params.stop_token_ids:
            complete.matched_token_id = sample.tokens[-1]
        return vllm.GenerateResponse(complete=complete)

    @property
    def _prompt(self) -> Sequence[int]:
        return self._generations[0].validated.prompt

    def _input_logprobs(self, sample: _Sample) -> vllm.InputLogProbs | None:
        """What was told of the prompt, once for each sample: nothing of its first token."""
        told = self._prompt_logprobs
        if not told or sample.prompt_scored:
            return None
        sample.prompt_scored = True
        return vllm.InputLogProbs(
            token_logprobs=[vllm.InputTokenLogProb(), *(vllm.InputTokenLogProb(value=one.logprob) for one in told)],
            token_ids=[self._prompt[0], *(one.token for one in told)],
            top_logprobs=[vllm.TopLogProbs(), *map(_top, told)] if any(one.top for one in told) else None,
        )


def _output_logprobs(logprobs: Sequence[TokenLogprob]) -> vllm.OutputLogProbs | None:
    if not logprobs:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[one.logprob for one in logprobs],
        token_ids=[one.token for one in logprobs],
        top_logprobs=[_top(one) for one in logprobs] if any(one.top for one in logprobs) else None,
    )


def _top(one: TokenLogprob) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=[value for _, value in one.top], token_ids=[token for token, _ in one.top])


def model_info(model: ServedModel, path: str, settings: Mapping[str, Any], recommended: str) -> Any:
    """What the gateway is told of the model. `settings`: config.json; `recommended`: sampling parameters as JSON."""
    folder = str(model.folder or "")
    context = model.limits.max_context
    return vllm.GetModelInfoResponse(
        model_path=path,
        is_generation=True,
        max_context_length=context,
        vocab_size=model.limits.vocab_size,
        served_model_name=model.name,
        tokenizer_path=folder if model.tokenizer else "",
        model_type=str(settings.get("model_type") or ""),
        architectures=[str(one) for one in settings.get("architectures") or ()],
        eos_token_ids=model.eos,
        pad_token_id=_token(settings, "pad_token_id"),
        bos_token_id=_token(settings, "bos_token_id"),
        max_req_input_len=context,
        default_sampling_params_json=recommended,
    )


def _token(settings: Mapping[str, Any], name: str) -> int:
    value = settings.get(name)
    return value if isinstance(value, int) else 0
