"""A Spark session that is set up for our sources: Java found, packages checked, the executors' Python the driver's.

Strategy: `--master` and `--remote` choose where it runs; everything else is the same. A session takes ten seconds to
start: make one.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from veilmq.pipeline import java, register
from veilmq.pipeline.errors import Unready

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
"""What a local session is given unless `settings` say otherwise. Sources listen nowhere; Spark's driver on loopback."""


def session(
    master: str | None = None,
    remote: str | None = None,
    *,
    name: str = "veilmq",
    settings: Mapping[str, str] | None = None,
) -> "SparkSession":
    """A session with the data sources registered: on `master` (a Spark master URL) or over `remote` (`sc://...`).

    Raises Unready if Java or a package is missing or does not fit.
    """
    check_packages()
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    if remote:
        builder = builder.remote(remote)
    else:
        java.use(java.find_java(Path(tempfile.gettempdir()) / "veilmq-java"), sys.executable)
        builder = builder.master(master or MASTER_DEFAULT).appName(name)
        wanted = CONFIGURATION if (master or MASTER_DEFAULT).startswith("local") else _for_cluster()
        for key, value in (wanted | dict(settings or {})).items():
            builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    if not remote:
        spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def _for_cluster() -> dict[str, str]:
    """A cluster knows its own addresses."""
    return {key: value for key, value in CONFIGURATION.items() if not key.startswith("spark.driver.")}


def check_packages() -> None:
    """Raises Unready for a package that is missing or of a version that does not work, with the mend."""
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
