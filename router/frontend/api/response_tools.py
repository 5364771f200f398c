"""The tools of a Responses request as those of a chat, and a chat's calls by the names that the client knows.

A member of a namespace is offered as `NAMESPACE__NAME`, and its call comes back with both names. Tools that OpenAI runs
itself are left out, because nothing runs them here.
"""

# pyright: strict

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.errors import shown
from router.frontend.api.protocol import unsupported
from router.frontend.api.tools import Json, checked_custom, checked_function, is_hosted, is_left_out, wrong
from router.frontend.chat.repairs import Repairs

_MEMBERS = {"function": ("name", "description", "parameters", "strict"), "custom": ("name", "description", "format")}


class ResponseTools:
    """The tools of one request. `chat` has them as a chat's."""

    def __init__(self, tools: Iterable[Json], repairs: Repairs) -> None:
        """Raises InvalidRequest with the path of what is wrong."""
        self.chat: list[Json] = []
        self._origins: dict[str, tuple[str | None, str]] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        for number, tool in enumerate(tools):
            at = f"tools[{number}]"
            match tool:
                case {"type": "namespace", "name": str(namespace), "tools": [*members]}:
                    for place, member in enumerate(members):
                        self._add(f"{at}.tools[{place}]", namespace, member, repairs)
                case {"type": "namespace"}:
                    raise wrong(at, f"it is {shown(repr(tool))}; a namespace needs a name and a list of tools")
                case _:
                    self._add(at, None, tool, repairs)

    def _add(self, at: str, namespace: str | None, tool: Any, repairs: Repairs) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None  # pyright: ignore
        if is_left_out(kind, repairs):
            return
        if kind not in _MEMBERS:
            raise unsupported(f"{at}.type", kind, "send functions, custom tools and namespaces of them")
        members: Json = {member: tool[member] for member in _MEMBERS[kind] if member in tool}
        name: str = (checked_custom if kind == "custom" else checked_function)(at, members)["name"]
        if (namespace, name) in self._names:
            raise wrong(f"{at}.name", f"it is {name!r} again; each tool needs a name of its own")
        offered = joined(namespace, name)
        while offered in self._origins:
            offered += "_"
        self._origins[offered] = (namespace, name)
        self._names[namespace, name] = offered
        self.chat.append({"type": kind, kind: members | {"name": offered}})

    def name_of(self, namespace: Any, name: str) -> str:
        """Return the name in a chat of a tool that an item of the conversation names."""
        if not isinstance(namespace, str):
            namespace = None
        return self._names.get((namespace, name)) or joined(namespace, name)

    def origin_of(self, offered: str) -> tuple[str | None, str]:
        """Return the namespace, if any, and the name of a tool that was offered."""
        return self._origins.get(offered, (None, offered))

    def choice_of(self, tool_choice: Any) -> Any:
        """Return a `tool_choice` as chats have it."""
        match tool_choice:
            case {"type": "function" | "custom", "name": str(name)}:
                return _function(self.name_of(tool_choice.get("namespace"), name))
            case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
                allowed: list[Any] = [choice for one in tools for choice in self._allowed(one)]
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
            case _:
                return tool_choice

    def _allowed(self, tool: Any) -> list[Any]:
        match tool:
            case {"type": "namespace", "name": str(namespace)}:
                return [_function(offered) for offered, origin in self._origins.items() if origin[0] == namespace]
            case {"type": str(kind)} if is_hosted(kind):
                return []
            case _:
                return [self.choice_of(tool)]


def echoed(tools: Iterable[Json]) -> list[Json]:
    """Return tools as a response repeats them: with the members that the published schema wants of a function."""
    return [
        tool | {"tools": echoed(tool["tools"])}
        if tool.get("type") == "namespace"
        else {"parameters": None, "strict": False} | tool
        if tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def joined(namespace: str | None, name: str) -> str:
    """Return the name under which a model sees a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def _function(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}
