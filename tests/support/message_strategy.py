"""Hypothesis strategies for messages, read off their types and constraints."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st

from baton.messages import Message


def of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any valid message of that kind."""
    return _of(mi.type_info(kind))


def _of(info: mi.Type) -> st.SearchStrategy[Any]:
    match info:
        case mi.StructType():
            fields = {field.name: _of(field.type) for field in info.fields}
            return st.builds(info.cls, **fields)
        case mi.IntType(ge=low, gt=above, le=high):
            bottom = low if low is not None else above + 1 if above is not None else -(2**31)
            return st.integers(bottom, high if high is not None else 2**63 - 1)
        case mi.FloatType(ge=low, gt=above, le=high):
            return st.floats(
                low if low is not None else above, high, exclude_min=above is not None, allow_nan=False, width=64
            )
        case mi.StrType(pattern=str(pattern)):
            return st.from_regex(pattern, fullmatch=True)
        case mi.StrType(min_length=shortest, max_length=longest):
            return st.text(st.characters(codec="ascii"), min_size=shortest or 0, max_size=longest or 20)
        case mi.BytesType(min_length=shortest, max_length=longest):
            return st.binary(min_size=shortest or 0, max_size=min(longest or 64, 64))
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType(values=values):
            return st.sampled_from(sorted(values))
        case mi.UnionType(types=types):
            return st.one_of(*map(_of, types))
        case mi.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=3).map(tuple)
        case mi.TupleType(item_types=items):
            return st.tuples(*map(_of, items))
        case _:
            raise TypeError(f"no strategy for {info}")
