"""openai-python's own tests of chat, completions, models and Responses, which validate every answer strictly.

They stand in its source distribution, which is fetched at run time. They are written for a mock server that accepts
anything, so `EXPECTED` names those whose request a real server must refuse, and how.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.interop import environment as environments
from tests.interop.environment import Environment
from tests.interop.result import Case, SuiteResult, read_junit
from tests.interop.target import Target

VERSION = "3.54.0"
_FILES = ("chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py")
_CLIENTS = Path(__file__).parents[1] / "clients"

EXPECTED: Mapping[str, tuple[str, str]] = {
    r"Completions\.test_method_create_with_all_params": (
        "BadRequestError",
        'sends mock values that no model can serve, such as logit_bias {"foo": 0}; 400',
    ),
    r"Completions\.test_(method|raw_response|streaming_response)_(retrieve|update|delete|list)": (
        r"NotFoundError|Error code: 405",
        "asks for a stored chat; Baton keeps none; 404 or 405",
    ),
    r"Models\.test_(method|raw_response|streaming_response)_delete": (
        "Error code: 405",
        "deletes a fine-tuned model; Baton has none; 405",
    ),
    r"Responses\.test_method_create_with_all_params": (
        "BadRequestError",
        "sends store, background and previous_response_id, which need state; 400",
    ),
    r"Responses\.test_(method|raw_response|streaming_response)_(retrieve|delete|cancel|compact)": (
        "NotFoundError",
        "asks for a stored response; Baton keeps none; 404",
    ),
}
"""By test: the error it must end in, and the reason."""


def fetch(environment: Environment) -> Path:
    """Return the folder of the source distribution, which is fetched if it is not there. Raises InstallError."""
    return environments.fetch_sdist(environment, f"openai=={VERSION}")


def run(target: Target, environment: Environment) -> SuiteResult:
    """Run them, and compare those that fail with `EXPECTED`."""
    folder = fetch(environment)
    report = environment.scratch / "report.xml"
    report.unlink(missing_ok=True)
    ran = environment.run(
        environment.python, "-m", "pytest", "-q", "-n", "2", "--tb=short", "-p", "no:cacheprovider",
        "-p", "openai_suite_plugin", f"--junitxml={report}", *(f"tests/api_resources/{file}" for file in _FILES),
        cwd=folder, TEST_API_BASE_URL=f"{target.url}/v1", PYTHONPATH=str(_CLIENTS), PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    if not report.is_file():
        return SuiteResult([Case.failed("pytest", f"it ended with {ran.code}: {ran.tail}")])
    notes = (
        "create() without an input gets one (tests/interop/clients/openai_suite_plugin.py), so that its answers are "
        "validated too.",
        "A skipped test ended in the error that its reason names; any other end of it counts as failed.",
    )
    return SuiteResult([judged(case) for case in read_junit(report)], notes)


def judged(case: Case) -> Case:
    """A case, skipped if it ended as `EXPECTED` says, and failed if it did not."""
    name = short_name(case.name)
    for pattern, (error, reason) in EXPECTED.items():
        if re.search(pattern, name):
            if case.outcome == "failed" and re.search(error, case.reason):
                return Case.skipped(name, reason)
            return Case.failed(name, f"expected {error}, and it {case.outcome}: {case.reason}")
    return Case(name, case.outcome, case.reason)


def short_name(name: str) -> str:
    """A test's name with its file, and without what tells the sync and async halves apart."""
    file, _, rest = name.removeprefix("tests.api_resources.").partition(".Test")
    return f"{file.replace('.', '/')}.py {rest.replace('::', '.')}"
