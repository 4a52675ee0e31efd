"""A file of ElasticMQ's, and a client as its documentation has it."""

from pathlib import Path

import boto3
from tests.cli.conftest import Serve

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
    assert server.stop() == 0
