"""Snapshots and backups that many ask for at once, and whose readers are slow."""

import asyncio
import io
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from veilmq.admin import app
from veilmq.admin.history import copies
from veilmq.admin.history.copies import COPIES_MAX
from veilmq.cli.access import client as access_client
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.serve.admin_port import _while_token_stays
from veilmq.model.commands import CreateQueue, Origin, Send
from veilmq.model.settings.queue import QueueKey
from veilmq.store.sqlite.reader import SqliteReader

BULKY = 2_000
TESTER = Origin("admin", "tester")


@pytest.fixture
def full(server: Any) -> Any:
    """A server whose snapshot is larger than what a socket holds."""
    key = QueueKey("000000000000", "us-east-1", "bulky")
    send = Send(queue=key, origin=TESTER, body="", md5=bytes.fromhex("d41d8cd98f00b204e9800998ecf8427e"), size_bytes=0)
    server.on_loop(server.shell.call(CreateQueue(queue=key, origin=TESTER)))
    for _ in range(BULKY // 250 * 10):
        server.on_loop(server.shell.call(*[send] * 250))
    return server


def open_files(directory: Path) -> int:
    """Files without a name that this process holds in the directory."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{each}")
        except FileNotFoundError:
            continue
        found += target.startswith(str(directory)) and target.endswith("(deleted)")
    return found


def asking(server: Any, token: str) -> socket.socket:
    """A client that asks for a snapshot and reads nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(f"GET /api/v1/snapshot HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n\r\n".encode())
    return client


def test_copies_are_made_one_at_a_time_and_few_wait(
    full: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, together = threading.Event(), []
    making = threading.BoundedSemaphore(1)
    write = copies.Copies._snapshot_file

    def held(one: copies.Copies, scope: Any) -> Any:
        together.append(making.acquire(blocking=False))
        go_on.wait(30)
        making.release()
        return write(one, scope)

    known: set[copies.Copies] = set()
    make = copies.Copies.make

    async def noted(one: copies.Copies, what: Any) -> copies.Copy:
        known.add(one)
        return await make(one, what)

    monkeypatch.setattr(copies.Copies, "_snapshot_file", held)
    monkeypatch.setattr(copies.Copies, "make", noted)
    with ThreadPoolExecutor(COPIES_MAX) as pool:
        asked = [pool.submit(http.get, "/api/v1/snapshot") for _ in range(COPIES_MAX)]
        while sum(each.count for each in known) < COPIES_MAX:
            http.get("/health/live")
        refused = http.post("/api/v1/backup")
        assert refused.status_code == 503
        body = refused.json()
        assert (body["error"], body["data"]) == ("busy", {"limit": COPIES_MAX})
        go_on.set()
        assert [each.result().status_code for each in asked] == [200] * COPIES_MAX
    assert together == [True] * len(together)
    assert http.post("/api/v1/backup").status_code == 200
    assert http.post("/api/v1/check").status_code == 200


def test_a_snapshot_is_sent_though_the_token_is_replaced_while_it_is_made(
    full: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        bearer = "the token when the request came"

    entry: Any = Entry()
    config, write = full._server.config, copies.Copies._snapshot_file
    inner = config.loaded_app

    async def of_a_cluster(scope: Any, receive: Any, send: Any) -> None:
        await inner(scope, _while_token_stays(entry, scope, receive), send)

    def replaced(one: copies.Copies, scope: Any) -> Any:
        entry.bearer = "the next one"
        return write(one, scope)

    monkeypatch.setattr(config, "loaded_app", of_a_cluster)
    monkeypatch.setattr(copies.Copies, "_snapshot_file", replaced)
    answer = http.get("/api/v1/snapshot")
    assert (answer.status_code, entry.bearer) == (200, "the next one")
    assert answer.text.count("\n") > BULKY


def copied(http: httpx.Client) -> bool:
    """Whether one who reads gets a whole copy. On a busy machine it may take nothing for a while, too."""
    try:
        return http.get("/api/v1/snapshot").status_code == 200
    except httpx.RemoteProtocolError:
        return False


def test_a_reader_that_takes_nothing_loses_its_copy(
    full: Any, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "STALL_S", 0.2)
    with caplog.at_level("WARNING", "veilmq.admin"):
        clients = [asking(full, http.headers["authorization"]) for _ in range(COPIES_MAX)]
        while not copied(http):
            pass
        while len([each for each in caplog.records if "took nothing" in each.getMessage()]) < COPIES_MAX:
            http.get("/health/live")
    while open_files(tmp_path):  # though the readers are still there
        http.get("/health/live")
    for client in clients:
        client.settimeout(30)
        while client.recv(1 << 16):
            pass  # cut off, not ended
        client.close()


def test_a_client_that_leaves_gives_its_copy_back(full: Any, http: httpx.Client, tmp_path: Path) -> None:
    for _ in range(2 * COPIES_MAX):
        client = asking(full, http.headers["authorization"])
        assert client.recv(1)
        client.close()
    while open_files(tmp_path):
        http.get("/health/live")
    assert http.get("/api/v1/snapshot").status_code == 200


def test_a_long_wal_is_given_time_before_the_next_reading(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins anew with a commit; until then nothing reads."""
    with running(tmp_path / "data") as server:
        checkpointer = server.store.checkpointer
        many = copies.Copies(server)
        begun: list[int] = []

        async def read() -> None:
            async with many.reading():
                begun.append(checkpointer.wal_pages)

        async def play() -> None:
            checkpointer.wal_pages = 1 << 20
            reading = asyncio.ensure_future(read())
            for _ in range(20):
                await asyncio.sleep(0)
            assert begun == []
            await server.shell.call(CreateQueue(queue=QueueKey("000000000000", "us-east-1", "q"), origin=TESTER))
            await reading
            checkpointer.wal_pages = 1 << 20
            monkeypatch.setattr(copies, "REST_S", 0.01)
            await read()

        server.on_loop(play())
        assert begun[0] < 1 << 10
        assert begun[1] == 1 << 20, "it does not wait for ever"


def test_a_file_is_closed_beside_the_loop(tmp_path: Path) -> None:
    """The kernel frees the blocks of a large file in that call, and nobody would be answered meanwhile."""
    closed_by: list[int] = []

    class Watched(io.FileIO):
        def close(self) -> None:
            closed_by.append(threading.get_ident())
            super().close()

    async def run() -> None:
        ended = asyncio.Event()
        (tmp_path / "copy").write_bytes(b"all of it")
        copy = copies.Copy(Watched(tmp_path / "copy"), ended.set)
        assert [part async for part in copy.parts()] == [b"all of it"]
        await ended.wait()

    asyncio.run(run())
    assert closed_by
    assert threading.get_ident() not in closed_by


def untouched(step: Callable[..., None], left: threading.Event, *progress: Any) -> Any:
    """Work that makes no progress until its client has left, for half a minute at most."""
    for _ in range(3_000):
        try:
            step(*progress)
        except ConnectionAbortedError:
            left.set()
            raise
        time.sleep(0.01)
    return io.BytesIO()


def test_the_work_for_a_client_that_leaves_ends(
    server: Any, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, left = threading.Event(), {"backup": threading.Event(), "check": threading.Event()}

    def backup(reader: Any, step: Any) -> Any:
        begun.set()
        return untouched(step, left["backup"])

    def check(reader: Any, step: Any) -> Any:
        begun.set()
        return untouched(step, left["check"], "file", 0, 1)

    monkeypatch.setattr(SqliteReader, "backup", backup)
    monkeypatch.setattr(SqliteReader, "check", check)
    for each, is_seen in left.items():
        begun.clear()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            token = http.headers["authorization"]
            head = f"POST /api/v1/{each} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n"
            client.sendall(head.encode() + b"Content-Length: 2\r\n\r\n{}")
            assert begun.wait(30)
        assert is_seen.wait(10), each


def test_a_command_waits_for_a_copy_and_a_check_as_long_as_the_server_answers(
    server: Any, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    enough = threading.Event()
    look, backup, check = HttpAccess._look_for_life, SqliteReader.backup, SqliteReader.check

    def seen(access: HttpAccess) -> None:
        looks.append(look(access))
        if len(looks) == 3:
            enough.set()

    def late_copy(reader: SqliteReader, step: Any) -> Any:
        assert enough.wait(30)
        return backup(reader, step)

    def late_report(reader: SqliteReader, step: Any) -> Any:
        assert enough.wait(30)
        return check(reader, step)

    monkeypatch.setattr(access_client, "_LOOK_S", 0.1)
    monkeypatch.setattr(app, "_BEAT_S", 0.1)
    monkeypatch.setattr(HttpAccess, "_look_for_life", seen)
    monkeypatch.setattr(SqliteReader, "backup", late_copy)
    monkeypatch.setattr(SqliteReader, "check", late_report)
    access = HttpAccess(f"127.0.0.1:{server.port}", http.headers["authorization"].removeprefix("Bearer "))
    with (tmp_path / "copy").open("wb") as file:
        access.download("/api/v1/backup", file, lambda done, total: None)
    assert (tmp_path / "copy").read_bytes().startswith(b"SQLite format 3\0")
    enough.clear()
    lines = access.steps("/api/v1/check")
    assert [next(lines), next(lines)] == 2 * [{"stage": "waiting", "done": 0, "total": 0}]
    enough.set()
    assert list(lines)[-1]["result"]["problems"] == []
    database = server.store.directory.database
    database.rename(tmp_path / "taken away")
    *_, told = access.steps("/api/v1/check")
    (tmp_path / "taken away").rename(database)
    assert told == {"error": "failed", "message": f"{database} is empty or missing"}
    access.close()
