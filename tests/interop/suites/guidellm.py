"""guidellm: a load of streams for each of three APIs. A request without output or usage is an error to it."""

import json

from tests.interop.environment import Environment
from tests.interop.result import Case, SuiteResult
from tests.interop.target import Target

FORMATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
REQUESTS, PROMPT, OUTPUT = 20, 64, 16


def run(target: Target, environment: Environment) -> SuiteResult:
    """Run it once for each API, with two streams at a time, and count its requests."""
    return SuiteResult(
        [_case(path, target, environment) for path in FORMATS],
        [f"{REQUESTS} requests of {PROMPT} prompt and {OUTPUT} output tokens for each API, two at a time."],
    )


def _case(path: str, target: Target, environment: Environment) -> Case:
    report = environment.scratch / f"{path.replace('/', '-')}.json"
    ran = environment.run(
        environment.program("guidellm"), "run", "--backend",
        f"kind=openai_http,target={target.url},model={target.model},request_format={path}",
        "--tokenizer", f"kind=huggingface_auto,model={target.folder}", "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={report}", "--disable-console",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    if ran.code or not report.is_file():
        return Case.failed(path, f"guidellm ended with {ran.code}: {ran.tail}")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] != REQUESTS:
        return Case.failed(path, f"of {REQUESTS} requests: {totals}")
    outputs = {one["output_metrics"]["total_tokens"] for one in benchmark["requests"]["successful"]}
    return Case(path, "passed") if outputs == {OUTPUT} else Case.failed(path, f"outputs have {outputs} tokens")
