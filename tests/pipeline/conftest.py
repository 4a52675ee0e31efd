"""One Spark session and one server for all tests of a run: a session takes ten seconds to start.

Tests that use the session stay on one worker (tests/house/test_one_worker.py). Those that start Spark in processes of
their own are a second group, `spark-processes`: as one group they kept one worker busy for nearly a whole `make test`.
"""

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.drain_stage import Stage
from tests.pipeline.stores import Store, azurite, moto, told
from tests.support.commands import Run, in_process

from veilmq.pipeline.session import session
from veilmq.testing.local import ServerProcess

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kills", action="store_true", help="Kill drains at every step.")


@pytest.fixture
def all_kills(request: pytest.FixtureRequest) -> bool:
    """Whether the long form was asked for."""
    return bool(request.config.getoption("--all-kills", False))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`home` is each of the module's KEPT_AT, `scheme` of its SCHEMES, and with `--all-kills` of all."""
    is_long = metafunc.config.getoption("--all-kills", False)
    if "scheme" in metafunc.fixturenames and hasattr(metafunc.module, "SCHEMES"):
        metafunc.parametrize("scheme", ("veil", "sqs", "azure", "mns") if is_long else metafunc.module.SCHEMES)
    if "home" in metafunc.fixturenames:
        metafunc.parametrize("home", ("disk", "s3", "abfs") if is_long else metafunc.module.KEPT_AT, indirect=True)


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where tables and what belongs to them are kept: on the disk, or in a store that the environment names."""
    if request.param == "disk":
        yield str(tmp_path)
        return
    store: Store = request.getfixturevalue(request.param)
    with told(store.environment):
        yield f"{store.url}/{secrets.token_hex(8)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, s3: Store) -> Iterator[Any]:
    """A session on two threads, with our sources. Its processes know the S3 store: they keep the environment of its
    start."""
    settings = {
        "spark.sql.shuffle.partitions": "2",
        # For tables of some rows it only plans everything anew; the commands' own tests have it.
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
    }
    with told(s3.environment):
        started = session("local[2]", settings=settings)
    _keep_formats()
    try:
        yield started
    finally:
        started.stop()


def _keep_formats() -> None:
    """pytest adds its handler to every logger that does not propagate. PySpark's loggers turn a handler that is added
    to them to JSON, and with it the log lines of every later test."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.addHandler = logging.Logger.addHandler  # type: ignore[assignment, method-assign]


@pytest.fixture
def spark_at_azure(spark: Any, abfs: Store) -> Iterator[Any]:
    """The session, whose Python processes know Azurite, too: those of its start have another environment."""
    from veilmq.pipeline.drain.source import QueueSource
    from veilmq.pipeline.events.source import EventsSource
    from veilmq.pipeline.sinks.delta import DeltaSink

    environment = spark.sparkContext.environment
    before = dict(environment)
    sources = (EventsSource, QueueSource, DeltaSink)
    environment.update(abfs.environment)
    for each in sources:
        spark.dataSource.register(each)
    yield spark
    environment.clear()
    environment.update(before)
    for each in sources:
        spark.dataSource.register(each)


@pytest.fixture(scope="session")
def drain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on free ports."""
    process = ServerProcess(tmp_path_factory.mktemp("server")).start()
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture
def stage(drain_server: ServerProcess, tmp_path: Path) -> Stage:
    """A queue's name and a directory, for one test."""
    return Stage(drain_server, tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command that ends before Spark starts, in this process and an empty directory; there is no Java for it."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    return in_process(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    """A bucket of an S3 store that fails when it is told to; the environment names it while a test uses it."""
    with moto() as store:
        yield store


@pytest.fixture(scope="session")
def abfs() -> Iterator[Store]:
    """A container of Azurite's."""
    with azurite() as store:
        yield store


@pytest.fixture(params=["s3", pytest.param("abfs", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Each of them, known by the environment."""
    found: Store = request.getfixturevalue(request.param)
    with told(found.environment):
        yield found
