"""Sessions of the console: they survive a kill, end at their time, and are no more than their bound; and what all
servers of a cluster share."""

from tests.support.contract.stage import Stage, expect

from veilmq.model.instant import HOUR_US, MINUTE_US, Instant
from veilmq.model.outcomes import Recorded, Shared
from veilmq.model.settings.access import SESSIONS_MAX, CloseSession, OpenSession, Share, StoredSession, UseSession


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


class TestShared:
    """Values that all servers of a cluster have."""

    def test_the_first_value_stands_until_it_is_replaced(self, stage: Stage) -> None:
        start = stage.following()

        def shared(value: bytes, **options: bool) -> bytes:
            return expect(stage.do(Share(name="token", value=value, **options)), Shared).value

        assert shared(b"first") == shared(b"second") == b"first"
        stage.reopen(kill=True)
        assert shared(b"third") == b"first"
        assert shared(b"fourth", replaces=True) == shared(b"fifth") == b"fourth"
        assert expect(stage.do(Share(name="key", value=b"another")), Shared).value == b"another"
        assert stage.following() == start  # the history says nothing of it

    def test_no_text_shows_a_value(self) -> None:
        for each in (Share(name="token", value=b"secret"), Shared(b"secret")):
            assert "secret" not in f"{each} {each!r}"
