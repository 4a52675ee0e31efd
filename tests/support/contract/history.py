"""History: every step, with its fields, in the order of the log."""

import pytest
from tests.support.conservation import ledgers
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, sending

from veilmq.model.commands import AfterExpiry, Delete, Origin, PollCount, Receive, RecordPolls, Undeliver
from veilmq.model.events import HistoryTrimmed
from veilmq.model.instant import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, id_text
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import replay


class TestHistory:
    """History."""

    def test_the_kinds_of_a_messages_life_in_order(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        one = stage.take(queue, lease_us=SECOND_US)
        stage.extend(queue, one.handle, 2 * SECOND_US)
        stage.later(2 * SECOND_US)
        two = stage.take(queue)
        stage.delete(queue, one.handle)
        stage.extend(queue, one.handle, 1)
        stage.extend(queue, two.handle, 0)
        three = stage.take(queue)
        stage.do(Undeliver(queue=queue, origin=TESTER, handles=(three.handle,)))
        four = stage.take(queue)
        new = sending(queue, "new")
        stage.extend(queue, four.handle, 1, body=new.body, md5=new.md5, size_bytes=new.size_bytes)
        stage.delete(queue, four.handle)
        stage.delete(queue, four.handle)
        stage.change(queue, delay_us=1)
        stage.purge(queue)
        stage.drop(queue)
        assert stage.kinds() == [
            "queue_created", "sent", "received", "extended", "lease_expired", "received", "delete_refused",
            "extend_refused", "released", "received", "undelivered", "received", "extended", "content_updated",
            "deleted", "delete_refused", "queue_changed", "purged", "queue_deleted",
        ]  # fmt: skip
        assert [event.offset for event in stage.events()] == list(range(19))

    def test_a_received_event_says_all_that_is_known(self, stage: Stage) -> None:
        queue = stage.create()
        sent = stage.send(queue, "hello", extras=Extras(group="g", type="resize"))
        stage.later(SECOND_US)
        worker = Origin("azure", "worker", "sdk/1.0")
        stage.do(Receive(queue=queue, origin=worker, lease_us=MINUTE_US))
        event = stage.events()[-1]
        assert (event.kind, event.at, event.account, event.region, event.queue) == (
            "received", stage.now, ACCOUNT, REGION, "jobs"
        )  # fmt: skip
        assert (event.protocol, event.principal, event.client) == ("azure", "worker", "sdk/1.0")
        assert (event.message, event.sequence, event.attempt, event.rotation) == (id_text(sent.id), sent.sequence, 1, 0)
        assert (event.lease_us, event.source, event.held_us) == (MINUTE_US, "receive", None)
        assert (event.sent, event.visible_since, event.body_bytes) == (sent.sent, sent.sent, 5)
        assert (event.group, event.type) == ("g", "resize")

    def test_each_send_of_a_batch_is_its_own_senders(self, stage: Stage) -> None:
        queue = stage.create()
        start = stage.following()
        names = ["a", "b", "a", "c"]
        stage.batch([sending(queue, origin=Origin("sqs", name)) for name in names])
        assert [event.principal for event in stage.events(start)] == names
        assert [message.sender for message in stage.receive(queue, 10)] == names

    def test_how_long_a_lease_was_held(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=MINUTE_US)
        stage.later(3 * SECOND_US)
        stage.extend(queue, message.handle, MINUTE_US)
        stage.later(4 * SECOND_US)
        stage.delete(queue, message.handle)
        extended, deleted = stage.events()[-2:]
        assert (extended.kind, extended.held_us, extended.lease_us, extended.source) == (
            "extended", 3 * SECOND_US, MINUTE_US, "extend"
        )  # fmt: skip
        assert (deleted.kind, deleted.held_us) == ("deleted", 7 * SECOND_US)

    def test_the_body_bytes_are_those_of_the_body(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "zwölf", size_bytes=1_000)
        message = stage.take(queue)
        new = sending(queue, "elf", size_bytes=1_000)
        stage.extend(queue, message.handle, SECOND_US, body=new.body, md5=new.md5, size_bytes=1_000)
        stage.delete(queue, message.handle)
        sizes = {event.kind: event.body_bytes for event in stage.events()}
        assert (sizes["sent"], sizes["received"], sizes["content_updated"], sizes["deleted"]) == (6, 6, 3, 3)

    @pytest.mark.parametrize("swept", [False, True])
    @pytest.mark.parametrize("use", ["receive", "delete", "extend"])
    def test_a_lease_that_ended_stands_before_what_followed_it(self, stage: Stage, use: str, swept: bool) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=SECOND_US)
        due = stage.now + SECOND_US
        stage.later(HOUR_US)
        if swept:
            stage.sweep()
        start = stage.following() - swept
        if use == "receive":
            stage.take(queue)
        elif use == "delete":
            stage.delete(queue, message.handle)
        else:
            stage.extend(queue, message.handle, SECOND_US, after_expiry=AfterExpiry.ALLOW)
        ended, followed = stage.events(start)
        assert (ended.kind, ended.at, ended.attempt, ended.held_us) == ("lease_expired", due, 1, SECOND_US)
        assert (ended.protocol, ended.principal) == ("sqs", "tester")
        assert followed.kind == {"receive": "received", "delete": "deleted", "extend": "lease_resumed"}[use]
        assert followed.at == stage.now
        assert stage.kinds().count("lease_expired") == 1

    @for_each("ended", ["released", "expired"], fresh="stage")
    def test_a_lease_that_is_taken_up_again_is_an_event_of_its_own(self, stage: Stage, ended: str) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=SECOND_US)
        if ended == "released":
            stage.extend(queue, message.handle, 0)
        stage.later(2 * SECOND_US)
        start = stage.following()
        for _ in range(2):
            stage.extend(queue, message.handle, MINUTE_US, after_expiry=AfterExpiry.ALLOW)
        assert stage.kinds(start)[-2:] == ["lease_resumed", "extended"]
        resumed = stage.events(start)[-2]
        assert (resumed.attempt, resumed.lease_us, resumed.source) == (1, MINUTE_US, "extend")
        assert resumed.held_us == 2 * SECOND_US
        assert stage.counts(queue) == (0, 0, 1)
        stage.later(MINUTE_US)
        stage.sweep()
        assert stage.kinds(start)[-1] == "lease_expired"
        assert replay(stage.events()).messages[message.sequence]["state"] == "visible"

    def test_a_command_that_arrived_in_time_ends_no_lease(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        arrived = stage.now
        stage.later(SECOND_US)
        stage.delete(queue, message.handle, arrived=arrived)
        assert "lease_expired" not in stage.kinds()

    @for_each("reason", ["stale", "gone", "expired"], fresh="stage")
    def test_a_refusal_has_the_handles_attempt_and_the_reason(self, stage: Stage, reason: str) -> None:
        queue = stage.create()
        stage.send(queue)
        message = stage.take(queue, lease_us=SECOND_US)
        if reason == "gone":
            stage.delete(queue, message.handle)
        stage.later(SECOND_US + 1)
        if reason == "stale":
            stage.take(queue)
        stage.delete(queue, message.handle, after_expiry=AfterExpiry.REFUSE)
        event = stage.events()[-1]
        assert (event.kind, event.sequence, event.attempt) == ("delete_refused", message.sequence, 1)
        assert event.detail == {"reason": reason}

    def test_polls_are_one_event_a_queue_and_minute(self, stage: Stage) -> None:
        queue = stage.create()
        start = stage.following()
        gone = QueueKey(ACCOUNT, REGION, "gone")
        polls = (PollCount(queue, TESTER, 7, 5, 1), PollCount(gone, TESTER, 1, 1, 0))
        stage.do(RecordPolls(polls=polls))
        polled = stage.events(start)
        assert [event.kind for event in polled] == ["polled", "polled"]
        assert (polled[0].queue, polled[0].principal) == ("jobs", "tester")
        assert polled[0].detail == {"receives": 7, "empty": 5, "refused": 1}

    def test_a_reader_starts_at_any_offset(self, stage: Stage) -> None:
        queue = stage.create()
        stage.batch([sending(queue, str(number)) for number in range(5)])
        stage.batch([sending(queue, str(number)) for number in range(5)])
        everything = stage.events()
        for start in range(len(everything) + 1):
            assert stage.events(start) == everything[start:]
            assert stage.factory.history(stage.store, start, 3) == everything[start : start + 3]
        assert stage.events(1_000) == []

    @pytest.mark.parametrize("bound", ["age", "size"])
    def test_what_is_trimmed_is_refused_with_the_first_offset(self, stage: Stage, bound: str) -> None:
        queue = stage.create()
        for number in range(100):
            stage.send(queue, str(number))
        stage.later(DAY_US)
        if bound == "age":
            stage.reopen(history_us_max=HOUR_US)
        else:
            stage.reopen(history_bytes_max=1_000)
        last = stage.send(queue, "last")
        before = stage.events()
        stage.sweep_snapshot()
        told = stage.events()[len(before) :]
        assert {event.kind for event in told} == {"snapshot"}
        for _ in range(20):
            stage.sweep()
        with pytest.raises(HistoryTrimmed) as trimmed:
            stage.events()
        first = trimmed.value.first_offset
        assert first == (len(before) - 1 if bound == "age" else len(before))
        assert stage.events(first) == [*before, *told][first:]
        assert (stage.events(first)[0].sequence == last.sequence) is (bound == "age")
        assert len(stage.receive(queue, 200)) == 101

    def test_offsets_go_on_when_everything_was_trimmed(self, stage: Stage) -> None:
        queue = stage.create()
        stage.reopen(history_us_max=SECOND_US)
        for _ in range(3):
            stage.send(queue)
            stage.later(HOUR_US)
            stage.sweep()
        stage.reopen(kill=True)
        with pytest.raises(HistoryTrimmed) as trimmed:
            stage.events()
        first = trimmed.value.first_offset
        offset = stage.events(first)[-1].offset
        assert offset > first > 3
        stage.send(queue)
        assert stage.events(offset)[-1].offset == offset + 1

    def test_a_deleted_queue_keeps_its_name_in_the_history(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        stage.drop(queue)
        stage.reopen()
        assert {event.queue for event in stage.events()} == {"jobs"}

    def test_what_was_sent_is_live_deleted_expired_purged_or_moved(self, stage: Stage) -> None:
        dead = stage.create("dead")
        queue = stage.create(redrive=RedrivePolicy(dead, 1), visibility_timeout_us=SECOND_US)
        for number in range(40):
            stage.send(queue, str(number), ttl_us=MINUTE_US if number % 7 == 0 else None, priority=1 + number % 2)
        stage.batch([_deleting(stage, queue, message.handle) for message in stage.receive(queue, 9)[::2]])
        stage.later(MINUTE_US)
        stage.receive(queue, 5)
        stage.sweep_expired()
        books = ledgers(stage.events())
        for key in (queue, dead):
            info = stage.describe(key)
            assert books[info.incarnation].live == info.counts.total
        stage.purge(queue)
        stage.drop(dead)
        assert [book.live for book in ledgers(stage.events()).values()] == [0, 0]


def _deleting(stage: Stage, queue: QueueKey, handle: str) -> Delete:
    return Delete(queue=queue, origin=TESTER, handle=handle, arrived=stage.now)
