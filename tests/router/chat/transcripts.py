"""What models of each family say, and what it comes to."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

MARK = "\ufdd0"  # stands before a special token
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}}},
    "add": {
        "properties": {
            "a": {"type": "number"}, "b": {"$ref": "#/$defs/list"}, "ok": {"type": ["boolean", "null"]},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"list": {"type": "array"}},
    },
    "get_time": {},
    "fs.read_file": {"properties": {"path": {"type": "string"}}},
}  # fmt: skip
WEATHER = ("get_weather", {"city": "Rome", "unit": "celsius"})
ADD = ("add", {"a": 3.5, "b": [1, {"c": None}], "ok": True})
TIME = ("get_time", {})


@dataclass(frozen=True)
class Transcript:
    """One output. `calls` have their arguments as values, or as the very text where that is no JSON."""

    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    prompt: str = ""  # its end


def named(call: tuple[str, Any], key: str = "arguments") -> str:
    name, arguments = call
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def plain(text: str, **more: Any) -> Transcript:
    return Transcript(text, content=text, **more)


HERMES = [
    plain("The weather is fine."),
    plain("  Spaces around, and <b>tags</b> < all > kept.\n\n"),
    Transcript(f"<tool_call>\n{named(WEATHER)}\n</tool_call>", calls=[WEATHER]),
    Transcript(f"<tool_call>{named(ADD)}</tool_call>", calls=[ADD]),
    Transcript(
        f"I'll look it up.\n\n<tool_call>\n{named(WEATHER)}\n</tool_call>\n<tool_call>\n{named(TIME)}\n</tool_call>",
        content="I'll look it up.\n",
        calls=[WEATHER, TIME],
    ),
    Transcript(f"<tool_call>\n{named(WEATHER)}\n</tool_call>\nDone.", content="\nDone.", calls=[WEATHER]),
    # The arguments come first, as Hermes 2 Pro has it.
    Transcript(
        '<tool_call>\n{"arguments": {"city": "Rome", "unit": "celsius"}, "name": "get_weather"}\n</tool_call>',
        calls=[WEATHER],
    ),
    Transcript('<tool_call>{"name": "get_time"}</tool_call>', calls=[TIME]),
    Transcript('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', calls=[TIME]),
    Transcript('<tool_call>{"name": "get_time", "arguments": {  }}</tool_call>', calls=[TIME]),
    # Arguments that are encoded twice.
    Transcript("<tool_call>" + named(("get_weather", json.dumps(WEATHER[1]))) + "</tool_call>", calls=[WEATHER]),
    Transcript('<tool_call>{"name": "add", "arguments": "three"}</tool_call>', calls=[("add", "three")]),
    # Brackets, marks and markers in strings.
    Transcript(
        "<tool_call>"
        + named(("add", {"text": 'a } ] " \\ </tool_call> <tool_call> ü 東京 🙂', "n": -1.5e-3}))
        + "</tool_call>",
        calls=[("add", {"text": 'a } ] " \\ </tool_call> <tool_call> ü 東京 🙂', "n": -1.5e-3})],
    ),
    # Two in one pair, and a last one without its end.
    Transcript(f"<tool_call>{named(WEATHER)}\n{named(TIME)}</tool_call>", calls=[WEATHER, TIME]),
    Transcript(f"<tool_call>{named(WEATHER)}", calls=[WEATHER]),
    Transcript(f"<tool_call>{named(WEATHER)}</tool_c", content="</tool_c", calls=[WEATHER]),
    # A model that names what is not there is told so by the client.
    Transcript('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', calls=[("unknown", {})]),
    # What is no call stays as it is.
    plain("<tool_call>\nget_weather(Rome)\n</tool_call>"),
    plain("<tool_call>"),
    plain('<tool_call>{"name": "get_weather'),
    plain('<tool_call>{"name": "get_weather", "arguments": '),
    plain('<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    plain('<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    plain('<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    plain('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    plain("<tool_call>{'name': 'get_time'}</tool_call>"),
    plain('<tool_call>{"name": "add", "arguments": {1: 2}}</tool_call>'),
    plain("<tool_call>{}</tool_call>"),
    plain("a <tool_cal is not b"),
    # The output was cut, or its arguments are wrong: what came of them is told.
    Transcript('<tool_call>{"name": "add", "arguments": {"a": "x', calls=[("add", '{"a": "x')]),
    Transcript(
        '<tool_call>{"name": "add", "arguments": {"a": 1 <oops>}}</tool_call>',
        content="<oops>}}</tool_call>",
        calls=[("add", '{"a": 1 ')],
    ),
    Transcript('<tool_call>{"name": "add", "arguments": {"a": True}}</tool_call>', calls=[("add", '{"a": True}')]),
    Transcript(
        '<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>',
        content="}}</tool_call>",
        calls=[("add", '{"a": [1')],
    ),
]

LLAMA = [
    plain("The weather is fine."),
    plain("Sets are written { like this } and so."),
    Transcript(named(WEATHER, "parameters"), calls=[WEATHER]),
    Transcript("\n\n" + named(ADD, "parameters") + "\n", calls=[ADD]),
    Transcript("<|python_tag|>" + named(WEATHER, "parameters"), calls=[WEATHER]),
    Transcript(named(WEATHER, "parameters") + "; " + named(TIME, "parameters"), calls=[WEATHER, TIME]),
    Transcript(
        "<|python_tag|>" + named(WEATHER, "parameters") + ";<|python_tag|>" + named(TIME), calls=[WEATHER, TIME]
    ),
    Transcript(named(WEATHER, "parameters") + "\n" + named(TIME, "arguments"), calls=[WEATHER, TIME]),
    Transcript(
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome", "unit": "celsius"}}',
        calls=[WEATHER],
    ),
    Transcript("Let me see.\n" + named(TIME, "parameters"), content="Let me see.", calls=[TIME]),
    Transcript(named(TIME, "parameters") + "; and more", content="; and more", calls=[TIME]),
    Transcript(named(TIME, "parameters") + "<|python", content="<|python", calls=[TIME]),
    # An answer in JSON is no call.
    plain('{"city": "Rome", "degrees": 20}'),
    plain('{"name": "Ada", "age": 36}'),
    plain('{"name": "Ada", "parameters": {}}'),
    plain('{"name": "get_weather", "parameters": 5'),
    plain('Call {"name": "get_time", "parameters": {}} for the time.'),
    plain("<|python_tag|>print(1)\n"),
    plain("{" * 40),
    plain('{"name"'),
    Transcript('{"name": "add", "parameters": {"a": "x', calls=[("add", '{"a": "x')]),
]

MISTRAL = [
    plain("The weather is fine."),
    plain("[TOOL_C is no marker [ ]"),
    Transcript(f"[TOOL_CALLS] [{named(WEATHER)}]", calls=[WEATHER]),
    Transcript(f"[TOOL_CALLS][{named(WEATHER)}, {named(TIME)}]", calls=[WEATHER, TIME]),
    Transcript(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}, "id": "D681PevKs"}]',
        calls=[WEATHER],
    ),
    Transcript(f"Let me see.[TOOL_CALLS][{named(TIME)}]", content="Let me see.", calls=[TIME]),
    Transcript('[TOOL_CALLS]get_weather{"city": "Rome", "unit": "celsius"}', calls=[WEATHER]),
    Transcript(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "unit": "celsius"}[TOOL_CALLS]get_time[ARGS]{}',
        calls=[WEATHER, TIME],
    ),
    Transcript('[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{"city": "Rome", "unit": "celsius"}', calls=[WEATHER]),
    Transcript("[TOOL_CALLS] get_time [ARGS] { } \n", calls=[TIME]),
    Transcript("[TOOL_CALLS]get_time{}Done.", content="Done.", calls=[TIME]),
    plain("[TOOL_CALLS]"),
    plain("[TOOL_CALLS]get_time"),
    plain("[TOOL_CALLS]get_time[ARG"),
    plain("[TOOL_CALLS]get_time[ARGS]{"),
    plain("[TOOL_CALLS]get_time(x)"),
    plain("[TOOL_CALLS]!"),
    plain("[TOOL_CALLS][]"),
    plain("[TOOL_CALLS][1, 2]"),
    plain("[TOOL_CALLS]" + "x" * 300),
    plain("[TOOL_CALLS]x" + " " * 300),
    plain('[TOOL_CALLS] [{"name": "get_time", "arg'),
    Transcript('[TOOL_CALLS]add{"a": "x', calls=[("add", '{"a": "x')]),
    Transcript(f"[TOOL_CALLS][{named(TIME)}", calls=[TIME]),
    Transcript(f"[TOOL_CALLS][{named(TIME)} oops]", content=" oops]", calls=[TIME]),
]

HARMONY = [
    Transcript("<|channel|>final<|message|>Hello.", content="Hello."),
    Transcript("<|channel|>final<|message|>Hello.<|return|>", content="Hello."),
    Transcript(
        "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
        content="Hello.",
        reasoning="The user greets.",
    ),
    Transcript(
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "unit": "celsius"}<|call|>',
        calls=[WEATHER],
        reasoning="Need the weather.",
    ),
    Transcript(
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        'json<|message|>{"city": "Rome", "unit": "celsius"}',
        calls=[WEATHER],
        reasoning="One.",
    ),
    Transcript(
        "<|channel|>commentary<|message|>I'll look.\n<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.get_time<|message|><|call|><|start|>assistant<|channel|>commentary to=functions.get_time"
        "<|message|>{}",
        content="I'll look.\n",
        calls=[TIME, TIME],
    ),
    Transcript(
        "<|channel|>analysis<|message|>One.<|end|>\n<|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 < 3 <|",
        content="2 < 3 <|",
        reasoning="One.\nTwo.",
    ),
    Transcript(" to=functions.get_time<|channel|>commentary<|message|>{}<|call|>", calls=[TIME]),
    Transcript("<|channel|>commentary to=get_time<|message|>{}", calls=[TIME]),
    Transcript("<|channel|>commentary to=functions.get_time<|message|>", calls=[TIME]),
    Transcript("<|channel|>final<|message|>One<|channel|>analysis<|message|>two", content="One", reasoning="two"),
    Transcript("<|channel|>analysis to=python<|message|>1 + 1<|call|>", reasoning="1 + 1"),
    Transcript("<|channel|>commentary to=browser.search<|message|>Rome", content="Rome"),
    plain("Hello, without any header."),
    plain("  < indented"),
    plain("<|channel|>analysis"),
    plain("<|channel|>" + "x" * 600),
    plain("to be"),
    Transcript("Hello<|end|>.", content="Hello."),
]

_FINE = "It is fine.\n"
DEEPSEEK = [
    Transcript("<think>\nHmm.\n</think>\n\nIt is fine.\n", content=_FINE, reasoning="Hmm."),
    Transcript("Hmm. 2 < 3\n</think>\n\nIt is fine.\n", content=_FINE, reasoning="Hmm. 2 < 3"),
    Transcript("\n\nHmm.\n\nWell.</think>It is fine.\n", content=_FINE, reasoning="Hmm.\n\nWell."),
    Transcript("</think>It is fine.\n", content=_FINE),
    Transcript("Hmm. </thi", reasoning="Hmm. </thi"),
    Transcript("Hmm.", reasoning="Hmm."),
    Transcript("<think>", ""),
    Transcript("<thi", reasoning="<thi"),
    Transcript("Hmm.</think>A</think>B<think>", content="A</think>B<think>", reasoning="Hmm."),
    plain("It is fine.", prompt="<｜Assistant｜></think>"),
    plain("  It is fine.", prompt="<｜Assistant｜><think>\n\n</think>\n\n"),
]
QWEN3 = [
    Transcript("<think>\nHmm.\n</think>\n\nIt is fine.\n", content=_FINE, reasoning="Hmm."),
    plain("It is fine.\n"),
    plain("\n\n It is fine.\n"),
    plain("<th is a tag"),
    plain("<thi"),
    plain(" \n"),
    plain("Write <think> and </think>."),
    Transcript("<think>Hmm.", reasoning="Hmm."),
    Transcript("<think>\n\n</think>\n\nIt is fine.\n", content=_FINE),
    Transcript("Hmm.\n</think>\n\nIt is fine.\n", content=_FINE, reasoning="Hmm.", prompt="assistant\n<think>\n"),
    plain("It is fine.\n", prompt="assistant\n<think>\n\n</think>\n\n"),
]
MAGISTRAL = [Transcript("[THINK]Hmm.[/THINK]It is fine.\n", content=_FINE, reasoning="Hmm."), plain("It is fine.\n")]
QWEN3_CALLS = [
    Transcript(
        f"<think>\nI could <tool_call> now.\n</think>\n\n<tool_call>\n{named(WEATHER)}\n</tool_call>",
        calls=[WEATHER],
        reasoning="I could <tool_call> now.",
    ),
    Transcript(
        f"Hm.</think>\n\nLook:\n<tool_call>\n{named(WEATHER)}\n</tool_call>",
        content="Look:",
        calls=[WEATHER],
        reasoning="Hm.",
        prompt="<think>\n",
    ),
]
REQUIRED = [
    Transcript(f"[{named(WEATHER, 'parameters')}]", calls=[WEATHER]),
    Transcript(f" [ {named(WEATHER, 'parameters')} ,\n{named(TIME, 'parameters')} ] ", calls=[WEATHER, TIME]),
    plain("[]x"),
    plain("I won't."),
    plain("[I won't."),
    Transcript('[{"name": "add", "parameters": {"a": [1,', calls=[("add", '{"a": [1,')]),
]
NAMED = [
    Transcript('{"city": "Rome", "unit": "celsius"}', calls=[WEATHER]),
    Transcript('\n {"city": "Rome", "unit": "celsius"}\n', calls=[WEATHER]),
    Transcript('{"city": "Ro', calls=[("get_weather", '{"city": "Ro')]),
    Transcript("{} and more", content=" and more", calls=[("get_weather", {})]),
    Transcript(""),
]


# --- calls between markers, with parameters one by one or as one JSON value -------------------------------------------

CODE = 'if a < b:\n    print("</tool_call> \\ 東京")'


def coder(call: tuple[str, dict[str, Any]]) -> str:
    """A call as Qwen3-Coder writes it: texts as they are, everything else as JSON."""
    name, arguments = call
    return f"<tool_call>\n<function={name}>\n{''.join(map(_parameter, arguments.items()))}</function>\n</tool_call>"


def _parameter(item: tuple[str, Any]) -> str:
    return f"<parameter={item[0]}>\n{shown(item[1])}\n</parameter>\n"


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


QWEN3_CODER = [
    plain("Use <function=f> or <tool_call>, a < b."),
    Transcript(f"I'll look.\n\n{coder(WEATHER)}", content="I'll look.\n", calls=[WEATHER]),
    Transcript(f"{coder(ADD)}\n{coder(TIME)}", calls=[ADD, TIME]),
    Transcript(f"{coder(WEATHER)}\n\nDone. ", content="\n\nDone. ", calls=[WEATHER]),
    # A text stays one, whatever it looks like; anything else is read as JSON, also as Python spells it.
    Transcript(coder(("get_weather", {"city": "7 "})), calls=[("get_weather", {"city": "7 "})]),
    Transcript(coder(("fs.read_file", {"path": CODE})), calls=[("fs.read_file", {"path": CODE})]),
    Transcript(coder(("add", {"text": "7", "ok": None})), calls=[("add", {"text": "7", "ok": None})]),
    Transcript(coder(("add", {"text": "null", "ok": "True", "a": "many", "b": "NaN"})),
               calls=[("add", {"text": None, "ok": True, "a": "many", "b": "NaN"})]),
    Transcript(coder(("unknown", {"x": {"y": [1]}, "z": "word"})), calls=[("unknown", {"x": {"y": [1]}, "z": "word"})]),
    # Markers that models leave out.
    Transcript(coder(WEATHER).removeprefix("<tool_call>\n"), calls=[WEATHER]),
    Transcript(coder(WEATHER).removesuffix("\n</tool_call>"), calls=[WEATHER]),
    Transcript(coder(WEATHER).replace("celsius\n</parameter>\n", "celsius\n"), calls=[WEATHER]),
    Transcript(f"<tool_call>{'<function=get_time></function>' * 2}</tool_call>", calls=[TIME, TIME]),
    # It was cut.
    Transcript("<tool_call>\n<function=get_weather>\n<parameter=city>\nRo", calls=[("get_weather", '{"city": "Ro')]),
    Transcript("<tool_call>\n<function=add>\n<parameter=a>\n1", calls=[("add", '{"a": ')]),
    plain("<tool_call>\n<function=get_w"),
]  # fmt: skip


def glm(call: tuple[str, dict[str, Any]], line: str = "\n") -> str:
    pairs = [
        f"<arg_key>{key}</arg_key>{line}<arg_value>{shown(value)}</arg_value>{line}" for key, value in call[1].items()
    ]
    return f"<tool_call>{call[0]}{line}{''.join(pairs)}</tool_call>"


GLM = [
    plain("<tool_call>, then <arg_key>"),
    Transcript(f"I'll look.\n{glm(WEATHER)}\n{glm(ADD)}", content="I'll look.", calls=[WEATHER, ADD]),
    Transcript(glm(WEATHER, ""), calls=[WEATHER]),
    Transcript(glm(TIME, ""), calls=[TIME]),
    Transcript(glm(("get_time", {" ": "x"})), calls=[("get_time", {"": "x"})]),
    Transcript(glm(("fs.read_file", {"path": f"\n{CODE}\n"})), calls=[("fs.read_file", {"path": f"\n{CODE}\n"})]),
    Transcript("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ro", calls=[("get_weather", '{"city": "Ro')]),
    Transcript(f"Hm.</think>{glm(TIME)}", reasoning="Hm.", calls=[TIME], prompt="<|assistant|><think>"),
]


def minimax(*calls: tuple[str, dict[str, Any]]) -> str:
    calls_text = ""
    for name, arguments in calls:
        pairs = [f'<parameter name="{key}">{shown(value)}</parameter>\n' for key, value in arguments.items()]
        calls_text += f'<invoke name="{name}">\n{"".join(pairs)}</invoke>\n'
    return f"<minimax:tool_call>\n{calls_text}</minimax:tool_call>"


MINIMAX = [
    plain('<minimax:tool_call> and <invoke name="f">'),
    Transcript(f"Hm.\n</think>\n\nI'll look.\n{minimax(WEATHER, ADD)}", reasoning="Hm.", content="I'll look.",
               calls=[WEATHER, ADD], prompt="ai\n<think>\n"),
    Transcript(minimax(TIME), calls=[TIME]),
    Transcript(minimax(("fs.read_file", {"path": CODE})), calls=[("fs.read_file", {"path": CODE})]),
]  # fmt: skip


def deepseek(*calls: tuple[str, dict[str, Any]], v3: bool = False) -> str:
    calls_text = ""
    for name, arguments in calls:
        value = json.dumps(arguments)
        inner = f"function<｜tool▁sep｜>{name}\n```json\n{value}\n```" if v3 else f"{name}<｜tool▁sep｜>{value}"
        calls_text += f"<｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜>" + "\n" * v3
    return f"<｜tool▁calls▁begin｜>{calls_text}<｜tool▁calls▁end｜>"


DEEPSEEK_V3 = [
    plain("It is <｜fine｜>."),
    Transcript(f"I'll look. {deepseek(WEATHER, ADD, v3=True)}", content="I'll look. ", calls=[WEATHER, ADD]),
    Transcript(deepseek(TIME, v3=True) + "Done.", content="Done.", calls=[TIME]),
    plain("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\nx"),
]
DEEPSEEK_V31 = [
    plain("It is <｜tool｜>."),
    Transcript(f"I'll look. {deepseek(WEATHER, ADD)}", content="I'll look. ", calls=[WEATHER, ADD]),
    Transcript(deepseek(("add", {"text": CODE})), calls=[("add", {"text": CODE})]),
    Transcript(deepseek(WEATHER).partition('it"')[0], calls=[("get_weather", '{"city": "Rome", "un')]),
    Transcript("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜><｜tool▁call▁end｜>", calls=[TIME]),
]


def kimi(*calls: tuple[str, dict[str, Any]]) -> str:
    entries = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(value)}<|tool_call_end|>"
        for number, (name, value) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(entries)}<|tool_calls_section_end|>"


KIMI = [
    plain("<|tool_calls|> are <|tool_call_begin|>"),
    Transcript(f"I'll look.{kimi(WEATHER, ADD)}", content="I'll look.", calls=[WEATHER, ADD]),
    Transcript(f"<think>Hm.</think>{kimi(('fs.read_file', {'path': CODE}))}", reasoning="Hm.",
               calls=[("fs.read_file", {"path": CODE})]),
]  # fmt: skip

# --- markers that are special tokens, which as other tokens are text --------------------------------------------------


HARMONY_SPECIAL = frozenset(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
)


def tokens(text: str) -> str:
    """A text whose markers are tokens, but for those with a backslash before them."""
    return re.sub(r"(?<!\\)(<\|\w+\|>)", rf"{MARK}\1", text).replace("\\<", "<")


HARMONY_TOKENS = [
    Transcript(tokens(r"<|channel|>final<|message|>It ends with \<|end|> or \<|start|>assistant."),
               content="It ends with <|end|> or <|start|>assistant."),
    Transcript(
        tokens("<|channel|>commentary to=functions.add <|constrain|>json<|message|>")
        + '{"text": "<|call|><|channel|>"}' + tokens("<|call|>"),
        calls=[("add", {"text": "<|call|><|channel|>"})],
    ),
    Transcript(
        tokens("<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>Hello."),
        content="Hello.", reasoning="Hm.",
    ),
    Transcript(
        tokens("<|channel|>analysis<|message|>Hm.<|end|>assistant")
        + tokens(" to=functions.get_time<|channel|>commentary<|message|>{}"),
        calls=[TIME], reasoning="Hm.",
    ),
    Transcript(
        tokens("<|channel|>analysis<|message|>Hm.assistant<|channel|>final<|message|>Hello."),
        content="Hello.", reasoning="Hm.",
    ),
    plain("<|channel|>final<|message|>Hello."),
]  # fmt: skip

# --- calls in reasoning that never ends -------------------------------------------------------------------------------

CALL = f"<tool_call>\n{named(WEATHER)}\n</tool_call>"
UNCLOSED = [
    Transcript(f"I need it.\n{CALL}", reasoning="I need it.", calls=[WEATHER], prompt="<think>\n"),
    Transcript(f"<think>One.\n{CALL}\n{CALL}\nTwo.", reasoning="One.", calls=[WEATHER] * 2, content="\nTwo."),
    Transcript(f"So: {CALL} {CALL} Or not.</think>No.", reasoning=f"So: {CALL} {CALL} Or not.", content="No.",
               prompt="<think>"),
    Transcript(f"So: {CALL}</think>{CALL}", reasoning=f"So: {CALL}", calls=[WEATHER], prompt="<think>"),
    Transcript('A <tool_call>{"name" and so on', reasoning='A <tool_call>{"name" and so on', prompt="<think>"),
]  # fmt: skip

# --- a tokenizer's response_template: Gemma's dialect of JSON, and lines ----------------------------------------------

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
GEMMA_TEMPLATE = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json", "transform": _NAMED,
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
    },
}  # fmt: skip
LINES_TEMPLATE = {
    "start_anchor": "model\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)", "close": "</call>", "repeats": True, "content": "kv-lines",
            "content_args": {"kv_sep": "="}, "transform": _NAMED,
        },
        "content": {},
    },
}  # fmt: skip


def gemma(call: tuple[str, dict[str, Any]]) -> str:
    return f"<|tool_call>call:{call[0]}{_lax(call[1])}<tool_call|>"


def _lax(value: Any) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{_lax(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{','.join(map(_lax, value))}]"
        case str():
            return f'<|"|>{value}<|"|>'
        case _:
            return json.dumps(value)


_DEEP = ("add", {"a": -1.5e-7, "b": [1, {"c": None, "d": [CODE]}], "ok": True, "text": "a:1,{b: <tool_call|>"})
GEMMA = [
    plain("call:f{} or <|tool_call> <|\"|>"),
    Transcript(f"I'll look.{gemma(WEATHER)}{gemma(_DEEP)}", content="I'll look.", calls=[WEATHER, _DEEP]),
    Transcript(f"<|channel>thought\nHm.<channel|>{gemma(TIME)}<|tool_response>", reasoning="Hm.", calls=[TIME]),
    Transcript("<|tool_call>call:get_time<tool_call|>Done.", content="Done.", calls=[TIME]),
    # Members and texts as JSON has them.
    Transcript(r'<|tool_call>call:add{"a" : 1, text : "b:\"\\", ok:null}<tool_call|>',
               calls=[("add", {"a": 1, "text": 'b:"\\', "ok": None})]),
    Transcript('<|tool_call>call:get_weather{city:<|"|>Ro', calls=[("get_weather", '{"city":"Ro')]),
    Transcript("<|tool_call>call:add{a:1", calls=[("add", '{"a":1')]),
]  # fmt: skip


def lines(call: tuple[str, dict[str, Any]]) -> str:
    pairs = [f"{key} = {shown(value)}\n" for key, value in call[1].items()]
    return f"<call>{call[0]}\n{''.join(pairs)}</call>"


LINES = [
    plain("<call> or a = b"),
    Transcript(f"I'll look.\n{lines(WEATHER)}{lines(ADD)}", content="I'll look.\n", calls=[WEATHER, ADD]),
    Transcript(lines(TIME) + "Done.", content="Done.", calls=[TIME]),
    Transcript("<call>get_weather city=a = b \n\n?\nunit=</call>",
               calls=[("get_weather", {"city": "a = b", "unit": ""})]),
    Transcript("<call>get_weather\ncity = Ro", calls=[("get_weather", '{"city": "Ro')]),
]  # fmt: skip
