"""The models that a notebook's pictures choose from: those that it trained, and any run folder."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import ipywidgets
from explore import slider
from small_model import held_out_tokens

from rnnlib import analysis, ops
from rnnlib.training import LoadedRun, load_run


class Models:
    """Models by name, and the controls that choose one, a layer of it and a head.

    A run folder is read when it is chosen. Layer and head follow the run.

    Attributes:
        names: of the models: first those given, then the run folders.
        layer: control of one recurrent layer; its values count the layers that are shown, from 0.
        head: control of a head of them.
    """

    def __init__(
        self,
        trained: dict[str, LoadedRun],
        runs: str,
        *,
        shown: Callable[[analysis.LayerActivations], bool] = lambda activations: True,
        lacking: str = "no recurrent layer",
    ):
        """Finds the run folders.

        Args:
            trained: models by name, at least one.
            runs: a folder of run folders; it need not exist.
            shown: chooses among the recurrent layers.
            lacking: what a model without such layers has, in an error.
        """
        self._trained, self._shown, self._lacking = trained, shown, lacking
        self._runs = {str(folder.parent): folder.parent for folder in sorted(Path(runs).glob("*/config.yaml"))}
        self.names = [*trained, *self._runs]
        self._run = self.control("model")
        self.layer, self.head = (ipywidgets.Dropdown(options=[0], value=0, description=d) for d in ("layer", "head"))
        self._run.observe(lambda change: self._follow(change["new"]), "value")
        self._follow(self._run.value)

    @property
    def run(self) -> ipywidgets.Dropdown:
        """Control of the model; `layer` and `head` follow it."""
        return self._run

    def control(self, description: str, value: str | None = None) -> ipywidgets.Dropdown:
        """Another control of a model, which no other follows."""
        return ipywidgets.Dropdown(options=self.names, value=value or self.names[0], description=description)

    @functools.cache  # noqa: B019  (lives as long as the notebook)
    def activations(self, name: str) -> list[analysis.LayerActivations]:
        """What the recurrences of a model's layers get for held-out text, one entry a layer.

        Raises:
            ValueError: the run cannot be read, or no layer is one of those that are shown.
        """
        run = self._trained[name] if name in self._trained else load_run(self._runs[name])
        tokens, segment_ids = held_out_tokens(run)
        rows = analysis.iterate_layers(run.model, tokens, segment_ids=segment_ids, valid=segment_ids > 0)
        found = [activations for activations in rows if self._shown(activations)]
        if not found:
            raise ValueError(f"{name} has {self._lacking}")
        return found

    @functools.cache  # noqa: B019
    def reports(self, name: str) -> list[analysis.LayerReport]:
        """Their statistics; condition numbers after 8, 16, ... tokens."""
        rows = self.activations(name)
        length = rows[0].key.shape[1]
        times = [time for time in (8, 16, 32, 64, 128, 256) if time <= length]
        return [analysis.report(activations, times=times) for activations in rows]

    def squash_without_effect(self, squash: str, *names: str) -> list[str]:
        """Those of `squash_controls` that change no picture of these models.

        A bound stays as trained with the function; a model without preconditioner has neither.
        """
        rows = [activations for name in names for activations in self._readable(name)]
        if not any(
            activations.preconditioner is not None and activations.preconditioner.applied is not None for activations in rows
        ):
            return ["squash", "x"]
        return ["x"] if squash == "as trained" else []

    def _readable(self, name: str) -> list[analysis.LayerActivations]:
        try:
            return self.activations(name)
        except ValueError:  # the picture says it
            return []

    def _follow(self, name: str) -> None:
        rows = self._readable(name)
        if not rows:
            return
        # First back to what every model has: a picture is redrawn at each of these changes.
        self.layer.value = self.head.value = 0
        self.head.options = range(min(activations.key.shape[2] for activations in rows))
        self.layer.options = [(f"{activations.layer}: {activations.mixer}", i) for i, activations in enumerate(rows)]
        self.layer.value = self.head.value = 0


def with_other_preconditioner(activations: analysis.LayerActivations, bound: float, squash: str) -> analysis.LayerActivations:
    """A layer's activations as another bound and squash function would give them, with the weights that were trained.

    Args:
        activations: of a layer.
        bound: x, from 1 to 2.
        squash: "rational", "tanh", or "as trained", which changes nothing, whatever the bound.
    """
    part = activations.preconditioner
    if squash == "as trained" or part is None or part.applied is None:
        return activations
    applied = ops.squash_to_interval(part.gram, center=part.center, bound=float(bound), eps=part.eps, squash=squash)
    return dataclasses.replace(
        activations, write_key=part.key * applied, preconditioner=dataclasses.replace(part, applied=applied)
    )


SQUASHES = ("as trained", "rational", "tanh")


def squash_controls() -> dict[str, ipywidgets.Widget]:
    """Controls of another squash function and bound, the arguments of `with_other_preconditioner`."""
    return {
        "squash": ipywidgets.Dropdown(options=SQUASHES, description="squash"),
        "x": slider("x", 1.5, 1.0, 2.0, 0.05),
    }


def squash_label(squash: str, x: float) -> str:
    """What a picture says of them."""
    return f"squash {squash}" + (f", x = {x:.2f}" if squash != "as trained" else "")
