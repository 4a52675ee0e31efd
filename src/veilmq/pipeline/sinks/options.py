"""The options of the sinks, read once.

Strategy: as in drain/options.py; errors name the option.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from veilmq.pipeline.errors import OptionInvalid


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


_SPARK: Final = frozenset({"checkpointlocation", "path", "queryname", "storage"})
"""Options that Spark passes on by itself."""


def read_send_options(options: Mapping[str, str]) -> SendOptions:
    """Raises OptionInvalid."""
    read: SendOptions = _read(options, SendOptions, "url", "It looks like veil://127.0.0.1:9324/orders.")
    if read.patience < 0:
        raise OptionInvalid(f"patience={read.patience:g} is below 0.", "")
    return read


def read_delta_options(options: Mapping[str, str]) -> DeltaOptions:
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


def _read(options: Mapping[str, str], kind: Any, needed: str, mend: str) -> Any:
    given = {str(name).lower(): value for name, value in dict(options).items()}
    known = set(kind.__struct_fields__)
    for name in given.keys() - known - _SPARK:
        raise OptionInvalid(f"This sink has no option {name}.", f"It has {', '.join(sorted(known))}.")
    if not given.get(needed):
        raise OptionInvalid(f"The option {needed} is missing.", mend)
    try:
        return msgspec.convert({name: given[name] for name in known & given.keys()}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise OptionInvalid(f"An option cannot be: {error}.", "") from None
