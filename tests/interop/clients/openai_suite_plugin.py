"""A pytest plugin for openai-python's own tests, loaded by `-p`. Without it they send Responses requests with no input.

Their tests of `responses.create()` without parameters speak to a mock that answers anything. Here such a request gets
an input, so that the answer of a real server is validated.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, OpenAI


def _completed(options: Any) -> Any:
    data = options.json_data
    if options.url == "/responses" and isinstance(data, dict) and "input" not in data:
        options = options.model_copy(update={"json_data": data | {"input": "This is a test."}})
    return options


def _prepared(self: OpenAI, options: Any) -> Any:
    return _completed(options)


async def _prepared_async(self: AsyncOpenAI, options: Any) -> Any:
    return _completed(options)


OpenAI._prepare_options = _prepared
AsyncOpenAI._prepare_options = _prepared_async
