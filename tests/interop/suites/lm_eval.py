"""lm-eval on two local tasks: Baton as 1P+1D, Baton colocated, and transformers in float32 must log the same samples.

One task ranks four endings by their log-likelihoods (`echo` with `logprobs`), the other generates text up to a stop
string. Neither needs the hub: a YAML file and a JSONL file each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interop import target as targets
from tests.interop.environment import Environment
from tests.interop.http import post
from tests.interop.result import Case, SuiteBroken, SuiteResult
from tests.interop.target import CONTEXT, Target

TASKS = {"endings": "multiple_choice", "continuations": "generate_until"}
SAMPLES = 40  # of each task
TOLERANCE = 1e-4  # of a log-likelihood: a sum of float32 log-probabilities, computed in another order

_ENDINGS = """\
task: endings
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
_CONTINUATIONS = """\
task: continuations
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["ba"]
  max_gen_toks: 48
  do_sample: false
  temperature: 0.0
metric_list:
  - metric: exact_match
"""


def run(target: Target, environment: Environment) -> SuiteResult:
    """Run both tasks on each of the three, and compare their logs sample by sample."""
    tasks = environment.scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    rows = _rows()
    for row in rows:
        # An ending that the model prefers, so that answers are not all wrong and flags not all false.
        text = _continued(target, row["question"])
        row["choices"][row["answer"]] = text.strip() if text.isascii() and text.strip() else row["choices"][0]
    _write_tasks(tasks, rows)
    split = _served(target, environment, tasks, "1P+1D")
    with targets.cluster(target.folder, environment.scratch / "colocated-cluster", prefill=0) as colocated:
        alone = _served(colocated, environment, tasks, "colocated")
    arguments = f"pretrained={target.folder},dtype=float32,max_length={CONTEXT}"
    right = _evaluate(environment, tasks, "transformers", "--model", "hf", "--model_args", arguments, "--device", "cpu")
    cases, notes = list[Case](), list[str]()
    for name, logs in (("1P+1D", split), ("colocated", alone)):
        for task in TASKS:
            differing, widest = compare(logs[task], right[task])
            label = f"{task}: {name} and transformers"
            if differing:
                cases.append(Case.failed(label, f"{len(differing)} of {SAMPLES} samples differ: {differing[0]}"))
            else:
                cases.append(Case(label, "passed"))
            if TASKS[task] == "multiple_choice":
                notes.append(f"{label}: log-likelihoods differ by at most {widest:.1e}.")
    for task in TASKS:
        differing, widest = compare(split[task], alone[task])
        exact = "identical to the last bit" if widest == 0 else f"log-likelihoods differ by at most {widest:.1e}"
        cases.append(
            Case.failed(f"{task}: 1P+1D and colocated", differing[0])
            if differing
            else Case(f"{task}: 1P+1D and colocated", "passed")
            if widest == 0
            else Case.failed(f"{task}: 1P+1D and colocated", exact)
        )
        notes.append(f"{task}: 1P+1D and colocated: {exact}.")
    accuracy = sum(one["acc"] for one in right["endings"]) / SAMPLES
    notes += [
        f"{SAMPLES} samples of each task; accuracy {accuracy:g}; {_greedy(right['endings'])} endings are greedy.",
        "Prompts, answers, greedy flags, texts and metrics must be equal, and log-likelihoods to the last bit between "
        f"1P+1D and colocated, to {TOLERANCE:g} with transformers.",
        "transformers multiplies matrices with torch's library and Baton with kernels of its own, which add the same "
        "float32 products in another order. A log-likelihood is a sum over a few tokens, so its last bits differ.",
    ]
    return SuiteResult(cases, notes)


def _served(target: Target, environment: Environment, tasks: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    arguments = (
        f"model={target.model},base_url={target.url}/v1/completions,tokenizer={target.folder},num_concurrent=4,"
        f"tokenizer_backend=huggingface,tokenized_requests=True,max_length={CONTEXT},max_retries=1"
    )
    return _evaluate(environment, tasks, name, "--model", "local-completions", "--model_args", arguments)


def _evaluate(environment: Environment, tasks: Path, name: str, *model: str) -> dict[str, list[dict[str, Any]]]:
    """Run both tasks and return the log of each, by sample."""
    out = environment.scratch / name
    ran = environment.run(
        environment.program("lm_eval"), *model, "--tasks", ",".join(TASKS), "--include_path", str(tasks),
        "--batch_size", "1", "--log_samples", "--output_path", str(out), "--seed", "1234",
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(environment.scratch / "hf"), OPENAI_API_KEY="none",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    logs = {task: sorted(out.rglob(f"samples_{task}_*.jsonl")) for task in TASKS}
    if ran.code or not all(logs.values()):
        raise SuiteBroken(f"lm_eval on {name} ended with {ran.code}: {ran.tail}")
    return {
        task: sorted((json.loads(line) for line in files[-1].read_text().splitlines()), key=lambda one: one["doc_id"])
        for task, files in logs.items()
    }


def compare(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> tuple[list[str], float]:
    """The samples whose logs differ, and the widest difference of two log-likelihoods."""
    differing, widest = list[str](), 0.0
    if len(ours) != len(theirs):
        return [f"{len(ours)} samples and {len(theirs)}"], widest
    for one, other in zip(ours, theirs, strict=True):
        if _fixed(one) != _fixed(other):
            differing.append(f"sample {one['doc_id']}: {_answers(one)} and {_answers(other)}")
        for mine, right in zip(_numbers(one), _numbers(other), strict=True):
            widest = max(widest, abs(mine - right))
            if abs(mine - right) > TOLERANCE:
                differing.append(f"sample {one['doc_id']}: log-likelihoods {mine} and {right}")
    return differing, widest


def _fixed(sample: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be equal: document, prompt, target, hashes, metrics, and answers without their log-likelihoods."""
    kept = ("doc_id", "doc", "target", "arguments", "doc_hash", "prompt_hash", "target_hash", "acc", "exact_match")
    answers = [one if isinstance(one, str) else one[1] for one in _answers(sample)]
    return (*(sample.get(name) for name in kept), answers)


def _answers(sample: Mapping[str, Any]) -> list[Any]:
    """The answers: pairs of a log-likelihood and whether it is greedy, or texts."""
    return [answer for answers in sample["resps"] for answer in answers]


def _greedy(samples: Sequence[Mapping[str, Any]]) -> int:
    """How many answers are what the model would have generated."""
    return sum(str(one[1]) == "True" for sample in samples for one in _answers(sample))


def _numbers(sample: Mapping[str, Any]) -> list[float]:
    return [float(one[0]) for one in _answers(sample) if isinstance(one, list)]


def _rows() -> list[dict[str, Any]]:
    rng = random.Random(20)
    syllables = [a + b + c for a in "bcdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]

    def words(count: int) -> str:
        return " ".join("".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(count))

    return [
        {
            "question": words(rng.randint(3, 40)),
            "choices": [words(rng.randint(1, 5)) for _ in range(4)],
            "answer": number % 4,
        }
        for number in range(SAMPLES)
    ]


def _continued(target: Target, question: str) -> str:
    asked = {"model": target.model, "prompt": question, "max_tokens": 4, "temperature": 0.0}
    return json.loads(post(f"{target.url}/v1/completions", asked))["choices"][0]["text"]


def _write_tasks(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    data = folder / "samples.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "endings.yaml").write_text(_ENDINGS.format(file=data))
    (folder / "continuations.yaml").write_text(_CONTINUATIONS.format(file=data))
