"""The openai package against a real cluster: its own classes validate every answer."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from deploy.local import LocalCluster
from tests.support import checkpoints
from tests.support.cluster import at_rest
from tests.support.eventually import eventually

PROMPT = "bonfan korles dimin taras"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
GREEDY: Any = {"temperature": 0.0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def path(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for file in checkpoint("llama").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base(cluster), api_key="none", _strict_response_validation=True) as one:
        yield one


@pytest.fixture
def lenient(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base(cluster), api_key="none") as one:
        yield one


def base(cluster: LocalCluster) -> str:
    return f"http://{cluster.addresses.api}/v1"


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    return checkpoints.reference(path).generate(prompt, count)[0]


def test_chat(client: openai.OpenAI, path: Path, tokenizer: Tokenizer) -> None:
    rendered = tokenizer.encode(f"user {PROMPT} assistant", add_special_tokens=False).ids
    right = greedy(path, rendered, 24)
    answer: Any = client.chat.completions.create(model="", messages=MESSAGES, max_completion_tokens=24, **GREEDY)
    assert answer.choices[0].token_ids == right
    assert answer.choices[0].message.content == tokenizer.decode(right)
    assert answer.choices[0].finish_reason == "length"
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model="", messages=MESSAGES, max_completion_tokens=24, stream=True, **GREEDY
        )
    ]
    assert "".join(parts) == tokenizer.decode(right)
    assert sum(map(bool, parts)) > 1


def test_many_at_once_and_what_goes_away(cluster: LocalCluster, tokenizer: Tokenizer, path: Path) -> None:
    right = tokenizer.decode(greedy(path, tokenizer.encode(PROMPT).ids, 24))

    async def output(client: openai.AsyncOpenAI, number: int) -> str:
        stream: Any = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=24 if number % 4 else 1_500, stream=True, **GREEDY
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if number % 4 == 0 and text:
                await stream.close()
                break
        return text

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base(cluster), api_key="none") as client:
            return await asyncio.gather(*(output(client, number) for number in range(16)))

    texts = asyncio.run(asyncio.wait_for(many(), 120))
    assert {text for number, text in enumerate(texts) if number % 4} == {right}
    assert all(right.startswith(text[:5]) for text in texts)
    eventually(lambda: at_rest(cluster), what="everything freed")


WORDS = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 30, "maxItems": 40}


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"repetition_penalty": 1.3, "min_tokens": 9, "logit_bias": {"5": 2.0}},
        {"structured_outputs": {"json": WORDS, "disable_any_whitespace": True}, "repetition_penalty": 1.1},
    ],
)
def test_a_killed_decode_worker_costs_no_token(
    cluster: LocalCluster, lenient: openai.OpenAI, path: Path, rules: dict[str, Any]
) -> None:
    prompt = [5, 6, 7, 8] * 10
    fields = GREEDY | {"extra_body": GREEDY["extra_body"] | rules}

    def stream(kill: bool) -> tuple[list[int], str]:
        tokens, killed = list[int](), ""
        answer: Any = lenient.completions.create(model="", prompt=prompt, max_tokens=300, stream=True, **fields)
        for chunk in answer:
            tokens += getattr(chunk.choices[0], "token_ids", None) or []
            if len(tokens) > 20 and kill and not killed:
                killed = busy(cluster)
                cluster.kill(killed)
        return tokens, killed

    right, _ = stream(kill=False)
    assert (right == greedy(path, prompt, 300)) == (not rules)
    tokens, killed = stream(kill=True)
    assert tokens == right
    cluster.start(killed)
    cluster.wait_live([killed])


def test_stops_and_what_ended_the_output(client: openai.OpenAI, path: Path, tokenizer: Tokenizer) -> None:
    right = greedy(path, tokenizer.encode(PROMPT).ids, 24)
    text = tokenizer.decode(right)
    stop = text.split()[2]

    def ask(**more: Any) -> Any:
        fields = GREEDY | {"extra_body": GREEDY["extra_body"] | more}
        return client.completions.create(model="", prompt=PROMPT, max_tokens=24, **fields).choices[0]

    ended = ask(stop=stop)
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (text[: text.index(stop)], "stop", stop)
    assert ask(stop=stop, include_stop_str_in_output=True).text == text[: text.index(stop) + len(stop)]
    later = ask(stop=stop, min_tokens=20)
    assert len(later.token_ids) >= 20
    token = ask(stop_token_ids=[right[4]])
    assert (token.finish_reason, token.stop_reason) == ("stop", right[4])
    word = tokenizer.decode(right[6:7]).strip()
    assert right[6] in ask().token_ids
    banned = tokenizer.encode(word, add_special_tokens=False).ids
    never = ask(bad_words=[word]).token_ids
    assert all(never[at : at + len(banned)] != banned for at in range(len(never)))
    allowed = sorted(set(right[:3]))
    assert set(ask(allowed_token_ids=allowed).token_ids) <= set(allowed)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_matches_its_schema(client: openai.OpenAI, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    fields: Any = {"model": "", "messages": MESSAGES, "temperature": temperature, "seed": 3, "response_format": form}
    choice = client.chat.completions.create(max_completion_tokens=200, **fields).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    parts = client.chat.completions.create(max_completion_tokens=200, stream=True, **fields)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    without_end: Any = {"ignore_eos": True, "min_tokens": 190}  # all the same, its end is one
    ended = client.chat.completions.create(max_completion_tokens=200, extra_body=without_end, **fields).choices[0]
    assert (ended.message.content, ended.finish_reason) == (choice.message.content, "stop")
    format_: Any = {"type": "json_schema", "name": "person", "schema": PERSON}
    response = client.responses.create(
        model="", input=PROMPT, max_output_tokens=200, temperature=temperature, text={"format": format_}
    )
    jsonschema.validate(json.loads(response.output_text), PERSON)


def busy(cluster: LocalCluster) -> str:
    """The decode worker that has the one request there is."""
    status = cluster.wait_live(["decode-0", "decode-1"])
    return next(process.name for process in status.processes if process.name.startswith("decode") and process.attempts)


def test_calls_that_a_request_insists_on(client: openai.OpenAI) -> None:
    """A model with random weights calls a function if its output can be nothing else."""
    place = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    parameters = {
        "type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
        "additionalProperties": False, "$defs": {"place": place},
    }  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("go", "stay")]
    fields: Any = {"model": "", "messages": MESSAGES, "tools": tools, "temperature": 1.0, "max_completion_tokens": 400}

    def check(name: str, arguments: str) -> None:
        assert name in ("go", "stay")
        assert json.loads(arguments) in ({"at": {"x": 1}}, {"at": {"x": 2}})

    for choice, names in (("required", {"go", "stay"}), ({"type": "function", "function": {"name": "go"}}, {"go"})):
        one: Any = client.chat.completions.create(**fields, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        (call,) = one.message.tool_calls
        assert call.function.name in names
        check(call.function.name, call.function.arguments)
        streamed: Any = client.chat.completions.create(
            **fields, tool_choice=choice, parallel_tool_calls=False, stream=True
        )
        parts = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or ()]
        check(parts[0].function.name, "".join(call.function.arguments for call in parts))
        assert len(parts) > 1  # tokens that can't be others come at once
