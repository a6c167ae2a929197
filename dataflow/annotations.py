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


def fits(column: pa.DataType, annotation: Any) -> bool:
    """Whether a column of Arrow type `column` can be read as the Python annotation."""
    if annotation is np.ndarray or typing.get_origin(annotation) is np.ndarray:
        return _is_numeric(column) or (pa.types.is_list(column) and _is_numeric(column.value_type))
    kind = arrow_type(annotation)
    if kind is None or kind == column:
        return True
    if pa.types.is_list(kind) and pa.types.is_list(column):
        return _number_fits(column.value_type, kind.value_type)
    return _number_fits(column, kind)


def unites(first: pa.DataType, second: pa.DataType) -> bool:
    """Whether columns of both types can be one in a table of the rows of both."""
    try:
        pa.unify_schemas(
            [pa.schema([("", first)]), pa.schema([("", second)])], promote_options="permissive"
        )
    except pa.ArrowException:
        return False
    return True


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _number_fits(column: pa.DataType, number: pa.DataType) -> bool:
    if column == number:
        return True
    if pa.types.is_floating(number):
        return bool(pa.types.is_floating(column) or pa.types.is_integer(column))
    return bool(pa.types.is_integer(number) and pa.types.is_integer(column))
