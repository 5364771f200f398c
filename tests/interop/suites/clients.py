"""Suites of our own that use a client's package as its users do: tests/interop/clients."""

import json
from pathlib import Path

from tests.interop.environment import Environment
from tests.interop.result import Case, SuiteResult
from tests.interop.target import Target

CLIENTS = Path(__file__).parents[1] / "clients"


def run_client(script: str, target: Target, environment: Environment) -> SuiteResult:
    ran = environment.run(
        environment.python, str(CLIENTS / script), target.url, target.model,
        LITELLM_LOCAL_MODEL_COST_MAP="True", ANTHROPIC_LOG="", LANGSMITH_TRACING="false",
    )  # fmt: skip
    cases = read_cases(ran.output)
    if ran.code or not cases:
        cases.append(Case.failed(script, f"the script ended with {ran.code}: {ran.tail}"))
    return SuiteResult(cases)


def read_cases(output: str) -> list[Case]:
    """The cases among what a script has printed. Packages print lines of their own."""
    cases = list[Case]()
    for line in output.splitlines():
        if line.startswith('{"name":'):
            result = json.loads(line)
            cases.append(
                Case(result["name"], "passed")
                if result["outcome"] == "passed"
                else Case.failed(result["name"], result["reason"])
            )
    return cases
