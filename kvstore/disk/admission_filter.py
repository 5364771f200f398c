"""Which pages are worth writing to disk: those that are used again.

Most pages of most prompts are used once; writing them would wear the disk, push out pages that return and cost
bandwidth that loads need. So a page is written when its uses, counted from its first, reach a threshold. Only keys are
remembered, the least recently used are forgotten, and forgetting costs no more than a write that comes later.
"""

# pyright: strict

from collections import OrderedDict


class AdmissionFilter:
    """Counts uses of keys, those of the `remember` most recently used ones. Knows nothing of pages or disks."""

    def __init__(self, admit_after: int, remember: int) -> None:
        self._admit_after = admit_after
        self._remember = remember
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, key: bytes) -> bool:
        """The page of `key` was used (sealed, found, loaded). True once that has happened often enough."""
        uses = min(self._uses.pop(key, 0) + 1, self._admit_after)
        if self._remember:
            while len(self._uses) >= self._remember:
                self._uses.popitem(last=False)
            self._uses[key] = uses
        return uses >= self._admit_after
