"""A server that goes away amid a drain, and a manifest that is not what was written, through Spark."""

from typing import Any

import pytest
from tests.pipeline.drain_stage import Stage, left, send

from veilmq.pipeline.drain import drain
from veilmq.pipeline.errors import SourceUnreachable
from veilmq.testing.local import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def bodies(count: int) -> list[str]:
    return [f"body {number}" for number in range(count)]


def test_a_server_that_is_killed_amid_a_drain_is_told_and_nothing_is_lost(spark: Any, tmp_path: Any) -> None:
    seen: dict[int, list[str]] = {}
    server = ServerProcess(tmp_path).start()
    stage = Stage(server, tmp_path)

    def sink(frame: Any, batch: int) -> None:
        seen[batch] = [row["body"] for row in frame.select("body").collect()]
        if server.sqs:
            server.kill()

    try:
        with stage.make(timeout=2) as queue:
            send(queue, bodies(300))
        given = {"max_rows": 100, "patience": 1, "lease": 2}
        with pytest.raises(Exception, match=r"SourceUnreachable: .*Run the query again"):
            drain(spark, stage.url(), sink, tmp_path / "d", **given)
        with pytest.raises(SourceUnreachable, match=r"cannot be reached.*Is it there\?"):
            drain(spark, f"veil://127.0.0.1:1/{stage.name}", sink, tmp_path / "d", **given)
        assert list(seen) == [0]
        server.start()

        def again(frame: Any, batch: int) -> None:
            assert batch > 0, "the first one was committed"
            seen[batch] = [row["body"] for row in frame.select("body").collect()]

        # The port is another one now: the queue is the same.
        drain(spark, stage.url(), again, tmp_path / "d", until=60, **given)
        assert sorted(body for batch in seen.values() for body in batch) == sorted(bodies(300))
        with stage.make(timeout=2) as queue:
            assert left(queue) == 0
    finally:
        if server.sqs:
            server.kill()


def test_a_manifest_that_was_changed_is_told_with_its_mend(spark: Any, stage: Stage) -> None:
    def fails(frame: Any, batch: int) -> None:
        raise ValueError("the sink fails")

    with stage.make() as queue:
        send(queue, bodies(20))
        with pytest.raises(Exception, match="the sink fails"):
            drain(spark, stage.url(), fails, stage.directory / "d")
        (manifest,) = (stage.directory / "d" / "manifests").glob("*.arrow")
        manifest.write_bytes(manifest.read_bytes().replace(b"body 7", b"body 8"))
        with pytest.raises(Exception, match=r"ManifestDamaged: .*is not what was written. Restore it from a backup"):
            drain(spark, stage.url(), f"parquet:{stage.directory}/t", stage.directory / "d")
        assert left(queue) == 20
