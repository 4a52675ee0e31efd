"""A queue and a timeout for each kind of work (document 003: types with different times belong in separate queues)."""

from veilmq.client.messages import Message
from veilmq.client.routed import RoutedQueue
from veilmq.testing.local import LocalServer

SPLIT = [
    {"types": ["thumbnail"], "visibility_timeout": 30},
    {"types": ["film", "audio"], "visibility_timeout": 3600},
]

with LocalServer.temporary() as server, server.account() as account:
    queue = RoutedQueue.create(account, "media", SPLIT)
    queue.send(Message("picture 17", type="thumbnail"))
    queue.send(Message("film 4", type="film"))
    queue.send("anything else")
    print("queues:", account.names())
    for message in queue.receive(10):
        print(message.type, "->", message.body)
        queue.delete(message.handle)
