"""A few keys in Ray's own key-value store, which lives exactly as long as the detached actors that the keys describe.

The desired state is kept there, so that a restarted supervisor finds it on any node. When Ray ends, actors and keys end
together. A stale key can't restart a cluster.
"""

from collections.abc import Iterator

from ray.experimental import internal_kv


class RayKvKeys:
    """The keys of one cluster."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=self._namespace)

    def get(self, key: str) -> bytes | None:
        return internal_kv._internal_kv_get(key.encode(), namespace=self._namespace)

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key.encode(), namespace=self._namespace)

    def under(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield every key that starts with `prefix`, with the prefix removed, and its value."""
        for key in internal_kv._internal_kv_list(prefix.encode(), namespace=self._namespace):
            if (value := self.get(key.decode())) is not None:
                yield key.decode().removeprefix(prefix), value
