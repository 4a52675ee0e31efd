"""Names and tags that a protocol's own topics allow: those of MNS, which the embedded adapter keeps to, too."""

import re
from collections.abc import Collection
from typing import Final

from veilmq.client.native_topics import NativeSubscription

TAG_CHARACTERS_MAX: Final = 16
SUBSCRIPTIONS_MAX: Final = 100
"""Of a topic."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*\Z")
_TOPIC_CHARACTERS_MAX: Final = 120
_SUBSCRIPTION_CHARACTERS_MAX: Final = 255


def are_names(topic: str, subscriptions: Collection[NativeSubscription]) -> bool:
    """Whether they are allowed."""
    return (
        _is_name(topic, _TOPIC_CHARACTERS_MAX)
        and len(subscriptions) <= SUBSCRIPTIONS_MAX
        and all(_is_name(each.name, _SUBSCRIPTION_CHARACTERS_MAX) for each in subscriptions)
        and all(each.tag is None or len(each.tag) <= TAG_CHARACTERS_MAX for each in subscriptions)
    )


def _is_name(name: str, characters_max: int) -> bool:
    return len(name) <= characters_max and _NAME.match(name) is not None
