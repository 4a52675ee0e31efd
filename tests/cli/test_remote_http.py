"""The door through a server's admin port: the one connection, over time."""

import socket
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Serve

from veilmq.cli import remote_events
from veilmq.cli.exits import Failure
from veilmq.cli.remote_http import HttpDoor
from veilmq.model.queue import QueueKey
from veilmq.store.sqlite.directory import read_holder

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


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/v1/later"), ("PUT", "/api/v1/moves")])
def test_a_server_that_knows_less_than_the_command_is_told(
    serve: Serve, tmp_path: Path, method: str, path: str
) -> None:
    """The command line may be upgraded first."""
    serve().ready()
    data = tmp_path / "data"
    door = HttpDoor(read_holder(data).listeners["admin"], (data / "admin-token").read_text().strip())  # type: ignore[union-attr]
    with pytest.raises(Failure) as refused:
        door._json(method, path, {}, b"{}")
    door.close()
    assert "the server is of another release than this command" in refused.value.advice


def test_the_history_is_printed_to_where_it_ended_when_it_was_asked_for(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server's grows faster than a terminal shows it."""
    serve().ready()
    data = tmp_path / "data"
    door = HttpDoor(read_holder(data).listeners["admin"], (data / "admin-token").read_text().strip())  # type: ignore[union-attr]
    door.run("create", QUEUE, {})
    pieces = 0

    def print_and_send(asked: Any, lines: bytes) -> None:
        nonlocal pieces
        pieces += 1
        assert pieces < 10
        door.run("send", QUEUE, {"messages": [{"body": "more"}]})

    monkeypatch.setattr(remote_events, "_print", print_and_send)
    monkeypatch.setattr(remote_events, "_PIECE", 1)

    class Asked:
        door: HttpDoor

    asked: Any = Asked()
    asked.door = door
    remote_events.print_events(asked)
    assert pieces >= 1
    door.close()
