"""A Spark session for one command.

Strategy: users see the command's own messages; Spark's duplicate log lines and the traces after Ctrl-C are suppressed.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPEATING: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers of PySpark that print an exception when it is raised; our code reports it when it is caught."""
_BROKEN_OFF: Final = ("KeyboardInterrupt while ", "Exception occurred while shutting down connection")
"""How py4j's log messages about a call interrupted by Ctrl-C begin."""
_GATEWAY: Final = ("root", "py4j.clientserver")
"""The loggers that py4j uses for them."""


@contextmanager
def started(master: str | None, remote: str | None) -> Iterator["SparkSession"]:
    """See `veilmq.pipeline.session.session`; the session is stopped at the end."""
    from veilmq.pipeline.session import session

    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:  # nothing needs an orderly end yet, and an interrupt during Spark's start may leave Java hanging
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        spark = session(master, remote, settings={"spark.log.level": "ERROR"})
    finally:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    # PySpark's handler calls Java from inside the interrupted call, which fails with traces. Use Python's handler, not
    # the previous one: it handles the signal even if a shell ignored it for a background job.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Imported here: only now is it known that a suitable pyspark is installed.
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.logger import PySparkLogger

    for name in _REPEATING:
        PySparkLogger.getLogger(name).disabled = True
    for name in _GATEWAY:
        logging.getLogger(name).addFilter(_is_no_interruption)
    try:
        yield spark
    except KeyboardInterrupt:
        # The interrupted call may have broken the gateway; everything ends anyway.
        with suppress(Py4JError):
            hush(spark)
            for query in spark.streams.active:
                query.stop()
        raise
    finally:
        spark.stop()


def hush(spark: "SparkSession") -> None:
    """Silence Java before interrupting work: it would log a trace for each layer."""
    from pyspark.sql.utils import is_remote

    if not is_remote():
        spark.sparkContext.setLogLevel("OFF")


def _is_no_interruption(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_BROKEN_OFF)
