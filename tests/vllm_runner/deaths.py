"""Deaths of processes in clusters over vLLM's runner, and what comes after."""

import os
import signal
from itertools import count

import psutil

from deploy.local import LocalCluster
from tests.support import workload
from tests.support.cluster import at_rest
from tests.support.eventually import eventually
from tests.vllm_runner.driver import prompt_of

_VLLM_OF = "vLLM of "


def owner_of(victim: str) -> str:
    """The process that ends when the victim dies: itself, or the worker that it is the vLLM of."""
    return victim.removeprefix(_VLLM_OF)


def pid_of(cluster: LocalCluster, victim: str) -> int:
    pid = cluster.pids[owner_of(victim)]
    if victim.startswith(_VLLM_OF):
        (child,) = psutil.Process(pid).children()
        return child.pid
    return pid


def kill(cluster: LocalCluster, victim: str) -> None:
    os.kill(pid_of(cluster, victim), signal.SIGKILL)


def start_again(cluster: LocalCluster, name: str) -> None:
    eventually(lambda: name not in cluster.pids, what=f"the end of {name}")
    cluster.start(name)
    cluster.wait_live([name])


def hand_over(cluster: LocalCluster) -> None:
    """Wait until a fresh prompt comes through the store, and then for the end of all work."""
    fresh = count(100)
    eventually(
        lambda: workload.ask(cluster.address, prompt_of(200, next(fresh)), 2).work.pages_fetched,
        what="a hand-off through the store",
    )
    eventually(lambda: at_rest(cluster), what="everything freed")
