"""The jobs' results: computed from one pass over the events, and shown on a page of one self-contained HTML file.

Strategy: `Analysis` keeps what the jobs share. The histogram of leases is small however long the history is, so it is
computed once and collected here; other results are computed from it. `health` needs a pass of its own. Recommendations
are only for queues that exist: for a deleted queue only the durations of its work are reported.

`page` places text, the figures (figures.py draws each answer as an SVG) and tables, from pandas frames and without
Spark. Recommendations come first; each figure has one sentence on how to read it; the tables of all queues and types
are at the end, folded. Everything from the history is escaped. Colours are set once for light and once for dark.
"""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline.estimates import buckets
from veilmq.pipeline.jobs import attempts, health, plan_changes, split, survival, timeouts
from veilmq.pipeline.publish.plans import SIGNS, floors
from veilmq.pipeline.report import figures
from veilmq.pipeline.report.drawing import span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs


class Analysis:
    """The jobs' results as pandas frames, each computed at its first use."""

    def __init__(
        self,
        events: "DataFrame",
        costs: "Costs | None" = None,
        *,
        cells: Any = None,
        of: "Callable[[Sequence[str]], DataFrame] | None" = None,
        since: int | None = None,
        until: int | None = None,
    ) -> None:
        """cells: a histogram that is known already (a pandas frame). of: returns the events of some kinds, if there is
        a quicker way than reading all. since, until: when the events begin and end, in microseconds
        (`reading.first_instant`, `last_instant`); None: the events are read once more to find out."""
        self._events = events
        self._of = of or (lambda kinds: events)
        self._since = since
        self._until = until
        self._costs = costs
        self._given = cells

    @cached_property
    def cells(self) -> Any:
        """The histogram."""
        if self._given is not None:
            return self._given
        # Without `until`, the last of all events is needed.
        events = self._events if self._until is None else self._of(attempts.KINDS)
        return buckets.histogram(attempts.attempts(events, self._until)).toPandas()

    @cached_property
    def _cells(self) -> "DataFrame":
        return self._events.sparkSession.createDataFrame(self.cells, buckets.SCHEMA)

    @cached_property
    def left_out(self) -> list[tuple[str, ...]]:
        """Queues (account, region, name) that have leases here but no recommendation, because they were deleted."""
        if self.cells.empty:
            return []
        known = set(self.cells[list(timeouts.QUEUE)].itertuples(index=False, name=None))
        gone = timeouts.queue_lives(self._of(timeouts.LIFE_KINDS)).where("deleted").select(*timeouts.QUEUE).collect()
        return sorted(known & {tuple(row) for row in gone})

    @cached_property
    def _current(self) -> "DataFrame":
        rows = timeouts.without_deleted(self.cells, set(self.left_out))
        return self._events.sparkSession.createDataFrame(rows, buckets.SCHEMA)

    @cached_property
    def curve(self) -> Any:
        """See `survival.curve`."""
        return survival.curve(self._cells).orderBy(*buckets.GROUP, "bucket").toPandas()

    @cached_property
    def quantiles(self) -> Any:
        """See `survival.quantiles`."""
        return survival.quantiles(self._cells).orderBy(*buckets.GROUP).toPandas()

    @cached_property
    def timeouts(self) -> Any:
        """See `timeouts.recommended`."""
        return timeouts.recommended(self._current, self._costs).orderBy(*buckets.GROUP).toPandas()

    @cached_property
    def redelivery(self) -> Any:
        """See `timeouts.redelivery_curve`."""
        found = timeouts.redelivery_curve(self._current, self._costs)
        return found.orderBy(*buckets.GROUP, "timeout_s").toPandas()

    @cached_property
    def split(self) -> Any:
        """See `split.split`."""
        return split.split(self._current, self._costs).orderBy("account", "region", "queue", "part").toPandas()

    @cached_property
    def helped(self) -> Any:
        """See `plan_changes.helped`. A history without a plan costs a look for one."""
        import pandas as pd

        changed = plan_changes.changes(self._of([plan_changes.KIND])).persist()
        try:
            if changed.isEmpty():
                return pd.DataFrame(columns=[part.split()[0] for part in plan_changes.SCHEMA.split(", ")])
            by_hour = plan_changes.hours(attempts.attempts(self._of(attempts.KINDS), self._until))
            return plan_changes.helped(by_hour, changed, self._costs).orderBy(*timeouts.QUEUE).toPandas()
        finally:
            changed.unpersist()

    @cached_property
    def floors(self) -> Any:
        """See `publish.plans.floors`."""
        return floors(self._of(SIGNS)).toPandas()

    @cached_property
    def windows(self) -> "DataFrame":
        """See `health.health`; in windows of five minutes or, for a long history, as many windows as fit on a page.

        Kept in Spark: there is a row for each queue and window.
        """
        from pyspark.sql import functions as F

        low, high = self._since, self._until
        if low is None or high is None:
            low, high = self._events.agg(F.min("at"), F.max("at")).first() or (None, None)
        minutes = 5 if low is None or high is None else max(5, round((high - low) / 60e6 / WINDOWS_MAX))
        return health.health(self._of(health.KINDS), window=f"{minutes} minutes").persist()

    @cached_property
    def health(self) -> Any:
        """The windows of all queues together, in order: `health.together`."""
        return health.together(self.windows).orderBy("from").toPandas()


WINDOWS_MAX = 300


_CARDS_MAX: Final = 6
_CARDS_MOST: Final = 200
"""With those that only a filter shows."""
_PLACES_MAX: Final = 40
"""Of a slider."""
_PLACE_NEAR: Final = 0.06
"""A place of the grid stands for a timeout that differs by less."""
_FILTER: Final = (
    '<p><input type="search" id="filter" placeholder="queue or type" aria-label="Show queues and types with these'
    ' letters" /></p>'
)
_SCRIPT: Final = f"""
const filter = document.getElementById("filter");
if (filter) filter.addEventListener("input", () => {{
  const wanted = filter.value.trim().toLowerCase();
  const shown = {{card: 0, slider: 0}};
  for (const each of document.querySelectorAll("[data-name]")) {{
    const fits = each.dataset.name.includes(wanted);
    if (each.tagName === "g") each.style.opacity = fits ? 1 : 0.12;
    else each.hidden = !fits || (each.className in shown && !wanted && ++shown[each.className] > {_CARDS_MAX});
  }}
}});
for (const slider of document.querySelectorAll("input[type=range]")) {{
  const places = JSON.parse(slider.dataset.places);
  const outputs = slider.parentElement.querySelectorAll("output");
  slider.hidden = false;
  slider.addEventListener("input", () => {{
    const place = places[slider.value];
    outputs.forEach((each, at) => {{ each.textContent = place[at]; }});
    slider.setAttribute("aria-valuetext", place[0]);
  }});
}}
"""
_CHANGED: Final = {"reverted": "was taken back", "reconsidered": "came with new settings"}
_WORTH: Final = 0.02
"""Share of today's cost: a change that saves less gets no card."""

_CSS: Final = """
:root { --ink:#1b2127; --muted:#5d6873; --rule:#dfe4e8; --surface:#ffffff; --page:#f5f7f8; --today:#b4530a;
  --better:#0b7a53; --series-1:#2563a8; --series-2:#8a5cc2; --series-3:#0f8b8d; --series-4:#c2418c; --series-5:#7a8a12;
  --series-6:#4a5a6a; --font: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8edf1; --muted:#98a5b1; --rule:#2d3740; --surface:#1a2127;
  --page:#12171b; --today:#f0a04b; --better:#4fcf9c; --series-1:#6fb1f2; --series-2:#b99af0; --series-3:#4fc9cb;
  --series-4:#f088c0; --series-5:#c3d14f; --series-6:#a4b3c1; } }
* { box-sizing: border-box }
body { margin:0; background:var(--page); color:var(--ink); font:16px/1.55 var(--font); }
main { max-width: 1060px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem }
h1 { font-size:1.7rem; margin:0 0 .2rem } h2 { font-size:1.2rem; margin:0 0 .2rem }
p { margin:.2rem 0 .9rem; color:var(--muted); max-width: 46rem }
section { background:var(--surface); border:1px solid var(--rule); border-radius:12px; padding:1.2rem 1.3rem;
  margin:1.2rem 0; overflow-x:auto }
.figure { width:100%; height:auto; display:block; min-width:560px }
.cards { display:grid; grid-template-columns:repeat(auto-fill,minmax(300px,1fr)); gap:.9rem; margin:1.2rem 0 }
.card { background:var(--surface); border:1px solid var(--rule); border-radius:12px; padding:1rem 1.1rem }
.card b { display:block; overflow-wrap:anywhere } .card .to { font-size:1.45rem; font-weight:650; margin:.25rem 0 }
.card .from { color:var(--today) } .card .new { color:var(--better) } .card small { color:var(--muted); display:block }
.card[hidden], .slider[hidden] { display:none } .slider { border-top:1px solid var(--rule); padding:.7rem 0 .2rem }
.slider input { width:100%; accent-color:var(--better) } .slider output { color:var(--ink); font-weight:600 }
#filter { font:inherit; color:var(--ink); background:var(--surface); width:100%;
  max-width:22rem; padding:.4rem .7rem; border:1px solid var(--rule); border-radius:8px }
details summary { cursor:pointer; font-weight:600 }
table { border-collapse:collapse; font-size:.86rem; margin-top:.8rem; font-variant-numeric:tabular-nums; width:100% }
th,td { padding:.32rem .6rem; text-align:right; border-bottom:1px solid var(--rule); white-space:nowrap }
th { color:var(--muted); font-weight:600 } th:first-child,td:first-child,th.t,td.t { text-align:left }
"""


def page(found: Analysis, *, source: str, offsets: tuple[int, int], now: float, left_out: Sequence[str] = ()) -> str:
    """The whole file. source: where the history is; now: Unix seconds, printed; left_out: names of deleted queues."""
    timeouts, quantiles = found.timeouts, found.quantiles
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    attempts = float(timeouts.attempts.sum()) if len(timeouts) else 0.0
    body = [
        "<h1>How long should a lease be?</h1>",
        f"<p>{attempts:,.0f} messages of {len(timeouts)} queues and message types, from {offsets[1] - offsets[0]:,} "
        f"events of {escape(source)}. {when}.</p>",
        f"<p>Left out, for they were deleted: {escape(', '.join(left_out))}.</p>" if left_out else "",
        _cards(timeouts),
        _outcomes(found.helped),
        *_figures(found),
        _table(
            "All queues and types: what is recommended",
            timeouts,
            ("attempts", "today_lease_s", "today_cost", "timeout_s", "timeout_low_s", "timeout_high_s",
             "timeout_at_least_s", "timeout_cost", "first_lease_s", "first_lease_low_s", "first_lease_high_s",
             "renew_after_s", "renew_after_low_s", "renew_after_high_s", "cost", "cost_low", "cost_high", "basis",
             "silent_were"),
        ),
        _table(
            "Queues to split: what is recommended",
            found.split[found.split.parts > 1].assign(type=None),
            ("types", "attempts", "median_s", "median_low_s", "median_high_s", "timeout_s", "timeout_low_s",
             "timeout_high_s", "gain", "gain_low", "gain_high"),
        )
        if len(timeouts)
        else "",
        _table(
            "All queues and types: how long work takes",
            quantiles,
            ("attempts", "censored_share", "crashes", "p50_s", "p50_low_s", "p50_high_s", "p90_s", "p90_low_s",
             "p90_high_s", "p99_s", "p99_low_s", "p99_high_s", "p99_basis", "at_least_s", "reach_s", "length_of",
             "by_attempt_p50_s"),
        ),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>VeilMQ: leases</title><style>{_CSS}</style></head>\n<body><main>\n'
        + "\n".join(part for part in body if part)
        + f"\n</main><script>{_SCRIPT}</script></body></html>\n"
    )


def _cards(timeouts: Any) -> str:
    cards: list[str] = []
    known = figures.worst(timeouts, _CARDS_MOST)
    for _, row in known.iterrows():
        card = _card(row)
        if card:
            # Those of less weight are shown to who filters for them.
            hidden = " hidden" if len(cards) >= _CARDS_MAX else ""
            name = figures.label_of(row)
            cards.append(
                f'<div class="card" data-name="{escape(name.lower())}"{hidden}><b>{escape(name)}</b>{card}</div>'
            )
    if not len(known):
        return ""
    if not cards:
        return "<section><h2>Nothing to change</h2><p>Today's leases cost about what the best would.</p></section>"
    return f'{_FILTER}<div class="cards">{"".join(cards)}</div>'


def _card(row: Any) -> str:
    """What to set without changing code, then what workers that extend would gain; empty if neither is worth it."""
    today, plain, kept = float(row.today_lease_s), _known(row.timeout_s), float(row.cost)
    saved = 1 - kept / float(row.today_cost) if row.today_cost else 0.0
    every = f"every {span(float(row.renew_after_s))}"
    surely = _between(row.renew_after_low_s, row.renew_after_high_s)
    extend = (
        f"leases of {span(float(row.first_lease_s))} ({_between(row.first_lease_low_s, row.first_lease_high_s)}), a"
        f" dead worker's message back after {span(float(row.recovery_s))}, {100 * saved:.0f} % cheaper than today"
    )
    number = f"from {float(row.attempts):,.0f} messages"
    if row.today_renewed:
        if saved < _WORTH:
            return ""
        head, rest = f"extend {every}", f"95 % sure: {surely}; {extend}; {number}"
    else:
        least = _known(row.timeout_at_least_s)
        if plain is not None and row.today_cost and 1 - float(row.timeout_cost) / float(row.today_cost) >= _WORTH:
            head = f"set {span(plain)}"
            rest = f"95 % sure: {_between(row.timeout_low_s, row.timeout_high_s)}; {number}"
        elif plain is None and least is not None and least > today:
            head = f"set at least {span(least)}"
            rest = f"95 % sure: at least {span(float(row.timeout_low_s))}; longer work was not seen; {number}"
        elif saved >= _WORTH:
            best = f"the best, 95 % sure: {_between(row.timeout_low_s, row.timeout_high_s)}"
            best = "no timeout is long enough" if plain is None and least is None else best
            head, rest = f"keep {span(today)}", f"{best}; {number}"
        else:
            return ""
        if saved >= _WORTH:
            rest += f". Workers that extend, {every} ({surely}): {extend}"
    now = f"today {span(today)}{', extended' if row.today_renewed else ''}"
    return (
        f'<div class="to"><span class="from">{escape(now)}</span>; <span class="new">{escape(head)}</span></div>'
        f"<small>{escape(rest)}.</small>"
    )


def _outcomes(rows: Any) -> str:
    """A card for each queue whose plan changed: what a message cost before and since."""
    if not len(rows):
        return ""
    words = (
        "The hours since the plan in force last changed, each beside the same hour of the week or day before. It cannot"
        " know why: a release of the workers in the same hour looks like the plan's doing."
    )
    cards = "".join(_outcome(row) for _, row in figures.with_places(rows.assign(type=None), rows).iterrows())
    return f'<section><h2>Did it help?</h2><p>{words}</p><div class="cards">{cards}</div></section>'


def _outcome(row: Any) -> str:
    name, when = escape(figures.label_of(row)), datetime.fromtimestamp(row.changed / 1e6, UTC)
    change = _CHANGED.get(row.what, "came into force")
    number = (
        f"{row.hours:.0f} matched hours, with {row.messages_before:,.0f} messages before and"
        f" {row.messages_after:,.0f} since"
    )
    before, after = _known(row.cost_before), _known(row.cost_after)
    if before is None or after is None:
        head, rest = escape(row.verdict), number
    else:
        color = {"better": "new", "worse": "from"}.get(row.verdict, "")
        head = f'a message cost {before:.3g}; <span class="{color}">{after:.3g} since: {escape(row.verdict)}</span>'
        rest = (
            f"95 % sure: {row.change_low:+.3g} to {row.change_high:+.3g}; {number}; started twice"
            f" {figures.percent(row.duplicates_before)}, {figures.percent(row.duplicates_after)} since; a dead worker's"
            f" message back after {span(_known(row.recovery_before_s))}, {span(_known(row.recovery_after_s))} since"
        )
    return (
        f'<div class="card outcome" data-name="{name.lower()}"><b>{name}</b><div class="to">{head}</div>'
        f"<small>The plan {change} at {when:%Y-%m-%d %H:%M} UTC. {escape(rest)}.</small></div>"
    )


def _between(low: Any, high: Any) -> str:
    least, most = _known(low), _known(high)
    if least is None:
        return "unknown"
    return f"{span(least)} or more" if most is None else f"{span(least)} to {span(most)}"


def _known(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _figures(found: Analysis) -> list[str]:
    timeouts = found.timeouts
    if not len(figures.worst(timeouts)):
        return ["<section><h2>Too few leases</h2><p>Thirty that finished are needed to say anything.</p></section>"]
    return [
        _section(
            "How long does work take?",
            "The share of attempts still at work. Ticks are attempts that were cut off: crashes, and work given back. "
            "Where the shading begins, nothing was seen; a dotted line is a law that agrees with what was.",
            figures.survival(found.curve, timeouts),
        ),
        _section(
            "How often does work outlive its lease?",
            "By the length of a lease that is not extended. To the right of what was seen there is no recommendation.",
            figures.redelivery(found.redelivery, timeouts),
        ),
        _section(
            "What does a faster recovery cost?",
            "Short leases bring a crashed worker's message back soon, and start more work twice. Extending leases, as "
            "a lease keeper does, leaves that curve.",
            figures.tradeoff(found.redelivery, timeouts),
        ),
        _section(
            "What would another timeout do?",
            "To messages whose workers do not extend. Where there is a script, move the slider; it begins at what is "
            "recommended. Costs count a second of a dead worker's message as 1, and work started twice as 120.",
            _sliders(found.redelivery, timeouts),
        ),
        _section(
            "Which types belong in queues of their own?",
            "Each bar goes from a type's median to its p99; a colour is a queue with its own timeout.",
            figures.split(found.split, found.quantiles),
        ),
        _section("What happened when?", "All queues together.", figures.health(found.health)),
    ]


def _section(title: str, words: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{words}</p>{content}</section>" if content else ""


def _sliders(points: Any, timeouts: Any) -> str:
    """One for each queue and type whose leases nobody extends; without a script, the text of its first place."""
    sliders: list[str] = []
    for _, row in figures.worst(timeouts, _CARDS_MOST).iterrows():
        rows = figures.rows_of(points, row)
        if row.today_renewed or rows.empty:
            continue
        plain, today_s = _known(row.timeout_s), float(row.today_lease_s)
        remarks = {"today": today_s}
        if plain is not None:
            remarks["recommended"] = plain
        elif (least := _known(row.timeout_at_least_s)) is not None:
            remarks["recommended: at least this"] = max(least, today_s)
        places, start = _places(rows, remarks)
        name = escape(figures.label_of(row))
        hidden = " hidden" if len(sliders) >= _CARDS_MAX else ""
        outputs = [f"<output>{escape(each)}</output>" for each in places[start]]
        sliders.append(
            f'<div class="slider" data-name="{name.lower()}"{hidden}><b>{name}</b><input type="range" hidden min="0" '
            f'max="{len(places) - 1}" value="{start}" aria-label="Timeout of {name}" '
            f'aria-valuetext="{escape(places[start][0])}" data-places="{escape(json.dumps(places))}" />'
            f"<p>With a timeout of {outputs[0]}, {outputs[1]} are started twice, a dead worker's message is back after "
            f"{outputs[2]}, and a message costs {outputs[3]}. From {float(row.attempts):,.0f} messages.</p></div>"
        )
    return "".join(sliders)


def _places(rows: Any, remarks: dict[str, float]) -> tuple[list[list[str]], int]:
    """What a slider shows at each place: timeout, share started twice, recovery, cost; and where it begins.

    remarks: seconds that have a name, the last of which is where it begins.
    """
    rows = rows.sort_values("timeout_s").reset_index(drop=True)
    near = {word: int((rows.timeout_s - each).abs().idxmin()) for word, each in remarks.items()}
    start = list(near.values())[-1]
    known = {
        word: at
        for word, at in near.items()
        if remarks[word] and abs(rows.timeout_s[at] / remarks[word] - 1) < _PLACE_NEAR
    }
    step = -(-len(rows) // _PLACES_MAX)
    kept = sorted({*range(0, len(rows), step), start, *known.values()})
    places = []
    for at in kept:
        row = rows.iloc[at]
        words = [word for word in known if known[word] == at]
        timeout = span(remarks[words[-1]] if words else float(row.timeout_s))
        words += [] if row.within_reach else ["longer than what was seen"]
        twice = f"{figures.percent(row.redelivered)} ({figures.percent(row.low)} to {figures.percent(row.high)})"
        named = f"{timeout} ({', '.join(words)})" if words else timeout
        places.append([named, twice, span(float(row.recovery_s)), f"{float(row.cost):.3g}"])
    return places, kept.index(start)


def _table(title: str, rows: Any, columns: tuple[str, ...]) -> str:
    heads = "".join(f"<th>{escape(_head(name))}</th>" for name in columns)
    lines = []
    for _, row in figures.with_places(rows, rows).iterrows():
        cells = "".join(f"<td>{escape(_cell(name, row[name]))}</td>" for name in columns)
        name = escape(figures.label_of(row))
        lines.append(f'<tr data-name="{name.lower()}"><td class="t">{name}</td>{cells}</tr>')
    if not lines:
        return ""
    return (
        f"<section><details><summary>{title}</summary><table><thead><tr><th>queue</th>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></details></section>"
    )


def _head(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_share").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if name == "types":
        return ", ".join("no type" if each is None else str(each) for each in value)
    if value is None or value != value:
        return "–"
    if name.endswith("_s"):
        return span(float(value))
    if name.endswith("_share") or name.startswith("gain"):
        return f"{100 * value:.1f} %"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.3g}" if value < 1_000 else f"{value:,.0f}"
