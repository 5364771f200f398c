"""Coding agents and libraries for agents, as their users run them, against a model that follows a script.

Each runs with a chat template that takes any message, and with one that refuses all that is unusual. Each has an empty
home, a key that is none, and reaches nothing but the router. A request that the router refuses fails its case, unless
its prompt is longer than the context.
"""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.interop.clients.checks import END, LOOP, PICTURE, PICTURE_URL, TYPED, prompt_of
from tests.interop.environment import ROOT, Environment, Ran, end_session, npm_folder, run_bounded
from tests.interop.result import Case, SuiteBroken, SuiteResult
from tests.interop.scripted_model import CONTEXT, NAME
from tests.interop.suites.clients import CLIENTS, read_cases
from tests.interop.target import Target

CASES = {
    "loop": "a first turn and a tool loop",
    "picture": "a picture in a tool's result",
    "cut": "a call that the limit cuts",
    "context": f"a conversation beyond {CONTEXT:,} tokens",
}
TEMPLATES = ("lenient", "strict")
_TOO_LONG = ("context_length_exceeded", "prompt is too long")
_OFFLINE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "npm_config_registry"), "http://127.0.0.1:9")
"""What is not the router leads to a port that refuses."""


@dataclass(frozen=True)
class Agent:
    """An agent's program below node_modules, how it is started, and what it reads: {url} is the router's, {prompt} the
    user's. `resume` goes on with a turn that has ended with an error."""

    name: str
    program: str
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # below its home
    resume: Sequence[str] = ()
    knows_context: bool = False  # so it shortens its history before a prompt is too long


_CODEX = (
    "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", NAME,
    "-c", f"model_context_window={CONTEXT}", "-c", "model_provider=baton", "-c",
    'model_providers.baton={{name="Baton",base_url="{url}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}',
)  # fmt: skip
_OPENCODE = {
    "model": f"baton/{NAME}",
    "provider": {"baton": {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "{url}/v1"},
        "models": {NAME: {
            "limit": {"context": CONTEXT, "output": 4096},
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }},
    }},
}  # fmt: skip
CODEX = Agent(
    "codex", ".bin/codex", ("exec", *_CODEX, "{prompt}"), {"OPENAI_API_KEY": "none"},
    resume=("exec", "resume", "--last", *_CODEX, "Go on."), knows_context=True,
)  # fmt: skip
CLAUDE_CODE = Agent(
    "claude-code", ".bin/claude", ("-p", "--allowedTools", "Bash,Read", "--", "{prompt}"),
    {
        "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_SMALL_FAST_MODEL": NAME, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
    },
)  # fmt: skip
OPENCODE = Agent(
    "opencode", "opencode-linux-x64/bin/opencode", ("run", "--pure", "--auto", "{prompt}"),
    {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
)  # fmt: skip


class Router:
    """A router whose model follows the script, in a process of its own."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self._log = log
        self._seen = 0

    def refusals(self) -> list[str]:
        """Return the requests that were refused since the last call."""
        lines = self._log.read_text(errors="replace").splitlines()
        seen, self._seen = self._seen, len(lines)
        return [line for line in lines[seen:] if line.startswith("REFUSED")]


@contextmanager
def scripted_router(template: str, folder: Path) -> Iterator[Router]:
    picture, log = folder / "picture.png", folder / f"router-{template}.log"
    picture.write_bytes(base64.b64decode(PICTURE_URL.partition(",")[2]))
    argv = [sys.executable, "-m", "tests.interop.scripted_model", template, str(picture)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True, start_new_session=True
        )
    try:
        if not (address := process.stdout.readline().strip()):
            raise SuiteBroken(f"the router did not start: {log.read_text()[-400:]}")
        yield Router(f"http://{address}", log)
    finally:
        end_session(process)


def run_agent(agent: Agent, _: Target, environment: Environment) -> SuiteResult:
    cases = list[Case]()
    for template in TEMPLATES:
        with scripted_router(template, environment.scratch) as router:
            for case, about in CASES.items():
                home = environment.scratch / f"{template}-{case}"
                (home / "work").mkdir(parents=True)
                ran = _turn(agent, agent.command, case, home, router, environment)
                if agent.resume and ran.code and case == "cut":
                    ran = _turn(agent, agent.resume, case, home, router, environment)
                refusals = router.refusals()
                if case == "context" and not (agent.knows_context or refusals):
                    refusals = ["no prompt was too long"]
                cases.append(_judged(f"{about}, {template} template", case, ran, refusals))
    return SuiteResult(cases)


def _turn(agent: Agent, command: Sequence[str], case: str, home: Path, router: Router, environment: Environment) -> Ran:
    prompt = prompt_of(case, agent.name)
    for name, content in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content.replace("{url}", router.url))
    variables = {name: value.format(url=router.url) for name, value in agent.variables.items()}
    argv = [
        str(npm_folder(agent.name) / agent.program),
        *(word.format(url=router.url, prompt=prompt) for word in command),
    ]
    return run_bounded(argv, environment.seconds, home / "work", _variables(environment, home) | variables)


def _variables(environment: Environment, home: Path) -> dict[str, str]:
    variables = environment.variables({"HOME": str(home), **_OFFLINE})
    return {name: value for name, value in variables.items() if not name.startswith("XDG_")}


def _judged(name: str, case: str, ran: Ran, refusals: Sequence[str]) -> Case:
    """Return a case by what the agent printed. OpenCode ends with an error where it has gone on after a refusal."""
    strange = [line for line in refusals if case != "context" or not _is_too_long(line)]
    if strange:
        return Case.failed(name, strange[0])
    if END[case] not in ran.output:
        return Case.failed(name, f"it ended with {ran.code}: {ran.tail}")
    return Case(name, "passed")


def _is_too_long(refusal: str) -> bool:
    return any(words in refusal for words in _TOO_LONG)


def run_client(script: str, _: Target, environment: Environment) -> SuiteResult:
    """Run the checks of a library: a script of Python, or one of JavaScript beside its packages from npm."""
    cases = list[Case]()
    for template in TEMPLATES:
        with scripted_router(template, environment.scratch) as router:
            argv = [environment.python, str(CLIENTS / script), router.url, NAME]
            if script.endswith(".mjs"):
                program = shutil.copy(CLIENTS / script, npm_folder("ai-sdk").parent)
                texts = {"LOOP": LOOP, "PICTURE": PICTURE, "PICTURE_URL": PICTURE_URL, "TYPED": TYPED, "END": END}
                argv = ["node", program, router.url, NAME, json.dumps(texts)]
            ran = run_bounded(
                argv, environment.seconds, environment.scratch, _variables(environment, environment.scratch)
            )
            read = read_cases(ran.output)
            if ran.code or not read:
                read.append(Case.failed(script, f"the script ended with {ran.code}: {ran.tail}"))
            read += [Case.failed(script, line) for line in router.refusals() if not _is_too_long(line)]
            cases += [replace(case, name=f"{case.name}, {template} template") for case in read]
    return SuiteResult(cases)
