"""The document's two programs (document 002, strict order) as programs: run to their end, twice, failing, killed.

Nothing in them acknowledges or closes: the receiver's last message is acknowledged when the program ends without an
error, and comes again after any other end.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
from tests.support.embedded import EmbeddedClient

import veilmq
from veilmq.client.documents import LocalDiskStorage, OrderedQueueWrapper
from veilmq.client.messages import Template as QueueTemplate
from veilmq.client.queue import Queue
from veilmq.testing.local import LocalServer

SEND = Template("""\
from mns.account import Account
from mns.queue import Message
from veilmq.client.documents import LocalDiskStorage, OrderedQueueWrapper

myQueue = Account("$endpoint", "id", "secret").get_queue("ordered")
#init orderedQueue
seqIdConfig = {"localFileName":"$directory/mns_send_message_seq_id"}
seqIdPS = LocalDiskStorage(seqIdConfig)
orderedQueue = OrderedQueueWrapper(myQueue, sendSeqIdPersistStorage = seqIdPS)
for i in range($first, $first + 20):
    message = Message(str(i))
    orderedQueue.SendMessageInOrder(message)
""")

RECEIVE = Template("""\
import sys
from mns.account import Account
from veilmq.client.documents import LocalDiskStorage, OrderedQueueWrapper

myQueue = Account("$endpoint", "id", "secret").get_queue("ordered")
wait_seconds = 5
#init orderedQueue
seqIdConfig = {"localFileName":"$directory/mns_receive_message_seq_id"}
seqIdPS = LocalDiskStorage(seqIdConfig)
orderedQueue = OrderedQueueWrapper(myQueue, receiveSeqIdPersistStorage = seqIdPS)
for i in range(20):
    recv_msg = orderedQueue.ReceiveMessageInOrder(wait_seconds)
    print(recv_msg.message_body)
print("Finish receive 20 messages", file=sys.stderr)
""")

EMBEDDED = Template("""\
import os, signal, sys, threading
import veilmq
from veilmq.client.documents import LocalDiskStorage, OrderedQueueWrapper

myQueue = veilmq.connect("$url")
orderedQueue = OrderedQueueWrapper(
    myQueue, receiveSeqIdPersistStorage=LocalDiskStorage({"localFileName": "$directory/received"})
)
def receive():
    print(orderedQueue.ReceiveMessageInOrder(10).message_body, flush=True)
$end
""")


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
class TestTwice:
    """Over MNS, by the official SDK's own queue object."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[LocalServer]:
        server = LocalServer(tmp_path)
        yield server
        server.stop()

    def test_the_second_run_goes_on_where_the_first_stopped(self, server: LocalServer, tmp_path: Path) -> None:
        queue = server.connect("ordered")
        for first in (0, 20):
            run(SEND.substitute(endpoint=server.mns_url, directory=tmp_path, first=first))
            received = run(RECEIVE.substitute(endpoint=server.mns_url, directory=tmp_path))
            assert received == [str(number) for number in range(first, first + 20)]
            stats = queue.stats()
            assert (stats.visible, stats.in_flight) == (0, 0)


class TestEnds:
    """Over a data directory: two messages, a program that receives the first and ends."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        url = f"veil://{tmp_path}/data?queue=ordered"
        with veilmq.connect(url + "&create=1", template=QueueTemplate(visibility_timeout=1)) as queue:
            storage = LocalDiskStorage({"localFileName": f"{tmp_path}/sent"})
            with OrderedQueueWrapper(queue, sendSeqIdPersistStorage=storage) as ordered:
                ordered.SendMessageInOrder("first")
                ordered.SendMessageInOrder("second")
        return url

    def ended(self, url: str, directory: Path, end: str) -> None:
        """Run a program that receives the first message and ends so."""
        program = EMBEDDED.substitute(url=url, directory=directory, end=end)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout == "first\n", done.stderr

    def next_of(self, queue: Queue, directory: Path) -> str:
        """What the next program receives first; well before a lease of the first one would end by itself."""
        storage = LocalDiskStorage({"localFileName": f"{directory}/received"})
        with OrderedQueueWrapper(queue, receiveSeqIdPersistStorage=storage) as ordered:
            message = ordered.ReceiveMessageInOrder(15)
            assert message is not None
            return message.getMessageBody()

    def next_after(self, url: str, directory: Path, end: str) -> str:
        self.ended(url, directory, end)
        with veilmq.connect(url) as queue:
            return self.next_of(queue, directory)

    def next_after_kill(self, url: str, directory: Path, end: str) -> str:
        """The same once the killed program's leases have ended."""
        self.ended(url, directory, end)
        client = EmbeddedClient(directory / "data")
        client.pass_time(31)
        with client.account:
            return self.next_of(client.account.queue("ordered"), directory)

    @pytest.mark.parametrize("end", ["receive()", "receive()\norderedQueue.close()", "with orderedQueue: receive()"])
    def test_a_normal_end_acknowledges(self, url: str, tmp_path: Path, end: str) -> None:
        assert self.next_after(url, tmp_path, end) == "second"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "end",
        [
            "receive()\nraise RuntimeError",
            "with orderedQueue:\n    receive()\n    sys.exit(1)",
            "try:\n    receive()\n    1 / 0\nfinally:\n    orderedQueue.close()",
            "try:\n    receive()\n    1 / 0\nexcept ZeroDivisionError:\n    orderedQueue.close()",
            "thread = threading.Thread(target=lambda: [receive(), threading.Event().wait()], daemon=True)\n"
            "thread.start()\nwhile orderedQueue._handed is None: pass",
        ],
        ids=["raises", "exits out of its with", "finally", "except", "another thread works on"],
    )
    def test_any_other_end_does_not(self, url: str, tmp_path: Path, end: str) -> None:
        assert self.next_after(url, tmp_path, end) == "first"

    def test_a_killed_program_gets_it_again(self, url: str, tmp_path: Path) -> None:
        assert self.next_after_kill(url, tmp_path, "receive()\nos.kill(os.getpid(), signal.SIGKILL)") == "first"

    def test_a_forked_child_acknowledges_nothing_of_its_parents(self, url: str, tmp_path: Path) -> None:
        end = "receive()\nif os.fork() == 0: sys.exit()\nos.wait()\nos.kill(os.getpid(), signal.SIGKILL)"
        assert self.next_after_kill(url, tmp_path, end) == "first"


def test_an_acknowledgement_that_fails_does_not_keep_a_wrapper_open(embedded: EmbeddedClient, tmp_path: Path) -> None:
    embedded.account.create("ordered")
    queue: Queue = embedded.account.queue("ordered")
    storage = LocalDiskStorage({"localFileName": f"{tmp_path}/received"})
    sends = LocalDiskStorage({"localFileName": f"{tmp_path}/sent"})
    ordered = OrderedQueueWrapper(queue, sends, storage)
    ordered.SendMessageInOrder("first")
    assert ordered.ReceiveMessageInOrder() is not None
    storage.path = tmp_path / "unmounted" / "numbers"
    with pytest.raises(OSError, match="unmounted"):
        ordered.close()

    LocalDiskStorage({"localFileName": f"{tmp_path}/received"}).acquire()
