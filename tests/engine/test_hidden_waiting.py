"""The server's own receives, which push what is published: they and clients take no room from each other."""

from typing import Any

from tests.engine.conftest import QUEUE, Shell
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, sending

from veilmq.model.commands import CreateQueue, Receive
from veilmq.model.instant import MINUTE_US
from veilmq.model.outcomes import Received
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import TopicKey, hidden_queue

HIDDEN = [hidden_queue(TopicKey(ACCOUNT, REGION, "news"), f"reader-{number}") for number in range(5)]


def waits(shell: Shell, queue: QueueKey) -> Any:
    """A receive that may wait."""
    ticket = shell.submit(Receive(queue=queue, origin=TESTER, wait_us=MINUTE_US))
    shell.run()
    return ticket


def test_neither_takes_the_others_room(shell: Shell) -> None:
    shell.limit(parked_max=2, parked_per_account_max=2, parked_per_queue_max=2)
    for queue in HIDDEN:
        shell.call(CreateQueue(queue=queue, origin=TESTER))
    pushers = [waits(shell, queue) for queue in HIDDEN]
    clients = [waits(shell, QUEUE), waits(shell, QUEUE)]
    assert not {*pushers, *clients} & shell.answers.keys()
    assert shell.engine.waiting.refused == {}
    assert shell.engine.waiting.clients == 2

    third = waits(shell, QUEUE)
    assert shell.answers[third] == [Received([])]
    later = waits(shell, HIDDEN[0])
    assert later not in shell.answers

    shell.submit(sending(HIDDEN[3], "news"))
    shell.run()
    assert [message.body for message in shell.answers[pushers[3]][0].messages] == ["news"]
    for ticket in [*clients, *pushers]:
        shell.engine.cancel(ticket)
    again = [waits(shell, QUEUE), waits(shell, QUEUE)]
    assert not set(again) & shell.answers.keys()
    assert waits(shell, QUEUE) in shell.answers
