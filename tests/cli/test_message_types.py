"""What unmodified clients send has a type in the history, if the server is told where it is."""

from urllib.parse import urlsplit

from tests.cli.conftest import Serve
from tests.cli.test_serve import events

import veilmq
from veilmq.client.messages import Message


def test_an_attribute_or_a_place_in_the_body_is_the_type(serve: Serve) -> None:
    server = serve("--type-attribute", "kind", "--type-pointer", "/detail/type").ready()
    sqs = server.sqs()
    url = sqs.create_queue(QueueName="jobs")["QueueUrl"]
    body = '{"detail": {"type": "of the body"}}'
    attribute = {"kind": {"DataType": "String", "StringValue": "of the attribute"}}
    sqs.send_message(QueueUrl=url, MessageBody=body)
    sqs.send_message(QueueUrl=url, MessageBody=body, MessageAttributes=attribute)
    sqs.send_message(QueueUrl=url, MessageBody="no JSON")
    with veilmq.connect(f"veil://{urlsplit(server.url).netloc}/jobs") as queue:
        queue.send(Message(body, type="own"))
        queue.send_batch([body, "no JSON"])
        for message in queue.receive(10):
            queue.delete(message.handle)
    assert server.stop() == 0
    told = events(server.data)
    wanted = ["of the body", "of the attribute", None, "own", "of the body", None]
    for kind in ("sent", "received", "deleted"):
        assert [event.type for event in told if event.kind == kind] == wanted


def test_all_protocols_find_the_body_in_json(serve: Serve) -> None:
    server = serve("--type-pointer", "/type").ready()
    ports = {name: server.wait_for(f"{name} listens on ").split("//")[-1] for name in ("azure", "mns")}
    for url in (
        f"azure://{ports['azure']}/devstoreaccount1/of-azure?tls=0&create=1",
        f"mns://any:any@{ports['mns']}/of-mns?tls=0&create=1&base64=0",
    ):
        with veilmq.connect(url) as queue:
            queue.send('{"type": "resize"}')
    assert server.stop() == 0
    assert [event.type for event in events(server.data) if event.kind == "sent"] == ["resize", "resize"]


def test_our_own_client_says_it_in_an_attribute(serve: Serve) -> None:
    server = serve().ready()
    server.sqs().create_queue(QueueName="jobs")
    host = urlsplit(server.url).netloc
    with veilmq.connect(f"sqs://any:any@{host}/000000000000/jobs?region=us-east-1&tls=0") as queue:
        queue.send(Message("x", type="resize"))
        (message,) = queue.receive()
        assert message.type == "resize"
    assert server.stop() == 0
    assert [event.type for event in events(server.data) if event.kind in ("sent", "received")] == ["resize"] * 2


def test_what_is_no_pointer_is_told(serve: Serve) -> None:
    server = serve("--type-pointer", "type")
    assert server.ended() == 2
    assert "a JSON pointer (RFC 6901) such as /type" in server.told()
