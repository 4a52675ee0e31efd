"""The options of the data sources and sinks, read once and checked before anything is opened.

Strategy: each is one frozen, picklable value, so that driver and executors hold the same. Errors name the option.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from veilmq.client.large.pointer import PointerFormat
from veilmq.client.queue import Capabilities
from veilmq.pipeline.errors import OptionInvalid
from veilmq.pipeline.places import here, is_url

_STEPS: Final = ("large", "encrypted")
ROWS_DEFAULT: Final = 100_000
ROWS_DEFAULT_SINGLY: Final = 5_000
GROUP_DEPTH_MAX: Final = 2
"""How far below the option `group` a drain's directory may be."""
_LISTS: Final = frozenset({"unwrap", "algorithms", "queues"})
_KAFKA_SAME: Final = {"maxoffsetspertrigger": "max_rows", "minpartitions": "partitions"}
"""Options of Spark's Kafka source that mean the same."""
_KAFKA_OTHERS: Final = {
    "subscribe": "queues lists queues.",
    "subscribepattern": "queues takes patterns, such as orders-*.",
    "assign": "queues lists queues.",
    "kafka.bootstrap.servers": "url names the server.",
    "kafka.group.id": "No group is needed: the checkpoint and the option directory say what is drained.",
    "groupidprefix": "No group is needed: the checkpoint and the option directory say what is drained.",
    "endingoffsets": "trigger(availableNow=True) ends with what the queue holds at the start.",
    "startingtimestamp": "Filter by the column sent.",
    "startingoffsetsbytimestamp": "Filter by the column sent.",
    "minoffsetspertrigger": "trigger(processingTime=...) makes batches larger.",
    "maxtriggerdelay": "trigger(processingTime=...) says how often a batch is made.",
    "kafkaconsumer.polltimeoutms": "wait is the time that a receive waits, in seconds.",
    "fetchoffset.numretries": "patience is the time that an unreachable queue is retried, in seconds.",
    "includeheaders": "The column attributes is always there.",
}
"""Options of Spark's Kafka source that mean something else here, and what to use."""
_SPARK: Final = frozenset({"checkpointlocation", "path", "queryname", "storage"})
"""Options that Spark passes on by itself."""


class DrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the source `veilmq`. Durations are seconds."""

    url: str
    """As in `veilmq.connect`; with `queues`, as in `veilmq.connect_account`."""
    directory: str
    """For manifests: on a file system or in an object store (a URL) that driver and executors share; used by this query
    only."""
    table: str | None = None
    """Directory or URL of the Parquet table that Spark's own sink writes, to claim batches there: `sinks.claims`."""
    group: str | None = None
    """Directory above those of all drains of the same queues, on a file system."""
    queues: tuple[str, ...] = ()
    """Names and patterns (`orders-*`) of queues of one account, drained as one stream."""
    refresh: float = 10.0
    """How often the queues of the patterns are listed."""
    fail_on_data_loss: bool | None = None
    """With `queues`: whether the query ends when one of them is gone. A single queue's query always does."""
    max_rows: int | None = None
    """Messages in one micro-batch; None: `rows_default` of the queue."""
    max_bytes: int = 256 << 20
    """Bytes of the bodies in one micro-batch, large ones as their pointers state them; see `exchange.Room`."""
    lease: float = 60.0
    """Visibility timeout of each receive; extended while the batch runs."""
    wait: float = 0.2
    """How long a receive waits when the queue seems empty."""
    receivers: int = 8
    """Concurrent receives."""
    partitions: int = 4
    """Tasks of a micro-batch, at most."""
    unwrap: tuple[str, ...] = ()
    """`large`, `encrypted`: in the order in which bodies are unwrapped."""
    keys: str | None = None
    """File of keys, for `encrypted`."""
    algorithms: tuple[str, ...] = ("A256GCM",)
    bound_to: str | None = None
    """Queue name that bodies were encrypted for, if it is not this queue's."""
    store: str | None = None
    """URL of the object store, for `large`."""
    store_options: str = "{}"
    """JSON, for the store's fsspec implementation."""
    pointers: str = "own"
    delete_objects: bool = True
    format: str = "raw"
    """`raw` or `json`."""
    column_name_of_corrupt_record: str = "_corrupt_record"
    dead_letters: str | None = None
    """URL of a queue that receives bad records: messages that cannot be decoded."""
    patience: float = 30.0
    """How long an unreachable queue is retried."""
    remember: float | None = None
    """How long an id stays known whose delete may not have counted; None: the queue's retention, or 14 days."""


def rows_default(able: Capabilities) -> int:
    """Default of `max_rows`: what a lease keeper holds easily, and less where leases are extended one by one."""
    return ROWS_DEFAULT if able.batch_extend else ROWS_DEFAULT_SINGLY


def read_options(options: Mapping[str, str | Path]) -> DrainOptions:
    """Raises OptionInvalid."""
    fields = {name.replace("_", ""): name for name in DrainOptions.__struct_fields__}
    given: dict[str, Any] = {}
    for name, value in _texts(options).items():
        low = str(name).lower()
        field = _KAFKA_SAME.get(low) or fields.get(low)
        if low == "startingoffsets" and value == "earliest":
            continue
        if low in _KAFKA_OTHERS or low == "startingoffsets":
            mend = _KAFKA_OTHERS.get(low, "A queue has no offsets: all that it holds is drained, as with earliest.")
            raise OptionInvalid(f"{name}={value} is an option of Kafka's source, which veilmq does not have.", mend)
        if field in given:
            raise OptionInvalid(f"{name} and {camel(field)} are the same option.", "Give one of them.")
        if field is None:
            raise OptionInvalid(
                f"veilmq has no option {name}.", f"It has {', '.join(sorted(map(camel, fields.values())))}."
            )
        given[field] = [part.strip() for part in value.split(",") if part.strip()] if field in _LISTS else value
    for name, mend in (
        ("url", "It looks like veil://127.0.0.1:9324/orders."),
        ("directory", "An empty one to begin with."),
    ):
        if not given.get(name):
            raise OptionInvalid(f"veilmq needs the option {name}.", mend)
    for name in {"directory", "table"} & given.keys():
        given[name] = str(here(given[name]) or given[name])
    try:
        read = msgspec.convert(given, DrainOptions, strict=False)
    except msgspec.ValidationError as error:
        message = str(error)
        place = re.search(r"\$\.(\w+)", message)
        name = camel(place[1]) if place else "?"
        raise OptionInvalid(f"{name}={given.get(place[1] if place else '')!r} cannot be: {message}.", "") from None
    _check(read)
    return read


def _texts(options: Mapping[str, str | Path]) -> dict[str, Any]:
    """Spark passes on texts alone, and a program may give a `Path`."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in dict(options).items()}


def camel(field: str) -> str:
    """A name in snake case as options are written, such as `maxRows`."""
    head, *rest = field.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _check(read: DrainOptions) -> None:
    for name, low in (
        ("max_rows", 1),
        ("max_bytes", 1),
        ("receivers", 1),
        ("partitions", 1),
        ("wait", 0),
        ("refresh", 0),
        ("patience", 0),
    ):
        value = getattr(read, name)
        if value is not None and not value >= low:
            raise OptionInvalid(f"{camel(name)}={getattr(read, name)} is below {low}.", "")
    if read.fail_on_data_loss is False and not read.queues:
        raise OptionInvalid(
            "failOnDataLoss=false cannot be.", "A query of one queue ends with it: see the option queues."
        )
    if not read.lease > 0:
        raise OptionInvalid(f"lease={read.lease:g} is not above 0 seconds.", "")
    _check_absolute(read)
    if read.group is not None and is_url(read.group):
        raise OptionInvalid(f"group={read.group} is a URL.", "A group needs a file system that its drivers share.")
    if read.group is not None:
        directory, group = Path(read.directory).resolve(), Path(read.group).resolve()
        if not (directory.is_relative_to(group) and 1 <= len(directory.relative_to(group).parts) <= GROUP_DEPTH_MAX):
            raise OptionInvalid(
                f"directory={read.directory} is not in group={read.group}, nor in a directory there.",
                "The drains of a group look for each other in those places.",
            )
    strange = [step for step in read.unwrap if step not in _STEPS]
    if strange or len(set(read.unwrap)) != len(read.unwrap):
        raise OptionInvalid(f"unwrap={','.join(read.unwrap)} cannot be.", "It lists large and encrypted, each once.")
    if ("encrypted" in read.unwrap) != (read.keys is not None):
        raise OptionInvalid("unwrap=encrypted and the option keys need each other.", "keys names a file of keys.")
    if ("large" in read.unwrap) != (read.store is not None):
        raise OptionInvalid("unwrap=large and the option store need each other.", "store is like s3://bucket/large.")
    if read.pointers not in set(PointerFormat):
        raise OptionInvalid(f"pointers={read.pointers!r} is none of {' and '.join(PointerFormat)}.", "")
    if read.format not in {"raw", "json"}:
        raise OptionInvalid(f"format={read.format!r} is none of raw and json.", "")
    store_options_of(read)


def _check_absolute(read: DrainOptions) -> None:
    for name, given in (("directory", read.directory), ("table", read.table)):
        if given is not None and not is_url(given) and not Path(given).is_absolute():
            raise OptionInvalid(f"{name}={given!r} is relative.", "Executors need an absolute path.")


def store_options_of(read: DrainOptions) -> dict[str, Any]:
    """For fsspec. Raises OptionInvalid."""
    try:
        found = json.loads(read.store_options)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionInvalid("storeOptions is no JSON object.", 'It looks like {"endpoint_url": "http://..."}.')
    return found


class SendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the queue sink."""

    url: str
    """As in `veilmq.connect`."""
    key: str | None = None
    """Column whose text identifies equal rows: on a FIFO queue they become one message."""
    patience: float = 30.0
    """How many seconds an unreachable queue is retried."""


class DeltaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Delta sink."""

    path: str
    """Directory or URI of the table, which executors and driver can both reach."""
    app: str | None = None
    """Name of the query's transactions, used by no other query; None: the query's id, which its checkpoint keeps."""
    storage: str = "{}"
    """JSON, deltalake's storage options."""
    partition_by: str = ""
    """Columns by which the table's files are divided, comma-separated. (Spark passes on no `.partitionBy(...)`.)"""
    checkpoint_location: str = ""
    """Spark's own option: the query's checkpoint."""

    @property
    def partitions(self) -> list[str]:
        """Those columns."""
        return [each.strip() for each in self.partition_by.split(",") if each.strip()]


def read_send_options(options: Mapping[str, str | Path]) -> SendOptions:
    """Raises OptionInvalid."""
    read: SendOptions = _read(options, SendOptions, "url", "It looks like veil://127.0.0.1:9324/orders.")
    if read.patience < 0:
        raise OptionInvalid(f"patience={read.patience:g} is below 0.", "")
    return read


def read_delta_options(options: Mapping[str, str | Path]) -> DeltaOptions:
    """Raises OptionInvalid."""
    read: DeltaOptions = _read(options, DeltaOptions, "path", "Where is the table to be?")
    try:
        storage = msgspec.json.decode(read.storage, type=dict[str, str])
    except msgspec.MsgspecError:
        raise OptionInvalid(
            "storage is no JSON object of texts.", 'It looks like {"aws_region": "eu-west-1"}.'
        ) from None
    del storage
    return read


def _read(options: Mapping[str, str | Path], kind: Any, needed: str, mend: str) -> Any:
    names = {name.replace("_", ""): name for name in kind.__struct_fields__}
    given = {names.get(str(name).lower(), str(name).lower()): value for name, value in _texts(options).items()}
    known = set(names.values())
    for name in given.keys() - known - _SPARK:
        raise OptionInvalid(f"This sink has no option {name}.", f"It has {', '.join(map(camel, sorted(known)))}.")
    if not given.get(needed):
        raise OptionInvalid(f"The option {needed} is missing.", mend)
    try:
        return msgspec.convert({name: given[name] for name in known & given.keys()}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise OptionInvalid(f"An option cannot be: {error}.", "") from None
