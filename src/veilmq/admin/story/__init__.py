"""The story of one message: what happened to it in one sentence, from its trace.

Strategy: `life_of` gathers the events (life.py), a table of rules chooses the sentence (rules.py). The command line
and the API show the same one.
"""

from collections.abc import Sequence
from typing import Any

from veilmq.admin.story.life import life_of
from veilmq.admin.story.rules import told
from veilmq.model.events import EventRecord
from veilmq.model.instant import Instant


def shown_story(events: Sequence[EventRecord], now: Instant, *, is_complete: bool) -> dict[str, Any] | None:
    """{rule, sentence}; None if there is no event."""
    if not events:
        return None
    rule, sentence = told(life_of(events, now, is_complete=is_complete))
    return {"rule": rule, "sentence": sentence}
