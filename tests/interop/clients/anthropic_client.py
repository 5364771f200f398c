"""The anthropic package: messages, streams, tools, token counts, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from checks import Target, main, refused

MESSAGES: Any = [{"role": "user", "content": "bonfan korles dimin taras"}]
GREEDY: Any = {"extra_body": {"temperature": 0.0}}  # the package has no temperature of its own any more
WEATHER: Any = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def client(target: Target) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=target.url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


def check_message(target: Target) -> None:
    answer = client(target).messages.create(
        model=target.model, max_tokens=12, messages=MESSAGES, system="Be brief.", **GREEDY
    )
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.output_tokens <= 12
    assert answer.usage.input_tokens > 0


def check_cached_tokens_are_counted_apart(target: Target) -> None:
    long: Any = [{"role": "user", "content": "bonfan korles dimin taras " * 20}]
    fields: Any = {"model": target.model, "max_tokens": 2, "messages": long, **GREEDY}
    first = client(target).messages.create(**fields).usage
    second = client(target).messages.create(**fields).usage
    assert second.cache_read_input_tokens
    total = (first.cache_read_input_tokens or 0) + first.input_tokens
    assert second.cache_read_input_tokens + second.input_tokens == total


def check_blocks_and_turns(target: Target) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "bonfan"}, {"type": "text", "text": "korles"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "dimin"}]},
        {"role": "user", "content": "taras"},
    ]
    assert client(target).messages.create(model=target.model, max_tokens=4, messages=turns, system=system).content


def check_stream(target: Target) -> None:
    fields: Any = {"model": target.model, "max_tokens": 24, "messages": MESSAGES, **GREEDY}
    whole = client(target).messages.create(**fields)
    with client(target).messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in client(target).messages.create(stream=True, **fields)]
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta"} <= set(events)


async def check_async_at_once(target: Target) -> None:
    fields: Any = {"model": target.model, "max_tokens": 16, "messages": MESSAGES, **GREEDY}
    async with anthropic.AsyncAnthropic(
        base_url=target.url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as many:
        answers = await asyncio.gather(*(many.messages.create(**fields) for _ in range(12)))
        assert len({answer.content[0].text for answer in answers}) == 1
        async with many.messages.stream(**fields) as stream:
            assert "".join([text async for text in stream.text_stream]) == answers[0].content[0].text


def check_stop_sequence(target: Target) -> None:
    fields: Any = {"model": target.model, "max_tokens": 24, "messages": MESSAGES, **GREEDY}
    text = client(target).messages.create(**fields).content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    if not stop.strip():  # the API refuses stop sequences of white space
        stop = text[:3]
    ended = client(target).messages.create(stop_sequences=[stop], **fields)
    assert ended.stop_reason == "stop_sequence"
    assert ended.stop_sequence == stop
    assert ended.content[0].text == text[: text.index(stop)]


def check_tokens_are_counted(target: Target) -> None:
    fields: Any = {"model": target.model, "messages": MESSAGES, "system": "Be brief."}
    counted = client(target).messages.count_tokens(**fields).input_tokens
    usage = client(target).messages.create(max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def check_tool_that_is_forced(target: Target) -> None:
    answer = client(target).messages.create(
        model=target.model, max_tokens=160, messages=MESSAGES, tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"}, **GREEDY,
    )  # fmt: skip
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    assert set(call.input) == {"city", "days"}
    assert answer.stop_reason == "tool_use"


def check_tool_that_is_forced_as_a_stream(target: Target) -> None:
    with client(target).messages.stream(
        model=target.model, max_tokens=160, messages=MESSAGES, tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, **GREEDY,
    ) as stream:  # fmt: skip
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert set(call.input) == {"city", "days"}


def check_results_of_tools(target: Target) -> None:
    turns: Any = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern", "days": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
    ]
    assert client(target).messages.create(model=target.model, max_tokens=8, messages=turns, tools=[WEATHER])


def check_errors_have_their_classes(target: Target) -> None:
    with refused(anthropic.NotFoundError, "gpt-17"):
        client(target).messages.create(model="gpt-17", max_tokens=1, messages=MESSAGES)
    with refused(anthropic.BadRequestError, "temperature"):
        client(target).messages.create(
            model=target.model, max_tokens=1, messages=MESSAGES, extra_body={"temperature": -1}
        )
    with refused(anthropic.BadRequestError, "max_tokens"):
        client(target).messages.create(model=target.model, max_tokens=0, messages=MESSAGES)


def check_models(target: Target) -> None:
    assert target.model in [model.id for model in client(target).models.list()]


if __name__ == "__main__":
    main(globals())
