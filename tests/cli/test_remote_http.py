"""The door through a server's admin port: the one connection, over time."""

import gc
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.cli.conftest import Serve
from tests.support.ports import kept_ports

from veilmq.cli import history
from veilmq.cli.access import client, http
from veilmq.cli.access.client import ANSWER_S
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.model.settings.queue import QueueKey
from veilmq.server.cluster.admin import HANDSHAKE_SECONDS, OWNER_SECONDS
from veilmq.store.directory import read_holder
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("000000000000", "us-east-1", "orders")


def test_a_connection_that_the_server_ended_is_renewed(serve: Serve, tmp_path: Path) -> None:
    """As it does with an idle one, while somebody reads the last page."""
    with kept_ports(1) as (port,):
        admin = f"127.0.0.1:{port}"
        server = serve("--admin", admin).ready()
        token = (tmp_path / "data" / "admin-token").read_text().strip()
        door = HttpAccess(admin, token)
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
    door = HttpAccess(read_holder(data).listeners["admin"], (data / "admin-token").read_text().strip())  # type: ignore[union-attr]
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
    door = HttpAccess(read_holder(data).listeners["admin"], (data / "admin-token").read_text().strip())  # type: ignore[union-attr]
    door.run("create", QUEUE, {})
    pieces = 0

    def print_and_send(asked: Any, lines: bytes) -> None:
        nonlocal pieces
        pieces += 1
        assert pieces < 10
        door.run("send", QUEUE, {"messages": [{"body": "more"}]})

    monkeypatch.setattr(history, "_print", print_and_send)
    monkeypatch.setattr(history, "_PIECE", 1)

    class Asked:
        door: HttpAccess

    asked: Any = Asked()
    asked.access = door
    history.print_events(asked)
    assert pieces >= 1
    door.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # some interrupts meet a close, as the process ends
# Some meet a constructor of the standard library: Python 3.13 shows that its half-made object cannot be closed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored .*<(http.client|socket)[.]:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("ask", [lambda door: door.events("first", 1, 0.0), HttpAccess._look_for_life])
def test_an_interrupt_at_any_moment_of_a_question_ends_it(
    serve: Serve, tmp_path: Path, ask: Callable[[HttpAccess], object]
) -> None:
    """Python drops what is raised within a finalizer, as it runs for an answer that nobody closed."""
    server = serve().ready()
    token = (tmp_path / "data" / "admin-token").read_text().strip()
    calls = 0

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call"
        if calls > last:
            sys.setprofile(None)
            raise KeyboardInterrupt

    last, is_interrupted = 0, True
    # An interrupt may leave a circle behind, with a finalizer that the collector would run within a later question.
    gc.disable()
    try:
        while is_interrupted:
            door, calls, is_interrupted = HttpAccess(server.admin, token), 0, False
            ask(door)
            sys.setprofile(interrupt)
            try:
                ask(door)
                ask(door)
                is_over = sys.getprofile() is not None
            except KeyboardInterrupt:
                is_interrupted = is_over = True
            finally:
                sys.setprofile(None)
            door.close()
            assert is_over, f"the interrupt at call {last} was lost"
            last += 1
    finally:
        gc.enable()
    assert last > 50


def _silent(ask: Callable[[HttpAccess], object], admin: str, token: str | None = None) -> Failure:
    door = HttpAccess(admin, token)
    with pytest.raises(Unreachable) as refused:
        ask(door)
    door.close()
    assert refused.value.code is Exit.ADDRESS
    return refused.value


def test_a_server_that_hangs_is_told(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose disk hangs: its system takes connections for it."""
    for each in (http, client):
        monkeypatch.setattr(each, "ANSWER_S", 0.5)
    server = serve().ready()
    token = (tmp_path / "data" / "admin-token").read_text().strip()
    door = HttpAccess(server.admin, token)

    def answered(ask: Callable[[], Any]) -> Any:
        """Within that time, or at a later try: half a second may be too short on a busy machine."""
        for _ in range(9):
            with suppress(Unreachable):
                return ask()
        return ask()

    answered(lambda: door.run("create", QUEUE, {}))
    # Longer than other answers may take.
    assert answered(lambda: door.run("receive", QUEUE, {"wait_us": 1_000_000})) == {"messages": []}
    server.send_signal(signal.SIGSTOP)
    with pytest.raises(Unreachable, match=r"took the connection but does not answer within 0\.5 s"):
        door.home(None)  # on a connection that is there
    door.close()
    told = _silent(lambda door: door.home(None), server.admin, token)
    assert str(told).endswith("the server took the connection but does not answer within 0.5 s")
    assert ("disk may hang" in told.advice, "may still be done" in told.advice) == (True, False)
    assert "may still be done" in _silent(lambda door: door.run("send", QUEUE, {"messages": []}), server.admin).advice
    secure = server.admin.replace("http://", "https://")
    assert "took the connection" in str(_silent(lambda door: door.home(None), secure))


@for_each(
    ("ask", "answer_s"),
    [
        (lambda door: door.home(None), "0.1"),
        (lambda door: door.run("receive", QUEUE, {"wait_us": 250_000}), "0.35"),
        (lambda door: door.events("next", 1, 0.25), "0.35"),
        (lambda door: door.run("purge", QUEUE, {}), "0.4"),
        (lambda door: list(door.steps("/api/v1/check")), "0.1"),
        (lambda door: door.download("/api/v1/backup", None, None), "0.1"),
    ],
    ids=["home", "receive", "events", "purge", "check", "backup"],
)
def test_each_command_waits_as_long_as_it_may_take(
    ask: Callable[[HttpAccess], object], answer_s: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check and a backup first ask whether the server lives. All are longer than a server of a cluster looks for the
    owner: else no command would say that there is none."""
    assert ANSWER_S > OWNER_SECONDS + HANDSHAKE_SECONDS
    for each in (http, client):
        monkeypatch.setattr(each, "ANSWER_S", 0.1)
        monkeypatch.setattr(each, "WORK_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = _silent(ask, f"127.0.0.1:{server.getsockname()[1]}")
    assert str(told).endswith(f"does not answer within {answer_s} s")


def test_no_connection_at_all_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of connections that is full drops what comes."""
    monkeypatch.setattr(client, "_CONNECT_S", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        with socket.create_connection(server.getsockname()):
            told = _silent(lambda door: door.home(None), f"127.0.0.1:{server.getsockname()[1]}")
    assert str(told).endswith("no connection within 0.2 s")
