"""Commands that errors and reports name are whole: paths are quoted, and server, account and region are repeated."""

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.admin import server as admin
from tests.support.broken_server import BrokenServer, answer
from tests.support.commands import Run

from veilmq.cli.access.client import AdminClient
from veilmq.cli.failures import MEMBER_FILE
from veilmq.testing.for_each import for_each


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory whose name needs quotes in a shell."""
    (tmp_path / "a b").mkdir()
    return tmp_path / "a b"


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that nobody else can have, and on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def advised(text: str) -> list[str]:
    """The arguments of the last command between backticks."""
    return shlex.split(re.findall("`veilmq ([^`]+)`", text)[-1])


def test_the_advice_can_be_followed(run: Run, place: Path) -> None:
    data = place / "data"
    _, store = admin.open_directory(data, None, admin.OPTIONS)
    store.close()
    where = ("--region", "eu-west-1", "--data", str(data))
    missing = run("peek", "orders", *where)
    assert f"`veilmq queues list --all --data '{data}'`" in missing.err
    assert run(*advised(missing.err)).code == 0
    assert run("peek", "orders", *where).code == 0
    assert run("queues", "list", "--all", "--json", "--data", str(data)).json[0]["region"] == "eu-west-1"
    with admin.running(data) as server:
        token = place / "token"
        token.write_text(admin.TOKEN)
        missing = run("peek", "none", "--admin", server.url, "--token-file", str(token), "--account", "0" * 12)
        assert run(*advised(missing.err)).code == 0


def test_paths_are_quoted(run: Run, place: Path) -> None:
    data = place / "data"
    data.mkdir(mode=0o700)
    none = run("check", "--data", str(data))
    assert none.err.endswith(f"make it with: veilmq serve --data '{data}'\n")
    (data / MEMBER_FILE).write_text("{}")
    assert run("check", "--data", str(data)).err.endswith(f"veilmq serve --data '{data}' --cluster URL\n")
    (data / MEMBER_FILE).unlink()
    _, store = admin.open_directory(data, None, admin.OPTIONS)
    store.close()
    copied = run("backup", str(place / "copy"), "--data", str(data))
    assert copied.out.endswith(f"veilmq restore NEW_DIRECTORY --from '{place / 'copy'}'\n")
    (place / "custom.conf").write_text("queues { orders { } }")
    made = run("import", str(place / "custom.conf"), "--into", str(place / "queues.toml"))
    assert made.out.endswith(f"veilmq serve --queues '{place / 'queues.toml'}'\n")


def test_a_server_that_announced_itself_is_not_to_be_started(run: Run, tmp_path: Path, closed: int) -> None:
    _, store = admin.open_directory(tmp_path / "data", None, admin.OPTIONS)
    store.directory.announce({"admin": f"http://127.0.0.1:{closed}"})
    (tmp_path / "data" / "admin-token").write_text(admin.TOKEN)
    told = run("queues", "list", "--data", str(tmp_path / "data"))
    store.close()
    assert (told.code, "veilmq serve" in told.err) == (4, False)
    assert "is starting or ending, or in a container: repeat the command" in told.err


@for_each(
    ("url", "advice"),
    [
        ("[::1]:45321", "Start one with `veilmq serve --admin '[::1]:45321'`, or name"),
        ("127.0.0.1:9325", "Start one with `veilmq serve`, or name"),
        ("https://localhost:45321", "Start it, with its certificate, or name"),
        ("192.0.2.1:45321", "Start one there, with its admin port at 45321, or name"),
    ],
)
def test_the_server_to_start_is_named_by_its_address(url: str, advice: str) -> None:
    assert AdminClient(url, None)._start().startswith(advice)


def test_a_proxy_whose_server_is_away_is_not_replaced(run: Run) -> None:
    proxy = BrokenServer([answer(502, b"Bad Gateway")])
    told = run("queues", "list", "--admin", proxy.url, "--account", "0" * 12, "--region", "us-east-1")
    proxy.close()
    assert (told.code, "veilmq serve" in told.err) == (4, False)
    assert "a proxy whose server is away: start that" in told.err
