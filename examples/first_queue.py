"""Send, receive, extend, release and delete: the whole life of a message, through one port."""

from veilmq.client.messages import Message
from veilmq.testing.local import LocalServer

with LocalServer.temporary() as server, server.connect("jobs") as queue:
    queue.send("resize 1.png")
    queue.send(Message("resize 2.png", delay=1, attributes={"width": 640}))

    (message,) = queue.receive(lease=30)
    print("received", message.body, "for the", message.receive_count, "st time")
    print("hidden from the others:", queue.receive() == [])

    handle = queue.extend(message.handle, 60)
    queue.release(handle)
    (message,) = queue.receive(lease=30)
    print("received again:", message.receive_count, "times now")
    queue.delete(message.handle)

    (message,) = queue.receive(wait=5)
    print("after its delay:", message.body, dict(message.attributes))
    queue.delete(message.handle)
    print("left:", queue.stats().visible)
