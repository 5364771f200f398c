"""The pydantic-ai package, over chats, Responses and Messages: a streamed tool loop, typed output, pictures."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterable
from typing import Any

from checks import END, LOOP, PICTURE, PICTURE_URL, TOO_LONG, TYPED, VERDICT, Target, main, refused
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Verdict(BaseModel):
    """A verdict."""

    answer: str
    certain: bool


def run(command: str) -> str:
    """Run a command."""
    return "baton-42"


def look(path: str) -> BinaryContent:
    """Look at a picture."""
    return BinaryContent(base64.b64decode(PICTURE_URL.partition(",")[2]), media_type="image/png")


def agents(target: Target, **more: Any) -> list[Agent[Any, Any]]:
    openai = OpenAIProvider(base_url=f"{target.url}/v1", api_key="none")
    models: Any = (
        OpenAIResponsesModel(target.model, provider=openai),
        AnthropicModel(target.model, provider=AnthropicProvider(base_url=target.url, api_key="none")),
        OpenAIChatModel(target.model, provider=openai),
    )
    return [Agent(model, instructions="Be brief.", **more) for model in models]


async def read(_: Any, events: AsyncIterable[Any]) -> None:
    """Read a stream, so that the answer comes as one."""
    async for _event in events:
        pass


async def check_tool_loop_and_a_second_turn(target: Target) -> None:
    for agent in agents(target, tools=[run]):
        whole = await agent.run(LOOP)
        streamed = await agent.run(LOOP, event_stream_handler=read)
        assert whole.output == streamed.output == END["loop"]
        assert (await agent.run("And now?", message_history=streamed.all_messages())).output == END["loop"]


async def check_picture_in_a_result(target: Target) -> None:
    for agent in agents(target, tools=[look]):
        assert (await agent.run(PICTURE)).output == END["picture"]


async def check_typed_output(target: Target) -> None:
    for form in (ToolOutput(Verdict), NativeOutput(Verdict), PromptedOutput(Verdict)):
        for agent in (*agents(target, output_type=form), *agents(target, output_type=form, tools=[run])):
            if isinstance(form, NativeOutput) and isinstance(agent.model, AnthropicModel):
                continue  # which it has for Anthropic's own models alone
            async with agent.run_stream(TYPED) as streamed:
                assert await streamed.get_output() == Verdict(**VERDICT)
            assert (await agent.run(TYPED)).output == Verdict(**VERDICT)


async def check_prompt_beyond_the_context(target: Target) -> None:
    for agent in agents(target):
        with refused(ModelHTTPError, "maximum"):
            await agent.run(TOO_LONG)


if __name__ == "__main__":
    main(globals())
