"""Hands the compiler of C files on to the operators, which may not look below this package."""

from transport.native.compile import compiled

__all__ = ["compiled"]
