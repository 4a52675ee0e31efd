"""Log lines: one a record, readable or JSON, whatever a client put into them."""

import asyncio
import io
import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.support.contract.stage import TESTER, sending
from tests.support.sqlite import SqliteFactory

from veilmq.engine.engine import Engine
from veilmq.model.commands import CreateQueue
from veilmq.model.settings.queue import QueueKey
from veilmq.server import logs
from veilmq.server.clock import LeaseClock
from veilmq.server.logs import LINES_MAX, Flood, set_up
from veilmq.server.shell import Shell

JOBS = QueueKey("000000000000", "us-east-1", "jobs")


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(form: Literal["human", "json"], level: str = "info") -> list[str]:
    stream = io.StringIO()
    set_up(form, level, stream)
    log = logging.getLogger("veilmq.test")
    log.debug("quiet")
    log.info("refused %s", "a\nb\r\x1b[31m\u2028c", extra={"request": "r-1"})
    try:
        raise ValueError("two\nlines, \x1b[31m red\u2028 and\x0b white")
    except ValueError:
        log.exception("failed")
    return stream.getvalue().split("\n")


def test_human_lines() -> None:
    first, second, *traceback, last = logged("human")
    assert first.endswith("Z INFO    veilmq.test: refused a\\x0ab\\x0d\\x1b[31m\\x2028c (request r-1)")
    assert second.endswith("ERROR   veilmq.test: failed")
    assert traceback
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)
    assert traceback[-1] == "    lines, \\x1b[31m red\\x2028 and\\x0b white"
    assert last == ""


def test_json_lines() -> None:
    first, second, last = logged("json")
    read = json.loads(first)
    assert read.pop("at").endswith("Z")
    assert read == {
        "level": "info",
        "logger": "veilmq.test",
        "message": "refused a\nb\r\x1b[31m\u2028c",
        "request": "r-1",
    }
    assert "ValueError: two" in json.loads(second)["traceback"]
    assert last == ""


def test_the_level_is_kept() -> None:
    assert "quiet" in logged("human", "debug")[0]
    assert len(logged("json", "error")) == 2


def test_lines_of_one_kind_do_not_fill_the_log() -> None:
    set_up("human", "info", io.StringIO())
    flood = Flood()
    records = [
        logging.LogRecord("veilmq.push", logging.WARNING, "", 0, "%s is unavailable", (f"host-{number}",), None)
        for number in range(3 * LINES_MAX)
    ]
    other = logging.LogRecord("veilmq.push", logging.WARNING, "", 0, "%s answers again", ("host-1",), None)
    for place, record in enumerate([*records, other]):
        record.created = 7.0 + place / 1_000
    assert [flood.filter(record) for record in records].count(True) == LINES_MAX
    assert flood.filter(other)
    assert other.getMessage() == "host-1 answers again"
    late = logging.LogRecord("veilmq.push", logging.WARNING, "", 0, "%s is unavailable", ("host-1",), None)
    late.created = 8.5
    assert flood.filter(late)
    assert late.getMessage() == f"host-1 is unavailable (left out {2 * LINES_MAX} lines like this one)"
    (handler,) = logging.getLogger().handlers
    assert [type(each) for each in handler.filters] == [Flood]


def test_the_kinds_of_lines_that_are_counted_are_bounded() -> None:
    """A library that formats its texts itself has a kind for each line: they come, and take no memory."""
    flood = Flood()
    for number in range(3 * logs._KINDS_MAX):
        assert flood.filter(logging.LogRecord("other", logging.WARNING, "", 0, f"text {number}", (), None))
        assert len(flood._kinds) <= logs._KINDS_MAX + 1


async def commit_for_300_ms(path: Path) -> None:
    store = SqliteFactory(path).open()
    readings = itertools.count(step=0.3)
    shell = Shell(Engine(), store, LeaseClock(), stopwatch=lambda: next(readings))
    shell.start()
    await shell.call(CreateQueue(queue=JOBS, origin=TESTER))
    await shell.call(sending(JOBS))
    await shell.stop(5)
    store.close()


def test_a_slow_commit_says_how_much_waited_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(commit_for_300_ms(tmp_path / "data"))
    assert re.search(r"^slow commit: \d+ ms for 1 command$", "\n".join(caplog.messages), re.M)
