"""Which door a command takes, and what it says of directories, tokens and destinations that it cannot have."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.cli.conftest import Serve
from tests.support.commands import Run
from tests.users import other_user

from veilmq.cli.access import TOKEN_FILE, Target, holder_access, http_access
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure
from veilmq.store.directory import DATABASE, Holder, read_holder


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A data directory of another user."""
    data = tmp_path / "data"
    data.mkdir()
    (data / DATABASE).touch()
    tmp_path.chmod(0)
    with other_user():
        yield data
    tmp_path.chmod(0o700)


def test_a_directory_of_another_user_is_told(closed: Path) -> None:
    with pytest.raises(Failure, match="Permission denied") as refused:
        http_access(Target(None, None, closed), {})
    assert refused.value.code is Exit.DIRECTORY
    with pytest.raises(Failure, match="Permission denied"), holder_access(Target(None, None, closed), {}):
        pass


@pytest.mark.parametrize(
    ("left", "advice"),
    [(None, "veilmq serve --data {tmp_path}"), ("veilmq.db-wal", "Restore all files"), ("redo", "Restore all files")],
)
def test_a_directory_that_lost_its_database_is_not_to_be_made_anew(
    tmp_path: Path, left: str | None, advice: str
) -> None:
    if left is not None:
        (tmp_path / left).write_bytes(b"acknowledged")
    with pytest.raises(Failure) as refused, holder_access(Target(None, None, tmp_path), {}):
        pass
    assert advice.format(tmp_path=tmp_path) in refused.value.advice


@pytest.mark.parametrize(
    ("text", "told"), [(None, "No such file"), (b"", "holds no token"), (b"\x80\xff", "holds no token")]
)
def test_a_token_file_that_somebody_names_must_hold_one(tmp_path: Path, text: bytes | None, told: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_bytes(text)
    for target, environment in (
        (Target("127.0.0.1:1", path, None), {}),
        (Target("127.0.0.1:1", None, None), {"VEILMQ_TOKEN_FILE": str(path)}),
    ):
        with pytest.raises(Failure, match=told) as refused:
            http_access(target, environment)
        assert refused.value.code is Exit.USAGE
        assert str(path) in str(refused.value)


def test_without_a_token_the_server_is_asked_all_the_same(tmp_path: Path) -> None:
    assert http_access(Target("127.0.0.1:1", None, tmp_path), {}) is not None


def test_a_directory_that_is_named_goes_before_the_variable(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).write_text("its-own\n")
    variables = {"VEILMQ_TOKEN_FILE": str(tmp_path / "none")}
    assert http_access(Target("127.0.0.1:1", None, tmp_path), variables) is not None


def test_all_addresses_mean_loopback_to_a_command_beside_the_server(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in deploy/compose.elasticmq.yaml; development mode takes no Host 0.0.0.0."""
    server = serve().ready()
    port = server.admin.rsplit(":", 1)[1]
    token = ("--token-file", str(server.data / "admin-token"))
    assert run("queues", "list", "--admin", f"0.0.0.0:{port}", *token).code == 0
    empty = run("queues", "list", "--admin", "", *token)  # a script's variable that is not set
    assert (empty.code, empty.err) == (2, "veilmq: --admin: expected a URL, not an empty text\n")
    assert run("console", "--admin", f"http://0.0.0.0:{port}", *token).out.startswith(f"{server.admin}/")
    monkeypatch.setenv("VEILMQ_ADMIN", f"0.0.0.0:{port}")
    assert run("queues", "list", *token).code == 0
    monkeypatch.setenv("VEILMQ_DATA", str(server.data))
    monkeypatch.setenv("VEILMQ_ADMIN", "0.0.0.0:1")
    monkeypatch.setenv("VEILMQ_DEV_HOST", "elasticmq")
    assert run("queues", "list").code == 0, "the lock of the directory knows the port"
    holder = read_holder(server.data)
    assert holder is not None
    # `--dev-host` admits private addresses as well, and development mode takes no Host that is one.
    for host in ("0.0.0.0", "[::ffff:127.0.0.1]"):
        announced = {name: url.replace("127.0.0.1", host) for name, url in holder.listeners.items()}
        (server.data / "lock").write_bytes(msgspec.json.encode(Holder(holder.pid, announced)))
        assert run("queues", "list").code == 0
        shown = run("doctor").out
        assert f"pid {holder.pid} is ready" in shown
        assert f"admin listens on http://{host}:{port}" in shown
    assert Holder(1, {"admin": "https://[::]:9325"}).url("admin") == "https://[::1]:9325"
    (server.data / TOKEN_FILE).unlink()
    removed = run("queues", "list", "--data", str(server.data))
    assert (removed.code, f"{server.data / TOKEN_FILE} is missing" in removed.err) == (2, True)


def test_a_full_destination_is_not_the_servers_fault(serve: Serve) -> None:
    server = serve().ready()
    door = HttpAccess(server.admin, (server.data / "admin-token").read_text().strip())
    try:
        with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
            door.download("/api/v1/backup", full, lambda done, total: None)
    finally:
        door.close()
