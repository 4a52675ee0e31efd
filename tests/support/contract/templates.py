"""Messages that are kept under names to be sent again: of one queue each, bounded by number and bytes."""

from tests.support.contract.stage import Stage, expect, refused

from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.outcomes import Recorded, TemplateKept, TemplatesListed
from veilmq.model.settings.queue import (
    TEMPLATE_BYTES_MAX,
    TEMPLATES_BYTES_MAX,
    TEMPLATES_MAX,
    TEMPLATES_OF_ACCOUNT_MAX,
    DropTemplate,
    KeepTemplate,
    ListTemplates,
    QueueKey,
)


def keeping(queue: QueueKey, name: str, message: bytes = b"{}") -> KeepTemplate:
    return KeepTemplate(queue=queue, name=name, message=message, principal="ann")


def found(stage: Stage, queue: QueueKey) -> dict[str, bytes]:
    listed = expect(stage.do(ListTemplates(queue=queue)), TemplatesListed)
    return {each.name: each.message for each in listed.templates}


class TestTemplates:
    """Templates of messages."""

    def test_they_are_of_one_queue_and_go_with_it(self, stage: Stage) -> None:
        jobs, others = stage.create(), stage.create("jobs", account="111111111111")
        assert expect(stage.do(keeping(jobs, "b", b"1")), TemplateKept).new
        assert expect(stage.do(keeping(jobs, "a", b"2")), TemplateKept).new
        assert not expect(stage.do(keeping(jobs, "b", b"3")), TemplateKept).new
        stage.do(keeping(others, "b", b"4"))
        stage.reopen(kill=True)
        assert (found(stage, jobs), found(stage, others)) == ({"a": b"2", "b": b"3"}, {"b": b"4"})
        expect(stage.do(DropTemplate(queue=jobs, name="a")), Recorded)
        refused(stage.do(DropTemplate(queue=jobs, name="a")), ParameterInvalid)
        stage.drop(jobs)
        for command in (keeping(jobs, "b"), DropTemplate(queue=jobs, name="b"), ListTemplates(queue=jobs)):
            refused(stage.do(command), QueueMissing)
        stage.create()
        assert (found(stage, jobs), found(stage, others)) == ({}, {"b": b"4"})

    def test_a_queue_and_an_account_have_so_many_at_most(self, stage: Stage) -> None:
        others = stage.create("jobs", account="111111111111")
        full, *queues = (stage.create(f"jobs-{number}") for number in range(TEMPLATES_OF_ACCOUNT_MAX // TEMPLATES_MAX))
        stage.batch([keeping(full, str(number)) for number in range(TEMPLATES_MAX)])
        refused(stage.do(keeping(full, "more")), ParameterInvalid)
        assert not expect(stage.do(keeping(full, "0", b"2")), TemplateKept).new, "one of them can be replaced"
        stage.batch([keeping(queue, str(number)) for queue in queues for number in range(TEMPLATES_MAX)])
        late = stage.create("late")
        refused(stage.do(keeping(late, "more")), ParameterInvalid)
        expect(stage.do(keeping(others, "theirs")), TemplateKept)
        expect(stage.do(keeping(full, "1", b"2")), TemplateKept)

    def test_an_account_has_so_many_bytes_of_them(self, stage: Stage) -> None:
        message = b"x" * TEMPLATE_BYTES_MAX
        queues = [stage.create(f"jobs-{number}") for number in range(8)]
        most = TEMPLATES_BYTES_MAX // TEMPLATE_BYTES_MAX
        outcomes = stage.batch([keeping(queues[number // 16], str(number), message) for number in range(most)]).outcomes
        assert all(expect(each, TemplateKept).new for each in outcomes)
        refused(stage.do(keeping(queues[0], "more", b"x")), ParameterInvalid)
        expect(stage.do(keeping(queues[0], "0", b"x")), TemplateKept)
        expect(stage.do(keeping(queues[0], "more", b"x")), TemplateKept)
