"""lm-eval on three local tasks: Baton as 1P+1D, Baton colocated, and transformers in float32 must log the same samples.

Two tasks rank four endings by their log-likelihoods (`echo` with `logprobs`): endings of several tokens, and of one.
The third generates text up to a stop string. None needs the hub: a YAML file each, and a JSONL file.

A fourth cluster computes with torch's operators, as transformers does (`model.native: false`), and gets one request at
a time. Its logs must be those of transformers to the last bit.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interop import target as targets
from tests.interop.environment import Environment
from tests.interop.http import post
from tests.interop.result import Case, SuiteBroken, SuiteResult
from tests.interop.target import CONTEXT, Target

TASKS = {"endings": "multiple_choice", "letters": "multiple_choice", "continuations": "generate_until"}
SAMPLES = 40  # of each task
TOLERANCE = 1e-4  # of a log-likelihood: a sum of float32 log-probabilities, computed in another order
AS_TRANSFORMERS = {"model.native": False, "decode.max_num_batched_tokens": CONTEXT}
"""Settings of a worker that runs the same operators on the same rows as transformers: a whole prompt in one step."""
_FLOAT32_SUMS = Path(__file__).parents[1] / "clients" / "lm_eval_float32.py"
_LETTERS = "bcdfgklmnprst"  # each is one token after a space

_RANKED = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{{choices}}}}}"
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

Log = list[dict[str, Any]]  # of one task, by sample


def run(target: Target, environment: Environment) -> SuiteResult:
    """Run the tasks on each of the four, and compare their logs sample by sample."""
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
    with targets.cluster(target.folder, environment.scratch / "torch-cluster", prefill=0, **AS_TRANSFORMERS) as plain:
        same = _served(plain, environment, tasks, "torch", concurrent=1)
        added = _served(plain, environment, tasks, "torch-float32", concurrent=1, float32_sums=True)
    arguments = f"pretrained={target.folder},dtype=float32,max_length={CONTEXT}"
    right = _evaluate(
        environment, tasks, "transformers", TASKS, environment.program("lm_eval"),
        "--model", "hf", "--model_args", arguments, "--device", "cpu",
    )  # fmt: skip
    cases, notes = list[Case](), list[str]()
    for name, logs in (("1P+1D", split), ("colocated", alone), ("torch's operators", same)):
        for task in TASKS:
            differing, widest = compare(logs[task], right[task])
            label = f"{task}: {name} and transformers"
            cases.append(_judged(label, f"{len(differing)} of {SAMPLES} samples differ", differing))
            if TASKS[task] == "multiple_choice":
                notes.append(f"{label}: log-likelihoods differ by at most {widest:.1e}.")
    for label, one, other in (
        *((f"{task}: 1P+1D and colocated", split[task], alone[task]) for task in TASKS),
        *(
            (f"{task}: torch's operators and transformers", same[task], right[task])
            for task in TASKS
            if task != "endings"
        ),
        ("endings: torch's operators, added up in float32, and transformers", added["endings"], right["endings"]),
    ):
        cases.append(_judged(f"{label}, to the last bit", "the logs differ", differences(one, other)))
    accuracy = sum(one["acc"] for one in right["endings"]) / SAMPLES
    notes += [
        f"{SAMPLES} samples of each task; accuracy {accuracy:g}; {_greedy(right['endings'])} endings are greedy.",
        "Prompts, answers, greedy flags, texts and metrics must be equal everywhere. Log-likelihoods must be equal to "
        f"the last bit between 1P+1D and colocated, and to {TOLERANCE:g} with transformers: Baton's own kernels add "
        "the same float32 products in another order than torch's library.",
        "With torch's operators (`model.native: false`), one request at a time and whole prompts in a step, every "
        "field of every sample must be transformers', log-likelihoods to the last bit.",
        "lm-eval adds up the log-probabilities of an ending in float32 for its hf model and in double precision for "
        "local-completions. An ending of one token needs no sum. For longer ones the same client adds in float32 as "
        "well (`tests/interop/clients/lm_eval_float32.py`).",
    ]
    return SuiteResult(cases, notes)


def _served(
    target: Target, environment: Environment, tasks: Path, name: str, *, concurrent: int = 4, float32_sums: bool = False
) -> dict[str, Log]:
    """Run the tasks on a cluster. `float32_sums`: only `endings`, with sums as the hf model has them."""
    arguments = (
        f"model={target.model},base_url={target.url}/v1/completions,tokenizer={target.folder},"
        f"num_concurrent={concurrent},tokenizer_backend=huggingface,tokenized_requests=True,max_length={CONTEXT},"
        "max_retries=1"
    )
    program = [environment.python, str(_FLOAT32_SUMS)] if float32_sums else [environment.program("lm_eval")]
    names = ["endings"] if float32_sums else TASKS
    return _evaluate(
        environment, tasks, name, names, *program, "--model", "local-completions", "--model_args", arguments
    )


def _evaluate(environment: Environment, tasks: Path, name: str, names: Iterable[str], *program: str) -> dict[str, Log]:
    """Run tasks and return the log of each. One thread, as the workers have: more could add in another order."""
    out = environment.scratch / name
    ran = environment.run(
        *program, "--tasks", ",".join(names), "--include_path", str(tasks),
        "--batch_size", "1", "--log_samples", "--output_path", str(out), "--seed", "1234",
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(environment.scratch / "hf"), OPENAI_API_KEY="none",
        TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
    )  # fmt: skip
    logs = {task: sorted(out.rglob(f"samples_{task}_*.jsonl")) for task in names}
    if ran.code or not all(logs.values()):
        raise SuiteBroken(f"lm_eval on {name} ended with {ran.code}: {ran.tail}")
    return {
        task: sorted((json.loads(line) for line in files[-1].read_text().splitlines()), key=lambda one: one["doc_id"])
        for task, files in logs.items()
    }


def _judged(label: str, failure: str, differing: Sequence[str]) -> Case:
    return Case.failed(label, f"{failure}: {differing[0]}") if differing else Case(label, "passed")


def differences(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The samples that are not equal in every field. Numbers are logged with all their digits."""
    if len(ours) != len(theirs):
        return [f"{len(ours)} samples and {len(theirs)}"]
    return [
        f"sample {one.get('doc_id')}: {name} is {one.get(name)} and {other.get(name)}"
        for one, other in zip(ours, theirs, strict=True)
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


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
    keys = ("doc_id", "doc", "target", "arguments", "doc_hash", "prompt_hash", "target_hash", "acc", "exact_match")
    answers = [one if isinstance(one, str) else one[1] for one in _answers(sample)]
    return (*(sample.get(name) for name in keys), answers)


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
            "letters": rng.sample(_LETTERS, 4),
            "answer": number % 4,
        }
        for number in range(SAMPLES)
    ]


def _continued(target: Target, question: str) -> str:
    fields = {"model": target.model, "prompt": question, "max_tokens": 4, "temperature": 0.0}
    return json.loads(post(f"{target.url}/v1/completions", fields))["choices"][0]["text"]


def _write_tasks(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    data = folder / "samples.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, choices in (("endings", "choices"), ("letters", "letters")):
        (folder / f"{task}.yaml").write_text(_RANKED.format(task=task, file=data, choices=choices))
    (folder / "continuations.yaml").write_text(_CONTINUATIONS.format(file=data))
