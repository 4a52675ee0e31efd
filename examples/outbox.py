"""An order and its message in one SQL transaction: both or neither, and a relay that sends what is committed."""

import sqlite3
import tempfile

from veilmq.client.outbox import Outbox, Relay
from veilmq.testing.local import LocalServer

with LocalServer.temporary() as server, tempfile.TemporaryDirectory() as directory, server.connect("orders") as queue:

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(f"{directory}/shop.db", check_same_thread=False)

    shop, outbox = connect(), Outbox()
    for statement in outbox.ddl("sqlite"):
        shop.execute(statement)
    shop.execute("CREATE TABLE orders (number INTEGER)")

    for number in (7, 8, 9):
        try:
            with shop:  # one transaction
                cursor = shop.cursor()
                cursor.execute("INSERT INTO orders VALUES (?)", (number,))
                outbox.add(cursor, f"order {number}")
                if number == 8:
                    raise RuntimeError("no stock")
        except RuntimeError as reason:
            print("order", number, "is rolled back:", reason)

    relay = Relay(outbox, connect, queue)
    print("sent:", relay.run_once(), "and again:", relay.run_once())
    print("received:", sorted(message.body for message in queue.receive(10)))
    print("orders:", [number for (number,) in shop.execute("SELECT number FROM orders")])
    relay.close()
    shop.close()
