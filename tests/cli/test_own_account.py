"""Whose queues are meant where no account is named."""

import http.server
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx
from tests.cli.conftest import Serve

from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit

Command = Callable[..., "CompletedProcess[str]"]
ONE, OTHER = "111111111111", "222222222222"
KEY = """
[[account]]
id = "{0}"
{1}
[[account.key]]
id = "AKID{0}"
secret = "secret-of-{0}"
"""


def credentials(directory: Path, *accounts: str, more: str = "") -> str:
    file = directory / "credentials.toml"
    file.write_text("".join(KEY.format(account, more) for account in accounts))
    file.chmod(0o600)
    return str(file)


def bearer(directory: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {(directory / 'data' / 'admin-token').read_text().strip()}"}


def test_of_the_only_account_of_the_file(serve: Serve, veilmq: Command, tmp_path: Path) -> None:
    server = serve("--credentials", credentials(tmp_path, ONE)).ready()
    data = ("--data", str(tmp_path / "data"))
    assert veilmq("queues", "create", "orders", *data).returncode == 0
    assert server.sqs(f"AKID{ONE}", f"secret-of-{ONE}").get_queue_url(QueueName="orders")
    assert ONE in veilmq("queues", "list", "--json", *data).stdout
    (listed,) = httpx.get(f"{server.admin}/api/v1/queues", headers=bearer(tmp_path)).json()["queues"]
    assert (listed["account"], listed["name"]) == (ONE, "orders")
    assert veilmq("send", "orders", "hello", *data).returncode == 0
    server.stop()
    assert veilmq("receive", "orders", *data).stdout.count("hello") == 1


def test_of_several_it_must_be_said(serve: Serve, veilmq: Command, tmp_path: Path) -> None:
    server = serve("--credentials", credentials(tmp_path, ONE, OTHER)).ready()
    data = ("--data", str(tmp_path / "data"))
    for arguments in (("queues", "create", "orders"), ("queues", "list"), ("send", "orders", "x")):
        refused = veilmq(*arguments, *data)
        assert (refused.returncode, f"--account ID, of {ONE}, {OTHER}." in refused.stderr) == (Exit.USAGE, True)
    assert veilmq("events", *data).returncode == 0
    for account in (ONE, OTHER):
        assert veilmq("queues", "create", "orders", "--account", account, *data).returncode == 0
    answer = httpx.get(f"{server.admin}/api/v1/account", auth=(f"AKID{OTHER}", f"secret-of-{OTHER}"))
    assert answer.json() == {"account": OTHER, "region": "us-east-1", "known": True}
    answer = httpx.get(f"{server.admin}/api/v1/account", headers=bearer(tmp_path))
    assert answer.json() == {"account": None, "region": None, "known": None, "accounts": [ONE, OTHER]}
    for path in ("queues", "topics", "moves"):
        answer = httpx.get(f"{server.admin}/api/v1/{path}", headers=bearer(tmp_path))
        assert (answer.status_code, answer.json()["field"]) == (400, "account")
    server.stop()
    assert f"--account ID, of {ONE}, {OTHER}." in veilmq("queues", "list", *data).stderr


def test_of_none_that_the_file_has(serve: Serve, veilmq: Command, tmp_path: Path) -> None:
    """Nobody could reach what is made there; what is there of an account that was taken out can still be looked at."""
    file = Path(credentials(tmp_path, ONE, OTHER))
    server = serve("--credentials", str(file)).ready()
    data = ("--data", str(tmp_path / "data"))
    gone = ("--account", OTHER, *data)
    assert veilmq("queues", "create", "orders", *gone).returncode == 0
    credentials(tmp_path, ONE)
    server.send_signal(signal.SIGHUP)
    server.wait_for("read 1 account ")
    refused = veilmq("queues", "create", "more", *gone)
    assert refused.returncode == Exit.USAGE
    assert f"account: the credentials file has no account {OTHER}, so no key could reach the queue" in refused.stderr
    assert "orders" in veilmq("queues", "list", *gone).stdout
    assert veilmq("send", "orders", "hello", *gone).returncode == 0
    assert veilmq("queues", "set", "orders", "--delay", "0", *gone).returncode == 0
    assert "hello" in veilmq("peek", "orders", *gone).stdout
    missing = veilmq("peek", "more", *gone)
    assert (missing.returncode, f"credentials file has no account {OTHER}" in missing.stderr) == (1, True)
    assert "credentials file" not in veilmq("peek", "more", *data).stderr
    assert veilmq("queues", "delete", "orders", "--yes", *gone).returncode == 0
    for noun in ("queues", "topics", "moves"):
        for form in ((), ("--json",)):
            nothing = veilmq(noun, "list", *gone, *form)
            assert (nothing.returncode, nothing.stdout) == (0, "")
            assert f"the server's credentials file has no account {OTHER}" in nothing.stderr
        assert "credentials file" not in veilmq(noun, "list", *data).stderr
    assert veilmq("queues", "list", "--json", *data).stderr == ""


def test_of_development_mode(serve: Serve, veilmq: Command, tmp_path: Path) -> None:
    server = serve().ready()
    server.sqs(ONE).create_queue(QueueName="orders")
    data = ("--data", str(tmp_path / "data"))
    assert veilmq("queues", "create", "theirs", "--account", OTHER, *data).returncode == 0
    assert "credentials file" not in veilmq("peek", "none", "--account", OTHER, *data).stderr
    assert "no queues in account 000000000000" in veilmq("queues", "list", *data).stderr
    server.sqs().create_queue(QueueName="mine")
    server.stop()
    listed = veilmq("queues", "list", *data).stdout
    assert "mine" in listed
    assert "orders" not in listed


def test_in_its_own_home_region(serve: Serve, veilmq: Command, tmp_path: Path) -> None:
    file = Path(credentials(tmp_path, ONE, OTHER))
    file.write_text(file.read_text().replace(f'id = "{OTHER}"\n', f'id = "{OTHER}"\nhome_region = "eu-west-1"\n'))
    server = serve("--credentials", str(file)).ready()
    data = ("--data", str(tmp_path / "data"))
    created = veilmq("queues", "create", "orders", "--account", OTHER, "--json", *data)
    assert json.loads(created.stdout)["region"] == "eu-west-1"
    assert json.loads(veilmq("queues", "list", "--account", OTHER, "--json", *data).stdout)["name"] == "orders"
    assert "region us-east-1" in veilmq("queues", "list", "--account", ONE, *data).stderr
    elsewhere = veilmq("queues", "list", "--account", OTHER, "--region", "us-east-1", *data)
    assert "region us-east-1" in elsewhere.stderr
    token, key = bearer(tmp_path), httpx.BasicAuth(f"AKID{ONE}", f"secret-of-{ONE}")
    asked = {"account": OTHER}
    answer = httpx.get(f"{server.admin}/api/v1/account", params=asked, headers=token)
    assert answer.json() == {"account": OTHER, "region": "eu-west-1", "known": True}
    assert httpx.get(f"{server.admin}/api/v1/account", params=asked, auth=key).status_code == 403
    (listed,) = httpx.get(f"{server.admin}/api/v1/queues", params=asked, headers=token).json()["queues"]
    assert listed["region"] == "eu-west-1"


def test_a_server_of_an_earlier_release_has_one_default() -> None:
    class Earlier(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            body = b'{"error": "not_found", "message": "Not Found"}'
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Earlier) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        door = HttpAccess(f"127.0.0.1:{server.server_port}", None)
        assert door.home(None) == ("000000000000", "us-east-1", True)
        assert door.home(ONE) == (ONE, "us-east-1", True)
        door.close()
        server.shutdown()
