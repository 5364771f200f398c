"""The JSON schemas of the HTTP doors' answers, for the OpenAPI document.

They say what every answer has. Further fields may come, so no schema is closed.
"""

# pyright: strict

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_IDS: Schema = {"type": "array", "items": _COUNT}


def ref(name: str) -> Schema:
    """A reference to one of `SCHEMAS`, or to a request's schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": required | (optional or {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str | bool) -> Schema:
    return {"const": value}


def _enum(*values: str) -> Schema:
    return {"enum": list(values)}


_FINISH_REASON = _enum("stop", "length", "tool_calls", "content_filter", "function_call")
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_MILLISECONDS = _or_null(_NUMBER)
_CHOICE_OF_COMPLETION = _object(
    {"index": _COUNT, "text": _TEXT, "logprobs": _or_null(ref("CompletionLogprobs")), "finish_reason": _FINISH_REASON},
    {"stop_reason": _STOP_REASON, "token_ids": _IDS, "prompt_token_ids": _IDS},
)
_CHOICE_OF_CHAT = _object(
    {
        "index": _COUNT,
        "message": ref("AssistantMessage"),
        "logprobs": _or_null(ref("ChatLogprobs")),
        "finish_reason": _FINISH_REASON,
    },
    {"stop_reason": _STOP_REASON, "token_ids": _IDS},
)
_ABOUT: Schema = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "system_fingerprint": _or_null(_TEXT)}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": {"type": ["integer", "string"]}}
            )
        }
    ),
    "AnthropicError": _object({"type": _const("error"), "error": _object({"type": _TEXT, "message": _TEXT})}),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        }
    ),
    "Metrics": _object(
        {
            "time_to_first_token_ms": _MILLISECONDS,
            "generation_time_ms": _MILLISECONDS,
            "queue_time_ms": _MILLISECONDS,
            "mean_itl_ms": _MILLISECONDS,
            "tokens_per_second": _or_null(_NUMBER),
            "hops_ms": {"type": "object", "additionalProperties": _NUMBER},
        }
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_TEXT),
            "token_logprobs": _list(_or_null(_NUMBER)),
            "top_logprobs": _or_null(_list(_or_null({"type": "object", "additionalProperties": _NUMBER}))),
            "text_offset": _IDS,
        }
    ),
    "Completion": _object(
        {
            **_ABOUT,
            "object": _const("text_completion"),
            "choices": _list(_CHOICE_OF_COMPLETION),
            "usage": ref("Usage"),
            "metrics": ref("Metrics"),
        }
    ),
    "ToolCall": _object(
        {"id": _TEXT, "type": _const("function"), "function": _object({"name": _TEXT, "arguments": _TEXT})}
    ),
    "AssistantMessage": _object(
        {"role": _const("assistant"), "content": _or_null(_TEXT)},
        {"refusal": _or_null(_TEXT), "reasoning": _or_null(_TEXT), "tool_calls": _list(ref("ToolCall"))},
    ),
    "TokenLogprob": _object({"token": _TEXT, "logprob": _NUMBER, "bytes": _or_null(_IDS)}),
    "ChatLogprobs": _object(
        {
            "content": _or_null(
                _list({"allOf": [ref("TokenLogprob"), _object({"top_logprobs": _list(ref("TokenLogprob"))})]})
            )
        }
    ),
    "ChatCompletion": _object(
        {
            **_ABOUT,
            "object": _const("chat.completion"),
            "choices": _list(_CHOICE_OF_CHAT),
            "usage": ref("Usage"),
            "metrics": ref("Metrics"),
        },
        {"prompt_token_ids": _IDS},
    ),
    "Message": _object(
        {
            "id": _TEXT,
            "type": _const("message"),
            "role": _const("assistant"),
            "model": _TEXT,
            "content": _list(_object({"type": _enum("text", "thinking", "tool_use")})),
            "stop_reason": _or_null(_enum("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal")),
            "stop_sequence": _or_null(_TEXT),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
        }
    ),
    "MessageTokensCount": _object({"input_tokens": _COUNT}),
    "Response": _object(
        {
            "id": _TEXT,
            "object": _const("response"),
            "created_at": _NUMBER,
            "status": _enum("completed", "incomplete", "in_progress", "failed", "cancelled", "queued"),
            "model": _TEXT,
            "output": _list(_object({"id": _TEXT, "type": _enum("message", "function_call", "reasoning")})),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "input_tokens_details": _object({"cached_tokens": _COUNT}),
                    "output_tokens": _COUNT,
                    "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                    "total_tokens": _COUNT,
                }
            ),
            "parallel_tool_calls": _FLAG,
            "store": _const(False),
            "metadata": {"type": "object"},
        },
        {"metrics": ref("Metrics")},
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": _const("model"),
            "created": _COUNT,
            "owned_by": _TEXT,
            "root": _TEXT,
            "parent": _or_null(_TEXT),
            "max_model_len": _COUNT,
            "permission": {"type": "array"},
        }
    ),
    "AnthropicModel": _object(
        {
            "id": _TEXT,
            "type": _const("model"),
            "display_name": _TEXT,
            "created_at": {"type": "string", "format": "date-time"},
            "lifecycle": _const("active"),
            "max_input_tokens": _COUNT,
            "max_tokens": _COUNT,
        }
    ),
    "ModelList": _object({"object": _const("list"), "data": _list(ref("Model"))}),
    "AnthropicModelList": _object(
        {"data": _list(ref("AnthropicModel")), "has_more": _const(False), "first_id": _TEXT, "last_id": _TEXT}
    ),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _IDS,
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Version": _object({"version": _TEXT}),
    "Live": _object({"status": _const("live")}),
    "Ready": _object({"status": _const("ready")}),
}
