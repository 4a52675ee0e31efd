"""Commands of operators: one with an id acts once, whatever happens between, and stands in the history."""

from typing import Any

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, sending

from veilmq.model.commands import CreateQueue, DeleteQueue, Extend, Operate, Origin, PurgeQueue
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.messages import id_text
from veilmq.model.outcomes import Extended, Operated, Purged, QueueCreated, QueueDeleted, Sent
from veilmq.model.settings.queue import QueueKey, RedrivePolicy

OTHER = Origin("admin", "other key")


def operating(*commands: Any, id: str = "one", **fields: Any) -> Operate:  # noqa: A002 the field's name
    given: dict[str, Any] = {
        "origin": TESTER,
        "keeps": True,
        "digest": b"the call",
        "act": "do",
        "asked": {"target": "x"},
    } | fields
    return Operate(id=id, commands=commands, **given)


def done(stage: Stage, command: Operate) -> Operated:
    return expect(stage.do(command), Operated)


class TestOperators:
    """Commands of operators."""

    def test_a_command_acts_once_and_its_outcome_survives_a_kill(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue)
        command = operating(PurgeQueue(queue=queue, origin=TESTER))
        assert done(stage, command) == Operated([Purged(1)])
        stage.send(queue)
        start = stage.following()
        assert done(stage, command) == Operated([Purged(1)], repeated=True)
        stage.reopen(kill=True)
        assert done(stage, command) == Operated([Purged(1)], repeated=True)
        assert (stage.counts(queue)[0], stage.kinds(start)) == (1, [])

    def test_of_two_in_one_batch_the_second_is_the_repetition(self, stage: Stage) -> None:
        queue = stage.create()
        command = operating(sending(queue, "a"))
        first, second = (expect(each, Operated) for each in stage.batch([command, command]).outcomes)
        assert (first.repeated, second.repeated, first.outcomes) == (False, True, second.outcomes)
        assert stage.counts(queue)[0] == 1

    def test_every_kind_of_outcome_is_read_as_it_was(self, stage: Stage) -> None:
        stage.create("dead")
        queue, dead = QueueKey(ACCOUNT, REGION, "jobs"), QueueKey(ACCOUNT, REGION, "dead")
        change = {"redrive": RedrivePolicy(dead, 3), "tags": {"a": "b"}}
        created = operating(CreateQueue(queue=queue, origin=TESTER, change=change), id="create")
        sent = operating(sending(queue, "a"), sending(queue, "x" * 2_000_000, size_bytes=2_000_000), id="send")
        dropped = operating(DeleteQueue(queue=queue, origin=TESTER), id="drop")
        for command, kinds in ((created, [QueueCreated]), (sent, [Sent, None]), (dropped, [QueueDeleted])):
            first = done(stage, command)
            assert all(kind is None or type(each) is kind for kind, each in zip(kinds, first.outcomes, strict=True))
            again = done(stage, command)
            assert (again.repeated, again.outcomes) == (True, first.outcomes)

    def test_the_id_of_another_call_is_refused_and_another_principal_has_its_own(self, stage: Stage) -> None:
        queue = stage.create()
        assert not done(stage, operating(sending(queue, "a"))).mismatch
        assert done(stage, operating(sending(queue, "b"), digest=b"another call")) == Operated([], mismatch=True)
        assert not done(stage, operating(sending(queue, "b"), digest=b"another call", origin=OTHER)).repeated
        assert stage.counts(queue)[0] == 2

    def test_what_was_refused_may_be_tried_again(self, stage: Stage) -> None:
        queue = QueueKey(ACCOUNT, REGION, "jobs")
        command = operating(PurgeQueue(queue=queue, origin=TESTER))
        start = stage.following()
        assert done(stage, command) == Operated([QueueMissing(queue=str(queue))])
        assert stage.kinds(start) == []
        stage.create("jobs")
        assert done(stage, command) == Operated([Purged(0)])

    def test_an_id_is_remembered_for_a_day(self, stage: Stage) -> None:
        queue = stage.create()
        command = operating(sending(queue, "a"))
        done(stage, command)
        stage.later(DAY_US - SECOND_US)
        stage.sweep()
        assert done(stage, command).repeated
        stage.later(SECOND_US)
        assert not done(stage, command).repeated

    def test_the_history_says_who_asked_for_what(self, stage: Stage) -> None:
        queue = stage.create()
        start = stage.following()
        done(stage, operating(sending(queue, "a"), act="send", asked={"target": "jobs", "messages": 1}))
        sent, told = stage.events(start)
        assert (sent.kind, told.kind, told.queue, told.message) == ("sent", "operator_command", "jobs", sent.message)
        assert (told.protocol, told.principal, told.at) == (TESTER.protocol, TESTER.principal, stage.now)
        assert told.detail == {"id": "one", "act": "send", "asked": {"target": "jobs", "messages": 1}}
        dropped = operating(DeleteQueue(queue=queue, origin=TESTER), id="its own", keeps=False)
        start = stage.following()
        done(stage, dropped)
        assert [(each.kind, each.queue) for each in stage.events(start)] == [
            ("queue_deleted", "jobs"), ("operator_command", "jobs"),
        ]  # fmt: skip
        assert done(stage, dropped).outcomes == [QueueMissing(queue=str(queue))]
        again = operating(CreateQueue(queue=queue, origin=TESTER), id="create")
        done(stage, again)
        start = stage.following()
        done(stage, operating(CreateQueue(queue=queue, origin=TESTER), id="the same queue"))
        assert stage.kinds(start) == []

    def test_a_handle_is_used_once(self, stage: Stage) -> None:
        queue = stage.create()
        sent = stage.send(queue)
        handle = stage.take(queue).handle
        release = operating(Extend(queue=queue, origin=TESTER, handle=handle, lease_us=0, arrived=stage.now))
        (first,) = done(stage, release).outcomes
        assert isinstance(first, Extended)
        stage.take(queue)
        assert done(stage, release) == Operated([first], repeated=True)
        assert stage.counts(queue) == (0, 0, 1)
        assert [event.kind for event in stage.events() if event.message == id_text(sent.id)].count("released") == 1
