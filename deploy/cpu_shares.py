"""How many threads each worker of a machine gets. Two workers that both use every core wait for each other's threads
within each step, which costs them far more than half of the cores would.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from baton.config import Config, DecodeConfig, PrefillConfig

Section = TypeVar("Section", PrefillConfig, DecodeConfig)


def share_cores(config: Config, workers: int) -> Config:
    """The configuration of one of `workers` on the calling process's cores: where `threads` is left open, its share."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, workers))
    return msgspec.structs.replace(
        config, prefill=_with_threads(config.prefill, share), decode=_with_threads(config.decode, share)
    )


def _with_threads(section: Section, threads: int) -> Section:
    return section if section.threads else msgspec.structs.replace(section, threads=threads)
