"""What is left to run of a study: commands, each with what it needs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs of a study that one command makes.

    Attributes:
        study: folder under `experiments`; `python -m experiments.<study>` makes the runs.
        setting: of the study.
        name: which runs these are; unique in the study and setting.
        arguments: of the command, without where it runs and where its results go.
        seconds: that it is expected to have its devices for on an H100, compiling left out; 0 where nothing tells.
        devices: how many it needs.
        alone: whether it has its devices by turns with others; a small one trains beside them.
        runs: that it makes.
        later: runs that can be named only once this one, and others like it, have chosen a rate; its share of them.
    """

    study: str
    setting: str
    name: str
    arguments: tuple[str, ...]
    seconds: float = 0.0
    devices: int = 1
    alone: bool = True
    runs: int = 1
    later: float = 0.0

    def __str__(self) -> str:
        return f"{self.study} ({self.setting}): {self.name}"
