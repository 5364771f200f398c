"""Coding agents as their users run them, from npm, against a model that follows a script: a first turn and a tool loop.

Each has an empty home, a key that is none, and reaches nothing but the router.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.interop.environment import ROOT, Environment, IndexUnreachable, cache, end_session, run_bounded
from tests.interop.result import Case, SuiteBroken, SuiteResult
from tests.interop.scripted_model import NAME, PRINTS
from tests.interop.target import Target

_READY_SECONDS = 60.0
_PROMPT = "Run the command and tell what it printed."


@dataclass(frozen=True)
class Agent:
    """An agent's package on npm, the tool that runs a command with the argument that has it, and how it is started."""

    package: str
    version: str
    tool: str
    argument: str
    command: Sequence[str]  # {url}: of the router

    @property
    def folder(self) -> Path:
        return cache() / "npm" / f"{self.package.rpartition('/')[2]}-{self.version}"


AGENTS = (
    Agent(
        "@openai/codex", "0.171.0", "exec_command", "cmd",
        [
            "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            "-c", "model_provider=baton", "-c",
            'model_providers.baton={{name="Baton",base_url="{url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}',
            "-m", NAME, _PROMPT,
        ],
    ),
    Agent(
        "@anthropic-ai/claude-code", "2.1.332", "Bash", "command",
        ["claude", "-p", "--allowedTools", "Bash", "--", _PROMPT],
    ),
)  # fmt: skip


def fetch(environment: Environment) -> None:
    """Install the agents. Raises IndexUnreachable where npm is missing or its registry does not answer."""
    npm = shutil.which("npm")
    if npm is None:
        raise IndexUnreachable("there is no npm here")
    try:
        urllib.request.urlopen("https://registry.npmjs.org/-/ping", timeout=15).close()
    except (OSError, urllib.error.URLError) as error:
        raise IndexUnreachable(f"npm's registry does not answer: {error}") from None
    for agent in AGENTS:
        if (agent.folder / "ready").exists():
            continue
        agent.folder.mkdir(parents=True, exist_ok=True)
        package = f"{agent.package}@{agent.version}"
        argv = [
            npm,
            "install",
            "--prefix",
            str(agent.folder),
            "--no-audit",
            "--no-fund",
            "--foreground-scripts",
            package,
        ]
        ran = run_bounded(argv, environment.seconds, agent.folder, environment.variables({}))
        if ran.code:
            raise IndexUnreachable(f"npm could not install {package}: {ran.tail}")
        for script in (agent.folder / "node_modules" / agent.package).glob("install.cjs"):  # npm may leave it out
            run_bounded(["node", str(script)], environment.seconds, script.parent, environment.variables({}))
        (agent.folder / "ready").touch()


def run(_: Target, environment: Environment) -> SuiteResult:
    """Run each agent with a template that takes any message, and with one that refuses all that is unusual."""
    cases = [_case(agent, template, environment) for agent in AGENTS for template in ("lenient", "strict")]
    versions = ", ".join(f"{agent.package} {agent.version}" for agent in AGENTS)
    return SuiteResult(cases, [f"{versions}. Prompts of 32,000 to 42,000 tokens: a token a byte."])


def _case(agent: Agent, template: str, environment: Environment) -> Case:
    name = f"{agent.package}: a first turn and a tool loop, {template} template"
    home = environment.scratch / f"{agent.folder.name}-{template}"
    (home / "work").mkdir(parents=True)
    model = [sys.executable, "-m", "tests.interop.scripted_model", agent.tool, agent.argument, template]
    with (home / "router.log").open("wb") as log:
        router = subprocess.Popen(
            model, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert router.stdout is not None
        if not (address := router.stdout.readline().strip()):
            raise SuiteBroken(f"the router did not start: {(home / 'router.log').read_text()[-400:]}")
        url = f"http://{address}"
        variables = environment.variables({
            "HOME": str(home), "OPENAI_API_KEY": "none", "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": NAME, "ANTHROPIC_SMALL_FAST_MODEL": NAME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1",
        })  # fmt: skip
        program, *rest = (word.format(url=url) for word in agent.command)
        argv = [str(agent.folder / "node_modules" / ".bin" / program), *rest]
        ran = run_bounded(argv, environment.seconds, home / "work", variables)
    finally:
        end_session(router)
    if ran.code or f"printed {PRINTS}." not in ran.output:
        return Case.failed(name, f"it ended with {ran.code}: {ran.tail}")
    return Case(name, "passed")
