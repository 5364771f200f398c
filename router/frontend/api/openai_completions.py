"""POST /v1/completions: its request, and its response whole and in chunks."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from baton.messages import TokenLogprob
from router.frontend.api.protocol import GenerationFields
from router.frontend.api.response_builder import (
    Choice,
    Count,
    OpenAiResponse,
    PromptLogprobs,
    ResponseBuilder,
    StopCause,
)
from router.frontend.api.token_logprobs import CompletionLogprobs, Json, added_texts, completion_logprobs
from router.frontend.detokenizer import TextStream
from router.frontend.output_stream import Output


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class CompletionChoice(Struct):
    """One output, or more of it."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: StopCause | None  # None: more may come
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(OpenAiResponse, kw_only=True, tag="text_completion"):
    """The answer of POST /v1/completions."""

    choices: list[CompletionChoice]


class CompletionBuilder(ResponseBuilder):
    """Builds the response of POST /v1/completions."""

    prefix = "cmpl-"
    chunk_kind = "text_completion"

    def opening(self) -> Iterator[Json]:
        if self._scored_echo:
            return  # the first output brings it
        for choice in self.choices:
            if self.options.echo is not None or self.options.token_ids:
                echo = self.options.echo or ""
                choice.characters = choice.offset = len(echo)
                yield self._chunk([self._with_ids(CompletionChoice(choice.index, echo, None, None, None), choice, [])])

    @property
    def _scored_echo(self) -> bool:
        """The prompt is in the output, with its log-probabilities."""
        return self.options.echo is not None and self.options.logprobs

    def _delta(self, choice: Choice, piece: Output) -> CompletionChoice | None:
        if not piece.text and not piece.tokens:
            return None
        with_echo = self._scored_echo and not choice.characters
        text = (self.options.echo or "") if with_echo else ""
        choice.characters += len(text)
        choice.offset += len(text)
        offset, (scored, texts) = choice.offset, choice.released(piece)
        text += piece.text
        if not text and not scored and not self._shows_tokens(piece):
            return None
        if with_echo:
            logprobs = self._logprobs_with_prompt(choice, scored, texts)
        else:
            logprobs = self._logprobs(scored, texts, offset)
        token_ids = piece.tokens if self.options.token_ids else UNSET
        return CompletionChoice(choice.index, text, logprobs, None, None, token_ids=token_ids)

    def ending(self, choice: Choice) -> Iterator[Json]:
        reason, stop = choice.finish_reason, choice.stop_reason
        choice.finish_tokens()
        rest = self._logprobs(choice.logprobs, choice.token_texts, choice.offset) if choice.logprobs else None
        yield self._chunk([CompletionChoice(choice.index, "", rest, reason, stop)])

    def whole(self) -> Completion:
        choices = [self._whole_choice(choice) for choice in self.choices]
        return Completion(**self._about, choices=choices, usage=self.usage(), metrics=self.metrics())

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        echo = self.options.echo or ""
        if self._scored_echo:
            logprobs = self._logprobs_with_prompt(choice, choice.logprobs, choice.token_texts)
        else:
            logprobs = self._logprobs(choice.logprobs, choice.token_texts, len(echo))
        whole = CompletionChoice(
            choice.index,
            echo + "".join(choice.text),
            logprobs,
            choice.finish_reason,
            choice.stop_reason,
            prompt_logprobs=self.prompt_logprobs(choice) if self.options.prompt_logprobs else UNSET,
        )
        return self._with_ids(whole, choice, choice.tokens)

    def _with_ids(self, part: CompletionChoice, choice: Choice, tokens: list[int]) -> CompletionChoice:
        if self.options.token_ids:
            part.token_ids, part.prompt_token_ids = tokens, list(choice.prompt)
        return part

    def _logprobs_with_prompt(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], texts: Sequence[str]
    ) -> CompletionLogprobs:
        """Those of the prompt, whose first token has none, and those of the output."""
        stream = TextStream(self.options.names.tokenizer, (), (), frozenset())
        prompt = added_texts(stream, choice.prompt)
        prompt[-1] += stream.flush().text
        scored = [TokenLogprob(choice.prompt[0], 0.0), *choice.prompt_scores, *logprobs]
        result = completion_logprobs(self.options.names, scored, [*prompt, *texts], 0)
        result.token_logprobs[0] = result.top_logprobs[0] = None
        return result

    def _logprobs(
        self, logprobs: Sequence[TokenLogprob], texts: Sequence[str], offset: int
    ) -> CompletionLogprobs | None:
        return completion_logprobs(self.options.names, logprobs, texts, offset) if self.options.logprobs else None
