"""A run of events that are alike is one line of a trace; nothing else is folded."""

from typing import Any

from veilmq.cli.remote.tables import runs
from veilmq.testing.for_each import for_each


def events(*kinds: str, **more: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, "at": 1_000 * place, "attempt": 1, **more} for place, kind in enumerate(kinds)]


@for_each(
    ("kinds", "expected"),
    [
        (["sent", *["extended"] * 80, "deleted"], [(1, 1), (1, 80), (1, 1)]),
        (["extended", "content_updated"] * 80, [(2, 80)]),
        (["extended", "extended", "deleted"], [(1, 1), (1, 1), (1, 1)]),
        (["extended", "content_updated"] * 3 + ["extended"] * 4, [(2, 3), (1, 4)]),
        (["a", "b", "c", "d"] * 3, [(1, 1)] * 12),
        ([], []),
    ],
)
def test_what_repeats_is_one_run(kinds: list[str], expected: list[tuple[int, int]]) -> None:
    given = events(*kinds)
    found = runs(given)
    assert [(run.length, run.times) for run in found] == expected
    assert [event for run in found for event in run.events] == given


def test_a_run_tells_its_span_and_ends_where_something_differs() -> None:
    given = events(*["extended"] * 8)
    (run,) = runs(given)
    assert run.span_us == 7_000
    for event in given[4:]:
        event["attempt"] = 2
    assert [each.times for each in runs(given)] == [4, 4]
    given[0]["detail"] = {"reason": "stale"}
    assert [each.times for each in runs(given)] == [1, 3, 4]
