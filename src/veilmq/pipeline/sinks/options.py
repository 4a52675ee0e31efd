"""The options of the sinks, read once.

Strategy: as drain/options.py; what is wrong names the option.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from veilmq.pipeline.errors import OptionInvalid


class SendOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the queue sink."""

    url: str
    """As `veilmq.connect` takes it."""
    key: str | None = None
    """Column whose text says which rows are the same: they become one message, on a FIFO queue."""
    patience: float = 30.0
    """Seconds that a queue which cannot be reached is tried again."""


class DeltaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the Delta sink."""

    path: str
    """Directory or URI of the table, which executors and driver reach alike."""
    app: str | None = None
    """Name of the query's transactions, of no other query; None: its id, which its checkpoint keeps."""
    storage: str = "{}"
    """JSON, deltalake's storage options."""


_SPARK: Final = frozenset({"checkpointlocation", "path", "queryname", "storage"})
"""What Spark passes on of its own."""


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
