"""What agents send and a model can't take: repaired, told of and counted, or refused by its field."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.config import REPAIRS
from router.frontend.chat.repairs import Repairs, arguments_of, with_whole_characters
from router.frontend.generation import GenerationService
from router.frontend.served_model import tokenized
from tests.router.model import CONTEXT
from tests.router.served import settings_for
from tests.router.test_api import Door, door
from tests.support.eventually import eventually_async

pytestmark = pytest.mark.slow

LENIENT = (  # as Qwen3's: it drops roles that it does not know
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = (  # as Qwen3.5's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role.') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
ALTERNATING = (  # as Mistral's
    "{% set ns = namespace(rest=messages) %}{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% set ns.rest = messages[1:] %}{% endif %}{% for m in ns.rest %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}" + LENIENT
FIRST_ALONE = (  # as gpt-oss's: it knows developers, and shows the system's first message alone
    "{% if messages[0].role in ['developer', 'system'] %}<developer>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TURN: dict[str, Any] = {"role": "assistant", "content": "Yes?"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
LINE = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=0a1b2;"


def system(text: Any, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


class Front:
    """A client that learns the text of each prompt."""

    def __init__(self, client: Door, prompts: list[str]) -> None:
        self.client = client
        self.prompts = prompts

    async def send(self, path: str, body: Any) -> tuple[int, Any, str]:
        """Return the status, the answer and the repairs that its header tells."""
        status, answer, headers = await self.client.post(f"/v1/{path}", {"max_tokens": 4} | body)
        return status, answer, headers.get("baton-repairs", "")

    async def prompt(self, path: str, body: Any) -> tuple[str, str]:
        """Return the prompt that a request becomes, and its repairs."""
        status, answer, repairs = await self.send(path, body)
        assert status == 200, answer
        return self.prompts[-1], repairs

    async def repaired(self, kind: str) -> float:
        async with self.client.http.get(f"{self.client.url}/metrics") as page:
            lines = (await page.text()).splitlines()
        (line,) = [one for one in lines if one.startswith(f'baton_request_repairs_total{{kind="{kind}"}}')]
        return float(line.split()[-1])


@contextlib.asynccontextmanager
async def front(
    folder: Path, monkeypatch: pytest.MonkeyPatch, template: str = LENIENT, **api: Any
) -> AsyncIterator[Front]:
    """A router with such settings of `api`."""
    prompts: list[str] = []

    def noted(texts: Sequence[str], *model: Any, **more: Any) -> Any:
        prompts.extend(texts)
        return tokenized(texts, *model, **more)

    def settings(folder: Path, **more: Any) -> Any:
        config = settings_for(folder, **more)
        return msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, **api))

    monkeypatch.setattr("router.frontend.api.prompts.tokenized", noted)
    monkeypatch.setattr("tests.router.test_api.settings_for", settings)
    async with door(folder, template=template) as client:
        yield Front(client, prompts)


PROMPTS = {
    LENIENT: [
        ([system("A", "developer"), USER], "<system>A<user>Hi<assistant>", "role"),
        ([system("A"), USER, system("B")], "<system>A<user>Hi<system>B<assistant>", ""),
    ],
    STRICT: [
        ([system("A", "developer"), USER], "<system>A<user>Hi<assistant>", "role"),
        ([system("A"), system("B"), USER], "<system>A\n\nB<user>Hi<assistant>", "system"),
        (
            [USER, TURN, system([{"type": "text", "text": "B"}]), USER],
            "<system>B<user>Hi<assistant>Yes?<user>Hi<assistant>",
            "system",
        ),
    ],
    FIRST_ALONE: [
        ([system("A", "developer"), USER], "<developer>A<user>Hi", ""),
        ([system("A"), system("B", "developer"), USER], "<developer>A\n\nB<user>Hi", "system"),
    ],
    ALTERNATING: [
        ([system("A"), USER, system("B"), USER], "<system>A\n\nB<user>Hi\n\nHi", "system, turns"),
        ([USER, USER], "<user>Hi\n\nHi", "turns"),
    ],
    WITHOUT_SYSTEM: [([system("A"), system("B"), USER], "<user>A\n\nB\n\nHi<assistant>", "system, system_in_user")],
    "{{ messages[0].role }}": [([USER, system("B")], "user", "")],
}


MISTRAL = (  # as Mistral's
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('One system!') }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{% if call.id is not defined or call.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[call {{ call.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[result {{ m.tool_call_id }}]{% endif %}{{ m.content }}{% endfor %}"
)


async def test_ids_of_calls_are_those_that_the_template_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chat(*ids: str) -> dict[str, Any]:
        calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]
        results = [{"role": "tool", "tool_call_id": id_, "content": "R"} for id_ in ids]
        return {"messages": [USER, TURN | {"tool_calls": calls}, *results]}

    def messages(*ids: str) -> dict[str, Any]:
        calls = [{"type": "tool_use", "id": id_, "name": "f", "input": {}} for id_ in ids]
        results = [{"type": "tool_result", "tool_use_id": id_, "content": "R"} for id_ in ids]
        return {"messages": [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]}

    def responses(*ids: str) -> dict[str, Any]:
        calls = [{"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"} for id_ in ids]
        results = [{"type": "function_call_output", "call_id": id_, "output": "R"} for id_ in ids]
        return {"input": [USER, *calls, *results]}

    async with front(tmp_path, monkeypatch, MISTRAL) as it:
        for path, body_of in (("chat/completions", chat), ("messages", messages), ("responses", responses)):
            own, no_repairs = await it.prompt(path, body_of("abcDEF123"))
            assert ("[call abcDEF123]" in own, "[result abcDEF123]" in own, no_repairs) == (True, True, "")
            first, header = await it.prompt(path, body_of("toolu_01ABC", "abcDEF123"))
            assert header == "call_ids"
            ids = re.findall(r"\[(?:call|result) ([A-Za-z0-9]{9})\]", first)
            assert ids[:2] == ids[2:]
            assert (ids[1], len(set(ids))) == ("abcDEF123", 2)
            later, _ = await it.prompt(path, body_of("toolu_01ABC", "abcDEF123", "call_2"))
            assert re.findall(r"\[call (\w+)\]", later)[:2] == ids[:2]
        late = chat("call_1")
        late["messages"].append(system("B"))
        assert (await it.prompt("chat/completions", late))[1] == "call_ids, system"
    async with front(tmp_path, monkeypatch, MISTRAL, repairs=["system"]) as it:
        status, answer, _ = await it.send("chat/completions", chat("call_1"))
        assert (status, "length 9" in answer["error"]["message"]) == (400, True)


ONE_CALL = (  # as Llama 3.1's: it asks whether a message has calls, and takes one alone
    "{% for m in messages %}{% if 'tool_calls' not in m %}<{{ m.role }}>{{ m.content }}"
    "{% elif m.tool_calls|length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% else %}<call>{{ m.content }}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
)


async def test_answers_that_clients_send_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning"))
    function: dict[str, Any] = {"name": "f", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function | {"name": name}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "bac"]
    async with front(tmp_path, monkeypatch, ONE_CALL) as it:
        for turn in (TURN | nulls, TURN | {"tool_calls": []}):
            pair = await it.prompt("chat/completions", {"messages": [USER, turn, USER]})
            assert pair == ("<user>Hi<assistant>Yes?<user>Hi", "")
        older = [USER, {"role": "assistant", "content": None, "function_call": function}, USER]
        assert await it.prompt("chat/completions", {"messages": older}) == ("<user>Hi<call>f<user>Hi", "")
        several = {"messages": [USER, TURN | {"tool_calls": calls}, *results, USER]}
        pair = await it.prompt("chat/completions", several)
        assert pair == ("<user>Hi<call>Yes?a<tool>A<call>b<tool>B<call>c<tool>C<user>Hi", "single_calls")
    async with front(tmp_path, monkeypatch, ONE_CALL, repairs=["turns"]) as it:
        status, answer, _ = await it.send("chat/completions", several)
        assert (status, "single tool-calls" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("template", PROMPTS)
async def test_the_systems_messages_reach_every_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    counts = dict.fromkeys(REPAIRS, 0)
    async with front(tmp_path, monkeypatch, template) as it:
        for messages, prompt, repairs in PROMPTS[template]:
            assert await it.prompt("chat/completions", {"messages": messages}) == (prompt, repairs)
            for kind in REPAIRS:
                counts[kind] += kind in repairs.split(", ")

        async def counted() -> bool:
            return [await it.repaired(kind) for kind in REPAIRS] == [*counts.values()]

        await eventually_async(counted)


GRADED = (  # as Qwen3.8's
    "{% set effort = reasoning_effort | default('xhigh') %}{% if effort not in ['xhigh', 'medium', 'low'] %}"
    "{{ raise_exception('Unexpected reasoning effort ' ~ effort) }}{% endif %}<{{ effort }}>" + STRICT
)


async def test_an_effort_that_the_template_refuses_is_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path, monkeypatch, GRADED) as it:
        for effort, near in (("low", "low"), ("high", "medium"), ("max", "xhigh"), ("minimal", "low"), (None, "xhigh")):
            right = (f"<{near}><user>Hi<assistant>", "" if effort in (near, None) else "effort")
            for path, body in (
                ("chat/completions", {"messages": [USER], "reasoning_effort": effort}),
                ("responses", {"input": [USER], "reasoning": {"effort": effort}}),
                ("messages", {"messages": [USER], "output_config": {"effort": effort}}),
            ):
                assert await it.prompt(path, body) == right
        late = {"messages": [USER, system("B")], "reasoning_effort": "high"}
        right = ("<medium><system>B<user>Hi<assistant>", "effort, system")
        assert await it.prompt("chat/completions", late) == right
        status, answer, _ = await it.send("chat/completions", {"messages": [USER], "reasoning_effort": "lots"})
        assert (status, "effort lots" in answer["error"]["message"]) == (400, True)
        status, answer, _ = await it.send("messages", {"messages": [USER], "output_config": {"effort": 5}})
        assert (status, "output_config.effort" in answer["error"]["message"]) == (400, True)
    async with front(tmp_path, monkeypatch, GRADED, repairs=["system"]) as it:
        status, answer, _ = await it.send("messages", {"messages": [USER], "output_config": {"effort": "high"}})
        assert (status, "effort high" in answer["error"]["message"]) == (400, True)


async def test_a_turn_that_is_a_prefix_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path, monkeypatch) as it:
        for turn, prompt in (
            (TURN | {"prefix": True}, "<user>Hi<assistant>Yes?"),
            (TURN | {"prefix": False}, "<user>Hi<assistant>Yes?<assistant>"),
            (TURN | {"prefix": True, "content": ""}, "<user>Hi<assistant><assistant>"),
            (USER | {"prefix": True}, "<user>Hi<user>Hi<assistant>"),
        ):
            assert await it.prompt("chat/completions", {"messages": [USER, turn]}) == (prompt, "")
        body = {"messages": [USER, TURN | {"prefix": True}], "add_generation_prompt": True}
        status, answer, _ = await it.send("chat/completions", body)
        assert (status, "messages[-1].prefix" in answer["error"]["message"]) == (400, True)


async def test_a_last_turn_of_the_model_is_continued_if_it_has_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    text = {"type": "text", "text": "Yes?"}
    async with front(tmp_path, monkeypatch) as it:
        for content, end in (
            ("Yes?", "<assistant>Yes?"),
            ([text], "<assistant>Yes?"),
            ("", "<assistant>"),
            ([], "<assistant>"),
            ([{"type": "redacted_thinking", "data": "x"}], "<assistant>"),
            ([{"type": "thinking", "thinking": "x"}], "<assistant><assistant>"),
            ([call], "<assistant><call>{}<assistant>"),
            ([text, call], "<assistant>Yes?<call>{}<assistant>"),
        ):
            body = {"messages": [USER, {"role": "assistant", "content": content, "id": "x"}]}
            assert await it.prompt("messages", body) == (f"<user>Hi{end}", "")


async def test_a_template_gets_the_messages_that_were_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path, monkeypatch) as it:
        body = {"messages": [USER], "chat_template_kwargs": {"messages": [5]}}
        assert await it.prompt("chat/completions", body) == ("<user>Hi<assistant>", "")


async def test_a_tools_result_that_is_an_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path, monkeypatch) as it:
        for failed, content, text in (
            (True, "no such file", "Error: no such file"),
            (True, "<tool_use_error>no such file", "<tool_use_error>no such file"),
            (True, [{"type": "text", "text": "no such file"}], "Error:\nno such file"),
            (True, None, "Error: "),
            (False, "no such file", "no such file"),
        ):
            result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": failed}
            body = {"messages": [USER, {"role": "user", "content": [result]}]}
            assert await it.prompt("messages", body) == (f"<user>Hi<tool>{text}<assistant>", "")


async def test_the_systems_messages_of_the_other_doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front(tmp_path, monkeypatch, STRICT) as it:
        right = ("<system>A\n\nB<user>Hi<assistant>", "system")
        assert await it.prompt("messages", {"system": "A", "messages": [USER, system("B")]}) == right
        body = {"instructions": "A", "input": [system("B", "developer"), USER]}
        assert await it.prompt("responses", body) == (right[0], "role, system")
        body = {"system": "A", "messages": [USER, system("B")], "max_tokens": 4, "stream": True}
        async with it.client.http.post(f"{it.client.url}/v1/messages", json=body) as streamed:
            assert streamed.headers["baton-repairs"] == "system"
        for path, body, at in (
            ("chat/completions", {"messages": [USER, system("A", "wizard")]}, "messages[1].role"),
            ("chat/completions", {"messages": [USER, system("A", "System")]}, "messages[1].role"),
            ("messages", {"messages": [USER, system("A", "wizard")]}, "messages[1].role"),
            ("responses", {"input": [USER, system("A", "wizard")]}, "input[1].role"),
        ):
            status, answer, _ = await it.send(path, body)
            assert (status, at in answer["error"]["message"]) == (400, True), answer


CUT = '{"value": '
ARGUMENTS = [
    ('{"a": 1}', {"a": 1}, ""),
    ({"a": 1}, {"a": 1}, ""),
    ("", {}, ""),
    (" ", {}, ""),
    (None, {}, ""),
    (CUT, {"INVALID_JSON": CUT}, "arguments"),
    ("[]", {"INVALID_JSON": "[]"}, "arguments"),
    ("null", {}, "arguments"),
    ("5", {"INVALID_JSON": "5"}, "arguments"),
    (5, {"INVALID_JSON": "5"}, "arguments"),
    ('"{\\"a\\": 1}"', {"a": 1}, "arguments"),
    ("[" * 2_000, {"INVALID_JSON": "[" * 2_000}, "arguments"),
    ('{"a": "\\ud83d"}', {"a": "\ufffd"}, ""),
]


@pytest.mark.parametrize(("arguments", "right", "repairs"), ARGUMENTS)
def test_arguments_are_always_an_object(arguments: Any, right: Any, repairs: str) -> None:
    noted = Repairs()
    assert arguments_of("x", arguments, noted) == right
    assert ", ".join(noted.kinds) == repairs


async def test_arguments_of_every_door_reach_the_template_as_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path, monkeypatch) as it:
        for arguments, right, repairs in (case for case in ARGUMENTS if len(str(case[0])) < 100):
            shown = f"<call>{json.dumps(right, ensure_ascii=False)}"
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
            for path, body in (
                ("chat/completions", {"messages": [*history, USER]}),
                ("responses", {"input": [USER, item, USER]}),
                ("messages", {"messages": [USER, {"role": "assistant", "content": [block]}, USER]}),
            ):
                prompt, header = await it.prompt(path, body)
                assert (shown in prompt, header) == (True, repairs), (path, arguments, prompt)


async def test_pictures_in_results_and_history_have_a_placeholder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:,"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = {"type": "text", "text": "seen"}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a page"}}

    def left_out(kind: str) -> str:
        return f"[{kind} left out: this model reads text alone]"

    def result(*parts: Any) -> Any:
        return {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
        ]}]}  # fmt: skip

    def hosted(kind: str, **more: Any) -> Any:
        return {"input": [USER, {"type": kind, "id": "x", **more}, {"role": "assistant", "content": "Yes?"}, USER]}

    async with front(tmp_path, monkeypatch) as it:
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        results = [USER, turn, {"role": "tool", "tool_call_id": "c", "content": "seen"}]
        output = {"type": "function_call_output", "call_id": "c"}
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        picture = {"type": "input_image", "image_url": "data:,"}
        search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
        hits = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
        for path, body, shown in (
            ("messages", result(text, IMAGE), ["seen\n" + left_out("image")]),
            ("messages", result({"type": "tool_reference", "tool_name": "f"}), [left_out("tool_reference")]),
            ("messages", {"messages": [USER, {"role": "assistant", "content": [search, hits, text]}, USER]},
             [left_out("server_tool_use"), left_out("web_search_tool_result"), "seen"]),
            ("chat/completions", {"messages": [
                USER, turn, {"role": "tool", "tool_call_id": "c", "content": [text, url]}
            ]}, ["seen\n" + left_out("image_url")]),
            ("chat/completions", {"messages": [USER, {"role": "assistant", "content": [url]}, USER]},
             [left_out("image_url")]),
            ("responses", {"input": [USER, item, output | {"output": [picture]}]}, [left_out("input_image")]),
            ("chat/completions", {"messages": [
                *results, system("B"), {"role": "user", "content": [text, url]}, TURN, USER,
            ]}, ["<user>seen\n" + left_out("image_url")]),
            ("responses", {"input": [
                USER, item, output | {"output": "seen"}, {"role": "user", "content": [picture]}
            ]}, ["<user>" + left_out("input_image")]),
            ("messages", {"messages": [
                {"role": "user", "content": [*result(text)["messages"][0]["content"], IMAGE]}
            ]}, ["<user>" + left_out("image")]),
            *(("responses", hosted(kind), [left_out(kind), "Yes?"]) for kind in (
                "web_search_call", "image_generation_call", "computer_call_output", "mcp_list_tools", "compaction",
                "program", "program_output",
            )),
        ):  # fmt: skip
            prompt, repairs = await it.prompt(path, body)
            assert repairs == "placeholder", prompt
            assert all(one in prompt for one in shown), prompt
        assert await it.prompt("messages", result(document)) == ("<tool>a page<assistant>", "")
        picture_of_user = {"role": "user", "content": [text, IMAGE]}
        for path, body, at in (
            ("messages", {"system": "A", "messages": [picture_of_user]}, "messages[0].content[1] is"),
            ("responses", {"instructions": "A", "input": [USER, {"role": "user", "content": [picture]}]}, "input[1]"),
            ("chat/completions", {"messages": [{"role": "user", "content": [url]}]}, "messages[0].content[0]"),
            (
                "chat/completions",
                {"messages": [*results, TURN, {"role": "user", "content": [url]}]},
                "messages[4].content[0]",
            ),
            ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ("responses", {"input": [{"type": "wizardry", "id": "x"}]}, "input[0].type"),
        ):
            status, answer, _ = await it.send(path, body)
            assert (status, at in answer["error"]["message"]) == (400, True), answer


async def test_the_line_of_telemetry_leads_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(text: str) -> Any:
        return {"type": "text", "text": text}

    async with front(tmp_path, monkeypatch) as it:
        right = ("<system>Be brief.<user>Hi<assistant>", "telemetry")
        for path, body in (
            ("messages", {"system": [block(LINE), block("Be brief.")], "messages": [USER]}),
            ("messages", {"system": f"{LINE}\nBe brief.", "messages": [USER]}),
            ("chat/completions", {"messages": [system([block(LINE), block("Be brief.")]), USER]}),
            ("chat/completions", {"messages": [system(f"{LINE}\nBe brief."), USER]}),
            ("chat/completions", {"messages": [system(LINE), system("Be brief."), USER]}),
            ("responses", {"instructions": f"{LINE}\nBe brief.", "input": [USER]}),
        ):
            assert await it.prompt(path, body) == right, body
        for messages in ([system(f"A\n{LINE}"), USER], [USER | {"content": LINE}], [USER, system(LINE)]):
            prompt, repairs = await it.prompt("chat/completions", {"messages": messages})
            assert (LINE in prompt, repairs) == (True, "")


async def test_a_limit_that_does_not_fit_is_lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"max_tokens": 200_000, "max_output_tokens": 200_000}
    async with front(tmp_path, monkeypatch) as it:
        assert await it.prompt("messages", {"messages": [USER]} | many) == ("<user>Hi<assistant>", "limit")
        assert await it.prompt("responses", {"input": "Hi"} | many) == ("<user>Hi<assistant>", "limit")
        for path, body in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "Hi"})):
            status, answer, _ = await it.send(path, body | many)
            error = answer["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is" in error["message"]
    async with front(tmp_path, monkeypatch, clamp_max_tokens=True) as it:
        for path, body in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "Hi"})):
            assert (await it.prompt(path, body | many))[1] == "limit"


async def test_a_prompt_beyond_the_context_is_told_in_words_that_clients_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tmp_path, monkeypatch, repairs=False) as it:
        for long in ("Hi, " * CONTEXT, "Hi, " * 40 * CONTEXT):
            user = USER | {"content": long}
            _, answer, _ = await it.send("messages", {"messages": [user]})
            assert answer["error"]["type"] == "invalid_request_error"
            words = answer["error"]["message"].split()
            assert words[:4] + words[5:7] + words[8:] == ["prompt", "is", "too", "long:", "tokens", ">", "maximum"]
            assert int(words[4]) > int(words[7]) == CONTEXT
            for path, body in (
                ("chat/completions", {"messages": [user]}),
                ("completions", {"prompt": long}),
                ("responses", {"input": long}),
            ):
                status, answer, _ = await it.send(path, body)
                error = answer["error"]
                code = (status, error["code"], error["type"])
                assert code == (400, "context_length_exceeded", "invalid_request_error")
                assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        _, answer, _ = await it.send("messages", {"messages": [USER], "max_tokens": 200_000})
        words = "input length and `max_tokens` exceed context limit: "
        assert answer["error"]["message"].startswith(words)
        assert " + 200000 > " in answer["error"]["message"]


async def test_half_a_surrogate_pair_is_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        r"\ud83d": "\ufffd",
        r"a\ude00b": "a\ufffdb",
        r"\uD83D\u0041": "\ufffdA",
        r"\ud83d\ude00 \\ud83d": "\N{GRINNING FACE} \\ud83d",
    }
    async with front(tmp_path, monkeypatch) as it:
        for escape, right in texts.items():
            body = b'{"messages": [{"role": "user", "content": "%b"}], "max_tokens": 4}' % escape.encode()
            for path in ("chat/completions", "messages"):
                async with it.client.http.post(f"{it.client.url}/v1/{path}", data=body) as answer:
                    assert answer.status == 200, await answer.text()
                    header = answer.headers.get("baton-repairs", "")
                assert (it.prompts[-1], header) == (
                    f"<user>{right}<assistant>",
                    "surrogate" if "\ufffd" in right else "",
                )
    assert with_whole_characters(b'"\xed\xa0\xbd"') == '"\ufffd"'.encode()


async def test_what_is_turned_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": CUT}
    search = {"type": "web_search_call", "id": "x"}
    requests: list[tuple[str, str, Any]] = [
        ("system", "messages", {"system": "A", "messages": [USER, system("B")]}),
        ("arguments", "responses", {"input": [USER, call]}),
        ("placeholder", "responses", {"input": [USER, search]}),
        ("limit", "messages", {"messages": [USER], "max_tokens": 200_000}),
    ]
    for setting, allowed in ((False, ()), (["limit", "system"], ("limit", "system")), (True, REPAIRS)):
        async with front(tmp_path, monkeypatch, STRICT, repairs=setting) as it:
            for kind, path, body in requests:
                status, _, header = await it.send(path, body)
                assert (status, header) == ((200, kind) if kind in allowed else (400, "")), (setting, kind)
            pair = await it.prompt("messages", {"system": f"{LINE}\nA", "messages": [USER]})
            assert (LINE in pair[0]) == (setting is not True)


NO_GRAMMAR: dict[str, Any] = {  # what no grammar enforces: the parameters of a tool, and what binds a call of it
    "propertyNames": ({"propertyNames": {"maxLength": 3}}, {}),
    "not": (
        {"properties": {"a": {"type": "string", "not": {"const": "x"}}}},
        {"properties": {"a": {"type": "string"}}},
    ),
    "uniqueItems": ({"properties": {"a": {"uniqueItems": True}}}, {"properties": {"a": {}}}),
    "if": ({"if": {}, "then": {"required": ["a"]}, "else": {}}, {}),
    "format": ({"properties": {"a": {"format": "uri-reference"}}}, {"properties": {"a": {}}}),
    "pattern": ({"properties": {"a": {"pattern": "(?=x)y", "minLength": 1}}}, {"properties": {"a": {"minLength": 1}}}),
    "$schema": ({"$schema": "https://example.com/own"}, {}),
    "type": ({"properties": {"a": {"type": "any"}}}, {"properties": {"a": {}}}),
    "anyOf/0/not": (
        {"properties": {"a": {"anyOf": [{"not": {}}, {"type": "string"}]}}},
        {"properties": {"a": {"anyOf": [False, {"type": "string"}]}}},
    ),
    "oneOf": (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}]},
    ),
    "patternProperties": ({"patternProperties": {"(?!x)": {}}, "additionalProperties": False}, {}),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {}),
    "$ref": ({"properties": {"a": {"$ref": "#/nowhere"}}}, {"properties": {"a": {}}}),
}
FINE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def tools_of(path: str, schema: Any, **more: Any) -> dict[str, Any]:
    """Two tools, of which one must be called: `odd`, with this schema, and `fine`."""
    two = [("fine", FINE, {}), ("odd", {"type": "object"} | schema, more)]
    match path:
        case "messages":
            tools = [{"name": name, "input_schema": schema} | rest for name, schema, rest in two]
            return {"messages": [USER], "tools": tools, "tool_choice": {"type": "any"}}
        case "responses":
            tools = [{"type": "function", "name": name, "parameters": schema} | rest for name, schema, rest in two]
            return {"input": [USER], "tools": tools, "tool_choice": "required"}
        case _:
            tools = [
                {"type": "function", "function": {"name": name, "parameters": schema} | rest}
                for name, schema, rest in two
            ]
            return {"messages": [USER], "tools": tools, "tool_choice": "required"}


@pytest.fixture
def grammars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The schemas that outputs were bound to, the last one last."""
    texts: list[Any] = []
    begun: Callable[..., Any] = GenerationService._begun

    async def noted(self: GenerationService, request: Any, *more: Any) -> Any:
        texts.append(json.loads(request.sampling.grammar.text))
        return await begun(self, request, *more)

    monkeypatch.setattr(GenerationService, "_begun", noted)
    return texts


async def test_what_no_grammar_enforces_is_left_out_of_a_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammars: list[Any]
) -> None:
    async with front(tmp_path, monkeypatch) as it:
        for number, (schema, right) in enumerate(NO_GRAMMAR.values()):
            path = ("chat/completions", "messages", "responses")[number % 3]
            assert (await it.prompt(path, tools_of(path, schema)))[1] == "schema", schema
            fine, odd = [dict(one) for one in grammars[-1]["$defs"].values()]
            assert (fine.pop("$id"), odd.pop("$id")) == ("baton://tools/0/", "baton://tools/1/")
            assert (fine, odd) == (FINE, {"type": "object"} | right)
        named = {"tool_choice": {"type": "function", "function": {"name": "odd"}}}
        body = tools_of("chat/completions", {"uniqueItems": True}) | named
        assert (await it.prompt("chat/completions", body))[1] == "schema"
        assert grammars[-1].keys() == {"type", "x-guidance"}
        assert (await it.prompt("chat/completions", tools_of("chat/completions", FINE)))[1] == ""


async def test_what_a_grammar_must_enforce_is_refused_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = {"properties": {"a": {"type": "string", "minLength": 5, "maxLength": 2}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    async with front(tmp_path, monkeypatch) as it:

        async def refused(path: str, body: Any, *words: str) -> None:
            status, answer, repairs = await it.send(path, body)
            answer_text = json.dumps(answer, ensure_ascii=False).replace('\\"', '"')
            assert (status, repairs, [one for one in words if one not in answer_text]) == (400, "", []), answer_text

        for keyword, (schema, _) in NO_GRAMMAR.items():
            for path in ("chat/completions", "messages", "responses"):
                await refused(path, tools_of(path, schema, strict=True), "'odd'", "#/", f"{keyword}: ")
            form["json_schema"] = {"name": "x", "schema": schema}
            body = {"messages": [USER], "response_format": form}
            await refused("chat/completions", body, "#/", f"{keyword}: ", "response_format")
            body = {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": schema}}}
            await refused("messages", body, "#/", f"{keyword}: ")
        await refused("messages", tools_of("messages", unmet), "'odd'", "#/properties/a: Unsatisfiable")
        wrong = {"properties": {"a": {"uniqueItems": True}}, "required": [5]}
        await refused("responses", tools_of("responses", wrong), "'odd'", "#/required: Expected string")
    async with front(tmp_path, monkeypatch, repairs=["tool"]) as it:
        await it.send("messages", tools_of("messages", FINE))
        status, answer, _ = await it.send("messages", tools_of("messages", {"not": {"type": "string"}}))
        assert (status, "#/not: " in answer["error"]["message"]) == (400, True), answer
