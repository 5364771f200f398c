"""The langchain-openai package: chat, streams, batches, tools, structured output, completions, Responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
from checks import Target, main, refused
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

MESSAGES: Any = [SystemMessage("Be brief."), HumanMessage("bonfan korles dimin taras")]


class Verdict(BaseModel):
    """A verdict."""

    answer: Literal["yes", "no"]
    certain: bool


@tool
def get_weather(city: Literal["Bern", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def chat(target: Target, **more: Any) -> ChatOpenAI:
    settings: Any = {"model": target.model, "base_url": f"{target.url}/v1", "api_key": "none", "temperature": 0.0}
    return ChatOpenAI(**(settings | {"max_retries": 0, "timeout": 60, "max_completion_tokens": 16} | more))


def check_invoke(target: Target) -> None:
    answer = chat(target).invoke(MESSAGES)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16


def check_stream(target: Target) -> None:
    text = "".join(str(chunk.content) for chunk in chat(target, stream_usage=True).stream(MESSAGES))
    assert text == chat(target).invoke(MESSAGES).content


def check_batch(target: Target) -> None:
    answers = chat(target).batch([MESSAGES] * 4)
    assert len({str(answer.content) for answer in answers}) == 1


async def check_async(target: Target) -> None:
    answer = await chat(target).ainvoke(MESSAGES)
    text = "".join([str(chunk.content) async for chunk in chat(target).astream(MESSAGES)])
    assert text == answer.content


def check_logprobs(target: Target) -> None:
    answer = chat(target, logprobs=True, top_logprobs=2).invoke(MESSAGES)
    assert answer.response_metadata["logprobs"]["content"]


def check_completions(target: Target) -> None:
    settings: Any = {"model": target.model, "base_url": f"{target.url}/v1", "api_key": "none", "max_tokens": 8}
    assert OpenAI(**settings, temperature=0.0, max_retries=0).invoke("bonfan korles")


def check_responses(target: Target) -> None:
    assert chat(target, use_responses_api=True).invoke(MESSAGES).content


# Strict schemas allow no further properties. A random model would go on with some until its output ends.
def check_forced_tool_and_its_result(target: Target) -> None:
    bound = chat(target, max_completion_tokens=160).bind_tools([get_weather], tool_choice="get_weather", strict=True)
    answer = bound.invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat(target).invoke([*MESSAGES, answer, result]) is not None


def check_structured_output(target: Target) -> None:
    for method in ("json_schema", "function_calling"):
        model: Any = chat(target, max_completion_tokens=160).with_structured_output(Verdict, method=method, strict=True)
        assert isinstance(model.invoke(MESSAGES), Verdict)


def check_errors_have_their_classes(target: Target) -> None:
    with refused(openai.NotFoundError, "gpt-17"):
        chat(target, model="gpt-17").invoke(MESSAGES)


if __name__ == "__main__":
    main(globals())
