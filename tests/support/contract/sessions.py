"""Sessions of the console: they survive a kill, end at their time, and are no more than their bound."""

from tests.support.contract.stage import Stage, expect

from veilmq.model.instant import HOUR_US, MINUTE_US, Instant
from veilmq.model.outcomes import Recorded
from veilmq.model.settings.access import SESSIONS_MAX, CloseSession, OpenSession, StoredSession, UseSession


def session(stage: Stage, number: int = 0, used: int = 0, ends_us: int = HOUR_US) -> StoredSession:
    """One that was opened now."""
    digest, at = number.to_bytes(32), stage.now
    return StoredSession(digest, b"proof", None, "console", False, at, Instant(at + used), Instant(at + ends_us))


def found(stage: Stage, number: int = 0) -> StoredSession | None:
    with stage.store.reader.look() as view:
        return view.session(number.to_bytes(32))


class TestSessions:
    """Sessions of the console."""

    def test_it_is_there_after_a_kill_until_it_is_closed(self, stage: Stage) -> None:
        opened = session(stage)
        expect(stage.do(OpenSession(session=opened)), Recorded)
        stage.reopen(kill=True)
        assert found(stage) == opened
        used, ends = Instant(stage.now + MINUTE_US), Instant(stage.now + 2 * HOUR_US)
        stage.do(UseSession(digest=opened.digest, used=used, ends=ends))
        later = found(stage)
        assert later is not None
        assert (later.used, later.ends, later.opened) == (used, ends, opened.opened)
        stage.do(CloseSession(digest=opened.digest))
        stage.do(UseSession(digest=opened.digest, used=used, ends=ends))
        stage.reopen(kill=True)
        assert found(stage) is None

    def test_a_sweep_deletes_what_is_over_and_nothing_else(self, stage: Stage) -> None:
        for number, ends_us in enumerate((MINUTE_US, MINUTE_US + 1, HOUR_US)):
            stage.do(OpenSession(session=session(stage, number, ends_us=ends_us)))
        stage.later(MINUTE_US)
        stage.sweep()
        assert [found(stage, number) is not None for number in range(3)] == [False, True, True]

    def test_of_too_many_those_go_that_were_unused_for_longest(self, stage: Stage) -> None:
        used = {number: 500 if number == 0 else number for number in range(SESSIONS_MAX + 2)}
        stage.batch([OpenSession(session=session(stage, number, used[number])) for number in used])
        gone = {number for number in used if found(stage, number) is None}
        assert gone == {1, 2}
