"""Accounts from an SDK's own client or queue object.

Strategy: an object is recognised by the name and package of its class, so no SDK is imported for it. What the caller
brought stays open when the account is closed.
"""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from veilmq.client.queue import Account
from veilmq.model.errors import ParameterInvalid


def _boto3_client(client: Any, queue: str | None) -> tuple[Account, str | None]:
    service = client.meta.service_model.service_name
    if service != "sqs":
        raise ParameterInvalid(parameter="source", reason=f"must be a client of sqs, not of {service}")
    from veilmq.client.adapters.sqs import SqsAccount

    rest, slash, name = (queue or "").rpartition("/")
    owner = rest.rpartition("/")[2] if slash else None
    return SqsAccount(client, owner=owner), name or None


def _boto3_resource(found: Any, queue: str | None) -> tuple[Account, str | None]:
    """An sqs.Queue, or the sqs.ServiceResource that makes it."""
    url: str | None = getattr(found, "url", None)
    if url is not None and queue is not None:
        raise ParameterInvalid(parameter="queue", reason="the object is a queue already")
    return _boto3_client(found.meta.client, url or queue)


def _azure_service(client: Any, queue: str | None) -> tuple[Account, str | None]:
    from veilmq.client.adapters.azure import AzureAccount

    return AzureAccount(client), queue


def _azure_queue(client: Any, queue: str | None) -> tuple[Account, str | None]:
    """A QueueClient: we reach its account by a client of our own, with the same URL and credential."""
    from azure.storage.queue import QueueServiceClient

    from veilmq.client.adapters.azure import AzureAccount

    if queue is not None:
        raise ParameterInvalid(parameter="queue", reason="the object is a queue already")
    parts = urlsplit(client.url)
    path = parts.path.rpartition("/")[0]
    url = urlunsplit(parts._replace(path=path))
    service = QueueServiceClient(url, credential=client.credential, api_version=client.api_version)
    return AzureAccount(service, base64=_encodes(client), owns_client=True), client.queue_name


def _encodes(client: Any) -> bool:
    """Whether a QueueClient sends text in base64. Raises ParameterInvalid if it uses any other encoding."""
    kinds = tuple(type(getattr(client, f"_message_{way}_policy", None)).__name__ for way in ("encode", "decode"))
    known = {("NoEncodePolicy", "NoDecodePolicy"): False, ("TextBase64EncodePolicy", "TextBase64DecodePolicy"): True}
    if kinds not in known:
        reason = f"must send text as it is or in base64, and receive it so; its policies are {' and '.join(kinds)}"
        raise ParameterInvalid(parameter="source", reason=reason)
    return known[kinds]


def _mns_account(account: Any, queue: str | None) -> tuple[Account, str | None]:
    from veilmq.client.adapters.mns import MnsAccount

    return MnsAccount(account), queue


def _mns_queue(found: Any, queue: str | None) -> tuple[Account, str | None]:
    """An mns.queue.Queue: it holds its account's client, and knows whether it encodes."""
    from veilmq.client.adapters.mns import MnsAccount

    if queue is not None:
        raise ParameterInvalid(parameter="queue", reason="the object is a queue already")
    return MnsAccount(found, base64=bool(found.encoding)), found.queue_name


_Adopter = Callable[[Any, str | None], tuple[Account, str | None]]
_ADOPTERS: Final[dict[tuple[str, str], _Adopter]] = {
    ("botocore.client", "BaseClient"): _boto3_client,
    ("boto3.resources.base", "ServiceResource"): _boto3_resource,
    ("azure.storage.queue._queue_service_client", "QueueServiceClient"): _azure_service,
    ("azure.storage.queue._queue_client", "QueueClient"): _azure_queue,
    ("mns.account", "Account"): _mns_account,
    ("mns.queue", "Queue"): _mns_queue,
}
"""By package and class of an SDK's object, or of one of its bases.

Each function takes the object and the queue's name or URL passed with it, and returns the account and the queue's name.
"""


def adopted(source: Any, queue: str | None) -> tuple[Account, str | None]:
    """The account that an SDK's object reaches, and the queue's name, if there is one. Raises ParameterInvalid."""
    for each in type(source).__mro__:
        adopter = _ADOPTERS.get((each.__module__, each.__name__))
        if adopter is not None:
            return adopter(source, queue)
    reason = f"must be a URL or an SDK's client or queue, not {type(source).__module__}.{type(source).__qualname__}"
    raise ParameterInvalid(parameter="source", reason=reason)
