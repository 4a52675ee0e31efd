"""How a figure of a report is drawn: panels, their common look, and the texts that a pointer over them shows.

Strategy: matplotlib draws in placeholder colours that nothing else uses. In the SVG each becomes a CSS variable, so the
page decides between light and dark. Text stays text. The texts are titles of invisible areas over the
finished drawing, so a report needs no script for them; the page's filter finds a panel by its name.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from html import escape
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

ROLES: Final = {
    "ink": "#010101",
    "muted": "#020202",
    "rule": "#030303",
    "surface": "#040404",
    "today": "#050505",
    "better": "#060606",
    "series-1": "#0a0a01",
    "series-2": "#0a0a02",
    "series-3": "#0a0a03",
    "series-4": "#0a0a04",
    "series-5": "#0a0a05",
    "series-6": "#0a0a06",
}
SERIES: Final = tuple(color for role, color in ROLES.items() if role.startswith("series"))
INK, MUTED, RULE, SURFACE = ROLES["ink"], ROLES["muted"], ROLES["rule"], ROLES["surface"]
TODAY, BETTER = ROLES["today"], ROLES["better"]
ON_SURFACE: Final = {"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.75, "pad": 1.0}
_STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "text.color": INK,
    "text.parse_math": False,  # a message type is its sender's text: dollars in it are no formula
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.9,
    "lines.solid_capstyle": "round",
}
_TIMES: Final = (
    (1e-3, "1 ms"), (1e-2, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"),
    (3_600, "1 h"), (21_600, "6 h"), (86_400, "1 d"),
)  # fmt: skip
_METADATA: Final = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_SIZE: Final = re.compile(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>')
_OPENING: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="figure" role="img" \\1>'
)
_FONT: Final = re.compile(r'font: ((?:bold )?[\d.]+px) [^;"]*')
_NAMED: Final = re.compile(r'id="([a-zA-Z0-9.]+_\d+)"')
"""Elements that each figure numbers from the start; clips and marks have names of their own."""


Figure = TypeVar("Figure", bound=Callable[..., str])


def styled(figure: Figure) -> Figure:
    """A function that draws, in our style."""

    @wraps(figure)
    def drawn(*given: Any) -> str:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return figure(*given)

    return cast(Figure, drawn)


class Drawing:
    """One figure with panels side by side or below each other. Use it within `styled`."""

    def __init__(self, name: str, rows: int, columns: int, *, width: float = 9.6, height: float = 2.7) -> None:
        """name: unique among the figures of the page. height: of a row of panels, in inches."""
        from matplotlib.figure import Figure

        self.name = name
        self.figure: Any = Figure(figsize=(width, height * rows), layout="constrained")
        self.panels: list[Any] = list(self.figure.subplots(rows, columns, squeeze=False).flat)
        self._hovers: list[tuple[Any, Sequence[Any], Sequence[str]]] = []
        self._names: dict[str, str] = {}

    def hover(self, panel: Any, at: Iterable[Any], texts: Iterable[str]) -> None:
        """The texts that a pointer shows near each of these places on the panel's x axis."""
        self._hovers.append((panel, list(at), list(texts)))

    def named(self, panel: Any, label: str) -> None:
        """Mark the panel with its queue and type, for the page's filter."""
        place = f"{self.name}-panel-{len(self._names)}"
        panel.set_gid(place)
        self._names[place] = label

    def _hover_areas(self) -> str:
        """Invisible areas, each from halfway to its left neighbour to halfway to its right one."""
        points = 72 / self.figure.dpi
        found = []
        for panel, at, texts in self._hovers:
            box = panel.bbox
            places = (float(panel.transData.transform((panel.convert_xunits(each), 1.0))[0]) for each in at)
            there = sorted((x, text) for x, text in zip(places, texts, strict=True) if box.x0 - 1 <= x <= box.x1 + 1)
            ends = [box.x0, *((one[0] + other[0]) / 2 for one, other in pairwise(there)), box.x1]
            for (left, right), (_, text) in zip(pairwise(ends), there, strict=False):
                x, y, width, height = left, self.figure.bbox.height - box.y1, right - left, box.height
                place = " ".join(
                    f'{name}="{value * points:.1f}"'
                    for name, value in (("x", x), ("y", y), ("width", width), ("height", height))
                )
                found.append(f'<rect {place} fill="none" pointer-events="all"><title>{escape(text)}</title></rect>')
        return "".join(found)

    def legend_below(self) -> None:
        """One legend for all panels."""
        known: dict[str, Any] = {}
        for panel in self.panels:
            handles, names = panel.get_legend_handles_labels()
            known |= dict(zip(names, handles, strict=True))
        self.figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=len(known) or 1)

    def svg(self) -> str:
        """The drawing, to embed in HTML."""
        import matplotlib

        text = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(text, format="svg", metadata={"Date": None})
        found = text.getvalue()
        found = _METADATA.sub("", found[found.index("<svg") :])
        found = _SIZE.sub(_OPENING, found, count=1)
        found = _FONT.sub(r"font: \1 var(--font)", found)
        found = _NAMED.sub(rf'id="{self.name}-\1"', found)
        for place, label in self._names.items():
            found = found.replace(f'id="{place}"', f'id="{place}" data-name="{escape(label.lower())}"')
        found = found.replace("</svg>", f"{self._hover_areas()}</svg>")
        for role, color in ROLES.items():
            found = found.replace(color, f"var(--{role})")
        return found


def time_axis(axis: Any, low: float, high: float, label: str) -> None:
    """A logarithmic axis of seconds, with readable labels."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    low, high = max(low, 1e-3), max(high, low * 3, 3e-3)
    shown = [(at, text) for at, text in _TIMES if low * 0.95 <= at <= high * 1.05]
    if len(shown) < 2:
        shown = [(low, span(low)), (high, span(high))]
    axis.set_major_locator(FixedLocator([at for at, _ in shown]))
    axis.set_minor_locator(NullLocator())
    axis.set_ticklabels([text for _, text in shown])
    axis.set_label_text(label)
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(low, high)


def span(value: float | None) -> str:
    """A readable duration."""
    if value is None or value != value:
        return "–"
    if value < 1:
        return f"{value * 1_000:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7_200 else f"{value / 3_600:.3g} h"


def mark(panel: Any, x: float, color: str, text: str, *, high: float = 1.0, align: str = "left") -> None:
    """A vertical line with its name at the top."""
    panel.axvline(x, color=color, linewidth=1.4, linestyle=(0, (4, 2)))
    name = panel.annotate(
        text,
        (x, high),
        xycoords=("data", "axes fraction"),
        xytext=(4 if align == "left" else -4, -2),
        textcoords="offset points",
        ha=align,
        va="top",
        fontsize=8.5,
        color=color,
        fontweight="bold",
        bbox=ON_SURFACE,
    )
    name.set_in_layout(False)
