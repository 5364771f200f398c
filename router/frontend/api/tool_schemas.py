"""The schemas of tools that a call is constrained to, without the keywords that no grammar can enforce.

Agents send tools whose schemas say more than a grammar can: `propertyNames`, `not`, look-ahead. One of them would
refuse each turn. So such a keyword is left out of what binds the call, unless the tool is `strict`. The model sees all
of it.
"""

# pyright: strict

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidGrammar, shown
from baton.logs import RateLimitedLog
from baton.messages import Grammar
from router.frontend.api.grammar_frames import Frames
from router.frontend.api.openai_chat import ChatCompletionRequest
from router.frontend.api.prompts import ChatPrompt
from router.frontend.api.structured_outputs import structured_output
from router.frontend.api.tools import Json, ToolPlan, constraint
from router.frontend.chat.formats import Calls
from router.frontend.chat.repairs import Repairs
from router.frontend.generation import GenerationService
from router.frontend.grammar_parsing import grammar_of
from router.frontend.identity import caller

log = RateLimitedLog(logging.getLogger(__name__))  # a client can cause these lines


async def fitted(
    fields: ChatCompletionRequest, plan: ToolPlan, prompt: ChatPrompt, service: GenerationService, repairs: Repairs
) -> tuple[ChatCompletionRequest, str]:
    """Return a chat of this task's caller with a constraint that compiles, and the frame of its output's grammar.
    Raises InvalidGrammar with the tool's name and the keyword's path where none does, Overloaded and
    UnsupportedField."""
    model = service.model

    def built(schemas: Mapping[str, Json]) -> tuple[ChatCompletionRequest, str]:
        if plan.forced:
            return replace(fields, structured_outputs=constraint(plan, schemas)), ""
        if not plan.framed or model.tokenizer is None:
            return fields, ""
        frames = Frames(model.format_of(tools=fields.tools), model.tokenizer, model.json_whitespace)
        return fields, frames.frame(plan, schemas, prompt.end, prompt.continued)

    if plan.plain:
        return fields, ""
    chat, frame = built(plan.schemas)
    if not plan.forced and not (plan.framed and plan.calls is Calls.AUTO):
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
        named = InvalidGrammar(f"tools: {shown(name)!r}: {error}")
        named.field = "tools"
        raise named from None
    if not checked.left_out:
        return None
    repairs.make("schema")
    log.info("a call of the tool %r is not bound by %s", name, ", ".join(checked.left_out))
    return msgspec.json.decode(checked.grammar.text)
