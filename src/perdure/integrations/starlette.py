"""Runs over HTTP: an ASGI app that starts them, shows them, and sends them events.

app = Starlette(routes=[Mount("/runs", runs_app(runtime, auth=check_token))])

- `POST /{workflow}` starts a run with the JSON body as payload, once per `Idempotency-Key`.
- `GET /{run_id}` shows the run.
- `GET /{run_id}/stream` shows it after each change, as server-sent events.
- `POST /{run_id}/events/{name}` sends an event with the JSON body as payload.
- `POST /{run_id}/cancel` cancels the run.

Workers execute the runs. An id with slashes can be written as it is, percent-encoded, or as in the
header `Location`, which is the only way if it ends like one of these paths.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import msgspec

from perdure import errors
from perdure.clock import Clock
from perdure.engine.tasks import cancel_and_wait, detached
from perdure.integrations._messages import public_message
from perdure.integrations._responses import (
    EventReceipt,
    Problem,
    RunError,
    RunView,
    RunWait,
    encode,
    json_response,
    refusal,
    view_of,
)
from perdure.runtime import Client, Definition, Run, Runtime
from perdure.store import Delivery
from perdure.urls import decode_id, encode_id, quote_path, split_path
from perdure.validation import check_user_id

try:
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise errors.MissingDependency("starlette", "fastapi") from error

__all__ = [
    "Auth",
    "DedupId",
    "EventReceipt",
    "Problem",
    "RunError",
    "RunView",
    "RunWait",
    "allow_all",
    "runs_app",
]

logger = logging.getLogger(__name__)

Auth: TypeAlias = Callable[[Request], Awaitable[bool | Response]]
"""Returns whether a request is allowed, or the response that refuses it."""

DedupId: TypeAlias = Callable[[Any], str | None]
"""Returns the dedup id of an event, given its payload."""

Runs: TypeAlias = AsyncGenerator[Run, None]

HEARTBEAT = 15.0
"""The seconds without a change after which a comment is sent to keep a stream open."""

_DEDUP_HEADERS = ("webhook-id", "x-github-delivery", "idempotency-key")
_OVER = "over"


async def allow_all(request: Request) -> bool:
    """Allow everyone who can reach the app."""
    return True


async def closed(request: Request) -> Response:
    """Refuse every request: no `auth` was passed."""
    return refusal(403, "This app is closed: pass auth= to say who may use it.")


def runs_app(
    runtime: Client, *, auth: Auth | None = None, dedup_id: DedupId | None = None
) -> ASGIApp:
    """Return an ASGI app that starts and shows the runs of a runtime's workflows.

    `auth` is an async function that takes the request and returns whether it is allowed, or a
    response; without it, every request is refused. `dedup_id` is a function that returns the dedup
    id of an event, given its payload; without it, the id is taken from the headers `webhook-id`,
    `X-GitHub-Delivery` or `Idempotency-Key`.
    """
    if auth is not None and not callable(auth):
        raise errors.InvalidArgument("auth", auth, "an async function that takes the request")
    return _RunsApp(RunEndpoints(runtime, dedup_id), auth or closed)


class RunEndpoints:
    """The endpoints, for every framework that uses Starlette's requests."""

    def __init__(self, runtime: Client, dedup_id: DedupId | None = None) -> None:
        if not isinstance(runtime, Client):
            raise errors.InvalidArgument("runtime", runtime, "a Runtime or Client")
        if dedup_id is not None and not callable(dedup_id):
            raise errors.InvalidArgument("dedup_id", dedup_id, "a function of an event's payload")
        self._runtime = runtime
        self._dedup_id = dedup_id
        # Workers execute the runs: a request must not last as long as a run.
        self._wait: dict[str, Any] = {"wait": False} if isinstance(runtime, Runtime) else {}

    async def start_named(self, request: Request, segment: str) -> Response:
        """Start a run of the workflow that a path names."""

        async def start() -> Response:
            definition = self._runtime.registry.find(_decode(segment))
            if definition is None:
                return refusal(404, f"There is no workflow {_decode(segment)!r}.")
            return await self._start(request, definition, await _read(request), segment)

        return await _answer(start)

    async def start(
        self, request: Request, definition: Definition[Any, Any], payload: Any, segment: str
    ) -> Response:
        """Start a run with a payload that the framework parsed; `segment` names the workflow."""
        return await _answer(lambda: self._start(request, definition, payload, segment))

    async def _start(
        self, request: Request, definition: Definition[Any, Any], payload: Any, segment: str
    ) -> Response:
        key = request.headers.get("idempotency-key")
        if key == "":
            raise errors.InvalidArgument("Idempotency-Key", key, "a non-empty string")
        run_id = None if key is None else f"{definition.name}:{key}"
        run = await self._runtime.trigger(definition, payload, run_id=run_id, **self._wait)
        base = "".join(split_path(request.scope)).removesuffix(f"/{segment}")
        location = f"{quote_path(base)}/{encode_id(run.id)}"
        return json_response(view_of(run), 202, {"Location": location})

    async def show(self, request: Request, segment: str) -> Response:
        """Show a run."""

        async def show() -> Response:
            run_id = _run_id(segment)
            run = await self._runtime.get_run(run_id)
            if run is None:
                raise errors.RunNotFound(run_id)
            return json_response(view_of(run))

        return await _answer(show)

    async def stream(self, request: Request, segment: str) -> Response:
        """Show a run after each change, until it is over."""

        async def stream() -> Response:
            if request.headers.get("last-event-id") == _OVER:
                # A browser that has seen the end reconnects; this response makes it stop.
                return Response(status_code=204)
            runs = self._runtime.watch(_run_id(segment))
            # Read the first state now, so that a missing run is a 404 instead of a stream.
            events = _events(runs, await anext(runs), self._runtime.clock)
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(events, 200, headers, "text/event-stream")

        return await _answer(stream)

    async def send_event(self, request: Request, segment: str, name: str) -> Response:
        """Send an event to a run."""

        async def send() -> Response:
            run_id, event = _run_id(segment), _decode(name)
            payload = await _read(request)
            dedup_id = self._dedup_id_of(request, payload)
            result = await self._runtime.signal(
                run_id, event, payload, dedup_id=dedup_id, **self._wait
            )
            return _receipt(run_id, result.delivery)

        return await _answer(send)

    def _dedup_id_of(self, request: Request, payload: Any) -> str | None:
        if self._dedup_id is not None:
            return self._dedup_id(payload)
        values = (request.headers.get(name) for name in _DEDUP_HEADERS)
        return next(filter(None, values), None)

    async def cancel(self, request: Request, segment: str) -> Response:
        """Cancel a run; 202 means that the process that executes it was asked to stop."""

        async def cancel() -> Response:
            body = await _read(request)
            reason = body.get("reason", "") if isinstance(body, dict) else ""
            run = await self._runtime.cancel(_run_id(segment), reason=reason)
            return json_response(view_of(run), 200 if run.over else 202)

        return await _answer(cancel)


def _receipt(run_id: str, delivery: Delivery) -> Response:
    """Return the response to an event."""
    if delivery is Delivery.UNKNOWN:
        raise errors.RunNotFound(run_id)
    if delivery is Delivery.OVER:
        return refusal(409, f"Run {run_id!r} has ended and receives no more events.")
    return json_response(EventReceipt(delivery.value), 202)


class _RunsApp:
    """The routes, without a router: ids may contain slashes."""

    def __init__(self, endpoints: RunEndpoints, auth: Auth) -> None:
        self._endpoints = endpoints
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Other kinds of connections are not accepted."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            request = Request(scope, receive)
            response = await self._respond(request)
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _respond(self, request: Request) -> Response:
        answer = await self._auth(request)
        if isinstance(answer, Response):
            return answer
        # Only `True` itself: a hook that returns `None` by mistake must not allow the request.
        if answer is not True:
            return refusal(403, "You may not use this app.")
        _, path = split_path(request.scope)
        if path == "/":
            return refusal(404, "Name a workflow or a run.")
        return await self._route(request, path[1:])

    async def _route(self, request: Request, path: str) -> Response:
        endpoints, (id, _, last) = self._endpoints, path.rpartition("/")
        run, events, name = path.rpartition("/events/")
        if request.method in ("GET", "HEAD"):
            if id and last == "stream":
                return await endpoints.stream(request, id)
            return await endpoints.show(request, path)
        if request.method != "POST":
            headers = {"Allow": "GET, HEAD, POST"}
            return refusal(405, f"{request.method} is not possible here.", headers=headers)
        if run and events and "/" not in name:
            return await endpoints.send_event(request, run, name)
        if id and last == "cancel":
            return await endpoints.cancel(request, id)
        return await endpoints.start_named(request, path)


_STATUSES: tuple[tuple[type[errors.PerdureError], int], ...] = (
    (errors.RunNotFound, 404),
    (errors.UnknownWorkflow, 404),
    (errors.RunConflict, 409),
    (errors.AlreadyRunning, 409),
    (errors.ValueTooLarge, 413),
    (errors.InvalidPayload, 422),
    (errors.InvalidArgument, 422),
)


class _Unreadable(Exception):
    """The body of a request is not JSON."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


async def _answer(call: Callable[[], Awaitable[Response]]) -> Response:
    """Return the response of a call, or a refusal if it fails because of the request."""
    try:
        return await call()
    except _Unreadable as error:
        return refusal(error.status, str(error))
    except errors.StoreUnavailable as error:
        logger.warning("a request was refused: %s", error)
        return refusal(503, public_message(error), headers={"Retry-After": "5"})
    except errors.PerdureError as error:
        for kind, status in _STATUSES:
            if isinstance(error, kind):
                return refusal(status, public_message(error), getattr(error, "errors", ()))
        raise


async def _read(request: Request) -> Any:
    """Return the JSON body of a request, or `None` if it is empty."""
    body = await request.body()
    if not body:
        return None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can post text without a preflight request, but not JSON.
    if kind != "application/json" and not kind.endswith("+json"):
        raise _Unreadable(415, "The body must be JSON, with Content-Type: application/json.")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _Unreadable(400, f"The body is not JSON: {error}.") from error


def _decode(segment: str) -> str:
    """Return the id or name in a path, which may be encoded by `encode_id`."""
    return (decode_id(segment) or segment) if segment.startswith("~") else segment


def _run_id(segment: str) -> str:
    run_id = _decode(segment)
    try:
        return check_user_id(run_id, "run_id")
    except errors.InvalidArgument:
        # No run can have this id.
        raise errors.RunNotFound(run_id) from None


async def _events(runs: Runs, first: Run, clock: Clock) -> AsyncGenerator[bytes, None]:
    """Yield each state of a run as an event, and comments in between."""
    run: Run | None = first
    async with _closing(runs, first.id):
        while run is not None:
            yield _event(run)
            following = detached(_next(runs))
            try:
                while not await _is_done(following, clock):
                    yield b":\n\n"
                run = following.result()
            finally:
                await cancel_and_wait([following])


@asynccontextmanager
async def _closing(runs: Runs, run_id: str) -> AsyncGenerator[None, None]:
    """Stop watching a run at the end of its stream."""
    try:
        yield
    except errors.PerdureError as error:
        # The response has begun, so the stream ends, and a browser will reconnect.
        logger.warning("the stream of run %r ended: %s", run_id, error)
    finally:
        await runs.aclose()


def _event(run: Run) -> bytes:
    id = f"id: {_OVER}\n".encode() if run.over else b""
    return b"event: run\n" + id + b"data: " + encode(view_of(run)) + b"\n\n"


async def _is_done(task: "asyncio.Task[Any]", clock: Clock) -> bool:
    """Wait for a task until a heartbeat is due."""
    beat = detached(clock.sleep(HEARTBEAT))
    try:
        await asyncio.wait((task, beat), return_when=asyncio.FIRST_COMPLETED)
    finally:
        beat.cancel()
    return task.done()


async def _next(runs: Runs) -> Run | None:
    return await anext(runs, None)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Handle the lifespan protocol, for a server that runs the app on its own."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
