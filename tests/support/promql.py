"""Which metrics and labels a PromQL expression names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True)
class Selector:
    """One selector. `matchers` are (operator, label, value), with PromQL's operators."""

    text: str
    metric: str
    matchers: tuple[tuple[str, str, str], ...]


_OPERATORS = {
    "MatchOp.Equal": "=",
    "MatchOp.NotEqual": "!=",
    "MatchOp.Re": "=~",
    "MatchOp.NotRe": "!~",
}  # the enumeration itself can't be a key


def filled(expression: str, variables: Mapping[str, str]) -> str:
    """The expression as Grafana sends it, with the values of its variables."""
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], expression)


def selectors(expression: str) -> list[Selector]:
    """Every selector of the expression. Raises ValueError for what is no PromQL."""
    return [
        Selector(
            node.prettify(),
            node.name or "",
            tuple((_OPERATORS[str(m.op)], m.name, m.value) for m in node.matchers.matchers),
        )
        for node in _nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    ]


def grouping(expression: str) -> set[str]:
    """Every label that the expression groups or joins by."""
    labels: set[str] = set()
    for node in _nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels |= set(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            labels |= set(matching.labels if matching else ()) | set(node.modifier.group_labels or ())
    return labels


def _nodes(tree: promql_parser.Expr) -> list[Any]:
    nodes: list[Any] = []
    promql_parser.walk(tree, lambda node: nodes.append(node))
    return nodes
