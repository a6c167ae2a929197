"""Pictures of graphs: SVG, DOT, Mermaid and a page to look around in, with no system package."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.draw.charts import reward_curve_svg
from dataflow.draw.picture import DeviceFrame, Picture, read
from dataflow.errors import GraphError
from dataflow.system.files import write_atomically


def draw(
    graph: Any,
    path: str | Path,
    frames: Sequence[DeviceFrame] | None = None,
    title: str | None = None,
) -> Path:
    """Write the picture of a NetworkX MultiDiGraph (`Graph.nx`) in the format the suffix names; the
    path.

    Raises GraphError for a suffix other than .svg, .dot, .mmd and .html, and where the folder does
    not exist; RunFolderError where the disk refuses.
    """
    from dataflow.draw import svg, text

    formats: Mapping[str, Callable[[Picture], str]] = {
        ".svg": svg.render,
        ".dot": text.to_dot,
        ".mmd": text.to_mermaid,
        ".html": svg.render_html,
    }
    path = Path(path)
    form = formats.get(path.suffix.lower())
    if form is None:
        raise GraphError(
            f"a picture has the suffix .svg, .dot, .mmd or .html, but got '{path.name}'; "
            f"name one of the four, such as '{path.stem or 'graph'}.svg'"
        )
    if not path.parent.is_dir():
        raise GraphError(
            f"the picture '{path.name}' needs its folder, but '{path.parent}' is not there; make it"
            " first"
        )
    content = form(read(graph, frames, title)).encode()
    write_atomically(path, lambda file: file.write(content), what="drawing", flush=False)
    return path


def render_svg(
    graph: Any, frames: Sequence[DeviceFrame] | None = None, title: str | None = None
) -> str:
    """The picture of a NetworkX MultiDiGraph (`Graph.nx`) as SVG."""
    from dataflow.draw import svg

    return svg.render(read(graph, frames, title))


def mimebundle(
    graph: Any, frames: Sequence[DeviceFrame] | None = None, title: str | None = None
) -> dict[str, str]:
    """What a notebook shows of a graph: the SVG, and a few lines of text where it cannot show
    that.
    """
    from dataflow.draw import svg, text

    picture = read(graph, frames, title)
    return {"image/svg+xml": svg.render(picture), "text/plain": text.to_plain(picture)}


__all__ = ["DeviceFrame", "draw", "mimebundle", "render_svg", "reward_curve_svg"]
