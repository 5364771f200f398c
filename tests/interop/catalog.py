"""The suites: what each needs, what it runs, and how long it may take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tests.interop.environment import Environment
from tests.interop.result import SuiteResult
from tests.interop.suites import agents, aiperf, clients, guidellm, lm_eval, openai_python, schemathesis, smg
from tests.interop.target import Target


@dataclass(frozen=True)
class Suite:
    """One suite. `seconds` bounds each of its processes. `fetch` has more fetched than packages."""

    name: str
    about: str  # what is run, for the report
    requirements: Sequence[str]
    packages: Sequence[str]  # whose versions the report names
    run: Callable[[Target, Environment], SuiteResult]
    seconds: float = 300.0
    needs_torch: bool = False
    fetch: Callable[[Environment], object] | None = None
    npm: Sequence[str] = ()  # packages


_AGENT = (
    f", from npm: {', '.join(agents.CASES.values())}. A model follows a script: it reasons, and calls a tool "
    "twice at once. It does so once with a lenient and once with a strict chat template"
)
_LIBRARY = (
    ": a tool loop and a second turn, typed output, a prompt beyond the context, and a picture in a tool's result "
    "where the library sends one. Answers come whole and as streams. The model is that of the agents"
)
_ALL = (
    Suite(
        "openai",
        "`tests/interop/clients/openai_client.py`: sync, async, streams, tools, JSON schema, n = 4, log-probabilities, "
        "Responses, errors; strict validation, except where the package's classes know no null that OpenAI's own API "
        "sends (streamed completions, log-probabilities of an echoed prompt)",
        ["openai==3.54.0"],
        ["openai"],
        partial(clients.run_client, "openai_client.py"),
    ),
    Suite(
        "openai-python",
        "the package's own tests of chat, completions, models and Responses, from its source distribution",
        [
            f"openai[aiohttp]=={openai_python.VERSION}", "pytest==9.2.0", "pytest-asyncio>=1.4", "pytest-xdist==3.8.0",
            "inline-snapshot", "trio", "httpx2", "rich",
        ],
        ["openai"],
        openai_python.run,
        seconds=900.0,
        fetch=openai_python.fetch,
    ),
    Suite(
        "anthropic",
        "`tests/interop/clients/anthropic_client.py`: messages, streams, tools, token counts, models, errors; strict "
        "validation of every answer",
        ["anthropic==2.12.0"],
        ["anthropic"],
        partial(clients.run_client, "anthropic_client.py"),
    ),
    Suite(
        "litellm",
        "`tests/interop/clients/litellm_client.py`: its providers openai, hosted_vllm and anthropic, streams, text "
        "completions, Responses, tools, errors",
        ["litellm==1.106.2", "mcp"],
        ["litellm"],
        partial(clients.run_client, "litellm_client.py"),
    ),
    Suite(
        "langchain-openai",
        "`tests/interop/clients/langchain_client.py`: chat, streams, batches, completions, Responses, tools, "
        "structured output, errors",
        ["langchain-openai==1.7.3"],
        ["langchain-openai", "langchain-core"],
        partial(clients.run_client, "langchain_client.py"),
    ),
    Suite(
        "codex",
        f"Codex over Responses{_AGENT}",
        [],
        [],
        partial(agents.run_agent, agents.CODEX),
        npm=["@openai/codex@0.171.0"],
    ),
    Suite(
        "claude-code",
        f"Claude Code over Messages{_AGENT}",
        [],
        [],
        partial(agents.run_agent, agents.CLAUDE_CODE),
        npm=["@anthropic-ai/claude-code@2.1.332"],
    ),
    Suite(
        "opencode",
        f"OpenCode over chats{_AGENT}",
        [],
        [],
        partial(agents.run_agent, agents.OPENCODE),
        npm=["opencode-linux-x64@1.18.34"],
    ),
    Suite(
        "ai-sdk",
        f"`tests/interop/clients/ai_sdk.mjs`: AI SDK over chats, Responses and Messages{_LIBRARY}",
        [],
        [],
        partial(agents.run_client, "ai_sdk.mjs"),
        npm=[
            "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ],
    ),
    Suite(
        "openai-agents",
        f"`tests/interop/clients/openai_agents_client.py`: over Responses and chats{_LIBRARY}",
        ["openai-agents==0.24.0"],
        ["openai-agents", "openai"],
        partial(agents.run_client, "openai_agents_client.py"),
    ),
    Suite(
        "pydantic-ai",
        f"`tests/interop/clients/pydantic_ai_client.py`: over chats, Responses and Messages{_LIBRARY}",
        ["pydantic-ai-slim[openai,anthropic]==2.68.0"],
        ["pydantic-ai-slim", "openai", "anthropic"],
        partial(agents.run_client, "pydantic_ai_client.py"),
    ),
    Suite(
        "instructor",
        "`tests/interop/clients/instructor_client.py`: typed output by each of its modes, whole and as a stream, and a "
        "prompt beyond the context",
        ["instructor==1.17.0"],
        ["instructor", "openai"],
        partial(agents.run_client, "instructor_client.py"),
    ),
    Suite(
        "schemathesis",
        "`st run /openapi.json`, phases examples, coverage and fuzzing: no 5xx, and statuses, content types, headers "
        "and answers as documented",
        ["schemathesis==4.32.5"],
        ["schemathesis"],
        schemathesis.run,
        seconds=900.0,
    ),
    Suite(
        "smg",
        "`smg launch` with Baton's HTTP API as its one worker: chats whole and as streams through the gateway say what "
        "Baton's own HTTP API says",
        ["smg==1.13.0"],
        ["smg"],
        smg.run,
    ),
    Suite(
        "guidellm",
        "`guidellm run`, kind=concurrent, over chat completions, completions and Responses: every request ends well, "
        "with as many tokens as it asked for",
        ["guidellm==0.8.1"],
        ["guidellm"],
        guidellm.run,
        needs_torch=True,
    ),
    Suite(
        "aiperf",
        "`aiperf profile --custom-dataset-type mooncake_trace --fixed-schedule` over streamed chats",
        ["aiperf==0.13.0"],
        ["aiperf"],
        aiperf.run,
    ),
    Suite(
        "lm-eval",
        "`lm_eval --model local-completions` on three local tasks against 1P+1D, a colocated cluster and one that "
        "computes with torch's operators, and `--model hf` in float32, with `--log_samples`: the logs of all four are "
        "compared sample by sample",
        ["lm-eval[api,hf]==0.4.13", "transformers==5.23.0"],
        ["lm_eval", "transformers", "torch"],
        lm_eval.run,
        seconds=600.0,
        needs_torch=True,
    ),
)  # fmt: skip
SUITES: Mapping[str, Suite] = {suite.name: suite for suite in _ALL}

QUICK = ("openai", "anthropic", "schemathesis", "openai-python", "smg", "langchain-openai", "litellm")
"""Those that CI runs, together within `QUICK_SECONDS`. Those that take longest come first."""
QUICK_SECONDS = 285.0
"""After which no suite of a quick run goes on: five minutes, less what the cluster takes to end."""
