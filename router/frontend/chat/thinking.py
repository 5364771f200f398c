"""Reasoning between two markers, as DeepSeek-R1, Qwen3 and Magistral write it, and the answer after it.

Some templates end a prompt with the opening marker, some models write it themselves, and a template that switches
reasoning off ends the prompt with a closed pair. So the end of the prompt says in which part the output begins.
"""

# pyright: strict

from __future__ import annotations

from dataclasses import dataclass

from router.frontend.chat.text_parser import DeltaWriter, Reads, TextParser


@dataclass(frozen=True)
class ThinkMarkers:
    """A family's markers, and whether its output begins within them where the prompt has neither."""

    begin: str
    end: str
    begins_inside: bool = False

    def inside(self, prompt: str, continued: str | None = None) -> bool:
        """Whether the output begins with reasoning. `continued` is the message that it continues, if any."""
        if continued is not None:
            return continued.rfind(self.begin) > continued.rfind(self.end)
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return True
        return self.begins_inside and not prompt.endswith(self.end)


class ThinkSplitter(TextParser):
    """Gives what is between the markers as reasoning, and the rest to the parser of the answer."""

    def __init__(self, out: DeltaWriter, markers: ThinkMarkers, answer: Reads, *, inside: bool) -> None:
        super().__init__(out)
        self._markers = markers
        self._answer = answer
        self._thinks = self.thought = inside  # now, and at any time
        self._said = False  # whether there has been any reasoning
        self._space: list[str] = []  # that is reasoning, or the answer's, if more of it comes
        self._state = self._start

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._thinks

    def finish(self) -> None:
        self._ended = True
        self.feed("")
        if self._state == self._start and not self._thinks:
            self._answer.feed("".join(self._space))
        self._answer.finish()

    def _start(self, text: str, at: int) -> int:
        """Skip whitespace and the opening marker."""
        end = at + len(text[at:]) - len(text[at:].lstrip())
        self._space.append(text[at:end])
        if end == len(text):
            return end
        begin = self._markers.begin
        if text.startswith(begin, end):
            self._thinks = self.thought = True
            self._space.clear()
            self._state = self._reasoning
            return end + len(begin)
        if begin.startswith(text[end:]) and not self._ended:
            return end
        if self._thinks:
            self._state = self._reasoning
            self._space.clear()
        else:
            self._state = self._content
            self._answer.feed("".join(self._space))
        return end

    def _reasoning(self, text: str, at: int) -> int:
        end = self._markers.end
        found = text.find(end, at)
        stop = found if found >= 0 else self._safe(text, at, (end,))
        self._think(text[at:stop])
        if found < 0:
            return stop
        self._thinks = False
        self._space.clear()
        self._state = self._gap
        return found + len(end)

    def _think(self, text: str) -> None:
        """Give reasoning, without the whitespace around it."""
        if not self._said:
            text = text.lstrip()
        if body := text.rstrip():
            self._said = True
            self._out.reasoning("".join(self._space) + body)
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _gap(self, text: str, at: int) -> int:
        """Skip the whitespace between the reasoning and the answer."""
        rest = text[at:].lstrip()
        if rest:
            self._state = self._content
        return len(text) - len(rest)

    def _content(self, text: str, at: int) -> int:
        self._answer.feed(text[at:])
        return len(text)
