"""Converts queue URLs and Amazon Resource Names to queues, and queues to URLs and ARNs.

Strategy: a URL's last two path segments are account and queue, whatever its host and prefix. A bare name is a queue of
the caller's account (AWS accepts it too, and programs rely on it: aws-sdk-js-v3, "Note on Queue names"), and so is
`/queue/NAME`, which emulators used for years. The region is the one in the URL, as `sqs.REGION.` before the base domain
or as `/queue/REGION/ACCOUNT/NAME`; otherwise the one in the request's signature.

An ARN is `arn:partition:sqs:region:account:name`; a table maps the region to the partition. An ARN in a request may
name any of AWS's partitions: only its region counts. Source: "Amazon Resource Names" in the IAM User Guide; the regions
of each partition as botocore's `partitions.json` has them.
"""

from typing import Final

import msgspec

from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Request, address_used
from veilmq.protocols.sqs import limits

_PARTITIONS: Final = (
    ("cn-", "aws-cn"),
    ("us-gov-", "aws-us-gov"),
    ("us-iso-", "aws-iso"),
    ("us-isob-", "aws-iso-b"),
    ("eu-isoe-", "aws-iso-e"),
    ("us-isof-", "aws-iso-f"),
    ("eusc-", "aws-eusc"),
)
USUAL: Final = "aws"
"""Partition of every other region."""


def partition(region: str) -> str:
    """The partition of a region."""
    for prefix, name in _PARTITIONS:
        if region.startswith(prefix):
            return name
    return USUAL


def arn(queue: QueueKey) -> str:
    """Amazon Resource Name of a queue."""
    return f"arn:{partition(queue.region)}:sqs:{queue.region}:{queue.account}:{queue.name}"


def user_arn(region: str, account: str, key_id: str) -> str:
    """Amazon Resource Name of the user of a key, in a region's partition."""
    return f"arn:{partition(region)}:iam::{account}:user/{key_id}"


_OWN: Final = "queue"
"""Instead of an account: the caller's own. Before a region: the form with the region in the path."""
STANDARD: Final = "standard"
"""Endpoint strategy: every queue URL has its region in the host."""
PATH: Final = "path"
"""Endpoint strategy: every queue URL has its region in the path."""


class Endpoint(msgspec.Struct, frozen=True):
    """How clients reach the listener, and the operator's settings."""

    external_url: str | None = None
    """The start of queue URLs, instead of the address that the client used."""
    account_alias: str | None = None
    """Another word, besides `queue`, for the caller's own account in a queue URL."""
    base_domain: str | None = None
    """`sqs.<region>.<base_domain>` names the region: in the Host header and in queue URLs."""
    strategy: str | None = None
    """STANDARD or PATH. None: a queue URL has its region in the host if the client addressed the base domain itself,
    `sqs.` before it, or a region of it."""
    sole_region: str | None = None
    """In development mode, the region of all queues whatever a client signs for or names in a URL, as in ElasticMQ."""
    trusted_proxy: bool = False
    """Believe X-Forwarded-Proto, X-Forwarded-Host and the last X-Forwarded-For."""
    cooldowns: bool = True
    """QueueDeletedRecently and PurgeQueueInProgress for 60 seconds, as on AWS."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call us; `*` for all."""
    requests_per_second_max: int = 0
    """Requests per second of one account; beyond, RequestThrottled. 0: no bound."""
    kms_faults: tuple[tuple[str, str], ...] = ()
    """KmsMasterKeyId of keys that cannot be used, each with a name of `errors.KMS_FAULTS`."""
    guarded: set[QueueKey] = set()
    """Queues whose policy may deny something: a hint, maintained by auth/authorize.py. The policy of such a queue
    is read before a call of its own account goes on."""


def is_queue_name(name: str) -> bool:
    """Whether SQS allows the name, `.fifo` names included."""
    return limits.QUEUE_NAME.match(name) is not None or limits.FIFO_QUEUE_NAME.match(name) is not None


def is_fifo(name: str) -> bool:
    """A queue is FIFO if its name says so; SQS allows no other."""
    return name.endswith(limits.FIFO_SUFFIX)


def region_of_host(base_domain: str, host: str) -> str | None:
    """The region that a host of the form `sqs.<region>.<base domain>` names, with or without a port."""
    name, ending = host.partition(":")[0].lower(), "." + base_domain.lower()
    if not name.startswith("sqs.") or not name.endswith(ending):
        return None
    region = name[len("sqs.") : -len(ending)]
    return region if limits.REGION.match(region) else None


def queue_of_url(url: str, endpoint: Endpoint, account: str, region: str) -> QueueKey | None:
    """The queue of a URL, path or name, of another account too; None if it is none of these.

    account, region: the caller's, where the URL names neither.
    """
    path = url.removesuffix("/")  # the API Reference writes queue URLs of the Query form with a final slash
    named = None
    if is_queue_name(url):
        segments = ["", account, url]
    elif "://" in url:
        segments = path.partition("://")[2].split("/")
        if endpoint.base_domain is not None:
            named = region_of_host(endpoint.base_domain, segments[0])
    else:
        segments = ["", *path.lstrip("/").split("/")]
    if len(segments) > 4 and segments[-4] == _OWN and limits.REGION.match(segments[-3]):
        named = segments[-3]
    if len(segments) > 2 and segments[-2] in {_OWN, endpoint.account_alias}:
        segments[-2] = account
    if len(segments) < 3 or not limits.ACCOUNT.match(segments[-2]) or not is_queue_name(segments[-1]):
        return None
    return QueueKey(segments[-2], endpoint.sole_region or named or region, segments[-1])


def queue_of_arn(text: str) -> QueueKey | None:
    """The queue that an ARN names, or None."""
    parts = text.split(":")
    if len(parts) != 6 or parts[0] != "arn" or not parts[1].startswith("aws") or parts[2] != "sqs":
        return None
    region, account, name = parts[3:]
    if not limits.REGION.match(region) or not limits.ACCOUNT.match(account) or not is_queue_name(name):
        return None
    return QueueKey(account, region, name)


def url_start(endpoint: Endpoint, request: Request, region: str) -> str:
    """The start of queue URLs in that region for this client, without a final slash."""
    external, strategy, domain = endpoint.external_url, endpoint.strategy, endpoint.base_domain
    start = address_used(request, endpoint.trusted_proxy) if external is None else external.rstrip("/")
    if strategy == PATH:
        return f"{start}/{_OWN}/{region}"
    if domain is None or (external is not None and strategy is None):
        return start
    scheme, _, rest = start.partition("://")  # by hand: the host may be anything that a client wrote
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or "]" in port:
        host, colon, port = authority, "", ""
    ours = {domain.lower(), f"sqs.{domain.lower()}"}
    if strategy == STANDARD or host.lower() in ours or region_of_host(domain, host) is not None:
        return f"{scheme}://sqs.{region}.{domain}{colon}{port}{slash}{path}"
    return start


def queue_url(start: str, queue: QueueKey) -> str:
    """The URL of a queue."""
    return f"{start}/{queue.account}/{queue.name}"
