"""A metric's value, as a process tells it. Pure."""

from collections.abc import Mapping

Labels = tuple[str, ...]
Sample = float | Mapping[Labels, float]
