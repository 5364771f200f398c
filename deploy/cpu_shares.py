"""Divide a machine's cores among its workers.

If two workers both use every core, they wait for each other's threads within each step. That costs far more than
running on half of the cores each.
"""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from baton.config import Config, DecodeConfig, PrefillConfig

Section = TypeVar("Section", PrefillConfig, DecodeConfig)


def share_cores(config: Config, workers: int) -> Config:
    """Return the configuration of one of `workers` on this process's cores. `threads` 0 becomes its share of them."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, workers))
    return msgspec.structs.replace(
        config, prefill=_with_threads(config.prefill, share), decode=_with_threads(config.decode, share)
    )


def _with_threads(section: Section, threads: int) -> Section:
    return section if section.threads else msgspec.structs.replace(section, threads=threads)
