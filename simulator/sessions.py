"""Closed loops: users that play recorded sessions. A turn follows the answer to the one before, after its recorded gap.

Each play of a recording has tokens of its own, except for the blocks that several recordings share (a system prompt).
A prompt continues its parent's prompt as far as the recording did. If that was the whole prompt, the tokens of the
answer follow, as many as fit. The rest is new.
"""

# pyright: strict

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.errors import ConfigError
from simulator.mooncake import BLOCK, TraceLine
from simulator.workloads import FIRST_OWN, Arrival, Wishes, packed

_STAGGER = 600.0  # seconds at most, within which the first sessions of all users begin
_PAUSE = 60.0  # seconds between two sessions of a user, on average


def recordings(lines: Sequence[TraceLine]) -> list[list[TraceLine]]:
    """Return the turns of each recorded session. Raises ConfigError for turns that do not fit their parents."""
    sessions: dict[str, list[TraceLine]] = {}
    for line in lines:
        turns = sessions.setdefault(line.session, [])
        if not -1 <= line.parent < len(turns):
            raise ConfigError(f"turn {len(turns)} of session {line.session!r} names turn {line.parent} as its parent")
        most = min(line.input_length, turns[line.parent].input_length) if line.parent >= 0 else 0
        if not 0 <= line.shared <= most:
            raise ConfigError(
                f"turn {len(turns)} of session {line.session!r} shares {line.shared} tokens with its parent, of at "
                f"most {most}"
            )
        turns.append(line)
    return list(sessions.values())


def tokens_of_parent(turns: Sequence[TraceLine], place: int) -> int:
    """Return how many tokens of a turn's prompt are its parent's prompt and answer."""
    turn = turns[place]
    if turn.parent < 0:
        return 0
    parent = turns[turn.parent]
    if turn.shared < parent.input_length:
        return turn.shared
    return min(parent.input_length + max(1, parent.output_length), turn.input_length)


def common_blocks(recorded: Sequence[Sequence[TraceLine]]) -> set[int]:
    """Return the blocks that several recorded sessions have."""
    blocks = [block for turns in recorded for block in {block for turn in turns for block in turn.hash_ids}]
    return {block for block, again in itertools.pairwise(sorted(blocks)) if block == again}


class Sessions:
    """Draws plays of recorded sessions, the same for the same seed. Every recording is played before one repeats."""

    def __init__(self, lines: Sequence[TraceLine], wishes: Wishes, seed: int) -> None:
        """Raises ConfigError."""
        self.recordings = recordings(lines)
        self._wishes, self._rng = wishes, random.Random(seed)
        self._bag: list[list[TraceLine]] = []
        self._numbers, self.blocks = itertools.count(1), itertools.count(FIRST_OWN)
        self.common = common_blocks(self.recordings)
        self.known: set[int] = set()  # the common blocks that a prompt has begun with

    def users(self, count: int, seconds: float) -> Iterator[Arrival]:
        """Yield the first turn of each user. Users play one session after another, until `seconds` have passed."""
        within = min(_STAGGER, seconds / 5)
        for at in sorted(self._rng.random() * within for _ in range(count)):
            yield self.begin(at, seconds)

    def begin(self, at: float, seconds: float) -> Arrival:
        """Return the first turn of another play."""
        if not self._bag:
            self._bag = self._rng.sample(self.recordings, len(self.recordings))
        play = Play(self, self._bag.pop(), next(self._numbers), seconds)
        return play.turn(self._wishes.request(self._rng, at, (), 1, 1), 0, at)

    def pause(self) -> float:
        return self._rng.expovariate(1 / _PAUSE)


class Play:
    """One user's session: keeps its prompts, and makes the next one of the answer."""

    def __init__(self, sessions: Sessions, turns: Sequence[TraceLine], number: int, seconds: float) -> None:
        self._sessions, self._turns, self._seconds = sessions, turns, seconds
        self.name = f"{turns[0].session}/{number}"
        self._texts: dict[int, bytes] = {}  # prompts and answers, of turns that later ones continue
        self._last = {turn.parent: place for place, turn in enumerate(turns)}  # by turn, the last that continues it
        self._at = 0

    def next(self, arrival: Arrival, answer: bytes, now: float) -> Arrival | None:
        """Return the turn that follows `arrival`, which ended `now` with `answer`; its `at` is the seconds until then.

        An answer that is missing ends the session. After a session its user begins another.
        """
        here = self._at
        if here in self._last:
            self._texts[here] = arrival.text + answer
        for parent in [each for each in self._texts if self._last[each] <= here]:
            del self._texts[parent]
        if not answer or here + 1 == len(self._turns):
            gap = self._sessions.pause()
            return self._sessions.begin(gap, self._seconds) if now + gap < self._seconds else None
        gap = (self._turns[here + 1].after_ms or 0.0) / 1_000
        return self.turn(arrival, here + 1, gap) if now + gap < self._seconds else None

    def turn(self, before: Arrival, place: int, at: float) -> Arrival:
        """Return the request of a turn, with the tenant and the objectives of the one before."""
        self._at = place
        turn = self._turns[place]
        if turn.parent >= 0:
            text = self._texts[turn.parent][: 4 * tokens_of_parent(self._turns, place)]
            possible = len(text) // 4
        else:
            text, possible = self._beginning(turn)
        missing = turn.input_length - len(text) // 4
        text += packed(itertools.islice(self._sessions.blocks, -(-missing // BLOCK)), missing)
        output = max(1, turn.output_length)
        return replace(
            before, at=at, gap=at if place else 0.0, prompt=turn.input_length, output=output,
            max_tokens=max(before.max_tokens, output), text=text, possible=min(possible, turn.input_length - 1),
            play=self,
        )  # fmt: skip

    def _beginning(self, turn: TraceLine) -> tuple[bytes, int]:
        """Return the tokens that other recordings begin with, too, and how many of them occurred before."""
        whole = turn.hash_ids[: turn.input_length // BLOCK]
        blocks = list(itertools.takewhile(self._sessions.common.__contains__, whole))
        known = sum(1 for _ in itertools.takewhile(self._sessions.known.__contains__, blocks))
        self._sessions.known.update(blocks)
        return packed(blocks, BLOCK * len(blocks)), BLOCK * known
