"""Batches: each command is independent, all have the same instant, and a batch that fails leaves nothing."""

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, impossible, sending

from veilmq.model.commands import AnyCommand, CreateQueue, Delete, DeleteQueue, DescribeQueue, PurgeQueue, Receive
from veilmq.model.errors import LeaseTaken, MessageGone, MessageTooLarge, ReceiptInvalid, StoreFailed
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted, Sent
from veilmq.model.settings.queue import QueueKey


def _deleting(stage: Stage, queue: QueueKey, handle: str) -> Delete:
    return Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)


class TestBatches:
    """Batches."""

    def test_entries_are_independent(self, stage: Stage) -> None:
        queue = stage.create(message_bytes_max=10)
        outcomes = stage.batch([sending(queue, body) for body in ("1", "x" * 11, "3")]).outcomes
        assert [type(outcome) for outcome in outcomes] == [Sent, MessageTooLarge, Sent]
        one, three = stage.receive(queue, 10)
        assert bodies([one, three]) == ["1", "3"]
        deletes = [_deleting(stage, queue, handle) for handle in (one.handle, "nonsense", three.handle, one.handle)]
        outcomes = stage.batch(deletes).outcomes
        assert [type(outcome) for outcome in outcomes] == [Deleted, ReceiptInvalid, Deleted, MessageGone]

    def test_all_are_judged_by_one_instant(self, stage: Stage) -> None:
        queue = stage.create()
        applied = stage.batch([sending(queue) for _ in range(5)])
        assert applied.at == stage.now
        assert {outcome.sent for outcome in applied.outcomes if isinstance(outcome, Sent)} == {stage.now}

    def test_the_instant_never_falls_below_the_mark(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        mark = stage.store.mark
        assert mark == stage.now
        stage.clock.now = type(mark)(mark - SECOND_US)
        applied = stage.batch([sending(queue)])
        assert applied.at == mark

    def test_a_command_that_fails_takes_none_down_with_it(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "0")
        old = stage.take(queue)
        commands: list[AnyCommand] = [
            sending(queue, "1"),
            _deleting(stage, queue, old.handle),
            impossible(),
            sending(queue, "2"),
            Receive(queue=queue, origin=TESTER, count_max=10),
        ]
        outcomes = stage.batch(commands).outcomes
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds[:4] == [Sent, Deleted, StoreFailed, Sent]
        assert bodies(outcomes[4].messages) == ["1", "2"]  # type: ignore[union-attr]
        assert stage.counts(queue) == (0, 0, 2)
        stage.reopen(kill=True)
        assert stage.counts(queue) == (0, 0, 2)

    def test_a_batch_that_is_rolled_back_leaves_no_trace(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        stage.send(queue, "in line")
        stage.send(queue, "leased")
        stage.send(queue, "delayed", delay_us=SECOND_US)
        held = stage.take(queue)
        before = stage.describe(queue), stage.describe(other), stage.events(), bodies(stage.peek(queue))
        commands: list[AnyCommand] = [
            sending(queue, "never", delay_us=SECOND_US),
            sending(other, "never", priority=1, ttl_us=1),
            _deleting(stage, queue, held.handle),
            Receive(queue=queue, origin=TESTER, count_max=10),
        ]
        stage.store.apply(commands, stage.now)
        stage.factory.abandon(stage.store)
        assert (stage.describe(queue), stage.describe(other), stage.events(), bodies(stage.peek(queue))) == before
        stage.later(SECOND_US)
        assert bodies(stage.receive(queue, 10)) == ["leased", "delayed"]
        assert isinstance(stage.delete(queue, held.handle), Deleted)

    def test_a_batch_with_queues_created_and_deleted_is_rolled_back(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        stage.send(queue, "kept")
        stage.send(other, "kept too")
        new = QueueKey(ACCOUNT, REGION, "new")
        stage.store.apply(
            [
                CreateQueue(queue=new, origin=TESTER),
                sending(new, "never"),
                DeleteQueue(queue=queue, origin=TESTER),
                CreateQueue(queue=queue, origin=TESTER, change={"delay_us": SECOND_US}),
                PurgeQueue(queue=other, origin=TESTER),
                sending(other, "never"),
            ],
            stage.now,
        )
        stage.factory.abandon(stage.store)
        assert type(stage.do(DescribeQueue(queue=new, origin=TESTER))).__name__ == "QueueMissing"
        assert stage.describe(queue).settings.delay_us == 0
        assert bodies(stage.receive(queue, 10)) == ["kept"]
        assert bodies(stage.receive(other, 10)) == ["kept too"]

    def test_a_batch_that_was_not_committed_is_not_there_after_a_reopening(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "acknowledged")
        stage.store.apply([sending(queue, "never")], stage.now)
        stage.reopen()
        assert bodies(stage.receive(queue, 10)) == ["acknowledged"]

    def test_receives_and_deletes_of_one_message_in_one_batch_have_some_order(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        old = stage.take(queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        receive = Receive(queue=queue, origin=TESTER)
        got, deleted = stage.batch([receive, _deleting(stage, queue, old.handle)]).outcomes
        if got.messages:  # type: ignore[union-attr]
            assert type(deleted) is LeaseTaken
        else:
            assert type(deleted) is Deleted
