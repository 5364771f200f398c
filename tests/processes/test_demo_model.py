"""The model that comes with Baton, served by a real cluster: it remembers, ends by itself, calls tools, writes JSON."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.client import ChatAnswer, Client
from deploy.local import LocalCluster
from deploy.models import DEMO_MODEL
from tests.support import workload
from tools.demo_model import evaluate

pytestmark = pytest.mark.slow

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = workload.settings(DEMO_MODEL, 1, 1)
    with (
        LocalCluster(settings, tmp_path_factory.mktemp("cluster")) as cluster,
        Client(cluster.address, cluster.operator, http=f"http://{cluster.api_of('router')}") as one,
    ):
        yield one


def chat(client: Client, *messages: str, **options: Any) -> ChatAnswer:
    """Send messages of user and assistant in turns."""
    roles = ("user", "assistant")
    conversation = [{"role": roles[number % 2], "content": text} for number, text in enumerate(messages)]
    return client.chat(conversation, temperature=0.0, max_completion_tokens=200, timeout=60, **options).result()


def test_it_remembers_facts_told_300_tokens_before(client: Client) -> None:
    """At least 45 of 50 answers are the expected sentence; a cluster that lost pages would give none of them."""
    prompts = evaluate.prompts(TOKENIZER, 300, 50)
    streams = [client.generate(one.tokens, max_tokens=24, temperature=0.0, timeout=60) for one in prompts]
    answers = [stream.result() for stream in streams]
    right = [evaluate.right(TOKENIZER, one, answer.token_ids) for one, answer in zip(prompts, answers, strict=True)]
    assert sum(right) >= 45
    assert all(one.finish_reason == "stop" for one in answers)


def test_a_story_ends_by_itself(client: Client) -> None:
    answer = chat(client, "Tell me a story about a fox.")
    assert answer.finish_reason == "stop"
    assert answer.content.startswith("Once upon a time")
    assert "fox" in answer.content


def test_a_question_for_a_tool_is_a_call(client: Client) -> None:
    parameters = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
    function = {"name": "get_weather", "description": "Return the weather.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    (call,) = chat(client, "What is the weather in Ashford?", tools=tools).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"town": "Ashford"})


def test_json(client: Client) -> None:
    notes = "Please remember these notes. Mara works as a baker. Alwin plays the cello. Mara lives in Ashford."
    request = "Give me the job and the home of Mara as JSON."
    answer = chat(client, notes, "I will remember that.", request)
    assert json.loads(answer.content) == {"name": "Mara", "job": "baker", "home": "Ashford"}


def run(example: str, *arguments: str) -> str:
    """Return what an example prints."""
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / f"{example}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_example_of_a_long_output_runs(client: Client) -> None:
    assert run("long_output", client.address, "900").endswith("\n900 tokens\n")


def test_the_example_of_speculation_runs(client: Client) -> None:
    printed = run("speculation", client.address, client.operator)
    assert re.search(r"attempt 1: \d+ of \d+ proposals accepted, -?[\d.]+ ms saved\n$", printed)


def test_the_example_of_shared_prefixes_runs(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("Here are notes that were never told before. " * 12)
    printed = run("shared_prefixes", client.address, client.operator, str(file))
    first, second = (int(count) for count in re.findall(r"(\d+) of them cached", printed))
    assert (first, second > 100) == (0, True)
    assert second % 16, "it ends within a page"


def test_the_example_of_turns_runs(tmp_path: Path) -> None:
    pool = {"decode.kv_cache_bytes": "2MiB", "model.max_model_len": 300}  # two of the outputs have room
    settings = workload.settings(DEMO_MODEL, 0, 1, **{"router.service_quantum": {0: 32}}, **pool)
    with LocalCluster(settings, tmp_path) as cluster:
        lines = run("turns", cluster.address, cluster.operator, "12", "240").splitlines()
    assert ["240 tokens in" in line for line in lines] == 12 * [True]
    assert any("tokens, and others wait; then: " in line for line in lines)
