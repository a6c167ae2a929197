"""Python annotations as Arrow types, which columns fit them, and which fit each other."""

import types
import typing
from typing import Any

import numpy as np
import pyarrow as pa

_SCALARS: dict[Any, pa.DataType] = {
    str: pa.string(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    bytes: pa.binary(),
}


def arrow_type(annotation: Any) -> pa.DataType | None:
    """The Arrow type that a Python annotation stands for; None where any type will do (Any, Array,
    none given).
    """
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return arrow_type(inner[0]) if len(inner) == 1 else None
    if origin is list and arguments:
        inner_type = arrow_type(arguments[0])
        return pa.list_(inner_type) if inner_type is not None else None
    return None


def admits_none(annotation: Any) -> bool:
    """Whether it is `X | None`."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


def fits(found: pa.DataType, annotation: Any) -> bool:
    """Whether a column of Arrow type `found` can be read as the Python annotation `wanted`."""
    if annotation is np.ndarray or typing.get_origin(annotation) is np.ndarray:
        return _is_numeric(found) or (pa.types.is_list(found) and _is_numeric(found.value_type))
    kind = arrow_type(annotation)
    if kind is None or kind == found:
        return True
    if pa.types.is_list(kind) and pa.types.is_list(found):
        return _number_fits(found.value_type, kind.value_type)
    return _number_fits(found, kind)


def unites(first: pa.DataType, right: pa.DataType) -> bool:
    """Whether columns of both types can be one in a table of the rows of both."""
    try:
        pa.unify_schemas(
            [pa.schema([("", first)]), pa.schema([("", right)])], promote_options="permissive"
        )
    except pa.ArrowException:
        return False
    return True


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _number_fits(kind: pa.DataType, number: pa.DataType) -> bool:
    if kind == number:
        return True
    if pa.types.is_floating(number):
        return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))
    return bool(pa.types.is_integer(number) and pa.types.is_integer(kind))
