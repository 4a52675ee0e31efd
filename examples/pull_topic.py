"""One message to many queues, which their consumers pull (document 002, CloudPullTopic)."""

import tempfile

from veilmq.client.messages import Message
from veilmq.client.topics import create_pull_topic
from veilmq.testing.local import LocalServer

with (
    LocalServer.temporary() as server,
    tempfile.TemporaryDirectory() as definitions,
    server.account() as account,
):
    topic = create_pull_topic(
        account,
        "news",
        ["consumer001", "consumer002"],
        definitions=f"file://{definitions}",
        create_queues=True,
        tags={"consumer002": ["sport"]},
    )
    topic.publish("for everybody without a wish")
    topic.publish(Message("for both", tag="sport"))
    for name in ("consumer001", "consumer002"):
        queue = account.queue(name)
        for message in queue.receive(10):
            print(name, "got:", message.body)
            queue.delete(message.handle)
    topic.delete()
    print("queues after the topic was deleted:", account.names())
