"""While a file of the database is gone under a running store, it takes no messages, and hands out those that it has."""

from pathlib import Path
from shutil import copyfile

import pytest
from tests.store.redo_stages import started
from tests.support.contract.stage import Stage, bodies, expect, sending
from tests.support.sqlite import SqliteFactory, store_of

from veilmq.model.errors import StoreFailed
from veilmq.model.instant import SECOND_US
from veilmq.model.outcomes import Deleted
from veilmq.testing.for_each import for_each


@for_each("name", ["veilmq.db", "veilmq.db-wal"])
def test_nothing_is_taken_until_the_file_is_back(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    (tmp_path / name).mkdir()
    stage, away = Stage(SqliteFactory(tmp_path / name / "data")), tmp_path / name / "away"
    queue = started(stage)
    stage.send(queue, "acknowledged")
    assert len(stage.peek(queue)) == 1
    file = store_of(stage).directory.database.with_name(name)
    file.rename(away)
    stage.later(SECOND_US)
    refused = stage.do(sending(queue))
    assert refused == StoreFailed(reason=f"{name} was deleted or replaced while the server ran")
    assert refused == store_of(stage).reader.refusal
    readers = store_of(stage).readers
    with (
        readers.lend(),
        pytest.raises(StoreFailed),
        readers.lend(),
    ):  # the first was open before; SQLite would make a file
        pass
    assert not file.exists()
    expect(stage.delete(queue, stage.take(queue).handle), Deleted)

    copyfile(away, file)
    stage.later(SECOND_US)
    assert stage.do(sending(queue)) == refused

    away.rename(file)
    stage.later(SECOND_US)
    stage.send(queue, "next")
    with readers.lend(), readers.lend():
        pass
    stage.reopen(kill=True)
    assert bodies(stage.receive(queue, 10)) == ["next"]
    stage.store.close()
    told, back = (record.getMessage() for record in caplog.records[:2])
    assert told.startswith(f"{file} was deleted or replaced while the server ran: sends and creates are refused until")
    assert back == f"{file} is back"
