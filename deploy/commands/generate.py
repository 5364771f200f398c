"""`baton generate`: one request from the command line."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from baton.client import Client, ClientTls, Generated
from baton.errors import InvalidRequest
from deploy.commands.running_cluster import find
from deploy.commands.terminal import CaFile, Json, Name, command, err, out_text, print_json, state_folder


@command(
    'baton generate "Once upon a time" --max-tokens 32',
    'baton generate "Once upon a time" --temperature 0 --json',
    "baton generate --token-ids 1,15,27 --address 127.0.0.1:50051",
)
def generate(
    text: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    token_ids: Annotated[str, typer.Option(help="The prompt as token ids: 1,2,3.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Above 0, up to 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is no limit.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 to 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end-of-sequence token.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole request.")] = None,
    address: Annotated[str, typer.Option(help="host:port of a router, instead of --name.")] = "",
    ca_file: CaFile = "",
    cert_file: Annotated[str, typer.Option(help="PEM certificate to show, where the router asks for one.")] = "",
    key_file: Annotated[str, typer.Option(help="The key of --cert-file.")] = "",
    model: Annotated[str, typer.Option(help="Of several models, the one to answer; by default the first.")] = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Generate from a prompt and stream the text. The API key, if one is needed, comes from $BATON_API_KEY."""
    if (text is None) == (not token_ids):
        raise InvalidRequest("give either a text or --token-ids")
    prompt = parse_token_ids(token_ids) if text is None else text
    state = None if address else find(state_folder(name))
    encrypted = bool(ca_file or cert_file) or (state is not None and state.tls)
    tls = ClientTls(ca_file, cert_file, key_file) if encrypted else False
    with Client(state.target if state is not None else address, tls=tls) as client:
        stream = client.generate(
            prompt,
            model=model,
            timeout=timeout,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
        )
        for delta in stream:
            if not as_json:
                out_text(delta.text)
        generated = stream.result()
    if as_json:
        print_json(generated_as_json(generated))
        return
    out_text("\n")
    usage = generated.usage
    err.print(
        f"[dim]{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated"
        f", ended by {generated.finish_reason}[/]"
    )


def parse_token_ids(text: str) -> list[int]:
    """Parse token ids written as `1,2,3`. Raises InvalidRequest."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"{text!r} is no list of token ids; write them as 1,2,3") from None
    for token in ids:
        if not 0 <= token < 2**32:
            raise InvalidRequest(f"{token} is no token id; they are 0 or more")
    return ids


def generated_as_json(generated: Generated) -> dict[str, Any]:
    """Return the result as plain data, without times that were not reached."""
    timing = {name: round(value, 3) for name, value in asdict(generated.timing).items() if value is not None}
    return {
        "text": generated.text,
        "token_ids": generated.token_ids,
        "finish_reason": generated.finish_reason,
        "usage": asdict(generated.usage),
        "timing": timing,
        "work": asdict(generated.work) | {"decode_workers": list(generated.work.decode_workers)},
        "seed": generated.seed,
        "request_id": generated.request_id,
    }
