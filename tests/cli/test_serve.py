"""`veilmq serve` as a process: starting, what stands in its way, signals, and what is there after a restart."""

import json
import os
import re
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError
from joserfc.jwk import ECKey
from tests.cli.conftest import WAIT_S, Run, Serve
from tests.support.certificate import CERTIFICATE, PRIVATE_KEY
from tests.support.commands import bare
from tests.support.ports import kept_ports
from tests.support.sqlite import read_events

from veilmq.cli import _ORDER
from veilmq.cli.serve.admin_connection import HEAD_S
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.model.events import EventRecord
from veilmq.store import Options
from veilmq.store.directory import DATABASE, read_holder
from veilmq.store.sqlite.disk import connect, open_reader
from veilmq.store.sqlite.reading import SqliteView
from veilmq.testing.for_each import for_each

KEYS = '[[account]]\nid = "111111111111"\n[[account.key]]\nid = "AK1"\nsecret = "hush-one"\n'


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture(params=["uvloop", pytest.param("asyncio", marks=pytest.mark.slow)])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Variables under which a server runs on that loop: on asyncio's own where uvloop is not to be had."""
    if request.param == "uvloop":
        return {}
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "uvloop.py").write_text("raise ImportError")
    return {"PYTHONPATH": str(tmp_path / "hiding")}


def test_a_start_lets_a_command_on_the_directory_end(serve: Serve, tmp_path: Path) -> None:
    account = EmbeddedAccount(tmp_path / "data")
    end = threading.Timer(1.0, account.close)
    end.start()
    server = serve().ready()
    end.join()
    assert server.stop() == 0


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return int(answer.status)


def events(data: Path) -> list[EventRecord]:
    connection = open_reader(data / DATABASE, Options())
    try:
        return read_events(SqliteView(connection), 0, 10_000)
    finally:
        connection.close()


def kinds(data: Path) -> list[str]:
    return [event.kind for event in events(data)]


def test_a_message_outlives_a_restart(serve: Serve, loop: dict[str, str]) -> None:
    server = serve(**loop).ready()
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert ("/uvloop/" in mapped) == (not loop)
    url = server.sqs().create_queue(QueueName="orders")["QueueUrl"]
    server.sqs().send_message(QueueUrl=url, MessageBody="order 1")
    assert status_of(server.admin + "/health/live") == 200
    assert server.stop() == 0
    again = serve().ready()
    url = again.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
    (message,) = again.sqs().receive_message(QueueUrl=url)["Messages"]
    assert message["Body"] == "order 1"
    again.send_signal(signal.SIGINT)
    assert again.ended() == 0


def test_the_start_log_tells_mode_settings_and_listeners(serve: Serve) -> None:
    server = serve("--parked-max", "77", VEILMQ_IDLE_S="12.5").ready()
    assert server.stop() == 0
    told = server.told()
    assert '"parked_max": 77' in told
    assert '"idle_s": 12.5' in told
    assert "development mode" in told
    assert all(set(line) >= {"at", "level", "logger", "message"} for line in server.logs)


def test_others_learn_who_holds_the_directory(serve: Serve) -> None:
    first = serve().ready()
    holder = read_holder(first.data)
    assert holder is not None
    assert holder.pid == first.process.pid
    assert holder.listeners.keys() >= {"sqs", "azure", "mns", "admin"}
    assert (holder.listeners["sqs"], holder.listeners["admin"]) == (first.url, first.admin)
    second = serve()
    assert second.ended() == 3
    assert f"held by pid {first.process.pid}" in second.told()
    assert "--data" in second.told()
    assert first.sqs().list_queues()["ResponseMetadata"]["HTTPStatusCode"] == 200


@pytest.mark.parametrize("name", ["sqs", "azure", "mns", "admin"])
def test_a_port_in_use(serve: Serve, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = serve(f"--{name}", f"127.0.0.1:{taken.getsockname()[1]}")
        assert server.ended() == 4
        assert f"--{name} 127.0.0.1:{taken.getsockname()[1]}: the port is in use" in server.told()
        assert f"Choose another with --{name} HOST:PORT" in server.told()


def answered_until_its_end(server: Any, address: tuple[str, int]) -> int:
    """How many requests to a data port got an answer before the process ended."""
    answered = 0
    while server.process.poll() is None:
        with suppress(OSError), socket.create_connection(address, timeout=WAIT_S) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answered += bool(caller.recv(1))
    return answered


@pytest.mark.parametrize("missing", ["its port", "its token"])
def test_a_start_without_its_admin_port_answers_nobody(serve: Serve, tmp_path: Path, missing: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, kept_ports(1) as (port,):
        admin = taken.getsockname()[1] if missing == "its port" else 0
        if missing == "its token":
            assert serve().ready().stop() == 0
            (tmp_path / "data" / "admin-token").chmod(0o644)
        server = serve("--sqs", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}")
        assert answered_until_its_end(server, ("127.0.0.1", port)) == 0
        assert server.ended() == (4 if missing == "its port" else 3)


def test_wrong_flags_and_files(serve: Serve, tmp_path: Path, keys: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[[account]]\nid = 'hush'\n")
    bad.chmod(0o600)
    keys.chmod(0o644)
    config = tmp_path / "config.toml"
    config.write_text("\nsqqs = 1")
    text = tmp_path / "text.pem"
    text.write_text("text")
    for arguments, told in (
        (["--no-such-flag"], "--no-such-flag"),
        (["--idle-s", "soon"], "--idle-s"),
        (["--sqs", "0.0.0.0:0"], "credentials"),
        (["--credentials", str(bad)], "12 digits"),
        (["--credentials", str(keys)], "chmod 600"),
        (["--config", str(config)], "line 2: sqqs"),
        (["--queues", str(tmp_path / "none.toml")], "none.toml"),
        (["--tls-cert", str(text), "--tls-key", str(text)], "TLS"),
        (["--tls-cert", str(tmp_path / "none.pem"), "--tls-key", str(text)], f"--tls-cert {tmp_path / 'none.pem'}: No"),
        (["--tls-cert", str(text), "--tls-key", str(tmp_path / "none.pem")], f"--tls-key {tmp_path / 'none.pem'}: No"),
        (["--tls-cert", "/proc/self/mem", "--tls-key", str(text)], "--tls-cert /proc/self/mem: Input/output error"),
    ):
        server = serve(*arguments)
        assert server.ended() == 2, (arguments, server.told())
        assert told in server.told()
        assert "hush" not in server.told()
        assert "Traceback" not in server.told()


def test_a_directory_that_cannot_be_served(serve: Serve, tmp_path: Path) -> None:
    opened = tmp_path / "an opened one"
    opened.mkdir()
    opened.chmod(0o755)
    file = tmp_path / "file"
    file.touch()
    serve(data=tmp_path / "newer").ready().stop()
    connection = connect(tmp_path / "newer" / DATABASE)
    connection.pragma("user_version", 99)
    connection.close()
    shown = tmp_path / "its data"
    serve(data=shown).ready().stop()
    (shown / "admin-token").chmod(0o644)
    for data, told in (
        (opened, f"chmod 700 '{opened}'"),
        (file, "file"),
        (tmp_path / "newer", "upgrade"),
        (shown, f"chmod 600 '{shown}/admin-token'"),
    ):
        server = serve(data=data)
        assert server.ended() == 3, server.told()
        assert told in server.told()
        assert "Traceback" not in server.told()


def test_the_admin_token_stays(serve: Serve) -> None:
    server = serve().ready()
    path = server.data / "admin-token"
    token = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) > 40
    assert token.strip() not in server.told()
    server.stop()
    serve().ready().stop()
    assert path.read_text() == token
    for text in (b"short\n", b"two words in one line\n", b"\xff" * 40):
        path.write_bytes(text)
        refused = serve()
        assert refused.ended() == 3
        assert f"{path} holds no token" in refused.told()
        assert path.read_bytes() == text
    path.write_text("")
    serve().ready().stop()
    assert len(path.read_text()) > 40


def test_keys_are_checked_and_read_again_on_sighup(serve: Serve, keys: Path, loop: dict[str, str]) -> None:
    server = serve("--credentials", str(keys), **loop).ready()
    assert "development" not in server.told()
    server.sqs("AK1", "hush-one").list_queues()
    for key, secret, code in (("AK1", "wrong", "SignatureDoesNotMatch"), ("AK2", "hush-two", "InvalidClientTokenId")):
        with pytest.raises(ClientError) as refused:
            server.sqs(key, secret).list_queues()
        assert refused.value.response["Error"]["Code"] == code
    keys.write_text("[[account]]\nid = 'x'")
    server.send_signal(signal.SIGHUP)
    server.wait_for("stay as they were")
    server.sqs("AK1", "hush-one").list_queues()
    keys.write_text(KEYS.replace("AK1", "AK2").replace("hush-one", "hush-two"))
    server.send_signal(signal.SIGHUP)
    server.wait_for("read 1 account with 1 key from ")
    server.sqs("AK2", "hush-two").list_queues()
    with pytest.raises(ClientError):
        server.sqs("AK1", "hush-one").list_queues()
    assert server.stop() == 0
    assert "hush" not in server.told()


def ask_refused(asked: str | urllib.request.Request) -> None:
    """Send a request that the server refuses."""
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(asked)
    caught.value.close()


def test_the_log_tells_who_was_refused(serve: Serve, keys: Path) -> None:
    keys.write_text(KEYS + 'grants = [{ actions = ["send"] }]\n')
    server = serve("--credentials", str(keys)).ready()
    for key, secret in (("AK1", "hush-one"), ("AK1", "hush-two"), ("hush-one", "AK1")):
        with pytest.raises(ClientError):
            server.sqs(key, secret).purge_queue(QueueUrl=f"{server.url}/111111111111/orders")
    azure = server.wait_for("azure listens on ").split()[-1]
    asked = "POST / AmazonSQS.PurgeQueue from 127.0.0.1"
    server.wait_for(f"sqs: AK1 may not purge: {asked} by AK1 of 111111111111/us-east-1/orders")
    server.wait_for(f"sqs: {asked} by AK1: refused with 403: ")
    server.wait_for(f"sqs: {asked}: refused with 403: ")
    arns = [f"arn:aws:sqs:us-east-1:111111111111:{number}" for number in range(10)]
    policy = json.dumps({"redrivePermission": "allowAll", "sourceQueueArns": arns})
    with pytest.raises(ClientError):
        server.sqs("AK1", "hush-one").create_queue(QueueName="q", Attributes={"RedriveAllowPolicy": policy})
    server.wait_for("You can specify source queue ARNs only when the permission type is byQueue.")
    ask_refused(f"{azure}/example/a?comp=metadata")
    server.wait_for("azure: GET /example/a from 127.0.0.1: refused with 400: MissingRequiredHeader: An HTTP header")
    batch = {"Action": "SendMessageBatch", "QueueUrl": f"{server.url}/111111111111/orders"}
    empty = AWSRequest("GET", f"{server.url}/", params=batch)
    SigV4QueryAuth(Credentials("AK1", "hush-one"), "sqs", "us-east-1").add_auth(empty)
    ask_refused(str(empty.url))
    server.wait_for("by AK1: refused with 400: AWS.SimpleQueueService.EmptyBatchRequest: ")
    ask_refused(urllib.request.Request(f"{server.url}/?Action=a", headers={"Authorization": "hush"}))
    server.wait_for("Unsupported AWS 'algorithm'")
    buckets = AWSRequest("GET", f"{server.url}/")  # as boto3's S3 sends it if AWS_ENDPOINT_URL is this port
    SigV4Auth(Credentials("AK1", "hush-one"), "s3", "us-east-1").add_auth(buckets)
    ask_refused(urllib.request.Request(str(buckets.url), headers=dict(buckets.headers)))
    told = server.wait_for("sqs: GET / signed for s3 from 127.0.0.1 by AK1: refused with 404: ")
    assert told.endswith("<UnknownOperationException/>")
    assert server.stop() == 0
    assert "hush" not in server.told()


def test_the_log_tells_who_was_refused_by_a_signature_in_the_query_string(serve: Serve, keys: Path) -> None:
    keys.write_text(KEYS.replace("AK1", "AK+1@shop"))
    server = serve("--credentials", str(keys)).ready()
    for key, secret in (("AK+1@shop", "hush-two"), ("hush-one", "AK+1@shop")):
        request = AWSRequest("GET", f"{server.url}/", params={"Action": "ListQueues", "QueueNamePrefix": "hush-name"})
        SigV4QueryAuth(Credentials(key, secret), "sqs", "us-east-1").add_auth(request)
        ask_refused(str(request.url))
    asked = "GET / ListQueues from 127.0.0.1"
    server.wait_for(f"sqs: {asked} by AK+1@shop: refused with 403: ")
    server.wait_for(f"sqs: {asked}: refused with 403: ")
    mail = AWSRequest("GET", f"{server.url}/", params={"Action": "ListTopics"})
    SigV4QueryAuth(Credentials("AK+1@shop", "hush-one"), "sns", "us-east-1").add_auth(mail)
    ask_refused(str(mail.url))
    server.wait_for("sqs: GET / ListTopics signed for sns from 127.0.0.1 by AK+1@shop: refused with 403: ")
    assert server.stop() == 0
    assert "hush" not in server.told()


def test_an_issuer_has_its_keys_read_again_on_sighup(serve: Serve, keys: Path, tmp_path: Path) -> None:
    issued = tmp_path / "issued.json"
    issued.write_text(json.dumps({"keys": [ECKey.generate_key("P-256").as_dict(private=False)]}))
    issuer = ("--azure-issuer", "https://login.example", "--azure-issuer-keys", str(issued))
    server = serve("--credentials", str(keys), *issuer).ready()
    server.send_signal(signal.SIGHUP)
    server.wait_for(f"read the issuer's keys again from {issued}")
    issued.unlink()
    server.send_signal(signal.SIGHUP)
    server.wait_for("the issuer's keys stay as they were")
    assert server.stop() == 0


def test_declared_queues_are_there_and_stay_as_they_are(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "queues.toml"
    path.write_text(
        '[[queue]]\nname = "orders"\nvisibility_timeout = "45s"\n'
        'dead_letter = { queue = "dead", receive_count_max = 3 }\n[[queue]]\nname = "dead"\n'
    )
    for _ in range(2):
        server = serve("--queues", str(path)).ready()
        url = server.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
        got = server.sqs().get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert got["VisibilityTimeout"] == "45"
        assert "dead" in got["RedrivePolicy"]
        server.stop()
    assert kinds(server.data) == ["queue_created", "queue_created"]
    path.write_text('[[queue]]\nname = "orders"\nvisibility_timeout = "50s"\n')
    serve("--queues", str(path)).ready().stop()
    assert kinds(server.data)[2:] == ["queue_changed"]


def test_a_declared_queue_that_the_store_refuses_ends_the_start(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "queues.toml"
    path.write_text('[[queue]]\nname = "orders"\ndead_letter = { queue = "none", receive_count_max = 3 }\n')
    server = serve("--queues", str(path))
    assert server.ended() == 2
    assert "none" in server.told()
    assert "Traceback" not in server.told()


def test_a_parked_receive_is_answered_at_shutdown(serve: Serve, loop: dict[str, str]) -> None:
    server = serve(**loop).ready()
    url = server.sqs().create_queue(QueueName="orders")["QueueUrl"]
    poll = HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    asked = urlencode({"Action": "ReceiveMessage", "QueueUrl": url, "WaitTimeSeconds": "20"})
    poll.request("POST", "/", asked, {"Content-Type": "application/x-www-form-urlencoded"})
    # The poll's bytes were there before this request's, and one loop reads both: when this is answered, it is parked.
    server.sqs().list_queues()
    assert server.stop() == 0
    answer = poll.getresponse()
    assert answer.status == 200
    assert b"<Message>" not in answer.read()
    poll.close()


def test_a_receive_parked_by_the_admin_port_is_answered_at_shutdown(serve: Serve, loop: dict[str, str]) -> None:
    server = serve(**loop).ready()
    server.sqs().create_queue(QueueName="orders")
    address, bearer = urlsplit(server.admin).netloc, (server.data / "admin-token").read_text().strip()
    poll = HTTPConnection(address, timeout=30)
    headers = {"Authorization": f"Bearer {bearer}"}
    poll.request("POST", "/api/v1/queues/000000000000/us-east-1/orders/receive", '{"wait_us": 20000000}', headers)
    while "veilmq_waiters 1.0" not in urllib.request.urlopen(server.admin + "/metrics", timeout=10).read().decode():
        pass
    assert server.stop() == 0
    answer = poll.getresponse()
    assert (answer.status, json.loads(answer.read())) == (200, {"messages": []})
    assert "cut off" not in server.told()
    assert "Traceback" not in server.told()
    poll.close()


def test_a_slow_reader_of_a_backup_is_cut_off_at_shutdown(serve: Serve, loop: dict[str, str]) -> None:
    server = serve(**loop).ready()
    sqs = server.sqs()
    url = sqs.create_queue(QueueName="orders")["QueueUrl"]
    for _ in range(40):
        sqs.send_message(QueueUrl=url, MessageBody="x" * 500_000)
    bearer, host = (server.data / "admin-token").read_text().strip(), urlsplit(server.admin)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        slow.connect((host.hostname, host.port))
        slow.sendall(b"POST /api/v1/backup HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n")
        slow.sendall(f"Authorization: Bearer {bearer}\r\n\r\n".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert server.stop() == 0
    assert "admin: connections cut off, not done within 2 s: 1" in server.told()
    assert not [line for line in server.logs if line.get("level") == "error" or "traceback" in line]


def test_a_second_signal_does_not_wait_for_slow_clients(serve: Serve, loop: dict[str, str]) -> None:
    server = serve("--body-deadline-s", "600", "--shutdown-deadline-s", "600", **loop).ready()
    server.sqs().create_queue(QueueName="orders")
    host = urlsplit(server.url)
    with socket.create_connection((host.hostname, host.port)) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        server.sqs().list_queues()
        server.send_signal(signal.SIGTERM)
        server.wait_for("shutting down")
        server.send_signal(signal.SIGTERM)
        assert server.ended() == -signal.SIGTERM
    again = serve().ready()
    assert len(again.sqs().list_queues()["QueueUrls"]) == 1


def test_a_store_that_fails_ends_the_server_with_its_own_code(serve: Serve) -> None:
    server = serve().ready()
    sqs = server.sqs()
    url = sqs.create_queue(QueueName="orders")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="acknowledged")
    # From now on the system refuses what the process writes into a file (EFBIG), and SQLite reports an I/O error.
    # A write of its own may end the server before it has the second send.
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    with pytest.raises((ClientError, EndpointConnectionError, HTTPClientError)) as refused:
        sqs.send_message(QueueUrl=url, MessageBody="refused")
    if isinstance(refused.value, ClientError):
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] >= 500
    assert server.ended() == 5
    assert "veilmq check" in server.told()
    again = serve().ready()
    url = again.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
    got = again.sqs().receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    assert "acknowledged" in {message["Body"] for message in got}


def test_tls_is_on_every_port(serve: Serve, tmp_path: Path, loop: dict[str, str]) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    server = serve("--tls-cert", str(certificate), "--tls-key", str(key), **loop).ready()
    trust = ssl.create_default_context(cafile=str(certificate))
    for url in (server.admin + "/health/live", server.url + "/?Action=ListQueues"):
        assert url.startswith("https://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=10, context=trust) as answer:
            assert answer.status == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_a_handshake_that_never_comes_is_dropped_by_the_admin_port(
    serve: Serve, tmp_path: Path, loop: dict[str, str]
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    server = serve("--tls-cert", str(certificate), "--tls-key", str(key), **loop).ready()
    address = urlsplit(server.admin)
    with socket.create_connection((address.hostname, address.port), timeout=2 * HEAD_S) as silent:
        assert silent.recv(1) == b""
    assert server.stop() == 0


@pytest.mark.slow
def test_handshakes_that_never_come_keep_nobody_from_the_admin_port(serve: Serve, tmp_path: Path) -> None:
    """And they take a bounded number of the open files that the data ports need: the oldest ones are dropped."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    server = serve("--tls-cert", str(certificate), "--tls-key", str(key)).ready()
    address = urlsplit(server.admin)
    with ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection((address.hostname, address.port), timeout=HEAD_S / 2))
            for _ in range(400)
        ]
        assert [each.recv(1) for each in silent[:100]] == [b""] * 100
        trust = ssl.create_default_context(cadata=CERTIFICATE)
        trust.check_hostname = False
        for _ in range(1_100):  # closed with an answer unread: each stayed until the garbage collector came
            with (
                socket.create_connection((address.hostname, address.port), timeout=HEAD_S) as plain,
                trust.wrap_socket(plain) as client,
            ):
                client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 200"
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.stop() == 0


def test_a_kill_loses_nothing_acknowledged(serve: Serve) -> None:
    server = serve().ready()
    url = server.sqs().create_queue(QueueName="orders")["QueueUrl"]
    sent = {server.sqs().send_message(QueueUrl=url, MessageBody=f"{n}")["MessageId"] for n in range(5)}
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.ended() == -signal.SIGKILL
    again = serve().ready()
    url = again.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
    got = again.sqs().receive_message(QueueUrl=url, MaxNumberOfMessages=10)["Messages"]
    assert {message["MessageId"] for message in got} == sent


def test_deleted_files_are_copied_out_of_the_server_as_the_page_says(serve: Serve, run: Run, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"^    OLD=.*?\n(?=\n)", page, re.MULTILINE | re.DOTALL)
    server = serve().ready()
    url = server.sqs().create_queue(QueueName="orders")["QueueUrl"]
    for text in ("done", "waits"):
        server.sqs().send_message(QueueUrl=url, MessageBody=text)
    handle = server.sqs().receive_message(QueueUrl=url)["Messages"][0]["ReceiptHandle"]
    for name in ("veilmq.db", "veilmq.db-wal"):
        (server.data / name).unlink()
    server.wait_for("veilmq.db was deleted or replaced while the server ran")
    here = ("--data", str(server.data))
    for command in (("send", "orders", "no"), ("backup", str(tmp_path / "copy")), ("check",), ("queues", "list")):
        told = run(*command, *here).err
        assert "not done: veilmq.db was deleted or replaced while the server ran" in told
        assert "Do not stop the server, which still has it open: " in told
    assert "Do not stop the server, which still has it open: " in run("upgrade", "--check", *here).err
    (tmp_path / "link").symlink_to(server.data)
    path, pid = f"{Path(sys.executable).parent}:/usr/bin:/bin", str(server.process.pid)
    environment = bare(PATH=path, PID=pid, OLD=f"{tmp_path}/link/", NEW=f"{tmp_path}/new")
    done = subprocess.run(["bash", "-c", block], capture_output=True, text=True, timeout=WAIT_S, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 messages" in done.stdout
    assert "everything is in order" in done.stdout
    os.kill(server.process.pid, signal.SIGKILL)
    again = serve(data=tmp_path / "new").ready()
    url = again.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
    again.sqs().delete_message(QueueUrl=url, ReceiptHandle=handle)
    assert again.sqs().receive_message(QueueUrl=url)["Messages"][0]["Body"] == "waits"


def test_backup_and_check_beside_a_running_server(serve: Serve, veilmq: Any, tmp_path: Path) -> None:
    server = serve().ready()
    url = server.sqs().create_queue(QueueName="orders")["QueueUrl"]
    server.sqs().send_message(QueueUrl=url, MessageBody="order 1")
    done = veilmq("backup", str(tmp_path / "copy"), "--data", str(server.data))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"veilmq restore NEW_DIRECTORY --from {tmp_path}/copy" in done.stdout
    checked = veilmq("check", VEILMQ_DATA=str(server.data))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "balanced" in checked.stdout
    copy = serve(data=tmp_path / "copy").ready()
    url = copy.sqs().get_queue_url(QueueName="orders")["QueueUrl"]
    assert copy.sqs().receive_message(QueueUrl=url)["Messages"][0]["Body"] == "order 1"


def test_help_and_version(veilmq: Any) -> None:
    for arguments, told in (
        (["--help"], "Exit codes"),
        (["serve", "--help"], "--tls-cert"),
        (["serve", "--help"], "\nPorts:\n  --sqs HOST:PORT  "),
        (["work", "--help"], "\nLeases:\n  --lease TIME  "),
        (["events", "--help"], "\nServer:\n  --account ID  "),
        (["events", "--help"], "\nCommands:\n  export  "),
        (["--help"], "Commands:\n  serve       Serve queues over SQS, Azure Queue Storage and MNS until SIGTERM\n"),
        (["--version"], "veilmq "),
    ):
        done = veilmq(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert told in done.stdout
        commands = done.stdout.partition("Commands:")[2]
        assert "..." not in commands  # no sentence is cut
        if arguments == ["--help"]:  # by use, not by name
            rows = commands.partition("\n\n")[0].splitlines()
            assert tuple(row.split()[0] for row in rows if row[2:3].strip()) == _ORDER
    assert veilmq("keys", "new", "--account", "1").returncode == 2
    assert veilmq("check", "--data", "/nonexistent").returncode == 3


@for_each("is_loaded", [False, True])
def test_sqlite_counts_no_memory_unless_it_is_loaded_already(is_loaded: bool) -> None:
    """The program that loaded it may have given it settings, which stay."""
    code = f"""
if {is_loaded}:
    import apsw
from veilmq.store.sqlite.memory import count_no_memory
count_no_memory()
import apsw
from veilmq.store.sqlite.disk import verifier
connection = apsw.Connection(":memory:")
print(verifier()(bytes(4096)), apsw.memory_used() > 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"True {is_loaded}\n"
