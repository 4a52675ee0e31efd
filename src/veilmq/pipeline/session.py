"""Starts a Spark session for our sources: finds Java, checks packages, gives executors the driver's Python.

Strategy: `--master` and `--remote` choose where it runs; everything else is the same. Arguments come first, then the
settings of `spark-submit` or SPARK_REMOTE. A session takes ten seconds to start, so create one and keep it.
"""

import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from veilmq.client.own_directory import own_path
from veilmq.pipeline import java, register
from veilmq.pipeline.errors import OptionInvalid, Unready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER_DEFAULT: Final = "local[*]"
CONFIGURATION: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""Settings of a local session unless `settings` overrides them. Sources listen nowhere; Spark's driver on loopback."""

_CONNECT_PORT: Final = 15_002
_CONNECT_SECONDS: Final = 10.0


def session(
    master: str | None = None,
    remote: str | None = None,
    *,
    name: str = "veilmq",
    settings: Mapping[str, str] | None = None,
) -> "SparkSession":
    """A session with the data sources registered, on `master` (a Spark master URL) or over `remote` (`sc://...`).

    Without both, it runs where `spark-submit` runs this script, or on the Spark Connect server in SPARK_REMOTE, or
    locally. Raises OptionInvalid for both; Unready if Java or a package is missing or does not fit, or if the remote
    server cannot be reached.
    """
    if master and remote:
        raise OptionInvalid("master and remote exclude each other.", "Where shall Spark run?")
    check_packages()
    is_submitted = java.is_submitted()
    if master is None and not is_submitted:
        remote = remote or java.remote_named()
    if remote:
        spark = _connected(remote, dict(settings or {}))
    else:
        spark = _started(master, name, dict(settings or {}), is_submitted=is_submitted)
        spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def _started(master: str | None, name: str, settings: dict[str, str], *, is_submitted: bool) -> "SparkSession":
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.conf import SparkConf
    from pyspark.core.context import SparkContext
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    given: set[str] = set()
    if is_submitted:
        # The JVM of `spark-submit` runs already, with all its settings; SparkConf reads them once it is connected.
        SparkContext._ensure_initialized()
        given = {key for key, _ in SparkConf().getAll()}
    else:
        java.use(java.find_java(own_path("veilmq-java")), sys.executable)
    if master is not None or "spark.master" not in given:
        builder = builder.master(master or MASTER_DEFAULT)
    if "spark.app.name" not in given:
        builder = builder.appName(name)
    is_local = not is_submitted and (master or MASTER_DEFAULT).startswith("local")
    wanted = CONFIGURATION if is_local else _for_cluster()
    for key, value in ({key: wanted[key] for key in wanted.keys() - given} | settings).items():
        builder = builder.config(key, value)
    try:
        spark: SparkSession = builder.getOrCreate()
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).strip().splitlines()[0].rstrip(".")
        raise Unready(f"Spark does not start: {reason}.", "Is it what --master should name, and is it there?") from None
    return spark


def _connected(remote: str, settings: dict[str, str]) -> "SparkSession":
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    _reach(remote)
    builder: Any = SparkSession.builder.remote(remote)
    # The server's own settings are fixed; a session can set only those of SQL.
    for key, value in (_for_cluster() | settings).items():
        if key.startswith("spark.sql."):
            builder = builder.config(key, value)
    try:
        spark: SparkSession = builder.getOrCreate()
    except PySparkException as error:
        raise _unusable(remote, str(error).strip().splitlines()[0]) from None
    return spark


def _reach(remote: str) -> None:
    """Check that the server is there. Otherwise Spark's client retries for ten minutes, and no other session can
    start."""
    if remote.startswith("local"):
        return
    if not remote.startswith("sc://"):
        raise _unusable(remote, "that is no URL of one")
    try:
        place = urlsplit(remote)
        socket.create_connection((place.hostname or "", place.port or _CONNECT_PORT), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise _unusable(remote, str(error)) from None


def _unusable(remote: str, reason: str) -> Unready:
    return Unready(
        f"The Spark Connect server {remote} cannot be used: {reason.rstrip('.')}.",
        "It looks like sc://HOST:15002. Does it run there?",
    )


def _for_cluster() -> dict[str, str]:
    """A cluster knows its own addresses."""
    return {key: value for key, value in CONFIGURATION.items() if not key.startswith("spark.driver.")}


def check_packages() -> None:
    """Raises Unready, with the remedy, for a package that is missing or of a version that does not work."""
    mend = "Install what the pipeline needs: pip install 'veilmq[pipeline]'."
    try:
        import pandas
        import pyarrow
        import pyspark
    except ImportError as error:
        raise Unready(f"The package {error.name} is missing.", mend) from None
    if _major(pandas.__version__) >= 3:
        raise Unready(f"pandas {pandas.__version__} does not work with pyspark {pyspark.__version__}.", mend)
    if _major(pyspark.__version__) < 4:
        raise Unready(f"pyspark {pyspark.__version__} has no Python data sources.", mend)
    if _major(pyarrow.__version__) < 18:
        raise Unready(f"pyarrow {pyarrow.__version__} is too old.", mend)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
