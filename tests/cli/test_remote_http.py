"""The door through a server's admin port: the one connection, over time."""

import socket
from pathlib import Path

from tests.cli.conftest import Serve

from veilmq.cli.remote_http import HttpDoor
from veilmq.model.queue import QueueKey

QUEUE = QueueKey("000000000000", "us-east-1", "orders")


def test_a_connection_that_the_server_ended_is_renewed(serve: Serve, tmp_path: Path) -> None:
    """As it does with an idle one, while somebody reads the last page."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    server = serve("--admin", admin).ready()
    token = (tmp_path / "data" / "admin-token").read_text().strip()
    door = HttpDoor(admin, token)
    door.run("create", QUEUE, {})
    server.stop()
    serve("--admin", admin).ready()
    assert door.run("describe", QUEUE, {})["name"] == "orders"
    door.close()
