"""aiperf: the replay of a trace in Mooncake's format, at its own times, with prompts that share prefixes."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.interop.environment import Environment
from tests.interop.result import Case, SuiteResult
from tests.interop.target import Target

BLOCK, REQUESTS, EVERY_MS = 16, 40, 100
_NAME, _COMMIT = "local/baton", "0" * 40


def run(target: Target, environment: Environment) -> SuiteResult:
    """Replay the trace, and compare what aiperf counted with what the trace asked for."""
    trace = make_trace()
    file = environment.scratch / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in trace))
    out = environment.scratch / "out"
    ran = environment.run(
        environment.program("aiperf"), "profile", "-m", target.model, "--url", target.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", _NAME, "--use-server-token-count", "--input-file", str(file),
        "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
        "--prompt-input-tokens-block-size", str(BLOCK), "--extra-inputs", "ignore_eos:true", "--ui", "none",
        "--output-artifact-dir", str(out), HF_HUB_OFFLINE="1", HF_HOME=str(_hub(target.folder, environment.scratch)),
    )  # fmt: skip
    summary = out / "profile_export_aiperf.json"
    if ran.code or not summary.is_file():
        return SuiteResult([Case.failed("profile", f"aiperf ended with {ran.code}: {ran.tail}")])
    figures = json.loads(summary.read_text())
    scraped = (out / "server_metrics_export.json").read_text()
    checks = {
        "every request of the trace ends well": (_figure(figures, "request_count"), float(len(trace))),
        "no request is an error": (_figure(figures, "error_request_count"), 0.0),
        "outputs are as long as the trace says": (
            _figure(figures, "total_output_tokens"),
            float(sum(row["output_length"] for row in trace)),
        ),
        "shared prefixes are cached": (_figure(figures, "total_usage_prompt_cache_read_tokens") > 0, True),
        "vLLM's metrics are scraped": ("vllm:prompt_tokens" in scraped, True),
    }
    cases = [
        Case(name, "passed") if actual == expected else Case.failed(name, f"{actual} instead of {expected}")
        for name, (actual, expected) in checks.items()
    ]
    note = (
        f"{REQUESTS} requests, one every {EVERY_MS} ms, in blocks of {BLOCK} tokens. Its tokenizer comes from a hub "
        "cache that the suite lays out: with a local directory its decoding processes fail."
    )
    return SuiteResult(cases, [note])


def make_trace() -> list[dict[str, Any]]:
    """A small trace: prompts of 4 to 13 blocks, of which the first 2 or 4 are shared."""
    rows = list[dict[str, Any]]()
    fresh = 100
    for number in range(REQUESTS):
        blocks = 4 + number % 10
        shared = min(blocks - 1, 4 if number % 2 else 2)
        ids = [*range(shared), *range(fresh, fresh + blocks - shared)]
        fresh += blocks - shared
        rows.append(
            {
                "timestamp": number * EVERY_MS,
                "input_length": BLOCK * blocks - 3,
                "output_length": 6 + number % 11,
                "hash_ids": ids,
            }
        )
    return rows


def _figure(figures: dict[str, Any], name: str) -> float:
    return float(figures.get(name, {}).get("avg", 0.0))


def _hub(checkpoint: Path, scratch: Path) -> Path:
    """A hub cache that has the checkpoint's tokenizer under a name."""
    model = scratch / "hub-home" / "hub" / f"models--{_NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(_COMMIT)
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, snapshot)
    return scratch / "hub-home"
