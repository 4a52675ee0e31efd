"""Declared queues, from our TOML and from ElasticMQ's configuration."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.commands import SERVER
from veilmq.model.settings.queue import QueueKey, QueueSettings, RedrivePolicy, XmlBody
from veilmq.server.auth import Account
from veilmq.server.config import FileInvalid
from veilmq.server.config.elasticmq_file import read as read_elasticmq
from veilmq.server.config.queues_file import Declared, duration_us, read
from veilmq.testing.for_each import for_each

HOME = Account("111111111111", home_region="eu-west-1")


def declared(tmp_path: Path, text: str, name: str = "queues.toml", *accounts: Account) -> Declared:
    path = tmp_path / name
    path.write_text(text)
    return read(path, accounts or (HOME,))


def key(name: str, region: str = "eu-west-1", account: str = "111111111111") -> QueueKey:
    return QueueKey(account, region, name)


TOML = """\
[[queue]]
name = "orders"
visibility_timeout = "45s"
delay = 1.5
retention = "4d"
wait = "20 s"
message_bytes_max = 2048
dead_letter = { queue = "orders-dead", receive_count_max = 3 }
xml_body = "base64"
tags = { team = "shop" }

[[queue]]
name = "orders-dead"

[[queue]]
name = "far.fifo"
account = "222222222222"
region = "us-west-2"
content_deduplication = true
"""


def test_toml(tmp_path: Path) -> None:
    found = declared(tmp_path, TOML)
    dead, orders, far = found.queues
    assert found.warnings == []
    assert dead.create.queue == key("orders-dead")
    assert dead.create.change == {}
    assert orders.create.queue == key("orders")
    assert orders.create.origin == SERVER
    assert orders.create.change == {
        "visibility_timeout_us": 45_000_000,
        "delay_us": 1_500_000,
        "retention_us": 345_600_000_000,
        "wait_us": 20_000_000,
        "message_bytes_max": 2048,
        "redrive": RedrivePolicy(key("orders-dead"), 3),
        "xml_body": XmlBody.BASE64,
        "tags": {"team": "shop"},
    }
    assert orders.change.queue == orders.create.queue
    assert orders.change.change == orders.create.change
    QueueSettings(**orders.create.change)
    assert far.create.queue == key("far.fifo", "us-west-2", "222222222222")
    assert far.create.change == {"fifo": True, "content_deduplication": True}


def test_dead_letter_queues_come_first_along_a_chain(tmp_path: Path) -> None:
    text = "".join(
        f'[[queue]]\nname = "q{number}"\ndead_letter = {{ queue = "q{number + 1}", receive_count_max = 1 }}\n'
        for number in range(5)
    )
    names = [each.create.queue.name for each in declared(tmp_path, text).queues]
    assert names == ["q4", "q3", "q2", "q1", "q0"]


def test_without_a_sole_account_each_queue_names_one(tmp_path: Path) -> None:
    path = tmp_path / "queues.toml"
    path.write_text("".join(f'[[queue]]\nname="a"\naccount="{each}"\n' for each in ("1" * 12, "2" * 12, "3" * 12)))
    accounts = (HOME, Account("2" * 12, home_region="us-west-2"))
    found = read(path, accounts, checks=True)
    assert [each.create.queue for each in found.queues] == [
        key("a"),
        key("a", "us-west-2", "2" * 12),
        key("a", "us-east-1", "3" * 12),
    ]
    (warning,) = found.warnings
    assert "queue a: account 333333333333 is not in the credentials file" in warning
    assert read(path, accounts).warnings == []
    with pytest.raises(FileInvalid, match="several"):
        declared(tmp_path, '[[queue]]\nname="a"', "queues.toml", *accounts)


def test_what_elasticmqs_file_includes_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "custom.conf"
    text = 'include classpath("application.conf")\ninclude "more.conf"\nqueues { a {} }\n'
    (warning,) = read_elasticmq(path, text).warnings
    assert warning == f'{path}: line 2: include "more.conf" is left out'


def test_a_duration_goes_as_far_as_the_widest_cloud(tmp_path: Path) -> None:
    """MNS keeps messages for 15 days (CreateQueue, MessageRetentionPeriod), SQS for 14."""
    text = '[[queue]]\nname = "a"\nvisibility_timeout = "12h"\ndelay = "7d"\nretention = "15d"\nwait = "30s"'
    (queue,) = declared(tmp_path, text).queues
    assert queue.create.change == {
        "visibility_timeout_us": 43_200_000_000,
        "delay_us": 604_800_000_000,
        "retention_us": 1_296_000_000_000,
        "wait_us": 30_000_000,
    }


def test_a_setting_that_is_switched_off_is_declared_so(tmp_path: Path) -> None:
    (queue,) = declared(tmp_path, '[[queue]]\nname = "a.fifo"\ncontent_deduplication = false').queues
    assert queue.change.change == {"fifo": True, "content_deduplication": False}
    text = "queues { a.fifo { fifo = true, contentBasedDeduplication = false } }".replace("a.fifo", '"a.fifo"')
    (queue,) = declared(tmp_path, text, "elasticmq.conf").queues
    assert queue.change.change == {"fifo": True, "content_deduplication": False}
    (queue,) = declared(tmp_path, '[[queue]]\nname = "a"\ncontent_deduplication = false').queues
    assert queue.change.change == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("queues.toml", '[[queue]]\nname = "a"'), ("elasticmq.conf", "aws.region = eu-west-1, queues { a { } }")],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str, text: str) -> None:
    (queue,) = declared(tmp_path, "\ufeff" + text, name).queues
    assert queue.create.queue == key("a")
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf\n\n\xff")
    with pytest.raises(FileInvalid, match="line 3: is not UTF-8"):
        read(tmp_path / name, [HOME])


def test_an_alias_is_one_queues_in_each_place(tmp_path: Path) -> None:
    text = '[[queue]]\nname = "A"\nalias = "the-name"\n[[queue]]\nname = "B"\nregion = "{}"\nalias = "the-name"'
    assert len(declared(tmp_path, text.format("us-west-2")).queues) == 2
    with pytest.raises(FileInvalid, match=r"line 7: queue B: alias: the-name is the alias of queue A \(line 3\)"):
        declared(tmp_path, text.format("eu-west-1"))


BAD = [
    ('name = "a"\nvisibility = 3', ["line 3", "queue a", "unknown key visibility", "visibility_timeout"]),
    ('name = "a"\nvisibility_timeout = "30 parsecs"', ["line 3", "queue a", "visibility_timeout", "12h"]),
    ('name = "a"\nvisibility_timeout = "13h"', ["line 3", "0 to 12h"]),
    ('name = "a"\ndelay = -1', ["line 3", "delay"]),
    ('name = "a"\ndelay = nan', ["line 3", "delay"]),
    ('name = "a"\ndelay = inf', ["line 3", "delay"]),
    ('name = "a"\ndelay = true', ["line 3", "delay"]),
    ('name = "a"\nretention = 10', ["retention", "1m to 15d"]),
    ('name = "a"\nmessage_bytes_max = 1', ["line 3", "1024"]),
    ('name = "a b"', ["line 1", "name"]),
    ("delay = 1", ["queue 1", "name"]),
    ('name = "a"\naccount = "1"', ["line 3", "12 digits"]),
    ('name = "a"\nregion = "A"', ["line 3", "region"]),
    ('name = "a"\nfifo = true', ["line 3", ".fifo"]),
    ('name = "a.fifo"\nfifo = false', ["line 3", ".fifo"]),
    ('name = "a"\ncontent_deduplication = true', ["line 3", "FIFO"]),
    ('name = "a"\ndead_letter = { queue = "b" }', ["line 3", "dead_letter", "receive_count_max"]),
    ('name = "a"\ndead_letter = { queue = "b", receive_count_max = 0 }', ["line 3", "1 to 1000"]),
    ('name = "A_1"\nalias = "A-1"', ["line 3", "alias: expected 3 to 63"]),
    ('name = "orders"\nalias = "other"', ["line 3", "alias: expected 3 to 63"]),
    ('name = "a"\ndead_letter = { queue = "a", receive_count_max = 1 }', ["line 3", "another queue"]),
    ('name = "a"\n[[queue]]\nname = "a"', ["line 3", "twice"]),
    (
        'name = "a"\ndead_letter = { queue = "b", receive_count_max = 1 }\n'
        '[[queue]]\nname = "b"\ndead_letter = { queue = "a", receive_count_max = 1 }',
        ["line 1", "circle"],
    ),
    ('name = "a"\ntags = { team = "a\\u0001" }', ["line 3", "queue a: tags: a character of 'a\\x01' is not allowed"]),
    ('name = "a"\ntags = { "\\uFFFE" = "a" }', ["line 3", "tags: a character"]),
    ('name = "a"\n[queue.tags]\n' + "".join(f't{n} = "x"\n' for n in range(51)), ["line 3", "at most 50"]),
    ('name = "a', ["not TOML"]),
    ('name = "a"\n[queues]', ["line 3", "unknown table queues"]),
]


@for_each(("text", "told"), BAD)
def test_bad_toml_is_refused_by_line_and_queue(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(FileInvalid) as refused:
        declared(tmp_path, "[[queue]]\n" + text)
    for part in told:
        assert part in str(refused.value)


def test_single_brackets_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileInvalid, match="two brackets"):
        declared(tmp_path, '[queue]\nname = "a"')


ELASTICMQ = """\
include classpath("application.conf")

// ports
node-address {
  protocol = http
  host = "*"
}
aws {
  region = us-west-2
  accountId = 222222222222
}
queues {
  orders {  # one
    defaultVisibilityTimeout = 10 seconds
    delay = 500 ms
    receiveMessageWait: 0
    deadLettersQueue {
      name = "orders-dead"
      maxReceiveCount = 3 // from 1 to 1000
    }
    fifo = false
    contentBasedDeduplication = false
    copyTo = "audit"
    tags { team = "the shop", tier = 1 }
  }
  orders-dead { }
  "odd_name" { fifo = true, contentBasedDeduplication = true }
}
queues.late.delay = 1 minute
"""


def test_elasticmq(tmp_path: Path) -> None:
    found = declared(tmp_path, ELASTICMQ, "elasticmq.conf")
    assert [each.create.queue for each in found.queues] == [
        key(name, "us-west-2", "222222222222") for name in ("orders-dead", "orders", "odd_name.fifo", "late")
    ]
    dead, orders, odd, late = (each.create for each in found.queues)
    assert dead.change == {}
    assert orders.change == {
        "visibility_timeout_us": 10_000_000,
        "delay_us": 500_000,
        "wait_us": 0,
        "redrive": RedrivePolicy(dead.queue, 3),
        "tags": {"team": "the shop", "tier": "1"},
    }
    assert odd.change == {"fifo": True, "content_deduplication": True}
    assert late.change == {"delay_us": 60_000_000}
    assert ["line 4: node-address" in found.warnings[0], "line 23: queue orders: copyTo" in found.warnings[1]] == [
        True
    ] * 2


def test_what_elasticmq_writes_itself_is_left_out(tmp_path: Path) -> None:
    """Its file of the queues that it keeps (queues-storage)."""
    text = "queues { a { created = 1700000000, lastModified = 1700000001, delay = 5 s } }"
    found = declared(tmp_path, text, "elasticmq.conf")
    assert found.queues[0].create.change == {"delay_us": 5_000_000}
    assert found.warnings == []


@pytest.mark.parametrize("given", ["my-account", "1234", '"acme.dev_1"'])
def test_an_account_id_that_is_not_12_digits_is_an_alias(tmp_path: Path, given: str) -> None:
    found = declared(tmp_path, f"aws {{ accountId = {given} }}\nqueues {{ a {{ }} }}", "elasticmq.conf")
    assert found.account_alias == given.strip('"')
    assert found.queues[0].create.queue == key("a", "elasticmq")
    assert declared(tmp_path, ELASTICMQ, "elasticmq.conf").account_alias is None


@for_each(
    "text",
    [
        "queues\n{\n orders\n # here\n {\n delay\n =\n 5 seconds\n }\n}",
        "queues {\n\u00a0orders\u2007{ delay = 5\u00a0seconds } }",
        'queues."orders" { delay = 5 s }',
        '"queues".ord"ers".delay = "5\\u0020s"',
        'x = [1, {a = [[], "b"]}\n ${y}z\n], y { z = ${?HOME}/a, b = [] [c] }\nqueues { orders { delay = 5 s } }',
        "queues { orders { delay = [1], delay = 5 s } }",
    ],
)
def test_layouts_of_hocon(tmp_path: Path, text: str) -> None:
    """The specification of HOCON, "Whitespace", "Path expressions": only values end with their line."""
    (queue,) = declared(tmp_path, text, "elasticmq.conf").queues
    assert queue.create.queue == key("orders", "elasticmq")
    assert queue.create.change == {"delay_us": 5_000_000}


def test_objects_of_one_name_are_joined_however_deep(tmp_path: Path) -> None:
    """The specification of HOCON, "Duplicate keys"; what is no object stands in between."""
    text = """
        queues { a { tags { x = 1, y = 1, z = "1\\t2" }, delay = 5 s } }
        queues { a { tags { y = 2 } } }
        queues.a.tags.w = 3
        queues { b { delay = 1 s }, b = null, b { fifo = false } }
    """
    a, b = declared(tmp_path, text, "elasticmq.conf").queues
    assert a.create.change == {"delay_us": 5_000_000, "tags": {"x": "1", "y": "2", "z": "1\t2", "w": "3"}}
    assert b.create.change == {}


@for_each(
    ("text", "told"),
    [
        ("queues {\n a {\n colour = red\n }\n}", ["line 3", "queue a: colour", "unknown key", "deadLettersQueue"]),
        ("queues { a { delay = soon } }", ["line 1", "queue a: delay", "duration"]),
        ("queues {\n a { delay = ${x} } }", ["line 2", "queue a: delay: the reference ${x} is not supported"]),
        ("queues {\n a { copyTo = [b] } }", ["line 2", "queue a: copyTo: a list is not supported"]),
        ("queues {\n a = [] }", ["line 2", "queue a: expected {"]),
        ("aws {\n region = ${?R} }", ["line 2", "aws: region: the reference"]),
        ('\naws { accountId = "a/b" }', ["line 2", "accountId", "12 digits"]),
        ("x = [\n1", ["line 1", "without its end"]),
        ("x = 1]", ["line 1", "expected a key, not ']'"]),
        ("x = $y", ["line 1", "'$'"]),
        ("queues { a..b = 1 }", ["cannot read the key"]),
        ("queues." + "a." * 20 + "b = 1", ["too deep"]),
        ("x = " + "[" * 50, ["too deep"]),
        ('x = "\\ud800"', ["line 1", "cannot read"]),
        ("queues { a { fifo = maybe } }", ["true or false"]),
        ("queues { a { tags = x } }", ["expected {"]),
        ("queues { a { delay { } } }", ["expected a value"]),
        ("queues { a = 5 }", ["queue a: expected {"]),
        ("queues = 5", ["queues: expected {"]),
        ("queues { a { deadLettersQueue { name = b } } }", ["maxReceiveCount"]),
        ("queues { a { deadLettersQueue { name = b, maxReceiveCount = x } } }", ["maxReceiveCount", "number"]),
        ("queues { a { delay = 5 s\n", ["line 2", "end of the file"]),
        ("queues { a { } } }", ["line 1", "'}'"]),
        ("queues { a b { } }", ["expected = or {"]),
        ("queues { a { delay = 99 days } }", ["line 1", "delay", "7d"]),
        ("q {" * 50, ["too deep"]),
    ],
)
def test_bad_elasticmq_is_refused_by_line(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(FileInvalid) as refused:
        declared(tmp_path, text, "elasticmq.conf")
    for part in told:
        assert part in str(refused.value)


@given(st.text(alphabet='queus{}[]=:"#/\\ \n,.$a1\t\r-', max_size=200) | st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    lines = text.count("\n") + 1
    try:
        read = read_elasticmq(Path("x.conf"), text)
    except FileInvalid as error:
        told = [error.line]
    else:
        told = list(read.lines)
    assert all(line is not None and 1 <= line <= lines for line in told)


@given(st.text(max_size=30) | st.integers() | st.floats())
def test_any_duration_is_read_or_refused(given: str | float) -> None:
    assert isinstance(duration_us(given), int | None)
