"""Where events come from: a server's admin port, or a directory of exported Parquet. Both give record batches.

Strategy: a `History` answers two questions: which offsets there are, and the events of a range of them. It holds no
connection, so that it can be pickled to executors. A range that comes back short is an error, never a shorter table.
"""

import http.client
import re
import ssl
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline.errors import HistoryGap, OptionInvalid, SourceUnreachable
from veilmq.pipeline.events.columns import plain

ARROW: Final = "application/vnd.apache.arrow.stream"
REQUEST_ROWS_MAX: Final = 1_000_000
"""Offsets of one request (the admin port's limit)."""
_BATCH_ROWS: Final = 65_536
_TIMEOUT_S: Final = 60.0
_FILE: Final = re.compile(r"offset-(\d{20})-(\d{20})\.parquet\Z")


class Bounds(NamedTuple):
    """The first offset that there is, and the one after the last."""

    first: int
    following: int


class History(Protocol):
    """Where events come from."""

    def bounds(self) -> Bounds:
        """Which offsets there are now. Raises PipelineError."""
        ...

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """The range cut into pieces of about `rows` that are read one by one."""
        ...

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Record batches of exactly these offsets, in order. Raises PipelineError."""
        ...


class ServerHistory:
    """The history of a running server. `url` is its admin port; its token or an access key with its secret opens it."""

    def __init__(self, url: str, token: str | None = None, certificate: str | None = None) -> None:
        """certificate: a PEM file to trust, for https. Raises OptionInvalid."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise OptionInvalid(f"server={url!r} is no URL.", "It looks like http://127.0.0.1:9325.")
        self.url = url
        self._token = token
        self._certificate = certificate

    def bounds(self) -> Bounds:
        """See `History.bounds`."""
        connection, answer = self._get("next", 1)
        with connection:
            answer.read()
            return Bounds(_header(answer, "veilmq-first-offset"), _header(answer, "veilmq-next-offset"))

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """See `History.splits`."""
        step = min(rows, REQUEST_ROWS_MAX)
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """See `History.read`."""
        at = start
        while at < stop:
            connection, answer = self._get(str(at), min(stop - at, REQUEST_ROWS_MAX))
            with connection:
                following = _header(answer, "veilmq-next-offset")
                if following <= at:
                    raise HistoryGap(f"The history ends at offset {at}, before {stop}.", "Is it another server's?")
                try:
                    for batch in pa.ipc.open_stream(answer):
                        yield plain(batch)
                except (pa.ArrowInvalid, OSError, http.client.HTTPException) as error:
                    raise SourceUnreachable(
                        f"{self.url} broke off within the offsets {at} to {following}: {error}.", "Run it again."
                    ) from None
                at = following

    def _get(self, start: str, limit: int) -> "tuple[_Closing, http.client.HTTPResponse]":
        parts = urlsplit(self.url)
        host, port = str(parts.hostname), parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self._certificate)
            connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        headers = {"Accept": ARROW, "User-Agent": "veilmq-pipeline"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        query = urlencode({"from": start, "limit": limit})
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/api/v1/events?{query}", headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise SourceUnreachable(f"{self.url} cannot be reached: {error}.", "Is its admin port there?") from None
        if answer.status != 200:
            said = answer.read(2_000).decode("utf-8", "replace")
            connection.close()
            raise self._refused(answer.status, said, start)
        return _Closing(connection), answer

    def _refused(self, status: int, said: str, start: str) -> Exception:
        if status == 410:
            mend = "Begin later with from=first, or read what was exported before (veilmq events export)."
            return HistoryGap(f"Offset {start} was trimmed from the history of {self.url}.", mend)
        if status in {401, 403}:
            mend = "Give option token: it is in the file admin-token of the server's data directory."
            return SourceUnreachable(f"{self.url} refuses: {said}", mend)
        if status == 406:
            mend = "Install it there: pip install 'veilmq[arrow]'."
            return SourceUnreachable(f"{self.url} cannot write Arrow.", mend)
        if not said.startswith("{"):
            return SourceUnreachable(f"{self.url} is no VeilMQ admin port: it answers {status}.", "Is the URL right?")
        if status == 400:
            return HistoryGap(f"{self.url} has no offset {start}: {said}", "Is it another server's history?")
        return SourceUnreachable(f"{self.url} answers {status}: {said}", "")


class _Closing:
    """A connection that is closed at the end of a block."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _header(answer: http.client.HTTPResponse, name: str) -> int:
    value = answer.headers.get(name)
    if value is None or not value.isdigit():
        raise SourceUnreachable(f"No VeilMQ admin port: its answer has no header {name}.", "Is the URL right?")
    return int(value)


class ParquetHistory:
    """A directory that `veilmq events export` wrote."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def files(self) -> list[tuple[int, int, Path]]:
        """First offset, the one after the last, and path of every file, in order. Raises HistoryGap."""
        found = []
        for path in Path(self.directory).glob("day=*/offset-*.parquet"):
            name = _FILE.search(path.name)
            if name:
                found.append((int(name[1]), int(name[2]), path))
        found.sort()
        for (_, stop, _), (start, _, path) in pairwise(found):
            if start != stop:
                raise HistoryGap(
                    f"{self.directory} has no events from offset {stop} to {start} (before {path.name}).",
                    "Restore the missing files, or export anew into an empty directory.",
                )
        if not found:
            raise HistoryGap(f"{self.directory} holds no exported events.", "Write some: veilmq events export DIR.")
        return found

    def bounds(self) -> Bounds:
        """See `History.bounds`."""
        files = self.files()
        return Bounds(files[0][0], files[-1][1])

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """See `History.splits`: whole files, the large ones cut."""
        pieces = []
        for first, following, _ in self.files():
            low, high = max(first, start), min(following, stop)
            pieces += [(at, min(at + rows, high)) for at in range(low, high, rows)]
        return pieces

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """See `History.read`."""
        at = start
        for first, following, path in self.files():
            if following <= at or first >= stop:
                continue
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(_BATCH_ROWS, row_groups=_row_groups(file, at, stop)):
                        offset = batch.column("offset")[0].as_py()
                        low, high = at - offset, min(stop - offset, batch.num_rows)
                        if low >= batch.num_rows or high <= 0:
                            continue
                        if low < 0 or batch.column("offset")[-1].as_py() != offset + batch.num_rows - 1:
                            raise _incomplete(path, at)
                        yield plain(batch.slice(low, high - low))
                        at = offset + high
            except (pa.ArrowInvalid, OSError) as error:
                raise SourceUnreachable(f"{path} cannot be read: {error}.", "Export it anew, or restore it.") from None
            if at < min(following, stop):
                raise _incomplete(path, at)
        if at < stop:
            raise HistoryGap(f"{self.directory} ends at offset {at}, before {stop}.", "Export the rest first.")


def _incomplete(path: Path, at: int) -> HistoryGap:
    return HistoryGap(f"{path} has no event {at}, though its name says so.", "Export it anew, or restore it.")


def _row_groups(file: Any, start: int, stop: int) -> list[int]:
    """The row groups that hold some of these offsets."""
    wanted = []
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(0).statistics
        if statistics is None or (statistics.max >= start and statistics.min < stop):
            wanted.append(number)
    return wanted
