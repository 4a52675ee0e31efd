"""Jobs: one row holds a job through all its steps, and each message is acted on once, or left alone."""

from typing import Any

from tests.support.conservation import ledgers
from tests.support.contract.operators import done as operated
from tests.support.contract.operators import operating
from tests.support.contract.stage import ACCOUNT, REGION, TESTER, Stage, bodies, expect, refused

from veilmq.model.commands import CancelJob, Receive, StartJob, Sweep
from veilmq.model.errors import ParameterInvalid, QueueMissing
from veilmq.model.instant import HOUR_US, MINUTE_US, SECOND_US
from veilmq.model.messages import Extras, id_text
from veilmq.model.moves import JOB_RATE_MAX, JOBS_KEPT, TASK_US_MAX, Act, Filter, JobInfo, MoveFailure, MoveStatus
from veilmq.model.outcomes import Extended, JobCancelled, JobStarted
from veilmq.model.settings.queue import FIFO_SUFFIX, QueueKey, RedrivePolicy

NOWHERE = QueueKey(ACCOUNT, REGION, "nowhere")


def start(stage: Stage, source: QueueKey, act: Act, **fields: Any) -> JobInfo:
    return expect(stage.do(StartJob(queue=source, origin=TESTER, act=act, **fields)), JobStarted).info


def shown(stage: Stage, job: JobInfo) -> JobInfo:
    with stage.store.reader.look() as view:
        (found,) = (each for each in view.jobs() if each.id == job.id)
    return found


def finish(stage: Stage, job: JobInfo) -> JobInfo:
    """Sweep as time goes by until the job has ended."""
    for _ in range(1_000):
        stage.sweep()
        found = shown(stage, job)
        if found.status not in {MoveStatus.RUNNING, MoveStatus.CANCELLING}:
            return found
        stage.later(SECOND_US)
    raise AssertionError("the job finds no end")


def run(stage: Stage, source: QueueKey, act: Act, **fields: Any) -> JobInfo:
    return finish(stage, start(stage, source, act, **fields))


def numbers(job: JobInfo) -> tuple[int, int, int, int]:
    return job.seen, job.matched, job.done, job.failed


def balanced(stage: Stage) -> None:
    """Every queue holds what its history says."""
    for incarnation, book in ledgers(stage.events()).items():
        names = {event.queue for event in stage.events() if event.incarnation == incarnation and event.queue}
        for name in names:
            assert sum(stage.counts(QueueKey(ACCOUNT, REGION, name))) == book.live, name


def dead_letters(stage: Stage, *given: str, **settings: Any) -> tuple[QueueKey, QueueKey]:
    dead = stage.create("dead", **settings)
    queue = stage.create("jobs", redrive=RedrivePolicy(dead, 1))
    for body in given:
        stage.send(queue, body, extras=Extras(type=body.partition(" ")[0]))
        stage.take(queue, lease_us=SECOND_US)
        stage.later(SECOND_US)
        assert stage.receive(queue) == []
    return queue, dead


class TestJobs:
    """Jobs of operators."""

    def test_a_delete_takes_what_the_filter_matches_and_nothing_else(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(200):
            stage.send(queue, str(number), priority=1 + number % 3, extras=Extras(type="ab"[number % 2]))
        ended = run(stage, queue, Act.DELETE, filter=Filter(type="a"))
        assert (ended.status, ended.total, numbers(ended)) == (MoveStatus.COMPLETED, 200, (200, 100, 100, 0))
        assert all(int(body) % 2 for body in bodies(stage.peek(queue, 200)))
        assert stage.counts(queue) == (100, 0, 0)
        balanced(stage)

    def test_each_filter_matches_what_it_says(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "old of x", extras=Extras(group="x"))
        stage.later(HOUR_US)
        stage.send(queue, "received")
        for message in stage.receive(queue, 2):
            stage.extend(queue, message.handle, 0)
        stage.send(queue, "new of x", extras=Extras(group="x"))
        stage.send(queue, "a needle \u20ac in it")
        for given, expected in (
            ({}, 4), ({"group": "x"}, 2), ({"age_us_min": HOUR_US}, 1), ({"receives_min": 1}, 2),
            ({"text": "le \u20ac"}, 1), ({"text": "NEEDLE"}, 0), ({"type": "none"}, 0),
            ({"group": "x", "receives_min": 1}, 1),
        ):  # fmt: skip
            counted = run(stage, queue, Act.DELETE, filter=Filter(**given), dry_run=True)
            assert (counted.seen, counted.matched, counted.done) == (4, expected, 0), given
        assert stage.counts(queue)[0] == 4

    def test_the_age_counts_at_the_start(self, stage: Stage) -> None:
        queue = stage.create()
        for body in ("a", "b", "c"):
            stage.send(queue, body)
            stage.later(MINUTE_US)
        ended = run(stage, queue, Act.DELETE, filter=Filter(age_us_min=2 * MINUTE_US), rate_max=1)
        assert (ended.matched, bodies(stage.peek(queue))) == (2, ["c"])

    def test_a_dry_run_changes_nothing_but_its_own_row(self, stage: Stage) -> None:
        dead = stage.create("dead")
        queue = stage.create("jobs", redrive=RedrivePolicy(dead, 3))
        for number in range(20):
            stage.send(queue, str(number))
        handle = stage.take(queue, lease_us=HOUR_US).handle
        stage.send(queue, "short", ttl_us=SECOND_US)
        before, state = stage.following(), None
        for act, fields, matched in (
            (Act.DELETE, {}, 19), (Act.MOVE, {"destination": dead}, 19), (Act.RELEASE, {}, 1), (Act.PURGE, {}, 21),
        ):  # fmt: skip
            job = start(stage, queue, act, dry_run=True, **fields)
            state = state or stage.state()
            while shown(stage, job).status is MoveStatus.RUNNING:
                stage.batch([Sweep()])
            expected = matched if act in (Act.RELEASE, Act.PURGE) else matched + 1  # the short-lived one is there yet
            assert (shown(stage, job).matched, shown(stage, job).done) == (expected, 0), act
        assert stage.state() == state
        assert stage.kinds(before) == []
        assert isinstance(stage.extend(queue, handle, 1), Extended)

    def test_what_is_in_flight_delayed_or_came_later_is_left_alone(self, stage: Stage) -> None:
        queue = stage.create()
        for body in ("leased", "free"):
            stage.send(queue, body)
        stage.send(queue, "delayed", delay_us=HOUR_US)
        assert stage.take(queue, lease_us=HOUR_US).body == "leased"
        job = start(stage, queue, Act.DELETE)
        stage.send(queue, "later")
        assert numbers(finish(stage, job)) == (2, 1, 1, 0)
        assert stage.counts(queue) == (1, 1, 1)
        assert bodies(stage.peek(queue)) == ["later"]

    def test_a_lease_that_has_ended_holds_nothing(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(100):
            stage.send(queue, str(number))
        for _ in range(10):
            stage.receive(queue, 10, lease_us=SECOND_US)
        stage.send(queue, "delayed", delay_us=SECOND_US)
        stage.later(SECOND_US)
        assert run(stage, queue, Act.DELETE).done == 101
        balanced(stage)

    def test_expired_messages_go_as_at_any_other_use(self, stage: Stage) -> None:
        queue = stage.create()
        stage.send(queue, "old", ttl_us=SECOND_US)
        stage.send(queue, "new")
        job = start(stage, queue, Act.DELETE)
        stage.later(2 * SECOND_US)
        assert finish(stage, job).done == 1
        assert sorted(kind for kind in stage.kinds() if kind in ("deleted", "expired")) == ["deleted", "expired"]
        balanced(stage)

    def test_a_move_takes_them_elsewhere_as_new_messages(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        stage.send(queue, "stays", extras=Extras(type="b"))
        old = stage.send(queue, "goes", extras=Extras(type="a"))
        before = stage.following()
        job = start(stage, queue, Act.MOVE, destination=other, filter=Filter(type="a"))
        assert stage.batch([Sweep()]).visible[other] == 1
        assert stage.batch([Receive(queue=other, origin=TESTER)]).outcomes[0].messages  # type: ignore[union-attr]
        assert numbers(finish(stage, job)) == (2, 1, 1, 0)
        moved = stage.events(before)[0]
        assert (moved.kind, moved.message, moved.principal) == ("moved", id_text(old.id), TESTER.principal)
        assert moved.detail is not None
        assert moved.detail["job"] == id_text(job.id)
        assert bodies(stage.peek(queue)) == ["stays"]
        balanced(stage)

    def test_a_redrive_takes_back_what_the_filter_matches(self, stage: Stage) -> None:
        queue, dead = dead_letters(stage, "a 1", "b 2", "a 3")
        stage.send(dead, "sent here", extras=Extras(type="a"))
        ended = run(stage, dead, Act.REDRIVE, filter=Filter(type="a"))
        assert (ended.status, ended.failure, numbers(ended)) == (
            MoveStatus.COMPLETED, MoveFailure.SOURCE_UNKNOWN, (4, 3, 2, 1),
        )  # fmt: skip
        assert sorted(bodies(stage.receive(queue, 10))) == ["a 1", "a 3"]
        assert sorted(bodies(stage.peek(dead))) == ["b 2", "sent here"]
        balanced(stage)

    def test_a_move_ends_when_its_destination_is_gone_but_not_at_a_message_too_large(self, stage: Stage) -> None:
        queue, small, gone = stage.create(), stage.create("small", message_bytes_max=1_024), stage.create("gone")
        stage.send(queue, "x" * 2_000)
        stage.send(queue, "short")
        ended = run(stage, queue, Act.MOVE, destination=small)
        assert (ended.status, ended.failure, numbers(ended)) == (
            MoveStatus.COMPLETED, MoveFailure.MESSAGE_TOO_LARGE, (2, 2, 1, 1),
        )  # fmt: skip
        job = start(stage, queue, Act.MOVE, destination=gone)
        stage.drop(gone)
        ended = finish(stage, job)
        assert (ended.status, ended.failure, ended.done) == (MoveStatus.FAILED, MoveFailure.QUEUE_MISSING, 0)
        assert stage.counts(queue)[0] == 1

    def test_a_group_keeps_its_order_and_what_is_behind_a_held_message_stays(self, stage: Stage) -> None:
        queue, other = stage.create("jobs" + FIFO_SUFFIX), stage.create("other" + FIFO_SUFFIX)
        for number in range(60):
            group = "abc"[number % 3]
            stage.send(queue, f"{group}{number:02}", extras=Extras(group=group, deduplication_id=str(number)))
        held = stage.take(queue, lease_us=HOUR_US).body[0]
        counted = run(stage, queue, Act.MOVE, destination=other, dry_run=True)
        ended = run(stage, queue, Act.MOVE, destination=other, rate_max=7)
        assert (ended.done, counted.matched) == (40, 40)
        moved = bodies(stage.peek(other, 100))
        for group in "abc":
            found = [body for body in moved if body[0] == group]
            assert found == sorted(found)
            assert len(found) == (0 if group == held else 20)
        assert stage.counts(queue) == (19, 0, 1)
        balanced(stage)

    def test_a_release_makes_visible_what_was_in_flight_at_the_start(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        for number in range(5):
            stage.send(queue, str(number), extras=Extras(type="ab"[number % 2]))
            stage.send(other)
        stage.receive(other, 5, lease_us=HOUR_US)
        handles = {message.body: message.handle for message in stage.receive(queue, 4, lease_us=HOUR_US)}
        job = start(stage, queue, Act.RELEASE, filter=Filter(type="a"))
        before = stage.following()
        stage.later(SECOND_US)
        stage.take(queue, lease_us=HOUR_US)  # granted since the start: it is its holder's
        assert stage.batch([Sweep()]).visible[queue] == 2
        assert numbers(finish(stage, job)) == (4, 2, 2, 0)
        assert (stage.counts(queue), stage.counts(other)) == ((2, 0, 3), (0, 0, 5))
        released = [event for event in stage.events(before) if event.kind == "released"]
        assert [(event.detail, event.held_us) for event in released] == [({"job": id_text(job.id)}, SECOND_US)] * 2
        assert isinstance(stage.extend(queue, handles["0"], 5), Extended)  # as after any release, until it is received
        balanced(stage)

    def test_a_purge_is_done_at_once(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(3):
            stage.send(queue, str(number))
        stage.take(queue)
        ended = start(stage, queue, Act.PURGE)
        assert (ended.status, ended.ended, numbers(ended)) == (MoveStatus.COMPLETED, stage.now, (3, 3, 3, 0))
        assert stage.counts(queue) == (0, 0, 0)
        assert shown(stage, ended) == ended

    def test_the_rate_is_kept_and_a_pause_is_not_made_up_for(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(100):
            stage.send(queue, str(number))
        job = start(stage, queue, Act.DELETE, rate_max=10)
        done = []
        for _ in range(3):
            stage.sweep()
            done.append(shown(stage, job).done)
            stage.later(SECOND_US)
        assert done == [1, 11, 21]
        stage.later(HOUR_US)
        stage.sweep()
        assert shown(stage, job).done <= 21 + 11

    def test_a_job_goes_on_after_a_restart_and_acts_on_each_message_once(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        for number in range(30):
            stage.send(queue, str(number))
        job = start(stage, queue, Act.MOVE, destination=other, rate_max=7)
        for kill in (False, True) * 3:
            stage.sweep()
            stage.reopen(kill=kill)
            assert stage.counts(queue)[0] + stage.counts(other)[0] == 30
            stage.later(SECOND_US)
        assert numbers(finish(stage, job)) == (30, 30, 30, 0)
        assert sorted(bodies(stage.receive(other, 100)), key=int) == [str(number) for number in range(30)]
        balanced(stage)

    def test_a_step_that_was_not_committed_never_was(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(5):
            stage.send(queue, str(number))
        job = start(stage, queue, Act.DELETE)
        stage.later(SECOND_US)
        assert stage.store.apply([Sweep()], stage.now).wrote
        stage.factory.abandon(stage.store)
        assert (stage.counts(queue)[0], shown(stage, job).done) == (5, 0)
        assert finish(stage, job).done == 5

    def test_a_cancelled_job_does_nothing_more(self, stage: Stage) -> None:
        queue = stage.create()
        for number in range(10):
            stage.send(queue, str(number))
        job = start(stage, queue, Act.DELETE, rate_max=1)
        stage.sweep()
        cancelled = expect(stage.do(CancelJob(origin=TESTER, job=job.id)), JobCancelled)
        assert (cancelled.cancelled, cancelled.info and cancelled.info.status) == (True, MoveStatus.CANCELLING)
        stage.reopen(kill=True)
        stage.later(HOUR_US)
        ended = finish(stage, job)
        assert (ended.status, ended.done, stage.counts(queue)[0]) == (MoveStatus.CANCELLED, 1, 9)
        assert not expect(stage.do(CancelJob(origin=TESTER, job=job.id)), JobCancelled).cancelled
        unknown = expect(stage.do(CancelJob(origin=TESTER, job=bytes(16))), JobCancelled)
        assert (unknown.info, unknown.cancelled) == (None, False)
        long = start(stage, queue, Act.DELETE, rate_max=1)
        stage.later(TASK_US_MAX)
        assert (finish(stage, long).status, shown(stage, long).failure) == (MoveStatus.FAILED, MoveFailure.TOO_LONG)

    def test_what_cannot_begin_is_refused_and_leaves_nothing(self, stage: Stage) -> None:
        queue, fifo = stage.create(), stage.create("other" + FIFO_SUFFIX)
        stage.send(queue)
        for source, act, fields, kind, named in (
            (NOWHERE, Act.DELETE, {}, QueueMissing, "nowhere"),
            (queue, Act.MOVE, {}, ParameterInvalid, "destination"),
            (queue, Act.MOVE, {"destination": NOWHERE}, QueueMissing, "nowhere"),
            (queue, Act.MOVE, {"destination": queue}, ParameterInvalid, "destination"),
            (queue, Act.MOVE, {"destination": fifo}, ParameterInvalid, "destination"),
            (queue, Act.DELETE, {"destination": fifo}, ParameterInvalid, "destination"),
            (queue, Act.REDRIVE, {}, ParameterInvalid, "dead-letter"),
            (queue, Act.PURGE, {"filter": Filter(type="a")}, ParameterInvalid, "filter"),
            (queue, Act.PURGE, {"rate_max": 1}, ParameterInvalid, "rate"),
            (queue, Act.DELETE, {"rate_max": 0}, ParameterInvalid, "rate"),
            (queue, Act.DELETE, {"rate_max": JOB_RATE_MAX + 1}, ParameterInvalid, "rate"),
        ):
            outcome = stage.do(StartJob(queue=source, origin=TESTER, act=act, **fields))
            assert named in str(refused(outcome, kind))
        with stage.store.reader.look() as view:
            assert view.jobs() == []
        start(stage, queue, Act.DELETE, rate_max=1)
        busy = refused(stage.do(StartJob(queue=queue, origin=TESTER, act=Act.DELETE)), ParameterInvalid)
        assert "is running on this queue" in str(busy)

    def test_ended_jobs_are_dropped_and_all_go_with_their_queue(self, stage: Stage) -> None:
        queue, other = stage.create(), stage.create("other")
        stage.send(other)
        running = start(stage, other, Act.DELETE, rate_max=1)
        stage.batch([StartJob(queue=queue, origin=TESTER, act=Act.PURGE) for _ in range(JOBS_KEPT + 5)])
        with stage.store.reader.look() as view:
            kept = view.jobs()
        assert (len(kept), kept[-1].id) == (JOBS_KEPT + 1, running.id)
        stage.drop(queue)
        with stage.store.reader.look() as view:
            assert [job.id for job in view.jobs()] == [running.id]

    def test_a_command_that_starts_a_job_is_known_by_it(self, stage: Stage) -> None:
        queue = stage.create()
        command = operating(StartJob(queue=queue, origin=TESTER, act=Act.DELETE))
        first = operated(stage, command)
        job = first.outcomes[0].info
        assert stage.events()[-1].detail == {"id": "one", "act": "do", "asked": {"target": "x"}, "job": id_text(job.id)}
        finish(stage, job)
        assert operated(stage, command).outcomes == first.outcomes
        with stage.store.reader.look() as view:
            assert len(view.jobs()) == 1
