"""A smaller last chunk, where copies are made beside steps: less of a prompt's copying is left when it is computed.

Pages hold all layers, so nothing of a chunk can leave before its end. If the last `pages` are computed in one step, all
of their copies come after it. If they are computed in two, the copies of the first part are made during the second:

    one step   | step of all                  | copies of all          |
    two steps  | first part   | last chunk |  copies of the last chunk |
                              | copies of the first part |

The second step costs what a step costs that computes nothing. It is worth that if the copies that it hides take longer.
Pure.
"""

# pyright: strict

from bisect import bisect_left
from collections.abc import Callable

_DECAY = 0.9  # of older copies' weight, for each report of newer ones


class CopyRate:
    """Seconds for a page, learned from copies that end one after the other."""

    def __init__(self) -> None:
        self._seconds = self._pages = 0.0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """For a page; 0: not known yet."""
        return self._seconds / self._pages if self._pages else 0.0

    def idle(self, now: float) -> None:
        """No copy is under way; the next one begins now at the earliest."""
        self._since = now

    def copied(self, pages: int, now: float) -> None:
        """So many pages have been copied, the last of them now."""
        self._seconds = _DECAY * self._seconds + now - self._since
        self._pages = _DECAY * self._pages + pages
        self._since = now


def last_chunk(pages: int, fixed: float, compute: Callable[[int], float], copy: float) -> int:
    """Return how many of the last `pages` of a prompt are to be a step of their own; 0: none.

    `fixed`: seconds of a step that computes nothing. `compute(n)`: seconds that the last n pages add to a step, rising
    with n. `copy`: seconds to copy a page.
    """
    # The larger the last chunk, the more copies fit beside it, and the fewer there are. From here on all of them fit.
    last = bisect_left(range(pages), True, key=lambda n: fixed + compute(n) >= (pages - n) * copy)
    gains = {n: _gain(pages, n, fixed, compute, copy) for n in (last - 1, last) if 0 < n < pages}
    best = max(gains, key=lambda n: gains[n], default=0)
    return best if gains.get(best, 0.0) > 0 else 0


def _gain(pages: int, last: int, fixed: float, compute: Callable[[int], float], copy: float) -> float:
    """Seconds by which all is copied sooner."""
    hidden = min((pages - last) * copy, fixed + compute(last))
    return hidden - fixed
