"""SmolLM2, real weights and a vocabulary of 49,152 tokens: exact in every shape of a cluster, bound by grammars."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.client import ChatAnswer, Client, Generated
from deploy.local import LocalCluster
from tests.support import documents, workload
from tests.support.real_weights import needs_smollm2, smollm2

pytestmark = [pytest.mark.slow, pytest.mark.native, needs_smollm2]

SHAPES = {"1P+1D": (1, 1, "always"), "colocated": (0, 1, "auto")}
OUTPUT = 24  # tokens
ROOM = {f"{pool}_bytes": "192MiB" for pool in ("store.host_cache", "prefill.kv_cache", "decode.kv_cache")}
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Mara's locker has the code 4072. What is the code of Mara's locker?",
    "Write a haiku about the sea, and then one about 1,000 stars.",
)


def chat(question: str) -> str:
    """The prompt of ChatML."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Chats of 10 to 30 tokens, and two of about 1,000 that begin alike."""
    tokenizer = Tokenizer.from_file(str(smollm2() / "tokenizer.json"))
    read = tokenizer.encode((documents.ROOT / "docs" / "architecture.md").read_text()).ids[:1_000]
    text = tokenizer.decode(read, skip_special_tokens=False)
    long = [f"{text}\n\nIn one sentence: {question}" for question in ("What is a page?", "What is a router?")]
    return [tokenizer.encode(chat(question)).ids for question in (*QUESTIONS, *long)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    return workload.references(smollm2(), prompts, OUTPUT)


def answers(shape: str, dtype: str, prompts: list[list[int]], folder: Path) -> list[Generated]:
    """Greedy answers of a cluster: all at once, and then again from cached pages."""
    prefill, decode, split = SHAPES[shape]
    more = {"model.dtype": dtype, "router.disaggregation": split, **ROOM}
    with LocalCluster(workload.settings(smollm2(), prefill, decode, **more), folder) as cluster:
        first = workload.ask_all(cluster.address, prompts, OUTPUT)
        again = workload.ask_all(cluster.address, prompts, OUTPUT)
    assert all(answer.usage.cached_tokens for prompt, answer in zip(prompts, again, strict=True) if len(prompt) > 900)
    if split == "always":
        assert any(answer.work.pages_fetched for answer in first)
    return [*first, *again]


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_has_the_tokens_of_transformers(
    shape: str, prompts: list[list[int]], expected: dict[tuple[int, ...], list[int]], tmp_path: Path
) -> None:
    workload.compare(smollm2(), prompts * 2, answers(shape, "float32", prompts, tmp_path), expected)


def test_bfloat16_agrees_for_the_most_part(
    prompts: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounding decides near ties, and another token is followed by others. So this is reported, and bounded loosely."""
    outputs = [answers(shape, "bfloat16", prompts, tmp_path / shape) for shape in SHAPES]
    agreed = [_agree(one.token_ids, other.token_ids) for one, other in zip(*outputs, strict=True)]
    with capsys.disabled():
        print(f"\nbfloat16, 1P+1D = colocated: {sum(agreed)} of {OUTPUT * len(agreed)} tokens before the first other")
    assert sum(agreed) > OUTPUT * len(agreed) // 4


def _agree(one: list[int], other: list[int]) -> int:
    """How many tokens are the same from the beginning on."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    more = {"model.dtype": "bfloat16", "model.tool_call_parser": "hermes", **ROOM}
    settings = workload.settings(smollm2(), 1, 1, **more)
    with (
        LocalCluster(settings, tmp_path_factory.mktemp("cluster")) as cluster,
        Client(cluster.address, http=f"http://{cluster.api_of('router')}") as one,
    ):
        yield one


def ask(client: Client, question: str, **options: Any) -> ChatAnswer:
    messages = [{"role": "user", "content": question}]
    return client.chat(messages, **{"max_completion_tokens": 120, "timeout": 120, **options}).result()


def test_chats_are_sampled_as_recommended_unless_a_client_says_otherwise(client: Client) -> None:
    question = "What is the capital of France?"
    assert all("Paris" in ask(client, question, seed=seed).content for seed in range(4))
    hot = {
        ask(client, question, seed=seed, temperature=1.5, top_p=1.0, max_completion_tokens=8).content
        for seed in range(4)
    }
    assert len(hot) > 1


CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Japan"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "country", "inhabitants"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_bind_the_output(client: Client, temperature: float) -> None:
    """At temperature 1 the model would say anything else."""
    sampling = {"temperature": temperature, "seed": 5, "top_p": 1.0}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    city = json.loads(ask(client, "Describe Paris as JSON.", response_format=form, **sampling).content)
    assert set(city) == {"name", "country", "inhabitants"}
    assert city["country"] in ("France", "Japan")
    assert 0 <= city["inhabitants"] <= 99_999_999
    date = ask(client, "When was Paris founded?", structured_outputs={"regex": r"\d{1,4} (BC|AD)"}, **sampling)
    assert re.fullmatch(r"\d{1,4} (BC|AD)", date.content)
    choice = ["Paris", "Lyon", "Tōkyō 東京 🗼"]
    answer = ask(client, "Where is the Louvre?", structured_outputs={"choice": choice}, **sampling)
    assert answer.content in choice
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_tool_call_is_a_call(client: Client, temperature: float) -> None:
    town = {"type": "string", "maxLength": 30}
    schema = {"type": "object", "properties": {"town": town}, "required": ["town"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    options = {"tools": tools, "tool_choice": "required", "temperature": temperature, "seed": 5, "top_p": 1.0}
    answer = ask(client, "What is the weather in Paris?", **options)
    assert [call.name for call in answer.tool_calls] == ["get_weather"] * len(answer.tool_calls) != []
    assert all(set(json.loads(call.arguments)) == {"town"} for call in answer.tool_calls)


def test_a_call_of_its_own_is_parsed(client: Client) -> None:
    """The model's template has no place for tools, so it learns hermes' form from the calls before."""
    messages: list[dict[str, str]] = []
    for town in ("London", "Rome", "Paris"):
        messages.append({"role": "user", "content": f"What is the weather in {town}?"})
        arguments = json.dumps({"name": "get_weather", "arguments": {"town": town}})
        messages.append({"role": "assistant", "content": f"<tool_call>\n{arguments}\n</tool_call>"})
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    answer = client.chat(messages[:-1], tools=tools, temperature=0.0, max_completion_tokens=120, timeout=120).result()
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"town": "Paris"})
    assert answer.finish_reason == "tool_calls"
