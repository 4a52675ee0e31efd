"""Reads events as record batches, from a server's admin port or from a directory of exported Parquet.

Strategy: a `History` answers two questions: which offsets exist, and which events a range of offsets contains. It holds
no connection, so it can be pickled to executors. A range that comes back short is an error, never a shorter table. So
is an answer of another epoch than before: after a restored backup the same offsets mean other events.
"""

import base64
import http.client
import json
import re
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import SplitResult, urlencode, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from veilmq.pipeline.errors import (
    HistoryGap,
    OptionInvalid,
    PipelineError,
    SourceRefused,
    SourceUnreachable,
    TokenRefused,
)
from veilmq.pipeline.events import ARROW_SCHEMA, check_columns, check_kinds, plain
from veilmq.pipeline.places import ObjectPath, Place, is_url, place, source

ARROW: Final = "application/vnd.apache.arrow.stream"
REQUEST_ROWS_MAX: Final = 1_000_000
"""Offsets of one request (the admin port's limit)."""
EPOCH: Final = "veilmq.epoch"
HOLES: Final = "veilmq.holes"
"""Metadata of an exported file: the epoch of its history; whether a key wrote it that may not see every event ..."""
KINDS_HELD: Final = "veilmq.kinds"
"""... and the kinds of its events. Without it an earlier release wrote the file, whose kinds are known."""
_LOOKS: Final = 8
"""Footers that are read at a time: those of an object store take a while."""
OFFSET: Final = re.compile(r"[0-9]{1,18}\Z")
"""The offset format of the admin port."""
TOKEN_MEND: Final = (
    "Give its token (option token, or --token-file): it is in the file admin-token of the server's data directory."
)
GRANT_MEND: Final = "Grant it to the key, or give the server's own token (option token, or --token-file)."
_BEARER: Final = re.compile(r"[!-~]+")
_KEY: Final = re.compile(r"[^\x00-\x20\x7f:]+:[^\x00-\x1f\x7f]+")
_BATCH_ROWS: Final = 65_536
_REFUSAL_BYTES_MAX: Final = 65_536
_REACH: Final = 1_000
"""How many times further back to search for the last event if a key does not see all of them."""
_TIMEOUT_S: Final = 60.0
HOLD_S: Final = 300
"""How long a server keeps events that are about to be read, and again from the start of each piece of them."""
_DAMAGED: Final = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What reading a damaged Parquet file raises."""
_FILE: Final = re.compile(r"offset-(\d{20})-(\d{20})\.parquet\Z")


class Bounds(NamedTuple):
    """The first existing offset, and the one after the last."""

    first: int
    following: int


class History(Protocol):
    """A source of events: `ServerHistory` or `ParquetHistory`."""

    epoch: str
    """Identifies the history; "" until it is known. Answers of another epoch are refused: set it to insist on the
    history that was read before."""

    def bounds(self) -> Bounds:
        """Which offsets exist now. Raises PipelineError."""
        ...

    def hold(self, start: int | None) -> int:
        """The offset `start`, or with None the first that exists. Events from there on are not trimmed for `HOLD_S`,
        within the bounds that docs/admin-api.md gives for `hold`. Raises HistoryGap, PipelineError."""
        ...

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """The range cut into pieces of about `rows`, each read by itself."""
        ...

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Record batches of exactly these offsets, in order. Raises PipelineError."""
        ...


def first_instant(history: History, start: int, stop: int) -> int | None:
    """When the first event happened, in microseconds; None in the same case as `last_instant`."""
    reach, high = 1, start
    while high < stop:
        high = min(stop, start + reach)
        found = [int(batch.column("at")[0].as_py()) for batch in history.read(start, high) if batch.num_rows]
        if found:
            return min(found)
        reach *= _REACH
    return None


def last_instant(history: History, start: int, stop: int) -> int | None:
    """When the last event happened, in microseconds: anything that has been quiet for long before that is over.

    None if no event is visible: a key may see only some of the events.
    """
    reach, low = 1, stop
    while low > start:
        low = max(start, stop - reach)
        found = [int(batch.column("at")[-1].as_py()) for batch in history.read(low, stop) if batch.num_rows]
        if found:
            return max(found)
        reach *= _REACH
    return None


def authorization(token: str) -> str:
    """The header's value: Bearer for a server's admin token, Basic (RFC 7617) for an access key as KEY_ID:SECRET.

    Raises OptionInvalid, without repeating the value: it may be another secret, such as a private key.
    """
    if not (_KEY if ":" in token else _BEARER).fullmatch(token):
        raise OptionInvalid("The token is none.", "Give the server's admin token, or KEY_ID:SECRET of an access key.")
    if ":" in token:
        return f"Basic {base64.b64encode(token.encode()).decode()}"
    return f"Bearer {token}"


def connection_to(url: str, certificate: str | None, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to the admin port at the URL; the first request opens it.

    certificate: a PEM file to trust, for https. Raises OptionInvalid.
    """
    parts = _parts(url)
    host = str(parts.hostname)
    try:
        if parts.scheme == "http":
            return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=certificate)
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
    except http.client.InvalidURL:
        raise no_url(url) from None
    except OSError as error:
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise OptionInvalid(f"certificate={certificate!r} cannot be read: {reason}.", "Name a PEM file.") from None


def path_below(url: str) -> str:
    """The path prefix of the admin port, for instance behind a proxy; usually empty. Raises OptionInvalid."""
    return _parts(url).path.rstrip("/")


def no_url(url: str) -> OptionInvalid:
    """The error for a URL that cannot be an admin port's."""
    return OptionInvalid(f"server={url!r} is no URL.", "It looks like http://127.0.0.1:9325.")


def _parts(url: str) -> SplitResult:
    """Raises OptionInvalid."""
    try:
        parts = urlsplit(url)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise no_url(url)


class ServerHistory:
    """The history of a running server. `url` is its admin port; `token` is its token, or KEY_ID:SECRET of an access
    key.

    A key sees only the events of queues that it was granted; the others leave holes.
    """

    def __init__(self, url: str, token: str | None = None, certificate: str | None = None) -> None:
        """certificate: a PEM file to trust, for https. Raises OptionInvalid."""
        self.url = url
        self.epoch = ""
        self._path = path_below(url)
        self._authorization = authorization(token) if token else None
        self._certificate = certificate

    def bounds(self) -> Bounds:
        answer = self._look("next")
        return Bounds(_header(answer, "veilmq-first-offset"), _header(answer, "veilmq-next-offset"))

    def hold(self, start: int | None) -> int:
        return _header(self._look("first" if start is None else str(start), HOLD_S), "veilmq-start-offset")

    def _look(self, start: str, hold_s: int = 0) -> http.client.HTTPResponse:
        connection, answer = self._get(start, 1, hold_s)
        with connection:
            try:
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise SourceUnreachable(f"{self.url} broke off: {error}.", "Run it again.") from None
        return answer

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        step = min(rows, REQUEST_ROWS_MAX)
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def read(self, start: int, stop: int) -> Iterator[Any]:
        at = start
        while at < stop:
            connection, answer = self._get(str(at), min(stop - at, REQUEST_ROWS_MAX), from_copy=True)
            with connection:
                following = _header(answer, "veilmq-next-offset")
                if following <= at:
                    raise HistoryGap(f"The history ends at offset {at}, before {stop}.", "Is it another server's?")
                try:
                    for batch in pa.ipc.open_stream(answer):
                        yield plain(batch)
                except (pa.ArrowException, OSError, http.client.HTTPException) as error:
                    raise SourceUnreachable(
                        f"{self.url} broke off within the offsets {at} to {following}: {error}.", "Run it again."
                    ) from None
                at = following

    def _get(
        self, start: str, limit: int, hold_s: int = 0, *, from_copy: bool = False
    ) -> "tuple[_Closing, http.client.HTTPResponse]":
        """from_copy: any server of a cluster that has these events may answer, not the owner alone."""
        connection = connection_to(self.url, self._certificate, _TIMEOUT_S)
        headers = {"Accept": ARROW, "User-Agent": "veilmq-pipeline"}
        if from_copy:
            headers["VeilMQ-Read"] = "stale-ok"
        if self._authorization:
            headers["Authorization"] = self._authorization
        query = urlencode({"from": start, "limit": limit} | ({"hold": hold_s} if hold_s else {}))
        content = b""
        try:
            connection.request("GET", f"{self._path}/api/v1/events?{query}", headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                with answer:
                    content = answer.read(_REFUSAL_BYTES_MAX)
        except (http.client.InvalidURL, UnicodeError):
            connection.close()
            raise no_url(self.url) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise SourceUnreachable(f"{self.url} cannot be reached: {error}.", "Is its admin port there?") from None
        if answer.status != 200:
            connection.close()
            raise self._refused(answer.status, content, start)
        try:
            self.epoch = same_history(self.epoch, answer.headers.get("veilmq-epoch", ""), self.url)
        except HistoryGap:
            answer.close()
            connection.close()
            raise
        return _Closing(connection, answer), answer

    def _refused(self, status: int, body: bytes, start: str) -> PipelineError:
        message = message_of(body)
        if status == 401:
            return TokenRefused(f"{self.url} refuses: {message or status}.", TOKEN_MEND)
        if status == 403:
            is_grant = _text_of(body, "error") == "not_granted"
            return SourceRefused(f"{self.url} refuses: {message or status}.", GRANT_MEND if is_grant else "")
        if message is None:
            return SourceUnreachable(f"{self.url} is no VeilMQ admin port: it answers {status}.", "Is the URL right?")
        if status == 410:
            mend = "Begin later with from=first, or read what was exported before (veilmq events export)."
            return HistoryGap(f"Offset {start} was trimmed from the history of {self.url}.", mend)
        if status == 406:
            mend = "Install it there: pip install 'veilmq[arrow]'."
            return SourceRefused(f"{self.url} cannot write Arrow.", mend)
        if status == 400:
            return HistoryGap(f"{self.url} has no offset {start}: {message}.", "Is it another server's history?")
        return SourceRefused(f"{self.url} answers {status}: {message}.", "")


def message_of(body: bytes) -> str | None:
    """The message in an answer of the admin port; None if something else answered."""
    return _text_of(body, "message")


def _text_of(body: bytes, name: str) -> str | None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = answer.get(name) if isinstance(answer, dict) else None
    return found if isinstance(found, str) else None


class _Closing:
    """Closes a connection and its response at the end of a block: either may hold the socket."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._answer.close()
        self._connection.close()


def _header(answer: http.client.HTTPResponse, name: str) -> int:
    value = answer.headers.get(name)
    if value is None or not OFFSET.match(value):
        raise SourceUnreachable(f"No VeilMQ admin port: its answer has no header {name}.", "Is the URL right?")
    return int(value)


def same_history(known: str, found: str, where: str) -> str:
    """The epoch. Raises HistoryGap if the two differ."""
    if known and found and known != found:
        raise HistoryGap(
            f"{where} has another history than what was read before: a backup was restored, or it is another server.",
            "Begin anew: into an empty directory, with a new checkpoint.",
        )
    return known or found


class ParquetHistory:
    """A directory that `veilmq events export` wrote: a path, or the URL of one in an object store."""

    def __init__(self, directory: Place | str) -> None:
        self.directory = str(directory)
        self.epoch = ""

    def files(self) -> list[tuple[int, int, Place]]:
        """First offset, the one after the last, and path of every file, in order. Raises HistoryGap, PermissionError.

        The ranges do not overlap, though files may (see `export`): of each file the events of its range count.
        """
        named, home = [], place(self.directory)
        if not isinstance(home, ObjectPath):
            for directory in (home, *home.glob("day=*")):
                with suppress(FileNotFoundError, NotADirectoryError):
                    next(directory.iterdir(), None)  # raises PermissionError: a glob passes over a closed directory
        for path in home.glob("day=*/offset-*.parquet"):
            name = _FILE.search(path.name)
            if name:
                named.append((int(name[1]), -int(name[2]), str(path), path))
        found: list[tuple[int, int, Place]] = []
        for start, stop, _, path in sorted(named):
            reached = found[-1][1] if found else 0
            if -stop > reached:
                found.append((max(start, reached), -stop, path))
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
        files = self.files()
        self.epoch = same_history(self.epoch, _epoch_of(files[-1][2]), self.directory)
        return Bounds(files[0][0], files[-1][1])

    def hold(self, start: int | None) -> int:
        """See `History.hold`: files exist until they are tidied away."""
        return self.bounds().first if start is None else start

    def splits(self, start: int, stop: int, rows: int) -> list[tuple[int, int]]:
        """See `History.splits`: whole files, large ones cut."""
        pieces = []
        files = self.files()
        if start < stop and start < files[0][0]:
            raise _begins_later(self.directory, files[0][0], start)
        for first, following, _ in files:
            low, high = max(first, start), min(following, stop)
            pieces += [(at, min(at + rows, high)) for at in range(low, high, rows)]
        return pieces

    def checked(self, start: int, stop: int) -> list[Place] | None:
        """The files with events from `start` to before `stop`, for another reader than `read`: their footers say that
        they hold all events that their names promise, and nothing of a later release. None: only `read` can read them.

        Raises HistoryGap, HistoryNewer.
        """
        wanted = [each for each in self.files() if each[0] < stop and each[1] > start]
        if any(path.name != f"offset-{first:020}-{following:020}.parquet" for first, following, path in wanted):
            return None  # some overlap, and of each a part counts
        with ThreadPoolExecutor(_LOOKS) as pool:
            looks = list(pool.map(_look, *zip(*wanted, strict=True))) if wanted else []
        for epoch, _ in looks:
            self.epoch = same_history(self.epoch, epoch, self.directory)
        return [path for _, _, path in wanted] if all(is_plain for _, is_plain in looks) else None

    def read(self, start: int, stop: int) -> Iterator[Any]:
        at = start
        files = self.files()
        while files:
            first, following, path = files.pop(0)
            if following <= at or first >= stop:
                continue
            end = min(following, stop)
            try:
                with pq.ParquetFile(source(path), pre_buffer=is_url(path)) as file:
                    is_whole = HOLES not in _recorded(file.metadata)
                    for batch in file.iter_batches(_BATCH_ROWS, row_groups=_row_groups(file, at, stop)):
                        part = _between(batch, at, end)
                        if not part.num_rows:
                            continue
                        last = part.column("offset")[-1].as_py()
                        if is_whole and last != at + part.num_rows - 1:
                            raise _incomplete(path, at)
                        yield plain(part)
                        at = last + 1
            except FileNotFoundError as error:  # merged into another meanwhile?
                files = self.files()
                if any(each[2] == path for each in files):
                    raise _unreadable(path, error) from None
                if files[0][0] > at:
                    raise _begins_later(self.directory, files[0][0], at) from None
                continue
            except _DAMAGED as error:
                raise _unreadable(path, error) from None
            if is_whole and at < end:
                raise _incomplete(path, at)
            at = end
        if at < stop:
            raise HistoryGap(f"{self.directory} ends at offset {at}, before {stop}.", "Export the rest first.")


def _between(batch: Any, start: int, stop: int) -> Any:
    """The batch's events with these offsets, which ascend."""
    low, high = batch.column("offset").to_numpy().searchsorted([start, stop])
    return batch.slice(int(low), int(high - low))


def _recorded(metadata: Any) -> dict[str, str]:
    """What an export recorded in a file besides its events: `EPOCH`, `HOLES`."""
    return {name.decode(): value.decode() for name, value in (metadata.metadata or {}).items()}


def footer_of(path: Place) -> Any:
    """The metadata of an exported file. Raises HistoryGap if it is damaged."""
    try:
        return pq.read_metadata(source(path))
    except _DAMAGED as error:
        raise _unreadable(path, error) from None


def _epoch_of(path: Place) -> str:
    try:
        return _recorded(pq.read_metadata(source(path))).get(EPOCH, "")
    except _DAMAGED as error:
        raise _unreadable(path, error) from None


def _look(first: int, following: int, path: Place) -> tuple[str, bool]:
    """The epoch of a file, and whether its columns have our types; see `ParquetHistory.checked`."""
    try:
        metadata: Any = pq.read_metadata(source(path))
        recorded, schema = _recorded(metadata), metadata.schema.to_arrow_schema()
    except _DAMAGED as error:
        raise _unreadable(path, error) from None
    check_columns(schema.names)
    check_kinds(recorded[KINDS_HELD].split(",") if KINDS_HELD in recorded else ())
    if HOLES not in recorded and metadata.num_rows != following - first:
        raise _incomplete(path, first + metadata.num_rows)
    return recorded.get(EPOCH, ""), schema.equals(ARROW_SCHEMA)


def _begins_later(directory: str, first: int, at: int) -> HistoryGap:
    mend = "Begin later with from=first, or restore the files of the days before."
    return HistoryGap(f"{directory} begins at offset {first}, and {at} is next.", mend)


def _unreadable(path: Place, error: Exception) -> HistoryGap:
    return HistoryGap(f"{path} cannot be read: {error}.", "Export it anew, or restore it.")


def _incomplete(path: Place, at: int) -> HistoryGap:
    return HistoryGap(f"{path} has no event {at}, though its name says so.", "Export it anew, or restore it.")


def _row_groups(file: Any, start: int, stop: int) -> list[int]:
    """The row groups that contain some of these offsets."""
    wanted = []
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(0).statistics
        if statistics is None or (statistics.max >= start and statistics.min < stop):
            wanted.append(number)
    return wanted
