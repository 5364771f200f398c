"""A clock that a test moves."""


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by `seconds`; raises ValueError for a negative step, since time never runs back."""
        if seconds < 0:
            raise ValueError(f"a clock can't go back by {-seconds} s")
        self._now += seconds
        return self._now
