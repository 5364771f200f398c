"""`baton chat`: talk to the model of a cluster from a terminal."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.markup import escape

from baton.client import ChatAnswer, Client, ClientTls
from baton.errors import BatonError, InvalidRequest
from deploy.commands.running_cluster import find
from deploy.commands.terminal import CaFile, HttpUrl, Json, Name, command, err, out, print_json, printable, state_folder

_HELP = """/reset        forget the conversation
/system TEXT  set the system prompt, and forget the conversation
/retry        answer the last message again
/timing       show or hide times and cached tokens
/exit         end; so does Ctrl-D"""


@command(
    "baton chat",
    'baton chat "What is the capital of France?"',
    'baton chat --system "Answer in rhymes." --temperature 0',
)
def chat(
    message: Annotated[str | None, typer.Argument(help="One message: print its answer and end.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Above 0, up to 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Show times and cached tokens after each answer.")] = False,
    url: HttpUrl = "",
    ca_file: CaFile = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Chat with the model. The API key, if one is needed, comes from $BATON_API_KEY.

    Without a terminal, each line of stdin is a message."""
    if as_json and message is None:
        raise InvalidRequest("--json needs a message")
    address, encrypted = http_address(url, ca_file, name)
    options = {"max_completion_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with Client(http=address, tls=ClientTls(ca_file) if encrypted else False) as client:
        talk = Conversation(client, system, options, timing)
        if as_json:
            print_json(_as_json(talk.answer(str(message), show=False)))
        elif message is not None:
            talk.answer(message)
        else:
            _converse(talk, _typed() if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin))


class Conversation:
    """The messages so far, and the request for the next answer. An answer that fails or is cut off leaves no trace."""

    def __init__(self, client: Client, system: str, options: dict[str, Any], timing: bool = False) -> None:
        self._client = client
        self._options = options
        self.timing = timing
        self.messages: list[dict[str, str]] = []
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; `system` is the new system prompt, None leaves it as it is."""
        if system is not None:
            self._system = system
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def last_message(self) -> str:
        """Take the last message and its answer back, and return the message. Raises InvalidRequest if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise InvalidRequest("there is no message to answer again")
        del self.messages[-1]
        return self.messages.pop()["content"]

    def answer(self, message: str, show: bool = True) -> ChatAnswer:
        """Send a message and stream its answer to stdout. Raises BatonError."""
        messages = [*self.messages, {"role": "user", "content": message}]
        with self._client.chat(messages, **self._options) as stream:
            for delta in stream:
                if show and delta.reasoning:
                    out.print(f"[dim]{escape(printable(delta.reasoning))}[/]", end="")
                if show and delta.content:
                    out.print(printable(delta.content), end="", markup=False)
            answer = stream.result()
        if show:
            out.print()
            for call in answer.tool_calls:
                out.print(f"[cyan]{escape(printable(f'{call.name}({call.arguments})'))}[/]")
            if self.timing:
                err.print(f"[dim]{timing_of(answer)}[/]")
        self.messages = [*messages, {"role": "assistant", "content": answer.content}]
        return answer


def timing_of(answer: ChatAnswer) -> str:
    """Return the figures of one answer in a line."""
    usage = answer.usage
    parts = [f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated"]
    for name, title in (("time_to_first_token_ms", "TTFT"), ("mean_itl_ms", "ITL")):
        if (value := answer.metrics.get(name)) is not None:
            parts.append(f"{title} {value:.1f} ms")
    return ", ".join([*parts, f"ended by {answer.finish_reason}"])


def _converse(talk: Conversation, lines: Iterable[str]) -> None:
    """Answer each line. Ctrl-C ends an answer; between answers it ends the chat, as does the end of the lines."""
    for line in lines:
        try:
            if not line.startswith("/"):
                if line.strip():
                    talk.answer(line)
            elif not _obey(talk, *line[1:].strip().partition(" ")[::2]):
                return
        except KeyboardInterrupt:
            out.print("[dim](ended)[/]")
        except BatonError as error:
            err.print(f"[bold red]error[/] ({error.reason}): {escape(str(error))}")


def _obey(talk: Conversation, order: str, text: str) -> bool:
    """Carry out what is typed after a slash; False ends the chat."""
    match order:
        case "exit" | "quit" | "bye":
            return False
        case "reset" | "clear":
            talk.reset()
        case "system":
            talk.reset(text.strip())
        case "retry":
            talk.answer(talk.last_message())
        case "timing":
            talk.timing = not talk.timing
        case _:
            out.print(_HELP, markup=False)
    return True


def _typed() -> Iterable[str]:
    """Yield the lines typed at the prompt, with history and editing."""
    import readline  # noqa: F401 `input` then edits lines

    out.print("[dim]/help lists the commands; Ctrl-D ends the chat[/]")
    while True:
        try:
            yield input("> ")
        except EOFError:
            out.print()
            return


def http_address(url: str, ca_file: str, name: str) -> tuple[str, bool]:
    """Return the HTTP API at a URL, or else of a running cluster, and whether it speaks TLS. Raises StartupError."""
    if url:
        return url, bool(ca_file)
    state = find(state_folder(name))
    return f"{'https' if state.tls else 'http'}://{state.first.api}", state.tls


def _as_json(answer: ChatAnswer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "content": answer.content,
        "reasoning": answer.reasoning,
        "tool_calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.tool_calls],
        "finish_reason": answer.finish_reason,
        "usage": {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")},
        "metrics": dict(answer.metrics),
        "request_id": answer.request_id,
    }
