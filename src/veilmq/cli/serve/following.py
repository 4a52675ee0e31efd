"""What the admin port answers: while this server owns the queues, everything. While it follows, health and metrics are
its own, and the rest is passed on to the owner."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from veilmq.admin.app import of_one_copy
from veilmq.admin.metrics import of_a_follower
from veilmq.cli.serve import AdminEntry
from veilmq.server.cluster.admin import PASSED_ON, passing_on
from veilmq.server.service import Service
from veilmq.store import Store


def by_role(service: Service, entry: AdminEntry, build: Callable[[str], ASGIApp]) -> ASGIApp:
    """The application that fits. build: makes the one over the service's store, which each time as the owner has
    another, with the bearer token."""
    built: tuple[Store, str, ASGIApp] | None = None

    def here() -> ASGIApp | None:
        """None: another server owns the queues."""
        nonlocal built
        if not service.leads:
            return None
        if built is None or built[0] is not service.store or built[1] != entry.bearer:
            built = service.store, entry.bearer, build(entry.bearer)
        return built[2]

    elsewhere = None if service.cluster is None else _elsewhere(service, here)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found = here() or elsewhere
        assert found is not None
        await found(scope, receive, send)

    return app


def _elsewhere(service: Service, here: Callable[[], ASGIApp | None]) -> ASGIApp:
    async def live(request: Request) -> Response:
        """200 while the loop runs."""
        return JSONResponse({"live": True})

    async def ready(request: Request) -> Response:
        """200 if calls reach the owner."""
        state = service.following()
        return JSONResponse(
            {
                "ready": state.ready,
                "reasons": {} if state.ready else {"cluster": state.trouble},
                "warnings": of_one_copy(service.settings),
            },
            200 if state.ready else 503,
        )

    async def metrics(request: Request) -> Response:
        """Of its ports, and of its part in the cluster."""
        return await of_a_follower(service)

    assert service.cluster is not None
    passed_on = passing_on(service.cluster.reach_admin, here)
    own = Starlette(
        routes=[
            Route("/health/live", live, methods=["GET"]),
            Route("/health/ready", ready, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ]
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if PASSED_ON in scope:  # and it finds this server to be the owner no more
            text = f"server {service.following().owner or 'nobody'} owns the queues now: try again"
            answer = JSONResponse({"error": "NotOwner", "field": None, "message": text, "data": {}}, 503)
            await answer(scope, receive, send)
        elif scope["path"] in {"/health/live", "/health/ready", "/metrics"}:
            await own(scope, receive, send)
        else:
            await passed_on(scope, receive, send)

    return app
