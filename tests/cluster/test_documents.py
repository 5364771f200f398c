"""Every command of README and docs runs as written, in an empty folder, in the order of its page.

All pages share a machine (`machine.py`), so ports and homes are those that the pages show. README comes first. Later
pages join the Ray that it starts; `test_own_ray.py` is about clusters with a Ray of their own. Most of the time goes
into starting clusters, so no more are started than the pages need:

- A command that needs a cluster takes the one that is up, of whatever page. If there is none, it gets one prefill and
  two decode workers.
- `baton up` ends the cluster before. `baton down` waits until the next `baton up` or the page's end.
- If an earlier section has made API keys, a command that asks for a cluster gets a new one without keys.

Beside a cluster, a reader has more than an empty folder:

- `_FILES`: the files that commands name, such as a model's directory. A file that the page shows with `cat` holds that.
- SmolLM2, if `make smollm2` has fetched it. Otherwise the model that comes with Baton stands in, and outputs that come
  from a cluster are not compared.
- `_PLACEHOLDERS`: ids and keys that differ each time. Some commands are ended as their page says, by Ctrl-C.

An output of one line must be what the page shows, but for its numbers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator

import pytest

from baton.checkpoints import named
from engine.cpu import build
from tests.cluster.machine import HOME, ROOT, Done, Machine, unavailable
from tests.support import documents
from tests.support.documents import Command, Page

pytestmark = [pytest.mark.cluster, pytest.mark.alone]


def _starts(page: Page) -> bool:
    return any(command.text.startswith("baton up") for command in page.run)


PAGES = {page.name: page for page in sorted(documents.pages(), key=lambda page: not _starts(page)) if page.run}
"""Those that start a cluster come first. They leave one to the others."""
_DEMO = ROOT / "deploy" / "models" / "baton-demo"
_STAND_IN = named.MODELS["smollm2"].cached() is None
_OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
_REQUEST = '{"timestamp": %d000, "input_length": 64, "output_length": 16, "hash_ids": [1]}'
_FILES = {
    "./model": f"cp -r {_DEMO} model",
    "cert.pem": f"{_OPENSSL} -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem",
    "cluster.yaml": "echo 'cluster: {decode: 1}' > cluster.yaml",
    "system-prompt.txt": "yes 'You are the support desk.' | head -n 20 > system-prompt.txt",
    "trace.jsonl": f"printf '{_REQUEST}\\n' $(seq 50) > trace.jsonl",
    "prefixes.jsonl": f"""echo '{json.dumps({"id": "support", "text": "Hello. " * 20})}' > prefixes.jsonl""",
}
_PLACEHOLDERS: dict[str, Callable[[Run], str]] = {}
_ENDLESS = ("baton top", "baton logs decode-0 --follow", "baton top --interval 5 --requests 20")
"""Commands that end with Ctrl-C, which a reader types as soon as they show something."""
_CLUSTERLESS = ("up", "down", "keys", "advise", "size", "config", "doctor", "collect-env", "version")
_IN_A_TERMINAL = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "-c", sys.argv[1]])
print(os.read(terminal, 100))
os.write(terminal, b"\\x03")
while True:
    try:
        if not os.read(terminal, 10_000):
            break
    except OSError:  # the other end is closed
        break
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


class Run:
    """Pages on a machine: their folders, whether a cluster is up, and the section's first API key."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_up = False
        self._folder = "/tmp"
        self._key = self._key_section = ""

    def open(self, page: Page) -> None:
        """Make the folder of a page, with the files that its commands name. No key of an earlier page is left."""
        self._drop_keys()
        self._folder = f"/tmp/{page.name.replace('/', '-')}"
        assert self._machine.run("mkdir", self._folder).status == 0
        shown = {command.text.removeprefix("cat "): command.output for command in page.run if _shows_a_file(command)}
        for name, content in shown.items():
            self._bash(f"cat > {name} <<'END'\n{content}END")
        words = {word for command in page.run for word in command.text.split()}
        for name in words & set(_FILES) - set(shown):
            self._bash(_FILES[name])

    def __call__(self, command: Command) -> Done:
        begins = command.text.startswith(("baton up", "baton keys add")) or _needs_a_cluster(command)
        if command.section != self._key_section and begins:
            self._drop_keys()
        if _needs_a_cluster(command) and not self._is_up:
            self._bash("baton up --prefill 1 --decode 2")
            self._is_up = True
            # There is a request to explain, and a log of it.
            self._bash(f"BATON_API_KEY={self._key} baton generate 'Hello!' --max-tokens 8")
        text = command.text
        if _STAND_IN:
            text = text.replace("smollm2", _DEMO.name if command.language == "python" else str(_DEMO))
        for placeholder, value in _PLACEHOLDERS.items():
            text = text.replace(placeholder, value(self)) if placeholder in text else text
        if command.language == "python":
            self._bash(f"cat > program.py <<'END'\n{text}END")
            text = "python program.py"
        if text in _ENDLESS:
            text = f"python -c {shlex.quote(_IN_A_TERMINAL)} {shlex.quote(text)}"
        subcommand = text.split()[:2]
        if subcommand == ["baton", "up"]:
            self._take_down()
        done = self._machine.run("bash", "-c", f"cd {self._folder}; {text} <<< 'Hello!'", timeout=120)
        if subcommand in (["baton", "up"], ["baton", "down"]) and done.status == 0:
            self._is_up = subcommand[1] == "up"
        if text.startswith("baton keys add "):
            self._key, self._key_section = self._key or done.out.strip(), command.section
        return done

    def last_request(self) -> str:
        return self._machine.baton("explain", "--last", 1, "--json").json["requests"][0]["request_id"]

    def key(self) -> str:
        """The first API key that the section has made."""
        return self._key

    def give_up(self) -> None:
        """Leave the next page neither a cluster nor keys, after a page that failed."""
        self._machine.run("baton", "down", timeout=120)
        self._is_up = False
        self._drop_keys()

    def _drop_keys(self) -> None:
        if self._key:
            self._take_down()
            self._bash(f"rm {HOME}/.local/state/baton/baton/api-keys.json")
            self._key = ""

    def _take_down(self) -> None:
        if self._is_up:
            self._bash("baton down")
            self._is_up = False

    def _bash(self, text: str) -> None:
        done = self._machine.run("bash", "-c", f"cd {self._folder}; {text}", timeout=120)
        assert done.status == 0, done


_PLACEHOLDERS |= {"5f1c2d9a70b3e846-1a2b3c4d.17": Run.last_request, "baton-4kXq…": Run.key}


def _pattern(shown: str) -> str:
    """Return what matches an output of one line, whatever its numbers. Longer outputs match anything."""
    if shown.count("\n") != 1:
        return ""
    for placeholder in _PLACEHOLDERS:
        shown = shown.replace(placeholder, "…")
    return re.sub(r"(?:\\\.)?\d+", r"\\d+", re.escape(shown.strip())).replace("…", ".*")


def _shows_a_file(command: Command) -> bool:
    return command.text.startswith("cat ") and len(command.text.split()) == 2


def _needs_a_cluster(command: Command) -> bool:
    subcommands = re.findall(r"(?:^|\s)baton ([a-z-]+)", command.text)
    asks = command.language == "python" or command.text.startswith("curl ")
    return asks or any(each not in _CLUSTERLESS for each in subcommands)


def _in_order(commands: Iterable[Command]) -> Iterator[Command]:
    """Yield the commands; `baton down` only before the next `baton up`, or at the end."""
    waiting: list[Command] = []
    for command in commands:
        if command.text == "baton down":
            waiting.append(command)
            continue
        if command.text.startswith("baton up"):
            yield from waiting
            waiting = []
        yield command
    yield from waiting


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    if reason := unavailable():
        pytest.skip(reason)
    build.library()  # compiled here, not while a command is waited for
    with Machine() as machine:
        yield Run(machine)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_written(page: str, run: Run):
    run.open(PAGES[page])
    try:
        for command in _in_order(PAGES[page].run):
            done = run(command)
            expected = 130 if command.text in _ENDLESS else command.status
            assert done.status == expected, f"{page}:{command.line}: {command.text}\n{done.out}\n{done.err}"
            if _STAND_IN and _needs_a_cluster(command):
                continue
            assert re.search(_pattern(command.output), done.out), f"{page}:{command.line}: {command.text}\n{done.out}"
    except BaseException:
        run.give_up()
        raise


def test_what_a_reader_is_given_is_used():
    """No rule above is left from a command that no page shows any more."""
    text = "\n".join(command.text for page in PAGES.values() for command in page.run)
    assert [name for name in (*_FILES, *_PLACEHOLDERS) if name not in text] == []
    assert [line for line in _ENDLESS if line not in text.splitlines()] == []
