"""Names that the store's tests share."""

from __future__ import annotations

from baton.messages import Namespace, Peer

NAMESPACE = Namespace(bytes(16), 1, "float32", 16, 1)
STORE = Peer("store", "store-0", "node", "store-0-1", 1)
