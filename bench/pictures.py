"""The hand-drawn pictures of docs/images, written by this script so that their text can be read and changed.

    python bench/pictures.py

Strategy: a picture is a list of SVG elements on a canvas of whole pixels; each picture has one scale from times to
positions. The figures of `recovery.svg` come from the simulation of bench/timeouts.py, all others from the patterns'
defaults.
"""

import importlib.util
import sys
from math import exp, log10
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
INK, PALE, WORK, LEASE, LOST, NEXT = "#222222", "#bbbbbb", "#3b7dd8", "#f0b040", "#c62828", "#2e8b57"
WIDTH = 760


class Canvas:
    """Elements of one picture, in pixels from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def bar(self, left: float, right: float, top: float, height: float, fill: str, *, faded: bool = False) -> None:
        opacity = ' fill-opacity="0.3"' if faded else ""
        self.lines.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{right - left:.0f}" height="{height:.0f}" rx="2"'
            f' fill="{fill}"{opacity}/>'
        )

    def line(self, *points: tuple[float, float], colour: str = INK, dashed: bool = False, width: float = 1.2) -> None:
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes}/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
        """Along one axis, or nearly."""
        (x, y), (u, v) = start, end
        length = max(abs(u - x), abs(v - y))
        dx, dy = (u - x) / length, (v - y) / length
        self.line(start, end, colour=colour)
        self.line(
            (u - 7 * dx - 4 * dy, v - 7 * dy - 4 * dx), end, (u - 7 * dx + 4 * dy, v - 7 * dy + 4 * dx), colour=colour
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 4) -> None:
        self.lines.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{radius:g}" fill="{colour}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        colour: str = INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.lines.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>"]) + "\n"


def lease_timeline() -> str:
    """A message whose worker works on, dies, or is stuck; and one with a single long lease."""
    canvas = Canvas(WIDTH, 420, "A message's leases, extended and let go")
    left, scale = 120, 6.9

    def at(seconds: float) -> float:
        return left + scale * seconds

    for seconds in range(0, 91, 15):
        canvas.line((at(seconds), 34), (at(seconds), 386), colour="#dddddd")
        canvas.text(at(seconds), 24, f"{seconds} s", anchor="middle", size=12)

    def lane(top: float, name: str, told: str, works: float, leases: list[tuple[float, float]]) -> None:
        canvas.text(8, top + 13, name, bold=True)
        canvas.text(8, top + 30, told, size=11)
        canvas.bar(at(0), at(works), top, 16, WORK)
        for place, (start, end) in enumerate(leases):
            canvas.bar(at(start), at(end), top + 21 + 9 * place, 7, LEASE)

    top = 44
    lane(top, "works 52 s", "and deletes", 52, [(0, 30), (15, 45), (30, 60), (45, 52)])
    canvas.bar(at(52), at(75), top + 48, 7, LEASE, faded=True)
    for seconds in (15, 30, 45):
        canvas.line((at(seconds), top + 18), (at(seconds), top + 52), width=2)
    canvas.text(at(52) + 6, top + 13, "delete, with the newest handle")
    canvas.text(at(62), top + 36, "extended with 15 s left", size=11)

    top = 142
    lane(top, "dies at 37 s", "", 37, [(0, 30), (15, 45), (30, 60)])
    canvas.line((at(37) - 6, top - 3), (at(37) + 6, top + 19), colour=LOST, width=3)
    canvas.line((at(37) - 6, top + 19), (at(37) + 6, top - 3), colour=LOST, width=3)
    canvas.bar(at(60), at(90), top, 16, NEXT)
    canvas.text(at(62), top + 30, "another worker has it", size=11)
    canvas.line((at(37), top + 54), (at(37), top + 60), (at(60), top + 60), (at(60), top + 54), colour=LOST)
    canvas.text(at(48.5), top + 74, "23 s: one lease at most", anchor="middle", colour=LOST, size=12)

    top = 240
    lane(top, "is stuck", "max_hold = 60 s", 60, [(0, 30), (15, 45), (30, 60)])
    canvas.bar(at(60), at(90), top, 16, WORK, faded=True)
    canvas.line((at(60), top - 6), (at(60), top + 50), colour=LOST, dashed=True)
    canvas.text(at(62), top + 35, "the handler is told;", size=11)
    canvas.text(at(62), top + 49, "the message is another's", size=11)

    top = 322
    lane(top, "no keeper", "a lease of 80 s", 37, [(0, 80)])
    canvas.line((at(37) - 6, top - 3), (at(37) + 6, top + 19), colour=LOST, width=3)
    canvas.line((at(37) - 6, top + 19), (at(37) + 6, top - 3), colour=LOST, width=3)
    canvas.bar(at(80), at(90), top, 16, NEXT)
    canvas.line((at(37), top + 34), (at(37), top + 40), (at(80), top + 40), (at(80), top + 34), colour=LOST)
    canvas.text(at(58.5), top + 55, "43 s, and as long for every crash", anchor="middle", colour=LOST, size=12)

    for x, colour, name in ((120, WORK, "handler"), (225, LEASE, "lease"), (315, NEXT, "the next worker")):
        canvas.bar(x, x + 18, 398, 10, colour)
        canvas.text(x + 24, 408, name, size=12)
    return canvas.svg()


def ordered() -> str:
    """Messages that come 1 3 2 5 4 and go 1 2 3 4 5."""
    canvas = Canvas(WIDTH, 236, "An ordered queue's receiver")
    canvas.text(20, 24, "what the queue hands out", bold=True)
    canvas.text(290, 24, "the receiver's buffer", bold=True)
    canvas.text(560, 24, "what the application gets", bold=True)
    buffers = {1: [], 3: [3], 2: [3], 5: [5], 4: [5]}
    handed = {1: "1", 3: "", 2: "2 3", 5: "", 4: "4 5"}
    for row, number in enumerate((1, 3, 2, 5, 4)):
        top = 38 + 34 * row
        _ball(canvas, 100, top + 12, str(number), WORK)
        canvas.arrow((122, top + 12), (280, top + 12))
        canvas.bar(290, 470, top, 25, "#f2f2f2")
        for each in buffers[number]:
            _ball(canvas, 310 + 34 * (each - 1), top + 12, str(each), LEASE)
        if handed[number]:
            canvas.arrow((480, top + 12), (552, top + 12))
            for place, each in enumerate(handed[number].split()):
                _ball(canvas, 580 + 34 * place, top + 12, each, NEXT)
        else:
            canvas.text(490, top + 17, f"waits for {number - 1}", size=12, colour=LOST)
    canvas.text(
        20,
        226,
        "Leases are kept while messages wait; each is deleted after the application's acknowledgement.",
        size=12,
    )
    return canvas.svg()


def _ball(canvas: Canvas, x: float, y: float, text: str, colour: str) -> None:
    canvas.dot(x, y, colour, 12)
    canvas.text(x, y + 5, text, anchor="middle", colour="white", bold=True)


def transaction() -> str:
    """The five steps, and what is in which queue meanwhile."""
    canvas = Canvas(WIDTH, 300, "The steps of a transaction")
    left, step = 130, 118
    steps = ("1 prepare", "2 log", "3 operation", "4 commit", "5 erase")

    def at(place: float) -> float:
        return left + step * place

    for row, name in enumerate(("producer", "the queue", "the log", "the database")):
        top = 50 + 50 * row
        canvas.text(12, top + 13, name, bold=True)
        canvas.line((left, top + 28), (WIDTH - 12, top + 28), colour="#dddddd")
    for place, name in enumerate(steps):
        canvas.text(at(place) + 46, 30, name, anchor="middle", bold=True)
        canvas.bar(at(place) + 6, at(place) + 86, 50, 16, WORK)
    canvas.bar(at(0) + 46, at(3) + 46, 100, 16, LEASE)
    canvas.text(at(0) + 54, 112, "half message: hidden, ends before its delay", size=12)
    canvas.bar(at(3) + 46, WIDTH - 12, 100, 16, NEXT)
    canvas.text(at(3) + 54, 112, "message", size=12, colour="white")
    canvas.bar(at(1) + 46, at(4) + 46, 150, 16, LEASE)
    canvas.text(at(1) + 54, 162, "entry with the whole message", size=12)
    canvas.bar(at(2) + 46, WIDTH - 12, 200, 16, NEXT)
    canvas.text(at(2) + 54, 212, "done", size=12, colour="white")
    canvas.line((at(1) + 92, 44), (at(1) + 92, 238), colour=LOST, dashed=True)
    canvas.text(at(1) + 86, 252, "dies before: the operation", anchor="end", size=12, colour=LOST)
    canvas.text(at(1) + 86, 267, "never starts, nothing appears", anchor="end", size=12, colour=LOST)
    told = (
        "dies after: the checker finds the entry, asks what became",
        "of the operation, commits or rolls back, and erases it.",
        "A handle that is committed twice is committed once.",
    )
    for row, line in enumerate(told):
        canvas.text(at(1) + 98, 252 + 15 * row, line, size=12, colour=LOST)
    return canvas.svg()


def recovery() -> str:
    """Recovery delay against duplicate work, for work of a lognormal length with a median of 20 s."""
    timeouts = _timeouts()
    costs = timeouts.Costs()
    draw = timeouts.WORKLOADS["lognormal, median 20 s"]

    def measured(make: Any) -> tuple[float, float]:
        """Mean seconds that a crashed worker's message waits, and duplicate starts in 100 messages."""
        waited = crashes = duplicates = 0.0
        messages = 1_000
        for seed in range(3):
            tally = timeouts.run(make(), draw, costs, seed, messages)
            times = timeouts.Random(seed)
            took = [max(draw(times, number / messages), 0.01) for number in range(messages)]
            crashes += sum(1 - exp(-costs.crashes_per_second * each) for each in took)
            waited += tally.recovery
            duplicates += tally.duplicates
        return waited / crashes, 100 * duplicates / (3 * messages)

    canvas = Canvas(WIDTH, 420, "Recovery delay against duplicate work")
    low_x, high_x, low_y, high_y = 5.0, 30_000.0, 0.01, 300.0

    def at(delay: float, share: float) -> tuple[float, float]:
        x = 90 + 640 * (log10(delay) - log10(low_x)) / (log10(high_x) - log10(low_x))
        y = 350 - 310 * (log10(max(share, low_y)) - log10(low_y)) / (log10(high_y) - log10(low_y))
        return x, y

    for delay, name in ((10, "10 s"), (60, "1 min"), (600, "10 min"), (3_600, "1 h"), (21_600, "6 h")):
        x, _ = at(delay, 1)
        canvas.line((x, 40), (x, 350), colour="#dddddd")
        canvas.text(x, 368, name, anchor="middle", size=12)
    for share, name in ((0.01, "0.01"), (0.1, "0.1"), (1, "1"), (10, "10"), (100, "100")):
        _, y = at(10, share)
        canvas.line((90, y), (730, y), colour="#dddddd")
        canvas.text(82, y + 4, name, anchor="end", size=12)
    canvas.text(410, 392, "mean wait of a crashed worker's message", anchor="middle")
    canvas.text(12, 24, "duplicate starts in 100 messages (0.01: that or less)")

    lengths = (30, 60, 120, 300, 900, 3_600, 21_600)
    fixed = {length: at(*measured(lambda length=length: timeouts.Fixed(length))) for length in lengths}
    canvas.line(*fixed.values(), colour=LOST, width=2)
    names = {30: "30 s", 60: "1 min", 120: "2 min", 300: "5 min", 900: "15 min", 3_600: "1 h"}
    for length, (x, y) in fixed.items():
        canvas.dot(x, y, LOST)
        if length in names:
            canvas.text(x + 8, y - 6, names[length], size=12, colour=LOST)
    x, y = fixed[60]
    canvas.text(x + 70, y - 20, "one fixed timeout, never extended", colour=LOST, bold=True)
    for name, make, colour, dx, dy, anchor in (
        ("heartbeat 30 s, every 15 s", lambda: timeouts.Heartbeat(30, 15), WORK, 10, -4, "start"),
        ("documents' manager, 300 s", lambda: timeouts.Heartbeat(300, 60), WORK, -8, -6, "end"),
        ("AdaptiveTimeout", lambda: timeouts.Adaptive(costs), NEXT, 10, 12, "start"),
    ):
        x, y = at(*measured(make))
        canvas.dot(x, y, colour, 6)
        canvas.text(x + dx, y + dy, name, colour=colour, bold=True, anchor=anchor)
    canvas.text(
        12, 412, "Work: lognormal, median 20 s, sigma 1; 3 x 1,000 messages simulated (bench/timeouts.py).", size=11
    )
    return canvas.svg()


def keeper_flow() -> str:
    """One decision of the lease keeper about one message, from its table of decisions."""
    from veilmq.client.keeper.lease import LOOKS, Look

    colours = {Look.LEAVE: PALE, Look.LET_GO: LOST, Look.OVER: LOST, Look.EXTEND: NEXT, Look.WAIT: LEASE}
    step, top = 66, 78
    canvas = Canvas(WIDTH, top + step * len(LOOKS) + 62, "One look of the lease keeper at one message")
    left, middle, right, answer = 30, 215, 400, 470

    def box(x: float, y: float, width: float, text: str, fill: str) -> None:
        canvas.bar(x, x + width, y, 34, fill, faded=True)
        canvas.text(x + width / 2, y + 22, text, anchor="middle", size=12)

    box(left, 10, 165, "registered: at once", WORK)
    box(left + 205, 10, 165, "timer: when it is due", WORK)
    for x in (left + 82, left + 288):
        canvas.arrow((x, 44), (x, top))
    for place, (question, decided) in enumerate(LOOKS):
        y = top + step * place
        box(left, y, right - left, question, WORK)
        canvas.arrow((right, y + 17), (answer, y + 17))
        canvas.text((right + answer) / 2, y + 11, "yes", anchor="middle", size=12)
        box(answer, y, WIDTH - answer - 10, decided, colours[decided])
        canvas.arrow((middle, y + 34), (middle, y + step))
        canvas.text(middle + 8, y + 54, "no", size=12)
    box(left, top + step * len(LOOKS), right - left, Look.WAIT, colours[Look.WAIT])
    return canvas.svg()


def states() -> str:
    """The states of a message and the steps between them, from the table of the model."""
    from veilmq.model.messages.states import STEPS, State

    boxes = {
        State.DELAYED: (60, 200, WORK), State.READY: (320, 60, NEXT), State.RETURNED: (320, 340, NEXT),
        State.IN_FLIGHT: (600, 200, LEASE), State.GONE: (60, 470, PALE),
    }  # fmt: skip
    routes = {
        (State.READY, State.DELAYED): ([(320, 80), (140, 80), (140, 200)], (230, 54), "middle"),
        (State.READY, State.RETURNED): ([(380, 100), (380, 340)], (388, 220), "start"),
        (State.READY, State.IN_FLIGHT): ([(440, 80), (660, 80), (660, 200)], (550, 70), "middle"),
        (State.DELAYED, State.DELAYED): ([(60, 212), (34, 212), (34, 228), (60, 228)], (6, 194), "start"),
        (State.DELAYED, State.RETURNED): ([(130, 240), (130, 300), (345, 300), (345, 340)], (140, 276), "start"),
        (State.RETURNED, State.DELAYED): ([(320, 360), (90, 360), (90, 240)], (205, 378), "middle"),
        (State.RETURNED, State.RETURNED): ([(365, 380), (365, 404), (395, 404), (395, 380)], (380, 420), "middle"),
        (State.RETURNED, State.IN_FLIGHT): ([(415, 340), (415, 300), (630, 300), (630, 240)], (522, 276), "middle"),
        (State.IN_FLIGHT, State.IN_FLIGHT): ([(720, 212), (746, 212), (746, 228), (720, 228)], (754, 194), "end"),
        (State.IN_FLIGHT, State.RETURNED): ([(690, 240), (690, 360), (440, 360)], (565, 378), "middle"),
    }
    canvas = Canvas(WIDTH, 530, "The states of a message, and the steps between them")
    for state, (x, y, fill) in boxes.items():
        canvas.bar(x, x + 120, y, 40, fill, faded=True)
        canvas.text(x + 60, y + 25, state, anchor="middle", bold=True)
    for x, y, text in ((380, 20, "send"), (168, 160, "send with a delay")):
        canvas.arrow((x, y), (x, y + 40))
        canvas.text(x + 8, y + 14, text, size=12)
    between: dict[tuple[State, State], list[str]] = {}
    ends: dict[str, list[State]] = {}
    for step in STEPS:
        if step.target is State.GONE:
            ends.setdefault(step.event, []).append(step.source)
        else:
            between.setdefault((step.source, step.target), []).append(step.event)
    for pair, events in between.items():
        points, (x, y), anchor = routes[pair]
        canvas.line(*points[:-1])
        canvas.arrow(points[-2], points[-1])
        for place, event in enumerate(events):
            canvas.text(x, y + 15 * place, event, anchor=anchor, size=12)
    by_sources: dict[tuple[State, ...], list[str]] = {}
    for event, sources in ends.items():
        by_sources.setdefault(tuple(sources), []).append(event)
    for place, (origins, events) in enumerate(by_sources.items()):
        canvas.text(196, 486 + 17 * place, f"from {', '.join(origins)}: {', '.join(events)}", size=12)
    return canvas.svg()


def places() -> str:
    """Where a message is kept, and the usual ways from one place to another, from the table of the store."""
    from veilmq.model.messages.states import State
    from veilmq.store.sqlite import messages as at

    boxes = {
        at.MEMTABLE: (70, 70), at.MEMTABLE_LEASED: (540, 70), at.IN_LINE: (70, 190), at.IN_FLIGHT: (540, 190),
        at.DELAYED: (70, 320), at.RETURNED: (305, 320), at.QUARANTINE: (70, 440), at.GONE: (540, 440),
    }  # fmt: skip
    assert set(boxes) == set(at.PLACES)
    fills = {State.READY: NEXT, State.RETURNED: NEXT, State.IN_FLIGHT: LEASE, State.DELAYED: WORK, State.GONE: PALE}
    routes = {
        (at.MEMTABLE, at.MEMTABLE_LEASED): ([(220, 92), (540, 92)], (380, 84), "middle"),
        (at.MEMTABLE, at.IN_LINE): ([(145, 114), (145, 190)], (153, 156), "start"),
        (at.MEMTABLE_LEASED, at.IN_FLIGHT): ([(615, 114), (615, 190)], (607, 156), "end"),
        (at.MEMTABLE_LEASED, at.GONE): ([(690, 92), (726, 92), (726, 462), (690, 462)], (720, 272), "end"),
        (at.IN_LINE, at.IN_FLIGHT): ([(220, 212), (540, 212)], (380, 204), "middle"),
        (at.IN_LINE, at.DELAYED): ([(145, 234), (145, 320)], (153, 270), "start"),
        (at.IN_LINE, at.QUARANTINE): ([(70, 212), (44, 212), (44, 462), (70, 462)], (36, 186), "start"),
        (at.DELAYED, at.RETURNED): ([(220, 342), (305, 342)], (262, 336), "middle"),
        (at.RETURNED, at.IN_FLIGHT): ([(380, 320), (380, 262), (575, 262), (575, 234)], (478, 256), "middle"),
        (at.IN_FLIGHT, at.RETURNED): ([(615, 234), (615, 342), (455, 342)], (535, 358), "middle"),
        (at.IN_FLIGHT, at.GONE): ([(655, 234), (655, 440)], (647, 400), "end"),
        (at.RETURNED, at.QUARANTINE): ([(345, 364), (345, 462), (220, 462)], (337, 410), "end"),
        (at.RETURNED, at.GONE): ([(415, 364), (415, 462), (540, 462)], (423, 440), "start"),
    }
    canvas = Canvas(WIDTH, 520, "The places of a message, and the ways between them")
    for place, (x, y) in boxes.items():
        canvas.bar(x, x + 150, y, 44, fills[place.state], faded=True)
        canvas.text(x + 75, y + 19, place.name, anchor="middle", bold=True)
        canvas.text(x + 75, y + 36, place.kept, anchor="middle", size=11)
    canvas.arrow((145, 34), (145, 70))
    canvas.text(
        153, 50, "send; at once into its line if long, of a group or to a deep queue; with a delay: delayed", size=12
    )
    between: dict[tuple[at.Where, at.Where], list[str]] = {}
    for way in at.WAYS:
        between.setdefault((way.source, way.target), []).append(way.event)
    for pair, events in between.items():
        points, (x, y), anchor = routes[pair]
        canvas.line(*points[:-1])
        canvas.arrow(points[-2], points[-1])
        for number, event in enumerate(events):
            canvas.text(x, y + 15 * number, event, anchor=anchor, size=12)
    canvas.text(
        70, 508, "A dead-letter queue is another queue: there the message begins anew, returned or (FIFO) in its line."
    )
    return canvas.svg()


def _timeouts() -> Any:
    path = Path(__file__).with_name("timeouts.py")
    spec = importlib.util.spec_from_file_location("timeouts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["timeouts"] = module
    spec.loader.exec_module(module)
    return module


PICTURES = {
    "lease-timeline": lease_timeline,
    "keeper-flow": keeper_flow,
    "states": states,
    "places": places,
    "ordered": ordered,
    "transaction": transaction,
    "recovery": recovery,
}


def main() -> None:
    for name, make in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(make())


if __name__ == "__main__":
    main()
