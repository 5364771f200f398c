"""Which parsers a model's chats need, by the names that vLLM gives them, or as its chat template tells."""

# pyright: strict

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from router.frontend.chat.chat_parser import ChatParser
from router.frontend.chat.forced import NamedCall, RequiredCalls
from router.frontend.chat.harmony import HarmonyParser
from router.frontend.chat.hermes import HermesParser
from router.frontend.chat.llama3_json import Llama3JsonParser
from router.frontend.chat.mistral import MistralParser
from router.frontend.chat.text_parser import DeltaWriter, PlainText, TextParser
from router.frontend.chat.thinking import ThinkMarkers, ThinkSplitter

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
        if self._harmony:
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
        prompt: str = "",
        continued: str | None = None,
        show_reasoning: bool = True,
        parallel_calls: bool = True,
    ) -> ChatParser:
        """A parser for one output. `tools` are the names that may be called; `prompt` is the end of the prompt. A
        constrained output has no format but that of forced calls."""
        family = TOOL_PARSERS.get(self.tool_parser or "", TextParser)
        out = DeltaWriter(family.make_id)
        if calls is Calls.REQUIRED:
            reader = RequiredCalls(out, tools)
        elif calls is Calls.NAMED:
            reader = NamedCall(out, tools)
        elif constrained:
            reader = PlainText(out)
        elif self._harmony:
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
        return ChatParser(out, reader, show_reasoning=show_reasoning, parallel_calls=parallel_calls)

    @property
    def _harmony(self) -> bool:
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
