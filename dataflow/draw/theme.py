"""Colours and type of the pictures, for light pages and for dark ones."""

import json
import unicodedata
from collections.abc import Mapping, Sequence

SANS = "Inter,'Helvetica Neue',Helvetica,Arial,'Liberation Sans',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

LIGHT: dict[str, str] = {
    "paper": "#ffffff",
    "card": "#ffffff",
    "ink": "#1f2328",
    "muted": "#656d76",
    "hair": "#d4dae0",
    "line": "#59636e",
    "weights": "#c2410c",
    "source": "#0f766e",
    "operator": "#8c96a0",
    "model": "#4f46e5",
    "trainer": "#c2410c",
    "sink": "#59636e",
}
DARK: dict[str, str] = {
    "paper": "#0d1117",
    "card": "#161b22",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "hair": "#343b44",
    "line": "#9aa4ae",
    "weights": "#ff9e64",
    "source": "#2dd4bf",
    "operator": "#6e7781",
    "model": "#8b8cf8",
    "trainer": "#ff9e64",
    "sink": "#9aa4ae",
}

# Stream colours follow Okabe and Ito's palette, which the colour-blind can tell apart.
LIGHT_STREAMS = ("#0072b2", "#009e73", "#b8609a", "#b97d00", "#3a9bd1", "#6b7280")
DARK_STREAMS = ("#58a6ff", "#3fb98a", "#e38fc4", "#e0ac3b", "#8fd0f2", "#9aa4ae")
LIGHT_FRAMES = ("#7c5cd6", "#0e8fa8", "#b08900", "#c0508a", "#5f8f1f", "#64748b")
DARK_FRAMES = ("#a48bf0", "#4cc3d9", "#d8b742", "#e08bb8", "#9bc65a", "#94a3b8")


def style() -> str:
    """The style sheet, each rule bound to the class of the picture: it changes nothing else on a
    page.
    """
    light, dark = (
        _colours(LIGHT, LIGHT_STREAMS, LIGHT_FRAMES),
        _colours(DARK, DARK_STREAMS, DARK_FRAMES),
    )
    return f"{_fixed()}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _fixed() -> str:
    rules = {
        "": f"max-width:100%;height:auto;font-family:{SANS}",
        " text": f"font-family:{SANS}",
        " .heading": "font-size:16px;font-weight:600",
        " .name": "font-size:13px;font-weight:600",
        " .kind": "font-size:10px",
        " .knob": f"font-size:9.5px;font-family:{MONO};white-space:pre",
        " .column": f"font-size:9.5px;font-family:{MONO}",
        " .note": f"font-size:9.5px;font-family:{MONO};text-anchor:middle",
        " .legend": "font-size:10.5px",
        " .axis": "font-size:10.5px",
        " .box": "stroke-width:1",
        " .rule": "stroke-width:1",
        " .line": "fill:none;stroke-width:1.5;stroke-linecap:round",
        " .weights .line": "stroke-dasharray:5 4;stroke-linecap:butt",
        " .frame rect": "fill-opacity:.07;stroke-opacity:.55;stroke-width:1",
        " .frame text": "font-size:10px;font-weight:600",
        " .frame .place": "font-weight:400",
        " .frame text,.dataflow-graph .mark": (
            "paint-order:stroke;stroke-width:3px;stroke-linejoin:round"
        ),
    }
    return _rules(rules)


def _colours(of: Mapping[str, str], streams: Sequence[str], frames: Sequence[str]) -> str:
    rules = {
        " .paper": f"fill:{of['paper']}",
        " text": f"fill:{of['ink']}",
        " .kind": f"fill:{of['muted']}",
        " .knob": f"fill:{of['muted']}",
        " .value": f"fill:{of['ink']}",
        " .column": f"fill:{of['muted']}",
        " .legend": f"fill:{of['muted']}",
        " .axis": f"fill:{of['muted']}",
        " .grid": f"stroke:{of['hair']}",
        " .box": f"fill:{of['card']};stroke:{of['hair']}",
        " .rule": f"stroke:{of['hair']}",
        " .link.stream .line": f"stroke:{of['line']}",
        " .link.stream .tip": f"fill:{of['line']}",
        " .weights .line": f"stroke:{of['weights']}",
        " .weights .tip": f"fill:{of['weights']}",
        " .weights .note": f"fill:{of['weights']}",
        " .plate": f"fill:{of['paper']}",
        " .mark": f"stroke:{of['paper']}",
    }
    for role in ("source", "operator", "model", "trainer", "sink"):
        rules[f" .{role} .accent"] = f"fill:{of[role]}"
    for at, colour in enumerate(streams):
        rules[f" .stream{at} .line"] = f"stroke:{colour}"
        rules[f" .stream{at} .tip"] = f"fill:{colour}"
    for at, colour in enumerate(frames):
        rules[f" .frame{at} rect"] = f"fill:{colour};stroke:{colour}"
        rules[f" .frame{at} text"] = f"fill:{colour};stroke:{of['paper']}"
    return _rules(rules)


def _rules(rules: dict[str, str]) -> str:
    return "".join(f".dataflow-graph{selector}{{{body}}}" for selector, body in rules.items())


# Text in pictures: how wide it is, and how it is escaped in each format.


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
