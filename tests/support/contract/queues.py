"""Queues: create, create again, change, delete, describe, list."""

from typing import Any

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, refused

from veilmq.model.commands import ChangeQueue, CreateQueue, DescribeQueue, ListQueues
from veilmq.model.errors import QueueDeletedRecently, QueueExists, QueueMissing, RedriveRefused
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated, QueueDeleted, QueuesListed
from veilmq.model.settings.queue import QueueKey, QueueSettings, RedrivePolicy, XmlBody
from veilmq.testing.for_each import for_each
from veilmq.testing.replaying import replay

KEY = QueueKey(ACCOUNT, REGION, "jobs")


def _create(stage: Stage, **fields: Any) -> Outcome:
    return stage.do(CreateQueue(queue=KEY, origin=TESTER, **fields))


def _names(stage: Stage, **fields: Any) -> tuple[list[str], bool]:
    fields = {"account": ACCOUNT, "region": REGION} | fields
    listed = expect(stage.do(ListQueues(origin=TESTER, **fields)), QueuesListed)
    return [info.key.name for info in listed.queues], listed.more


class TestQueues:
    """Queues."""

    def test_a_new_queue_has_the_defaults_and_what_was_set(self, stage: Stage) -> None:
        stage.create(delay_us=SECOND_US, labels={"Policy": "{}"})
        info = stage.describe(KEY)
        assert info.settings == QueueSettings(delay_us=SECOND_US, labels={"Policy": "{}"})
        assert (info.created, info.modified, info.counts.total) == (stage.now, stage.now, 0)

    def test_every_setting_survives_a_reopening(self, stage: Stage) -> None:
        dead = stage.create("dead")
        stage.create(
            visibility_timeout_us=1, delay_us=2, retention_us=3, wait_us=4, message_bytes_max=5,
            redrive=RedrivePolicy(dead, 6), xml_body=XmlBody.BASE64, labels={"a": "b"}, tags={"c": "d"},
        )  # fmt: skip
        before = stage.describe(KEY)
        stage.reopen(kill=True)
        assert stage.describe(KEY) == before

    def test_the_same_queue_is_met_again_and_another_is_refused(self, stage: Stage) -> None:
        stage.create(delay_us=SECOND_US, wait_us=5)
        stage.send(KEY, delay_us=0)
        again = expect(_create(stage, change={"delay_us": SECOND_US}), QueueCreated)
        assert (again.created, again.info.counts.visible) == (False, 1)
        expect(_create(stage), QueueCreated)
        error = refused(_create(stage, change={"delay_us": 0}), QueueExists)
        assert error.setting == "delay_us"  # type: ignore[attr-defined]
        same = {"delay_us": SECOND_US, "wait_us": 5}
        expect(_create(stage, change=same, compare_all=True), QueueCreated)
        whole = refused(_create(stage, change={"delay_us": SECOND_US}, compare_all=True), QueueExists)
        assert whole.setting == "wait_us"  # type: ignore[attr-defined]

    def test_defaults_of_a_creation_are_set_and_never_compared(self, stage: Stage) -> None:
        defaults = {"retention_us": HOUR_US, "delay_us": SECOND_US}
        created = expect(_create(stage, change={"delay_us": 0}, defaults=defaults), QueueCreated)
        assert created.info.settings == QueueSettings(retention_us=HOUR_US)
        again = expect(_create(stage, change={"delay_us": 0}, defaults={"retention_us": MINUTE_US}), QueueCreated)
        assert (again.created, again.info.settings.retention_us) == (False, HOUR_US)

    def test_a_change_sets_what_it_names_and_nothing_else(self, stage: Stage) -> None:
        stage.create(delay_us=SECOND_US)
        stage.later(HOUR_US)
        changed = expect(stage.change(KEY, visibility_timeout_us=7), QueueChanged).info
        assert changed.settings == QueueSettings(delay_us=SECOND_US, visibility_timeout_us=7)
        assert (changed.created, changed.modified) == (stage.now - HOUR_US, stage.now)

    def test_of_two_changes_to_one_version_the_second_is_refused(self, stage: Stage) -> None:
        stage.create()
        seen = stage.describe(KEY).version
        both = [
            ChangeQueue(queue=KEY, origin=TESTER, change={"delay_us": delay_us}, if_version=seen)
            for delay_us in (SECOND_US, HOUR_US)
        ]
        first, second = (expect(each, QueueChanged) for each in stage.batch(both).outcomes)
        assert (first.changed, second.changed) == (True, False)
        assert second.info.settings.delay_us == SECOND_US
        assert seen != first.info.version == second.info.version
        for delay_us in (0, SECOND_US):
            stage.change(KEY, delay_us=delay_us)
        assert stage.describe(KEY).version != first.info.version, "changed and changed back within one microsecond"
        info = stage.describe(KEY)
        stage.reopen(kill=True)
        assert stage.describe(KEY) == info
        assert replay(stage.events()).queues == stage.state().queues, "the history tells it"
        stage.drop(KEY)
        stage.create()
        late = ChangeQueue(queue=KEY, origin=TESTER, change={"delay_us": 5}, if_version=info.version)
        assert not expect(stage.do(late), QueueChanged).changed, "the version of a queue that is no more"

    @for_each("kill", [None, True], fresh="stage")
    def test_a_deleted_queue_is_gone_with_its_messages(self, stage: Stage, kill: bool | None) -> None:
        stage.create()
        for _ in range(3):
            stage.send(KEY)
        stage.take(KEY)
        assert expect(stage.drop(KEY), QueueDeleted).count == 3
        if kill is not None:
            stage.reopen(kill=kill)
        refused(stage.do(DescribeQueue(queue=KEY, origin=TESTER)), QueueMissing)
        refused(stage.drop(KEY), QueueMissing)
        refused(stage.change(KEY, delay_us=1), QueueMissing)
        refused(stage.delete(KEY, "x"), QueueMissing)
        stage.create()
        assert stage.receive(KEY, 10) == []
        stage.later(HOUR_US)
        assert stage.receive(KEY, 10) == []
        stage.sweep()
        assert stage.factory.rows(stage.store) == 0

    def test_the_name_is_free_after_the_cool_down(self, stage: Stage) -> None:
        stage.create()
        stage.drop(KEY)
        stage.later(MINUTE_US - 1)
        stage.reopen()
        error = refused(_create(stage, cooldown_us=MINUTE_US), QueueDeletedRecently)
        assert error.wait_us == 1  # type: ignore[attr-defined]
        assert str(error).endswith("recently: create it in 1 s")
        stage.later(1)
        assert expect(_create(stage, cooldown_us=MINUTE_US), QueueCreated).created

    def test_a_creation_whose_dead_letter_queue_is_missing_leaves_nothing(self, stage: Stage) -> None:
        policy = RedrivePolicy(QueueKey(ACCOUNT, REGION, "nowhere"), 3)
        refused(_create(stage, change={"redrive": policy}), RedriveRefused)
        assert _names(stage) == ([], False)

    def test_a_list_comes_by_name_in_pages(self, stage: Stage) -> None:
        for name in ("b-2", "a-1", "b-1", "b-3", "c-1"):
            stage.create(name)
        assert _names(stage) == (["a-1", "b-1", "b-2", "b-3", "c-1"], False)
        assert _names(stage, prefix="b-", count_max=2) == (["b-1", "b-2"], True)
        assert _names(stage, prefix="b-", count_max=2, after="b-2") == (["b-3"], False)
        assert _names(stage, account="999999999999") == ([], False)
        some = ("b-*", "b-1", "c-?", "a")
        assert _names(stage, granted=some, count_max=3) == (["b-1", "b-2", "b-3"], True)
        assert _names(stage, granted=some, after="b-3") == (["c-1"], False)
        assert _names(stage, granted=some, prefix="b-3") == (["b-3"], False)
        assert _names(stage, granted=("*3", "a*")) == (["a-1", "b-3"], False)
        assert _names(stage, granted=(), count_max=1) == ([], False)

    def test_a_list_of_the_sources_of_a_dead_letter_queue(self, stage: Stage) -> None:
        dead = stage.create("dead")
        stage.create("one", redrive=RedrivePolicy(dead, 3))
        stage.create("two")
        assert _names(stage, dead_letter_target=dead) == (["one"], False)
        assert _names(stage, dead_letter_target=dead, granted=("t*",)) == ([], False)

    def test_a_queue_can_be_emptied_of_a_setting(self, stage: Stage) -> None:
        dead = stage.create("dead")
        stage.create(redrive=RedrivePolicy(dead, 1))
        stage.change(KEY, redrive=None)
        stage.send(KEY)
        for count in (1, 2, 3):
            assert stage.take(KEY, lease_us=0).receive_count == count
