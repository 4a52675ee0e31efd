"""What holds for every test: Hypothesis without deadlines, room for tests that must be alone, a disk that can fail.

Strategy for `alone`: the workers of one run share two file locks. Every test holds the *floor* lock, shared; a test
marked `alone` holds it exclusively, so that it waits for the others' running tests and they wait for it. The *door*
lock is passed on the way in, and an `alone` test keeps it until it has the floor: otherwise workers that go from test
to test could hold the floor among them for ever.
"""

import contextlib
import fcntl
import gc
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from tests.support.faults import FaultDisk
from tests.support.java import SUBMIT

from veilmq.store.sqlite.disk import schema

# The machine may be busy with the other worker: how long an example takes, or is drawn, says nothing.
settings.register_profile("veilmq", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("veilmq")

# By name: the packages themselves are imported already.
_SUPPORT = ("acknowledged", "conservation", "contract", "crashing", "histories")
pytest.register_assert_rewrite(*(f"tests.support.{name}" for name in _SUPPORT))
pytest.register_assert_rewrite("veilmq.testing.client_contract", "veilmq.testing.replaying")

_LOCKS = pytest.StashKey[str]()
_DISKS = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(SUBMIT)
    if hasattr(config, "workerinput"):
        return
    directory = tempfile.TemporaryDirectory(prefix="veilmq-tests-")
    config.stash[_LOCKS] = directory.name
    config.add_cleanup(directory.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each worker of pytest-xdist where the locks of this run are."""
    node.workerinput["veilmq_locks"] = node.config.stash[_LOCKS]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: the garbage collector need not look at it, now or when a test calls it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several workers: the largest groups first, then files with slow tests, then the others, mixed, so that not
    all workers wait for the same kind of thing; at the end the tests that are alone, because for each of them the
    others wait until the longest one that runs is over."""
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        if item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.xdist_group("alone"))
    sizes = Counter(mark.args for item in items for mark in item.iter_markers("xdist_group"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        mark = item.get_closest_marker("xdist_group")
        alone = item.get_closest_marker("alone") is not None
        if mark is not None:
            return alone, 0, -sizes[mark.args]
        return alone, 1 if item.path in slow else 2, crc32(item.nodeid.partition("::")[0].encode())

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's: what its tests share is made once."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group: str = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

    return ByFile(config, log)


@contextlib.contextmanager
def _held(path: Path, operation: int) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, operation)
        yield
    finally:
        os.close(file)


# Outermost of the wrappers, so that pytest-timeout's clock starts after the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    directory = getattr(item.config, "workerinput", {}).get("veilmq_locks")
    if directory is None:  # a single process: every test is alone
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with contextlib.ExitStack() as floor:
        with _held(Path(directory, "door"), fcntl.LOCK_EX):
            floor.enter_context(_held(Path(directory, "floor"), fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


@pytest.fixture
def next_schema(monkeypatch: pytest.MonkeyPatch) -> int:
    """A release with one more migration, which works with no older tables: the number of its schema."""
    version = schema.VERSION + 1
    monkeypatch.setattr(
        schema, "MIGRATIONS", (*schema.MIGRATIONS, "CREATE TABLE extra (id INTEGER PRIMARY KEY) STRICT;")
    )
    monkeypatch.setattr(schema, "VERSION", version)
    monkeypatch.setattr(schema, "OLDEST_SERVED", version)
    return version


@pytest.fixture
def disk() -> Iterator[FaultDisk]:
    """Open stores on it with `Options(disk=disk)`."""
    made = FaultDisk(f"fault-{next(_DISKS)}")
    yield made
    made.unregister()
