"""`whatif`: what other timeouts, queues by type or another number of workers would have done to a history's messages.

Strategy: one task a queue (with `by_type`, a queue and type, as if each type had a queue of its own). It takes what the
history gives (runs.py), replays it under today's settings and under others (replay.py), and compares. Each of
`REPLAYS` replays draws anew what the history does not say; both settings meet the same draws, so their difference is
surer than either.

The intervals say what another period of this length would show: 95 of 100. Up to 119 such periods are drawn (`Others`)
and replayed under both settings. The history's own messages, drawn again, would not do: where few long ones make most
of the cost, another period has others, or longer ones, or none. One more period is equally likely to lie between any
two of those drawn, so 3 of 119 on each side are outside.

Source: Paparoditis and Politis 2002 (local block bootstrap); docs/pipeline.md, "What if?" says what is assumed.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.model.settings.queue import FIFO_SUFFIX
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.estimates.buckets import struct

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.whatif.replay import Replayed, Setting
    from veilmq.pipeline.whatif.runs import Facts

_QUEUE: Final = ["account", "region", "queue"]
METRICS: Final = ("duplicates", "recovery_s", "wait_s", "wait_p95_s", "cost")
SCHEMA: Final = (
    "account string, region string, queue string, type string, under string, timeout_s double, extend_s double,"
    " workers double, messages double, "
    + ", ".join(f"{name} double, {name}_low double, {name}_high double" for name in METRICS)
    + ", cost_change double, cost_change_low double, cost_change_high double, busy double, dead_letters double,"
    " note string"
)
KINDS: Final = ("sent", "dead_lettered", "queue_created", "queue_changed", "snapshot")
"""The kinds of events that `whatif` needs beside the leases."""
COLUMNS: Final = (
    "account", "region", "queue", "incarnation", "sequence", "attempt", "type", "sent", "visible_since", "granted",
    "lease_us", "extensions", "outcome", "exact", "held_us", "watched_us", "lease_end_us", "renewed_share",
)  # fmt: skip
_OF_SENDS: Final = ("account", "region", "queue", "incarnation", "sequence", "type", "sent", "visible_since")
MESSAGES_MAX: Final = 200_000
"""The newest of each queue: more tell nothing new about the same settings, and take memory and time."""
_IN_AN_OCTAVE: Final = 4
_SHARES: Final = tuple(2 ** (-each / _IN_AN_OCTAVE) for each in range(1, 61))
"""Of a queue's messages: the largest that is not too many is taken. The last one is for six thousand million."""
_ACCURACY: Final = 100_000
REPLAYS: Final = 8
OTHERS: Final = (39, 79, 119)
"""So many other periods, if they have no more than `_OTHERS_MESSAGES` together."""
_OTHERS_MESSAGES: Final = 2_000_000
_FEW: Final = 10
_OUTSIDE: Final = 40
"""Of so many periods one is below the interval, and one above."""
_MESSAGES_MIN: Final = 30
_BEYOND: Final = 0.01
_NO_LIMIT: Final = -1
"""Instead of the most receives: the queue has no dead-letter queue."""
_LIMIT_REMOVED: Final = r'[{,]"redrive":null[,}]'
"""In the JSON of a change; within a text, its quotes would be escaped."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to try; what is None is as the history has it. Seconds."""

    timeout_s: float | None = None
    by_type_s: Mapping[str, float] = {}
    """Timeouts of these types."""
    extend_s: float | None = None
    """Workers extend at this interval."""
    workers: int | None = None
    """Of each queue; with `by_type` shared out by the work of each type, one for each at least."""
    by_type: bool = False
    """Each type gets a queue of its own."""

    def __post_init__(self) -> None:
        """Raises OptionInvalid."""
        named = {"timeout": self.timeout_s, **{f"timeout of {kind}": each for kind, each in self.by_type_s.items()}}
        for name, value in {**named, "extend": self.extend_s}.items():
            if value is not None and not value > 0:
                raise OptionInvalid(f"The {name} is {value:g} s.", "It must be above 0.")
        for name, value in named.items():
            if value is not None and self.extend_s is not None and self.extend_s >= value:
                raise OptionInvalid(f"Workers would extend after {self.extend_s:g} s, later than the {name} ends.", "")
        if self.workers is not None and self.workers < 1:
            raise OptionInvalid("There is no worker.", "Give at least one.")


def whatif(leases: "DataFrame", others: "DataFrame", wanted: Wanted, costs: "Costs | None" = None) -> "DataFrame":
    """Two rows per queue (and type, with `by_type`): `under` = `today` and `what if`; columns as in `SCHEMA`.

    leases: of `attempts`. others: the events of `KINDS`. duplicates, cost: per message; recovery_s: on the average from
    a crash to the message's next start; wait_s, wait_p95_s: from visible to the first start; busy: workers at work, on
    the average from the first arrival to the end of the last work; dead_letters: messages. cost_change: of `what if`,
    against today. workers: null if no limit was seen.
    """
    from pyspark.sql import functions as F

    types = {field.name: field.dataType for field in leases.schema.fields}
    never = others.where(F.col("kind") == "sent").select(
        *(
            F.col(name) if name in _OF_SENDS else F.lit(0 if name == "attempt" else None).cast(types[name]).alias(name)
            for name in COLUMNS
        )
    )
    rows = leases.select(*COLUMNS).unionByName(never).join(F.broadcast(_limits(others)), _QUEUE, "left")
    rows = rows.where(F.col("since").isNull() | (F.coalesce("sent", "granted") >= F.col("since"))).drop("since")
    if wanted.by_type and wanted.workers is not None:
        rows = _with_own_workers(rows, leases, wanted.workers)
    given = costs

    def compare(found: Any) -> Any:
        import pandas as pd

        return pd.DataFrame(compared(found, wanted, given), columns=[part.split()[0] for part in SCHEMA.split(", ")])

    group = [*_QUEUE, "type"] if wanted.by_type else _QUEUE
    return rows.groupBy(*group).applyInPandas(compare, struct(SCHEMA))


def _limits(others: "DataFrame") -> "DataFrame":
    """For each queue: receives_max (null: it has no dead-letter queue), and the instant since which its messages are
    taken (null: all are)."""
    from pyspark.sql import functions as F

    is_sent = F.col("kind") == "sent"
    paths = ("settings.redrive.receive_count_max", "change.redrive.receive_count_max", "receives")
    # The settings say it; of a trimmed history, perhaps only its dead letters.
    limit = F.coalesce(
        *(F.get_json_object("detail", f"$.{path}").cast("int") for path in paths),
        F.when(F.col("kind") == "dead_lettered", F.col("attempt").cast("int")),
        F.when(F.get_json_object("detail", "$.settings").isNotNull(), _NO_LIMIT),
        F.when(F.get_json_object("detail", "$.change").rlike(_LIMIT_REMOVED), _NO_LIMIT),
    )
    limits = others.groupBy(*_QUEUE).agg(
        F.count_if(is_sent).alias("sends"),
        F.nullif(F.max_by(limit, F.when(limit.isNotNull(), F.col("offset"))), F.lit(_NO_LIMIT)).alias("receives_max"),
        F.percentile_approx(F.when(is_sent, F.col("at")), [1 - each for each in _SHARES], _ACCURACY).alias("ages"),
    )
    which = F.ceil(F.log2(F.col("sends") / MESSAGES_MAX) * _IN_AN_OCTAVE).cast("int") - 1
    which = F.least(which, F.lit(len(_SHARES) - 1))
    since = F.when(F.col("sends") > MESSAGES_MAX, F.get("ages", which))
    return limits.withColumn("since", since).drop("ages", "sends")


def _with_own_workers(rows: "DataFrame", leases: "DataFrame", workers: int) -> "DataFrame":
    """The rows with `own_workers`: a queue's workers, shared out by the work of its types."""
    from pyspark.sql import functions as F

    busy = leases.groupBy(*_QUEUE, "type").agg(F.sum("held_us").alias("work"))
    whole = busy.groupBy(*_QUEUE).agg(F.sum("work").alias("whole"))
    own = F.greatest(F.lit(1), F.round(F.col("work") / F.nullif("whole", F.lit(0)) * workers))
    share = busy.join(whole, _QUEUE).select(
        *(F.col(name).alias(f"_{name}") for name in (*_QUEUE, "type")), own.alias("own_workers")
    )
    alike = F.col("type").eqNullSafe(F.col("_type"))
    for name in _QUEUE:
        alike = alike & (F.col(name) == F.col(f"_{name}"))
    return rows.join(F.broadcast(share), alike, "left").drop("_type", *(f"_{name}" for name in _QUEUE))


def check_types(leases: "DataFrame", types: Collection[str]) -> None:
    """Raises OptionInvalid if no lease is of one of the types."""
    known = {row.type for row in leases.select("type").distinct().collect()}
    if unknown := sorted(set(types) - known):
        raise OptionInvalid(f"No message has the type {unknown[0]}.", "The report lists the types.")


def compared(rows: Any, wanted: Wanted, given: "Costs | None" = None) -> list[dict[str, Any]]:
    """The rows of one queue, from a pandas frame with `COLUMNS` and `receives_max`."""
    import numpy as np

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.jobs.timeouts import rated
    from veilmq.pipeline.whatif.replay import replay
    from veilmq.pipeline.whatif.runs import RUNS_MAX, Facts

    first = rows.iloc[0]
    names = {name: first[name] for name in _QUEUE}
    names["type"] = first["type"] if wanted.by_type and isinstance(first["type"], str) else None
    costs = given or Costs()
    finished = int(rows[rows.attempt > 0].exact.astype(bool).sum())
    if names["queue"].endswith(FIFO_SUFFIX):  # messages of standard queues have groups, too
        return [names | {"under": "today", "note": "a FIFO queue: its groups are not replayed"}]
    if finished < _MESSAGES_MIN:
        return [names | {"under": "today", "note": f"{finished} finished attempts: {_MESSAGES_MIN} are needed"}]
    facts = Facts(rows, lambda sample: rated(sample, given).crashes_per_second)
    today, tried = _settings(facts, first, wanted)
    most = today.receives_max
    both: list[list[Replayed]] = [[], []]
    for number in range(REPLAYS):
        runs = facts.drawn(number)  # its rounds are large: one draw at a time
        for each, into in zip((today, tried), both, strict=True):
            into.append(replay(facts.arrival, runs, each))
    before, after = (_figures(each, costs) for each in both)
    others = _others(facts, (today, tried), costs)
    note = None
    if (most is None or most > RUNS_MAX) and any(each.dead.any() for each in (*both[0], *both[1])):
        limit = "without a dead-letter queue" if most is None else f"within {most} receives"
        note = f"{limit} some messages are never done: {RUNS_MAX} receives of each were replayed"
    elif facts.beyond > _BEYOND:
        note = f"{100 * facts.beyond:.0f} % may take longer than what was seen: they count as long as that"
    found = [
        names | _row(under, setting, facts, replayed) | {"note": note or _few(replayed, costs)}
        for under, setting, replayed in (("today", today, both[0]), ("what if", tried, both[1]))
    ]
    for row, figures, other in zip(found, (before, after), others, strict=True):
        for name in METRICS:
            row |= _with_interval(name, figures[name], other[name])
    change = others[1]["cost"] - others[0]["cost"]
    found[1] |= _with_interval("cost_change", after["cost"] - before["cost"], change, least=-np.inf)
    return found


def _settings(facts: "Facts", first: Any, wanted: Wanted) -> "tuple[Setting, Setting]":
    """Today's, and those to try. first: a row of the queue."""
    import numpy as np

    from veilmq.pipeline.whatif.replay import Setting

    most = None if first["receives_max"] != first["receives_max"] else int(first["receives_max"])
    with np.errstate(invalid="ignore"):  # a lease of 0 s that was never extended
        extend_s = np.where(np.isfinite(facts.renewed_share), facts.lease_s * facts.renewed_share, np.inf)
    today = Setting(facts.lease_s, extend_s, facts.workers, most)
    timeouts = facts.lease_s if wanted.timeout_s is None else np.full(facts.messages, wanted.timeout_s)
    for kind, seconds in wanted.by_type_s.items():
        timeouts = np.where(facts.types[facts.type_of] == kind, seconds, timeouts)
    extend = timeouts * facts.renewed_share if wanted.extend_s is None else np.full(facts.messages, wanted.extend_s)
    # An extension after the lease's end has no effect.
    extend = np.where(extend < timeouts, extend, np.inf)
    own = first.get("own_workers", np.nan)
    workers = wanted.workers if own != own else int(own)
    return today, Setting(timeouts, extend, facts.workers if workers is None else workers, most)


def _row(under: str, setting: Any, facts: "Facts", replayed: "list[Replayed]") -> dict[str, Any]:
    import numpy as np

    began, busy = float(facts.arrival[0]), []
    for each in replayed:
        span = max(float(each.over.max()) - began, 1e-9)
        busy.append(float(each.busy_s.sum()) / span)
    extend = float(np.median(setting.extend_s))
    return {
        "under": under,
        "timeout_s": float(np.median(setting.timeout_s)),
        "extend_s": extend if np.isfinite(extend) else None,
        "workers": None if setting.workers is None else float(setting.workers),
        "messages": float(facts.messages),
        "busy": float(np.mean(busy)),
        "dead_letters": float(np.mean([each.dead.sum() for each in replayed])),
    }


def _cost(replayed: "Replayed", costs: "Costs") -> Any:
    return (
        costs.recovery * replayed.recovery_s
        + costs.duplicate * replayed.duplicates
        + costs.extend * replayed.extensions
    )


def _few(replayed: "list[Replayed]", costs: "Costs") -> str | None:
    """A note if few messages make half of the cost, on the average of the replays."""
    import numpy as np

    sums = [np.cumsum(np.sort(_cost(each, costs))[::-1]) for each in replayed]
    number = float(np.mean([np.searchsorted(each, each[-1] / 2) + 1 for each in sums]))
    if number >= _FEW or not any(each[-1] for each in sums):
        return None
    return f"the {max(round(number), 2)} dearest messages make half of the cost: another period may have none such"


def _figures(replayed: "list[Replayed]", costs: "Costs") -> dict[str, float]:
    """Each metric of these replays together."""
    import numpy as np

    twice, crashes, recovery, wait = (
        np.concatenate([getattr(each, name) for each in replayed])
        for name in ("duplicates", "crashes", "recovery_s", "wait_s")
    )
    started = wait[np.isfinite(wait)]
    return {
        "duplicates": float(twice.mean()),
        "recovery_s": float(recovery.sum() / crashes.sum()) if crashes.any() else np.nan,
        "wait_s": float(started.mean()) if len(started) else np.nan,
        "wait_p95_s": float(np.quantile(started, 0.95)) if len(started) else np.nan,
        "cost": float(np.mean([_cost(each, costs).mean() for each in replayed])),
    }


def _others(facts: "Facts", settings: "Sequence[Setting]", costs: "Costs") -> list[dict[str, Any]]:
    """For each setting, each metric of other periods like this one: arrays of one shape."""
    import numpy as np

    from veilmq.pipeline.whatif.replay import replay

    affordable = [each for each in OTHERS if each * facts.messages <= _OTHERS_MESSAGES]
    number = max(affordable, default=min(OTHERS))
    found: list[list[dict[str, float]]] = [[] for _ in settings]
    for at in range(number):
        period = facts.another(at, number)
        for each, into in zip(settings, found, strict=True):
            own = each._replace(timeout_s=each.timeout_s[period.messages], extend_s=each.extend_s[period.messages])
            into.append(_figures([replay(period.arrival, period, own)], costs))
    return [{name: np.array([one[name] for one in each]) for name in METRICS} for each in found]


def _with_interval(name: str, value: float, others: Any, least: float = 0.0) -> dict[str, float | None]:
    """The value, and between which of the others' the middle 95 % lie."""
    import numpy as np

    known = np.sort(others[np.isfinite(others)])
    if not np.isfinite(value) or not len(known):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    # One more period is equally likely to fall between any two.
    place = max((len(known) + 1) // _OUTSIDE, 1)
    return {
        name: float(value),
        f"{name}_low": max(least, min(float(known[place - 1]), value)),
        f"{name}_high": max(float(known[-place]), value),
    }
