"""The openai-agents package, over Responses and chats: a streamed tool loop, typed output, pictures, a second turn."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from checks import END, LOOP, PICTURE, PICTURE_URL, TOO_LONG, TYPED, VERDICT, Target, main, refused
from pydantic import BaseModel

set_tracing_disabled(True)


class Verdict(BaseModel):
    """A verdict."""

    answer: str
    certain: bool


@function_tool
def run(command: str) -> str:
    """Run a command."""
    return "baton-42"


@function_tool
def look(path: str) -> Any:
    """Look at a picture."""
    return ToolOutputImage(image_url=PICTURE_URL)


def agents(target: Target, **more: Any) -> list[Any]:
    client = openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    classes: Any = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
    return [Agent(name="a", instructions="Be brief.", model=one(target.model, client), **more) for one in classes]


async def check_tool_loop_and_a_second_turn(target: Target) -> None:
    for agent in agents(target, tools=[run]):
        whole = await Runner.run(agent, LOOP)
        streamed = Runner.run_streamed(agent, LOOP)
        assert [event async for event in streamed.stream_events()]
        assert whole.final_output == streamed.final_output == END["loop"]
        history: Any = [*streamed.to_input_list(), {"role": "user", "content": "And now?"}]
        assert (await Runner.run(agent, history)).final_output == END["loop"]


async def check_picture_in_a_result(target: Target) -> None:
    assert (await Runner.run(agents(target, tools=[look])[0], PICTURE)).final_output == END["picture"]


async def check_typed_output(target: Target) -> None:
    for agent in (*agents(target, output_type=Verdict), *agents(target, output_type=Verdict, tools=[run])):
        streamed = Runner.run_streamed(agent, TYPED)
        assert [event async for event in streamed.stream_events()]
        assert (await Runner.run(agent, TYPED)).final_output == streamed.final_output == Verdict(**VERDICT)


async def check_prompt_beyond_the_context(target: Target) -> None:
    for agent in agents(target):
        with refused(openai.BadRequestError, "maximum context length"):
            await Runner.run(agent, TOO_LONG)


if __name__ == "__main__":
    main(globals())
