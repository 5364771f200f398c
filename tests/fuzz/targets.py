"""The targets by name."""

from collections.abc import Callable, Mapping

from tests.fuzz.case import Target
from tests.fuzz.false_workers import FalseWorkers
from tests.fuzz.grpc_api import GrpcApi
from tests.fuzz.helper_pipes import HelperPipes
from tests.fuzz.http_api import HttpApi
from tests.fuzz.operator_calls import OperatorCalls
from tests.fuzz.page_holders import PageHolders
from tests.fuzz.plain_ports import PlainPorts
from tests.fuzz.router_orders import RouterOrders
from tests.fuzz.router_peer import RouterPeer
from tests.fuzz.store_calls import StoreCalls
from tests.fuzz.store_pages import StorePages
from tests.fuzz.store_replies import StoreReplies

TARGETS: Mapping[str, Callable[..., Target]] = {
    "http": HttpApi,
    "grpc": GrpcApi,
    "operator": OperatorCalls,
    "router": RouterPeer,
    "holders": PageHolders,
    "workers": FalseWorkers,
    "orders": RouterOrders,
    "store": StoreCalls,
    "replies": StoreReplies,
    "pages": StorePages,
    "helpers": HelperPipes,
    "ports": PlainPorts,
}
