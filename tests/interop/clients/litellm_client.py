"""The litellm package, with three of its providers."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import Target, main, refused

MESSAGES: Any = [{"role": "user", "content": "bonfan korles dimin taras"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def fields(target: Target, provider: str) -> dict[str, Any]:
    base = target.url if provider == "anthropic" else f"{target.url}/v1"
    return {
        "model": f"{provider}/{target.model}", "api_base": base, "api_key": "none", "messages": MESSAGES,
        "temperature": 0.0, "max_tokens": 16, "num_retries": 0, "timeout": 60,
    }  # fmt: skip


def check_openai_provider(target: Target) -> None:
    _check_provider(target, "openai")


def check_hosted_vllm_provider(target: Target) -> None:
    _check_provider(target, "hosted_vllm")


def check_anthropic_provider(target: Target) -> None:
    _check_provider(target, "anthropic")


def _check_provider(target: Target, provider: str) -> None:
    answer: Any = litellm.completion(**fields(target, provider))
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 16
    chunks: Any = list(
        litellm.completion(stream=True, stream_options={"include_usage": True}, **fields(target, provider))
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    rebuilt: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens


async def check_async(target: Target) -> None:
    answer: Any = await litellm.acompletion(**fields(target, "openai"))
    stream: Any = await litellm.acompletion(stream=True, **fields(target, "openai"))
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content


def check_text_completion(target: Target) -> None:
    answer: Any = litellm.text_completion(
        model=f"text-completion-openai/{target.model}", api_base=f"{target.url}/v1", api_key="none",
        prompt="bonfan korles", max_tokens=8, temperature=0.0,
    )  # fmt: skip
    assert answer.choices[0].text


def check_logprobs(target: Target) -> None:
    answer: Any = litellm.completion(logprobs=True, top_logprobs=2, **fields(target, "openai"))
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def check_response(target: Target) -> None:
    answer: Any = litellm.responses(
        model=f"openai/{target.model}", api_base=f"{target.url}/v1", api_key="none", input="bonfan korles",
        max_output_tokens=8, store=False,
    )  # fmt: skip
    assert answer.output


def check_forced_tool(target: Target) -> None:
    answer: Any = litellm.completion(
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        **(fields(target, "openai") | {"max_tokens": 160}),
    )
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city"}


def check_errors_have_their_classes(target: Target) -> None:
    with refused(litellm.NotFoundError, "gpt-17"):
        litellm.completion(**(fields(target, "openai") | {"model": "openai/gpt-17"}))
    with refused(litellm.BadRequestError, "temperature"):
        litellm.completion(**(fields(target, "openai") | {"temperature": -1}))


if __name__ == "__main__":
    main(globals())
