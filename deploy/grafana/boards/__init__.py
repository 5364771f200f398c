"""Every dashboard, from the whole to the parts: the service, its requests, and the processes that serve them."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.grafana.board import Board
from deploy.grafana.boards.requests import OBJECTIVES, OVERVIEW, TENANTS, TTFT
from deploy.grafana.boards.router import FAULTS, ROUTER
from deploy.grafana.boards.store import HANDOFF, TIERS
from deploy.grafana.boards.workers import DECODE, PREFILL

BOARDS: Sequence[Board] = (*(OVERVIEW, OBJECTIVES, TTFT, PREFILL, DECODE, HANDOFF, TIERS, ROUTER, TENANTS, FAULTS),)
