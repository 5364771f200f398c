"""The tools of a chat: checked, shown to the model, and which calls its output may have.

With `tool_choice` "required" or a named function, the output is constrained to JSON from its first token, so it has no
reasoning. Templates that can switch reasoning off are told so; where one begins it nevertheless, the prompt ends it.
"""

# pyright: strict

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest, shown
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.protocol import unsupported
from router.frontend.chat import text_argument
from router.frontend.chat.formats import Calls, ChatFormat
from router.frontend.chat.repairs import Repairs

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


@dataclass(frozen=True)
class ToolPlan:
    """Which calls an output may have."""

    calls: Calls = Calls.NONE
    names: tuple[str, ...] = ()
    parallel: bool = True
    constrained: bool = False  # all of the output is, so it is neither reasoning nor in the model's own format
    framed: bool = False  # the output is constrained but for reasoning and calls in the model's own format
    texts: frozenset[str] = frozenset()  # tools that take a text
    schemas: Mapping[str, Json] = field(default_factory=dict[str, Json])  # of their parameters, by the names
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
    constrained, frames = _is_constrained(fields), calls is Calls.AUTO or form.reasoning_parser is not None
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
        if constrained:
            raise wrong(
                "tool_choice", "it insists on a call beside a response_format or structured_outputs; choose one"
            )
        grammar = _lark_of(texts.get(names[0])) if calls is Calls.NAMED else None
        plan = dataclasses.replace(plan, constrained=True, framed=False, plain=grammar is not None)
        fields = replace(fields, structured_outputs=grammar or constraint(plan, plan.schemas))
    if (plan.constrained and form.reasoning_parser) or fields.reasoning_effort == "none":
        fields = replace(fields, chat_template_kwargs=switch(fields.chat_template_kwargs, on=False))
    seen = [] if calls is Calls.NONE else [tool for name, tool in tools.items() if name in names or plan.forced]
    return replace(fields, tools=seen or None), plan


def switch(variables: Mapping[str, Any] | None, *, on: bool) -> Json:
    """A template's variables with reasoning switched on or off, unless the request does so itself."""
    return dict.fromkeys(_THINKING, on) | dict(variables or {})


def wrong(field: str, reason: str) -> InvalidRequest:
    """The error for a field."""
    error = InvalidRequest(f"{field}: {reason}")
    error.field = field
    return error


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
    name = text_argument.NAME
    members: Json = {"properties": {name: argument}, "required": [name], "additionalProperties": False}
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
            return Calls.NAMED, (_known(name, names, "tool_choice.function.name"),)
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
