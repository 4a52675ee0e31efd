"""Accounts: create, find, list and delete queues."""

import pytest

from veilmq.client.messages import Template
from veilmq.model.errors import QueueDeletedRecently, QueueExists, QueueMissing, VeilError
from veilmq.testing.client_contract.stage import LONG, SECOND, Stage, unrefused


class TestAccounts:
    """Account."""

    def test_creating_twice_is_creating_once(self, stage: Stage) -> None:
        name, template = stage.name("twice"), Template(visibility_timeout=60)
        assert stage.account.create(name, template) is True
        stage.account.queue(name).send("kept")
        assert stage.account.create(name, template) is False
        assert stage.account.create(name) is False
        assert stage.take(stage.account.queue(name)).body == "kept"

    def test_another_setting_is_another_queue(self, stage: Stage) -> None:
        name = stage.name("other")
        stage.account.create(name, Template(visibility_timeout=60))
        with pytest.raises(QueueExists) as refused:
            stage.account.create(name, Template(visibility_timeout=61))
        assert refused.value.queue == name
        assert stage.account.queue(name).stats().visibility_timeout in {60, None}

    def test_settings_are_told(self, stage: Stage) -> None:
        queue = stage.create(Template(visibility_timeout=61, retention=3_600, delay=2))
        stats = queue.stats()
        assert stats.visibility_timeout in {61, None}
        assert stats.retention in {3_600, None}
        assert stats.delay in {2, None}

    def test_stats_count(self, stage: Stage) -> None:
        queue = stage.create()
        queue.send_batch(["a", "b", "c"])
        stage.take(queue)
        stats = queue.stats()
        assert (stats.visible, stats.in_flight) in {(2, 1), (2, None), (3, None)}

    def test_settings_that_cannot_be_are_refused(self, stage: Stage) -> None:
        name = stage.name("bad")
        templates = [Template(visibility_timeout=-1), Template(retention=-1), Template(delay=-1)]
        assert unrefused(lambda template: stage.account.create(name, template), templates) == []
        assert name not in stage.account.names()

    def test_names_that_cannot_be_are_refused(self, stage: Stage) -> None:
        assert unrefused(stage.account.create, ["", "with space", "a/b", "x" * 300]) == []

    def test_names_are_listed_by_their_beginning(self, stage: Stage) -> None:
        beginning = stage.name("list")
        wanted = sorted(f"{beginning}-{letter}" for letter in "abc")
        for name in wanted:
            stage.account.create(name)
        assert sorted(stage.account.names(f"{beginning}-")) == wanted
        assert set(wanted) <= set(stage.account.names())
        assert stage.account.names(f"{beginning}-x") == []

    def test_a_queue_that_is_not_there(self, stage: Stage) -> None:
        name = stage.name("missing")
        for call in (lambda: stage.account.queue(name).stats(), lambda: stage.account.delete(name)):
            with pytest.raises(QueueMissing) as refused:
                call()
            assert refused.value.queue == name

    def test_a_queue_that_was_deleted(self, stage: Stage) -> None:
        queue = stage.create()
        held = stage.held(queue)
        stage.account.delete(queue.name)
        assert queue.name not in stage.account.names()
        for call in (
            lambda: queue.send("x"),
            queue.receive,
            lambda: queue.extend(held.handle, LONG),
            lambda: queue.delete(held.handle),
            queue.stats,
        ):
            with pytest.raises(QueueMissing):
                call()

    def test_a_queue_that_was_made_again_is_another(self, stage: Stage) -> None:
        queue = stage.create()
        held, first = stage.held(queue), queue.stats().incarnation
        stage.account.delete(queue.name)
        stage.pass_time(SECOND)  # some services report creation times in whole seconds
        try:
            assert stage.account.create(queue.name)
        except QueueDeletedRecently:
            return
        again = stage.account.queue(queue.name)
        assert again.receive() == []
        assert first is None or again.stats().incarnation != first
        with pytest.raises(VeilError):
            again.extend(held.handle, LONG)

    def test_a_queue_knows_its_account_and_name(self, stage: Stage) -> None:
        queue = stage.create()
        assert queue.account.queue(queue.name).name == queue.name
