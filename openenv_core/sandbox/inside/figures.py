"""Matplotlib's figures: drawn without a screen, shown as PNG by themselves."""

import base64
import io
import sys
from types import ModuleType
from typing import Any, Final

from openenv_core.sandbox.inside.display import Shown

BACKEND: Final = "ropewalk_figures"
"""The module that matplotlib is told to draw by."""


class _Backend(ModuleType):
    """Made of matplotlib's own canvas, once matplotlib asks for it."""

    def __init__(self, figures: "Figures") -> None:
        super().__init__(BACKEND)
        self._figures = figures

    def show(self, *_: Any, **__: Any) -> None:
        """What `pyplot.show` calls."""
        self._figures.flush()

    def __getattr__(self, name: str) -> Any:
        if name not in ("FigureCanvas", "FigureManager"):
            raise AttributeError(name)
        from matplotlib.backend_bases import FigureManagerBase
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        self.FigureCanvas = FigureCanvasAgg
        self.FigureManager = FigureManagerBase
        return self.__dict__[name]


class Figures:
    """Shows open figures at `show()`, and at the end of an execution.

    Attributes:
        shown: Where they go; another one each execution.
    """

    def __init__(self) -> None:
        self.shown: Shown | None = None

    def install(self) -> None:
        """Let matplotlib find the backend."""
        sys.modules[BACKEND] = _Backend(self)

    def flush(self) -> None:
        """Show and close what is open.

        Raises:
            Exception: Whatever drawing raises.
        """
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or self.shown is None:
            return
        try:
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                with io.BytesIO() as file:
                    figure.savefig(file, format="png", bbox_inches="tight")
                    image = base64.b64encode(file.getvalue()).decode("ascii")
                self.shown.add("display_data", {"image/png": image, "text/plain": repr(figure)})
        finally:
            pyplot.close("all")
