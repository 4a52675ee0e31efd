"""The figures of a report, each the answer to one question.

Strategy: a figure shows the queues and types that matter most, by what today's leases cost; the tables below have all.
Panels of one row have one scale. Frames are those of the jobs: `curve`, `recommended`, `redelivery_curve`, `split`,
`health`.
"""

from collections.abc import Sequence
from math import log
from typing import Any, Final

from veilmq.pipeline.report.drawing import (
    BETTER,
    INK,
    MUTED,
    ON_SURFACE,
    SERIES,
    SURFACE,
    TODAY,
    Drawing,
    mark,
    span,
    styled,
    time_axis,
)

PANELS_MAX: Final = 6
_HOVERS: Final = 120
"""Places on a panel, at most, that have a text for the pointer."""
TITLE_MAX: Final = 27
_COLUMNS: Final = 3
_LOWEST: Final = 3e-4
"""Lowest share shown: below it a name has no room under its point."""
_ROOM: Final = 0.6
"""Share of a panel's width: a point further right has its name on its left."""


def with_places(rows: Any, among: Any) -> Any:
    """With a column `place`: the queue's account and region where `among` has another queue of the same name."""
    known = among.groupby("queue")[["account", "region"]].nunique()
    shared = {name: (queue.account > 1, queue.region > 1) for name, queue in known.iterrows()}
    places = [
        ", ".join(str(part) for part, is_shared in zip(names, shared[queue], strict=True) if is_shared)
        for *names, queue in rows[["account", "region", "queue"]].itertuples(index=False, name=None)
    ]
    return rows.assign(place=places)


def label_of(row: Any) -> str:
    """Queue and type of a row from `with_places`."""
    return f"{_name_of(row)} ({row['place']})" if row["place"] else _name_of(row)


def title_of(row: Any) -> str:
    """The same as a panel's title, no wider than the panel."""
    return f"{shortened(_name_of(row))}\n{row['place']}".rstrip()


def _name_of(row: Any) -> str:
    kind = row["type"]
    return str(row["queue"]) if kind is None or kind != kind else f"{row['queue']} · {kind}"


def shortened(label: str) -> str:
    """Shortened to fit over a panel, which would grow with its title; keeps the beginning and the end of a name."""
    if len(label) <= TITLE_MAX:
        return label
    half = (TITLE_MAX - 1) // 2
    return f"{label[:half]}…{label[-half:]}"


def worst(timeouts: Any, most: int = PANELS_MAX) -> Any:
    """The groups with the highest total cost today, so many at most."""
    known = timeouts[timeouts.basis != "too few"]
    cost = (known.attempts * known.today_cost).astype(float)
    return with_places(known.loc[cost.sort_values(ascending=False).index[:most]], timeouts)


def rows_of(rows: Any, group: Any) -> Any:
    """The rows of one group."""
    kept = rows.queue.eq(group.queue) & rows.account.eq(group.account) & rows.region.eq(group.region)
    kind = group["type"]
    return rows[kept & (rows["type"].isna() if kind is None or kind != kind else rows["type"].eq(kind))]


def _panels(name: str, groups: Any) -> tuple[Drawing, list[tuple[Any, Any]]]:
    count = max(len(groups), 1)
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    drawing = Drawing(name, rows, columns, width=3.3 * max(columns, 2), height=2.7)
    pairs = list(zip(drawing.panels, (row for _, row in groups.iterrows()), strict=False))
    for panel, group in pairs:
        drawing.named(panel, label_of(group))
    for panel in drawing.panels[len(groups) :]:
        panel.set_visible(False)
    return drawing, pairs


def _on_one_scale(panels: Sequence[tuple[Any, float, float]]) -> None:
    """Time axes of panels with what each has to show; those of a row show the same times."""
    for first in range(0, len(panels), _COLUMNS):
        row = panels[first : first + _COLUMNS]
        low, high = min(each[1] for each in row), max(each[2] for each in row)
        for panel, _, _ in row:
            time_axis(panel.xaxis, low, high, "")


def percent(share: float) -> str:
    """A readable share."""
    return f"{100 * share:.3g} %"


@styled
def survival(curve: Any, timeouts: Any) -> str:
    """How long does work take? The share still at it, with its interval, and where attempts were cut off."""
    drawing, pairs = _panels("survival", worst(timeouts))
    spans = [_spread(rows_of(curve, group), group) for _, group in pairs]
    _on_one_scale([(panel, *bounds) for (panel, _), bounds in zip(pairs, spans, strict=True)])
    for panel, group in pairs:
        rows = rows_of(curve, group)
        seen = rows[rows.within_reach]
        panel.fill_between(seen.seconds, seen.low, seen.high, step="post", color=SERIES[0], alpha=0.18, linewidth=0)
        panel.step(seen.seconds, seen.alive, where="post", color=SERIES[0], label="seen")
        law = rows[rows.law.notna()]
        if len(law):
            panel.plot(law.seconds, law.law, color=INK, linewidth=1.2, linestyle=(0, (1, 2.5)), label="law")
        cut = seen[seen.censored > 0]
        share = cut.censored / max(float(rows.finished.sum() + rows.censored.sum()), 1.0)
        cut = cut[share > 0.0004]
        panel.plot(cut.seconds, cut.alive, "|", color=TODAY, markersize=6, markeredgewidth=1.1, label="cut off")
        high = panel.get_xlim()[1]
        panel.set_ylim(0, 1.02)
        shown = seen.iloc[:: max(1, len(seen) // _HOVERS)]
        drawing.hover(panel, shown.seconds, (
            f"after {span(row.seconds)} {percent(row.alive)} are at work ({percent(row.low)} to {percent(row.high)})"
            for row in shown.itertuples()
        ))  # fmt: skip
        panel.set_title(title_of(group))
        if group.reach_s < high:
            panel.axvspan(group.reach_s, high, color=MUTED, alpha=0.10, linewidth=0)
            panel.text(high, 0.99, "not seen ", fontsize=8, color=MUTED, va="top", ha="right")
    if pairs:
        pairs[0][0].set_ylabel("share still at work")
        drawing.legend_below()
    return drawing.svg()


def _spread(rows: Any, group: Any) -> tuple[float, float]:
    body = rows[(rows.alive < 0.998) & (rows.alive > 0.0005)].seconds
    low = float(body.min()) if len(body) else 1.0
    high = max(float(rows.seconds.max()), float(group.reach_s)) * 1.4
    return low * 0.7, max(high, low * 10)


@styled
def redelivery(points: Any, timeouts: Any) -> str:
    """How often does work outlive its lease? By the length of a lease that nobody extends."""
    drawing, pairs = _panels("redelivery", worst(timeouts))
    longest = [
        max(float(rows.timeout_s.max()) if len(rows) else 10.0, float(group.today_lease_s) * 1.3)
        for group, rows in ((group, rows_of(points, group)) for _, group in pairs)
    ]
    _on_one_scale([(panel, 1.0, high) for (panel, _), high in zip(pairs, longest, strict=True)])
    for panel, group in pairs:
        rows = rows_of(points, group)
        seen, beyond = rows[rows.within_reach], rows[~rows.within_reach.astype(bool)]
        panel.fill_between(seen.timeout_s, seen.low.clip(1e-5), seen.high.clip(1e-5), color=SERIES[0], alpha=0.18,
                           linewidth=0)  # fmt: skip
        panel.plot(seen.timeout_s, seen.redelivered.clip(1e-5), color=SERIES[0])
        panel.plot(beyond.timeout_s, beyond.redelivered.clip(1e-5), color=SERIES[0], linestyle=(0, (2, 2)))
        panel.set_yscale("log")
        panel.set_ylim(1e-4, 1.3)
        panel.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["100 %", "10 %", "1 %", "0.1 %", "0.01 %"])
        panel.minorticks_off()
        _mark_leases(panel, group)
        drawing.hover(panel, rows.timeout_s, map(_effect, rows.itertuples()))
        panel.set_title(title_of(group))
    if pairs:
        pairs[0][0].set_ylabel("started twice")
    return drawing.svg()


def _effect(row: Any) -> str:
    return (
        f"timeout {span(row.timeout_s)}: {percent(row.redelivered)} are started twice ({percent(row.low)} to"
        f" {percent(row.high)}); a dead worker's message is back after {span(row.recovery_s)}"
    )


def _mark_leases(panel: Any, group: Any) -> None:
    today = float(group.today_lease_s)
    mark(panel, today, TODAY, f"today {span(today)}", align="right" if today > 20 else "left")
    if group.timeout_s == group.timeout_s and group.timeout_s is not None:
        at, text = float(group.timeout_s), f"best {span(float(group.timeout_s))}"
    elif group.timeout_at_least_s == group.timeout_at_least_s and group.timeout_at_least_s is not None:
        at, text = float(group.timeout_at_least_s), f"at least {span(float(group.timeout_at_least_s))}"
    else:
        return
    mark(panel, at, BETTER, text, high=0.86, align="right" if at > 20 else "left")


@styled
def tradeoff(points: Any, timeouts: Any) -> str:
    """What does a shorter recovery cost in duplicate work? The timeout grows along the curve."""
    drawing, pairs = _panels("tradeoff", worst(timeouts))
    spans = []
    for _, group in pairs:
        near = rows_of(points, group)
        near = near[near.within_reach & (near.recovery_s > 0)].recovery_s
        waits = [float(each) for each in (group.recovery_s, group.today_recovery_s, *near)]
        spans.append((max(min(waits) * 0.6, 0.1), max(waits) * 1.6))
    _on_one_scale([(panel, *bounds) for (panel, _), bounds in zip(pairs, spans, strict=True)])
    for panel, group in pairs:
        rows = rows_of(points, group)
        rows = rows[rows.recovery_s > 0]
        # Both parts include the point where one ends and the other begins.
        seen = rows[rows.within_reach]
        beyond = rows[rows.timeout_s >= float(seen.timeout_s.max() if len(seen) else 0.0)]
        panel.plot(seen.recovery_s, seen.redelivered.clip(1e-4), color=SERIES[0])
        panel.plot(beyond.recovery_s, beyond.redelivered.clip(1e-4), color=SERIES[0], linestyle=(0, (2, 2)))
        drawing.hover(panel, rows.recovery_s, map(_effect, rows.itertuples()))
        panel.set_yscale("log")
        panel.set_ylim(7e-5, 1.5)
        panel.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["100 %", "10 %", "1 %", "0.1 %", "0.01 %"])
        panel.minorticks_off()
        panel.set_title(title_of(group))
        twice = float(group.today_redelivered)
        if len(rows) and not group.today_renewed:
            twice = float(rows.redelivered[(rows.timeout_s - group.today_lease_s).abs().idxmin()])
        _point(panel, group.today_recovery_s, twice, TODAY, "today")
        if group.timeout_s == group.timeout_s and group.timeout_s is not None:
            _point(panel, group.timeout_recovery_s, group.timeout_redelivered, BETTER, "best timeout", up=14)
        low = float(group.redelivered) < _LOWEST
        _point(panel, group.recovery_s, group.redelivered, INK, "extended", up=5 if low else -13, left=True)
    if pairs:
        pairs[0][0].set_ylabel("started twice")
        for panel, _ in pairs[-_COLUMNS:]:
            panel.set_xlabel("from a crash to the next start")
    return drawing.svg()


def _point(panel: Any, x: float, y: float, color: str, text: str, *, up: float = 5, left: bool = False) -> None:
    """A dot with its name beside it; on the left if there is no room on the right."""
    y = max(float(y), 1e-4)
    panel.plot([x], [y], "o", color=color, markersize=7, markeredgecolor=SURFACE, markeredgewidth=1.5, zorder=5)
    low, high = panel.get_xlim()
    x = max(float(x), low)  # a lease of 0 s has no place on the scale
    left = left or log(x / low) > _ROOM * log(high / low)
    name = panel.annotate(text, (x, y), xytext=(-8 if left else 7, up), textcoords="offset points", fontsize=8.5,
                          color=color, fontweight="bold", zorder=6, ha="right" if left else "left",
                          bbox=ON_SURFACE)  # fmt: skip
    name.set_in_layout(False)


@styled
def split(parts: Any, quantiles: Any) -> str:
    """Which types belong together? Each bar goes from the median to the p99; a colour is a queue."""
    from pandas import isna

    several = with_places(parts[parts.parts > 1], parts)
    queues = [rows for _, rows in several.groupby(["account", "region", "queue"])]
    queues.sort(key=lambda rows: -float(rows.gain.max()))
    queues = queues[:_COLUMNS]
    if not queues:
        return ""
    longest = max(sum(len(each) for each in rows.types) for rows in queues)
    drawing = Drawing("split", len(queues), 1, height=0.9 + 0.3 * longest)
    for panel, rows in zip(drawing.panels, queues, strict=True):
        place, names, low, high = 0, [], 1e9, 1.0
        for number, (_, part) in enumerate(rows.sort_values("part").iterrows()):
            color = SERIES[number % len(SERIES)]
            start, longest_of = place, [0.0]
            for kind in part.types:
                group = part.copy()
                group["type"] = kind
                row = rows_of(quantiles, group).iloc[0]
                # An unknown value is drawn at its lower bound.
                middle, end = (row.at_least_s if isna(each) else each for each in (row.p50_s, row.p99_s))
                panel.plot([middle, end], [place, place], color=color, linewidth=7, solid_capstyle="round")
                panel.plot([middle], [place], "o", color=SURFACE, markersize=4)
                low, high = min(low, float(middle)), max(high, float(end), float(part.timeout_s))
                longest_of.append(float(end))
                names.append("no type" if kind is None else shortened(str(kind)))
                place += 1
            panel.plot([part.timeout_s] * 2, [start - 0.42, place - 0.58], color=color, linewidth=1.6)
            beside = max(float(part.timeout_s), *longest_of) * 1.03
            panel.annotate(f"timeout {span(float(part.timeout_s))}", (beside, (start + place - 1) / 2),
                           color=color, fontsize=8.5, fontweight="bold", va="center", bbox=ON_SURFACE)  # fmt: skip
        together = float(rows.together_timeout_s.iloc[0])
        saves = "saves {} of the cost, 95 % sure: {} to {}".format(
            *(percent(max(float(rows[name].iloc[0]), 0.0)) for name in ("gain", "gain_low", "gain_high"))
        )
        mark(panel, together, TODAY, f"one for all {span(together)}")
        panel.set_yticks(range(place), names)
        panel.set_ylim(place - 0.4, -1.0)
        panel.grid(False, axis="y")
        time_axis(panel.xaxis, low * 0.6, max(high, together) * 3, saves)
        panel.set_title(title_of(rows.iloc[0].to_dict() | {"type": None}))
    return drawing.svg()


@styled
def health(windows: Any) -> str:
    """What happened when? All queues together, and the oldest message of any."""
    if windows.empty:
        return ""
    by = windows.set_index("from")
    drawing = Drawing("health", 3, 1, height=1.5)
    received, trouble, oldest = drawing.panels
    at = by.index.to_pydatetime()
    received.fill_between(at, by.received, color=SERIES[0], alpha=0.25, linewidth=0, step="mid")
    received.step(at, by.received, color=SERIES[0], where="mid", linewidth=1.2)
    received.set_title("received")
    for name, column, color in (
        ("redeliveries", "redeliveries", SERIES[1]),
        ("stale deletes", "stale_deletes", TODAY),
        ("dead letters", "dead_letters", INK),
    ):
        if by[column].sum():
            trouble.step(at, by[column], color=color, where="mid", linewidth=1.3, label=name)
    trouble.set_title("trouble")
    if trouble.get_legend_handles_labels()[0]:
        # Above the panel: within it, a legend would cover what it explains.
        trouble.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=3)
    oldest.step(at, by.oldest_s, color=SERIES[2], where="mid", linewidth=1.3)
    oldest.set_title("oldest message")
    if float(by.oldest_s.max() or 0) > 0:
        time_axis(oldest.yaxis, max(float(by.oldest_s.min()), 0.01), float(by.oldest_s.max()) * 1.3, "")
    shown = by.iloc[:: max(1, len(by) // _HOVERS)]
    for panel in drawing.panels:
        drawing.hover(panel, shown.index.to_pydatetime(), (
            f"{row.Index:%Y-%m-%d %H:%M}: {row.received:.0f} received, {row.redeliveries:.0f} redelivered,"
            f" {row.stale_deletes:.0f} stale deletes, {row.dead_letters:.0f} dead letters, oldest {span(row.oldest_s)}"
            for row in shown.itertuples()
        ))  # fmt: skip
        panel.margins(x=0)
        if panel is not oldest:
            panel.set_ylim(bottom=0)
    _dates(oldest)
    for panel in (received, trouble):
        panel.sharex(oldest)
        panel.tick_params(labelbottom=False)
    return drawing.svg()


def _dates(panel: Any) -> None:
    from matplotlib import dates

    untyped: Any = dates
    locator = untyped.AutoDateLocator(minticks=3, maxticks=9)
    panel.xaxis.set_major_locator(locator)
    panel.xaxis.set_major_formatter(untyped.ConciseDateFormatter(locator))
