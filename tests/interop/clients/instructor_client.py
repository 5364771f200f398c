"""The instructor package: typed output by each of its modes, whole and as a stream of partial objects."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import TOO_LONG, TYPED, VERDICT, Target, main, refused
from pydantic import BaseModel

MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")


class Verdict(BaseModel):
    """A verdict."""

    answer: str
    certain: bool


def client(target: Target, mode: str) -> Any:
    door = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(door, mode=instructor.Mode[mode])


def fields(target: Target, text: str) -> Any:
    return {"model": target.model, "messages": [{"role": "user", "content": text}], "max_retries": 0}


def check_typed_output(target: Target) -> None:
    for mode in MODES:
        created = client(target, mode).create(response_model=Verdict, **fields(target, TYPED))
        assert created.model_dump() == VERDICT, mode


def check_partial_objects(target: Target) -> None:
    for mode in MODES[:4]:
        *_, last = client(target, mode).create_partial(response_model=Verdict, **fields(target, TYPED))
        assert last.model_dump() == VERDICT, mode


def check_prompt_beyond_the_context(target: Target) -> None:
    with refused(Exception, "context_length_exceeded"):
        client(target, "TOOLS").create(response_model=Verdict, **fields(target, TOO_LONG))


if __name__ == "__main__":
    main(globals())
