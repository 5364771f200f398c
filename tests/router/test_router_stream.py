"""One request's output between the state that makes it and the client that reads it."""

from __future__ import annotations

import asyncio

from baton.errors import Overloaded
from baton.messages import TokenLogprob
from baton.timeline import Timeline
from router.events import Cancelled, End, Failed, Finished, Outcome, Summary, Usage
from router.stream import Output, Stream, Verdict
from router.text import TextStream, Tokenizer
from tests.router import tokenizers

BYTES = Tokenizer(tokenizers.byte_level())


def stream(*stops: str, max_unread: int = 100) -> Stream:
    return Stream("r", TextStream(BYTES, [], stops, frozenset()), max_unread)


def end(outcome: Outcome, completion: int = 9) -> End:
    return End("r", outcome, Summary(Timeline(0.0), 0.0, Usage(3, 0, completion)))


def read_all(of: Stream) -> list[Output | End]:
    async def run() -> list[Output | End]:
        news: list[Output | End] = []
        while not news or not isinstance(news[-1], End):
            news.append(await asyncio.wait_for(of.read(), 5))
        return news

    return asyncio.run(run())


def test_what_was_not_read_comes_in_one_piece_and_the_end_last() -> None:
    out = stream()
    first, second = BYTES.encode("The quick")[1:], BYTES.encode(" brown fox")[1:]
    out.emit(first, [TokenLogprob(token, -1.0) for token in first])
    out.emit(second, [TokenLogprob(token, -2.0) for token in second])
    out.end(end(Finished("length")))
    output, last = read_all(out)
    assert isinstance(output, Output)
    assert (output.text, output.tokens) == ("The quick brown fox", first + second)
    assert [one.token for one in output.logprobs] == output.tokens
    assert last == end(Finished("length"))


def test_a_reader_is_woken_by_news() -> None:
    async def run() -> None:
        out = stream()
        reading = asyncio.create_task(out.read())
        await asyncio.sleep(0)
        out.emit(BYTES.encode("fox")[1:], ())
        assert isinstance(await asyncio.wait_for(reading, 5), Output)

    asyncio.run(run())


def test_a_stop_string_overrules_what_the_state_said_in_the_same_moment() -> None:
    out = stream(" fox")
    tokens = BYTES.encode("brown fox jumps over")[1:]
    assert out.emit(tokens, ()) is Verdict.STOPPED
    assert out.emit(tokens, ()) is Verdict.GOES_ON
    out.end(end(Finished("length"), completion=len(tokens)))
    output, last = read_all(out)
    assert isinstance(output, Output)
    assert isinstance(last, End)
    assert output.text == "brown"
    assert last.outcome == Finished("stop")
    assert last.summary.usage.completion == len(output.tokens) < len(tokens)


def test_text_held_back_is_given_out_at_the_end_but_not_after_a_failure() -> None:
    for outcome, text in ((Finished("length"), "brown fox"), (Failed(Overloaded("no")), "brown ")):
        out = stream("foxes")
        out.emit(BYTES.encode("brown fox")[1:], ())
        out.end(end(outcome))
        output, last = read_all(out)
        assert isinstance(output, Output)
        assert output.text == text
        assert isinstance(last, End)
        assert last.outcome == outcome


def test_a_client_that_does_not_read_costs_bounded_bytes() -> None:
    plain = stream(max_unread=1_000)
    assert plain.emit([5] * 20, ()) is Verdict.GOES_ON
    assert plain.emit([5] * 10, ()) is Verdict.UNREAD
    plain.end(end(Cancelled("unread")))
    assert plain.ended
    likely = stream(max_unread=10_000)
    ten = [TokenLogprob(5, -0.5, tuple((token, -1.0) for token in range(20)))] * 10
    assert likely.emit([5], ten[:1]) is Verdict.GOES_ON
    assert likely.emit([5] * 10, ten) is Verdict.UNREAD  # alternatives count


def test_the_end_is_told_once_whether_it_has_come_or_comes() -> None:
    out, told = stream(), list[str]()
    out.when_ended(lambda: told.append("first"))
    out.end(end(Cancelled("gone")))
    assert told == ["first"]
    out.when_ended(lambda: told.append("second"))
    assert told == ["first", "second"]
    out.when_ended(None)


def test_large_output_comes_in_pieces_that_a_client_takes() -> None:
    async def test() -> None:
        out = stream(max_unread=2**30)
        many = [TokenLogprob(5, -0.5, tuple((token, -1.0) for token in range(20)))] * 10
        for _ in range(200):
            out.emit([5] * 10, many)
        out.end(end(Finished("length")))
        pieces: list[Output] = []
        while isinstance(piece := await out.read(), Output):
            pieces.append(piece)
        assert sum(len(piece.tokens) for piece in pieces) == sum(len(piece.logprobs) for piece in pieces) == 2_000
        assert max(piece.size for piece in pieces) < 128 * 2**10
        assert len(pieces) > 20

    asyncio.run(test())


def test_unread_output_is_dropped_when_its_client_is_given_up() -> None:
    async def test() -> None:
        out = stream()
        out.emit([5] * 10, ())
        out.end(end(Finished("length")))
        out.give_up("the client does not read")
        told = await out.read()
        assert isinstance(told, End)
        assert told.outcome == Cancelled("the client does not read")

    asyncio.run(test())
