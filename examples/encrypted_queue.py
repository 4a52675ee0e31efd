"""Bodies that the server cannot read, and a new key while messages of the old one wait."""

import subprocess
import sys
import tempfile
from pathlib import Path

from veilmq.client.encrypted import EncryptedQueue, KeyFile
from veilmq.client.unreadable import DeadLetters
from veilmq.testing.local import LocalServer

VEILMQ = [sys.executable, "-c", "from veilmq.cli import main; main()"]

with LocalServer.temporary() as server, tempfile.TemporaryDirectory() as directory:
    keys = Path(directory, "keys.json")
    new_key = [*VEILMQ, "keys", "new", "--encryption", "--into", str(keys)]
    subprocess.run(new_key, check=True, stdout=subprocess.DEVNULL)
    plain, dead = server.connect("orders"), server.connect("orders-dead")
    queue = EncryptedQueue(plain, KeyFile(keys), unreadable=DeadLetters(dead))

    queue.send("order 17, sealed by the first key")
    print("what the server holds:", plain.peek()[0].body[:24], "...")
    subprocess.run(new_key, check=True, stdout=subprocess.DEVNULL)
    queue.send("order 18, sealed by the second")
    plain.send("a forgery in plain text")

    for message in queue.receive(10):
        print("read:", message.body)
        queue.delete(message.handle)
    print("set apart unread:", dead.stats().visible)
