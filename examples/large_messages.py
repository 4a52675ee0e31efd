"""A body of six megabytes: it lies in object storage (here a directory), and the queue carries a pointer."""

import tempfile
from pathlib import Path

from veilmq.client.large import LargeMessageQueue
from veilmq.client.unreadable import DeadLetters
from veilmq.testing.local import LocalServer

with LocalServer.temporary() as server, tempfile.TemporaryDirectory() as objects:
    plain, dead = server.connect("films"), server.connect("films-dead")
    queue = LargeMessageQueue(plain, f"file://{objects}", unreadable=DeadLetters(dead), threshold_bytes=65_536)
    queue.send("frame " * 1_000_000)
    queue.send("a small one goes as it is")
    print("in the queue:", [len(each.body) for each in plain.peek(2)], "characters")
    print("objects:", sum(path.is_file() for path in Path(objects).rglob("*")))
    for message in queue.receive(10):
        print("received:", len(message.body), "characters")
        queue.delete(message.handle)
    print("objects after the delete:", sum(path.is_file() for path in Path(objects).rglob("*")))
