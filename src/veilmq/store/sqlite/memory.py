"""What must be set before anything loads SQLite. So this module imports none that does."""

import sys


def count_no_memory() -> None:
    """Let SQLite not count the memory that it uses, which takes a mutex at each allocation: a tenth of a follower's
    time. Nothing if this process has loaded SQLite already."""
    if "apsw" not in sys.modules:
        import apsw

        apsw.shutdown()
        apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, 0)
        apsw.initialize()
