"""Restores bodies that a sender's patterns wrapped: fetches objects, decrypts ciphertext. Runs on executors.

Strategy: the client's own readers run one after the other in the order of the option `unwrap`. If one message is
faulty, Unreadable quarantines it; if a store cannot be reached, the task fails and Spark retries it.
"""

from typing import Any

from veilmq.client import urls
from veilmq.client.clock import SYSTEM
from veilmq.client.encrypted import Keys
from veilmq.client.encrypted.cipher import Cipher
from veilmq.client.errors import KeyFileInvalid
from veilmq.client.large import PointerFormat
from veilmq.client.large.fetching import Fetcher
from veilmq.client.large.queue import BODY_BYTES_MAX
from veilmq.client.messages import Peeked
from veilmq.client.records.objects import ObjectStore
from veilmq.client.unreadable import keep
from veilmq.model.errors import ParameterInvalid
from veilmq.pipeline.drain.options import DrainOptions, store_options_of
from veilmq.pipeline.errors import OptionInvalid


class Unwrapping:
    """The steps of one query. Raises OptionInvalid for invalid keys or an invalid store."""

    def __init__(self, options: DrainOptions) -> None:
        try:
            self._steps = [_large(options) if step == "large" else _encrypted(options) for step in options.unwrap]
        except (ParameterInvalid, KeyFileInvalid, ValueError) as error:
            raise OptionInvalid(f"unwrap={','.join(options.unwrap)}: {error}.", "") from None

    def body(self, message: Peeked) -> str:
        """The body as it was sent. Raises Unreadable, and ObjectStoreFailed, which says nothing about the message."""
        for step in self._steps:
            message = Peeked(message.id, step(message), message.attributes)
        return message.body


def _large(options: DrainOptions) -> Any:
    store = ObjectStore(str(options.store), options=store_options_of(options))
    nowhere: Any = None  # without leases there is nothing to ask the queue
    fetcher = Fetcher(nowhere, store, PointerFormat(options.pointers), BODY_BYTES_MAX, keep, SYSTEM)
    return lambda message: fetcher.peeked(message).body


def _encrypted(options: DrainOptions) -> Any:
    name = options.bound_to or urls.parse(options.url).queue or ""
    cipher = Cipher(Keys.read(str(options.keys)), options.algorithms, name, ())
    return lambda message: cipher.decrypt(message.body, message.id)
