"""The first line of a worker's error can be left out of everything that is stored."""

from pathlib import Path

import msgspec
from tests.support.contract.stage import Stage
from tests.support.sqlite import SMALL, SqliteFactory

from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Failure, Report, Reported
from veilmq.model.settings.queue import RedrivePolicy


def test_error_lines_can_be_left_out(tmp_path: Path) -> None:
    stage = Stage(SqliteFactory(tmp_path / "data", msgspec.structs.replace(SMALL, error_lines=False)))
    dead = stage.create("dead")
    queue = stage.create(redrive=RedrivePolicy(dead, 1))
    stage.send(queue)
    failure = Failure("raised", "ValueError", "hunter2")
    stage.extend(queue, stage.take(queue).handle, SECOND_US, report=Report(Reported.RETRY, failure))
    stage.later(SECOND_US)
    assert stage.receive(queue) == []
    letter = stage.take(dead)
    assert (letter.extras.error_type, letter.extras.error) == ("ValueError", "")
    details = [event.detail for event in stage.events() if event.kind in ("released_for_retry", "dead_lettered")]
    assert [(detail or {}).get("error_type") for detail in details] == ["ValueError"] * 2
    assert "hunter2" not in str(details)
    stage.store.close()
    assert not any(b"hunter2" in path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file())
