"""PromQL as the dashboards use it. Names of metrics are written out in full, so that a search finds them.

Every selector has the job that the reader chose, and those of a board about single processes have their names. `by` is
a list of labels, separated by commas.
"""

from __future__ import annotations

WINDOW = "$__rate_interval"


def series(metric: str, /, **labels: str) -> str:
    """A selector. A value that begins with "~" is a regular expression, one with "!" must differ."""
    matchers = ['job=~"$job"']
    for label, value in labels.items():
        operator = {"~": "=~", "!": "!="}.get(value[:1], "=")
        matchers.append(f'{label}{operator}"{value.lstrip("~!")}"')
    return f"{metric}{{{','.join(matchers)}}}"


def total(metric: str, /, by: str = "", **labels: str) -> str:
    """The sum of a gauge."""
    return f"{_aggregate('sum', by)} ({series(metric, **labels)})"


def highest(metric: str, /, by: str = "", **labels: str) -> str:
    """The maximum of a gauge."""
    return f"{_aggregate('max', by)} ({series(metric, **labels)})"


def rate(metric: str, /, by: str = "", *, window: str = WINDOW, **labels: str) -> str:
    """The sum of a counter's rates, a second."""
    return f"{_aggregate('sum', by)} (rate({series(metric, **labels)}[{window}]))"


def rise(metric: str, /, by: str = "", **labels: str) -> str:
    """By how much a counter has risen in the window."""
    return f"{_aggregate('sum', by)} (increase({series(metric, **labels)}[{WINDOW}]))"


def quantile(q: float, histogram: str, /, by: str = "", **labels: str) -> str:
    """A quantile of a histogram."""
    le = f"le,{by}" if by else "le"
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', le, **labels)})"


def mean(histogram: str, /, by: str = "", **labels: str) -> str:
    """The mean of a histogram."""
    return f"{rate(f'{histogram}_sum', by, **labels)} / {rate(f'{histogram}_count', by, **labels)}"


def _aggregate(how: str, by: str) -> str:
    return f"{how} by ({by})" if by else how
