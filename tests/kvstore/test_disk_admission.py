"""Which pages are worth writing."""

import pytest

from kvstore.disk.admission_filter import AdmissionFilter
from tests.kvstore.chains import key


@pytest.mark.technique("Admission to the disk by frequency")
def test_a_page_is_admitted_when_it_has_been_used_often_enough() -> None:
    admission = AdmissionFilter(admit_after=3, remember=10)
    assert [admission.used(key("a")) for _ in range(5)] == [False, False, True, True, True]
    assert not admission.used(key("b"))


def test_with_one_use_every_page_is_admitted() -> None:
    assert AdmissionFilter(admit_after=1, remember=10).used(key("a"))


def test_what_was_not_used_for_long_is_forgotten() -> None:
    admission = AdmissionFilter(admit_after=2, remember=2)
    admission.used(key("a"))
    admission.used(key("b"))
    admission.used(key("c"))
    assert len(admission) == 2
    assert not admission.used(key("a"))
    assert admission.used(key("c"))


def test_without_memory_only_single_uses_count() -> None:
    admission = AdmissionFilter(admit_after=2, remember=0)
    assert not admission.used(key("a"))
    assert not admission.used(key("a"))
    assert len(admission) == 0
