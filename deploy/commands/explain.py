"""`baton explain`: print a request's placement and course, or the turns of a session, as JSON or as tables."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from baton import operator_api as api
from baton.errors import InvalidRequest
from deploy.commands.running_cluster import operator_client
from deploy.commands.terminal import Json, Name, Operator, command, new_table, out, print_json, print_whole

_TERMS = [name for name in api.CostTerms.__struct_fields__ if name != "total_ms"]
_TURNS = 100  # of a session, unless the call says how many
_TIERS = {"GPU": "a device", "CPU": "a host's memory", "DISK": "a disk"}
_REASONS = {
    "new": "never seen",
    "changed": "seen, behind something that differs",
    "evicted": "evicted",
    "concurrent": "another request was computing it",
    "template": "seen, with another chat template or other variables of it",
    "adapter": "seen, with another adapter",
    "salt": "seen, with another cache_salt",
    "tenant": "seen, of another tenant",
    "model": "seen, with another model or form of pages",
    "recomputed": "cached, and computed again",
    "prompt_logprobs": "all tokens are computed for prompt_logprobs",
    "tail": "all pages were cached; the rest of the prompt never is",
}
_COLOURS = {"finished": "green", "failed": "red", "cancelled": "yellow"}
_OUTLOOK = {
    "cached_tokens": ("cached tokens", "d"),
    "ttft_ms": ("TTFT, ms", ".1f"),
    "tpot_ms": ("TPOT, ms", ".2f"),
    "start_ms": ("placed to first token, ms", ".1f"),
}


@command("baton explain 5f1c2d9a70b3e846-1a2b3c4d.17", "baton explain --last 20", "baton explain --session my-agent")
def explain(
    request_id: Annotated[
        str, typer.Argument(help="From `baton generate --json`, an HTTP answer (`id`) or the logs.")
    ] = "",
    last: Annotated[int, typer.Option(min=0, help="List the last requests instead.")] = 0,
    session: Annotated[str, typer.Option(help="List the turns of this session, the last --last or 100.")] = "",
    operator: Operator = "",
    name: Name = "baton",
    as_json: Json = False,
) -> None:
    """Explain a recent request's placement and why its prompt was not cached: costs, times, hop by hop."""
    if bool(request_id) == bool(last or session):
        raise InvalidRequest("give a REQUEST_ID, --last N or --session ID")
    with operator_client(operator, name) as client:
        if last or session:
            summaries = client.requests(last or _TURNS, session=session)
            if as_json:
                print_json({"requests": msgspec.to_builtins(summaries)})
            elif session:
                turns(out, summaries[::-1])
            else:
                requests(out, summaries)
            return
        explained = client.explain(request_id)
    if as_json:
        print_json(msgspec.to_builtins(explained))
    else:
        request(out, explained)


def requests(console: Console, summaries: Sequence[api.RequestSummary]) -> None:
    figures = (">age", ">prompt", ">cached", ">output", ">TTFT, ms", ">TPOT, ms", ">attempts")
    table = new_table("request", "state", *figures, "on")
    for one in summaries:
        table.add_row(
            escape(one.request_id),
            _state(one),
            f"{one.age_ms / 1_000:.1f} s",
            str(one.prompt_tokens),
            _number(one, "cached_tokens", "d"),
            str(one.completion_tokens),
            _number(one, "ttft_ms", ".1f"),
            _number(one, "tpot_ms", ".2f"),
            str(one.attempts),
            _who(one),
        )
    if summaries:
        print_whole(console, table)
    else:
        console.print("no request is remembered")


def turns(console: Console, summaries: Sequence[api.RequestSummary]) -> None:
    """Print a line for each turn of a session, and why its prompt was not cached."""
    figures = (">age", ">prompt", ">cached", ">TTFT, ms", ">page")
    table = new_table("turn", *figures, "why", "tokens not cached")
    for one in summaries:
        why = one.not_cached
        table.add_row(
            escape(one.request_id),
            f"{one.age_ms / 1_000:.1f} s",
            str(one.prompt_tokens),
            _number(one, "cached_tokens", "d"),
            _number(one, "ttft_ms", ".1f"),
            str(why.page) if why else "",
            escape(_why(why)) if why else "",
            _by_reason(why) if why else "",
        )
    if summaries:
        print_whole(console, table)
    else:
        console.print("no turn of this session is remembered")


def _why(why: api.NotCached) -> str:
    """Say in words why the first page was not cached."""
    text = _REASONS.get(why.reason, why.reason)
    if why.reason == "evicted":
        text += f" from {_TIERS[why.tier]}" if why.tier else ", or lost with its process"
        text += f" {why.evicted_ms / 1_000:.1f} s before" if why.evicted_ms is not None else ""
    return f"{text} (as {why.other_request})" if why.other_request else text


def _by_reason(why: api.NotCached) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in why.tokens.items())


def request(console: Console, explanation: api.Explanation) -> None:
    """Print one request: its candidates, predicted and actual times, and the time of each hop, per attempt."""
    one = explanation.request
    ended = f": {escape(one.outcome)}" if one.outcome else ""
    console.print(f"[bold]{escape(one.request_id)}[/] {_state(one)}{ended}   [dim]in logs {escape(one.name)}[/]")
    cached = f" ({one.cached_tokens} cached)" if one.cached_tokens is not None else ""
    console.print(
        f"{one.prompt_tokens} prompt tokens{cached}, {one.completion_tokens} generated; priority {one.priority}; "
        f"received {one.age_ms / 1_000:.1f} s ago"
    )
    if (why := one.not_cached) is not None:
        console.print(f"not cached from page {why.page} (token {why.token}): {escape(_why(why))}; {_by_reason(why)}")
    if one.cascade is not None:
        console.print(_chosen(one.cascade))
    if one.waits_because:
        console.print(f"waits: {escape(one.waits_because)}")
    _candidates(console, explanation)
    if explanation.attempts_omitted:
        console.print(f"[dim]{explanation.attempts_omitted} earlier attempts are not kept[/]")
    for attempt in explanation.attempts:
        console.print()
        _attempt(console, attempt)


def _chosen(choice: api.CascadeChoice) -> str:
    """Say which model of a cascade answered, and why."""
    name, chosen, small = (f"'{escape(one)}'" for one in (choice.model, choice.chosen, choice.small))
    if choice.mean_logprob is None:
        return f"cascade {name}: {chosen} answered, as the priority asks for it"
    side = "below" if choice.reason == "unsure" else "not below"
    return (
        f"cascade {name}: {chosen} answered; of {choice.tokens} tokens of {small} the mean log-probability was "
        f"{choice.mean_logprob:.3f}, {side} {choice.min_logprob:g}   [dim]in logs {escape(choice.first)}[/]"
    )


def _attempt(console: Console, attempt: api.ExplainedAttempt) -> None:
    why = f": {escape(attempt.why)}" if attempt.why else ""
    console.print(f"[bold]attempt {attempt.number}[/] on {_who(attempt)}{why}")
    _candidates(console, attempt)
    _outlook(console, attempt)
    hops = sorted(attempt.hops.items(), key=lambda hop: hop[1])
    console.print("hops, ms: received 0 " + " ".join(f"→ {name} {value:.1f}" for name, value in hops))
    if attempt.proposals_verified:
        proposals = f"{attempt.proposals_verified} verified, {attempt.proposals_accepted} accepted"
        saved = attempt.speculation_saved_ms
        console.print(f"proposals: {proposals}, {abs(saved):.0f} ms {'lost' if saved < 0 else 'saved'}")
    for note in attempt.notes:
        console.print(f"  {escape(note)}")
    if attempt.ended_because:
        console.print(f"[yellow]ended because {escape(attempt.ended_because)}[/]")


def _candidates(console: Console, attempt: api.ExplainedAttempt | api.Explanation) -> None:
    """Print the candidates' costs, without terms that are zero for all of them."""
    if not attempt.candidates:
        return
    terms = [term for term in _TERMS if any(getattr(one.cost, term) for one in attempt.candidates)]
    costs = (f">{term.removesuffix('_ms').replace('_', ' ')}" for term in terms)
    table = new_table("", "candidate", ">cached", *costs, ">total, ms", "")
    for one in attempt.candidates:
        costs = [f"{getattr(one.cost, term):.1f}" for term in (*terms, "total_ms")]
        table.add_row(
            "→" if one.chosen else "",
            _who(one),
            str(one.cached_tokens),
            *([""] * len(costs) if one.infeasible and not one.cost.total_ms else costs),
            escape(one.infeasible),
            style="bold" if one.chosen else "dim" if one.infeasible else None,
        )
    print_whole(console, table)
    if attempt.candidates_omitted:
        console.print(f"[dim]and {attempt.candidates_omitted} more[/]")


def _outlook(console: Console, attempt: api.ExplainedAttempt) -> None:
    table = new_table("", ">predicted", ">actual")
    for name, (title, form) in _OUTLOOK.items():
        predicted, actual = _number(attempt.predicted, name, form), _number(attempt.actual, name, form)
        if predicted or actual:
            table.add_row(title, predicted, actual)
    print_whole(console, table)


def _who(one: api.RequestSummary | api.ExplainedAttempt | api.ExplainedCandidate) -> str:
    return f"{one.decode_worker} with {one.prefill_worker}" if one.prefill_worker else one.decode_worker


def _state(one: api.RequestSummary) -> str:
    return f"[{_COLOURS.get(one.state, 'cyan')}]{one.state}[/]"


def _number(one: api.RequestSummary | api.Outlook, name: str, form: str) -> str:
    value = getattr(one, name)
    return "" if value is None else format(value, form)
