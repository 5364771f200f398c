"""The machine's clock. Everything pure takes the time as an argument instead (`baton.clock`)."""

import time


class MonotonicClock:
    """The machine's own clock."""

    now = staticmethod(time.monotonic)
