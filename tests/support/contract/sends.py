"""Sends: a sent message is received, exactly and in order; a refused one leaves nothing."""

from uuid import RFC_4122, UUID

from tests.support.contract.stage import ACCOUNT, REGION, Stage, bodies, refused, sending

from veilmq.model.errors import MessageTooLarge, QueueMissing
from veilmq.model.instant import DAY_US, FOREVER, MINUTE_US, SECOND_US
from veilmq.model.messages import Attribute, Extras
from veilmq.model.settings.queue import PRIORITY_DEFAULT, QueueKey
from veilmq.testing.for_each import for_each


class TestSends:
    """Sends."""

    @for_each("body", ["x", "", "\r\n\t", "zwölf Boxkämpfer", "\U0001f4a1\ufffd", "a" * 300_000], fresh="stage")
    def test_a_body_comes_back_exactly(self, stage: Stage, body: str) -> None:
        queue = stage.create()
        sent = stage.send(queue, body)
        message = stage.take(queue)
        assert message.body == body
        assert message.md5 == sending(queue, body).md5
        assert (message.id, message.sequence, message.sent) == (sent.id, sent.sequence, sent.sent)

    def test_what_comes_with_a_message_comes_back(self, stage: Stage) -> None:
        queue = stage.create()
        extras = Extras(
            attributes=(Attribute("n", "Number.int", "1"), Attribute("b", "Binary", b"\x00\xff")),
            group="g",
            deduplication_id="d",
            trace="Root=1",
            type="resize",
            tag="t",
        )
        stage.send(queue, extras=extras, priority=3)
        stage.reopen()
        message = stage.take(queue)
        assert message.extras == extras
        assert (message.sender, message.priority) == ("tester", 3)

    def test_an_answer_tells_when_the_message_will_be_seen_and_when_it_dies(self, stage: Stage) -> None:
        queue = stage.create(retention_us=DAY_US, delay_us=SECOND_US)
        plain = stage.send(queue)
        assert (plain.sent, plain.visible, plain.expires) == (stage.now, stage.now + SECOND_US, stage.now + DAY_US)
        own = stage.send(queue, delay_us=0, ttl_us=MINUTE_US)
        assert (own.visible, own.expires) == (stage.now, stage.now + MINUTE_US)
        assert stage.send(queue, ttl_us=FOREVER).expires == FOREVER

    def test_messages_of_one_priority_come_in_the_order_of_their_sends(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(30):
            stage.send(queue, str(number))
        assert bodies(stage.receive(queue, 10) + stage.receive(queue, 10) + stage.receive(queue, 10)) == [
            str(number) for number in range(30)
        ]

    def test_sequences_and_ids_are_never_given_twice(self, stage: Stage) -> None:
        one, two = stage.create("one"), stage.create("two")
        answers = [stage.send(queue) for _ in range(20) for queue in (one, two)]
        sequences = [answer.sequence for answer in answers]
        assert sequences == sorted(set(sequences))
        assert len({answer.id for answer in answers}) == len(answers)
        assert all(len(answer.id) == 16 for answer in answers)

    def test_ids_are_uuids_of_version_4(self, stage: Stage) -> None:
        """RFC 9562, 5.4: programs that check the ids of a cloud's messages check these bits too."""
        queue = stage.create()
        ids = [UUID(bytes=stage.send(queue).id) for _ in range(20)]
        assert {(each.variant, each.version) for each in ids} == {(RFC_4122, 4)}

    @for_each("kill", [False, True], fresh="stage")
    def test_sequences_grow_across_a_reopening_even_if_the_messages_are_gone(self, stage: Stage, kill: bool) -> None:
        queue = stage.create()
        last = max(stage.send(queue).sequence for _ in range(3))
        for message in stage.receive(queue, 10):
            stage.delete(queue, message.handle)
        stage.reopen(kill=kill)
        assert stage.send(queue).sequence > last

    def test_a_message_too_large_is_refused_and_leaves_nothing(self, stage: Stage) -> None:
        queue = stage.create(message_bytes_max=10)
        stage.send(queue, "a" * 10)
        start = stage.following()
        error = refused(stage.do(sending(queue, "a" * 11)), MessageTooLarge)
        assert (error.size_bytes, error.limit_bytes) == (11, 10)  # type: ignore[attr-defined]
        assert stage.counts(queue) == (1, 0, 0)
        assert stage.events(start) == []

    def test_a_send_to_no_queue_is_refused(self, stage: Stage) -> None:
        refused(stage.do(sending(QueueKey(ACCOUNT, REGION, "nowhere"))), QueueMissing)

    def test_a_handle_is_given_only_to_who_wants_one(self, stage: Stage) -> None:
        queue = stage.create()
        assert stage.send(queue).handle == ""
        assert stage.send(queue, wants_handle=True).handle

    def test_the_default_priority_is_in_the_middle(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        assert stage.take(queue).priority == PRIORITY_DEFAULT
