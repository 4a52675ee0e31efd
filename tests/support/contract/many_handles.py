"""Many handles in one batch, as a keeper of leases sends them.

A store may treat a large group differently from a small one; the result for each handle is the same.
"""

from collections.abc import Sequence

from tests.support.contract.stage import TESTER, Stage, bodies, expect, sending

from veilmq.model.commands import Delete, Extend, Origin
from veilmq.model.errors import LeaseTaken, MessageGone, ReceiptInvalid, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Delivery, Extras, id_text
from veilmq.model.outcomes import Deleted, Extended, Outcome
from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

SIZES = [2, 7, 8, 9, 100]
LEASE_US = 10 * SECOND_US


class TestManyHandles:
    """Extend and delete by the hundred."""

    @for_each("size", SIZES, fresh="stage")
    def test_extends_that_differ(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        leases = [(1 + place % 3) * LEASE_US for place in range(size)]
        outcomes = _apply(
            stage, [_extend(stage, queue, message, lease) for message, lease in zip(held, leases, strict=True)]
        )
        assert [expect(outcome, Extended).due - stage.now for outcome in outcomes] == leases
        for passed in (1, 2, 3):
            stage.later(LEASE_US)
            back = {message.body for message in stage.receive(queue, size, lease_us=100 * LEASE_US)}
            assert back == {
                message.body for message, lease in zip(held, leases, strict=True) if lease == passed * LEASE_US
            }

    @for_each("size", SIZES, fresh="stage")
    def test_each_is_in_the_history_with_all_that_is_known_of_its_message(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        start = stage.following()
        _apply(stage, [_extend(stage, queue, message, LEASE_US) for message in held])
        _apply(stage, [_delete(stage, queue, message) for message in held])
        events = stage.events(start)
        assert [event.kind for event in events] == ["extended"] * size + ["deleted"] * size
        for event, message in zip(events, held + held, strict=True):
            known = (event.message, event.sequence, event.attempt, event.group, event.type, event.body_bytes)
            extras = message.extras
            assert known == (id_text(message.id), message.sequence, 1, extras.group, extras.type, len(message.body))

    def test_deletes_of_two_queues_by_two_senders_in_turns(self, stage: Stage) -> None:
        held: list[tuple[QueueKey, Delivery]] = []
        for name in ("jobs", "tasks"):
            queue = stage.create(name)
            stage.batch([sending(queue) for _ in range(8)])
            held += [(queue, message) for message in stage.receive(queue, 8, lease_us=LEASE_US)]
        turns = [held[place] for place in (0, 1, 8, 9, 2, 3, 10)]
        senders = [Origin("sqs", name) for name in ("ann", "bob", "bob", "ann", "ann", "bob", "bob")]
        start = stage.following()
        deletes = [
            Delete(queue=queue, origin=sender, handle=message.handle, arrived=stage.now)
            for (queue, message), sender in zip(turns, senders, strict=True)
        ]
        for outcome in _apply(stage, deletes):
            expect(outcome, Deleted)
        told = [(event.kind, event.queue, event.sequence, event.principal) for event in stage.events(start)]
        assert told == [
            ("deleted", queue.name, message.sequence, sender.principal)
            for (queue, message), sender in zip(turns, senders, strict=True)
        ]
        assert [stage.counts(queue) for queue in (held[0][0], held[8][0])] == [(0, 0, 4), (0, 0, 5)]

    @for_each("size", SIZES, fresh="stage")
    def test_of_two_extends_of_one_message_the_last_counts(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        commands = [_extend(stage, queue, message, lease) for lease in (LEASE_US, 3 * LEASE_US) for message in held]
        for outcome in _apply(stage, commands):
            expect(outcome, Extended)
        stage.later(3 * LEASE_US - 1)
        assert stage.receive(queue, size) == []
        stage.later(1)
        assert len(stage.receive(queue, size)) == size

    @for_each("size", SIZES, fresh="stage")
    def test_of_two_rotating_extends_of_one_handle_the_second_is_stale(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        commands = [_extend(stage, queue, message, LEASE_US, rotate=True) for message in held]
        outcomes = _apply(stage, commands + commands)
        handles = [expect(outcome, Extended).handle for outcome in outcomes[:size]]
        assert [type(outcome) for outcome in outcomes[size:]] == [LeaseTaken] * size
        stage.reopen(kill=True)
        for handle in handles:
            expect(stage.delete(queue, handle), Deleted)

    @for_each("size", SIZES, fresh="stage")
    def test_one_that_cannot_be_takes_none_of_the_others_with_it(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        stale, gone = held[0], held[-1]
        stage.extend(queue, stale.handle, 0)
        taken = stage.take(queue)
        assert taken.id == stale.id
        stage.delete(queue, gone.handle)
        for make, done in ((_extend, Extended), (_delete, Deleted)):
            commands = [make(stage, queue, message, LEASE_US) for message in held]
            commands.insert(1, make(stage, queue, held[0], LEASE_US, handle="forged"))
            kinds = [type(outcome) for outcome in _apply(stage, commands)]
            assert kinds == [LeaseTaken, ReceiptInvalid, *[done] * (size - 2), MessageGone]
        assert stage.counts(queue) == (0, 0, 1)
        expect(stage.delete(queue, taken.handle), Deleted)

    @for_each("size", SIZES, fresh="stage")
    def test_releases_make_all_visible_in_their_order(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        applied = stage.batch([_extend(stage, queue, message, 0) for message in reversed(held)])
        assert applied.visible == {queue: size}
        assert stage.counts(queue) == (size, 0, 0)
        assert bodies(stage.receive(queue, size)) == bodies(held)

    @for_each("size", SIZES, fresh="stage")
    def test_delayed_ones_are_rescheduled_by_the_handles_of_their_sends(self, stage: Stage, size: int) -> None:
        queue = stage.create()
        sent = [stage.send(queue, str(number), delay_us=LEASE_US, wants_handle=True) for number in range(size)]
        ready = [stage.send(queue, str(size + number), wants_handle=True) for number in range(size)]
        handles = [each.handle for each in sent + ready]
        commands = [
            Extend(queue=queue, origin=TESTER, handle=handle, lease_us=2 * LEASE_US, arrived=stage.now)
            for handle in handles
        ]
        for outcome in _apply(stage, commands):
            expect(outcome, Extended)
        assert stage.counts(queue) == (0, 2 * size, 0)
        stage.later(2 * LEASE_US)
        assert len(stage.receive(queue, 2 * size)) == 2 * size

    @for_each("size", SIZES, fresh="stage")
    def test_deleting_twice_in_one_batch(self, stage: Stage, size: int) -> None:
        queue, held = _held(stage, size)
        commands = [_delete(stage, queue, message) for message in held]
        kinds = [type(outcome) for outcome in _apply(stage, commands + commands)]
        assert kinds == [Deleted] * size + [MessageGone] * size
        stage.reopen(kill=True)
        assert stage.counts(queue) == (0, 0, 0)
        stage.later(100 * LEASE_US)
        assert stage.receive(queue, size) == []

    def test_a_batch_that_is_rolled_back_leaves_all_as_they_were(self, stage: Stage) -> None:
        queue, held = _held(stage, 50)
        commands = [_extend(stage, queue, message, 0) for message in held]
        assert all(not isinstance(outcome, VeilError) for outcome in stage.store.apply(commands, stage.now).outcomes)
        stage.factory.abandon(stage.store)
        assert stage.counts(queue) == (0, 0, 50)
        assert stage.receive(queue, 50) == []
        stage.later(LEASE_US)
        assert len(stage.receive(queue, 50)) == 50


def _held(stage: Stage, size: int) -> tuple[QueueKey, list[Delivery]]:
    """A queue with `size` leased messages, of which some have a group and a type that need care in any notation."""
    queue = stage.create()
    odd = Extras(group='g"\\\n;', type="tÿ\U0001f600'")
    stage.batch([sending(queue, f"m{number}", **({"extras": odd} if number % 2 else {})) for number in range(size)])
    held = stage.receive(queue, size, lease_us=LEASE_US)
    assert len(held) == size
    return queue, held


def _apply(stage: Stage, commands: Sequence[Extend | Delete]) -> list[Outcome]:
    return stage.batch(commands).outcomes


def _extend(
    stage: Stage, queue: QueueKey, message: Delivery, lease_us: int, handle: str | None = None, rotate: bool = False
) -> Extend:
    handle = handle or message.handle
    return Extend(queue=queue, origin=TESTER, handle=handle, lease_us=lease_us, arrived=stage.now, rotate=rotate)


def _delete(stage: Stage, queue: QueueKey, message: Delivery, lease_us: int = 0, handle: str | None = None) -> Delete:
    return Delete(queue=queue, origin=TESTER, handle=handle or message.handle, arrived=stage.now)
