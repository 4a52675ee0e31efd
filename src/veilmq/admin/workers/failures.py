"""Why messages of a queue failed, from the minutes of its rollups.

Strategy: minutes are read as for a chart: those that are not stored from memory on the loop, the others after that, and
one that is in both counts once. Causes are added up over the minutes. What no cause has, because a minute had too many
or the answer is full, is counted by kind as `other`.
"""

from typing import Annotated, Any, Final

from msgspec import Meta

from veilmq.admin.api.inputs import PAGE_MAX, STEPS, SpanInput
from veilmq.admin.api.views import shown_key
from veilmq.admin.history.rollups import LivePart
from veilmq.model.instant import MINUTE_US
from veilmq.model.messages.message import id_text
from veilmq.store import Reader
from veilmq.store.rollups import COUNTS, DEAD_LETTERED, FAILED, LEASE_EXPIRED
from veilmq.store.rollups.causes import Cause, Seen

KINDS: Final = (FAILED, LEASE_EXPIRED, DEAD_LETTERED)


class FailuresInput(SpanInput, kw_only=True):
    """Causes of failures in a span, by default the last `minutes`."""

    minutes: Annotated[int, Meta(ge=1, le=STEPS["minute"][2])] = STEPS["minute"][1]
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 50


def failure_page(reader: Reader, live: LivePart, wanted: FailuresInput, *, lines: bool) -> dict[str, Any]:
    """The causes with the most failures: {account, region, name, incarnation, from, to, causes, other, lines}. Blocks.
    Raises ParameterInvalid. lines: whether the caller may see what errors said."""
    span = wanted.numbers(live.now, "minute", wanted.minutes, "minutes")
    with reader.look() as view:
        minutes = view.rollups(live.queue.incarnation, False, span.start, span.stop - 1).found
    minutes |= {number: each for number, each in live.minutes.items() if number in span and number not in minutes}
    causes: dict[Cause, Seen] = {}
    left = dict.fromkeys(KINDS, 0)
    for _, rollup in sorted(minutes.items()):
        for kind in KINDS:
            left[kind] += rollup.numbers.get(kind, 0)
        for seen in rollup.causes.found.values():
            cause = seen.cause(with_line=lines)
            if cause in causes:
                causes[cause].add(seen)
            else:
                causes[cause] = seen
    shown = sorted(causes.values(), key=lambda each: (-each.count, -each.newest))[: wanted.limit]
    for each in shown:
        left[each.kind] -= each.count
    return shown_key(live.queue.key) | {
        "incarnation": live.queue.incarnation,
        "from": span.start * MINUTE_US,
        "to": span.stop * MINUTE_US,
        "causes": [_shown(each, lines) for each in shown],
        "other": {COUNTS[kind]: count for kind, count in left.items()},
        "lines": lines,
    }


def _shown(seen: Seen, lines: bool) -> dict[str, Any]:
    return {
        "kind": COUNTS[seen.kind],
        "error_type": seen.error_type,
        "error": seen.error if lines else None,
        "count": seen.count,
        "first": seen.first,
        "newest": seen.newest,
        "message": id_text(seen.message),
    }
