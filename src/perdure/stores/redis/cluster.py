"""How commands reach a Redis Cluster: each to the node that has its key."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from perdure.stores.redis.errors import NotSent, driver_errors, is_away, load_exceptions
from perdure.stores.redis.keys import slot_of
from perdure.stores.redis.node import Command, NodeLink

Address: TypeAlias = tuple[str, int]

_MAX_REDIRECTIONS = 5


class _Stretch(NamedTuple):
    """Slots that follow each other, and the primary that has them."""

    first: int
    last: int
    primary: Address


class ClusterLink:
    """The nodes of a cluster, and which of them has which keys.

    The driver's client for clusters is not used. It sends a command again whose answer was lost,
    and when a node is lost it closes connections under those who use them, and forgets others.
    """

    is_split = True

    def __init__(
        self, make_node: Callable[[Address], NodeLink], seeds: Sequence[Address], *, where: str
    ) -> None:
        self.where = where
        self._make_node = make_node
        self._seeds = seeds
        self._nodes: dict[Address, NodeLink] = {}
        self._map: Sequence[_Stretch] = ()
        self._errors = driver_errors()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send to each node its commands together, and give the reply to each."""
        if not self._map:
            await self._explore()
        routes = [self._primary(command) for command in commands]
        replies = await self._send_by(routes, commands)
        for _ in range(_MAX_REDIRECTIONS):
            astray = [n for n, reply in enumerate(replies) if _is_redirection(reply)]
            if not astray:
                break
            again = [commands[n] for n in astray]
            late = await self._follow([replies[n] for n in astray], again)
            for n, reply in zip(astray, late, strict=True):
                replies[n] = reply
        if any(isinstance(reply, Exception) and is_away(reply) for reply in replies):
            self._map = ()
        return replies

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Give the reply of each primary."""
        return [reply for node in await self._primaries() for reply in await node.send([command])]

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Give the keys of all primaries that match; a key may come twice."""
        for node in await self._primaries():
            async for key in node.scan(pattern):
                yield key

    @asynccontextmanager
    async def subscriber(self) -> AsyncGenerator[Any]:
        """Give a subscriber at one node: what is published at another comes there too."""
        node = (await self._primaries())[0]
        try:
            async with node.subscriber() as subscriber:
                yield subscriber
        except self._errors:
            self._map = ()
            raise

    async def close(self) -> None:
        """Close the connections to all nodes."""
        for node in self._nodes.values():
            await node.close()

    def _node(self, address: Address) -> NodeLink:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(address)
        return node

    def _primary(self, command: Command) -> Address:
        slot = slot_of(_key_of(command))
        place = bisect_right(self._map, slot, key=lambda stretch: stretch.first) - 1
        if place < 0 or self._map[place].last < slot:
            self._map = ()
            raise NotSent(f"no node has the slot {slot}")
        return self._map[place].primary

    async def _primaries(self) -> Sequence[NodeLink]:
        if not self._map:
            await self._explore()
        return [self._node(address) for address in dict.fromkeys(s.primary for s in self._map)]

    async def _send_by(self, routes: Sequence[Address], commands: Sequence[Command]) -> list[Any]:
        groups: dict[Address, list[int]] = {}
        for n, address in enumerate(routes):
            groups.setdefault(address, []).append(n)
        works = [
            self._node(address).send([commands[n] for n in group])
            for address, group in groups.items()
        ]
        replies: list[Any] = [None] * len(commands)
        for group, part in zip(groups.values(), await self._together(works), strict=True):
            for n, reply in zip(group, part, strict=True):
                replies[n] = reply
        return replies

    async def _together(self, works: Sequence[Any]) -> Sequence[list[Any]]:
        try:
            if len(works) == 1:
                return [await works[0]]
            parts = await asyncio.gather(*works, return_exceptions=True)
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
            return [part for part in parts if not isinstance(part, BaseException)]
        except self._errors:
            # The node may have been replaced: its slots are looked for anew.
            self._map = ()
            raise

    async def _follow(self, redirections: Sequence[Any], commands: Sequence[Command]) -> list[Any]:
        """Send commands to where the nodes say that their keys are, or are going to be."""
        routes = [(str(error.host), int(error.port)) for error in redirections]
        if all(isinstance(error, load_exceptions().MovedError) for error in redirections):
            self._map = ()
            return await self._send_by(routes, commands)
        replies = []
        for address, command in zip(routes, commands, strict=True):
            _, reply = await self._node(address).send([("ASKING",), command])
            replies.append(reply)
        return replies

    async def _explore(self) -> None:
        """Ask the nodes, one after the other, which of them has which slots."""
        failure: Exception = NotSent("no node is known")
        for address in dict.fromkeys([*self._nodes, *self._seeds]):
            try:
                [reply] = await self._node(address).send([("CLUSTER", "SLOTS")])
            except self._errors as error:
                failure = error
                continue
            if isinstance(reply, Exception):
                raise reply
            self._map = sorted(_stretch(line, address) for line in reply)
            return
        raise failure


def _stretch(line: Sequence[Any], asked: Address) -> _Stretch:
    first, last, (host, port, *_) = line[:3]
    # A node that does not know its own name means the one that it was asked by.
    name = host.decode() if host else ""
    return _Stretch(int(first), int(last), (name if name not in ("", "?") else asked[0], int(port)))


def _key_of(command: Command) -> bytes:
    is_script = command[0] in ("EVALSHA", "EVAL")
    key = command[3 if is_script else 1]
    return key if isinstance(key, bytes) else str(key).encode()


def _is_redirection(reply: Any) -> bool:
    return isinstance(reply, load_exceptions().AskError)
