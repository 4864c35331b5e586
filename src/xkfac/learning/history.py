"""What was seen of the steps of a task: loss, penalty, and the distance from the anchor."""

from dataclasses import dataclass, field
from pathlib import Path

from xkfac.errors import XkfacError


@dataclass
class History:
    """Step, loss L_t and penalty L_s of every sixteenth step, and L_s without damping over the calibration's radius.

    `over_radius` is empty without a calibration. Values arrive some steps later on a GPU, which no step waits for;
    steps that are compiled or replayed from a CUDA graph are not seen.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    penalties: list[float] = field(default_factory=list)
    over_radius: list[float] = field(default_factory=list)

    def plot(self, path: str | Path) -> None:
        """Draw all of it to a file whose ending names its format, such as .png or .svg; needs matplotlib.

        Raises XkfacError where nothing was seen yet, or matplotlib is missing.
        """
        if not self.steps:
            raise XkfacError("no step of this task was seen yet, so there is nothing to draw; train 16 steps first")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise XkfacError("a plot of the history needs matplotlib: pip install matplotlib") from None
        rows = {"loss of the target": self.losses, "penalty": self.penalties}
        if self.over_radius:
            rows["penalty / radius"] = self.over_radius
        figure = Figure(figsize=(7, 2 * len(rows)), layout="constrained")
        for axes, (label, values) in zip(figure.subplots(len(rows), sharex=True), rows.items(), strict=True):
            axes.plot(self.steps, values)
            axes.set_ylabel(label)
        axes.set_xlabel("step")
        figure.savefig(path)
