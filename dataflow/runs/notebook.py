"""What a notebook shows of a run: its figures, its curves and its graph."""

from dataflow.folder.run_folder import RunFolder
from dataflow.runs import parts
from dataflow.runs.drawing import read_picture
from dataflow.runs.pictures import charts_of
from dataflow.runs.state import state_of
from dataflow.runs.tables import figures_of, read_lines
from dataflow.runs.texts import escaped

SHOWN = 4
"""Charts."""
_STYLE = (
    ".dataflow-run .tiles{display:flex;flex-wrap:wrap;gap:6px 28px;margin:6px 0 14px}.dataflow-run"
    " dt{opacity:.65}.dataflow-run dd{margin:0;font-weight:600}.dataflow-run"
    " small{display:block;font-weight:400;opacity:.65}.dataflow-run"
    " .charts{display:flex;flex-wrap:wrap;gap:10px}.dataflow-run .wide{overflow-x:auto}"
)


def html_of(folder: RunFolder) -> str:
    """A piece of HTML that needs nothing else."""
    lines = read_lines(folder)
    drawn = charts_of({"": [*lines.steps, *lines.evaluations]})[:SHOWN]
    return (
        "<div"
        f' class="dataflow-run"><style>{_STYLE}</style><p><b>{escaped(folder.path.name)}</b></p>'
        f"{parts.tiles(figures_of(folder, lines), state_of(folder).word)}{parts.charts(drawn)}"
        f"{parts.graph(read_picture(folder))}</div>"
    )
