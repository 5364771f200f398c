"""How slow this machine is: limits of time are for a certain one."""

import time

_COUNT, _COUNTED = 300_000, 0.008  # seconds of processor time for that count on the machine of the limits


def slowness() -> float:
    """Return how many times as long this machine takes to count; 1 at least."""

    def once() -> float:
        began = time.thread_time()
        sum(number & 7 for number in range(_COUNT))
        return time.thread_time() - began

    return max(1.0, min(once() for _ in range(7)) / _COUNTED)
