"""Routes of topics and subscriptions: show them, and delete topics.

Strategy: topics are few and in memory, so a page is a walk over them. The waiting pushes of a subscription are counted
in its hidden queue, whose name no other route accepts, and the push room knows the health of its endpoint.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.answers import answer, caller_of, carry_out, listing_of
from veilmq.admin.api import inputs, operator
from veilmq.admin.api.views import shown_topic
from veilmq.admin.history import topics_of
from veilmq.admin.service import Service
from veilmq.model.commands import DeleteTopic
from veilmq.model.errors import TopicMissing, VeilError
from veilmq.model.settings.access import Action
from veilmq.model.settings.topic import TopicKey

_TOPIC: Final = "/api/v1/topics/{account}/{region}/{name}"


class Topics:
    """The routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/topics", self.listed, methods=["GET"]),
            Route(_TOPIC, self.described, methods=["GET"]),
            Route(_TOPIC, self.delete, methods=["DELETE"]),
        ]

    async def listed(self, request: Request) -> Response:
        """A page of topics by name, each with its subscriptions; account `*` means all."""
        wanted, account, region = listing_of(request, self._service.keyring, Action.DESCRIBE_TOPICS, inputs.ListInput)
        reader = self._service.reader
        after = _after(wanted.after, account, region)
        caller = caller_of(request)
        found = [
            key
            for key in topics_of(reader, account, region, wanted.prefix)
            if str(key) > after and caller.may(Action.DESCRIBE_TOPICS, key.account, key.name)
        ]
        page, more = found[: wanted.limit], len(found) > wanted.limit
        shown = [shown_topic(reader, reader.topics[key], self._service.push_room) for key in page]
        last = None if not more else str(page[-1]) if account == "*" else page[-1].name
        return answer({"topics": shown, "more": more, "after": last})

    async def described(self, request: Request) -> Response:
        """One topic."""
        key = self._key(request, Action.DESCRIBE_TOPICS)
        topic = self._service.reader.topics.get(key)
        if topic is None:
            raise TopicMissing(topic=str(key))
        return answer(shown_topic(self._service.reader, topic, self._service.push_room))

    async def delete(self, request: Request) -> Response:
        """Delete one topic, its subscriptions and its waiting pushes."""
        key = self._key(request, Action.MANAGE_TOPICS)
        command = DeleteTopic(topic=key, origin=caller_of(request).origin)
        asked = operator.Asked("remove_topic", str(key), inputs.Nothing())
        (outcome,), headers = await carry_out(request, self._service.shell, asked, [command])
        if isinstance(outcome, VeilError):
            raise outcome
        return answer({}, headers=headers)

    def _key(self, request: Request, action: Action) -> TopicKey:
        """The topic that the path names, if the caller may do the action."""
        parts = request.path_params
        key = inputs.queue_key(parts["account"], parts["region"], parts["name"])
        caller_of(request).check(action, key.account, key.name)
        return TopicKey(key.account, key.region, key.name)


def _after(after: str, account: str, region: str | None) -> str:
    return after if account == "*" or not after else f"{account}/{region}/{after}"
