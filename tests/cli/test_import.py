"""`veilmq import`: queues of ElasticMQ, Azurite, `aws` and SQS endpoints, printed as a queues file and created."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.azurite import azurite
from tests.support.commands import Run
from tests.support.contract.stage import TESTER

from veilmq.client.adapters.connect import connect, connect_account
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.messages import Message, Template
from veilmq.model.commands import CreateQueue
from veilmq.model.instant import Instant
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT
from veilmq.model.settings.queue import QueueKey
from veilmq.server.auth import Account
from veilmq.server.config import queues_file
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.for_each import for_each
from veilmq.testing.local import LocalServer

ELASTICMQ = """
aws { region = eu-west-1 }
queues {
  orders {
    defaultVisibilityTimeout = 45 seconds
    delay = 5 seconds
    receiveMessageWait = 0 seconds
    deadLettersQueue { name = "orders-dead", maxReceiveCount = 3 }
    copyTo = "audit"
    tags { team = shop }
  }
  orders-dead { }
}
"""
ARN = "arn:aws:sqs:eu-west-1:123456789012:"
ATTRIBUTES = {
    "Attributes": {
        "QueueArn": ARN + "orders.fifo",
        "VisibilityTimeout": "45",
        "MaximumMessageSize": "262144",
        "MessageRetentionPeriod": "86400",
        "DelaySeconds": "0",
        "ReceiveMessageWaitTimeSeconds": "20",
        "FifoQueue": "true",
        "ContentBasedDeduplication": "true",
        "DeduplicationScope": "messageGroup",
        "RedrivePolicy": json.dumps({"deadLetterTargetArn": ARN + "dead.fifo", "maxReceiveCount": 4}),
        "Policy": "{}",
    }
}
DEAD = {"Attributes": {"QueueArn": ARN + "dead.fifo", "FifoQueue": "true"}}


def test_elasticmqs_file_becomes_a_queues_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "custom.conf").write_text(ELASTICMQ)
    ended = run("import", "custom.conf", "--into", "queues.toml")
    assert (ended.code, "VeilMQ forwards no messages" in ended.err) == (0, True)
    both = run("import", "custom.conf", "--into", "queues.toml", "--to", "veil://127.0.0.1:1/")
    assert (both.code, both.err.startswith("veilmq: --into writes a file")) == (2, True)
    ours, theirs = (
        queues_file.read(tmp_path / name, [Account(DEVELOPMENT_ACCOUNT)]).queues
        for name in ("queues.toml", "custom.conf")
    )
    assert [each.create for each in ours] == [each.create for each in theirs]
    assert [each.create.queue.name for each in ours] == ["orders-dead", "orders"]


def test_a_file_that_names_no_region_gives_one_without(run: Run, tmp_path: Path) -> None:
    """The default of ElasticMQ's files is no region that clients sign for."""
    (tmp_path / "a.conf").write_text("queues { orders { } }")
    assert tomllib.loads(run("import", "a.conf").out) == {"queue": [{"name": "orders"}]}
    (tmp_path / "b.conf").write_text("aws { region = eu-west-1 }\nqueues { orders { } }")
    assert 'region = "eu-west-1"' in run("import", "b.conf").out
    (tmp_path / "empty.conf").touch()
    assert run("import", "empty.conf") == (0, "", "nothing to bring: no queue was found\n")
    beside = run("import", "a.conf", "--prefix", "x")
    assert beside == (0, "", "nothing to bring: no queue whose name begins with x was found\n")


def test_a_time_keeps_its_digits(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[[queue]]\nname = "a"\nretention = 12345.678\n')
    assert "retention = 12345.678\n" in run("import", "a.toml").out


def test_credentials_that_nobody_has_are_told(
    run: Run, veilmq_server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    ended = run("import", f"{veilmq_server.sqs_url.replace('http', 'sqs', 1).rstrip('/')}/?tls=0")
    assert (ended.code, ended.err.startswith("veilmq: SOURCE: no credentials\n  Name them in the URL")) == (2, True)


def test_what_aws_prints_becomes_a_queues_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "queues.json").write_text(f"{json.dumps(ATTRIBUTES, indent=4)}\n{json.dumps(DEAD)}\n")
    ended = run("import", "queues.json")
    dead, orders = tomllib.loads(ended.out)["queue"]
    assert dead == {"name": "dead.fifo", "region": "eu-west-1"}
    assert orders == {
        "name": "orders.fifo", "region": "eu-west-1", "visibility_timeout": 45, "delay": 0, "retention": 86_400,
        "wait": 20, "message_bytes_max": 262_144, "dead_letter": {"queue": "dead.fifo", "receive_count_max": 4},
        "content_deduplication": True,
    }  # fmt: skip
    assert "queue orders.fifo: its access policy" in ended.err
    assert "queue orders.fifo: DeduplicationScope messageGroup" in ended.err


@for_each("policy", ["null", "[]", '{"maxReceiveCount": 1e400}'])
def test_a_policy_that_is_none_is_refused(run: Run, tmp_path: Path, policy: str) -> None:
    (tmp_path / "queues.json").write_text(json.dumps({"Attributes": {**DEAD["Attributes"], "RedrivePolicy": policy}}))
    ended = run("import", "queues.json")
    assert (ended.code, "expected the Attributes of a queue" in ended.err) == (2, True), ended.err


def test_an_endpoints_queues_are_created_at_another(run: Run, tmp_path: Path, veilmq_server: LocalServer) -> None:
    with veilmq_server.account() as there:
        there.create("dead")
        wanted = Template(visibility_timeout=77, dead_letter_queue="dead", receive_count_max=2, tags={"a": "b"})
        there.create("orders", wanted)
    source = f"{veilmq_server.sqs_url.replace('http://', 'sqs://any:any@', 1).rstrip('/')}/?tls=0"
    to = f"veil://{tmp_path / 'data'}"
    assert run("import", source, "--to", f"{to}?create=1").out == "created 2 of 2 queues\n"
    (orders,) = run("queues", "list", "--data", str(tmp_path / "data"), "--prefix", "orders", "--json").json
    assert (orders["settings"]["visibility_timeout_us"], orders["settings"]["tags"]) == (77_000_000, {"a": "b"})
    assert orders["settings"]["redrive"]["receive_count_max"] == 2
    assert run("import", source, "--to", to).out == "created 0 of 2 queues\n"
    with connect_account(to) as account:
        account.delete("orders")
        account.create("orders")
        account.delete("dead")
    store = SqliteStore(tmp_path / "data")
    key = next(key for key in store.reader.queues if key.name == "orders")
    aliased = CreateQueue(queue=QueueKey(key.account, key.region, "A_1"), origin=TESTER, change={"alias": "dead"})
    store.apply([aliased], Instant(store.mark + 1))
    store.commit()
    store.close()
    again = run("import", source, "--to", to)
    assert (again.code, "left alone: queue orders exists with another" in again.err) == (1, True)
    assert "left alone: queue dead is another queue's alias" in again.err
    large = {"Attributes": {"QueueArn": f"{ARN}large", "MaximumMessageSize": "1048576"}}
    (tmp_path / "large.json").write_text(json.dumps(large))
    of_azure = f"{veilmq_server.azure_url.replace('http', 'azure', 1).rstrip('/')}/devstoreaccount1/?tls=0"
    of_mns = f"{veilmq_server.mns_url.replace('http://', 'mns://a:b@', 1)}/"
    for where, created in ((of_azure, 1), (of_mns, 0)):
        brought = run("import", "large.json", "--to", where)
        assert brought.out == f"created {created} of 1 queues\n", brought
        assert "not brought: queue large: its limit of 1048576 bytes: a message has at most 65536 there" in brought.err
    (tmp_path / "tagged.toml").write_text('[[queue]]\nname = "large"\ntags = { team = "shop" }\n')
    tagged = run("import", "tagged.toml", "--to", of_azure)
    assert tagged.err == "left alone: queue large exists with another value of the tag team\n"


@pytest.mark.slow
def test_azurites_database_is_read_with_its_messages(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "azurite"
    with azurite("queue", kept) as url:
        where = f"{url.replace('http', 'azure', 1)}/devstoreaccount1/orders?tls=0&create=1"
        with connect(where, template=Template(tags={"team": "shop"})) as queue:
            queue.send_batch(["plain", "with <b> & ä", Message("later", delay=600), "gone", "held"])
            for message in queue.receive(4, lease=300):
                if message.body == "gone":
                    queue.delete(message.handle)
    (orders,) = tomllib.loads(run("import", str(kept)).out)["queue"]
    assert (orders["name"], orders["tags"]["team"]) == ("orders", "shop")
    ended = run("import", str(kept), "--to", f"veil://{tmp_path / 'data'}?create=1", "--messages")
    assert (ended.code, ended.out) == (0, "created 1 of 1 queues, sent 4 messages\n")
    with connect(f"veil://{tmp_path / 'data'}?queue=orders") as queue:
        assert queue.stats().delayed == 1
        assert sorted(message.body for message in queue.receive(10)) == ["held", "plain", "with <b> & ä"]


def test_a_message_that_is_refused_does_not_keep_back_the_others(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "azurite"
    bodies = ["small"] * 150 + ["x" * 3_000] + ["last"]
    (kept / "__queuestorage__").mkdir(parents=True)
    (kept / "__queuestorage__" / "extent").write_text("".join(bodies))
    whose = {"accountName": "devstoreaccount1", "queueName": "orders", "dequeueCount": 0, "timeNextVisible": 0}
    starts = itertools.accumulate(map(len, bodies), initial=0)
    messages = [
        whose | {"expirationTime": "2999-01-01T00:00:00Z", "persistency": {"id": "e", "offset": at, "count": len(body)}}
        for at, body in zip(starts, bodies, strict=False)
    ]
    tables = {
        "__azurite_db_queue__.json": {
            "$QUEUES_COLLECTION$": [{"accountName": "devstoreaccount1", "name": "orders"}],
            "$MESSAGES_COLLECTION$": messages,
        },
        "__azurite_db_queue_extent__.json": {"$EXTENTS_COLLECTION$": [{"id": "e", "path": "extent"}]},
    }
    for name, collections in tables.items():
        rows = [{"name": each, "data": data} for each, data in collections.items()]
        (kept / name).write_text(json.dumps({"collections": rows}))
    with EmbeddedAccount(tmp_path / "data") as account:
        account.create("orders", Template(message_bytes_max=2_000))
    ended = run("import", str(kept), "--to", f"veil://{tmp_path / 'data'}", "--messages")
    assert (ended.code, ended.out) == (1, "created 0 of 1 queues, sent 151 messages, refused 1\n")
    assert "refused: queue orders: 1 message: MessageTooLarge" in ended.err
    with connect(f"veil://{tmp_path / 'data'}?queue=orders") as queue:
        assert queue.stats().visible == 151


def test_a_file_names_no_dead_letter_queue_that_it_lacks(run: Run, tmp_path: Path) -> None:
    policy = {"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:999999999999:dead", "maxReceiveCount": 3}
    orders = {"QueueArn": ARN + "orders", "RedrivePolicy": json.dumps(policy)}
    own = {"QueueArn": ARN + "own", "RedrivePolicy": json.dumps(policy | {"deadLetterTargetArn": ARN + "dead"})}
    dead = {"QueueArn": ARN + "dead"}
    (tmp_path / "queues.json").write_text("\n".join(json.dumps({"Attributes": each}) for each in (own, orders, dead)))
    whole = run("import", "queues.json")
    assert [each["name"] for each in tomllib.loads(whole.out)["queue"] if "dead_letter" in each] == ["own"]
    assert (
        f"queue orders: its dead-letter queue, of another account or region: {policy['deadLetterTargetArn']}"
        in whole.err
    )
    ended = run("import", "queues.json", "--prefix", "o", "--into", "queues.toml")
    assert "queue own: its dead-letter queue dead, which is not among those that are brought\n" in ended.err
    declared = queues_file.read(tmp_path / "queues.toml", [Account(DEVELOPMENT_ACCOUNT)])
    assert [each.create.change.get("redrive") for each in declared.queues] == [None, None]


def test_queues_that_share_a_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    def entry(name: str, region: str, seconds: int, more: str = "") -> str:
        return f'[[queue]]\nname = "{name}"\nregion = "{region}"\nvisibility_timeout = {seconds}\n{more}\n'

    to_dead = 'dead_letter = { queue = "dead", receive_count_max = 2 }'
    (tmp_path / "a.toml").write_text(
        entry("dead", "eu-west-1", 10)
        + entry("orders", "eu-west-1", 77)
        + entry("orders", "us-east-1", 11, to_dead)
        + entry("dead", "us-east-1", 12)
        + entry("dead", "us-east-1", 13, 'account = "111111111111"')
    )
    ended = run("import", "a.toml", "a.toml")
    queues = [(each["name"], each["region"], each["visibility_timeout"]) for each in tomllib.loads(ended.out)["queue"]]
    assert sorted(queues) == [
        ("dead", "eu-west-1", 10), ("dead", "us-east-1", 12), ("orders", "eu-west-1", 77), ("orders", "us-east-1", 11),
    ]  # fmt: skip
    assert queues.index(("dead", "us-east-1", 12)) < queues.index(("orders", "us-east-1", 11))
    assert "queue dead: another one of this name in us-east-1 is brought\n" in ended.err
    assert ended.err.count("another one") == 2, "what is the same is no other one"
    dead_letters = 'deadLettersQueue { name = "dead", maxReceiveCount = 2 }'
    (tmp_path / "plain.conf").write_text(f"queues {{ orders {{ {dead_letters} }} }}")
    ended = run("import", "plain.conf", "a.toml")
    queues = tomllib.loads(ended.out)["queue"]
    assert [each.get("region") for each in queues if each["name"] == "orders"] == [None, "eu-west-1"], "us-east-1"
    assert [each["dead_letter"]["queue"] for each in queues if "dead_letter" in each] == ["dead"]
    (tmp_path / "eu.conf").write_text(
        f"aws {{ region = eu-west-1 }} queues {{ orders {{ {dead_letters} }}, dead {{ }} }}"
    )
    (tmp_path / "us.toml").write_text(entry("dead", "us-east-1", 12))
    ended = run("import", "eu.conf", "us.toml", "--to", f"veil://{tmp_path}/data?create=1")
    assert ended.out == "created 2 of 2 queues\n", ended.err
    assert ended.err == (
        "not brought: queue dead: it is in eu-west-1, and the one in us-east-1 is brought\n"
        "queues of eu-west-1 go to us-east-1: ?region= in --to names another region\n"
    )
    (tmp_path / "b.toml").write_text(entry("orders", "us-east-1", 13, 'account = "111111111111"'))
    assert run("import", "b.toml").err == "not brought: queue orders: its account 111111111111\n"


@for_each(
    ("name", "content", "said"),
    [
        ("gone.conf", None, "gone.conf: cannot be read: No such file"),
        ("a.json", "{", "a.json: is not the JSON that `aws sqs` prints"),
        ("a.json", '{"QueueUrls": []}', "a.json: expected the Attributes of a queue"),
        ("a.json", '{"Attributes": {"QueueArn": "orders"}}', "a.json: expected the Attributes of a queue"),
        *[
            (
                "a.json",
                json.dumps({"Attributes": {"QueueArn": ARN + "a", "VisibilityTimeout": each}}),
                "a.json: expected the",
            )
            for each in ("nan", "inf")
        ],
        (
            "__azurite_db_queue__.json",
            '{"collections": [{"name": "$QUEUES_COLLECTION$", "data": [{"name": "orders"}]}]}',
            "__azurite_db_queue__.json: is not a database of Azurite",
        ),
        ("a.conf", "queues { orders { delay = soon } }", "a.conf: line 1: queue orders: delay: expected a duration"),
        ("__azurite_db_queue__.json", "[]", "__azurite_db_queue__.json: is not a database of Azurite"),
    ],
)
def test_what_cannot_be_read_is_named(run: Run, tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    ended = run("import", name, "--into", "queues.toml")
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "queues.toml").exists()


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [("a.conf", 0, '[[queue]]\nname = "orders"'), ("sqs://x:x@127.0.0.1:9/?tls=0", 2, "pip install 'veilmq[sqs]'")],
)
def test_only_sqs_needs_its_sdk(tmp_path: Path, source: str, code: int, said: str) -> None:
    (tmp_path / "a.conf").write_text("queues { orders { } }")
    hidden = "import sys; sys.modules['botocore'] = sys.modules['boto3'] = None; from veilmq.cli import main; main()"
    command = [sys.executable, "-c", hidden, "import", source]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.conf", "--messages"], "--messages: where to?"),
        (["a.conf", "--to", "veil://127.0.0.1:9/name"], "--to: names a queue"),
        (["azure://127.0.0.1:9/devstoreaccount1/"], "SOURCE: settings are read over sqs://"),
    ],
)
def test_wrong_options_are_refused(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "a.conf").write_text("queues { orders { } }")
    ended: Any = run("import", *arguments)
    assert (ended.code, said in ended.err) == (2, True), ended.err
