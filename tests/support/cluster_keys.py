"""The keys with which every socket of the tests speaks, also in the processes that tests start from Python."""

import os
from pathlib import Path
from typing import Any

import zmq

from baton.wire import ClusterKeys

KEYS = ClusterKeys(os.environ.setdefault("BATON_TESTS_KEYS", ClusterKeys.generate().secret))


def key_file(folder: Path) -> Path:
    """The file with the keys in that folder, made if need be."""
    path = folder / "cluster.key"
    if not path.exists():
        KEYS.write(path)
    return path


def client(socket: Any, keys: ClusterKeys = KEYS) -> Any:
    """Give a socket that is not ours the keys, to connect with."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    return socket


def server(socket: Any, keys: ClusterKeys = KEYS) -> Any:
    """Give a socket that is not ours the keys, to listen with."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    return socket
