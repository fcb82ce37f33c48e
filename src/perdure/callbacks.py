"""Answers over HTTP: a small ASGI app that any web app can mount.

runtime = Runtime(store, workflows=[order], callback_url="https://shop.example/callbacks/")
app.mount("/callbacks", CallbackApp(Client(store)))

`POST /<token>` answers the wait that the token belongs to, `GET /<token>` shows what is asked. The
token is all that an answer needs, so treat it like a password.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from perdure.clock import isoformat
from perdure.errors import (
    AlreadyAnswered,
    InvalidArgument,
    InvalidToken,
    RunNotFound,
    StoreUnavailable,
    TooLate,
    ValueTooLarge,
)
from perdure.runtime.answers import OpenApproval
from perdure.runtime.client import Client
from perdure.validation import check_int

__all__ = ["CallbackApp"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 1024 * 1024


class _Reply(NamedTuple):
    """A status and the JSON that explains it."""

    status: int
    body: Mapping[str, Any]
    allow: str = ""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an answer to an approval."""

    approved: bool
    choice: str | None = None
    value: Any = None
    by: str = ""
    note: str = ""


class CallbackApp:
    """An ASGI app that receives the answers to approvals and callbacks.

    The body of `POST /<token>` is JSON of at most `max_body` bytes: for a callback anything, for an
    approval an object `{"approved": true, "choice": …, "value": …, "by": …, "note": …}`, of which
    only `approved` is needed. The status is 200 if the answer counts, 400 if it is malformed, 404
    if the path is not a token, 409 if the question was already answered, 410 if it is no longer
    open, 413 if the answer is too large and 503 while the store is unavailable. The body says why.
    """

    def __init__(self, client: Client, *, max_body: int = MAX_BODY) -> None:
        if not isinstance(client, Client):
            raise InvalidArgument("client", client, "a perdure.Client or Runtime")
        self._client = client
        self._max_body = check_int(max_body, "max_body")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; other kinds of connections are not accepted."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _respond(send, await self._reply(scope, receive), scope["method"])
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _reply(self, scope: Scope, receive: Receive) -> _Reply:
        method, token = scope["method"], _token_in(scope)
        if method not in ("GET", "HEAD", "POST"):
            return _Reply(405, {"error": "use GET or POST"}, "GET, HEAD, POST")
        try:
            if method != "POST":
                return _Reply(200, _describe(await self._client.find_approval(token)))
            body = await _read_body(receive, self._max_body)
            if body is None:
                return _Reply(413, {"error": f"the answer has more than {self._max_body:,} bytes"})
            return await self._answer(token, body)
        except InvalidToken:
            return _Reply(404, {"error": "the path does not end in a token"})
        except (RunNotFound, TooLate):
            # The same reply for both, so that a stranger who guesses tokens learns nothing about
            # runs.
            return _Reply(410, {"error": "the question is no longer open"})
        except AlreadyAnswered as error:
            return _Reply(409, {"error": "the question was already answered", **_facts(error)})
        except ValueTooLarge as error:
            return _Reply(413, {"error": str(error)})
        except (InvalidArgument, ValueError, RecursionError, msgspec.ValidationError) as error:
            return _Reply(400, {"error": str(error)})
        except StoreUnavailable:
            return _Reply(503, {"error": "the store is unavailable; try again later"})

    async def _answer(self, token: str, data: bytes) -> _Reply:
        payload = json.loads(data, parse_constant=_refuse) if data.strip() else None
        approval = await self._client.find_approval(token)
        if not approval.question:
            await self._client.answer(token, payload)
            return _Reply(200, {"answered": True})
        body = msgspec.convert(payload, Body)
        by, note, choice, value = body.by, body.note, body.choice, body.value
        if body.approved:
            await self._client.approve(token, by=by, note=note, choice=choice, value=value)
        elif choice is None and value is None:
            await self._client.reject(token, by=by, note=note)
        else:
            return _Reply(400, {"error": "a rejection has neither a choice nor a value"})
        return _Reply(200, {"answered": True})


def _token_in(scope: Scope) -> str:
    """Return the path below the app's mount point."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "")
    # Servers differ in whether the path includes the mount point.
    return path.removeprefix(root).strip("/") if root else path.strip("/").rpartition("/")[2]


def _describe(approval: OpenApproval) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": "approval" if approval.question else "callback"}
    if approval.question:
        facts |= {
            "question": approval.question,
            "to": approval.to,
            "options": list(approval.options),
        }
        facts["data"] = approval.data
    if approval.expires_at is not None:
        facts["expires_at"] = isoformat(approval.expires_at)
    return facts


def _facts(error: AlreadyAnswered) -> dict[str, Any]:
    at = {} if error.at is None else {"at": isoformat(error.at)}
    return {"by": error.by, **at}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body of a request, or `None` if it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the request was not complete")
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def _respond(send: Send, reply: _Reply, method: str) -> None:
    body = json.dumps(reply.body, ensure_ascii=False).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if reply.allow:
        headers.append((b"allow", reply.allow.encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})


async def _live(receive: Receive, send: Send) -> None:
    """Handle the lifespan protocol, for a server that runs the app on its own."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
