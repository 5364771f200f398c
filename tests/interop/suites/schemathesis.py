"""schemathesis: requests made of our OpenAPI document, valid and invalid, and checks of every answer."""

import re

from tests.interop.environment import Environment
from tests.interop.result import Case, SuiteResult, read_junit
from tests.interop.target import Target

_EXCLUDED = {
    "positive_data_acceptance": "a schema can't say that a prompt fits the context or that fields go together",
    "negative_data_rejection": 'numbers and booleans may come as texts ("5", "true"), as with vLLM',
}


def run(target: Target, environment: Environment, examples: int = 50) -> SuiteResult:
    """Run every phase that needs no links between operations, with so many examples of each."""
    report = environment.scratch / "report.xml"
    report.unlink(missing_ok=True)
    ran = environment.run(
        environment.program("st"), "run", f"{target.url}/openapi.json", "--url", target.url,
        "--phases", "examples,coverage,fuzzing", "--checks", "all", "--exclude-checks", ",".join(_EXCLUDED),
        "--max-examples", str(examples), "--generation-deterministic", "--no-color", "--request-timeout", "60",
        "--report", "junit", "--report-junit-path", str(report),
    )  # fmt: skip
    if not report.is_file():
        return SuiteResult([Case.failed("st run", f"it ended with {ran.code}: {ran.tail}")])
    match = re.search(r"(\d+) generated", ran.output)
    notes = [f"{match[1]} requests, at most {examples} per operation and phase."] if match else []
    notes += [f"The check {name} is left out: {why}." for name, why in _EXCLUDED.items()]
    return SuiteResult(read_junit(report), notes)
