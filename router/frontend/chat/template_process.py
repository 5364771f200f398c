"""A process that renders chat templates, because a template is a program that came with a checkpoint or a request.

`python -m router.frontend.chat.template_process MAX_CHARACTERS` is a helper process (`off_loop`). The templates
run in jinja2's sandbox, which has no way out to Python's objects. The sandbox does not bound memory and time. This
process has a limit of memory, and `template` ends it when an answer takes too long.

The environment is the one that transformers gives a template: trimmed blocks, loop controls, `{% generation %}`, and
the functions `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.frontend.chat import repairs
from router.frontend.helper_main import serve

_MEMORY = 1 << 30  # bytes of address space
_TEMPLATES = 32  # compiled ones that are kept


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said. It renders what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """What a template may assign to: no names that begin with an underscore, which are Python's own."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *mappings = args
        attributes = dict(*mappings, **named)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


class _RaisedByTemplate(jinja2.TemplateError):
    """The template refuses the messages."""


class _Refused(ValueError):
    """The same, with the reason."""


def _raise(message: object) -> None:
    raise _RaisedByTemplate(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, as transformers has it."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["dict"] = lambda *args, **named: dict(*args, **named)
    sandbox.globals["namespace"] = _Namespace
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form))
    return sandbox


@lru_cache(_TEMPLATES)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


@lru_cache(_TEMPLATES)
def takes_parts(template: str) -> bool:
    """Whether a template reads a message's content as a list of parts: it loops over `content` of something."""
    try:
        tree = environment().parse(template)
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner)
        case _:
            return False


def render(template: str, variables: dict[str, Any], most: int) -> str:
    """Render at most so many characters. Raises ValueError with the reason."""
    parts: list[str] = []
    size = 0
    try:
        for part in _compiled(template).generate(**variables):
            parts.append(part)
            size += len(part)
            if size > most:
                raise ValueError(f"it renders to more than {most} characters")
    except _RaisedByTemplate as error:
        raise _Refused(f"it refuses the messages: {error}") from None
    except MemoryError:
        raise ValueError("it takes too much memory") from None
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return "".join(parts)


def _answer(order: dict[str, Any], most: int) -> dict[str, Any]:
    variables = order["variables"]
    try:
        if not takes_parts(order["template"]):
            variables = variables | {"messages": [_plain(message) for message in variables["messages"]]}
        text, kinds = _with_effort(order["template"], variables, order.get("repairs", ()), most)
        text.encode()  # a template may make half a surrogate pair, which is no text
        return {"text": text, "repairs": kinds}
    except ValueError as error:
        return {"error": str(error)[:1_000]}
    except Exception as error:  # noqa: BLE001 a template is a program: whatever it raises, another one must go on
        return {"error": f"{type(error).__name__}: {error}"[:1_000]}


def _with_effort(template: str, variables: dict[str, Any], allowed: list[str], most: int) -> tuple[str, list[str]]:
    """Render messages as `_repaired` does. If the template refuses the effort, it is told the nearest that it takes.
    Raises ValueError."""
    try:
        return _repaired(template, variables, allowed, most)
    except _Refused as refusal:
        if "effort" not in allowed or "effort" not in str(refusal).lower():
            raise
        for effort in repairs.other_efforts(variables.get("reasoning_effort")):
            with contextlib.suppress(_Refused):
                text, kinds = _repaired(template, variables | {"reasoning_effort": effort}, allowed, most)
                return text, ["effort", *kinds]
        raise


def _repaired(template: str, variables: dict[str, Any], allowed: list[str], most: int) -> tuple[str, list[str]]:
    """Render messages, and change them if the template refuses them or shows a part of the system's alone. Return the
    kinds of changes, too. Raises ValueError."""
    messages, text, error, kinds = variables["messages"], None, None, list[str]()
    try:
        text = render(template, variables, most)
    except _Refused as refusal:
        error = refusal
    system = [one.strip() for one in repairs.system_texts(messages)]
    if text is not None and all(one in text for one in system):
        return text, []
    for kind, change in repairs.FOR_STRICT_TEMPLATES.items():
        if kind not in allowed or (text is not None and kind != "system") or (changed := change(messages)) == messages:
            continue
        messages, kinds = changed, [*kinds, kind]
        with contextlib.suppress(_Refused):
            other = render(template, variables | {"messages": messages}, most)
            if text is None or all(one in other for one in system):
                return other, kinds
    if text is None:
        assert error is not None
        changed = repairs.with_short_ids(variables["messages"])
        if "call_ids" not in allowed or changed == variables["messages"]:
            raise error
        text, kinds = _repaired(template, variables | {"messages": changed}, allowed, most)
        return text, ["call_ids", *kinds]
    return text, []  # the template shows nothing of the system's, wherever it stands


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text, for templates that know no parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "\n".join(str(part.get("text", "")) for part in content)}


def main() -> None:
    """Answer until stdin ends."""
    most = int(sys.argv[1])
    serve(lambda order: _answer(order, most), _MEMORY)


if __name__ == "__main__":
    main()
