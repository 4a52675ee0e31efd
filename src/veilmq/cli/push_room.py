"""The push room, opened when the first subscription wants it.

Strategy: most servers push nothing, and the room's libraries and key shall cost them nothing: a task looks for a push
subscription, and only then imports, makes or reads the key, lets the MNS port serve the certificate, and opens it.
Loading takes a quarter of a second of CPU, and so a thread, beside which the loop goes on. Open files or threads that
the machine has none of at that moment, it may have a moment later: so the room is opened again after a while.
"""

import asyncio
import datetime
import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from veilmq.model.topic import SubscriptionSettings, TopicKey
from veilmq.push.shortage import shortage_of
from veilmq.server.clock import wall
from veilmq.server.service import Service
from veilmq.server.settings import Settings
from veilmq.store.topics import LiveSubscription, LiveTopic

if TYPE_CHECKING:
    from veilmq.push.room import PushRoom

_LOOK_S: Final = 0.5
AGAIN_S: Final = 10.0
"""How long after the room could not be opened the next try is made."""

log = logging.getLogger("veilmq.push")


async def serve_pushes(service: Service, settings: Settings) -> None:
    """Push what there is to push, until cancelled."""
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
        await asyncio.get_running_loop().create_future()
    finally:
        service.push_room = None
        await room.stop(min(TIMEOUT_S, settings.shutdown_deadline_s))


async def _try_to_open(service: Service, settings: Settings, subscriptions: "_Subscriptions") -> "PushRoom | None":
    """The started room; None if what it needs cannot be had at present. Raises ValueError for a damaged key."""
    try:
        return await _open(service, settings, subscriptions)
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        if not isinstance(error, OSError) and shortage_of(error) is None:
            raise
        fault = f"at present: {error}"
        if service.push_fault != fault:
            service.push_fault = fault
            log.error("no pushes %s; tried again every %g s", fault, AGAIN_S)
        return None


async def _open(service: Service, settings: Settings, subscriptions: "_Subscriptions") -> "PushRoom":
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, importlib.import_module, "veilmq.push.room")
    from veilmq.push.addresses import networks
    from veilmq.push.room import PushRoom
    from veilmq.push.signing import CERTIFICATE_PATH, Signer

    now = datetime.datetime.fromtimestamp(wall() / 1e6, datetime.UTC)
    signer = await loop.run_in_executor(None, Signer.of_directory, settings.data, now)
    base = (settings.external_url or service.listeners["mns"].urls[0]).rstrip("/")
    room = PushRoom(
        service.shell,
        subscriptions,
        signer,
        base + CERTIFICATE_PATH,
        allowed=networks(settings.push_allow),
        documented_case=settings.push_header_case == "documented",
        wall=wall,
    )
    await room.start()
    service.show_document(CERTIFICATE_PATH, signer.certificate)
    return room


class _Subscriptions:
    """The push subscriptions of all topics: the same object as long as none has changed, since there may be very many,
    and they are looked at all the time. A change gives its topic another dictionary (veilmq.store.topics)."""

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
