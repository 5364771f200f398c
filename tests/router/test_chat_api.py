"""Tool calls and reasoning in the chat APIs, read by the openai and anthropic packages, which check every answer."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from router.frontend.api.token_logprobs import added_texts
from router.frontend.detokenizer import MARK, TextOptions, TextStream, Tokenizer
from router.frontend.served_model import tokenized
from tests.router import model, tokenizers
from tests.router.model import EOS
from tests.router.served import Served, served, settings_for
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools:{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "[{{ message.role }}]{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
WEATHER = {"city": "Rome", "unit": "°C"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(WEATHER, ensure_ascii=False)}}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
OUTPUT = f"<think>\nHmm, the weather.\n</think>\n\nI'll look.\n{CALL}\n{TIME}<|im_end|>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
FUNCTIONS = [("get_weather", PARAMETERS), ("get_time", {"type": "object", "properties": {}})]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FUNCTIONS]
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
MESSAGES: Any = [{"role": "user", "content": "How is it in Rome?"}]


def tokenizer() -> HfTokenizer:
    result = HfTokenizer.from_str(tokenizers.byte_level().to_str())
    result.add_special_tokens(["<tool_call>", "</tool_call>", "<|im_end|>", *CHANNELS])
    result.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return result


class Client:
    """A router whose model says what a test wants."""

    def __init__(self, router: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = f"http://{router.addresses.api}"
        self._begun: dict[int, int] = {}
        self.tokens: list[int] = []
        monkeypatch.setattr(model, "token_at", self._token_at)

    def say(self, *texts: str) -> None:
        """Let the model say texts. No token is of two of them."""
        self.tokens = [token for text in texts for token in tokenizer().encode(text, add_special_tokens=False).ids]
        self._begun.clear()

    def _token_at(self, seed: int, position: int) -> int:
        """Seeds are drawn, so that every request has its own."""
        place = position - self._begun.setdefault(seed, position)
        return self.tokens[place] if place < len(self.tokens) else EOS

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", _strict_response_validation=True)

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", _strict_response_validation=True)


@contextlib.asynccontextmanager
async def saying(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, template: Any = TEMPLATE
) -> AsyncIterator[Client]:
    config = settings_for(folder)
    path = Path(config.model.path)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    tokenizer().save(str(path / "tokenizer.json"))
    async with served(config) as router:
        client = Client(router, monkeypatch)
        client.say(text)
        router.start("decode", "decode-0")
        async with client.openai() as door:

            async def ready() -> bool:
                return (await door.with_options(max_retries=0)._client.get(f"{client.url}/ready")).status_code == 200

            await eventually_async(ready)
        yield client


async def test_openais_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(tmp_path, monkeypatch, OUTPUT) as client, client.openai() as door:

        async def ask(**more: Any) -> Any:
            fields = {"model": "", "messages": MESSAGES, "tools": TOOLS} | more
            return (await door.chat.completions.create(**fields)).choices[0]

        usage = (await door.chat.completions.create(model="", messages=MESSAGES, tools=TOOLS)).usage
        thought = OUTPUT[: OUTPUT.index("</think>") + len("</think>")]
        reasoning = len(tokenizer().encode(thought, add_special_tokens=False).ids)
        assert usage.completion_tokens_details.reasoning_tokens == reasoning
        choice = await ask()
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I'll look."
        assert choice.message.reasoning == choice.message.reasoning_content == "Hmm, the weather."
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("get_weather", WEATHER), ("get_time", {})]
        assert len({call.id for call in choice.message.tool_calls}) == 2
        assert len((await ask(parallel_tool_calls=False)).message.tool_calls) == 1
        quiet = await ask(extra_body={"include_reasoning": False})
        assert not hasattr(quiet.message, "reasoning")
        cut = await ask(max_completion_tokens=len(tokenizer().encode(OUTPUT).ids) // 2)
        assert cut.finish_reason == "length"
        none = await ask(tool_choice="none", extra_body={"skip_special_tokens": False})
        assert none.message.tool_calls is None
        assert none.message.content.startswith(f"I'll look.\n{CALL}\n{TIME}<|im_end|>")
        client.say(CALL)
        assert (await ask()).message.content is None
        client.say("I write <tool", TIME.removeprefix("<tool"))  # the marker is no token
        spelt = await ask()
        assert (spelt.message.content, spelt.message.tool_calls) == (f"I write {TIME}", None)


async def test_reasoning_tokens_are_those_of_the_analysis_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TEMPLATE + "{% if false %}<|channel|>analysis{% endif %}"
    async with saying(tmp_path, monkeypatch, "", template) as client, client.openai() as door:
        client.say("Hmm, the weather.<|end|>")
        count = len(client.tokens)
        begin, end = "<|start|>assistant<|channel|>", "<|end|>"
        client.say(
            "<|channel|>analysis<|message|>",
            "Hmm, the weather.<|end|>",
            f"{begin}final<|message|>Sunny.{end}",
            "<|im_end|>",
        )
        whole: Any = await door.chat.completions.create(model="", messages=MESSAGES)
        assert (whole.choices[0].message.reasoning, whole.choices[0].message.content) == ("Hmm, the weather.", "Sunny.")
        assert whole.usage.completion_tokens_details.reasoning_tokens == count
        options: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        stream: Any = await door.chat.completions.create(model="", messages=MESSAGES, stream=True, **options)
        counts = [chunk.usage.completion_tokens_details.reasoning_tokens async for chunk in stream]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, count)


async def test_calls_count_in_reasoning_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thought = "<think>\nHmm."
    async with saying(tmp_path, monkeypatch, f"{thought}\n{TIME}<|im_end|>") as client, client.openai() as door:
        free: Any = {"model": "", "messages": MESSAGES, "tools": TOOLS}
        answer = await door.chat.completions.create(**free)
        (choice,) = answer.choices
        message: Any = choice.message
        assert (choice.finish_reason, message.reasoning, message.content) == ("tool_calls", "Hmm.", None)
        assert [call.function.name for call in message.tool_calls] == ["get_time"]
        count = len(tokenizer().encode(thought, add_special_tokens=False).ids)
        assert answer.usage.completion_tokens_details.reasoning_tokens == count
        reasoning, names, ends = "", list[str](), list[str]()
        async for chunk in await door.chat.completions.create(**free, stream=True):
            delta: Any = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning", "")
            names += [call.function.name for call in delta.tool_calls or ()]
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        assert (reasoning, names, ends) == ("Hmm.", ["get_time"], ["tool_calls"])

        async def counted() -> bool:
            page = (await door._client.get(f"{client.url}/metrics")).text
            return 'baton_request_repairs_total{kind="reasoning"} 2.0' in page

        await eventually_async(counted)
        # A limit has cut it: what was thought until then may have been a draft.
        cut = await door.chat.completions.create(**free, max_completion_tokens=len(client.tokens) - 1)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.tool_calls is None


async def test_reasoning_tokens_are_those_of_reasoning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the end of it is no token, or comes again as one."""
    async with saying(tmp_path, monkeypatch, "") as client, client.openai() as door:
        for end in (("</think>",), ("<", "/think>"), ("</", "think", ">")):
            thought = ["<think>Hmm.", *end]
            client.say(*thought)
            count = len(client.tokens)
            client.say(*thought, "I say ", "</think>", ".", "<|im_end|>")
            answer = await door.chat.completions.create(model="", messages=MESSAGES)
            assert answer.choices[0].message.content == "I say </think>."
            usage: Any = answer.usage
            assert usage.completion_tokens_details.reasoning_tokens == count


async def test_openais_chats_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(tmp_path, monkeypatch, OUTPUT) as client, client.openai() as door:
        fields: Any = {"model": "", "messages": MESSAGES, "tools": TOOLS, "stream": True}
        content, reasoning, calls, fragments, ends = "", "", list[list[str]](), 0, list[str]()
        async for chunk in await door.chat.completions.create(**fields):
            delta: Any = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", "")
            for call in delta.tool_calls or ():
                if call.id:
                    assert (call.index, call.type) == (len(calls), "function")
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
                fragments += bool(call.function.arguments)
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        assert (content, reasoning, ends) == ("I'll look.", "Hmm, the weather.", ["tool_calls"])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("get_weather", WEATHER), ("get_time", {})
        ]  # fmt: skip
        assert fragments > 3


async def test_calls_that_the_request_insists_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers here obey no grammar; `tests/processes/test_openai.py` has some that do."""
    listed = json.dumps([{"name": "get_weather", "parameters": WEATHER}, {"name": "get_time", "parameters": {}}])
    async with saying(tmp_path, monkeypatch, listed) as client, client.openai() as door:

        async def ask(choice: Any, **more: Any) -> Any:
            fields: Any = {"model": "", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice} | more
            return (await door.chat.completions.create(**fields)).choices[0]

        both = (await ask("required")).message
        assert both.content is None
        assert [call.function.name for call in both.tool_calls] == ["get_weather", "get_time"]
        assert len((await ask("required", parallel_tool_calls=False)).message.tool_calls) == 1
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
        assert len((await ask("required", response_format=form)).message.tool_calls) == 2
        client.say(json.dumps(WEATHER))
        one = await ask({"type": "function", "function": {"name": "get_weather"}})
        assert one.finish_reason == "tool_calls"
        (call,) = one.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", WEATHER)
        for choice, output in (
            ({"type": "function", "function": {"name": "get_weather"}}, json.dumps(WEATHER)),
            ("required", json.dumps([{"name": "get_weather", "parameters": WEATHER}])),
        ):
            client.say(f"<think>\nHmm.\n</think>\n\n{output}<|im_end|>")
            answer = (await ask(choice)).message
            assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("Hmm.", None, 1)
            assert json.loads(answer.tool_calls[0].function.arguments) == WEATHER
        forced: Any = {"model": "", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
        wrong = [{"type": "function", "function": {"name": "f", "parameters": {"required": [5]}}}]
        with pytest.raises(openai.BadRequestError) as error:
            await door.chat.completions.create(**forced | {"tools": wrong})
        assert error.value.param == "tools"


async def test_anthropics_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"name": name, "input_schema": schema} for name, schema in FUNCTIONS]
    async with saying(tmp_path, monkeypatch, OUTPUT) as client, client.anthropic() as door:
        fields: Any = {"model": "", "max_tokens": 500, "messages": MESSAGES, "tools": tools}
        thinks: Any = {"thinking": {"type": "enabled", "budget_tokens": 1_024}}
        message = await door.messages.create(**fields, **thinks)
        assert message.stop_reason == "tool_use"
        thought, text, weather, time = message.content
        assert (thought.type, text.type, weather.type, time.type) == ("thinking", "text", "tool_use", "tool_use")
        assert (thought.thinking, text.text) == ("Hmm, the weather.", "I'll look.")
        assert (weather.name, weather.input, time.input) == ("get_weather", WEATHER, {})
        async with door.messages.stream(**fields, **thinks) as stream:
            streamed = await stream.get_final_message()
        assert streamed.stop_reason == "tool_use"
        blocks = [block.model_dump(exclude={"id"}) for block in message.content]
        assert [
            block.model_dump(include=set(one)) for block, one in zip(streamed.content, blocks, strict=True)
        ] == blocks
        hidden = await door.messages.create(**fields, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in hidden.content] == ["text", "tool_use"]
        results = [
            *MESSAGES,
            {"role": "assistant", "content": [block.model_dump() for block in message.content]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": weather.id, "content": "20"},
                    {"type": "tool_result", "tool_use_id": time.id, "content": [{"type": "text", "text": "9:00"}]},
                ],
            },
        ]
        client.say("<think>\n\n</think>\n\nFine.")
        last = await door.messages.create(**fields | {"messages": results})
        assert (last.stop_reason, [block.text for block in last.content]) == ("end_turn", ["Fine."])
        client.say(json.dumps(WEATHER))
        forced = await door.messages.create(**fields, tool_choice={"type": "tool", "name": "get_weather"})
        assert [block.input for block in forced.content] == [WEATHER]
        client.say("")
        async with door.messages.stream(**fields) as stream:
            empty = await stream.get_final_message()
        assert [block.type for block in empty.content] == ["text"]


async def test_openais_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "name": name, "parameters": schema, "strict": False} for name, schema in FUNCTIONS]
    async with saying(tmp_path, monkeypatch, OUTPUT) as client, client.openai() as door:
        fields: Any = {"model": "", "input": "How is it in Rome?", "tools": tools}
        response = await door.responses.create(**fields)
        thought, text, weather, time = response.output
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert thought.content[0].text == "Hmm, the weather."
        assert (response.output_text, text.status) == ("I'll look.", "completed")
        assert (weather.name, json.loads(weather.arguments), time.arguments) == ("get_weather", WEATHER, "{}")
        events: Any = [event async for event in await door.responses.create(**fields, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        for one, other in zip(response.output, last.output, strict=True):
            assert one.model_dump(exclude={"id", "call_id"}) == other.model_dump(exclude={"id", "call_id"})
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == last.output
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [item.id for item in added] == [item.id for item in done]
        texts = {
            kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
            for kind in ("output_text", "reasoning_text", "function_call_arguments")
        }
        assert texts["output_text"] == "I'll look."
        assert texts["reasoning_text"] == "Hmm, the weather."
        assert texts["function_call_arguments"] == weather.arguments + "{}"
        client.say("Fine.")
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "20"} for call in (weather, time)
        ]
        history = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in response.output), *results]
        assert (await door.responses.create(**fields | {"input": history})).output_text == "Fine."
        client.say(json.dumps([{"name": "get_time", "parameters": {}}]))
        (forced,) = (await door.responses.create(**fields, tool_choice="required")).output
        assert (forced.type, forced.arguments) == ("function_call", "{}")


def test_markers_stay_and_other_special_tokens_go() -> None:
    one = Tokenizer(tokenizer())
    shown = frozenset({one.special_tokens["<tool_call>"]})
    tokens = one.encode("a<tool_call>b</tool_call><|im_end|>", special_tokens=True)
    for options, text in (
        (TextOptions(), "ab"),
        (TextOptions(shown=shown), "a<tool_call>b"),
        (TextOptions(shown=shown, marked=True), f"a{MARK}<tool_call>b"),
        (TextOptions(special_tokens=True, shown=shown), "<s>a<tool_call>b</tool_call><|im_end|>"),
    ):
        stream = TextStream(one, [], (), frozenset(), options)
        assert "".join(stream.feed([token]).text for token in tokens) + stream.flush().text == text


def test_marks_stand_before_special_tokens_alone() -> None:
    """Also where a stop string holds them back, and never in what logprobs show."""
    model_tokenizer = Tokenizer(tokenizer())
    options = TextOptions(shown=frozenset({model_tokenizer.special_tokens["<tool_call>"]}), marked=True)
    spelt = [token for text in ("<tool", "_call>") for token in model_tokenizer.encode(text, special_tokens=False)]
    tokens = [*spelt, *model_tokenizer.encode("é<tool_call>x<tool_call>", special_tokens=False)]
    for stops, text in (
        ((), f"<tool_call>é{MARK}<tool_call>x{MARK}<tool_call>"),
        (("é<tool_call>y", "l>z"), f"<tool_call>é{MARK}<tool_call>x{MARK}<tool_call>"),
        (("call>x",), f"<tool_call>é{MARK}<tool_"),
        (("<tool_call>x",), "<tool_call>é"),
    ):
        stream = TextStream(model_tokenizer, [], stops, frozenset(), options)
        pieces: list[str] = []
        for token in tokens:
            piece = stream.feed([token])
            pieces.append(piece.text)
            if piece.stopped:
                break
        else:
            pieces.append(stream.flush().text)
        assert "".join(pieces) == text
    added = added_texts(TextStream(model_tokenizer, [], (), frozenset(), options), tokens)
    assert "".join(added) == "<tool_call>é<tool_call>x<tool_call>"


PATCH = '+ "é" \\ 😀\n'
FIND = {"type": "function", "name": "find", "parameters": {}, "strict": False}
AGENTS_TOOLS: Any = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "custom", "name": "patch", "description": "Edits."},
    {"type": "namespace", "name": "docs", "description": "Docs.", "tools": [FIND]},
    {"type": "namespace", "name": "bugs", "description": "Bugs.", "tools": [FIND]},
]


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_codexs_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosted tools are left out, members of namespaces keep their names, and custom tools take a text."""
    calls = [call_of("patch", {"input": PATCH}), call_of("docs__find", {"a": 1}), call_of("bugs__find", {})]
    async with saying(tmp_path, monkeypatch, "".join(calls)) as client, client.openai() as door:
        fields: Any = {"model": "", "input": "Go.", "tools": AGENTS_TOOLS, "max_output_tokens": 200}
        response = await door.responses.create(**fields)
        patch, docs, bugs = response.output
        assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", PATCH)
        assert (docs.type, docs.namespace, docs.name) == ("function_call", "docs", "find")
        assert json.loads(docs.arguments) == {"a": 1}
        assert (bugs.namespace, bugs.name) == ("bugs", "find")
        assert [tool.type for tool in response.tools] == [tool["type"] for tool in AGENTS_TOOLS]

        events: Any = [event async for event in await door.responses.create(**fields, stream=True)]
        for one, other in zip(response.output, events[-1].response.output, strict=True):
            assert one.model_dump(exclude={"id", "call_id"}) == other.model_dump(exclude={"id", "call_id"})
        inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
        deltas = [event.delta for event in inputs if event.type.endswith("delta")]
        assert "".join(deltas) == PATCH
        assert len(deltas) > 3
        assert [event.input for event in inputs if event.type.endswith("done")] == [PATCH]

        client.say("Fine.")
        outputs = [{"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok"} for item in response.output]
        history = [*(item.model_dump(exclude_none=True) for item in response.output), *outputs]
        later = fields | {"input": [*MESSAGES, *history], "max_output_tokens": 20}
        assert (await door.responses.create(**later)).output_text == "Fine."
        choice: Any = {"type": "custom", "name": "patch"}
        client.say(json.dumps({"input": PATCH}))
        (forced,) = (await door.responses.create(**fields, tool_choice=choice)).output
        assert (forced.type, forced.input) == ("custom_tool_call", PATCH)
        members = [{"type": "namespace", "name": "bugs"}, {"type": "web_search"}]
        client.say(json.dumps([{"name": "bugs__find", "parameters": {}}]))
        choice = {"type": "allowed_tools", "mode": "required", "tools": members}
        (chosen,) = (await door.responses.create(**fields, tool_choice=choice)).output
        assert (chosen.namespace, chosen.name) == ("bugs", "find")
        # A text under a grammar in Lark is the whole output.
        lark = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}
        bound = [{"type": "custom", "name": "patch", "format": lark}]
        client.say(PATCH)
        choice = {"type": "custom", "name": "patch"}
        (forced,) = (await door.responses.create(**fields | {"tools": bound}, tool_choice=choice)).output
        assert forced.input == PATCH
        for tools, path in (
            ([{"type": "wizard"}], "tools[0].type"),
            ([{"type": "namespace", "name": "n", "tools": [FIND, {"type": "function"}]}], "tools[0].tools[1].name"),
            ([{"type": "namespace", "name": "n"}], "tools[0]"),
            ([{"type": "custom", "name": "n", "format": {"type": "odd"}}], "tools[0].format"),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await door.responses.create(**fields | {"tools": tools})
            assert error.value.param == path


async def test_custom_tools_of_chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = call_of("apply_patch", {"input": PATCH}) + call_of("get_time", {})
    async with saying(tmp_path, monkeypatch, output) as client, client.openai() as door:
        custom = {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}
        fields: Any = {"model": "", "messages": MESSAGES, "tools": [*TOOLS, custom]}
        message = (await door.chat.completions.create(**fields)).choices[0].message
        assert message.tool_calls is not None
        patch, time = message.tool_calls
        assert (patch.type, time.type) == ("custom", "function")
        assert (patch.custom.name, patch.custom.input) == ("apply_patch", PATCH)
        texts = ""
        async for chunk in await door.chat.completions.create(**fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                texts += (call.model_extra or {}).get("custom", {}).get("input", "")
        assert texts == PATCH
        client.say("Fine.")
        result = {"role": "tool", "tool_call_id": patch.id, "content": "ok"}
        later = [*MESSAGES, message.model_dump(exclude_none=True), result, {**result, "tool_call_id": time.id}]
        last = await door.chat.completions.create(**fields | {"messages": later})
        assert last.choices[0].message.content == "Fine."


async def test_anthropics_own_tools_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(tmp_path, monkeypatch, OUTPUT) as client, client.anthropic() as door:
        kinds = ("web_search_20250305", "code_execution_20250825", "bash_20250124", "tool_search_tool_bm25_20251119")
        hosted = [{"type": kind, "name": kind.rpartition("_")[0]} for kind in kinds]
        tools: Any = [hosted[0], {"name": "get_weather", "input_schema": PARAMETERS}, *hosted[1:]]
        fields: Any = {"model": "", "max_tokens": 500, "messages": MESSAGES, "tools": tools}
        message = await door.messages.create(**fields)
        assert next(block.name for block in message.content if block.type == "tool_use") == "get_weather"
        alone = await door.messages.create(**fields | {"tools": hosted})
        assert alone.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.type"):
            await door.messages.create(**fields | {"tools": [{"type": "wizard", "name": "w"}]})


async def test_a_stop_string_that_completes_after_min_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(tmp_path, monkeypatch, "abcdefg") as client, client.openai() as door:
        for least, text in ((0, "ab"), (3, "ab"), (4, "abcdefg")):
            answer = await door.completions.create(
                model="", prompt="x", max_tokens=7, stop=["cd"], extra_body={"min_tokens": least}
            )
            assert answer.choices[0].text == text


async def test_a_schema_of_anthropics_binds_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with saying(tmp_path, monkeypatch, "{}") as client, client.anthropic() as door:
        fields: Any = {"model": "", "max_tokens": 50, "messages": MESSAGES}
        form: Any = {"type": "json_schema", "schema": {"type": "no such"}}
        with pytest.raises(anthropic.BadRequestError, match="no such"):
            await door.messages.create(**fields, output_config={"format": form})
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await door.messages.create(**fields, extra_body={"mcp_servers": [{"type": "url", "url": "x"}]})


async def test_with_tools_the_prompt_and_the_parser_are_those_of_tool_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TEMPLATE}]
    prompts: list[str] = []

    def noted(texts: Any, *model: Any, **more: Any) -> Any:
        prompts.extend(texts)
        return tokenized(texts, *model, **more)

    monkeypatch.setattr("router.frontend.api.prompts.tokenized", noted)
    async with saying(tmp_path, monkeypatch, f"I'll look.{CALL}", named) as client, client.openai() as door:
        fields: Any = {"model": "", "messages": MESSAGES}
        message = (await door.chat.completions.create(**fields, tools=TOOLS)).choices[0].message
        assert (message.content, message.tool_calls[0].function.name) == ("I'll look.", "get_weather")
        assert "get_weather" in prompts[-1]
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            message = (await door.chat.completions.create(**fields, **more)).choices[0].message
            assert prompts[-1] == "[user]How is it in Rome?"
            assert not message.tool_calls
            assert message.content.startswith("I'll look.")
        named_one = await door.chat.completions.create(**fields, extra_body={"chat_template": "tool_use"})
        assert named_one.usage.prompt_tokens
        assert prompts[-1] == "<s>[user]How is it in Rome?[assistant]"
        client.say(json.dumps(WEATHER))
        forced: Any = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        message = (await door.chat.completions.create(**fields, **forced, tools=TOOLS)).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == WEATHER
        assert "get_weather" in prompts[-1]


CUT_OUTPUTS = ["I'll look, and then", f'Yes.\n{CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Ro']
CUT_OUTPUTS += ["<think>\nHmm, the weather", '<tool_call>\n{"name": "patch", "arguments": {"input": "+ a', "", CALL]


@pytest.mark.parametrize("text", CUT_OUTPUTS)
async def test_the_events_of_a_cut_response_are_the_published_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    published: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    tools = [*AGENTS_TOOLS, *({"type": "function", "name": name, "parameters": schema} for name, schema in FUNCTIONS)]
    async with saying(tmp_path, monkeypatch, text) as client, client.openai() as door:
        count = max(1, len(tokenizer().encode(text, add_special_tokens=False).ids))
        fields: Any = {"model": "", "input": "Hi", "tools": tools, "max_output_tokens": count}
        fields["extra_body"] = {"ignore_eos": True}
        events: Any = [event async for event in await door.responses.create(**fields, stream=True)]
        for event in events:
            published.validate_python(event.model_dump())
        last = events[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in last.response.output]
        assert [item.status for item in done] == ["completed"] * (len(done) - 1) + ["incomplete"]
        offered = [one for one in last.response.tools if one.type == "function"]
        members = [one for space in last.response.tools if space.type == "namespace" for one in space.tools]
        assert [one.strict for one in (*offered, *members)] == [False] * (len(FUNCTIONS) + 2)


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
async def test_a_reference_to_a_stored_item_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    async with saying(tmp_path, monkeypatch, "Fine.") as client, client.openai() as door:
        with pytest.raises(openai.BadRequestError, match="set store to false") as error:
            await door.responses.create(model="", input=[*MESSAGES, reference])
        assert error.value.param == "input[1].type"
