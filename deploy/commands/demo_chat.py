"""What `make demo` shows: which model, its chat, and the story of its last stream.

SmolLM2 speaks English and knows a little of the world. The model that comes with Baton knows nothing, needs no network,
and its answers show a lost page at once. In both chats the last questions ask for facts of the first message.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.checkpoints import named
from baton.client import ChatAnswer, Client
from baton.errors import BatonError
from baton.system_memory import available_memory
from deploy.commands.terminal import new_table

_PATIENCE = 60.0  # seconds for the download
_SMOLLM2 = named.MODELS["smollm2"]
_ROOM = 4 * 2**30  # bytes that three workers with SmolLM2 in float32 need, and a little more


@dataclass(frozen=True)
class Show:
    """A model, and what the demo does with it."""

    title: str
    flags: tuple[str, ...]  # of `baton up`
    turns: tuple[tuple[str, str], ...]  # messages, each with what its answer must hold
    longest: int  # tokens of an answer
    tale: str  # asks for the stream in whose middle a worker is killed
    tale_beginning: str  # of the answer
    tale_tokens: int
    tale_temperature: float
    tale_seed: int
    top_p: float  # of the tale
    temperature: float = 0.0  # of turns whose answers may be any; the others are greedy
    seed: int = 0  # of these turns


BUNDLED = Show(
    title="the model that comes with Baton",
    flags=(),
    turns=(
        (
            "Please remember these notes. Mara lives in Ashford. The code of Mara's locker is 4072. Tira works as a "
            "baker. Tira has a golden parrot. Alwin plays the cello. The blue lamp is in the attic.",
            "",
        ),
        ("Tell me a story about a fox.", ""),
        ("Tell me a story about a turtle.", ""),
        ("Thank you!", ""),
        ("What is the code of Mara's locker?", "4072"),
        ("Where does Mara live?", "Ashford"),
        ("What is the pet of Tira?", "golden parrot"),
        ("Where is the blue lamp?", "attic"),
    ),
    longest=300,
    tale="Tell me many stories about an owl.",
    tale_beginning="Once upon a time",
    tale_tokens=380,  # four stories, and the beginning of one more
    tale_temperature=0.6,
    tale_seed=3,
    top_p=1.0,
    temperature=0.6,  # at 0 the model tells the same story of every animal
    seed=5,
)

SMOLLM2 = Show(
    title=_SMOLLM2.title,
    # In bfloat16 a worker that takes over may round otherwise, and a near tie then goes the other way.
    flags=("--model", _SMOLLM2.name, "--dtype", "float32"),
    turns=(
        (
            "Mara's locker has the code 4072. Mara's dog is called Rex. Mara lives in Ashford. What is the code of "
            "Mara's locker?",
            "4072",
        ),
        ("What is the capital of France?", "Paris"),
        ("What is the largest planet in the solar system?", "Jupiter"),
        ("Why is the sky blue?", "scatter"),
        ("What is the capital of Japan?", "Tokyo"),
        ("What is the name of Mara's dog?", "Rex"),
        ("Where does Mara live?", "Ashford"),
        ("What is the code of Mara's locker?", "4072"),
    ),
    longest=80,
    tale="Tell me a bedtime story about a little boat.",
    tale_beginning="",
    tale_tokens=160,
    tale_temperature=0.7,
    tale_seed=7,
    top_p=0.9,
)


def choose(say: Callable[[str], None]) -> Show:
    """Return what can be shown here, and say which model that is and why."""
    try:
        if (room := available_memory()).available < _ROOM:
            free = f"{room.available / 2**30:.1f} are free ({room.bound})"
            say(f"{SMOLLM2.title} needs {_ROOM >> 30} GiB of memory here, and {free}")
            return _bundled(say)
        folder = _SMOLLM2.fetch(say, _PATIENCE)
    except BatonError as error:
        say(str(error))
        return _bundled(say)
    say(f"serving {SMOLLM2.title}, which lies in {folder}")
    return SMOLLM2


def _bundled(say: Callable[[str], None]) -> Show:
    say(f"so the demo serves {BUNDLED.title}: it knows nothing of the world, and remembers what a chat tells it")
    return BUNDLED


def show_chat(client: Client, show: Show, console: Console) -> bool:
    """Whether each answer holds what it must; the last questions are about the first message."""
    messages: list[dict[str, str]] = []
    turns: list[tuple[str, ChatAnswer]] = []
    right = True
    for question, value in show.turns:
        messages.append({"role": "user", "content": question})
        console.print(f"[bold]you[/]    {escape(question)}")
        console.print("[bold green]model[/]  ", end="")
        temperature = 0.0 if value else show.temperature
        stream = client.chat(
            messages, temperature=temperature, seed=show.seed, max_completion_tokens=show.longest, timeout=60
        )
        for delta in stream:
            console.print(delta.content, end="", markup=False)
        answer = stream.result()
        console.print("" if value in answer.content else f"  [bold red](it should say {value})[/]")
        right = right and value in answer.content
        messages.append({"role": "assistant", "content": answer.content})
        turns.append((question, answer))
    console.print(_table(turns))
    return right


def _table(turns: list[tuple[str, ChatAnswer]]) -> Table:
    table = new_table("turn", ">prompt tokens", ">cached", ">first token")
    table.columns[0].no_wrap = True
    for question, answer in turns:
        first = answer.metrics["time_to_first_token_ms"]
        short = question if len(question) <= 34 else f"{question[:33]}…"
        table.add_row(
            escape(short), str(answer.usage.prompt_tokens), str(answer.usage.cached_tokens), f"{first:.1f} ms"
        )
    return table
