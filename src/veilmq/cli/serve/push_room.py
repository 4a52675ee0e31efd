"""Opens the push room when the first push subscription exists.

Strategy: most servers push nothing and should not pay for the room's libraries and key. So a task waits for a push
subscription, and only then imports the room, makes or reads the key, and lets the MNS port serve the certificate.
Loading takes a quarter of a second of CPU, so it runs on a thread while the loop goes on. If open files or threads are
exhausted, they may be available later, so opening is retried.
"""

import asyncio
import datetime
import importlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from veilmq.model.errors import VeilError
from veilmq.model.settings.topic import LiveSubscription, LiveTopic, SubscriptionSettings, TopicKey
from veilmq.push import CERTIFICATE_FILE, CERTIFICATE_PATH, KEY_FILE
from veilmq.push.network import local_exhaustion_of
from veilmq.server.clock import wall
from veilmq.server.config.settings import Settings
from veilmq.server.service import Service

if TYPE_CHECKING:
    from veilmq.push.room import PushRoom


_LOOK_S: Final = 0.5
_SHARE_S: Final = 1.0
PAUSES: Final = "push-pauses"
"""What the servers of a cluster share: seconds between two calls, by endpoint."""
PAUSES_MAX: Final = 1_000
AGAIN_S: Final = 10.0
"""How long after a failure to open the room the next attempt is made."""

log = logging.getLogger("veilmq.push")


async def serve_pushes(service: Service, settings: Settings) -> None:
    """Push until cancelled."""
    subscriptions = _Subscriptions(service.reader.topics)
    while not subscriptions():  # noqa: ASYNC110 the store sets no event
        await asyncio.sleep(_LOOK_S)
    try:
        while (room := await _try_to_open(service, settings, subscriptions)) is None:  # noqa: ASYNC110 nor does the machine
            await asyncio.sleep(AGAIN_S)
    except ValueError as error:
        service.push_fault = "until a restart: the key cannot be had"
        log.error("no pushes: the key cannot be had: %s", error)
        return
    from veilmq.push.room import TIMEOUT_S

    service.push_fault = None
    service.pushes, service.push_room = room.results, room
    try:
        if service.cluster is not None:
            await _share_pauses(service, room)
        await asyncio.get_running_loop().create_future()
    finally:
        service.push_room = None
        await room.stop(min(TIMEOUT_S, settings.shutdown_deadline_s))


async def _try_to_open(service: Service, settings: Settings, subscriptions: "_Subscriptions") -> "PushRoom | None":
    """The started room; None if a resource is exhausted now. Raises ValueError for a damaged key."""
    try:
        return await _open(service, settings, subscriptions)
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        if not isinstance(error, OSError) and local_exhaustion_of(error) is None:
            raise
        fault = f"at present: {error}"
        if service.push_fault != fault:
            service.push_fault = fault
            log.error("no pushes %s; tried again every %g s", fault, AGAIN_S)
        return None


async def _open(service: Service, settings: Settings, subscriptions: "_Subscriptions") -> "PushRoom":
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, importlib.import_module, "veilmq.push.room")
    from veilmq.push.network import networks
    from veilmq.push.requests import Signer
    from veilmq.push.room import PushRoom

    now = datetime.datetime.fromtimestamp(wall() / 1e6, datetime.UTC)
    signer = await loop.run_in_executor(None, Signer.of_directory, settings.data, now)
    if service.cluster is not None:
        await _share_key(service)
    base = (settings.external_url or service.listeners["mns"].urls[0]).rstrip("/")
    room = PushRoom(
        service.shell,
        subscriptions,
        signer,
        base + CERTIFICATE_PATH,
        allowed=networks(settings.push_allow),
        documented_case=settings.simulated.documented_case,
        wall=wall,
    )
    await room.start()
    room.endpoints.resume(_pauses(service))
    service.show_document(CERTIFICATE_PATH, signer.certificate)
    return room


async def _share_key(service: Service) -> None:
    """Endpoints shall see one certificate, whichever server pushes. A key of the cluster is in its file already."""
    for name in (KEY_FILE, CERTIFICATE_FILE):
        text = await asyncio.to_thread((service.settings.data / name).read_bytes)
        if service.shared.get(name) != text:
            await service.share(name, text, replaces=True)


def _pauses(service: Service) -> dict[str, float]:
    packed = service.shared.get(PAUSES)
    return {} if packed is None else msgspec.msgpack.decode(packed, type=dict[str, float])


async def _share_pauses(service: Service, room: "PushRoom") -> None:
    """Keep for the next owner which endpoints are called seldom, until cancelled."""
    kept = _pauses(service)
    while True:
        await asyncio.sleep(_SHARE_S)
        pauses = dict(sorted(room.endpoints.pauses().items())[:PAUSES_MAX])
        if pauses != kept:
            with suppress(VeilError):
                await service.share(PAUSES, msgspec.msgpack.encode(pauses), replaces=True)
                kept = pauses


class _Subscriptions:
    """The push subscriptions of all topics: the same object while none has changed, because there may be many and they
    are polled. A change gives its topic another dictionary (veilmq.store.reader)."""

    def __init__(self, topics: Mapping[TopicKey, LiveTopic]) -> None:
        self._topics = topics
        self._seen: dict[TopicKey, dict[str, LiveSubscription]] = {}
        self._found: dict[tuple[TopicKey, str], SubscriptionSettings] = {}

    def __call__(self) -> dict[tuple[TopicKey, str], SubscriptionSettings]:
        now = {key: topic.subscriptions for key, topic in self._topics.items()}
        seen = self._seen
        if len(now) != len(seen) or any(each is not seen.get(key) for key, each in now.items()):
            self._seen = now
            self._found = {
                (key, name): subscription.settings
                for key, subscriptions in now.items()
                for name, subscription in subscriptions.items()
                if subscription.settings.url is not None
            }
        return self._found
