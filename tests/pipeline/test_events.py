"""The source `veilmq-events`: the same events from a server and from Parquet, in batch and as a stream; bad input."""

import pickle
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.support.histories import Workload, history, lognormal, write
from tests.users import other_user

from veilmq.client.adapters.connect import connect
from veilmq.model.errors import VeilError
from veilmq.pipeline.errors import (
    HistoryGap,
    HistoryNewer,
    OptionInvalid,
    PipelineError,
    SourceRefused,
    SourceUnreachable,
    TokenRefused,
)
from veilmq.pipeline.events import COLUMNS, plain
from veilmq.pipeline.events.export import export, unchanged
from veilmq.pipeline.events.reading import ParquetHistory, ServerHistory
from veilmq.pipeline.events.source import EventsStreamReader, Wanted
from veilmq.pipeline.loop import Loop
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return history([Workload("q", lognormal(20, 1), "t", 2_000)], seed=4)


@pytest.fixture(scope="module")
def exported(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(table, tmp_path_factory.mktemp("exported"), file_rows=1_500)


class Server(ServerProcess):
    """One with events, and with the options that reach its history."""

    @property
    def options_to_read(self) -> dict[str, str]:
        return {"server": self.admin, "token": (self.data / "admin-token").read_text().strip()}

    @property
    def history(self) -> ServerHistory:
        return ServerHistory(*self.options_to_read.values())

    def happen(self, messages: int) -> None:
        """Send, receive and delete so many messages."""
        address = self.sqs.removeprefix("http://")
        with connect(f"veil://{address}/orders?create=1") as queue:
            queue.send_batch([f"{number}" for number in range(messages)])
            while taken := queue.receive(10):
                queue.delete_batch([each.handle for each in taken])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"))
    started.start()
    try:
        started.happen(300)
        yield started
    finally:
        started.stop()


def load(spark: Any, **options: Any) -> Any:
    return spark.read.format("veilmq-events").options(**options).load()


class TestBatch:
    def test_parquet_is_what_happened(self, spark: Any, table: pa.Table, exported: Path) -> None:
        found = load(spark, path=str(exported), partitionRows=700).orderBy("offset").toArrow()
        assert found.cast(table.schema).equals(table)

    def test_columns_are_those_of_the_admin_port(self, spark: Any, exported: Path) -> None:
        assert load(spark, path=str(exported)).dtypes == list(COLUMNS.items())

    def test_partitions_are_the_pieces_that_were_asked_for(self, spark: Any, exported: Path) -> None:
        assert load(spark, path=str(exported), partitionRows=700, until=3_000).rdd.getNumPartitions() == 6

    @pytest.mark.parametrize(("start", "until", "rows"), [("first", 100, 100), ("1499", 1_502, 3), ("next", 10**9, 0)])
    def test_a_range_of_offsets(self, spark: Any, exported: Path, start: str, until: int, rows: int) -> None:
        found = load(spark, path=str(exported), until=until, **{"from": start})
        offsets = sorted(row.offset for row in found.select("offset").collect())
        assert len(offsets) == rows
        assert offsets == list(range(offsets[0], offsets[0] + rows)) if rows else True

    def test_a_server_says_what_its_export_says(self, spark: Any, server: Server, tmp_path: Path) -> None:
        live = load(spark, **server.options_to_read, partitionRows=100).orderBy("offset").collect()
        export(server.history, tmp_path)
        exported = load(spark, path=str(tmp_path)).orderBy("offset").collect()
        assert exported[: len(live)] == live
        assert {row.kind for row in exported[len(live) :]} <= {"polled"}  # which the server adds by itself
        assert {row.kind for row in live} >= {"queue_created", "sent", "received", "deleted"}
        assert [row.offset for row in live] == list(range(len(live)))


class TestStream:
    def test_it_reads_each_event_once_in_bounded_batches(self, spark: Any, exported: Path, tmp_path: Path) -> None:
        sizes: list[int] = []
        offsets: list[int] = []

        def take(batch: Any, number: int) -> None:
            found = [row.offset for row in batch.select("offset").collect()]
            sizes.append(len(found))
            offsets.extend(found)

        def run() -> None:
            stream = spark.readStream.format("veilmq-events").options(path=str(exported), maxRows=1_000).load()
            query = (
                stream.writeStream.foreachBatch(take)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination(100)
            assert query.exception() is None

        run()
        total = ParquetHistory(str(exported)).bounds().following
        assert sorted(offsets) == list(range(total))
        assert max(sizes) == 1_000
        run()
        assert len(offsets) == total

    @pytest.mark.slow
    def test_it_goes_on_with_what_a_server_gets(self, spark: Any, server: Server, tmp_path: Path) -> None:
        before = server.history.bounds().following
        place = {"path": str(tmp_path / "table"), "checkpointLocation": str(tmp_path / "checkpoint")}
        for _ in range(2):
            stream = spark.readStream.format("veilmq-events").options(**server.options_to_read).load()
            query = stream.writeStream.format("parquet").options(**place).trigger(availableNow=True).start()
            query.awaitTermination(100)
            server.happen(20)
        after = server.history.bounds().following
        offsets = sorted(row.offset for row in spark.read.parquet(place["path"]).select("offset").collect())
        assert offsets == list(range(offsets[-1] + 1))
        assert before < len(offsets) < after


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A server, and one with a backup of it; both went on since."""
    first, second = Server(tmp_path / "first"), Server(tmp_path / "second")
    for each in (first, second):
        each.data.parent.mkdir()
    first.start()
    try:
        first.happen(20)
        asked = urllib.request.Request(f"{first.admin}/api/v1/backup", method="POST")
        asked.add_header("Authorization", f"Bearer {first.options_to_read['token']}")
        with urllib.request.urlopen(asked) as answer:
            copy = answer.read()
        second.data.mkdir(mode=0o700)
        (second.data / "veilmq.db").write_bytes(copy)
        first.happen(20)
        second.start()
        try:
            second.happen(40)
            yield first, second
        finally:
            second.stop()
    finally:
        first.stop()


@pytest.mark.slow
class TestRestoredBackup:
    """Its offsets mean other events: nothing that was read before may go on with them."""

    SAID = r"another history than what was read before: a backup was restored"

    def test_an_export(self, restored: tuple[Server, Server], tmp_path: Path) -> None:
        first, second = restored
        export(first.history, tmp_path / "events")
        assert second.history.bounds().following > first.history.bounds().following
        with pytest.raises(HistoryGap, match=self.SAID):
            export(second.history, tmp_path / "events")

    def test_a_stream_and_a_loop(self, spark: Any, restored: tuple[Server, Server], tmp_path: Path) -> None:
        place = {"path": str(tmp_path / "table"), "checkpointLocation": str(tmp_path / "checkpoint")}

        def run(server: Server) -> None:
            stream = spark.readStream.format("veilmq-events").options(**server.options_to_read).load()
            query = stream.writeStream.format("parquet").options(**place).trigger(availableNow=True).start()
            query.awaitTermination(100)

        def loop(server: Server) -> None:
            # At one address, as far as the loop is told.
            options = server.options_to_read | {"server": "http://the-server"}
            Loop(tmp_path / "loop").run(spark, server.history, options, now=1e9, timer=lambda: 0.0)

        first, second = restored
        run(first)
        run(first)
        rows = spark.read.parquet(place["path"]).count()
        with pytest.raises(Exception, match=self.SAID):
            run(second)
        assert spark.read.parquet(place["path"]).count() == rows
        state = '{"next": %d, "source": "http://the-server", "epoch": "%s"}'
        (tmp_path / "loop").mkdir()
        asked = first.history
        (tmp_path / "loop" / "state.json").write_text(state % (asked.bounds().following, asked.epoch))
        loop(first)
        with pytest.raises(HistoryGap, match=self.SAID):
            loop(second)


CREDENTIALS = """
[[account]]
id = "111111111111"

[[account.key]]
id = "all"
secret = "secret of all"

[[account.key]]
id = "reader"
secret = "secret:of reader"
grants = [{ actions = ["events"], queues = ["invoices"] }]
"""


@pytest.mark.slow
def test_a_key_is_shown_the_events_of_its_queues(spark: Any, tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text(CREDENTIALS)
    file.chmod(0o600)
    server = Server(tmp_path, "--credentials", str(file))
    server.start()
    try:
        for name in ("invoices", "orders"):
            with connect(f"veil://all:secret%20of%20all@{server.sqs.removeprefix('http://')}/{name}?create=1") as queue:
                queue.send_batch(["1", "2", "3"])
                queue.delete_batch([each.handle for each in queue.receive(10)])
        options = {"server": server.admin, "token": "reader:secret:of reader"}
        found = load(spark, **options).orderBy("offset").collect()
        assert {row.queue for row in found} == {"invoices"}
        assert [row.kind for row in found].count("deleted") == 3
        export(ServerHistory(*options.values()), tmp_path / "events")
        exported = load(spark, path=str(tmp_path / "events")).orderBy("offset").collect()
        assert exported == [row for row in found if row.offset <= exported[-1].offset]
        assert len(exported) == len(found)
        loop = Loop(tmp_path / "loop")
        ran = loop.run(spark, ServerHistory(*options.values()), options, now=1e9, timer=lambda: 0.0)
        assert ran.settled == 3
        with pytest.raises(TokenRefused, match="refuses: the access key is unknown"):
            ServerHistory(server.admin, "reader:wrong").bounds()
    finally:
        server.stop()


class TestBadInput:
    @for_each(
        ("options", "said"),
        [
            ({}, "one of the options server and path"),
            ({"path": "x", "server": "http://h"}, "one of the options server and path"),
            ({"path": "x", "colour": "red"}, "has no option colour. It has certificate, from"),
            ({"path": "x", "from": "-1"}, "from='-1' is none of an offset, first and next"),
            ({"path": "x", "from": "\u00b2"}, "is none of an offset, first and next"),
            ({"path": "x", "until": "end"}, "until='end' is no whole number"),
            ({"path": "x", "until": "9" * 5_000}, "is no whole number"),
            ({"path": "x", "maxRows": "0"}, "maxRows=0: a micro-batch needs an event"),
            ({"server": "127.0.0.1:9325"}, "is no URL. It looks like http://127.0.0.1:9325"),
        ],
    )
    def test_options(self, options: dict[str, str], said: str) -> None:
        with pytest.raises(OptionInvalid, match=said):
            Wanted(options)

    def test_spark_says_it_too(self, spark: Any, exported: Path) -> None:
        with pytest.raises(OptionInvalid, match="until=8 is before offset 9, where it is to begin"):
            Wanted({"path": str(exported), "from": "9", "until": "8"}).first()
        with pytest.raises(Exception, match=r"OptionInvalid.*one of the options server and path"):
            load(spark).count()

    def test_a_gap(self, spark: Any, exported: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(exported, tmp_path / "copy")
        sorted(copy.glob("*/*.parquet"))[1].unlink()
        with pytest.raises(HistoryGap, match=r"no events from offset 1500 to 3000.*Restore the missing files"):
            ParquetHistory(str(copy)).bounds()
        with pytest.raises(Exception, match=r"no events from offset 1500 to 3000"):
            load(spark, path=str(copy)).count()

    def test_nothing_exported(self, tmp_path: Path) -> None:
        with pytest.raises(HistoryGap, match=r"holds no exported events. Write some: veilmq events export DIR"):
            ParquetHistory(str(tmp_path)).bounds()
        (tmp_path / "veilmq.db").touch()
        with pytest.raises(HistoryGap, match="is a data directory"), unchanged(str(tmp_path)):
            pass
        with TemporaryDirectory() as made:  # what is in tmp_path is closed to other users altogether
            Path(made).chmod(0o755)
            (Path(made) / "day=2026-01-01").mkdir(0)
            with other_user(), pytest.raises(PermissionError, match="day=2026-01-01"):
                ParquetHistory(made).bounds()
            Path(made).chmod(0o711)
            with other_user(), pytest.raises(PermissionError, match=f"{made}'"):
                ParquetHistory(made).bounds()

    def test_a_file_whose_labels_are_no_text(self, exported: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(exported, tmp_path / "copy")
        file = max(copy.glob("*/*.parquet"))
        pq.write_table(pq.read_table(file, partitioning=None).replace_schema_metadata({b"\xff": b"x"}), file)
        with pytest.raises(HistoryGap, match=f"{file.name} cannot be read.*Export it anew"):
            ParquetHistory(str(copy)).bounds()

    def test_a_file_that_was_cut(self, exported: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(exported, tmp_path / "copy")
        file = sorted(copy.glob("*/*.parquet"))[1]
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(PipelineError, match=f"{file.name} cannot be read.*Export it anew"):
            list(ParquetHistory(str(copy)).read(0, 3_000))

    def test_a_file_with_fewer_events_than_its_name_says(self, exported: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(exported, tmp_path / "copy")
        file = sorted(copy.glob("*/*.parquet"))[1]
        pq.write_table(pq.read_table(file, partitioning=None).slice(0, 1_000), file)
        with pytest.raises(HistoryGap, match=r"no event 2500.*Export it anew"):
            list(ParquetHistory(str(copy)).read(0, 4_000))

    def test_an_offset_that_is_not_there(self, exported: Path) -> None:
        with pytest.raises(HistoryGap, match=r"no offset 999999999"):
            Wanted({"path": str(exported), "from": "999999999"}).first()

    @pytest.mark.slow
    def test_a_stream_over_days_that_were_dropped(self, spark: Any, exported: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(exported, tmp_path / "copy")
        place = {"path": str(tmp_path / "table"), "checkpointLocation": str(tmp_path / "checkpoint")}

        def run(until: int) -> None:
            stream = spark.readStream.format("veilmq-events").options(path=str(copy), until=until).load()
            query = stream.writeStream.format("parquet").options(**place).trigger(availableNow=True).start()
            query.awaitTermination(100)

        run(1_000)
        for file in sorted(copy.glob("*/*.parquet"))[:2]:
            file.unlink()
        with pytest.raises(Exception, match=r"HistoryGap.*begins at offset 3000, and 1000 is next. Begin later"):
            run(4_000)
        assert spark.read.parquet(place["path"]).count() == 1_000

    def test_a_stream_whose_history_ends_before_it(self, exported: Path) -> None:
        reader = EventsStreamReader(Wanted({"path": str(exported)}))
        with pytest.raises(HistoryGap, match=r"ends at offset \d+, and 999999 is next. Is it another server's"):
            reader.latestOffset({"seq": 999_999}, ReadAllAvailable())

    def test_an_unknown_kind(self, spark: Any, table: pa.Table, exported: Path, tmp_path: Path) -> None:
        kinds = pa.array(["blessed", *table.column("kind").to_pylist()[1:]])
        place = table.schema.get_field_index("kind")
        changed = table.set_column(place, "kind", kinds)
        with pytest.raises(HistoryNewer, match=r"events of the kind 'blessed'. Upgrade veilmq here"):
            plain(changed.to_batches()[0])
        write(changed, tmp_path / "copy")
        with pytest.raises(Exception, match=r"events of the kind 'blessed'. Upgrade veilmq here"):
            load(spark, path=str(tmp_path / "copy")).count()

    def test_a_column_of_a_later_release(self, table: pa.Table) -> None:
        batch = table.combine_chunks().slice(0, 5).to_batches()[0]
        later = batch.append_column("weight", pa.array([1] * 5))
        with pytest.raises(HistoryNewer, match=r"column weight of a later release. Upgrade veilmq here"):
            plain(later)
        with pytest.raises(HistoryNewer, match=r"has no column kind. Was it written by VeilMQ"):
            plain(batch.drop_columns(["kind"]))

    def test_no_server(self) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            with pytest.raises(SourceUnreachable, match=r"cannot be reached.*Is its admin port there"):
                ServerHistory(url).bounds()

    def test_a_wrong_token(self, server: Server) -> None:
        with pytest.raises(
            TokenRefused, match=r"refuses: the bearer token is not this server's. .*--token-file.*admin-token"
        ):
            ServerHistory(server.admin, "x" * 32).bounds()

    def test_a_port_that_is_no_admin_port(self, server: Server) -> None:
        with pytest.raises(SourceUnreachable, match=r"is no VeilMQ admin port: it answers 404. Is the URL right"):
            ServerHistory(server.sqs, "x").bounds()

    @for_each(
        "url",
        ["http://[::1", "http://h:99999", "http://h:x", "http://h:0", "http://a b", "http://h/a b", "http://a..b"],
    )
    def test_a_url_that_is_none(self, url: str) -> None:
        with pytest.raises(OptionInvalid, match=r"is no URL\. It looks like"):
            ServerHistory(url).bounds()

    def test_a_certificate_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("text")
        for name, said in (("none", "No such file"), ("text", "it holds no certificate")):
            with pytest.raises(OptionInvalid, match=f"{name}' cannot be read: {said}.*Name a PEM file"):
                ServerHistory("https://127.0.0.1:1", certificate=str(tmp_path / name)).bounds()

    @for_each("token", ["-----BEGIN\nhidden", "two hidden", "hidd\u00ebn", "a:hidden\n", "a b:hidden"])
    def test_a_token_that_is_none_is_not_shown(self, token: str) -> None:
        with pytest.raises(OptionInvalid, match="The token is none") as refused:
            ServerHistory("http://127.0.0.1:1", token)
        assert "hidd" not in str(refused.value)

    @for_each(
        ("answer", "kind", "said"),
        [
            ("401 X\r\n\r\n", TokenRefused, "refuses: 401. Give its token"),
            (
                '403 X\r\n\r\n{"error": "not_granted", "message": "it lacks events"}',
                SourceRefused,
                "refuses: it lacks events. Grant it to the key, or",
            ),
            ('403 X\r\n\r\n{"error": "not_loopback", "message": "use localhost"}', SourceRefused, "use localhost.$"),
            ('406 X\r\n\r\n{"message": "x"}', SourceRefused, "cannot write Arrow"),
            ('503 X\r\n\r\n{"message": "it stops"}', SourceRefused, "answers 503: it stops."),
            ("406 X\r\n\r\nhtml", SourceUnreachable, "is no VeilMQ admin port: it answers 406"),
            ("404 X\r\n\r\n{}", SourceUnreachable, "is no VeilMQ admin port: it answers 404"),
            ("404 X\r\n\r\n[1]", SourceUnreachable, "is no VeilMQ admin port: it answers 404"),
            ("500 X\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nab", SourceUnreachable, "cannot be reached"),
            ("200 X\r\nContent-Length: 9\r\n\r\nab", SourceUnreachable, "broke off.*Run it again"),
            ("200 X\r\n\r\n", SourceUnreachable, "no header veilmq-first-offset"),
        ],
    )
    def test_what_answers_otherwise(self, answer: str, kind: type[PipelineError], said: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_answer_once, args=(listener, f"HTTP/1.1 {answer}"))
            thread.start()
            with pytest.raises(kind, match=said) as refused:
                ServerHistory(f"http://127.0.0.1:{listener.getsockname()[1]}").bounds()
            thread.join(10)
        assert type(refused.value) is kind
        again = pickle.loads(pickle.dumps(refused.value))
        assert (type(again), str(again)) == (kind, str(refused.value))

    def test_another_servers_offset(self, server: Server) -> None:
        with pytest.raises(HistoryGap, match=r"has no offset 99999999.*another server"):
            list(server.history.read(99_999_999, 99_999_999 + 1))

    def test_trimmed(self, spark: Any, tmp_path: Path) -> None:
        started = Server(tmp_path, "--history-bytes-max", "20000")
        started.start()
        try:
            first = 0
            for _ in range(200):
                started.happen(200)
                first = started.history.bounds().first
                if first > 0:
                    break
            assert first > 0
            with pytest.raises(HistoryGap, match=r"Offset 0 was trimmed.*from=first, or read what was exported"):
                list(started.history.read(0, 1))
            with pytest.raises(Exception, match=r"HistoryGap.*There is no offset 0"):
                load(spark, **started.options_to_read, **{"from": "0"}).count()
        finally:
            started.stop()

    @pytest.mark.slow
    def test_a_full_history_of_a_busy_server_is_read_from_its_beginning(self, spark: Any, tmp_path: Path) -> None:
        """Though its oldest events are trimmed all the time: not those that a reader has planned to read."""
        started = Server(tmp_path, "--history-bytes-max", "600000")
        started.start()
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.1):
                with suppress(VeilError):  # on a slow machine
                    started.happen(1)

        busy = threading.Thread(target=go_on)
        try:
            while not started.history.bounds().first:
                started.happen(500)
            busy.start()
            events = load(spark, **started.options_to_read, partitionRows=1_000)
            for _ in range(3):
                before = started.history.bounds().first
                offsets = sorted(row.offset for row in events.select("offset").collect())
                assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))
                assert offsets[0] >= before
        finally:
            over.set()
            if busy.ident is not None:
                busy.join()
            started.stop()

    def test_unreachable_in_mid_stream(self, spark: Any, server: Server) -> None:
        with Cutting(server.admin) as url:
            token = server.options_to_read["token"]
            total = ServerHistory(url, token).bounds().following
            with pytest.raises(SourceUnreachable, match=r"broke off within the offsets 0 to .*Run it again"):
                list(ServerHistory(url, token).read(0, total))
            with pytest.raises(Exception, match=r"broke off within the offsets"):
                load(spark, server=url, token=token).collect()


def _answer_once(listener: socket.socket, answer: str) -> None:
    asking, _ = listener.accept()
    with asking:
        asking.recv(65_536)
        asking.sendall(answer.encode())


class Cutting:
    """A relay to a server that ends each answer after some bytes."""

    BYTES = 6_000

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listener.accept()
            except OSError:
                return
            with asking, socket.create_connection(self._to) as answering:
                answering.sendall(asking.recv(65_536))
                sent = 0
                while sent < self.BYTES and (part := answering.recv(self.BYTES - sent)):
                    asking.sendall(part)
                    sent += len(part)
                    if part.endswith(b"0\r\n\r\n"):
                        break
