"""Aliases: a further name of a queue whose own is not legal in every protocol."""

from typing import Any

from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, expect, refused

from veilmq.model.commands import ChangeQueue, CreateQueue, DeleteQueue, ListQueues
from veilmq.model.errors import ParameterInvalid, QueueExists
from veilmq.model.outcomes import Outcome, QueueChanged, QueueCreated, QueueDeleted, QueuesListed
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

SMALL = "[a-z-]+"


def _key(name: str) -> QueueKey:
    return QueueKey(ACCOUNT, REGION, name)


def _create(stage: Stage, name: str, alias: str | None, **fields: Any) -> Outcome:
    change = {"alias": alias} | ({"fifo": True} if name.endswith(".fifo") else {})
    return stage.do(CreateQueue(queue=_key(name), origin=TESTER, change=change, **fields))


def _change(stage: Stage, name: str, alias: str | None) -> Outcome:
    return stage.do(ChangeQueue(queue=_key(name), origin=TESTER, change={"alias": alias}))


def _listed(stage: Stage, **fields: Any) -> list[str]:
    fields = {"account": ACCOUNT, "region": REGION, "names": SMALL} | fields
    return [info.key.name for info in expect(stage.do(ListQueues(origin=TESTER, **fields)), QueuesListed).queues]


class TestAliases:
    """Aliases."""

    def test_a_list_shows_who_has_a_legal_name_or_an_alias(self, stage: Stage) -> None:
        for name, alias in (("b", None), ("A_1", "ccc"), ("z.fifo", "aaa"), ("Hidden", None), ("d", None)):
            expect(_create(stage, name, alias), QueueCreated)
        for _ in range(2):
            assert _listed(stage) == ["z.fifo", "b", "A_1", "d"], "in the order of the names that are shown"
            assert _listed(stage, count_max=2) == ["z.fifo", "b"]
            assert _listed(stage, after="b") == ["A_1", "d"]
            assert _listed(stage, prefix="c") == ["A_1"]
            assert _listed(stage, names=None, prefix="A") == ["A_1"]
            assert _listed(stage, granted=("A_*", "aaa", "d")) == ["A_1", "d"], "by its own name and no other"
            stage.reopen(kill=True)

    @for_each("alias", ["", "ab", "a" * 64, "Orders", "a_b", "a--b", "-ab", "ab-", "a.b", "abc\n"])
    def test_an_alias_is_a_name_that_every_protocol_allows(self, stage: Stage, alias: str) -> None:
        assert refused(_create(stage, "A_1", alias), ParameterInvalid).parameter == "alias"  # type: ignore[attr-defined]
        expect(_create(stage, "A_1", None), QueueCreated)
        refused(_change(stage, "A_1", alias), ParameterInvalid)
        assert _listed(stage) == []
        expect(stage.do(DeleteQueue(queue=_key("A_1"), origin=TESTER)), QueueDeleted)

    def test_whose_name_is_legal_needs_none(self, stage: Stage) -> None:
        refused(_create(stage, "orders", "other"), ParameterInvalid)

    def test_an_alias_is_nobody_elses_name(self, stage: Stage) -> None:
        expect(_create(stage, "orders", None), QueueCreated)
        expect(_create(stage, "A_1", "mail"), QueueCreated)
        for alias in ("orders", "mail"):
            taken = refused(_create(stage, "B_1", alias), QueueExists)
            assert str(taken) == f"{_key(alias)} is another queue's name or alias"
        assert refused(_create(stage, "mail", None), QueueExists).setting == "name"  # type: ignore[attr-defined]
        refused(_change(stage, "A_1", "orders"), QueueExists)
        expect(_change(stage, "A_1", "mail"), QueueChanged)
        elsewhere = CreateQueue(queue=QueueKey(ACCOUNT, "elsewhere", "mail"), origin=TESTER)
        expect(stage.do(elsewhere), QueueCreated)

    def test_an_alias_that_was_given_up_is_free(self, stage: Stage) -> None:
        expect(_create(stage, "A_1", "mail"), QueueCreated)
        expect(_change(stage, "A_1", "post"), QueueChanged)
        expect(_create(stage, "mail", None), QueueCreated)
        expect(stage.do(DeleteQueue(queue=_key("A_1"), origin=TESTER)), QueueDeleted)
        expect(_create(stage, "B_1", "post"), QueueCreated)
        expect(_change(stage, "B_1", None), QueueChanged)
        expect(_create(stage, "post", None), QueueCreated)
        assert _listed(stage) == ["mail", "post"]

    def test_a_batch_that_is_rolled_back_gave_none(self, stage: Stage) -> None:
        expect(_create(stage, "A_1", "mail"), QueueCreated)
        post = ChangeQueue(queue=_key("A_1"), origin=TESTER, change={"alias": "post"})
        if stage.store.apply([post], stage.now).wrote:
            stage.factory.abandon(stage.store)
        refused(_create(stage, "mail", None), QueueExists)
        expect(_create(stage, "post", None), QueueCreated)

    def test_creating_it_again_without_its_alias_meets_it(self, stage: Stage) -> None:
        expect(_create(stage, "A_1", "mail"), QueueCreated)
        again = stage.do(CreateQueue(queue=_key("A_1"), origin=TESTER, compare_all=True))
        assert not expect(again, QueueCreated).created
        assert refused(_create(stage, "A_1", "post"), QueueExists).setting == "alias"  # type: ignore[attr-defined]
