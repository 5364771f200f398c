"""One request's output between the state that makes it and the client that reads it."""

import asyncio

from baton.errors import Overloaded
from baton.messages import TokenLogprob
from baton.timeline import Timeline
from router.events import Cancelled, Failed, Finished, RequestEnded, RequestOutcome, Summary, Usage
from router.frontend.detokenizer import TextStream, Tokenizer
from router.frontend.output_stream import Output, OutputStream, StopVerdict
from tests.router import tokenizers

BYTES = Tokenizer(tokenizers.byte_level())


def stream(*stops: str, max_unread: int = 100) -> OutputStream:
    return OutputStream("r", TextStream(BYTES, [], stops, frozenset()), max_unread)


def end(outcome: RequestOutcome, completion: int = 9) -> RequestEnded:
    return RequestEnded("r", outcome, Summary(Timeline(0.0), 0.0, Usage(3, 0, completion)))


def read_all(of: OutputStream) -> list[Output | RequestEnded]:
    async def run() -> list[Output | RequestEnded]:
        news: list[Output | RequestEnded] = []
        while not news or not isinstance(news[-1], RequestEnded):
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


async def test_a_reader_is_woken_by_news() -> None:
    out = stream()
    reading = asyncio.create_task(out.read())
    await asyncio.sleep(0)
    out.emit(BYTES.encode("fox")[1:], ())
    assert isinstance(await asyncio.wait_for(reading, 5), Output)


def test_a_stop_string_overrules_what_the_state_said_in_the_same_moment() -> None:
    out = stream(" fox")
    tokens = BYTES.encode("brown fox jumps over")[1:]
    assert out.emit(tokens, ()) is StopVerdict.STOPPED
    assert out.emit(tokens, ()) is StopVerdict.GOES_ON
    out.end(end(Finished("length"), completion=len(tokens)))
    output, last = read_all(out)
    assert isinstance(output, Output)
    assert isinstance(last, RequestEnded)
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
        assert isinstance(last, RequestEnded)
        assert last.outcome == outcome


def test_a_client_that_does_not_read_is_noticed() -> None:
    out = stream(max_unread=10)
    assert out.emit([5] * 10, ()) is StopVerdict.GOES_ON
    assert out.emit([5], ()) is StopVerdict.UNREAD
    out.end(end(Cancelled("unread")))
    assert out.ended
