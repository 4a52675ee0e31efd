"""What applications do that were written for ElasticMQ, Azurite or LocalStack, and know nothing of VeilMQ.

Run in a network of its own, in which the names of the services lead to this machine (test_compose.py):
`python emulator_clients.py SERVICE`. Ends with an assertion where the emulator would have answered otherwise.
"""

import sys
from typing import Any

import boto3
from azure.storage.queue import QueueServiceClient

AZURITE = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
    "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
    "QueueEndpoint=http://azurite:10001/devstoreaccount1;"
)


def sqs(endpoint: str, region: str, key: str) -> Any:
    return boto3.client(
        "sqs", endpoint_url=endpoint, region_name=region, aws_access_key_id=key, aws_secret_access_key=key
    )


def renew(client: Any) -> None:
    """What test suites do between two tests: purge, delete and create, one right after the other."""
    for _ in range(2):
        url = client.create_queue(QueueName="each-test")["QueueUrl"]
        for _ in range(2):
            client.purge_queue(QueueUrl=url)
        client.delete_queue(QueueUrl=url)


def elasticmq() -> None:
    """Its documentation signs for `elasticmq`; most applications sign for a region of AWS, and find the same queues."""
    for region in ("elasticmq", "eu-west-1", "us-east-1"):
        client = sqs("http://elasticmq:9324", region, "x")
        url = client.get_queue_url(QueueName="orders")["QueueUrl"]
        assert url == "http://elasticmq:9324/000000000000/orders", url
        attributes = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert attributes["VisibilityTimeout"] == "7", attributes
        assert attributes["QueueArn"] == "arn:aws:sqs:elasticmq:000000000000:orders", attributes
        client.send_message(QueueUrl=url, MessageBody=region)
    received = sqs("http://elasticmq:9324", "ap-south-1", "y").receive_message(QueueUrl=url, MaxNumberOfMessages=10)
    assert len(received["Messages"]) == 3, received
    renew(client)


def localstack() -> None:
    """Regions are apart, a key of 12 digits is an account, and queue URLs of LocalStack's own form are understood."""
    client = sqs("http://localstack:4566", "us-east-1", "test")
    url = client.create_queue(QueueName="orders")["QueueUrl"]
    assert url == "http://localstack:4566/000000000000/orders", url
    written = "http://sqs.us-east-1.localhost.localstack.cloud:4566/000000000000/orders"
    client.send_message(QueueUrl=written, MessageBody="by LocalStack's URL")
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    assert message["Body"] == "by LocalStack's URL"
    assert "QueueUrls" not in sqs("http://localstack:4566", "eu-west-1", "test").list_queues()
    other = sqs("http://localstack:4566", "us-east-1", "111111111111").create_queue(QueueName="orders")
    assert other["QueueUrl"] == "http://localstack:4566/111111111111/orders"
    direct = sqs("http://sqs.us-east-1.localhost.localstack.cloud:4566", "us-east-1", "test")
    assert direct.list_queues()["QueueUrls"] == [written]
    away = sqs("http://localhost.localstack.cloud:4566", "eu-west-1", "test")
    url = away.create_queue(QueueName="away")["QueueUrl"]
    assert url == "http://sqs.eu-west-1.localhost.localstack.cloud:4566/000000000000/away", url
    away.send_message(QueueUrl=url, MessageBody="by the URL of another region")
    assert client.list_queues()["QueueUrls"] == ["http://localstack:4566/000000000000/orders"]
    renew(client)


def azurite() -> None:
    """The connection string that Azurite's documentation has, with the service's name."""
    with QueueServiceClient.from_connection_string(AZURITE) as service:
        queue = service.create_queue("orders")
        queue.send_message("one")
        (message,) = queue.receive_messages()
        assert message.content == "one"
        queue.update_message(message, visibility_timeout=0)
        (again,) = queue.receive_messages()
        queue.delete_message(again)
        assert [each.name for each in service.list_queues()] == ["orders"]
        for _ in range(2):  # what test suites do between two tests
            service.create_queue("each-test")
            service.delete_queue("each-test")


if __name__ == "__main__":
    {"elasticmq": elasticmq, "localstack": localstack, "azurite": azurite}[sys.argv[1]]()
