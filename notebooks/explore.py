"""A picture with controls: turned, they redraw the picture in place."""

from collections.abc import Callable, Collection

import ipywidgets
import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib.figure import Figure


def all_matter(**values: object) -> Collection[str]:
    """No control is without effect."""
    return ()


def explore(
    draw: Callable[..., Figure],
    *,
    without_effect: Callable[..., Collection[str]] = all_matter,
    **controls: ipywidgets.Widget,
) -> None:
    """Shows the figure that a function returns, below the controls that give its arguments.

    The first figure is a picture of its own, so that it is also seen where no widget runs, as on a code host. A
    setting that cannot be drawn shows its error in the picture's place.

    Args:
        draw: gets the value of each control by name.
        without_effect: gets the same and returns names of controls that change nothing then; these are disabled.
        **controls: widgets. The same widget may stand above several pictures and then redraws all of them.
    """

    def picture() -> Figure:
        values = {name: control.value for name, control in controls.items()}
        for name, control in controls.items():
            control.disabled = name in without_effect(**values)
        figure = draw(**values)
        plt.close(figure)  # or the notebook would show it a second time
        return figure

    display(ipywidgets.HBox(list(controls.values()), layout=ipywidgets.Layout(flex_flow="row wrap")))
    shown = display(picture(), display_id=True)

    def redraw(_) -> None:
        try:
            shown.update(picture())
        except ValueError as error:
            shown.update({"text/plain": str(error)}, raw=True)

    for control in controls.values():
        control.observe(redraw, "value")


def slider(description: str, value: float, low: float, high: float, step: float) -> ipywidgets.FloatSlider:
    """A slider that redraws when it is let go: a picture takes half a second."""
    return ipywidgets.FloatSlider(
        value, min=low, max=high, step=step, description=description, continuous_update=False
    )


def whole_slider(description: str, value: int, low: int, high: int) -> ipywidgets.IntSlider:
    """The same for whole numbers."""
    return ipywidgets.IntSlider(value, min=low, max=high, description=description, continuous_update=False)
