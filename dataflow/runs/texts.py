"""Text of models, prompts and errors for a page: shown as it is, with nothing in it that a reader
could not see.
"""

import unicodedata

from dataflow.draw.theme import xml

LONGEST = 4_000
"""Characters of a text that are shown."""
_PICTURES, _DELETE = 0x2400, 0x2421


def visible(text: object, longest: int = LONGEST) -> str:
    """Text without signs that act: control characters and escapes become their pictures, marks that
    turn or hide what stands beside them their numbers; cut where it is long.

    >>> visible("a\\x1b[31mb\\u202ec")
    'a␛[31mb‹U+202E›c'
    """
    whole = str(text)
    omitted = len(whole) - longest
    shown = "".join(map(_sign, whole[:longest]))
    return f"{shown} … {omitted:,} more characters" if omitted > 0 else shown


def escaped(text: object, longest: int = LONGEST) -> str:
    """The same, for the body or a quoted attribute of HTML."""
    return xml(visible(text, longest))


def _sign(char: str) -> str:
    if char in "\n\t":
        return char
    code, kind = ord(char), unicodedata.category(char)
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return chr(_DELETE)
    if kind in ("Cc", "Cf", "Zl", "Zp"):
        return f"‹U+{code:04X}›"
    return "\N{REPLACEMENT CHARACTER}" if kind == "Cs" else char
