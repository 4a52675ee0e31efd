"""How the Javas of the tests start: at half the CPU, where `make setup-clients` wrote an archive of Spark's classes."""

import os
from pathlib import Path
from typing import Final

_ARCHIVE: Final = Path(__file__).parents[2] / ".tools/spark/classes.jsa"
# Java writes to its standard output that an archive does not fit, and goes on without it.
_ARCHIVED: Final = f" -XX:SharedArchiveFile={_ARCHIVE} -Xlog:disable" if _ARCHIVE.exists() else ""
QUICK: Final = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC{_ARCHIVED}"
"""A short life is not worth the second compiler, nor a collector with threads of its own."""
SUBMIT: Final = {"SPARK_SUBMIT_OPTS": QUICK}
"""In the environment, for Spark, which puts these before all other options."""


def without_spark() -> dict[str, str]:
    """The environment without this process's Spark, which the session of other tests put into it."""
    ours = ("VEILMQ", "SPARK", "PYSPARK")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | SUBMIT
