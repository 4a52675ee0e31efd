"""A file of ElasticMQ's, and a client as its documentation has it."""

import base64
import json
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import boto3
from azure.storage.queue import QueueServiceClient
from tests.cli.conftest import Serve

from veilmq.server.auth import _DEVELOPMENT_SECRET, DEVELOPMENT_NAME

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIGURATION = """
include classpath("application.conf")
aws { accountId = "my-account" }
queues { orders { created = 1700000000, lastModified = 1700000000 } }
"""


def test_a_client_finds_its_queue(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "custom.conf"
    path.write_text(CONFIGURATION)
    server = serve("--queues", str(path)).ready()
    sqs = boto3.resource(
        "sqs",
        endpoint_url=server.url,
        region_name="elasticmq",
        aws_secret_access_key="x",
        aws_access_key_id="x",
        use_ssl=False,
    )
    queue = sqs.get_queue_by_name(QueueName="orders")
    assert queue.attributes["QueueArn"] == "arn:aws:sqs:elasticmq:000000000000:orders"
    sqs.Queue(f"{server.url}/my-account/orders").send_message(MessageBody="by its own URL")
    (message,) = queue.receive_messages()
    assert message.body == "by its own URL"
    # ElasticMQ heeds no region: a client that signs for another one finds the same queues.
    assert server.sqs().list_queues()["QueueUrls"] == [server.sqs().get_queue_url(QueueName="orders")["QueueUrl"]]
    assert server.stop() == 0


def test_its_region_is_said_and_everybody_looks_there_and_in_its_account(
    serve: Serve, veilmq: Run, tmp_path: Path
) -> None:
    path = tmp_path / "custom.conf"
    path.write_text("aws { accountId = 123456789012 }, queues { orders {}, others {} }")
    server = serve("--queues", str(path)).ready()
    assert server.sqs().get_queue_url(QueueName="orders")["QueueUrl"] == f"{server.url}/123456789012/orders"
    said = f"queues that {path} declares: 2 in region elasticmq (the file names no aws.region)"
    assert said in server.told()
    where = ("--admin", server.admin, "--token-file", str(server.data / "admin-token"))
    for account in ((), ("--account", "123456789012")):
        listed = veilmq("queues", "list", "--json", *account, *where)
        assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == ["orders", "others"]
    azure = server.wait_for("azure listens on ").split()[-1]
    mns = server.wait_for("mns listens on ").split()[-1]
    name, key = DEVELOPMENT_NAME, base64.b64encode(_DEVELOPMENT_SECRET).decode()
    with QueueServiceClient(f"{azure}/{name}", {"account_name": name, "account_key": key}) as service:
        assert [queue.name for queue in service.list_queues()] == ["orders", "others"]
    with urllib.request.urlopen(f"{mns}/queues", timeout=30) as answer:
        assert answer.read().count(b"<Queue>") == 2
    unsigned = urllib.request.Request(f"{server.url}?Action=ListQueues")
    with urllib.request.urlopen(unsigned, timeout=30) as answer:
        assert b"/orders<" in answer.read()
    assert server.stop() == 0


def test_an_empty_list_names_the_regions_that_have_some(serve: Serve, veilmq: Run, tmp_path: Path) -> None:
    path = tmp_path / "custom.conf"
    path.write_text('aws { region = "eu-west-1" }\nqueues { orders {} }')
    server = serve("--queues", str(path)).ready()
    assert "1 in region eu-west-1\n" in server.told() + "\n"
    where = ("--admin", server.admin, "--token-file", str(server.data / "admin-token"))
    assert veilmq("queues", "create", "own", "--region", "us-east-1", *where).returncode == 0
    nothing = "no queues in account 000000000000, region us-west-2: but there are in eu-west-1, us-east-1: "
    for arguments in (where, (*where, "--json")):
        listed = veilmq("queues", "list", "--region", "us-west-2", *arguments)
        assert (listed.returncode, listed.stdout) == (0, "")
        assert listed.stderr == f"{nothing}say --region eu-west-1, or --all\n"
    assert "but there" not in veilmq("queues", "list", "--prefix", "none", *where).stderr
    assert "but there" not in veilmq("queues", "list", "--account", "111111111111", *where).stderr
    assert server.stop() == 0
    path.write_text("queues { orders {} }")
    assert serve("--queues", str(path)).ready().stop() == 0
    listed = veilmq("queues", "list", "--region", "us-west-2", "--data", str(server.data))
    assert "but there are in elasticmq, eu-west-1, us-east-1: say" in listed.stderr
