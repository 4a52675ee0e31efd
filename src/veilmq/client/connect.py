"""`veilmq.connect`: turns a URL, or an SDK's object, into a `Queue`.

Strategy: a table maps a URL's scheme to the function that opens the account. An SDK's object is recognised by the name
and package of its class, so no SDK is imported for it. An adapter is imported when it is needed. A queue that was
opened from a URL closes its account, too; what the caller brought stays open.
"""

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from veilmq.client import urls
from veilmq.client.adapters.cloud import client_name
from veilmq.client.messages import Template
from veilmq.client.queue import Account, Queue
from veilmq.client.urls import Address
from veilmq.client.wrapping import Wrapping
from veilmq.model.access import HOME_REGION_DEFAULT
from veilmq.model.errors import CapabilityMissing, ParameterInvalid

DEVELOPMENT_KEYS: Final = {
    "devstoreaccount1": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
}
"""The account of development servers, whose key is public (Microsoft's documentation of its emulator)."""


def connect(source: Any, queue: str | None = None, *, template: Template | None = None) -> Queue:
    """The queue that a URL names (see `veilmq.client.urls`), or that an SDK's object reaches.

    source: a URL; an SDK's client (boto3's SQS client, Azure's QueueServiceClient, MNS's Account) with the queue's name
    (for SQS also its URL) in `queue`; an SDK's queue object (boto3's `sqs.Queue`, Azure's QueueClient, MNS's Queue). A
    missing queue is created if the URL says create=1 or a template is given.

    Raises ParameterInvalid (the URL, the object), QueueMissing, QueueExists (with other settings than the template's),
    CapabilityMissing (the adapter or SDK is not installed), TransportError, ServiceError.
    """
    if not isinstance(source, str):
        return _adopt(source, queue, template)
    address = urls.parse(source)
    name = _sole_name(address, queue)
    account = _open(address)
    try:
        if template is not None or address.create:
            account.create(name, template)
        return _Connected(account.queue(name))
    except BaseException:
        account.close()
        raise


def connect_account(source: Any) -> Account:
    """The account that an SDK's client, or a URL without a queue's name, reaches. Raises as `connect` does."""
    if not isinstance(source, str):
        account, name = _adopted(source, None)
        if name is not None:
            account.close()
            raise ParameterInvalid(parameter="source", reason="is a queue: connect_account takes a client")
        return account
    address = urls.parse(source)
    if address.queue is not None:
        raise ParameterInvalid(
            parameter="url", reason="names a queue: connect_account takes it without (.../ at its end)"
        )
    return _open(address)


class _Connected(Wrapping):
    """A queue with the account that was opened for it; both are closed together."""

    def close(self) -> None:
        self.inner.close()
        self.inner.account.close()


def _sole_name(address: Address, queue: str | None) -> str:
    if address.queue is not None and queue is not None:
        raise ParameterInvalid(parameter="queue", reason="the URL names one already")
    name = address.queue or queue
    if name is None:
        reason = "names no queue: queue=NAME is missing" if address.kind == "embedded" else "names no queue"
        raise ParameterInvalid(parameter="url", reason=reason)
    return name


def _open(address: Address) -> Account:
    try:
        return OPENERS[address.kind](address)
    except ModuleNotFoundError as error:
        raise _sdk_missing(address.kind, error) from error


def _sdk_missing(kind: str, error: ModuleNotFoundError) -> CapabilityMissing:
    return CapabilityMissing(capability=f"{kind} (no module {error.name}: pip install 'veilmq[{kind}]')")


def _embedded(address: Address) -> Account:
    from veilmq.client.adapters.embedded import EmbeddedAccount

    assert address.directory is not None
    given = {name: value for name in ("account", "region") if (value := getattr(address, name)) is not None}
    return EmbeddedAccount(address.directory, create=address.create, **given)


def _veil(address: Address) -> Account:
    from veilmq.client.adapters.veil import VeilAccount

    assert address.host is not None
    given: dict[str, Any] = {} if address.region is None else {"region": address.region}
    return VeilAccount(
        address.host, address.port, address.key, address.secret, tls=bool(address.tls), account=address.account, **given
    )


def _sqs(address: Address) -> Account:
    import botocore.config  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    from veilmq.client.adapters.sqs import SqsAccount

    given: dict[str, Any] = {}
    if address.host is not None:
        scheme = "http" if address.tls is False else "https"
        given["endpoint_url"] = f"{scheme}://{_place(address)}"
    if address.key is not None:
        given["aws_access_key_id"], given["aws_secret_access_key"] = address.key, address.secret
    try:
        session = _botocore_session()
        # With an endpoint of the caller's own there is no region to look up; a VeilMQ server shows its queues in this
        # one.
        configured = session.get_config_variable("region")
        region = address.region or configured or (HOME_REGION_DEFAULT if address.host else None)
        named = botocore.config.Config(user_agent_extra=client_name())
        client = session.create_client("sqs", region_name=region, config=named, **given)
    except (BotoCoreError, ValueError) as error:
        raise ParameterInvalid(parameter="url", reason=f"boto3 does not take it: {type(error).__name__}") from error
    return SqsAccount(client, owner=address.account, owns_client=True)


_loading: Final = threading.Lock()
_loaders: Final[list[Any]] = []
"""Process-wide: empty before the first session; then the loader that caches the files which botocore has read."""


def _botocore_session() -> Any:
    """A new session. Accounts share no credentials, only the models.

    Reading the models is most of the cost of a client; a hundred threads that do it at the same time take half a
    minute.
    """
    import boto3  # type: ignore[import-untyped]
    import botocore.session  # type: ignore[import-untyped]
    from botocore.exceptions import DataNotFoundError

    session = botocore.session.Session()
    session.user_agent_name, session.user_agent_version = "Boto3", boto3.__version__
    with _loading:
        if not _loaders:
            loader = session.get_component("data_loader")
            with suppress(DataNotFoundError):  # a version with other files reads them when it needs them
                for kind in ("service-2", "endpoint-rule-set-1"):
                    loader.load_service_model("sqs", kind)
                for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
                    loader.load_data(name)
            _loaders.append(loader)
    session.register_component("data_loader", _loaders[0])
    return session


def _azure(address: Address) -> Account:
    from azure.storage.queue import QueueServiceClient

    from veilmq.client.adapters.azure import AzureAccount

    if address.account is None:
        raise ParameterInvalid(parameter="url", reason="azure:// needs the account: azure://.../ACCOUNT/NAME")
    if address.host is None:
        url = f"https://{address.account}.queue.core.windows.net"
    else:
        scheme = "http" if address.tls is False else "https"
        url = f"{scheme}://{_place(address)}/{quote(address.account)}"
    credential = address.secret or DEVELOPMENT_KEYS.get(address.account) or _azure_identity()
    key = {"account_name": address.account, "account_key": credential} if isinstance(credential, str) else credential
    try:
        # The SDK's own default waits at least 15 seconds before it retries: longer than many leases.
        client = QueueServiceClient(
            url, credential=key, retry_total=2, initial_backoff=0, increment_base=1, random_jitter_range=0,
            user_agent=client_name(),
        )  # fmt: skip
    except ValueError as error:
        raise ParameterInvalid(parameter="url", reason="azure-storage-queue does not take it") from error
    return AzureAccount(client, base64=bool(address.base64), owns_client=True)


def _azure_identity() -> Any:
    try:
        return importlib.import_module("azure.identity").DefaultAzureCredential()
    except ModuleNotFoundError:
        reason = "has no key (azure://:KEY@...), and without one azure:// needs the package azure-identity"
        raise ParameterInvalid(parameter="url", reason=reason) from None


def _mns(address: Address) -> Account:
    from mns.account import Account as SdkAccount  # type: ignore[import-untyped]

    from veilmq.client.adapters.mns import MnsAccount

    if address.key is None:
        reason = "has no credentials (mns://ID:SECRET@...); with others than these, hand over an mns.account.Account"
        raise ParameterInvalid(parameter="url", reason=reason)
    scheme = "https" if address.tls else "http"
    account = SdkAccount(f"{scheme}://{_place(address)}", address.key, address.secret)
    return MnsAccount(account, base64=address.base64 is not False)


def _place(address: Address) -> str:
    assert address.host is not None
    host = f"[{address.host}]" if ":" in address.host else address.host
    return host + (f":{address.port}" if address.port else "")


OPENERS: Final[dict[str, Callable[[Address], Account]]] = {
    "embedded": _embedded,
    "veil": _veil,
    "sqs": _sqs,
    "azure": _azure,
    "mns": _mns,
}
"""By kind of address. A new adapter adds a line here, and one below if it accepts its SDK's objects."""


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


Adopter = Callable[[Any, str | None], tuple[Account, str | None]]
ADOPTERS: Final[dict[tuple[str, str], Adopter]] = {
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


def _adopted(source: Any, queue: str | None) -> tuple[Account, str | None]:
    for each in type(source).__mro__:
        adopter = ADOPTERS.get((each.__module__, each.__name__))
        if adopter is not None:
            return adopter(source, queue)
    reason = f"must be a URL or an SDK's client or queue, not {type(source).__module__}.{type(source).__qualname__}"
    raise ParameterInvalid(parameter="source", reason=reason)


def _adopt(source: Any, queue: str | None, template: Template | None) -> Queue:
    account, name = _adopted(source, queue)
    try:
        if name is None:
            raise ParameterInvalid(parameter="queue", reason="which one? Give its name or URL")
        if template is not None:
            account.create(name, template)
        return _Connected(account.queue(name))
    except BaseException:
        account.close()
        raise
