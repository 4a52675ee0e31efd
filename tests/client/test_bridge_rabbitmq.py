"""A bridge from and to RabbitMQ: what becomes of a message's parts, and on a real broker moves, copies and kills.

The broker is Debian's package, which starts one of its own when it is installed: `make rabbitmq` installs it and runs
these tests; elsewhere those that need it are skipped.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pika
import pytest
from tests.support.ports import kept_ports

from veilmq.client.adapters.connect import connect
from veilmq.client.bridge import Bridge, Options
from veilmq.client.bridge.carrying import carried
from veilmq.client.bridge.rabbitmq import CAPABILITIES, RabbitAccount, open_rabbitmq, properties_of, received_of
from veilmq.client.messages import Message
from veilmq.client.queue import Queue
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.testing.for_each import for_each
from veilmq.testing.local import VEILMQ, LocalServer

SERVER = next(iter(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server")), None)
START_SECONDS = 60
needs_broker = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVER is None, reason="no RabbitMQ is installed: make rabbitmq"),
    pytest.mark.xdist_group("rabbitmq"),
]


def received(body: bytes = b"x", **properties: Any) -> Any:
    return received_of(pika.BasicProperties(**properties), body, "1:1", 0.0)


class TestParts:
    def test_headers_and_properties_become_attributes(self) -> None:
        headers = {"n": 7, "d": Decimal("0.1"), "raw": b"\0", "flag": True, "deaths": [{"count": 2}]}
        found = received(headers=headers, content_type="text/plain", correlation_id="c", type="invoice", message_id="m")
        assert found.attributes == {
            "n": 7, "d": Decimal("0.1"), "raw": b"\0", "flag": "true", "deaths": '[{"count": 2}]',
            "content_type": "text/plain", "correlation_id": "c", "message_id": "m",
        }  # fmt: skip
        assert found.type == "invoice"

    def test_a_header_is_kept_beside_the_property_of_its_name(self) -> None:
        found = received(headers={"content_type": "h", "app_id": "a"}, content_type="p")
        assert found.attributes == {"content_type": "p", "header_content_type": "h", "app_id": "a"}

    def test_a_queues_name_is_decoded_once(self) -> None:
        assert open_rabbitmq("amqp://h/?queue=a%2520b")[1] == "a%20b"

    def test_and_come_back(self) -> None:
        found = received(
            headers={"n": 7}, content_type="text/plain", content_encoding="gzip", type="invoice", message_id="m",
            priority=5,
        )  # fmt: skip
        back = properties_of(carried(found, CAPABILITIES, None, 0))
        assert (back.headers, back.content_type, back.type) == ({"n": 7}, "text/plain", "invoice")
        assert back.content_encoding == "gzip"
        assert (back.message_id, back.priority, back.delivery_mode) == ("m", 5, 2)

    def test_a_body_that_is_no_text_becomes_base64(self) -> None:
        found = received(b"\xff\0")
        assert (found.body, found.attributes) == ("/wA=", {"content-encoding": "base64"})

    @for_each(("theirs", "ours"), [(None, None), (0, None), (1, 7), (7, 1), (9, 1)])
    def test_the_most_urgent_come_first_on_both_sides(self, theirs: int | None, ours: int | None) -> None:
        assert received(priority=theirs).priority == ours

    def test_an_expiration_counts_from_the_delivery(self) -> None:
        found = received(expiration="60000")
        assert found.expires == pytest.approx(time.time() + 60, abs=5)
        assert properties_of(carried(found, CAPABILITIES, None, time.time())).expiration.startswith(("59", "60"))

    @for_each(("days", "expiration"), [(20, "1728000000"), (49.72, None)])
    def test_the_longest_life_that_rabbitmq_takes_is_32_bits_of_milliseconds(
        self, days: float, expiration: str | None
    ) -> None:
        found = msgspec.structs.replace(received(), expires=days * 86_400)
        assert properties_of(carried(found, CAPABILITIES, None, 0)).expiration == expiration

    @for_each("place", ["h:x/?queue=a", "u:s3cret[@h/?queue=a", "u:s3cret\u2100@h/?queue=a"])
    def test_a_url_that_cannot_be_taken_is_not_quoted(self, place: str) -> None:
        with pytest.raises(ParameterInvalid, match="amqp://USER:PASSWORD@HOST/VHOST") as caught:
            open_rabbitmq(f"amqp://{place}")
        assert "s3cret" not in str(caught.value)
        assert caught.value.__suppress_context__

    def test_message_ids_are_unique_or_not(self) -> None:
        with pytest.raises(ParameterInvalid, match="can only be unique"):
            open_rabbitmq("amqp://h/?queue=a&message_ids=yes")

    def test_messages_that_share_a_message_id_are_two(self) -> None:
        """AMQP lets applications choose it; the second would be dropped at a FIFO target, and deleted unsent."""
        first, second = received(message_id="order-7"), received(message_id="order-7")
        assert first.id != second.id
        unique = {"handle": "1:1", "lease_end": 0.0, "unique_ids": True}
        assert received_of(pika.BasicProperties(message_id="m"), b"x", **unique).id == "m"

    @for_each(
        ("value", "header"),
        [
            (0.5, "0.5"), (2**63, str(2**63)), (-(2**63), -(2**63)), (Decimal("1.50"), Decimal("1.50")),
            (Decimal("2147483648"), "2147483648"), (Decimal("1E+30"), "1E+30"), (Decimal("1E-128"), Decimal("1E-128")),
            (Decimal("1.00000000000000000000000000000000000001"), "1.00000000000000000000000000000000000001"),
        ],
    )  # fmt: skip
    def test_a_number_that_amqp_has_no_type_for_becomes_text(self, value: Any, header: Any) -> None:
        properties = properties_of(Message("x", {"n": value}))
        assert properties.headers == {"n": header}
        assert pika.BasicProperties().decode(b"".join(properties.encode())).headers == {"n": header}

    def test_a_property_that_is_too_long_becomes_a_header(self) -> None:
        properties = properties_of(Message("x", {"reply_to": "r" * 256, "app_id": 7}, deduplication_id="d"))
        assert properties.headers == {"reply_to": "r" * 256, "app_id": 7}
        assert (properties.reply_to, properties.message_id) == (None, "d")


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """Of the broker, of its port mapper, and for its distribution."""
    with kept_ports(3) as ports:
        yield ports


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[str]:
    """The URL of a virtual host. Its port mapper (epmd) is this broker's own and ends with it."""
    assert SERVER is not None
    home, (port, mapper, distribution) = tmp_path_factory.mktemp("rabbitmq"), ports
    (home / "plugins").write_text("[].")
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "RABBITMQ_NODENAME": f"veilmq-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_ADDRESS": "127.0.0.1", "ERL_EPMD_PORT": str(mapper), "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
        "RABBITMQ_LOG_BASE": str(home / "log"), "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
    }  # fmt: skip
    epmd = shutil.which("epmd")
    assert epmd is not None, "Erlang's port mapper is part of Debian's erlang-base"
    with (home / "out").open("wb") as out:
        mapping = subprocess.Popen([epmd, "-port", str(mapper), "-address", "127.0.0.1"], stdout=out, stderr=out)
        process = subprocess.Popen([SERVER], env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + START_SECONDS
        while not answers(port):
            assert process.poll() is None, (home / "out").read_text()
            assert time.monotonic() < end, (home / "out").read_text()
            time.sleep(0.1)
        yield f"amqp://guest:guest@127.0.0.1:{port}/"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        mapping.kill()
        mapping.wait()


@pytest.fixture
def account(broker: str) -> Iterator[RabbitAccount]:
    with open_rabbitmq(broker)[0] as account:
        yield account


def filled(account: RabbitAccount, name: str, count: int) -> Queue:
    account.create(name)
    queue = account.queue(name)
    queue.send_batch([Message(str(number), {"n": number}) for number in range(count)])
    return queue


def moved(source: Queue, target: Queue, **options: Any) -> Any:
    return Bridge(source, target, Options(until_empty=True, lease=5, **options)).run()


def bodies(queue: Queue) -> list[int]:
    found: list[int] = []
    while messages := queue.receive(10, lease=600):
        found += [int(message.body) for message in messages]
    return sorted(found)


class TestBroker:
    pytestmark = needs_broker

    def test_there_and_back(self, account: RabbitAccount, veilmq_server: LocalServer) -> None:
        source, middle = filled(account, "there", 35), veilmq_server.connect("middle")
        assert moved(source, middle).deleted == 35
        assert source.stats().visible == 0
        account.create("back")
        back = account.queue("back")
        assert moved(middle, back).deleted == 35
        found = back.receive(10)
        assert [message.attributes["n"] for message in found] == [int(message.body) for message in found]

    def test_a_copy_gives_back(self, account: RabbitAccount, veilmq_server: LocalServer) -> None:
        source = filled(account, "copied", 25)
        assert moved(source, veilmq_server.connect("copy"), copies=True).sent == 25
        wait_until(lambda: source.stats().visible == 25)  # a queue answers for its count before it takes back
        assert bodies(veilmq_server.connect("copy")) == list(range(25))

    def test_what_an_earlier_connection_gave_out_is_not_acknowledged(self, account: RabbitAccount) -> None:
        source = filled(account, "lost", 1)
        (message,) = source.receive(1, lease=60)
        account.close()
        (again,) = source.receive(1, lease=60, wait=5)
        (error,) = source.delete_batch([message.handle])
        assert error is not None
        assert source.delete_batch([again.handle]) == [None]

    def test_a_queue_that_is_not_there(self, account: RabbitAccount) -> None:
        with pytest.raises(QueueMissing):
            account.queue("gone")
        assert filled(account, "others", 1).stats().visible == 1, "the account can still be used"

    def test_messages_that_share_a_message_id_all_go_to_a_fifo_queue(
        self, account: RabbitAccount, veilmq_server: LocalServer
    ) -> None:
        account.create("shared")
        source, target = account.queue("shared"), veilmq_server.connect("shared.fifo")
        source.send_batch([Message(str(number), {"message_id": "one"}) for number in range(25)])
        counts = moved(source, target)
        assert (counts.sent, counts.duplicates, counts.deleted) == (25, 0, 25)
        assert target.stats().visible == 25
        (message,) = target.receive(1)
        assert message.attributes["message_id"] == "one"

    def test_what_amqp_cannot_carry_is_refused_and_the_rest_goes(
        self, account: RabbitAccount, veilmq_server: LocalServer
    ) -> None:
        account.create("odd")
        source, target = veilmq_server.connect("even"), account.queue("odd")
        for attributes in ({"n" * 256: "x"}, {"a": "x" * 140_000}, {"n": 0.5, "m": 2**70, "d": Decimal("1e50")}):
            source.send(Message("x", attributes))
        counts = moved(source, target, give_up_after=5)
        assert (counts.sent, counts.refused, counts.uncertain) == (1, 2, 0)
        assert all("ParameterInvalid" in reason for reason in counts.reasons)
        (message,) = target.receive(10)
        assert [float(message.attributes[name]) for name in "nmd"] == [0.5, 2.0**70, 1e50]

    def test_kills_lose_nothing(self, broker: str, account: RabbitAccount, veilmq_server: LocalServer) -> None:
        source, target = filled(account, "killed", 300), veilmq_server.connect("killed.fifo")
        urls = (
            f"{broker}?queue=killed&message_ids=unique",
            f"veil://{urlsplit(veilmq_server.sqs_url).netloc}/killed.fifo",
        )
        command = [*VEILMQ, "bridge", *urls, "--yes", "--json"]
        for share in (1, 2):
            process = subprocess.Popen([*command, "--rate", "300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            wait_until(lambda share=share: target.stats().visible >= 75 * share)  # type: ignore[misc]
            process.kill()
            process.communicate()
        done = subprocess.run([*command, "--until-empty"], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["left"]["visible"] == 0, done.stderr
        assert source.stats().visible == 0
        assert bodies(target) == list(range(300))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_command_says_which_extra_is_missing() -> None:
    hidden = "import sys; sys.modules['pika'] = None; from veilmq.cli import main; main()"
    command = [sys.executable, "-c", hidden, "bridge", "amqp://h/?queue=a", "veil://h/b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "pip install 'veilmq[amqp]'" in done.stderr) == (2, True), done.stderr


def test_connect_takes_no_such_url() -> None:
    with pytest.raises(ParameterInvalid, match="must begin with"):
        connect("amqp://h/?queue=a")
