import gc
import subprocess
import sys
import weakref

import pytest

from baton.process import settle


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_what_is_there_by_then_is_never_looked_at_again() -> None:
    kept = [_Ring()]
    settle()
    assert not any(each is kept[0] for each in gc.get_objects())  # the collector's list of what it looks through
    assert gc.get_freeze_count() > 0


def test_garbage_is_not_kept_for_ever() -> None:
    ring = _Ring()
    gone = weakref.ref(ring)
    del ring
    settle()
    assert gone() is None


def test_what_comes_later_is_collected_as_ever() -> None:
    settle()
    ring = _Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None


LIMITS = """
import resource
from baton.process import raise_descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
wanted = 65_536 if hard == resource.RLIM_INFINITY else min(65_536, hard)
assert raise_descriptor_limit() == wanted
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
assert raise_descriptor_limit() == 300
"""


def test_a_process_may_open_as_many_descriptors_as_its_hard_limit_allows() -> None:
    subprocess.run([sys.executable, "-c", LIMITS], check=True, timeout=60)
