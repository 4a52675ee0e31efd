"""A PostgreSQL of the tests' own, on a socket in a directory of its own: nothing listens on the network."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from tests.support.postgres import Server, programs


@contextmanager
def postgres() -> Iterator[str]:
    """The server's connection string, while the block runs."""
    with programs() as found:
        server = Server(found, "one")
        server.make()
        server.start(fsync="off")
        try:
            yield server.dsn
        finally:
            server.stop()


def emptied(place: str) -> str:
    """The same server with an empty schema."""
    with psycopg.connect(place) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return place
