"""What suites print is read rightly, and the report tells it."""

import socket
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.interop import __main__ as runner
from tests.interop import environment, report
from tests.interop.catalog import QUICK, QUICK_SECONDS, SUITES, Suite
from tests.interop.environment import Environment, IndexUnreachable, InstallError, SuiteTimeout
from tests.interop.result import Case, SuiteResult, read_junit
from tests.interop.suites import aiperf, clients, lm_eval, openai_python
from tests.interop.target import Target


def test_a_junit_report_has_every_outcome(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><failure message="it is wrong, and here is why">long</failure></testcase>'
        '<testcase classname="a" name="three"><skipped message="no time for this one today"/></testcase>'
        '<testcase name="four"><error>ST108</error></testcase></testsuite></testsuites>'
    )
    assert [(case.name, case.outcome) for case in read_junit(file)] == [
        ("a::one", "passed"),
        ("a::two", "failed"),
        ("a::three", "skipped"),
        ("four", "failed"),
    ]
    assert [case.reason for case in read_junit(file)][1:] == [
        "it is wrong, and here is why",
        "no time for this one today",
        "ST108",
    ]


def test_what_a_package_prints_is_no_case() -> None:
    output = (
        'Give Feedback\n{"name": "a", "outcome": "passed"}\n{"name": "b", "outcome": "failed", "reason": "x\\ny"}\n'
    )
    assert clients.read_cases(output) == [Case("a", "passed"), Case("b", "failed", "x y")]


def test_a_test_that_must_be_refused_is_refused_as_expected() -> None:
    name = "tests.api_resources.test_responses.TestAsyncResponses::test_method_delete[strict]"
    right = openai_python.judged(Case.failed(name, "openai.NotFoundError: Error code: 404"))
    assert (right.outcome, right.name) == ("skipped", "test_responses.py AsyncResponses.test_method_delete[strict]")
    assert openai_python.judged(Case.failed(name, "openai.InternalServerError")).outcome == "failed"
    assert openai_python.judged(Case(name, "passed")).outcome == "failed"
    other = name.replace("delete", "create_overload_1")
    assert openai_python.judged(Case(other, "passed")).outcome == "passed"


def test_the_report_counts_and_gives_reasons() -> None:
    cases = [
        Case("a", "passed"),
        Case.failed("b", "a | b"),
        Case.skipped("c", "no store"),
        Case.skipped("d", "no store"),
    ]
    page = report.render(SUITES, {"openai": SuiteResult(cases, ["a note"], ["openai 1.0"], 3.0)}, "abc123")
    assert "| [openai](#openai) | openai 1.0 | 1 | 1 | 2 |" in page
    assert "| `b` | `a \\| b` |" in page
    assert "| 2 | no store |" in page
    assert "- a note" in page
    assert "commit `abc123`" in page


def test_two_logs_of_lm_eval_are_equal_only_in_every_answer() -> None:
    def log(likelihood: float, greedy: str, text: str) -> list[dict[str, Any]]:
        return [
            {"doc_id": 0, "acc": 1.0, "resps": [[[str(likelihood), greedy]]]},
            {"doc_id": 1, "exact_match": 0.0, "resps": [[text]]},
        ]

    right = log(-9.5, "True", "some words")
    assert lm_eval.compare(log(-9.5, "True", "some words"), right) == ([], 0.0)
    assert lm_eval.compare(log(-9.50001, "True", "some words"), right)[0] == []
    for other in (log(-9.6, "True", "some words"), log(-9.5, "False", "some words"), log(-9.5, "True", "same words")):
        assert len(lm_eval.compare(other, right)[0]) == 1
    assert lm_eval.compare(right[:1], right)[0]
    assert lm_eval.differences(right, log(-9.5, "True", "some words")) == []
    assert lm_eval.differences(right, log(-9.500000000000002, "True", "some words"))
    assert lm_eval.differences(right, [{**one, "filter": "none"} for one in right])
    assert lm_eval.differences(right[:1], right)


def test_the_trace_has_shared_prefixes_and_is_in_order() -> None:
    trace = aiperf.make_trace()
    assert [row["timestamp"] for row in trace] == sorted(row["timestamp"] for row in trace)
    for row in trace:
        assert len(row["hash_ids"]) == -(-row["input_length"] // aiperf.BLOCK)
        assert row["hash_ids"][:2] == [0, 1]


def test_an_index_that_does_not_answer_is_told_from_a_package_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_INTEROP_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    ours = Environment(Path(sys.prefix), tmp_path, 60.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed}/simple")
    with pytest.raises(IndexUnreachable, match="nothing"):
        environment.fetch_sdist(ours, "nothing==1.0")
    index = tmp_path / "simple" / "nothing"
    index.mkdir(parents=True)
    (index / "index.html").write_text('<a href="nothing-0.5.tar.gz">nothing-0.5.tar.gz</a>')
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    with pytest.raises(InstallError, match="nothing") as caught:
        environment.fetch_sdist(ours, "nothing==1.0")
    assert not isinstance(caught.value, IndexUnreachable)


def test_packages_that_npm_does_not_bring_in_time_are_a_reason_not_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_INTEROP_CACHE", str(tmp_path))
    ours = Environment(Path(sys.prefix), tmp_path, 1.0)
    npm = tmp_path / "npm-program" / "npm"
    npm.parent.mkdir()
    for script, reason in (("exit 1", "could not install one@1"), ("sleep 60", "did not end within 1 s")):
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)
        monkeypatch.setattr(environment.shutil, "which", lambda _: str(npm))
        with pytest.raises(IndexUnreachable, match=reason):
            environment.install_npm("one", ["one@1"], ours)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(IndexUnreachable, match="no npm"):
        environment.install_npm("one", ["one@1"], ours)


def test_this_environment_serves_suites_whose_packages_it_has(tmp_path: Path) -> None:
    assert environment.here([f"pytest=={pytest.__version__}"], tmp_path, 1.0) == Environment(
        Path(sys.prefix), tmp_path, 1.0
    )
    for other in ("pytest==0.1", "no-such-package==1.0", "pytest"):
        assert environment.here([other], tmp_path, 1.0) is None


@pytest.mark.parametrize(
    ("error", "left", "failed", "reason"),
    [
        (IndexUnreachable("no index"), QUICK_SECONDS, 0, "no index"),
        (IndexUnreachable("no index"), None, 1, ""),
        (InstallError("two versions"), QUICK_SECONDS, 1, ""),
        (None, QUICK_SECONDS, 1, ""),
        (None, 100.0, 0, "slow"),
        (None, None, 1, ""),
        (None, 5.0, 0, "too few to begin"),
    ],
)
def test_a_suite_is_not_run_only_for_want_of_packages_or_time(
    tmp_path: Path, error: Exception | None, left: float | None, failed: int, reason: str
) -> None:
    def broken(target: Target, environment: Environment) -> SuiteResult:
        raise SuiteTimeout("slow")

    ready: Future[Environment] = Future()
    if error is None:
        ready.set_result(Environment(Path(sys.prefix), tmp_path, 60.0))
    else:
        ready.set_exception(error)
    suite = Suite("one", "", ["pytest"], [], broken)
    until = None if left is None else time.monotonic() + left
    result = runner.run_suite(suite, Target("", "", tmp_path), ready, until)
    assert result.count("passed") == 0
    assert result.count("failed") == failed
    assert reason in result.not_run
    assert bool(result.not_run) == (not failed)


def test_quick_suites_are_known() -> None:
    assert set(QUICK) <= set(SUITES)
