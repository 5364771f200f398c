"""The tools of a chat: checked, shown to the model, which calls its output may have, and the grammar that binds them.

With `tool_choice` "required" or a named function, the output is constrained to JSON. gpt-oss calls on its channels.

Agents send tools whose schemas say more than a grammar can: `propertyNames`, `not`, look-ahead. One of them would
refuse each turn. So such a keyword is left out of what binds the call, unless the tool is `strict`. The model sees all
of it.

A frame is what may stand around a structured output: reasoning before it, and calls of tools in its place. It is a
grammar in llguidance's Lark that has the output's own grammar as `@output`. So a model that thinks first is bound only
behind its reasoning, and a model with tools either calls them in its own format or follows the grammar.
"""

# pyright: strict

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from baton.errors import InvalidGrammar, InvalidRequest, shown
from baton.logs import RateLimitedLog
from baton.messages import MAX_GRAMMAR, Grammar
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.prompts import ChatPrompt
from router.frontend.api.protocol import structured_output, unsupported
from router.frontend.chat.formats import Calls, ChatFormat
from router.frontend.chat.repairs import Repairs
from router.frontend.chat.scanning import TEXT_ARGUMENT
from router.frontend.detokenizer import Tokenizer
from router.frontend.generation import GenerationService, bounded, grammar_of
from router.frontend.identity import caller

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines

Json = dict[str, Any]
MAX_TOOLS = 512
_MAX_BYTES = 512 * 2**10  # of all tools as JSON
_MAX_DEPTH = 100  # levels of a tool's parameters
_NAME = re.compile(r"[\w.\-:/]{1,128}")
_CHOICES = ("none", "auto", "required")
_THINKING = ("enable_thinking", "thinking")  # what templates call the switch
_NO_PARAMETERS: Json = {"type": "object", "properties": {}}
_HOSTED = re.compile(
    r"(?:web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp|mcp_toolset|computer"
    r"|computer_use|local_shell|shell|apply_patch|tool_search|tool_search_tool_regex|tool_search_tool_bm25"
    r"|programmatic_tool_calling)(?:_preview)?(?:_\d{4}_\d\d_\d\d)?|\w+_\d{8}"
)
"""Types of tools that a provider runs, or whose parameters only its models know."""
_OBJECTS = {"hermes": "arguments", "mistral": "arguments", "llama3_json": "parameters"}
"""Formats whose calls are objects, and their member with the arguments."""
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_MARKERS = {
    "hermes": _TOOL_CALL,
    "qwen3_coder": _TOOL_CALL,
    "qwen3_xml": _TOOL_CALL,
    "glm45": _TOOL_CALL,
    "glm47": _TOOL_CALL,
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
}
"""Texts around calls. Between those of a format without objects anything may stand, as without a grammar."""
_ANY = "/(?s:.*)/"
_GAP = "GAP: /[ \\n]{0,4}/"


class ToolPlan(Struct, frozen=True):
    """Which calls an output may have."""

    calls: Calls = Calls.NONE
    names: tuple[str, ...] = ()
    parallel: bool = True
    constrained: bool = False  # all of the output is, so it is neither reasoning nor in the model's own format
    framed: bool = False  # the output is constrained but for reasoning and calls in the model's own format
    texts: frozenset[str] = frozenset()  # tools that take a text
    schemas: Mapping[str, Json] = {}  # of their parameters, by the names
    exact: frozenset[str] = frozenset()  # tools whose calls must match all of their schemas
    plain: bool = False  # the output is such a text itself

    @property
    def forced(self) -> bool:
        return self.calls in (Calls.REQUIRED, Calls.NAMED)


def planned(fields: ChatCompletionRequest, form: ChatFormat) -> tuple[ChatCompletionRequest, ToolPlan]:
    """Check a chat's tools. Returns the request as the model is to see it, and the plan. Raises InvalidRequest."""
    tools = checked(fields.tools or ())
    calls, names = _choice(fields.tool_choice, tuple(tools))
    parallel = fields.parallel_tool_calls is not False
    texts = {one["custom"]["name"]: one["custom"].get("format") for one in fields.tools or () if _takes_text(one)}
    constrained = _is_constrained(fields) or calls in (Calls.REQUIRED, Calls.NAMED)
    frames = calls is Calls.AUTO or form.reasons
    plan = ToolPlan(
        calls, names, parallel, constrained=constrained and not frames, framed=constrained and frames,
        texts=frozenset(texts),
        schemas={name: tools[name]["function"]["parameters"] for name in names},
        exact=frozenset(texts) | {one["function"]["name"] for one in fields.tools or () if _is_strict(one)},
    )  # fmt: skip
    if calls is Calls.AUTO and form.tool_parser is None:
        raise wrong(
            "tools",
            "this server does not know how the model writes tool calls; set model.tool_call_parser, or send a "
            "tool_choice of 'required' or a function",
        )
    if plan.forced:
        if fields.structured_outputs:
            raise wrong("tool_choice", "it insists on a call beside structured_outputs; choose one")
        grammar = _lark_of(texts.get(names[0])) if calls is Calls.NAMED else None
        plan = replace(plan, plain=grammar is not None)
        # A response_format is for texts, and no text comes.
        fields = replace(fields, structured_outputs=grammar or constraint(plan, plan.schemas), response_format=None)
    if (plan.constrained and form.reasoning_parser) or fields.reasoning_effort == "none":
        fields = replace(fields, chat_template_kwargs=switch(fields.chat_template_kwargs, on=False))
    seen = [] if calls is Calls.NONE else [tool for name, tool in tools.items() if name in names or plan.forced]
    return replace(fields, tools=seen or None), plan


def switch(variables: Mapping[str, Any] | None, *, on: bool) -> Json:
    """A template's variables with reasoning switched on or off, unless the request does so itself."""
    return dict.fromkeys(_THINKING, on) | dict(variables or {})


def effort_of(field: str, options: Mapping[str, Any] | None) -> str | None:
    """Return the effort that a field of an API asks reasoning for. Raises InvalidRequest."""
    effort = (options or {}).get("effort")
    if not isinstance(effort, str | None):
        raise wrong(f"{field}.effort", f"it is {shown(repr(effort))}; it must be a text")
    return effort


def wrong(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", field)


def _is_constrained(fields: ChatCompletionRequest) -> bool:
    form = fields.response_format
    return bool(fields.structured_outputs) or bool(form and form.get("type") != "text")


# --- what a client sends ----------------------------------------------------------------------------------------------


def checked(tools: Sequence[Json]) -> dict[str, Json]:
    """The tools by name, as templates show them. Raises InvalidRequest with the field's path."""
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"there are {len(tools)}; at most {MAX_TOOLS} are allowed")
    by_name: dict[str, Json] = {}
    for number, tool in enumerate(tools):
        at = f"tools[{number}]"
        kind = "custom" if _takes_text(tool) else "function"
        if tool.get("type", "function") != kind:
            raise unsupported(f"{at}.type", tool["type"], "send functions and custom tools alone")
        check = checked_custom if kind == "custom" else checked_function
        function = check(f"{at}.{kind}", tool.get(kind))
        if function["name"] in by_name:
            raise wrong(f"{at}.{kind}.name", f"it is {function['name']!r} again; each tool needs a name of its own")
        by_name[function["name"]] = {"type": "function", "function": function}
    if tools and (size := len(msgspec.json.encode(list(by_name.values())))) > _MAX_BYTES:
        raise wrong("tools", f"they have {size} bytes; at most {_MAX_BYTES} are allowed")
    return by_name


def checked_function(at: str, function: Any, schema: str = "parameters") -> Json:
    """A function as templates show it. `at` is its path, and `schema` the member with its parameters. Raises
    InvalidRequest with the field's path."""
    if not isinstance(function, dict):
        raise wrong(at, f"it is {shown(repr(function))}; it must be an object with a name")
    function = cast("Json", function)
    name, description, parameters = function.get("name"), function.get("description"), function.get(schema)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{at}.name", f"it is {shown(repr(name))}; it needs 1 to 128 letters, digits and any of _.-:/")
    if description is not None and not isinstance(description, str):
        raise wrong(f"{at}.description", f"it is {shown(repr(description))}; it must be a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{at}.{schema}", f"it is {shown(repr(parameters))}; it must be a JSON schema")
    if parameters is not None and not _is_shallow(parameters):
        raise wrong(f"{at}.{schema}", f"it is nested more than {_MAX_DEPTH} levels deep")
    return {"name": name, "description": description or "", "parameters": parameters or _NO_PARAMETERS}


def checked_custom(at: str, custom: Any) -> Json:
    """A tool that takes a text, as a function with one argument. Raises InvalidRequest with the field's path."""
    function = checked_function(at, custom, schema="")
    form: Any = custom.get("format")
    argument: Json = {"type": "string"}
    match form:
        case None | {"type": "text"}:
            pass
        case {"type": "grammar"}:
            match form.get("grammar", form):
                case {"syntax": "lark" | "regex" as syntax, "definition": str(definition)}:
                    if syntax == "regex":
                        argument["pattern"] = f"^(?:{definition})$"
                    else:
                        argument["description"] = f"It must match this grammar in Lark:\n{definition}"
                case _:
                    raise wrong(f"{at}.format", f"it is {shown(repr(form))}; it needs a definition in lark or regex")
        case _:
            raise wrong(f"{at}.format", f"it is {shown(repr(form))}; its type must be text or grammar")
    members: Json = {
        "properties": {TEXT_ARGUMENT: argument},
        "required": [TEXT_ARGUMENT],
        "additionalProperties": False,
    }
    return function | {"parameters": {"type": "object", **members}}


def _is_strict(tool: Json) -> bool:
    return tool.get("type") != "custom" and tool["function"].get("strict") is True


def _takes_text(tool: Json) -> bool:
    return tool.get("type") == "custom" and isinstance(tool.get("custom"), dict)


def _lark_of(form: Any) -> Json | None:
    """The constraint of a text whose grammar is in Lark."""
    match form:
        case {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}:
            return {"grammar": definition}
        case {"type": "grammar", "syntax": "lark", "definition": definition}:
            return {"grammar": definition}
        case _:
            return None


def is_left_out(kind: Any, repairs: Repairs) -> bool:
    """Whether the model does not see a tool of that type: its provider runs it, or only its models know it."""
    return is_hosted(kind) and repairs.make("tool")


def is_hosted(kind: Any) -> bool:
    """Whether tools of a type are run by the provider of an API, or known to its models alone."""
    return isinstance(kind, str) and bool(_HOSTED.fullmatch(kind))


def _is_shallow(value: Any) -> bool:
    """Whether a value has no more levels than templates and JSON libraries can go down."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("Json", one).values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return True
        level = inner
    return False


def _choice(choice: Any, names: tuple[str, ...]) -> tuple[Calls, tuple[str, ...]]:
    """Which calls may come, and of which tools. Raises InvalidRequest."""
    match choice:
        case None:
            return (Calls.AUTO if names else Calls.NONE), names
        case "none" | "auto" | "required":
            mode, allowed = choice, names
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return Calls.NAMED, (_known(name, names, "tool_choice"),)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*chosen]}}:
            at = "tool_choice.allowed_tools.tools"
            allowed = tuple(_known(_name_of(one), names, f"{at}[{number}]") for number, one in enumerate(chosen))
        case _:
            raise wrong(
                "tool_choice", f"it is {shown(repr(choice))}; it must be 'none', 'auto', 'required' or name a function"
            )
    if mode == "required":
        if not allowed:
            raise wrong("tool_choice", "it is 'required', and there are no tools; send tools")
        return Calls.REQUIRED, allowed
    return (Calls.AUTO if mode == "auto" and allowed else Calls.NONE), allowed


def _name_of(tool: Any) -> Any:
    match tool:
        case {"type": "function", "function": {"name": name}} | {"type": "custom", "custom": {"name": name}}:
            return name
        case _:
            return tool


def _known(name: Any, names: tuple[str, ...], field: str) -> str:
    if name not in names:
        raise wrong(field, f"it names {shown(repr(name))}, which is none of the tools")
    return name


# --- what the output is constrained to --------------------------------------------------------------------------------


def constraint(plan: ToolPlan, schemas: Mapping[str, Json]) -> Json:
    """Return what binds a forced call: the schema of its parameters, or of a list of calls, as vLLM has it."""
    if plan.calls is Calls.NAMED:
        return {"json": schemas[plan.names[0]], "disable_any_whitespace": True}
    definitions: Json = {}
    for number, schema in enumerate(schemas.values()):
        # With an identifier it is a resource of its own, within which its references mean what they meant before.
        own = schema.get("$id")
        is_taken = any(own == other.get("$id") for other in definitions.values())
        definitions[f"t{number}"] = schema if own and not is_taken else schema | {"$id": f"baton://tools/{number}/"}
    calls: list[Json] = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/t{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, name in enumerate(plan.names)
    ]
    whole: Json = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    if not plan.parallel:
        whole["maxItems"] = 1
    return {"json": whole, "disable_any_whitespace": True}


# --- what may stand around an output ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frames:
    """Makes frames for a model."""

    form: ChatFormat
    tokenizer: Tokenizer
    json_whitespace: int

    def frame(self, plan: ToolPlan, schemas: Mapping[str, Json], prompt: str, continued: str | None) -> str:
        """Return the frame of a planned chat whose tools have these schemas; "" if nothing stands around its output.
        `prompt` is the end of the prompt, `continued` the message that the output continues. Raises InvalidGrammar."""
        if not plan.framed:
            return ""
        auto = plan.calls is Calls.AUTO
        if self.form.is_harmony:
            rules = list(self._harmony(plan, {} if plan.calls is Calls.NONE else schemas))
        else:
            rules = [f"answer: {'calls | ' if auto else ''}@output"]
            rules += self._calls(plan, schemas) if auto else ()
            rules += self._reasoning(prompt, continued)
        frame = "\n".join([*rules, _GAP])
        if len(frame) > MAX_GRAMMAR:
            raise InvalidGrammar(f"the tools' schemas have {len(frame)} characters; at most {MAX_GRAMMAR} may be")
        return frame

    def _reasoning(self, prompt: str, continued: str | None) -> Iterator[str]:
        think = self.form.think
        if think is None or (continued is None and prompt.rstrip().endswith(think.end)):
            yield "start: answer"
            return
        inside = think.inside(prompt, continued)
        yield "start: thought answer" if inside else f"start: answer | {self._text(think.begin)} thought answer"
        yield from self._until("thought", think.end)

    def _calls(self, plan: ToolPlan, schemas: Mapping[str, Json]) -> Iterator[str]:
        name = self.form.tool_parser or ""

        def repeated(rule: str, between: str) -> str:
            return f"{rule} ({between} {rule})*" if plan.parallel else rule

        if name == "mistral":
            begin, arguments = self._text("[TOOL_CALLS]"), self._text("[ARGS]")
            named = [f"{_quoted(tool)} {arguments} schema_{number}" for number, tool in enumerate(schemas)]
            objects = repeated("object", 'GAP "," GAP')
            yield f'calls: {begin} GAP "[" GAP {objects} GAP "]" | {repeated("named", "")}'
            yield f"named: {begin} ({' | '.join(named)})"
        elif name == "llama3_json":
            objects = repeated("object", 'GAP ";" GAP')
            yield f"calls: {self._text('<|python_tag|>')}? {objects}"
        elif name not in _MARKERS:
            raise InvalidGrammar(
                f"no grammar of calls is known for the format {name!r}: send tools or a response_format, not both"
            )
        else:
            begin, end = _MARKERS[name]
            yield f"calls: {repeated('call', 'GAP')}"
            if name in _OBJECTS:
                yield f"call: {self._text(begin)} GAP object GAP {self._text(end)}"
            else:
                yield f"call: {self._text(begin)} body"
                yield from self._until("body", end)
        if name in _OBJECTS:
            yield "object: " + " | ".join(f"object_{number}" for number in range(len(schemas)))
            for number, tool in enumerate(schemas):
                members = [_quoted(json.dumps(text, ensure_ascii=False)) for text in ("name", tool, _OBJECTS[name])]
                key, value, arguments = members
                yield (
                    f'object_{number}: "{{" GAP {key} GAP ":" GAP {value} GAP "," GAP {arguments} GAP ":" GAP '
                    f'schema_{number} GAP "}}"'
                )
            yield from self._schemas(schemas)

    def _harmony(self, plan: ToolPlan, schemas: Mapping[str, Json]) -> Iterator[str]:
        """gpt-oss: messages on its channels. The prompt ends within the first header."""
        start, channel, message = map(self._text, ("<|start|>", "<|channel|>", "<|message|>"))
        json_type = f'(GAP {self._text("<|constrain|>")}? "json")?'
        yield f"start: thought* ({'calls' if plan.forced else 'final | calls' if schemas else 'final'})"
        yield f'thought: {channel} ("analysis" | "commentary") {message} text {start} "assistant"'
        yield from self._until("text", "<|end|>")
        yield f'final: {channel} "final" {json_type} {message} @output'
        if schemas:
            yield "calls: " + " | ".join(f"call_{number}" for number in range(len(schemas)))
            for number, tool in enumerate(schemas):
                to = _quoted(f" to=functions.{tool}")
                yield (
                    f'call_{number}: ({to} {channel} "commentary" | {channel} "commentary" {to}) {json_type} {message} '
                    f"{'@output' if plan.calls is Calls.NAMED else f'schema_{number}'}"
                )
            yield from self._schemas(schemas)

    def _schemas(self, schemas: Mapping[str, Json]) -> Iterator[str]:
        for number, schema in enumerate(schemas.values()):
            yield f"schema_{number}: %json {json.dumps(bounded(schema, self.json_whitespace))}"

    def _until(self, rule: str, end: str) -> Iterator[str]:
        """A rule for any text and its end, which may be a token or spelt in several."""
        token = self.tokenizer.token_of(end)
        yield f"{rule}: ({rule}_spelt{'' if token is None else f' | {rule}_text <[{token}]>'}) GAP"
        yield f"{rule}_spelt[suffix={_quoted(end)}]: {_ANY}"
        if token is not None:
            yield f"{rule}_text: {_ANY}"

    def _text(self, marker: str) -> str:
        token = self.tokenizer.token_of(marker)
        return _quoted(marker) if token is None else f"(<[{token}]> | {_quoted(marker)})"


def _quoted(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- schemas that no grammar can enforce ------------------------------------------------------------------------------


async def fitted(
    fields: ChatCompletionRequest, plan: ToolPlan, prompt: ChatPrompt, service: GenerationService, repairs: Repairs
) -> tuple[ChatCompletionRequest, str]:
    """Return a chat of this task's caller with a constraint that compiles, and the frame of its output's grammar.
    Raises InvalidGrammar with the tool's name and the keyword's path where none does, Overloaded and
    UnsupportedField."""
    model = service.model

    def built(schemas: Mapping[str, Json]) -> tuple[ChatCompletionRequest, str]:
        lists = plan.forced and not plan.plain
        bound = replace(fields, structured_outputs=constraint(plan, schemas)) if lists else fields
        if not plan.framed or model.tokenizer is None:
            return bound, ""
        frames = Frames(model.format_of(tools=fields.tools), model.tokenizer, model.json_whitespace)
        return bound, frames.frame(plan, schemas, prompt.end, prompt.continued)

    chat, frame = built(plan.schemas)
    if plan.plain or not (plan.forced or (plan.framed and plan.calls is Calls.AUTO)):
        return chat, frame
    output = structured_output(chat)
    grammar = grammar_of(output and output | {"frame": frame}, model, ignore_eos=bool(fields.ignore_eos))
    if grammar is None:
        return chat, frame
    try:
        await service.grammars.check(grammar, caller.get().tenant)
    except InvalidGrammar:
        schemas: dict[str, Json] = {}
        for name, schema in plan.schemas.items():
            alone = Grammar("json_schema", msgspec.json.encode(schema).decode(), grammar.eos)
            left = await _fitted(name, alone, plan, service, repairs)
            schemas[name] = schema if left is None else left
        return built(schemas)
    return chat, frame


async def _fitted(
    name: str, schema: Grammar, plan: ToolPlan, service: GenerationService, repairs: Repairs
) -> Json | None:
    """Return one tool's schema as a grammar can enforce it; None if that is all of it."""
    tenant = caller.get().tenant
    try:
        if name in plan.exact or "schema" not in repairs.allowed:
            await service.grammars.check(schema, tenant)
            return None
        checked = await service.grammars.loosen(schema, tenant)
    except InvalidGrammar as error:
        raise InvalidGrammar(f"tools: {shown(name)!r}: {error}", "tools") from None
    if not checked.left_out:
        return None
    repairs.make("schema")
    log.info("a call of the tool %r is not bound by %s", name, ", ".join(checked.left_out))
    return msgspec.json.decode(checked.grammar.text)
