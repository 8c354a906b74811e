"""Drawing: matplotlib without a window, and pictures that are the same file when they are drawn again."""

import pathlib
from typing import Any


def pyplot() -> Any:
    """matplotlib's, without a window; loaded when something is drawn, since training needs none."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(drawing: Any, path: pathlib.Path) -> None:
    """Writes a figure and forgets it. No date or version inside: a rebuilt one is the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=130, metadata={"Software": None})
    pyplot().close(drawing)
