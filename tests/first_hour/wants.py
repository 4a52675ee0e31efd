"""What a new user wants, each in at most two commands, in the order of a first hour.

The commands are typed in /root of a bare Debian 13, with what was downloaded beside them: the release's wheel and the
packages that it needs (`packages`), a checkout (`checkout`), and the files below. /opt/veilmq/bin is on the path.
"""

from typing import Final, NamedTuple

FILES: Final = {
    "first.py": """
import boto3
sqs = boto3.client("sqs", endpoint_url="http://127.0.0.1:9324", region_name="us-east-1",
                   aws_access_key_id="any", aws_secret_access_key="any")
url = sqs.create_queue(QueueName="orders")["QueueUrl"]
sqs.send_message(QueueUrl=url, MessageBody="order 1")
message = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=5)["Messages"][0]
sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
print("received", message["Body"])
""",
    "unchanged.py": """
import boto3
sqs = boto3.client("sqs", endpoint_url="http://elasticmq:9324", region_name="eu-west-1",
                   aws_access_key_id="x", aws_secret_access_key="x")
url = sqs.get_queue_url(QueueName="orders")["QueueUrl"]
sqs.send_message(QueueUrl=url, MessageBody="as before")
print("received", sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"])
""",
    "elasticmq.conf": "queues { orders { defaultVisibilityTimeout = 10 seconds } }\n",
    "mine.py": "def handle(job):\n    print('handled', job.body, flush=True)\n",
    "embedded.py": """
import veilmq
with veilmq.connect("veil:///root/jobs?queue=jobs&create=1") as queue:
    queue.send("no server")
    print("received", queue.receive()[0].body)
""",
    "test_mine.py": """
def test_a_message_comes_back_when_its_lease_ends(veilmq_server):
    queue = veilmq_server.connect("jobs")
    queue.send("work")
    assert queue.receive(lease=3600)[0].receive_count == 1
    veilmq_server.advance(hours=1)
    assert queue.receive()[0].receive_count == 2
""",
}


class Want(NamedTuple):
    """One thing: what it is, what to type, and what is then read. A command that ends in `&` serves on."""

    what: str
    commands: tuple[str, ...]
    read: str


INSTALL: Final = Want(
    "install it in a place of its own",
    (
        "python3 -m venv /opt/veilmq",
        "pip install --no-index --find-links packages veilmq[server,sqs] pytest",
    ),
    "Successfully installed",
)
SERVE: Final = Want("serve", ("veilmq serve &",), '"ready":true')
FIRST: Final = Want("send and receive with boto3", ("python first.py",), "received order 1")
WANTS: Final = (
    INSTALL,
    SERVE,
    FIRST,
    Want("the same from the shell", ("veilmq send orders 'order 2'", "veilmq receive orders --delete"), "order 2"),
    Want("look at it, and in a browser", ("veilmq queues list", "veilmq console"), "http://127.0.0.1:9325/"),
    Want(
        "run a handler on each message",
        ("veilmq send orders 'order 3'", "veilmq work mine:handle --queue veil://127.0.0.1:9324/orders --until-empty"),
        "handled order 3",
    ),
    Want(
        "copy the data of the running server, and check the copy",
        ("veilmq backup copy", "veilmq check --data copy"),
        "everything is in order",
    ),
    Want("a queue in a directory, without a server", ("python embedded.py",), "received no server"),
    Want("test a consumer against expiry", ("pytest -q test_mine.py",), "1 passed"),
    Want(
        "put it in the place of ElasticMQ, for a program that stays as it is",
        (
            "veilmq serve --dev-host elasticmq --queues elasticmq.conf --sqs 0.0.0.0:9324 --data emulator &",
            "python unchanged.py",
        ),
        "received as before",
    ),
    Want(
        "ask for keys",
        ("veilmq keys new --into keys.toml", "veilmq serve --credentials keys.toml --data checked &"),
        '"ready":true',
    ),
    Want(
        "a service that begins with the machine",
        ("make -C checkout install", "systemctl enable --now veilmq"),
        "active",
    ),
)
