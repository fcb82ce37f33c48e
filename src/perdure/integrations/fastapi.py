"""FastAPI: a runtime in the app's lifespan, as a dependency, and as a router.

durable = Durable(Runtime("postgresql://…", workflows=[welcome]), worker=True)
app = FastAPI(lifespan=durable.lifespan)
app.include_router(durable.router(prefix="/runs", dependencies=[Depends(auth)]))
"""

import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from perdure.errors import InvalidArgument, MissingDependency
from perdure.integrations._responses import EventReceipt, Problem, RunView
from perdure.integrations.starlette import DedupId, RunEndpoints
from perdure.runtime import Definition, Runtime
from perdure.urls import encode_id
from perdure.validation import check_flag
from perdure.worker import Worker

try:
    from fastapi import APIRouter, Body, Depends, HTTPException, params
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError
    from starlette.requests import Request
    from starlette.responses import Response
except ModuleNotFoundError as error:
    raise MissingDependency("fastapi", "fastapi") from error


__all__ = ["Durable", "allow_all"]

logger = logging.getLogger(__name__)


async def closed() -> None:
    """Refuse every request: no dependency was passed."""
    raise HTTPException(403, "This router is closed: pass dependencies= to say who may use it.")


async def allow_all() -> None:
    """A dependency that allows everyone who can reach the app."""


class Durable:
    """A runtime in an app: its lifespan, its dependency and its router.

    With `worker=True`, or a `Worker` of this runtime, the app executes runs while it is up. A
    larger app leaves that to separate processes, started with `perdure worker`.

        @app.post("/orders")
        async def order(runtime: Annotated[Runtime, Depends(durable)]) -> str:
            return (await runtime.trigger(ship, wait=False)).id
    """

    def __init__(self, runtime: Runtime, *, worker: bool | Worker = False) -> None:
        if not isinstance(runtime, Runtime):
            raise InvalidArgument("runtime", runtime, "a Runtime")
        if isinstance(worker, Worker) and worker.runtime is not runtime:
            raise InvalidArgument("worker", worker, "True, or a Worker of the same runtime")
        self.runtime = runtime
        self._worker = worker
        self._expects_lifespan = bool(worker)
        if not isinstance(worker, Worker):
            self._worker = Worker(runtime) if check_flag(worker, "worker") else False

    async def __call__(self) -> Runtime:
        """Return the runtime, as a dependency."""
        if self._expects_lifespan:
            self._expects_lifespan = False
            logger.warning(
                "the worker of Durable does not run, so runs stay queued: its lifespan was not "
                "entered; pass lifespan=durable.lifespan to FastAPI"
            )
        return self.runtime

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[None, None]:
        """Enter the runtime's dependencies and start the worker; drain and close at the end."""
        self._expects_lifespan = False
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.runtime)
            if isinstance(self._worker, Worker):
                await stack.enter_async_context(self._worker)
            yield

    def router(
        self,
        *,
        prefix: str = "",
        dependencies: Sequence[params.Depends] = (),
        tags: Sequence[str] = ("runs",),
        dedup_id: DedupId | None = None,
    ) -> APIRouter:
        """Return the routes of `perdure.integrations.starlette`, with the types of payloads.

        Without `dependencies`, which decide who may use the routes, every request is refused.
        Workflows that are registered later can also be started, but are not in the OpenAPI schema.
        """
        router = APIRouter(
            prefix=prefix,
            tags=[*tags],
            # `self` logs a forgotten lifespan, and is last: a refused request starts no run.
            dependencies=[*(dependencies or [Depends(closed)]), Depends(self)],
            responses={status: {"model": Problem} for status in (403, 503)},
        )
        endpoints = RunEndpoints(self.runtime, dedup_id)
        _add_run_routes(router, endpoints)
        for name in self.runtime.registry.names:
            _add_start(router, endpoints, self.runtime.registry.newest(name))
        _add_start_of_others(router, endpoints)
        return router


def _add_run_routes(router: APIRouter, endpoints: RunEndpoints) -> None:
    """Add the routes for runs of any workflow."""

    async def send_event(request: Request, run_id: str, name: str) -> Response:
        return await endpoints.send_event(request, run_id, name)

    async def cancel(request: Request, run_id: str) -> Response:
        return await endpoints.cancel(request, run_id)

    async def stream(request: Request, run_id: str) -> Response:
        return await endpoints.stream(request, run_id)

    async def show(request: Request, run_id: str) -> Response:
        return await endpoints.show(request, run_id)

    def add(path: str, endpoint: Callable[..., Any], method: str, **options: Any) -> None:
        path = f"/{{run_id:path}}{path}"
        name = endpoint.__name__
        options["responses"] = {404: {"model": Problem}, **options.get("responses", {})}
        summary = name.replace("_", " ").capitalize()
        router.add_api_route(path, endpoint, methods=[method], summary=summary, **options)

    add(
        "/events/{name}",
        send_event,
        "POST",
        status_code=202,
        response_model=EventReceipt,
        responses={409: {"model": Problem}},
        openapi_extra=_ANY_BODY,
    )
    add("/cancel", cancel, "POST", response_model=RunView, openapi_extra=_CANCEL_BODY)
    events = {"description": "Server-sent events", "content": {"text/event-stream": {}}}
    add("/stream", stream, "GET", response_class=Response, responses={200: events})
    add("", show, "GET", response_model=RunView)


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


_ANY_BODY = _body({})
_CANCEL_BODY = _body({"type": "object", "properties": {"reason": {"type": "string"}}})


def _add_start(
    router: APIRouter, endpoints: RunEndpoints, definition: Definition[Any, Any]
) -> None:
    """Add the route that starts a workflow, with the type of its payload."""
    segment = encode_id(definition.name)

    async def start(request: Request, payload: Any = None) -> Response:
        return await endpoints.start(request, definition, payload, segment)

    # FastAPI reads the signature; the type is known only at run time.
    start.__signature__ = _signature(definition)  # type: ignore[attr-defined]
    summary, _, description = (inspect.getdoc(definition.fn) or "").partition("\n")
    router.add_api_route(
        f"/{segment}",
        start,
        methods=["POST"],
        status_code=202,
        response_model=RunView,
        responses={status: {"model": Problem} for status in (409, 413)},
        summary=summary or f"Start {definition.name}",
        description=description.strip(),
        name=f"start_{definition.name}",
    )


def _add_start_of_others(router: APIRouter, endpoints: RunEndpoints) -> None:
    """Add the route for workflows without their own route; it comes after all others."""

    async def start(request: Request, workflow: str) -> Response:
        return await endpoints.start_named(request, workflow)

    router.add_api_route("/{workflow:path}", start, methods=["POST"], include_in_schema=False)


def _signature(definition: Definition[Any, Any]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("request", kind, annotation=Request)]
    if definition.takes_payload:
        expected: Any = definition.payload_type if _is_known(definition.payload_type) else Any
        body: Any = Body()
        if definition.has_default:
            expected, body = expected | None, Body(None)
        parameters.append(inspect.Parameter("payload", kind, default=body, annotation=expected))
    return inspect.Signature(parameters)


def _is_known(payload_type: Any) -> bool:
    """Return whether pydantic can check values of a type, and describe it."""
    try:
        TypeAdapter(payload_type).json_schema()
    except PydanticUserError:
        return False
    return payload_type is not None
