"""CloudAccount, MNSClient, CloudQueue and CloudPullTopic of the documents' Java listings; the manager (documents 000
and 002), which extends messages while they are being processed; and MessageReceiver (document 002).

Strategy: an endpoint is one of MNS (`http://`, `https://`), as in the documents, or any URL that
`veilmq.connect_account` takes (`veil://`, `sqs://`, `mns://`, a directory's `veil:///`); the access key is used if the
URL has none. The definition of a pull topic is kept in the directory or store named by `definitions`, by default a
directory of this user.

Of the last two, our classes are LeaseKeeper and Receiver.
"""

import logging
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

import msgspec

from veilmq.client.adapters.connect import SCHEMES, connect_account
from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.documents.queues import (
    AnyQueue,
    MessageQueue,
    TransactionChecker,
    TransactionQueue,
    check_checker,
    queue_of,
    with_wait_within,
)
from veilmq.client.documents.values import Message, QueueMeta, TopicMessage, TopicMeta, documented, received_of
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease, State
from veilmq.client.messages import Message as Outgoing
from veilmq.client.messages import Received, Template
from veilmq.client.queue import Account
from veilmq.client.receiver import Receiver
from veilmq.client.records import make_own, own_path
from veilmq.client.shared import checks
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.topics import PullTopic, create_pull_topic
from veilmq.client.transaction import Form, Times
from veilmq.client.transaction.logbook import check_half, check_log, form_for, times_for
from veilmq.model.errors import ParameterInvalid, QueueMissing, VeilError
from veilmq.model.settings.queue import FIFO_SUFFIX

DEFINITIONS_DEFAULT: Final = own_path("veilmq-pull-topics")
_LOG_SUFFIX: Final = "-operation-log"
_RETENTION_DEFAULT: Final = 4 * 24 * 3_600.0
"""Of a queue that is created without one, in SQS, MNS and on our server."""
_TLS: Final = {"http": 0, "https": 1}
"""Scheme of an MNS endpoint -> `tls` in an account's URL."""

log = logging.getLogger("veilmq.documents")


@documented
class CloudQueue(MessageQueue):
    """A queue with the documents' methods: putMessage, popMessage, peekMessage, deleteMessage, delete."""

    def __init__(self, queue: AnyQueue, *, owned: bool = False) -> None:
        """queue: one of ours, of this package, or of an SDK. owned: close it with this object."""
        self.queue = queue_of(queue, owned=owned)

    def getQueueName(self) -> str:
        """Its name."""
        return self.queue.name

    def delete(self) -> None:
        """Delete the queue with all its messages. Raises QueueMissing."""
        self.queue.account.delete(self.queue.name)


@documented
class CloudPullTopic(Closing):
    """One message to many queues (document 002); our class is PullTopic, in `topic`."""

    def __init__(self, topic: PullTopic, *, owned: bool = False) -> None:
        """owned: close the topic with this object."""
        self.topic = topic
        self._owned = owned

    def publishMessage(self, message: TopicMessage) -> TopicMessage:
        """Send a copy to every queue."""
        self.topic.publish(Outgoing(message.message_body, tag=message.message_tag))
        return message

    def delete(self) -> None:
        """Delete the topic and the queues that it created; unlike the sample, keep the queues that existed before."""
        self.topic.delete()

    def close(self) -> None:
        """Close the connections of its queues, unless the topic is the caller's."""
        if self._owned:
            self.topic.close()


@documented
class MNSClient(Closing):
    """Queues and topics of one account; our object is `account`."""

    def __init__(self, account: Account, definitions: str | None = None, *, owned: bool = False) -> None:
        """owned: close the account with this object."""
        self.account = account
        self._owned = owned
        self._definitions = definitions

    def createQueue(self, queueMeta: QueueMeta) -> CloudQueue:
        """Make sure that the queue exists."""
        name = queueMeta.queue_name
        with_wait_within(queueMeta.template(), lambda template: self.account.create(name, template))
        return self.getQueueRef(name)

    def getQueueRef(self, queueName: str) -> CloudQueue:
        """An existing queue. Raises QueueMissing."""
        return CloudQueue(self.account.queue(queueName), owned=True)

    def createPullTopic(
        self,
        topicMeta: TopicMeta,
        queueNameList: list[str],
        needCreateQueue: bool = False,
        queueMetaTemplate: QueueMeta | None = None,
    ) -> CloudPullTopic:
        """A topic over these queues; both forms of the document. Creates everything or nothing."""

        def make(template: Template | None) -> PullTopic:
            return create_pull_topic(
                self.account,
                topicMeta.topic_name,
                queueNameList,
                definitions=self._definitions or _own_definitions(),
                create_queues=needCreateQueue,
                template=template,
            )

        if queueMetaTemplate is None:
            return CloudPullTopic(make(None), owned=True)
        return CloudPullTopic(with_wait_within(queueMetaTemplate.template(), make), owned=True)

    def createTransQueue(
        self, queueMeta: QueueMeta, checker: TransactionChecker, operationTimeout: float | None = None
    ) -> TransactionQueue:
        """A transaction queue with its log, and a running checker. Creates everything or nothing.

        operationTimeout: seconds after which the checker is asked about an unfinished operation; None: 600, and 180 for
        a FIFO queue. Raises ParameterInvalid for times that would lose a message.
        """
        check_checker(checker)
        if operationTimeout is not None:
            checks.positive(operationTimeout, "operationTimeout")
        times = Times(timeout=operationTimeout)
        name = queueMeta.queue_name
        log_name = name.removesuffix(FIFO_SUFFIX) + _LOG_SUFFIX
        template = self._checked_template(name, log_name, queueMeta.template(), times)
        with ExitStack() as undo:
            # The queue first: if the service refuses its settings, no log has been created yet.
            with_wait_within(template, lambda within: self._create(undo, name, within))
            self._create(undo, log_name, Template())
            queue, entries = (undo.enter_context(self.account.queue(each)) for each in (name, log_name))
            made = TransactionQueue(self.account, queue, entries, checker, times, owned=True)
            undo.pop_all()
        return made

    def _checked_template(self, name: str, log_name: str, template: Template, times: Times) -> Template:
        """The settings of the queue. Raises ParameterInvalid for times that would lose a message there.

        Checks everything before anything is created: the name of a queue that was created and deleted stays blocked for
        a while.
        """
        able = self.account.capabilities(name)
        form, resolved = form_for(None, able), times_for(times, able)
        if form is Form.HIDDEN and not able.ttl and template.retention is None:
            # A half message expires with its queue's retention, which the document's SDK sets.
            template = msgspec.structs.replace(template, retention=resolved.half_life)
        if form is Form.HIDDEN:
            check_half(resolved, able, self._retention(name, template.retention))
        check_log(resolved, form, self.account.capabilities(log_name), self._retention(log_name, None))
        return template

    def _retention(self, name: str, wanted: float | None) -> float | None:
        """The queue's retention if it exists; else the one that it will be created with."""
        try:
            with self.account.queue(name) as queue:
                return queue.stats().retention
        except QueueMissing:
            return _RETENTION_DEFAULT if wanted is None else wanted

    def _create(self, undo: ExitStack, name: str, template: Template) -> None:
        if self.account.create(name, template):
            undo.callback(self._delete, name)

    def _delete(self, name: str) -> None:
        try:
            self.account.delete(name)
        except VeilError as error:
            log.warning("queue %s was made, is not needed, and could not be deleted: %s", name, error)

    def close(self) -> None:
        """Close connections, those of its queues too, unless the account is the caller's."""
        if self._owned:
            self.account.close()


def _own_definitions() -> str:
    """The default place. Raises ParameterInvalid if it cannot be used."""
    try:
        make_own(DEFINITIONS_DEFAULT)
    except OSError as error:
        reason = f"name a place: the default, {DEFINITIONS_DEFAULT}, cannot be used ({error.strerror})"
        raise ParameterInvalid(parameter="definitions", reason=reason) from None
    return f"file://{DEFINITIONS_DEFAULT}"


def _parts_of(endpoint: Any) -> SplitResult:
    """Raises ParameterInvalid."""
    try:
        parts = urlsplit(checks.text(endpoint, "endpoint"))
    except ValueError:
        raise ParameterInvalid(parameter="endpoint", reason="must be a URL: an IPv6 address needs brackets") from None
    if parts.scheme not in {*_TLS, *SCHEMES}:
        others = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        reason = f"must begin with http:// or https:// (an endpoint of MNS), or with one of {others}"
        raise ParameterInvalid(parameter="endpoint", reason=reason)
    return parts


@documented
class CloudAccount:
    """An account by its access key and endpoint."""

    def __init__(self, accessKeyId: str, accessKeySecret: str, endpoint: str, definitions: str | None = None) -> None:
        """endpoint: an MNS endpoint, `http://...` or `https://...`, as in the documents, or an account's URL.
        definitions: URL of the place where pull topics are recorded; see docs/patterns/pull-topic.md.

        Raises ParameterInvalid, also for an endpoint without one of these schemes.
        """
        parts = _parts_of(endpoint)
        if accessKeyId and parts.netloc and "@" not in parts.netloc:
            key, secret = checks.text(accessKeyId, "accessKeyId"), checks.text(accessKeySecret, "accessKeySecret")
            parts = parts._replace(netloc=f"{quote(key, safe='')}:{quote(secret, safe='')}@{parts.netloc}")
        if parts.scheme in _TLS:
            query = "&".join(filter(None, (parts.query, f"tls={_TLS[parts.scheme]}")))
            parts = parts._replace(scheme="mns", query=query)
        self._endpoint = urlunsplit(parts) if parts.netloc else endpoint
        self._definitions = definitions

    def getMNSClient(self) -> MNSClient:
        """A new client; create it once."""
        return MNSClient(connect_account(self._endpoint), self._definitions, owned=True)


_SETTINGS: Final = {
    "endpoint": "mns.accountendpoint",
    "id": "mns.accesskeyid",
    "secret": "mns.accesskeysecret",
}
_LINE: Final = re.compile(r"\s*([^\s:=#!][^\s:=]*)\s*[:=]?\s*(.*?)\s*\Z")


@documented
class ServiceSettings:
    """Endpoint and key of the account, read from the file where the documents' SDK for Java keeps them.

    Lines `mns.accountendpoint=...`, `mns.accesskeyid=...`, `mns.accesskeysecret=...`. Each call reads the file and
    raises ParameterInvalid if the setting is missing.
    """

    path: ClassVar[Path] = Path("~/.aliyun-mns.properties")

    @classmethod
    def getMNSAccountEndpoint(cls) -> str:
        """For CloudAccount."""
        return cls._read(_SETTINGS["endpoint"])

    @classmethod
    def getMNSAccessKeyId(cls) -> str:
        """For CloudAccount."""
        return cls._read(_SETTINGS["id"])

    @classmethod
    def getMNSAccessKeySecret(cls) -> str:
        """For CloudAccount."""
        return cls._read(_SETTINGS["secret"])

    @classmethod
    def _read(cls, name: str) -> str:
        path = cls.path.expanduser()
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeError) as error:
            reason = f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"
            raise ParameterInvalid(parameter=name, reason=reason) from None
        for line in lines:
            found = _LINE.match(line)
            if found is not None and found[1] == name and found[2]:
                return found[2].replace("\\:", ":").replace("\\=", "=")  # as written by Java's Properties.store
        raise ParameterInvalid(parameter=name, reason=f"is not in {path}")


@documented
class Manager(Closing):
    """Extends a message's visibility in time, until it is deleted or MessageTimeout is over.

    A message may be one of this package, of ours, or of an SDK (aliyun-mns-sdk, boto3, azure-storage-queue).
    """

    def __init__(
        self,
        queue: AnyQueue,
        MessageMinimalLife: float = 10,
        TimerInterval: float = 10,
        QueueMessageVisibilityTimeout: float = 300,
        MessageTimeout: float = 5 * 3_600,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        """Seconds. Raises ParameterInvalid unless the visibility timeout exceeds interval and minimal life together."""
        with ExitStack() as undo:
            self.keeper = LeaseKeeper(
                undo.enter_context(queue_of(queue)),
                minimal_life=MessageMinimalLife,
                interval=TimerInterval,
                visibility_timeout=QueueMessageVisibilityTimeout,
                max_hold=MessageTimeout,
                clock=clock,
            )
            undo.pop_all()
        self._leases: dict[str, Lease] = {}
        """By the handle of the receive; finished leases are removed at the next call."""
        self._lock = threading.Lock()

    def RegisterMessage(self, message: Message | Received | Any) -> Lease:
        """Extend it from now on; call this right after the receive. Raises LeaseExpired if it is too late."""
        received = received_of(message)
        lease = self.keeper.register(received)
        with self._lock:
            if len(self._leases) > 2 * self.keeper.leases:
                self._leases = {key: each for key, each in self._leases.items() if each.state not in _ENDED}
            self._leases[received.handle] = lease
        return lease

    def DeleteMessage(self, message: Message | Received | Any) -> None:
        """Delete a finished message by its newest handle; one that is not registered, by the handle of its receive.

        Raises as `Queue.delete`.
        """
        received = received_of(message)
        with self._lock:
            lease = self._leases.get(received.handle)
        if lease is None:
            self.keeper.queue.delete(received.handle)
            return
        self.keeper.delete(lease)
        with self._lock:
            self._leases.pop(received.handle, None)

    def ChangeMessageVisibility(self, message: Message | Received | Any) -> bool:
        """Run one ChangeVisibilityTask for this message; return whether its visibility was changed."""
        return ChangeVisibilityTask(self, message).Run()

    def held(self, message: Message | Received | Any) -> Lease | None:
        """The lease of a registered message, unless it was deleted or given up."""
        with self._lock:
            lease = self._leases.get(received_of(message).handle)
        return None if lease is None or lease.state in _ENDED else lease

    def registerMessage(self, message: Message | Received | Any) -> Lease:
        """RegisterMessage."""
        return self.RegisterMessage(message)

    def deleteMessage(self, message: Message | Received | Any) -> None:
        """DeleteMessage, as document 002 writes it."""
        self.DeleteMessage(message)

    def close(self) -> None:
        """Stop extending, and release all leases. The caller's queue stays open."""
        self.keeper.close()
        self.keeper.queue.close()


_ENDED = (State.DONE, State.LOST)


@documented
class ChangeVisibilityTask:
    """One check of one registered message: the document's flowchart (docs/images/keeper-flow.svg).

    The manager checks by itself, at the registration and then in time; this is for an additional check.
    """

    def __init__(self, manager: Manager, message: Message | Received | Any) -> None:
        self._manager = manager
        self._message = message

    def Run(self) -> bool:
        """Change the visibility if that is due; return whether it was. Raises as `Lease.extend`."""
        lease = self._manager.held(self._message)
        if lease is None:
            return False
        parameters = self._manager.keeper.parameters
        if lease.remaining() > parameters.interval + parameters.minimal_life:
            return False
        lease.extend(parameters.visibility_timeout)
        return True


@documented
class MessageReceiver(Closing):
    """Each thread creates its own, over its own queue object or a shared one. All receivers of the same queue in this
    process share one long poll."""

    def __init__(self, queue: AnyQueue) -> None:
        self._queue = queue_of(queue)
        self.receiver = Receiver(self._queue)

    def receiveMessage(self, waitSeconds: float | None = None) -> Message | None:
        """The next message for this thread; None if none came in time. Without a wait, waits for ever."""
        found = self.receiver.receive(waitSeconds)
        return None if found is None else Message.of(found)

    def close(self) -> None:
        """Waiting callers get None at once. The caller's queue and the other receivers stay open."""
        self.receiver.close()
        self._queue.close()
