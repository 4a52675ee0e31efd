"""Accounts and regions: the same name elsewhere is another queue."""

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, refused, sending

from veilmq.model.commands import ListQueues
from veilmq.model.errors import QueueMissing, ReceiptInvalid
from veilmq.model.outcomes import QueuesListed
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

OTHERS = (QueueKey("111111111111", REGION, "jobs"), QueueKey(ACCOUNT, "eu-west-1", "jobs"))


class TestAccounts:
    """Accounts and regions."""

    @for_each("other", OTHERS, ids=str, fresh="stage")
    def test_nobody_sees_anothers_queue(self, stage: Stage, other: QueueKey) -> None:
        mine = stage.create()
        stage.send(mine)
        handle = stage.take(mine).handle
        refused(stage.do(sending(other)), QueueMissing)
        refused(stage.delete(other, handle), QueueMissing)
        refused(stage.drop(other), QueueMissing)
        listed = stage.do(ListQueues(origin=TESTER, account=other.account, region=other.region))
        assert expect(listed, QueuesListed).queues == []

    @for_each("other", OTHERS, ids=str, fresh="stage")
    def test_two_queues_of_one_name_share_nothing(self, stage: Stage, other: QueueKey) -> None:
        mine = stage.create()
        theirs = stage.create(other.name, other.account, other.region, delay_us=0)
        stage.send(mine, "mine")
        stage.send(theirs, "theirs")
        handle = stage.take(mine).handle
        stage.take(theirs)
        refused(stage.delete(theirs, handle), ReceiptInvalid)
        stage.purge(mine)
        stage.send(mine, "again")
        assert stage.counts(theirs) == (0, 0, 1)
        stage.drop(theirs)
        assert bodies(stage.receive(mine)) == ["again"]

    def test_an_operator_lists_all(self, stage: Stage) -> None:
        stage.create()
        for other in OTHERS:
            stage.create(other.name, other.account, other.region)
        listed = expect(stage.do(ListQueues(origin=TESTER, account=None, region=None)), QueuesListed)
        assert len(listed.queues) == 3
