"""Bytes for people."""

UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def amount(nbytes: float) -> str:
    """In powers of 1,000: 1.23 GB."""
    power = 0
    while nbytes >= 999.5 and power < len(UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.3g} {UNITS[power]}"
