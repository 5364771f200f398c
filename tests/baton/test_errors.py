"""The tree of errors: each has a gRPC status, a label of its own where clients must tell it apart, and its drawing."""

import grpc
import pytest

from baton import errors


@pytest.mark.parametrize("error", list(errors.all_errors()))
def test_every_error_has_a_grpc_status_and_is_drawn(error: type[errors.BatonError]) -> None:
    assert grpc.StatusCode[error.status]
    assert errors.__doc__ is not None
    assert f"{error.__name__} " in errors.__doc__ or error.__name__ + "\n" in errors.__doc__


def test_labels_are_unique() -> None:
    labels = [error.reason for error in errors.all_errors()]
    assert len(labels) == len(set(labels))


def test_an_error_is_rebuilt_from_its_label() -> None:
    assert type(errors.from_reason("store_gone", "x")) is errors.StoreGone
    assert type(errors.from_reason("never heard of it", "x")) is errors.BatonError
