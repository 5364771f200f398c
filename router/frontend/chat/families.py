"""Which parsers a model's chats need, by the names that vLLM gives them, or as its chat template tells.

`ChatParser` is what all chat APIs read: one output's text as deltas, added up.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from router.frontend.chat.call_list import NamedCall, RequiredCalls, TextCall
from router.frontend.chat.deltas import CallArguments, CallBegin, ChatDelta, ChatOutput, Reasoning
from router.frontend.chat.harmony import HarmonyParser
from router.frontend.chat.hermes import HermesParser
from router.frontend.chat.llama3_json import Llama3JsonParser
from router.frontend.chat.mistral import MistralParser
from router.frontend.chat.text_argument import TextArgument
from router.frontend.chat.text_parser import DeltaWriter, PlainText, Reads, TextParser
from router.frontend.chat.thinking import ThinkMarkers, ThinkSplitter


class ChatParser:
    """Parses one output. `output` is everything so far."""

    def __init__(
        self, out: DeltaWriter, reader: Reads, *, show_reasoning: bool = True, parallel_calls: bool = True,
        texts: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Without `parallel_calls` only the first call is given. `texts` are the tools that take a text."""
        self._out = out
        self._reader = reader
        self._show_reasoning = show_reasoning
        self._parallel_calls = parallel_calls
        self._texts = texts
        self._argument: TextArgument | None = None  # of the call that began last
        self._index = 0  # of that call
        self.output = ChatOutput()
        self._tokens_until_end: int | None = None  # of the reasoning

    def reasoning_tokens(self, tokens: Sequence[int], end: int | None) -> int | None:
        """How many of the output's tokens are reasoning, its markers included; None if that is not known. `end` is the
        token that ends reasoning."""
        if end is None or not isinstance(self._reader, ThinkSplitter):
            return None
        if not self._reader.thought:
            return 0
        if self._reader.thinks:
            return len(tokens)
        if self._tokens_until_end is None:
            self._tokens_until_end = tokens.index(end) + 1 if end in tokens else len(tokens)
        return self._tokens_until_end

    def feed(self, text: str) -> Sequence[ChatDelta]:
        """Return what more text comes to."""
        self._reader.feed(text)
        return self._taken()

    def finish(self) -> Sequence[ChatDelta]:
        """Return what was held back: no more text comes."""
        self._reader.finish()
        self._out.finish()
        return self._taken(last=True)

    def _taken(self, *, last: bool = False) -> Sequence[ChatDelta]:
        deltas = list(self._shown())
        if last:
            deltas += self._rest_of_text()
        for delta in deltas:
            self.output.take(delta)
        return deltas

    def _shown(self) -> Iterator[ChatDelta]:
        for delta in self._out.take():
            match delta:
                case Reasoning() if not self._show_reasoning:
                    pass
                case CallBegin(index=index) | CallArguments(index=index) if index and not self._parallel_calls:
                    pass
                case CallBegin(index, id_, name):
                    yield from self._rest_of_text()
                    self._argument, self._index = TextArgument() if name in self._texts else None, index
                    yield CallBegin(index, id_, name, takes_text=self._argument is not None)
                case CallArguments(index, text):
                    shown = self._argument.feed(text) if self._argument else text
                    if shown:
                        yield CallArguments(index, shown)
                case _:
                    yield from self._rest_of_text()
                    yield delta

    def _rest_of_text(self) -> Iterator[ChatDelta]:
        if self._argument is not None and (text := self._argument.finish()):
            yield CallArguments(self._index, text)


_THINK = ("<think>", "</think>")
TOOL_PARSERS: dict[str, type[TextParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
}
REASONING: dict[str, ThinkMarkers | None] = {
    "deepseek_r1": ThinkMarkers(*_THINK, begins_inside=True),
    "mistral": ThinkMarkers("[THINK]", "[/THINK]"),
    "openai_gptoss": None,  # harmony
    "qwen3": ThinkMarkers(*_THINK),
}


class Calls(Enum):
    """Which calls an output may have."""

    NONE = "none"
    AUTO = "auto"  # as the model likes, in its own format
    REQUIRED = "required"  # at least one, as a list in JSON
    NAMED = "named"  # one of a given function, whose parameters are the output


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes reasoning and calls. None: it has no such format, or none that is known here."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def markers(self, calls: Calls, *, constrained: bool = False) -> tuple[str, ...]:
        """The texts that a parser must see, even if they are special tokens."""
        if constrained:
            return ()
        if self.is_harmony:
            return HarmonyParser.markers
        found: tuple[str, ...] = ()
        if calls is Calls.AUTO and self.tool_parser:
            found += TOOL_PARSERS[self.tool_parser].markers
        if think := self._think:
            found += (think.begin, think.end)
        return found

    @property
    def reasoning_end(self) -> str | None:
        """The marker that ends reasoning, if one does."""
        return think.end if (think := self._think) else None

    def without_reasoning(self, prompt: str) -> str:
        """The prompt of an output that can't reason: reasoning that it begins at its end is closed."""
        think = self._think
        return f"{prompt}\n{think.end}\n\n" if think and prompt.rstrip().endswith(think.begin) else prompt

    def parser(
        self,
        calls: Calls = Calls.NONE,
        tools: Sequence[str] = (),
        *,
        constrained: bool = False,
        plain: bool = False,
        prompt: str = "",
        continued: str | None = None,
        show_reasoning: bool = True,
        parallel_calls: bool = True,
        texts: Collection[str] = (),
    ) -> ChatParser:
        """A parser for one output. `tools` are the names that may be called; `prompt` is the end of the prompt. A
        constrained output has no format but that of forced calls. A `plain` one is the text that a named tool takes."""
        family = TOOL_PARSERS.get(self.tool_parser or "", TextParser)
        out = DeltaWriter(family.make_id)
        if calls is Calls.REQUIRED:
            reader = RequiredCalls(out, tools)
        elif calls is Calls.NAMED:
            reader = TextCall(out, tools) if plain else NamedCall(out, tools)
        elif constrained:
            reader = PlainText(out)
        elif self.is_harmony:
            reader = HarmonyParser(
                out, tools,
                calls=calls is Calls.AUTO and self.tool_parser == "openai",
                reasoning=self.reasoning_parser == "openai_gptoss",
            )  # fmt: skip
        else:
            answer = family(out, tools) if calls is Calls.AUTO and self.tool_parser else PlainText(out)
            think = self._think
            inside = think is not None and think.inside(prompt, continued)
            reader = ThinkSplitter(out, think, answer, inside=inside) if think else answer
        return ChatParser(out, reader, show_reasoning=show_reasoning, parallel_calls=parallel_calls, texts=texts)

    @property
    def is_harmony(self) -> bool:
        """Whether the model writes messages on channels, as gpt-oss does."""
        return self.tool_parser == "openai" or self.reasoning_parser == "openai_gptoss"

    @property
    def _think(self) -> ThinkMarkers | None:
        return REASONING[self.reasoning_parser] if self.reasoning_parser else None


NO_FORMAT = ChatFormat()


def chosen(template: str | None, tools: str, reasoning: str) -> ChatFormat:
    """The format that the configuration names: a parser, "none", or "auto" for the one that the template tells."""
    return ChatFormat(
        _tool_parser(template or "") if tools == "auto" else None if tools == "none" else tools,
        _reasoning_parser(template or "") if reasoning == "auto" else None if reasoning == "none" else reasoning,
    )


def _tool_parser(template: str) -> str | None:
    if "tools" not in template:
        return None
    if "<|channel|>" in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        # Qwen3-Coder, GLM and others write XML between these markers.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return None if "[func_name1(" in template else "llama3_json"  # the former asks for Python
    return None


def _reasoning_parser(template: str) -> str | None:
    if "<|channel|>" in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
