"""Text in pictures: how wide it is, and how it is escaped in each format."""

import json
import unicodedata

_NARROW = frozenset("iljtfrI.,:;'|!()[]{} `-/\\")
_WIDE = frozenset("mwMW@%&…—")


def sans_width(text: str, size: float) -> float:
    """Width in pixels of a semibold sans-serif line, on the safe side for common fonts."""
    return size * sum(_sans(char) for char in text)


def mono_width(text: str, size: float) -> float:
    """Width in pixels of a monospaced line."""
    return size * sum(1.1 if _is_wide(char) else 0.602 for char in text)


def xml(text: str) -> str:
    """Text for the body or a quoted attribute of XML or HTML; characters that XML forbids are
    replaced.
    """
    clean = "".join(char if _is_xml(char) else "\N{REPLACEMENT CHARACTER}" for char in text)
    for raw, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ('"', "&quot;"),
        ("'", "&#39;"),
    ):
        clean = clean.replace(raw, escaped)
    return clean


def dot(text: str) -> str:
    """Text inside a quoted DOT string; a line break becomes a centred one."""
    clean = "".join(char if _is_xml(char) else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n")


def mermaid(text: str) -> str:
    """Text inside a quoted Mermaid label: all that Mermaid or its HTML could read as syntax by
    number.
    """
    return "".join(
        char if char.isalnum() or char in " _.,=…+·/" else f"#{ord(char)};"
        for char in text
        if _is_xml(char)
    )


def yaml(text: str) -> str:
    """A quoted YAML string on one line, without a sign that HTML could read as syntax."""
    quoted = json.dumps(
        "".join(char if _is_xml(char) else "\N{REPLACEMENT CHARACTER}" for char in text)
    )
    return "".join(f"\\u{ord(char):04x}" if char in "<>&`" else char for char in quoted)


def _sans(char: str) -> float:
    if char in _NARROW:
        return 0.36
    if char in _WIDE:
        return 0.92
    if _is_wide(char):
        return 1.1
    return 0.72 if char.isupper() else 0.6


def _is_wide(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF"


def _is_xml(char: str) -> bool:
    code = ord(char)
    return (
        code in (0x9, 0xA, 0xD)
        or 0x20 <= code < 0xD800
        or 0xE000 <= code < 0xFFFE
        or code >= 0x10000
    )
