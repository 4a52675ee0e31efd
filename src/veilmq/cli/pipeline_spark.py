"""A Spark session for one command.

Strategy: a person sees the command's own words, and neither Spark's log of what is told anyhow nor the traces of what
Ctrl-C broke off.
"""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPEATING: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers of PySpark that print an exception as it is raised: whoever catches it tells it, in words of ours."""
_BROKEN_OFF: Final = ("KeyboardInterrupt while ", "Exception occurred while shutting down connection")
"""So begins what py4j logs, with its trace, of a call that Ctrl-C broke off."""
_GATEWAY: Final = ("root", "py4j.clientserver")
"""The loggers that it uses for that."""


@contextmanager
def started(master: str | None, remote: str | None) -> Iterator["SparkSession"]:
    """See `veilmq.pipeline.session.session`; stopped at the end."""
    from veilmq.pipeline.session import session

    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:  # nothing is there yet to be ended in order, and an interrupt amid Spark's start may leave Java's hanging
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        spark = session(master, remote, settings={"spark.log.level": "ERROR"})
    finally:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    # PySpark's own asks Java for something from within what was asked, which fails with traces. Python's, and not the
    # one from before: it heeds the signal even where a shell had it ignored, in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Here, and not above: only now is it known that pyspark is there, and one that fits.
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.logger import PySparkLogger

    for name in _REPEATING:
        PySparkLogger.getLogger(name).disabled = True
    for name in _GATEWAY:
        logging.getLogger(name).addFilter(_is_no_interruption)
    try:
        yield spark
    except KeyboardInterrupt:
        # What was broken off may have taken the gateway with it: all ends anyhow.
        with suppress(Py4JError):
            hush(spark)
            for query in spark.streams.active:
                query.stop()
        raise
    finally:
        spark.stop()


def hush(spark: "SparkSession") -> None:
    """Before work is broken off: Java would log that it was, with a trace for each layer."""
    from pyspark.sql.utils import is_remote

    if not is_remote():
        spark.sparkContext.setLogLevel("OFF")


def _is_no_interruption(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_BROKEN_OFF)
