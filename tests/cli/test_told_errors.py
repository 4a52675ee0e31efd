"""What a command says of ports that are no admin port, of odd addresses and text, and of directories it cannot use."""

import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import INTERRUPTIBLE, WAIT_S, Serve
from tests.support.broken_server import BrokenServer, answer
from tests.support.commands import bare
from tests.support.ports import ANY
from tests.users import other_user

import veilmq
from veilmq.cli.access import Target, failure_of, http_access
from veilmq.cli.access.direct import open_direct
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.directory import check
from veilmq.cli.failures import Exit, Failure, Unreachable
from veilmq.cli.remote import Asked
from veilmq.cli.remote.messages import send
from veilmq.model.settings.queue import QueueKey
from veilmq.store.directory import DATABASE
from veilmq.store.sqlite.disk import MISMATCH, connect
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ

QUEUE = QueueKey("000000000000", "us-east-1", "q")
Answering = Callable[..., str]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """Starts web servers that answer everything with 200 and one body; gives their addresses."""
    started: list[http.server.ThreadingHTTPServer] = []

    def start(body: bytes, headers: dict[str, str] | None = None, *, sized: bool = True) -> str:
        class Other(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self.send_response(200)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                if sized:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_GET

            def log_message(self, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
        started.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def _refused(body: Callable[[HttpAccess], object], admin: str) -> None:
    door = HttpAccess(admin, None)
    try:
        with pytest.raises(Failure, match=f"{admin} answers 200, and not as a VeilMQ admin port") as refused:
            body(door)
    finally:
        door.close()
    assert refused.value.code is Exit.ADDRESS
    assert "--data DIR" in refused.value.advice


@for_each("body", [b"<html>", b"\xff", b"", b"[]", b"7", b"{}", b"[" * 100_000], ids=lambda each: each[:6])
@for_each(
    "ask",
    [
        lambda door: door.run("receive", QUEUE, {})["messages"],
        lambda door: door.home(None),
        lambda door: list(door.queues("*", None, "")),
        lambda door: list(door.topics("*", None, "")),
        lambda door: list(door.moves("*", None, "")),
        lambda door: door.trace("0" * 32)["events"],
    ],
    ids=["run", "home", "queues", "topics", "moves", "trace"],
)
def test_a_port_of_another_server_is_told(
    answering: Answering, ask: Callable[[HttpAccess], object], body: bytes
) -> None:
    _refused(ask, answering(body))


@pytest.mark.parametrize(
    "headers",
    [{}, {"veilmq-start-offset": "1"}, {"veilmq-start-offset": "1", "veilmq-next-offset": "-2"}],
    ids=["none", "one", "odd"],
)
def test_events_without_their_offsets_are_not_ours(answering: Answering, headers: dict[str, str]) -> None:
    _refused(lambda door: door.events("first", 1, 0.0), answering(b"", headers))


def test_a_backup_of_no_size_is_not_ours(answering: Answering, tmp_path: Path) -> None:
    with (tmp_path / "copy").open("wb", buffering=0) as file:
        _refused(
            lambda door: door.download("/api/v1/backup", file, lambda done, total: None),
            answering(b"welcome", sized=False),
        )


def test_steps_of_a_long_job_are_json(answering: Answering) -> None:
    _refused(lambda door: list(door.steps("/api/v1/check")), answering(b"welcome\n"))


@pytest.mark.parametrize("command", [("queues", "list"), ("peek", "q"), ("events",), ("check",)], ids=" ".join)
def test_a_command_tells_of_another_server(
    answering: Answering, veilmq: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 16)
    done = veilmq(*command, "--admin", answering(b"welcome"), "--token-file", str(token))
    assert (done.returncode, "Traceback" in done.stderr) == (4, False)
    assert "answers 200, and not as a VeilMQ admin port" in done.stderr


def test_a_servers_words_drive_no_terminal(veilmq: Run) -> None:
    said = {"error": "NoSuch", "message": "a\x1b[31m\x9b1mred", "field": None, "data": {}}
    server = BrokenServer([answer(400, json.dumps(said).encode())])
    ended = veilmq("queues", "list", "--admin", server.url, "--account", "0" * 12, "--region", "r")
    server.close()
    assert ended.stderr == "veilmq: a\\x1b[31m\\x9b1mred\n"


def test_the_port_of_a_protocol_is_told_from_the_admin_port(serve: Serve, veilmq: Run) -> None:
    server = serve().ready()
    for command in (("queues", "list"), ("check",)):
        done = veilmq(*command, "--admin", server.url.partition("://")[2], "--data", str(server.data))
        assert done.returncode == 4
        assert "another one than those of SQS, Azure and MNS: 9325 unless `serve --admin` says otherwise" in done.stderr
        assert "Start one" not in done.stderr
    assert server.stop() == 0


@for_each(
    "admin",
    ["[::1:9325", "a b:9325", " 127.0.0.1:9325", "a..b:9325", "h:port", "ftp://h:1", "h\udcff:1", "http://h:1/below"],
)
def test_an_odd_address_is_told_by_its_source(tmp_path: Path, admin: str) -> None:
    for target, environment, source in (
        (Target(admin, None, None), {"VEILMQ_ADMIN": "127.0.0.1:1"}, "--admin"),
        (Target(None, None, None), {"VEILMQ_ADMIN": admin, "VEILMQ_DATA": str(tmp_path)}, "VEILMQ_ADMIN"),
    ):
        with pytest.raises(Failure, match="expected HOST:PORT such as") as refused:
            http_access(target, environment)
        assert refused.value.code is Exit.USAGE
        assert str(refused.value).startswith(f"{source}: ")


@for_each(
    ("queue", "told"),
    [
        (QueueKey("../1", "us-east-1", "q"), "--account: Expected 12 digits"),
        (QueueKey("000000000000", "a?b", "q"), "--region: Expected"),
        (QueueKey("000000000000", "us-east-1", "\udcff"), "QUEUE: Expected"),
    ],
)
def test_a_key_that_no_queue_has_is_not_asked_for(queue: QueueKey, told: str) -> None:
    door = HttpAccess("127.0.0.1:1", None)
    with pytest.raises(Failure, match=told) as refused:
        door.run("describe", queue, {})
    assert refused.value.code is Exit.USAGE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with veilmq.connect(f"veil://{tmp_path}/data?queue=q&create=1") as queue:
        queue.send("hello")
    return tmp_path / "data"


@for_each(
    "arguments",
    [
        ["peek", b"\xff"],
        ["queues", "list", "--prefix", b"\xff"],
        ["queues", "list", "--region", b"\xff"],
        ["queues", "create", "p", "--tag", b"a=\xff"],
        ["trace", b"\xff"],
        ["send", "q", b"\xff"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_text_is_utf_8(data: Path, arguments: list[str | bytes]) -> None:
    for where in (["--data", str(data)], ["--admin", "127.0.0.1:1", "--token-file", "/dev/null"]):
        done = _run([*arguments, *where])
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
        assert b"expected UTF-8" in done.stderr or "--admin" in where


@for_each("encoding", ["utf-8", "utf-8:surrogateescape"])
@for_each("lines", [[], ["--lines"]], ids=["one", "lines"])
def test_a_body_of_stdin_is_utf_8(data: Path, lines: list[str], encoding: str) -> None:
    done = _run(["send", "q", *lines, "--data", str(data)], stdin=b"a\n\xff\n", PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    told = b"sent 0 messages before the failure\n" if lines else b""
    assert done.stderr.startswith(told + b"veilmq: stdin: expected UTF-8\n")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        ("<&-", ["send", "q"], 0),
        ("<&-", ["purge", "q"], 2),
        ("2>&-", ["queues", "list"], 0),
        ("2>&-", ["peek", "nothing-such"], 1),
        ("<&- >&- 2>&-", ["peek", "q"], 0),
    ],
)
def test_closed_streams_are_empty(data: Path, closed: str, arguments: list[str], code: int) -> None:
    done = _run([*arguments, "--data", str(data)], before=["/bin/sh", "-c", f'exec "$@" {closed}', "sh"])
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def _run(
    arguments: list[Any], stdin: bytes = b"", before: list[str] | None = None, **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [*(before or []), *VEILMQ, *arguments],
        input=stdin,
        capture_output=True,
        timeout=WAIT_S,
        env=bare(**environment),
    )


def test_a_directory_that_cannot_be_written_is_told(data: Path) -> None:
    data.chmod(0)
    with other_user(), pytest.raises(Failure, match="Permission denied") as refused, open_direct(data):
        pass
    data.chmod(0o700)
    assert refused.value.code is Exit.DIRECTORY
    assert "server's user" in refused.value.advice


@pytest.mark.parametrize(
    ("table", "command", "code"),
    [
        ("queue", ["queues", "list"], 3),
        ("queue", ["serve", *ANY], 3),
        ("message", ["peek", "q"], 5),
        ("message", ["receive", "q"], 5),
        ("history", ["events"], 3),
        ("history", ["trace", "0" * 32], 3),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, list) else str(each),
)
def test_a_damaged_database_is_told(data: Path, veilmq: Run, table: str, command: list[str], code: int) -> None:
    data = data.rename(data.with_name("its data"))
    connection = connect(data / DATABASE)
    (bytes_of_page,) = next(connection.execute("PRAGMA page_size"))
    (page,) = next(connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)))
    connection.close()
    with (data / DATABASE).open("r+b") as file:
        file.seek((page - 1) * bytes_of_page)
        file.write(b"\xa5" * bytes_of_page)
    done = veilmq(*command, "--data", str(data))
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert f"veilmq check --data '{data}'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [["check"], ["backup", "DEST"], ["queues", "list"]], ids=lambda each: each[0])
def test_a_database_of_another_program_is_told_with_its_directory(
    tmp_path: Path, veilmq: Run, command: list[str]
) -> None:
    tmp_path.chmod(0o700)
    connection = connect(tmp_path / DATABASE)
    connection.execute("CREATE TABLE a (b)")
    connection.close()
    command = [each.replace("DEST", str(tmp_path / "copy")) for each in command]
    done = veilmq(*command, "--data", str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        f"veilmq: {tmp_path}: {DATABASE} is not a VeilMQ database",
        "  It is another program's: name the data directory with --data DIR.",
    ]


def test_a_database_of_another_user_is_told(data: Path) -> None:
    (data / DATABASE).chmod(0)
    with other_user(), pytest.raises(Failure, match="Permission denied") as refused:
        check(data, as_json=False)
    assert refused.value.code is Exit.DIRECTORY
    assert "as the server's user" in refused.value.advice


def test_what_to_do_next_names_the_queue(data: Path, veilmq: Run) -> None:
    taken = veilmq("queues", "create", "q", "--delay", "5s", "--data", str(data))
    assert (taken.returncode, f"`veilmq queues set q --data {data}`" in taken.stderr) == (1, True)
    missing = veilmq("peek", "nothing-such", "--data", str(data))
    assert (missing.returncode, f"`veilmq queues create nothing-such --data {data}`" in missing.stderr) == (1, True)
    taken = failure_of("QueueExists", "exists", {"data": {"queue": "000000000000/us-east-1/q", "setting": "name"}})
    assert taken.advice == "It is the alias of another queue: choose another name."
    for said in ({}, {"data": None}, {"data": {"queue": 7}}):  # of another release
        assert failure_of("QueueExists", "exists", said).advice == "Change it with `veilmq queues set NAME`."


@for_each("error", ["StoreFailed", "StoreUnknown"])
def test_a_store_that_failed_is_the_same_through_a_server(error: str) -> None:
    assert failure_of(error, "the store failed", {}).code is Exit.STORE
    damaged = failure_of(error, f"no backup could be made: {MISMATCH}", {})
    assert (damaged.code, "`veilmq check`" in damaged.advice) == (Exit.STORE, True)


@for_each("command", ["queues", "topics", "moves"])
def test_an_account_that_cannot_be_is_told(data: Path, veilmq: Run, command: str) -> None:
    done = veilmq(command, "list", "--account", "12", "--data", str(data))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("veilmq: --account: ")


def test_events_that_are_given_up_are_no_success(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        admin = f"127.0.0.1:{server.getsockname()[1]}"
        asking = subprocess.Popen(
            [*INTERRUPTIBLE, "events", "--admin", admin, "--token-file", str(token)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        peer, _ = server.accept()
        with peer:
            asking.send_signal(signal.SIGINT)
            said, told = asking.communicate(timeout=WAIT_S)
    assert (asking.returncode, said, "Traceback" in told) == (130, "", False)


def _lines_until_ctrl_c(count: int) -> Iterator[str]:
    yield from (f"line {each}\n" for each in range(count))
    raise KeyboardInterrupt


def test_lines_that_were_sent_before_ctrl_c_are_told(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", _lines_until_ctrl_c(150))
    with open_direct(data) as door, pytest.raises(KeyboardInterrupt):
        send(Asked(door, (None, None), False, lambda: None), "q", lines=True)
    assert capsys.readouterr().err == "sent 100 messages before the interrupt\n"


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (KeyboardInterrupt(), "interrupt, and perhaps the next 30"),
        (Unreachable(Exit.ADDRESS, "it was killed"), "failure, and perhaps the next 30"),
        (Failure(Exit.WRONG, "the disk is nearly full"), "failure"),
    ],
)
def test_lines_that_are_under_way_at_the_end_are_told(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: BaseException, told: str
) -> None:
    monkeypatch.setattr("sys.stdin", iter(["line\n"] * 130))
    with open_direct(data) as door:
        asked = Asked(door, (None, None), False, lambda: None)
        whole = door.run

        def ended(operation: str, queue: QueueKey, members: Any) -> Any:
            if len(members["messages"]) < 100:
                raise end
            return whole(operation, queue, members)

        monkeypatch.setattr(door, "run", ended)
        with pytest.raises(type(end)):
            send(asked, "q", lines=True)
    assert capsys.readouterr().err == f"sent 100 messages before the {told}\n"


def test_a_number_of_events_is_above_0(data: Path, veilmq: Run) -> None:
    assert veilmq("events", "--limit", "0", "--data", str(data)).returncode == 2


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("starlette", ["serve", *ANY], "server"),
        ("pyarrow", ["pipeline", "timeouts", "--path", "nowhere"], "pipeline"),
        ("numpy", ["pipeline", "loop", "--path", "nowhere", "--out", "nowhere"], "pipeline"),
        ("numpy", ["pipeline", "report", "--path", "nowhere", "--out", "nowhere"], "pipeline"),
    ],
    ids=lambda each: each if isinstance(each, str) else each[-1],
)
def test_a_package_that_is_missing_is_told(tmp_path: Path, package: str, command: list[str], extra: str) -> None:
    """As after a plain `pip install veilmq`: the import system finds no such package."""
    without = f"import sys; sys.modules[{package!r}] = None; from veilmq.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, *command], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False), done.stderr
    assert f"veilmq: the package {package} is missing\n" in done.stderr
    assert f"veilmq[{extra}]" in done.stderr


def test_a_pyspark_that_lacks_a_module_is_told_to_be_too_old(tmp_path: Path) -> None:
    """Another package brought it. The loop imports Spark's sources before the others do."""
    old = "import sys, pyspark; sys.modules['pyspark.sql.streaming.datasource'] = None; pyspark.__version__ = '4.1.2'"
    for job in ("timeouts", "loop"):
        command = ["pipeline", job, "--path", "nowhere", "--out", "nowhere"]
        done = subprocess.run(
            [sys.executable, "-c", f"{old}; from veilmq.cli import main; main()", *command], cwd=tmp_path,
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("veilmq: pyspark 4.1.2 is too old.\n"), done.stderr


def test_a_port_that_speaks_no_http_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4_096)
                peer.sendall(b"220 mail\r\n")

        threading.Thread(target=speak, daemon=True).start()
        door = HttpAccess(f"127.0.0.1:{server.getsockname()[1]}", None)
        with pytest.raises(Failure, match="BadStatusLine") as refused:
            door.home(None)
        door.close()
    assert refused.value.code is Exit.ADDRESS


@for_each(
    ("arguments", "option"),
    [
        (["--algorithm", "A256GCM"], "--algorithm"),
        (["--decrypts-only"], "--decrypts-only"),
        (["--encryption", "--decrypts-only"], "--decrypts-only"),
        (["--encryption", "--account", "111111111111"], "--account"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_an_option_of_the_other_kind_of_key_is_told(veilmq: Run, arguments: list[str], option: str) -> None:
    done = veilmq("keys", "new", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"veilmq: {option}: ")


def test_a_table_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    from veilmq.cli.pipeline.run import tidy

    place = tmp_path / "table"
    (place / "below").mkdir(parents=True)
    with suppress(Failure):
        tidy(place / "below", None, 1, as_json=False)  # imports what it needs: the other user may not read Python's own
    place.chmod(0)
    with other_user(), pytest.raises(Failure, match="Permission denied") as refused:
        tidy(place / "below", None, 1, as_json=False)
    place.chmod(0o700)
    assert refused.value.code is Exit.WRONG
