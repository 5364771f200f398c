"""POST /v1/completions: its request, and its response whole and in chunks."""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.messages import TokenLogprob
from router.frontend.api.protocol import GenerationFields
from router.frontend.api.response_builder import Answer, Sample
from router.frontend.api.token_logprobs import Json, added_texts, completion_logprobs
from router.frontend.detokenizer import TextStream
from router.frontend.output_stream import Output


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None


class Completion(Answer):
    """POST /v1/completions."""

    kind = chunk_kind = "text_completion"

    def opening(self) -> Iterator[Json]:
        if self._scored_echo:
            return  # the first output brings it
        for sample in self.samples:
            if self.wanted.echo is not None or self.wanted.token_ids:
                choice = _completion_choice(sample.index, self.wanted.echo or "", None, None)
                sample.characters = sample.offset = len(self.wanted.echo or "")
                yield self._chunk([self._with_ids(choice, sample, [])])

    @property
    def _scored_echo(self) -> bool:
        """The prompt is in the output, with its log-probabilities."""
        return self.wanted.echo is not None and self.wanted.logprobs

    def _delta(self, sample: Sample, piece: Output) -> Json | None:
        if not piece.text and not self._shows_tokens(piece):
            return None
        text, texts = piece.text, sample.added(piece.logprobs)
        logprobs = self._logprobs(piece.logprobs, texts, sample.offset) if self.wanted.logprobs else None
        if self._scored_echo and not sample.characters:
            echo = self.wanted.echo or ""
            sample.characters = sample.offset = len(echo)
            text, logprobs = echo + text, self._logprobs_with_prompt(sample, piece.logprobs, texts)
        sample.characters += len(piece.text)
        sample.offset += sum(map(len, texts))
        choice = _completion_choice(sample.index, text, logprobs, None)
        return choice | {"token_ids": piece.tokens} if self.wanted.token_ids else choice

    def _end(self, sample: Sample) -> Json:
        return _completion_choice(sample.index, "", None, sample.finish_reason) | {"stop_reason": sample.stop_reason}

    def _choice(self, sample: Sample) -> Json:
        echo = self.wanted.echo or ""
        logprobs = self._logprobs(sample.logprobs, sample.token_texts, len(echo)) if self.wanted.logprobs else None
        if self._scored_echo:
            logprobs = self._logprobs_with_prompt(sample, sample.logprobs, sample.token_texts)
        choice = _completion_choice(sample.index, echo + "".join(sample.text), logprobs, sample.finish_reason)
        if self.wanted.prompt_logprobs:
            choice["prompt_logprobs"] = self.prompt_logprobs(sample)
        return self._with_ids(choice | {"stop_reason": sample.stop_reason}, sample, sample.tokens)

    def _with_ids(self, choice: Json, sample: Sample, tokens: Sequence[int]) -> Json:
        if not self.wanted.token_ids:
            return choice
        return choice | {"token_ids": list(tokens), "prompt_token_ids": list(sample.prompt)}

    def _logprobs_with_prompt(self, sample: Sample, logprobs: Sequence[TokenLogprob], texts: Sequence[str]) -> Json:
        """Those of the prompt, whose first token has none, and those of the output."""
        stream = TextStream(self.wanted.names.tokenizer, (), (), frozenset())
        prompt = added_texts(stream, sample.prompt)
        prompt[-1] += stream.flush().text
        scored = [TokenLogprob(sample.prompt[0], 0.0), *sample.prompt_scores, *logprobs]
        found = completion_logprobs(self.wanted.names, scored, [*prompt, *texts], 0)
        found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found

    def _logprobs(self, logprobs: Sequence[TokenLogprob], texts: Sequence[str], offset: int) -> Json:
        return completion_logprobs(self.wanted.names, logprobs, texts, offset)


def _completion_choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
