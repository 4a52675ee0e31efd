"""`whatif`: what other timeouts, queues by type or another number of workers would have done to a history's messages.

Strategy: one task a queue (with `by_type`, a queue and type, as if each type had a queue of its own). It takes what the
history gives (runs.py), replays it under today's settings and under others (replay.py), and compares. Each of
`REPLAYS` replays draws anew what the history does not say; both settings meet the same draws, so their difference is
surer than either.

The intervals say what another such period would show: 95 of 100. They come from whole stretches of time, drawn with
replacement: messages of one burst wait for each other, so single messages drawn would look like more than they are.
A stretch is a fiftieth of the history, or as long as ten leases, but never longer than a tenth of it.

Source: Kunsch 1989 (block bootstrap); docs/pipeline.md, "What if?" says what is assumed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.estimates.buckets import struct

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.whatif.replay import Replayed
    from veilmq.pipeline.whatif.runs import Facts

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
REPLAYS: Final = 8
_SAMPLES: Final = 400
_STRETCHES_MIN: Final = 10
_STRETCHES_MAX: Final = 50
_LEASES: Final = 10
_MESSAGES_MIN: Final = 30
_BEYOND: Final = 0.01


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
    the average; dead_letters: messages. cost_change: of `what if`, against today. workers: null if no limit was seen.
    """
    from pyspark.sql import functions as F

    group = ["account", "region", "queue", *(["type"] if wanted.by_type else [])]
    queue = ["account", "region", "queue"]
    is_sent = F.col("kind") == "sent"
    paths = ("settings.redrive.receive_count_max", "change.redrive.receive_count_max", "receives")
    # The settings say it; of a trimmed history, perhaps only its dead letters.
    told = F.coalesce(
        *(F.get_json_object("detail", f"$.{path}").cast("int") for path in paths),
        F.when(F.col("kind") == "dead_lettered", F.col("attempt").cast("int")),
    )
    limits = others.groupBy(*queue).agg(
        F.count_if(is_sent).alias("sends"),
        F.max_by(told, F.when(told.isNotNull(), F.col("offset"))).alias("receives_max"),
        F.max(is_sent & F.col("group").isNotNull()).alias("is_fifo"),
        F.percentile_approx(F.when(is_sent, F.col("at")), [at / 100 for at in range(101)]).alias("ages"),
    )
    newest = F.greatest(F.lit(0), F.floor(100 - F.lit(100.0 * MESSAGES_MAX) / F.col("sends"))).cast("int")
    limits = limits.withColumn("since", F.when(F.col("sends") > MESSAGES_MAX, F.get("ages", newest))).drop("ages")
    types = {field.name: field.dataType for field in leases.schema.fields}
    never = others.where(is_sent).select(
        *(
            F.col(name) if name in _OF_SENDS else F.lit(0 if name == "attempt" else None).cast(types[name]).alias(name)
            for name in COLUMNS
        )
    )
    rows = leases.select(*COLUMNS).unionByName(never)
    rows = rows.join(F.broadcast(limits), queue, "left")
    rows = rows.where(F.col("since").isNull() | (F.coalesce("sent", "granted") >= F.col("since"))).drop(
        "since", "sends"
    )
    if wanted.by_type and wanted.workers is not None:
        busy = leases.groupBy(*group).agg(F.sum("held_us").alias("work"))
        whole = busy.groupBy(*queue).agg(F.sum("work").alias("whole"))
        share = busy.join(whole, queue).select(
            *queue, F.col("type").alias("_type"),
            F.greatest(F.lit(1), F.round(F.col("work") / F.col("whole") * wanted.workers)).alias("own_workers"),
        )  # fmt: skip
        alike = F.col("type").eqNullSafe(F.col("_type"))
        for name in queue:
            share = share.withColumnRenamed(name, f"_{name}")
            alike = alike & (F.col(name) == F.col(f"_{name}"))
        rows = rows.join(F.broadcast(share), alike, "left").drop("_type", *(f"_{name}" for name in queue))
    given = costs

    def compare(found: Any) -> Any:
        import pandas as pd

        return pd.DataFrame(compared(found, wanted, given), columns=[part.split()[0] for part in SCHEMA.split(", ")])

    return rows.groupBy(*group).applyInPandas(compare, struct(SCHEMA))


def compared(rows: Any, wanted: Wanted, given: "Costs | None") -> list[dict[str, Any]]:
    """The rows of one queue, from a pandas frame with `COLUMNS`, `receives_max`, `is_fifo`."""
    import numpy as np

    from veilmq.estimate.schedule import Costs
    from veilmq.pipeline.jobs.timeouts import rated
    from veilmq.pipeline.whatif.replay import Setting, replay
    from veilmq.pipeline.whatif.runs import RUNS_MAX, Facts

    first = rows.iloc[0]
    names = {name: first[name] for name in ("account", "region", "queue")}
    names["type"] = first["type"] if wanted.by_type and isinstance(first["type"], str) else None
    costs = given or Costs()
    finished = int(rows[rows.attempt > 0].exact.astype(bool).sum())
    if bool(first["is_fifo"]):
        return [names | {"under": "today", "note": "a FIFO queue: its groups are not replayed"}]
    if finished < _MESSAGES_MIN:
        return [names | {"under": "today", "note": f"{finished} finished attempts: {_MESSAGES_MIN} are needed"}]
    facts = Facts(rows, lambda sample: rated(sample, given).crashes_per_second)
    most = None if first["receives_max"] != first["receives_max"] else int(first["receives_max"])
    today = Setting(facts.lease_s, facts.lease_s * facts.renewed_share, facts.workers, most)
    timeouts = facts.lease_s if wanted.timeout_s is None else np.full(facts.messages, wanted.timeout_s)
    for kind, seconds in wanted.by_type_s.items():
        timeouts = np.where(facts.types[facts.type_of] == kind, seconds, timeouts)
    extend = timeouts * facts.renewed_share if wanted.extend_s is None else np.full(facts.messages, wanted.extend_s)
    own = first.get("own_workers", np.nan)
    workers = wanted.workers if own != own else int(own)
    tried = Setting(timeouts, extend, facts.workers if workers is None else workers, most)
    drawn = [facts.drawn(number) for number in range(REPLAYS)]
    both = [[replay(facts.arrival, runs, each) for runs in drawn] for each in (today, tried)]
    stretch = _stretches(facts, tried)
    before, after = (_sampled(each, stretch, costs) for each in both)
    note = None
    if most is None and any(each.dead.any() for each in (*both[0], *both[1])):
        note = f"without a dead-letter queue some messages are never done: {RUNS_MAX} receives of each were replayed"
    elif facts.beyond > _BEYOND:
        note = f"{100 * facts.beyond:.0f} % may take longer than what was seen: they count as long as that"
    found = [
        names | _row(under, setting, facts, replayed, figures) | {"note": note}
        for under, setting, replayed, figures in (
            ("today", today, both[0], before), ("what if", tried, both[1], after),
        )
    ]  # fmt: skip
    change = {name: after[name] - before[name] for name in METRICS}
    found[1] |= _with_interval("cost_change", change["cost"])
    return found


def _row(
    under: str, setting: Any, facts: "Facts", replayed: "list[Replayed]", figures: Mapping[str, Any]
) -> dict[str, Any]:
    import numpy as np

    span = max(float(facts.arrival[-1] - facts.arrival[0]), 1e-9)
    extend = float(np.median(setting.extend_s))
    row = {
        "under": under,
        "timeout_s": float(np.median(setting.timeout_s)),
        "extend_s": extend if np.isfinite(extend) else None,
        "workers": None if setting.workers is None else float(setting.workers),
        "messages": float(facts.messages),
        "busy": float(np.mean([each.busy_s.sum() for each in replayed])) / span,
        "dead_letters": float(np.mean([each.dead.sum() for each in replayed])),
    }
    for name in METRICS:
        row |= _with_interval(name, figures[name])
    return row


def _with_interval(name: str, values: Any) -> dict[str, float | None]:
    """The value, which is the first, and the interval in which another period of this length would have it.

    The others vary as this period does; another one varies, too, so their distance is widened by the root of 2.
    """
    import numpy as np

    known = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or not len(known):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = values[0] + np.sqrt(2) * (np.quantile(known, [0.025, 0.975]) - values[0])
    return {
        name: float(values[0]),
        f"{name}_low": max(0.0, min(float(low), values[0])),
        f"{name}_high": max(float(high), values[0]),
    }


def _stretches(facts: "Facts", setting: Any) -> Any:
    """The number of each message's stretch of time."""
    import numpy as np

    span = max(float(facts.arrival[-1] - facts.arrival[0]), 1e-9)
    longest = _LEASES * float(np.median(np.maximum(setting.timeout_s, facts.lease_s)))
    count = int(np.clip(span / max(longest, 1e-9), _STRETCHES_MIN, _STRETCHES_MAX))
    return np.minimum(((facts.arrival - facts.arrival[0]) / span * count).astype(int), count - 1)


def _sampled(replayed: "list[Replayed]", stretch: Any, costs: "Costs") -> dict[str, Any]:
    """Each metric: first of all replays together, then of `_SAMPLES` samples of stretches, each of one replay."""
    import numpy as np

    from veilmq.pipeline.estimates.buckets import LAST, bucket_of

    count = int(stretch.max()) + 1
    sums, waits = [], []
    for each in replayed:
        cost = costs.recovery * each.recovery_s + costs.duplicate * each.duplicates + costs.extend * each.extensions
        started = np.isfinite(each.wait_s)
        columns = (np.ones(len(stretch)), each.duplicates, each.crashes, each.recovery_s, cost, started,
                   np.where(started, each.wait_s, 0.0))  # fmt: skip
        sums.append([np.bincount(stretch, column, count) for column in columns])
        place = stretch[started] * (LAST + 1) + bucket_of(np.maximum(each.wait_s[started], 1e-9))
        waits.append(np.bincount(place, minlength=count * (LAST + 1)).reshape(count, LAST + 1))
    totals, histograms = np.array(sums, float), np.array(waits, float)
    random = np.random.default_rng(36)
    # The same stretches of the same replays for every setting.
    weights = random.multinomial(count, np.full(count, 1 / count), _SAMPLES).astype(float)
    of = np.arange(_SAMPLES) % len(replayed)
    several = np.einsum("smc,sc->sm", totals[of], weights)
    shapes = np.array([weights[at] @ histograms[of[at]] for at in range(_SAMPLES)])
    whole = totals.sum(axis=(0, 2))[None, :]
    number, twice, crashes, recovery, cost, started, waited = np.concatenate([whole, several]).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "duplicates": twice / number,
            "recovery_s": recovery / crashes,
            "wait_s": waited / started,
            "wait_p95_s": _reached(np.concatenate([histograms.sum(axis=(0, 1))[None, :], shapes]), 0.95),
            "cost": cost / number,
        }


def _reached(histograms: Any, share: float) -> Any:
    """Seconds within which that share is, for each histogram; the shortest bucket counts as no time."""
    import numpy as np

    from veilmq.pipeline.estimates.buckets import MIDDLES

    sums = np.cumsum(histograms, axis=1)
    place = np.argmax(sums >= share * sums[:, -1:], axis=1)
    return np.where(sums[:, -1] > 0, np.where(place > 0, MIDDLES[place], 0.0), np.nan)
