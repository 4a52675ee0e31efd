"""The document's comparison (document 002): a plain queue whose neighbours change places, and strict order over it.

The server gives messages out in disorder on purpose (`--simulate disorder=3`, development mode alone); sender and
receiver are two programs that run side by side.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from veilmq.testing.local import LocalServer

HERE = Path(__file__).parent

with LocalServer.temporary("--simulate", "disorder=3") as server, tempfile.TemporaryDirectory() as directory:
    print("Test with common queue:")
    with server.connect("common") as queue:
        for number in range(1, 11):
            queue.send(str(number))
        while found := queue.receive():
            print("Receive Message Succeed with common queue! message body is", found[0].body)
            queue.delete(found[0].handle)

    print("Test with OrderedQueueWrapper:")
    with server.connect("ordered"):
        url = server.queue_url("ordered")
    programs = [
        subprocess.Popen([sys.executable, str(HERE / program), url, f"{directory}/{program}.id"])
        for program in ("receive_message_in_order.py", "send_message_in_order.py")
    ]
    print("exit codes:", [program.wait(60) for program in programs])
