"""The targets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz.case import Target
from tests.fuzz.grpc_api import GrpcApi
from tests.fuzz.http_api import HttpApi

TARGETS: Mapping[str, Callable[..., Target]] = {
    "http": HttpApi,
    "grpc": GrpcApi,
}
