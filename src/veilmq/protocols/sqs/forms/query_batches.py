"""A plain batch in the Query form, read in one step.

Strategy: a form of ASCII characters, escaped or not, is JSON but for its punctuation: `&` stands for a comma, `=`
for a colon, and `%3A` for `\\u003A`. So these bytes are replaced, and msgspec reads the parameters into a struct. A
batch is plain if it begins with the action and the version, as botocore's do, and has a queue's URL and two members for
each entry. For anything else there is None, and query_form.py reads the form pair by pair. It decides what is right: a
test holds the two together.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.forms import DeleteEntry, SendEntry
from veilmq.protocols.sqs.operations import OPERATIONS


class _Batch:
    """A batch operation whose entries have an id and one more member."""

    def __init__(self, name: str, member: str, entry: Callable[[str, str], Any]) -> None:
        """entry: makes one of its id and its member."""
        self.row = OPERATIONS[name]
        self._entry = entry
        names = {"queue_url": "QueueUrl"}
        for number in range(1, limits.ENTRIES_MAX + 1):
            start = f"{name}RequestEntry.{number}."
            names |= {f"id_{number}": f"{start}Id", f"member_{number}": start + member}
        flat = msgspec.defstruct(f"{name}Form", [(each, str | None, None) for each in names], rename=names, gc=False)
        self._decode = msgspec.json.Decoder(flat).decode

    def read(self, text: bytes, pairs: int) -> tuple[Operation, Any] | None:
        """text: a JSON object of that many parameters. None if they are not the URL and whole entries, each once, or
        if a value is not ASCII. Raises DecodeError, UnicodeDecodeError."""
        values = msgspec.structs.astuple(self._decode(text))[:pairs]
        if not values[0] or len(values) < pairs or pairs < 3 or pairs % 2 == 0 or None in values:
            return None
        if not "".join(values).isascii():
            return None
        entries = list(map(self._entry, values[1::2], values[2::2]))
        return self.row, self.row.input_type(queue_url=values[0], entries=entries)


_BATCHES: Final = {
    f"Action={batch.row.name}&Version={version}".encode(): batch
    for batch in (
        _Batch("SendMessageBatch", "MessageBody", lambda id_, text: SendEntry(id=id_, message_body=text)),
        _Batch("DeleteMessageBatch", "ReceiptHandle", lambda id_, text: DeleteEntry(id=id_, receipt_handle=text)),
    )
    for version in limits.API_VERSIONS
}
"""By what a form begins with."""
_PAIRS_MAX: Final = 1 + 2 * limits.ENTRIES_MAX
_FORM_BYTES_MAX: Final = 65_536
"""The larger the bodies are, the less it gains."""
_NOT_ASCII: Final = re.compile(b"%[C-Fc-f]").search
"""How an escaped character beyond ASCII begins."""
STARTS: Final = tuple({start.partition(b"&")[0] + b"&" for start in _BATCHES})


def read_batch(form: bytes) -> tuple[Operation, Any] | None:
    """The operation and its input; None if the form is not a plain batch. Call it if the form begins with one of
    `STARTS`."""
    end = form.find(b"&", form.find(b"&") + 1)
    batch = _BATCHES.get(form[:end])
    if batch is None or len(form) > _FORM_BYTES_MAX:
        return None
    text = form[end + 1 :]
    pairs = text.count(b"&") + 1
    if pairs > _PAIRS_MAX or text.count(b"=") != pairs or b'"' in text or b"\\" in text or _NOT_ASCII(text):
        return None
    text = text.replace(b"&", b'","').replace(b"=", b'":"').replace(b"%", b"\\u00").replace(b"+", b" ")
    try:
        return batch.read(b'{"' + text + b'"}', pairs)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
