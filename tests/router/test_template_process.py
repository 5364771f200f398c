"""Chat templates: rendered as transformers does, in a process that a hostile one neither leaves nor keeps."""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from baton.errors import InvalidRequest, ModelError
from router.frontend.api.prompts import TemplateRenderer, cut_at_mark, mark_end, normalized, rendering
from router.frontend.chat.repairs import Repairs
from router.frontend.served_model import ChatTemplate
from tests.router import tokenizers

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "Grüße, what is 2 < 3?"}]
TURNS = [
    {"role": "system", "content": "Be brief.  "},
    *USER,
    {"role": "assistant", "content": "  Yes."},
    {"role": "user", "content": "Sure?\n"},
]
CALLS = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "less", "arguments": '{"a": 2, "b": [1, "ü"]}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "true"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "less",
            "description": "Compare <numbers>.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]
SHAPES = {  # of the families of models
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "inst": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "headers": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim "
        "+ '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    ),
    "blocks": (
        "{%- if tools %}\n    {{- '# Tools\\n' }}\n    {%- for tool in tools %}\n        {{- tool | tojson }}\n"
        "    {%- endfor %}\n{%- endif %}\n{%- for message in messages %}\n"
        "    {{- message.role ~ ': ' ~ message.content }}\n"
        "{%- endfor %}\n"
    ),
    "namespace": (
        "{%- set ns = namespace(first=true, last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{{ ns.last }}{{ ns.first }}"
        "{{ messages[::-1][0].role }}"
    ),
    "macro": (
        "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{{ '|' if not loop.last }}{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tool calls": (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson(indent=2) }}){% endfor %}{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}{{ (tools or []) | length }}"
    ),
    "functions": (
        "{{ dict(a=1, b=2).items() | list }}{{ range(3) | join(',') }}{{ strftime_now('%Y') | length }}"
        "{{ messages | map(attribute='role') | list | tojson }}{{ documents is defined }}"
    ),
}


@contextlib.asynccontextmanager
async def template_renderer(most: int = 100_000) -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer(most)
    try:
        yield renderer
    finally:
        await renderer.close()


def variables(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    context = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": True}
    return context | {"messages": messages} | more


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_template_renders_as_transformers_renders_it(shape: str) -> None:
    template = SHAPES[shape]
    async with template_renderer() as renderer:
        for conversation in (USER, TURNS, CALLS):
            messages = normalized(conversation)
            for tools in (None, TOOLS):
                want = variables(messages, tools=tools)
                rest = {name: value for name, value in want.items() if name not in ("messages", "tools", "documents")}
                (right,), _ = render_jinja_template(
                    [copy.deepcopy(messages)], tools=tools, chat_template=template, **rest
                )
                assert await renderer.render(rendering(template, want)) == right


async def test_parts_stay_where_the_template_reads_parts() -> None:
    messages = normalized([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    async with template_renderer() as renderer:
        parts = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
        assert await renderer.render(rendering(parts, variables(messages))) == "<a><b>"
        assert await renderer.render(rendering("{{ messages[0].content }}", variables(messages))) == "a\nb"


@pytest.mark.parametrize("content", ["Well, ", "Well,", [{"type": "text", "text": "Well, "}]])
@pytest.mark.parametrize("shape", ["chatml", "headers"])
async def test_a_final_message_is_continued_as_transformers_does(shape: str, content: Any) -> None:
    if isinstance(content, list) and shape == "headers":
        pytest.skip("transformers renders no parts with this one")
    messages = normalized([*USER, {"role": "assistant", "content": content}])
    plain = [*USER, {"role": "assistant", "content": content if isinstance(content, str) else content[0]["text"]}]
    rest = {"bos_token": "<s>", "eos_token": "</s>"}
    (right,), _ = render_jinja_template([plain], chat_template=SHAPES[shape], continue_final_message=True, **rest)
    async with template_renderer() as renderer:
        mark_end(messages[-1])
        text = await renderer.render(rendering(SHAPES[shape], variables(messages, add_generation_prompt=False)))
        assert cut_at_mark(text) == right


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ dict.__globals__ }}{{ raise_exception.__globals__ }}",
        "{% set ns = namespace(__init__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ self.__init__.__globals__ }}{{ ('%s' | attr('format_map'))(messages) }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ undefined.attribute }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ '\\ud800' }}",  # half a surrogate pair
        "{{ " + "(" * 5_000 + " }}",
        "{% if x %}" * 200 + "{% endif %}" * 200,
        "{{ strftime_now('\\ud800') }}",
    ],
)
async def test_a_hostile_or_broken_template_gets_nothing(template: str) -> None:
    async with template_renderer() as renderer:
        try:
            assert await renderer.render(rendering(template, variables(USER))) == "", (
                "an undefined attribute may render as nothing"
            )
        except InvalidRequest as error:
            assert "chat template" in str(error)  # noqa: PT017 - either is right
        assert await renderer.render(rendering("{{ messages[0].role }}", variables(USER))) == "user"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 'a'.center(10 ** 12) }}",
        "{{ 2 ** (10 ** 10) }}",
        "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
)
async def test_a_template_that_takes_too_much_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with template_renderer() as renderer:
        assert await renderer.render(rendering("{{ messages[0].role }}", variables(USER))) == "user"
        with pytest.raises(InvalidRequest, match="chat template"):
            await renderer.render(rendering(template, variables(USER)))
        assert await renderer.render(rendering("{{ messages[0].role }}", variables(USER))) == "user"


def test_a_checkpoints_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "one"}))
    assert ChatTemplate.load(tmp_path) == ChatTemplate({"default": "one"}, {"bos_token": "<s>", "eos_token": "</s>"})
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    file.write_text(json.dumps({"chat_template": several}))
    assert ChatTemplate.load(tmp_path) == ChatTemplate({"tool_use": "two", "default": "three"}, {})
    (tmp_path / "chat_template.jinja").write_text("four")
    assert ChatTemplate.load(tmp_path) == ChatTemplate({"default": "four"}, {})
    (tmp_path / "chat_template.jinja").unlink()
    for broken in (
        "{",
        json.dumps({"chat_template": 5}),
        json.dumps({"chat_template": [{"name": "a", "template": 5}]}),
    ):
        file.write_text(broken)
        with pytest.raises(ModelError):
            ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("in_files", [False, True])
def test_the_named_template_that_transformers_chooses(tmp_path: Path, in_files: bool) -> None:
    file = PreTrainedTokenizerFast(tokenizer_object=tokenizers.byte_level())
    file.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    file.save_pretrained(str(tmp_path), save_jinja_files=in_files)
    assert (tmp_path / "additional_chat_templates").exists() == in_files
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(str(tmp_path)), ChatTemplate.load(tmp_path)
    assert ours.named == theirs.chat_template
    for tools in (None, TOOLS):
        assert ours.source(tools=bool(tools)) == theirs.get_chat_template(tools=tools)


def test_messages_that_are_none() -> None:
    for messages in ([], [{}], [{"role": 1, "content": ""}], [{"role": "user", "content": {"a": 1}}]):
        with pytest.raises(InvalidRequest):
            normalized(messages)
    with pytest.raises(InvalidRequest, match="tool_calls"):
        normalized([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "", Repairs(False))
    assert normalized(CALLS)[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": [1, "ü"]}


async def test_a_tenants_many_long_chats_delay_another_tenant_by_one_of_them() -> None:
    ended = list[str]()
    template = (
        "{% set text = namespace(all='') %}{% for message in messages %}{% set text.all = text.all ~ message.role %}"
    )
    template += "{% endfor %}{{ text.all | length }}"
    async with template_renderer() as renderer:

        async def chat(tenant: str, messages: int) -> None:
            order = rendering(template, variables([{"role": "user", "content": "x"}] * messages))
            with contextlib.suppress(InvalidRequest):  # on a slow machine it takes too long
                await renderer.render(order, tenant)
            ended.append(tenant)

        await asyncio.gather(*(chat("a", 30_000) for _ in range(5)), chat("b", 1))
    assert ended.index("b") <= 1
