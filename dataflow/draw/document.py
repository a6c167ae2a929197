"""What every chart is wrapped in: the size, the title, the style sheet for light pages and dark
ones.
"""

from collections.abc import Sequence

from dataflow.draw import theme
from dataflow.draw.labels import xml

_CHART = (
    ".dataflow-graph .end{text-anchor:end}.dataflow-graph"
    " .middle{text-anchor:middle}.dataflow-graph .changed{stroke-dasharray:4 3}.dataflow-graph"
    " .mark{font-size:11px;font-weight:600}.dataflow-graph"
    " .said{font-size:10.5px;font-weight:400}.dataflow-graph"
    " .line{stroke-linejoin:round;stroke-width:2}.dataflow-graph .raw"
    " .line{stroke-width:1;stroke-opacity:.4}.dataflow-graph .bar"
    " .line{stroke-width:14;stroke-linecap:butt}"
)


def document(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A whole SVG of these elements."""
    return "\n".join(
        [
            (
                '<svg xmlns="http://www.w3.org/2000/svg" class="dataflow-graph" role="img" '
                f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
            ),
            f"<title>{xml(title)}</title>",
            f"<style>{theme.style()}{_CHART}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
            *body,
            "</svg>\n",
        ]
    )
