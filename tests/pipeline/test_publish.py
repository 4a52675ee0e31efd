"""Recommendations to a real server: kept, put in force where the owner wants that, refused in words."""

import http.client
import http.server
import threading
from pathlib import Path
from typing import Any

import pytest

from veilmq.pipeline.errors import OptionInvalid, SourceRefused, SourceUnreachable, TokenRefused
from veilmq.pipeline.publish import OFF, _verdict, check_rights, publish
from veilmq.pipeline.publish.plans import plans_of
from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer, ServerProcess

QUEUE = ("000000000000", "us-east-1", "jobs")


def row(kind: str | None = None, **values: Any) -> dict[str, Any]:
    given = {
        "account": QUEUE[0], "region": QUEUE[1], "queue": QUEUE[2], "type": kind, "attempts": 500.0,
        "first_lease_s": 20.0, "timeout_s": 90.0, "timeout_at_least_s": None, "today_renewed": False,
    }  # fmt: skip
    return given | values


def token(server: LocalServer) -> str:
    return (server.process.data / "admin-token").read_text().strip()


def test_clients_that_never_extend_get_the_plain_timeout() -> None:
    plans = plans_of([row(), row("film", today_renewed=True), row("other", timeout_s=None)], {QUEUE: 7_000_000})
    assert plans[QUEUE]["lease_us"] == 90_000_000
    assert plans[QUEUE]["by_type"] == {"film": 20_000_000}
    assert plans[QUEUE]["floor_us"] == 7_000_000
    assert plans[QUEUE]["why"] == "all messages: 500 attempts; film: 500 attempts"
    surely = {"timeout_low_s": 80.4, "timeout_high_s": 1234.5}
    beyond = {"timeout_s": None, "timeout_at_least_s": 90.0, "today_lease_s": 30.0, "timeout_high_s": float("nan")}
    film = {"first_lease_low_s": 18.0, "first_lease_high_s": 23.0, "today_renewed": True}
    plans = plans_of([row(**surely), row("film", **surely, **film), row("other", **surely | beyond)], {})
    assert plans[QUEUE]["why"].split("; ") == [
        "all messages: 500 attempts, 95 % sure: 80.4 s to 1230 s", "film: 500 attempts, 95 % sure: 18 s to 23 s",
        "other: 500 attempts, 95 % sure: 80.4 s or more",
    ]  # fmt: skip


def test_where_too_little_is_known_nothing_is_said() -> None:
    assert plans_of([row(timeout_s=None, first_lease_s=None)], {}) == {}


@for_each(("at_least_s", "lease_us"), [(33.0, 180_000_000), (400.0, 400_000_000)])
def test_at_least_never_shortens_what_is_granted_today(at_least_s: float, lease_us: int) -> None:
    plans = plans_of([row("film", timeout_s=None, timeout_at_least_s=at_least_s, today_lease_s=180.0)], {})
    assert plans[QUEUE]["by_type"] == {"film": lease_us}
    kept = plans_of([row("film", today_renewed=True, timeout_s=None, timeout_at_least_s=at_least_s)], {})
    assert kept[QUEUE]["by_type"] == {"film": 20_000_000}


def test_a_plan_is_suggested_and_applied_where_the_owner_says_so(veilmq_server: LocalServer) -> None:
    with veilmq_server.connect("jobs") as queue:
        plans = plans_of([row(), row("film", timeout_s=600.0)], {})
        assert publish(plans, veilmq_server.admin_url, token(veilmq_server)) == {QUEUE: "suggested"}
        found = queue.recommended()
        assert found is not None
        assert (found.lease, found.by_type, found.applied) == (90, {"film": 600}, False)
        veilmq_server._ask("PATCH", "/api/v1/queues/000000000000/us-east-1/jobs", {"adaptive": "apply"})
        assert publish(plans, veilmq_server.admin_url, token(veilmq_server)) == {QUEUE: "applied"}


def test_an_owner_who_wants_no_plans_is_an_answer(veilmq_server: LocalServer) -> None:
    with veilmq_server.connect("jobs"):
        veilmq_server._ask("PATCH", "/api/v1/queues/000000000000/us-east-1/jobs", {"adaptive": "off"})
        assert publish(plans_of([row()], {}), veilmq_server.admin_url, token(veilmq_server)) == {QUEUE: OFF}


def test_a_queue_that_is_gone_is_told(veilmq_server: LocalServer) -> None:
    said = publish(plans_of([row()], {}), veilmq_server.admin_url, token(veilmq_server))
    assert said[QUEUE].startswith("no queue")


def test_wrong_servers_and_tokens_name_the_mend(veilmq_server: LocalServer) -> None:
    plans = plans_of([row()], {})
    with pytest.raises(TokenRefused, match=r"refuses: the bearer token is not this server's. .*--token-file"):
        publish(plans, veilmq_server.admin_url, "wrong")
    with pytest.raises(SourceUnreachable, match="admin port"):
        publish(plans, "http://127.0.0.1:1", "wrong")
    for url in ("127.0.0.1", "http://[::1", "http://h:99999", "http://a b"):
        with pytest.raises(OptionInvalid, match="is no URL"):
            publish(plans, url, "wrong")
    with pytest.raises(OptionInvalid, match=r"certificate='none\.pem' cannot be read: No such file"):
        publish(plans, "https://127.0.0.1:1", "wrong", "none.pem")
    with pytest.raises(OptionInvalid) as refused:
        publish(plans, veilmq_server.admin_url, "-----BEGIN\nhidden")
    assert "hidden" not in str(refused.value)


CREDENTIALS = """
[[account]]
id = "111111111111"

[[account.key]]
id = "all"
secret = "s"

[[account.key]]
id = "reader"
secret = "s"
grants = [{ actions = ["events"] }]

[[account.key]]
id = "planner"
secret = "s"
grants = [{ actions = ["events"] }, { actions = ["change-queue"], queues = ["orders-*"] }]
"""


def test_a_server_that_takes_no_plans_is_known_before_there_are_any(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text(CREDENTIALS)
    file.chmod(0o600)
    server = ServerProcess(tmp_path, "--credentials", str(file)).start()
    try:
        for taken in ((server.data / "admin-token").read_text().strip(), "all:s", "planner:s"):
            check_rights(server.admin, taken)
        with pytest.raises(SourceRefused, match=r"was not granted change-queue on any queue\. Grant it to the key, or"):
            check_rights(server.admin, "reader:s")
        for wrong in ("reader:wrong", "wrong", None):
            with pytest.raises(TokenRefused, match="refuses: "):
                check_rights(server.admin, wrong)
        check_rights(server.sqs, None)  # any other answer is left to the plans
        with pytest.raises(SourceUnreachable, match="is no VeilMQ admin port"):
            publish(plans_of([row()], {}), server.sqs, None)
    finally:
        server.stop()
    with pytest.raises(SourceUnreachable, match=r"cannot be reached: .*Is its admin port there"):
        check_rights("http://127.0.0.1:1", None)


@for_each(("status", "body"), [(200, b"[]"), (200, b"<html>"), (200, b'{"plan": 1}'), (404, b"<html>"), (404, b"{}")])
def test_an_answer_of_something_else_is_told(status: int, body: bytes) -> None:
    with pytest.raises(SourceUnreachable, match=f"http://h is no VeilMQ admin port: it answers {status}. Is the URL"):
        _verdict("http://h", status, body)


def test_a_server_below_a_path_is_told(veilmq_server: LocalServer) -> None:
    """As behind a proxy, which passes on the plans below its `/queues`, and answers by itself whether it would."""
    asked = []
    own = [(503, b"<html>"), (200, b"[]"), (200, b"<html>")]
    questions = len(own)

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body = own.pop()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            asked.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server = http.client.HTTPConnection(veilmq_server.admin_url.removeprefix("http://"))
            passed = {name: self.headers[name] for name in ("Content-Type", "Authorization")}
            server.request("PUT", self.path.removeprefix("/queues"), body, passed)
            with server.getresponse() as answer:
                said = answer.read()
                self.send_response(answer.status)
            server.close()
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *arguments: Any) -> None:
            pass

    with (
        veilmq_server.connect("jobs"),
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy,
    ):
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}/queues/"
        while own:
            check_rights(url, "key:secret")
        assert publish(plans_of([row()], {}), url, token(veilmq_server)) == {QUEUE: "suggested"}
        proxy.shutdown()
    plan = "/queues/api/v1/queues/000000000000/us-east-1/jobs/plan"
    assert asked == ["/queues/api/v1/accounts"] * questions + [plan]
