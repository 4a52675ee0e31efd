"""A clock that moves: what is due happens, in its order, before the call returns; and only in development mode."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from veilmq.testing.local import LocalServer, ServerProcess


@pytest.fixture
def sqs(veilmq_server: LocalServer) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=veilmq_server.sqs_url,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )


def bodies(sqs: Any, url: str, **how: Any) -> list[str]:
    given = {"MaxNumberOfMessages": 10} | how
    return [message["Body"] for message in sqs.receive_message(QueueUrl=url, **given).get("Messages", [])]


def test_a_lease_of_six_hours_ends_at_once(veilmq_server: LocalServer, sqs: Any) -> None:
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="work")
    assert bodies(sqs, url, VisibilityTimeout=6 * 3600) == ["work"]
    before = veilmq_server.now
    veilmq_server.advance(hours=5, minutes=59)
    assert bodies(sqs, url) == []
    veilmq_server.advance(minutes=1)
    assert bodies(sqs, url) == ["work"]
    with pytest.raises(urllib.error.HTTPError, match="advance_us"):
        veilmq_server.advance(minutes=-1)
    assert 6 * 3600 <= veilmq_server.now - before < 6 * 3600 + 60


def test_whoever_waits_gets_what_becomes_due(veilmq_server: LocalServer, sqs: Any) -> None:
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="late", DelaySeconds=15)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bodies, sqs, url, WaitTimeSeconds=20)
        parked(veilmq_server)
        veilmq_server.advance(hours=1)
        assert waiting.result(timeout=10) == ["late"]


def test_a_wait_that_ends_first_ends_empty(veilmq_server: LocalServer, sqs: Any) -> None:
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="late", DelaySeconds=60)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(bodies, sqs, url, WaitTimeSeconds=20)
        parked(veilmq_server)
        veilmq_server.advance(hours=1)
        assert waiting.result(timeout=10) == []
    assert bodies(sqs, url) == ["late"]


def test_leases_that_end_one_after_the_other_dead_letter_a_message(veilmq_server: LocalServer, sqs: Any) -> None:
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = "arn:aws:sqs:us-east-1:000000000000:dead"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 2})
    url = sqs.create_queue(QueueName="jobs", Attributes={"RedrivePolicy": policy})["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="poison")
    for _ in range(2):
        assert bodies(sqs, url) == ["poison"]
        veilmq_server.advance(seconds=30)
    assert bodies(sqs, url) == []
    assert bodies(sqs, dead) == ["poison"]


def test_what_expires_meanwhile_is_gone(veilmq_server: LocalServer, sqs: Any) -> None:
    url = sqs.create_queue(QueueName="jobs", Attributes={"MessageRetentionPeriod": "3600"})["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="old")
    veilmq_server.advance(hours=1)
    attributes = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert attributes["ApproximateNumberOfMessages"] == "0"


def test_each_test_begins_without_queues(veilmq_server: LocalServer, sqs: Any) -> None:
    assert "QueueUrls" not in sqs.list_queues()
    sqs.create_queue(QueueName="left-behind")
    veilmq_server.reset()
    assert "QueueUrls" not in sqs.list_queues()


def test_settings_of_the_shell_are_not_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VEILMQ_CLUSTER it would join that cluster, whose queues all go between two tests."""
    monkeypatch.setenv("VEILMQ_CLUSTER", "postgresql://nobody@127.0.0.1:1/nowhere")
    monkeypatch.setenv("VEILMQ_CREDENTIALS", "/nowhere")
    with LocalServer.temporary() as server:
        server.advance(seconds=1)


def test_an_interrupt_ends_the_run_as_pytest_does(tmp_path: Path) -> None:
    """Ctrl-C goes to all processes of the terminal: the server ends, too, and cannot be emptied."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "import os, signal, time\n"
        "def test_it(veilmq_server):\n"
        "    veilmq_server.connect('jobs').send('a')\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(test)]
    done = subprocess.run(
        command, cwd=tmp_path, start_new_session=True, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (pytest.ExitCode.INTERRUPTED, ""), done.stdout
    assert "Error" not in done.stdout


def test_with_credentials_the_clock_stands_firm(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text('[[account]]\nid = "111111111111"\n[[account.key]]\nid = "AK"\nsecret = "secret-secret-secret"\n')
    file.chmod(0o600)
    server = ServerProcess(tmp_path, "--credentials", str(file)).start()
    try:
        token = (server.data / "admin-token").read_text().strip()
        request = urllib.request.Request(
            f"{server.admin}/api/v1/clock", b'{"advance_us": 1000000}', {"Authorization": f"Bearer {token}"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        with caught.value as answer:
            assert answer.code == 403
            assert json.load(answer)["error"] == "clock_fixed"
    finally:
        server.stop()


def parked(server: LocalServer) -> None:
    """Return once a receive is parked."""
    while True:
        with urllib.request.urlopen(f"{server.admin_url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        if any(line.startswith("veilmq_waiters") and line.rstrip().endswith(" 1.0") for line in text.splitlines()):
            return
