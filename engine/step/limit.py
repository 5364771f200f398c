"""How many tokens a worker's steps may have, once memory has shown that the configured number is too many. Pure."""

# pyright: strict

from collections.abc import Iterable

from engine.step.batch import Chunk


class StepLimit:
    """The largest number of tokens of a step. It only ever falls."""

    def __init__(self, most: int, least: int) -> None:
        """`most`: as configured. `least`: the smallest step that can be planned."""
        self.tokens = most
        self._least = min(least, most)

    def out_of_memory(self, chunks: Iterable[Chunk]) -> bool:
        """A step of these chunks ran out of memory. Halve the limit, for good; False if there is no smaller step.

        Half of what the step had, if that is less: it may have been far below the limit, behind a long context.
        """
        had = sum(len(chunk.tokens) for chunk in chunks)
        smaller = max(self._least, min(self.tokens, had) // 2)
        if smaller >= self.tokens:
            return False
        self.tokens = smaller
        return True
