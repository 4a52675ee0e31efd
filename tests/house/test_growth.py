"""Everything that can grow has its bound on the page for operators, and caches have one in the code."""

import re
from collections.abc import Callable
from pathlib import Path

from veilmq.protocols import Bounded, Response, remembered
from veilmq.server.auth import DevelopmentKeyring, Hosts
from veilmq.server.http import Answers
from veilmq.store.sqlite.disk.schema import MIGRATIONS
from veilmq.testing.for_each import for_each

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
ENTRIES_MAX = 4_096


def test_every_table_of_the_store_is_on_the_page() -> None:
    section = OPERATIONS.read_text().partition("\n## What can grow")[2].partition("\n## ")[0]
    tables = [name for script in MIGRATIONS for name in re.findall(r"CREATE TABLE (\w+)", script)]
    assert len(tables) > 20
    assert [name for name in tables if f"`{name}`" not in section] == []


Cache = tuple[Callable[[int], object], Callable[[], int]]
"""Use it with the key of a number; how many entries it has."""


def caches() -> dict[str, Cache]:
    bounded: Bounded[int, int] = Bounded(100)
    hosts, answers, keys = Hosts([]), Answers(), DevelopmentKeyring()
    return {
        "bounded": (lambda n: bounded.keep(n, n), lambda: len(bounded)),
        "hosts": (lambda n: hosts.takes(b"h%d.localhost" % n, {}), lambda: len(hosts._known)),
        "answers": (lambda n: answers.write(Response(200, b"text/%d" % n, b""), 0), lambda: len(answers._prefixes)),
        "keys of development mode": (lambda n: keys.find(f"key{n}"), lambda: len(keys._keys)),
    }


@for_each("name", caches())
def test_a_cache_holds_no_more_than_its_bound(name: str) -> None:
    use, size = caches()[name]
    for number in range(2 * ENTRIES_MAX):
        use(number)
    assert 0 < size() <= ENTRIES_MAX


def test_a_long_text_is_read_and_not_remembered() -> None:
    read: list[str] = []

    @remembered(5)
    def length(text: str) -> int:
        read.append(text)
        return len(text)

    assert [length("short"), length("short"), length("too long")] == [5, 5, None]
    assert read == ["short"]
