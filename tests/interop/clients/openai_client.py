"""The openai package: sync, async, streams, tools, JSON schema, n = 4, log-probabilities, Responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from checks import Target, main, refused
from pydantic import BaseModel

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "bonfan korles dimin"}]
GREEDY: Any = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Verdict(BaseModel):
    """What a JSON schema asks for."""

    answer: Literal["yes", "no"]
    certain: bool


def client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


def async_client(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    )


def check_models(target: Target) -> None:
    names = [model.id for model in client(target).models.list()]
    assert names[0] == target.model
    assert client(target).models.retrieve(target.model).id == target.model
    with refused(openai.NotFoundError, "gpt-17"):
        client(target).models.retrieve("gpt-17")


def check_completion_of_each_kind_of_prompt(target: Target) -> None:
    for prompt in ("bonfan korles", [5, 6, 7, 8], ["bonfan", "korles"], [[5, 6], [7, 8]]):
        form: Any = prompt
        answer = client(target).completions.create(model=target.model, prompt=form, max_tokens=8, **GREEDY)
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert len(answer.choices) == (2 if several else 1)
        assert answer.usage.completion_tokens == 8 * len(answer.choices)


def check_completion_stream(target: Target) -> None:
    fields: Any = {"model": target.model, "prompt": "bonfan korles", "max_tokens": 12, **GREEDY}
    whole = client(target).completions.create(**fields).choices[0].text
    # The package's class for completions knows no null as finish_reason, which OpenAI's own streams have.
    lenient = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    chunks = list(lenient.completions.create(stream=True, stream_options={"include_usage": True}, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole
    assert chunks[-1].usage.completion_tokens == 12


def check_chat(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=12, **GREEDY
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def check_chat_stream(target: Target) -> None:
    fields: Any = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 24, **GREEDY}
    whole = client(target).chat.completions.create(**fields).choices[0].message.content
    chunks = list(client(target).chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24


def check_chat_stream_with_the_packages_own_events(target: Target) -> None:
    # The package raises LengthFinishReasonError for an output that ends at its length, so a stop string ends this one.
    fields: Any = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 24, **GREEDY}
    text = client(target).chat.completions.create(**fields).choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    with client(target).chat.completions.stream(stop=[stop], **fields) as events:
        kinds = {event.type for event in events}
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert events.get_final_completion().choices[0].message.content == text[: text.index(stop)]


async def check_async_at_once(target: Target) -> None:
    async with async_client(target) as many:
        fields: Any = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 16, **GREEDY}
        answers = await asyncio.gather(*(many.chat.completions.create(**fields) for _ in range(12)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1


async def check_async_stream_that_is_left(target: Target) -> None:
    async with async_client(target) as one:
        fields: Any = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 300, **GREEDY}
        stream: Any = await one.chat.completions.create(stream=True, **fields)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()


def check_tool_that_is_forced(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, tools=[WEATHER], tool_choice=FORCED, max_completion_tokens=120,
        temperature=0.0,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def check_tool_that_is_required_as_a_stream(target: Target) -> None:
    name, arguments, reasons = "", "", list[Any]()
    for chunk in client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_completion_tokens=160,
        temperature=0.0, stream=True, parallel_tool_calls=False,
    ):  # fmt: skip
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "days"}
    assert reasons[-1] in ("tool_calls", "stop")


def check_tools_that_are_free_and_their_results(target: Target) -> None:
    fields: Any = {"model": target.model, "tools": [WEATHER], "max_completion_tokens": 16, "temperature": 0.0}
    assert client(target).chat.completions.create(messages=MESSAGES, tool_choice="auto", **fields).choices
    assert client(target).chat.completions.create(messages=MESSAGES, tool_choice="none", **fields).choices
    arguments = json.dumps({"city": "Bern", "days": 1})
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert client(target).chat.completions.create(messages=history, **fields).choices


def check_json_schema(target: Target) -> None:
    answer = client(target).chat.completions.parse(
        model=target.model, messages=MESSAGES, response_format=Verdict, max_completion_tokens=120, temperature=0.0
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def check_json_object(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, response_format={"type": "json_object"}, max_completion_tokens=200,
        seed=3,
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def check_four_samples(target: Target) -> None:
    def ask() -> list[str | None]:
        answer = client(target).chat.completions.create(
            model=target.model, messages=MESSAGES, max_completion_tokens=16, n=4, seed=7, temperature=1.0
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(first) == 4
    assert len(set(first)) > 1
    assert ask() == first


def check_four_samples_as_a_stream(target: Target) -> None:
    texts = [""] * 4
    for chunk in client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=16, n=4, seed=7, temperature=1.0, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    whole = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=16, n=4, seed=7, temperature=1.0
    )
    assert texts == [choice.message.content for choice in whole.choices]


def check_logprobs_of_a_chat(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=5, logprobs=True, top_logprobs=3, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.content) == 5
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(top.logprob for top in one.top_logprobs) <= 0


def check_logprobs_of_a_completion(target: Target) -> None:
    logprobs = (
        client(target)
        .completions.create(model=target.model, prompt="bonfan", max_tokens=5, logprobs=2, **GREEDY)
        .choices[0]
        .logprobs
    )
    assert len(logprobs.tokens or ()) == len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == 5


def check_logprobs_of_an_echoed_prompt(target: Target) -> None:
    lenient = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    prompt = [5, 6, 7, 8, 9]
    logprobs = (
        lenient.completions.create(
            model=target.model, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0.0
        )
        .choices[0]
        .logprobs
    )
    assert len(logprobs.token_logprobs) == len(prompt) + 1
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def check_penalties_and_bias(target: Target) -> None:
    answer = client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=8, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={"5": -100}, seed=1, user="interop", stop=["\n\n", "zzz"],
    )  # fmt: skip
    assert answer.choices


def check_response(target: Target) -> None:
    fields: Any = {"model": target.model, "input": "bonfan korles", "max_output_tokens": 16, "temperature": 0.0}
    answer = client(target).responses.create(**fields)
    assert answer.usage.output_tokens <= 16
    events: Any = list(client(target).responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text == events[-1].response.output_text


def check_response_with_a_schema(target: Target) -> None:
    answer = client(target).responses.parse(
        model=target.model, input="bonfan korles", text_format=Verdict, max_output_tokens=120, temperature=0.0
    )
    assert isinstance(answer.output_parsed, Verdict)
    with client(target).responses.stream(
        model=target.model, input="bonfan korles", text_format=Verdict, max_output_tokens=120, temperature=0.0
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def check_response_with_a_tool(target: Target) -> None:
    function = WEATHER["function"]
    answer: Any = client(target).responses.create(
        model=target.model, input="bonfan korles", max_output_tokens=120, temperature=0.0, tool_choice="required",
        tools=[{"type": "function", "strict": True, **function}],
    )  # fmt: skip
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    assert calls[0].name == "get_weather"
    assert set(json.loads(calls[0].arguments)) == {"city", "days"}


def check_errors_have_their_classes(target: Target) -> None:
    with refused(openai.NotFoundError, "gpt-17"):
        client(target).completions.create(model="gpt-17", prompt="x")
    with refused(openai.BadRequestError, "temperature"):
        client(target).completions.create(model=target.model, prompt="x", temperature=-1)
    with refused(openai.BadRequestError, "context"):
        client(target).completions.create(model=target.model, prompt=[5] * 5_000)
    with refused(openai.BadRequestError, "store"):
        client(target).responses.create(model=target.model, input="x", store=True)


def check_request_id(target: Target) -> None:
    answer = client(target).completions.with_raw_response.create(
        model=target.model, prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" in answer.parse().id


if __name__ == "__main__":
    main(globals())
