"""What the admin port answers: all of it while this server owns the queues, and health alone while it follows."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from veilmq.admin.metrics import of_a_follower
from veilmq.cli.serve import AdminEntry
from veilmq.server.service import Service
from veilmq.store import Store


def by_role(service: Service, entry: AdminEntry, build: Callable[[str], ASGIApp]) -> ASGIApp:
    """The application that fits. build: makes the one over the service's store, which each time as the owner has
    another, with the bearer token."""
    following = _following(service)
    built: tuple[Store, str, ASGIApp] | None = None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal built
        if not service.leads:
            await following(scope, receive, send)
            return
        if built is None or built[0] is not service.store or built[1] != entry.bearer:
            built = service.store, entry.bearer, build(entry.bearer)
        await built[2](scope, receive, send)

    return app


def _following(service: Service) -> Starlette:
    async def live(request: Request) -> Response:
        """200 while the loop runs."""
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        """200 if calls reach the owner."""
        state = service.following()
        return JSONResponse(
            {"ready": state.ready, "reasons": {} if state.ready else {"cluster": state.trouble}, "warnings": {}},
            200 if state.ready else 503,
        )

    async def metrics(request: Request) -> Response:
        """Of its ports, and of its part in the cluster."""
        return await of_a_follower(service)

    async def elsewhere(request: Request, error: Any) -> Response:
        """Everything else is the owner's."""
        owner = service.following().owner
        text = f"server {owner} owns the queues: ask its admin port" if owner else "nobody owns the queues at present"
        return JSONResponse({"error": "NotOwner", "message": text}, 503)

    return Starlette(
        routes=[
            Route("/health/live", live, methods=["GET"]),
            Route("/health/ready", ready, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        exception_handlers={404: elsewhere, 405: elsewhere},
    )
