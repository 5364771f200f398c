"""How many proposals a step verifies: as many as give the most tokens a second.

With a + a² + … + aᵏ expected tokens from k proposals, of which each is right with probability a, a step has

    (sequences + Σ e(aᵢ, kᵢ)) / (seconds · times(rows) + seconds of the drafter)

tokens a second. Of any number of proposals those with the largest aᵏ bring the most, so one number is to be found. The
drafter makes as many steps as the longest of its guesses has tokens. Nothing is assumed of the seconds but that
they are known.

A price that was learned too dear would never be paid again, and one too cheap never compared with that of a step
without proposals. So a step is a *trial* now and then: what proposals cost counts for a part, or double, or so much
that there are none. Trials become rarer as long as the decision between some and none stays. A trial where there were
none has few proposals, and the drafter's work for such trials takes at most a share of all seconds.

A decision takes time, too. While there are no proposals, decisions take at most a share of all seconds. With a small
model and many sequences one step in several is decided about, else each. Pure.
"""

# pyright: strict

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import TypeAlias

from msgspec import Struct, structs

from decode_worker.row_curve import RowCurve

_RARE = 0.02  # a proposal that is right less often is not considered
_MARGIN = 1.02  # times as many tokens a second as without: less is not worth what is not counted
_FIRST_TRIAL, _TRIAL, _LAST_TRIAL = 16, 64, 512  # steps to one: the first, the last with proposals, and without
_TRIAL_SHARES = (0.15, 0.5, math.inf, 2.0)  # so many times the costs of proposals count in a trial
_TRIAL_PROPOSALS = 16  # at most, where the last decision was none: of all sequences together
_DECISION, _FOR_ALL = 12e-6, 50e-6  # seconds that a decision takes for each sequence, its guess included, and besides
_DECIDING, _TRYING = 0.005, 0.01  # share of all seconds: decisions, and work of the drafter for trials

_Chance: TypeAlias = tuple[float, int, int]


class Guesser(Struct, frozen=True):
    """A sequence that may have up to `most` proposals, each right with probability `right`."""

    right: float
    most: int
    drafted: bool = False


class ProposalCounts(Struct, frozen=True):
    """A decision. `rate`: expected tokens a second; `row`: seconds that each proposal adds on average; `trial`: a trial
    where the last decision was none."""

    counts: tuple[int, ...]
    rate: float
    row: float = 0.0
    trial: bool = False


class ProposalChooser:
    """Decides, and keeps the accounts of decisions and trials."""

    def __init__(self, curve: RowCurve) -> None:
        self._curve = curve
        self._until_trial = self._interval = _FIRST_TRIAL
        self._verifies = False  # by the last decision that was no trial
        self._shares = itertools.cycle(_TRIAL_SHARES)
        self._for_decisions = self._for_trials = 0.0  # seconds that may be spent

    def is_due(self, seconds: float) -> bool:
        """Whether to decide about the next step, of so many seconds. If not, it has no proposals."""
        self._for_decisions = min(0.0, self._for_decisions + _DECIDING * seconds)
        self._for_trials += _TRYING * seconds
        if self._verifies:
            return True
        if self._for_decisions < 0:
            self._until_trial -= 1
            return False
        return True

    def pay(self, seconds: float) -> bool:
        """Take seconds of the drafter for a trial from those that may be spent; False: there are not so many."""
        if seconds > self._for_trials:
            return False
        self._for_trials -= seconds
        return True

    def choose(
        self, guessers: Items[Guesser], sequences: int, seconds: float, prompts: float, drafting: Callable[[int], float]
    ) -> ProposalCounts:
        """For a step of so many sequences that takes `seconds` without proposals, and `prompts` more for those in it.
        `drafting`: seconds of so many steps of the drafter."""
        self._until_trial -= 1
        if not self._verifies:
            self._for_decisions -= _DECISION * sequences + _FOR_ALL
        share = 1.0
        if trial := self._until_trial < 0:
            self._until_trial = self._interval = min(2 * self._interval, _TRIAL if self._verifies else _LAST_TRIAL)
            share = next(self._shares)
        first = trial and not self._verifies
        most = _TRIAL_PROPOSALS if first else sum(each.most for each in guessers)
        best = self._best(guessers, sequences, (seconds, prompts), drafting, share, most)
        if first:
            return structs.replace(best, trial=True)
        if not trial and self._verifies != any(best.counts):
            self._verifies = any(best.counts)
            self._until_trial = self._interval = _FIRST_TRIAL
        return best

    def _best(
        self,
        guessers: Items[Guesser],
        sequences: int,
        without: tuple[float, float],
        drafting: Callable[[int], float],
        share: float,
        most: int,
    ) -> ProposalCounts:
        """Of each number of proposals, up to `most`, the likeliest, with the drafter's or without. `share`: so much
        counts of what they cost."""
        seconds, least = without[0], sum(without)
        best, price, likeliest = _MARGIN * sequences / least, 0.0, list[_Chance]()
        chances = sorted(_chances(guessers), reverse=True)
        own = [each for each in chances if not each[2]]
        for some in (chances, own) if 0 < len(own) < len(chances) else (chances,):
            tokens, counted, depth = float(sequences), 0, 0
            for rows, times in self._curve.longer(sequences, sequences + min(most, len(some))):
                for chance, _, place in some[counted : rows - sequences]:
                    tokens += chance
                    depth = max(depth, place)
                counted = rows - sequences
                more = share * (seconds * (times - 1) + (drafting(depth) if depth else 0.0))
                more += _DECISION * sequences + _FOR_ALL
                if (rate := tokens / (least + more)) > best:
                    best, price, likeliest = rate, more / counted, some[:counted]
        counts = Counter([number for _, number, _ in likeliest])
        return ProposalCounts(tuple(counts[number] for number in range(len(guessers))), best, price)


def _chances(guessers: Items[Guesser]) -> Iterator[_Chance]:
    """Yield of each proposal the probability that it and all before it are right, whose it is, and which step of the
    drafter makes it; 0: none."""
    for number, each in enumerate(guessers):
        chance = 1.0
        for place in range(1, each.most + 1):
            if (chance := chance * each.right) < _RARE:
                break
            yield chance, number, place if each.drafted else 0
