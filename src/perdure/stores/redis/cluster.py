"""Connections to a Redis Cluster; each command goes to the node that has its key."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from perdure.stores.redis.errors import NotSent, driver_errors, is_unavailable, load_exceptions
from perdure.stores.redis.keys import slot_of
from perdure.stores.redis.node import Command, NodeLink

Address: TypeAlias = tuple[str, int]

_MAX_REDIRECTIONS = 5


class _SlotRange(NamedTuple):
    """Consecutive slots, and the primary that has them."""

    first: int
    last: int
    primary: Address


class ClusterLink:
    """The nodes of a cluster, and which of them has which keys.

    The driver's cluster client is not used: it repeats a command whose reply was lost and, when a
    node fails, closes connections that are in use and leaks others.
    """

    is_sharded = True

    def __init__(
        self, make_node: Callable[[Address], NodeLink], seeds: Sequence[Address], *, location: str
    ) -> None:
        self.location = location
        self._make_node = make_node
        self._seeds = seeds
        self._nodes: dict[Address, NodeLink] = {}
        self._slots: Sequence[_SlotRange] = ()
        self._errors = driver_errors()

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands of each node together, and return the reply to each."""
        if not self._slots:
            await self._discover()
        routes = [self._primary(command) for command in commands]
        replies = await self._send_by(routes, commands)
        for _ in range(_MAX_REDIRECTIONS):
            indexes = [n for n, reply in enumerate(replies) if _is_redirection(reply)]
            if not indexes:
                break
            new_commands = [commands[n] for n in indexes]
            new_replies = await self._follow([replies[n] for n in indexes], new_commands)
            for n, reply in zip(indexes, new_replies, strict=True):
                replies[n] = reply
        if any(isinstance(reply, Exception) and is_unavailable(reply) for reply in replies):
            self._slots = ()
        return replies

    async def send_everywhere(self, command: Command) -> list[Any]:
        """Return the reply of each primary."""
        return [reply for node in await self._primaries() for reply in await node.send([command])]

    async def scan(self, pattern: str) -> AsyncIterator[bytes]:
        """Yield the keys of all primaries that match, some of them more than once."""
        for node in await self._primaries():
            async for key in node.scan(pattern):
                yield key

    @asynccontextmanager
    async def subscriber(self) -> AsyncGenerator[Any]:
        """Provide a subscriber at one node, which also receives what is published at others."""
        node = (await self._primaries())[0]
        try:
            async with node.subscriber() as subscriber:
                yield subscriber
        except self._errors:
            self._slots = ()
            raise

    def forget_loop(self) -> None:
        """Drop the connections, which belong to an event loop that has ended."""
        for node in self._nodes.values():
            node.forget_loop()

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
        index = bisect_right(self._slots, slot, key=lambda slots: slots.first) - 1
        if index < 0 or self._slots[index].last < slot:
            self._slots = ()
            raise NotSent(f"no node has the slot {slot}")
        return self._slots[index].primary

    async def _primaries(self) -> Sequence[NodeLink]:
        if not self._slots:
            await self._discover()
        return [self._node(address) for address in dict.fromkeys(s.primary for s in self._slots)]

    async def _send_by(self, routes: Sequence[Address], commands: Sequence[Command]) -> list[Any]:
        groups: dict[Address, list[int]] = {}
        for n, address in enumerate(routes):
            groups.setdefault(address, []).append(n)
        sends = [
            self._node(address).send([commands[n] for n in group])
            for address, group in groups.items()
        ]
        replies: list[Any] = [None] * len(commands)
        for group, part in zip(groups.values(), await self._gather(sends), strict=True):
            for n, reply in zip(group, part, strict=True):
                replies[n] = reply
        return replies

    async def _gather(self, sends: Sequence[Any]) -> Sequence[list[Any]]:
        try:
            if len(sends) == 1:
                return [await sends[0]]
            parts = await asyncio.gather(*sends, return_exceptions=True)
            for part in parts:
                if isinstance(part, BaseException):
                    raise part
            return [part for part in parts if not isinstance(part, BaseException)]
        except self._errors:
            # The node may have been replaced: ask for the slots again.
            self._slots = ()
            raise

    async def _follow(self, redirections: Sequence[Any], commands: Sequence[Command]) -> list[Any]:
        """Send commands to where the nodes say that their keys are, or are moving to."""
        routes = [(str(error.host), int(error.port)) for error in redirections]
        if all(isinstance(error, load_exceptions().MovedError) for error in redirections):
            self._slots = ()
            return await self._send_by(routes, commands)
        replies = []
        for address, command in zip(routes, commands, strict=True):
            _, reply = await self._node(address).send([("ASKING",), command])
            replies.append(reply)
        return replies

    async def _discover(self) -> None:
        """Ask the nodes, one after another, which of them has which slots."""
        failure: Exception = NotSent("no node is known")
        for address in dict.fromkeys([*self._nodes, *self._seeds]):
            try:
                [reply] = await self._node(address).send([("CLUSTER", "SLOTS")])
            except self._errors as error:
                failure = error
                continue
            if isinstance(reply, Exception):
                raise reply
            self._slots = sorted(_slot_range(row, address) for row in reply)
            return
        raise failure


def _slot_range(row: Sequence[Any], source: Address) -> _SlotRange:
    first, last, (host, port, *_) = row[:3]
    # A node that does not know its own name is known by the name under which it was reached.
    name = host.decode() if host else "?"
    return _SlotRange(int(first), int(last), (source[0] if name in ("", "?") else name, int(port)))


def _key_of(command: Command) -> bytes:
    is_script = command[0] in ("EVALSHA", "EVAL")
    key = command[3 if is_script else 1]
    return key if isinstance(key, bytes) else str(key).encode()


def _is_redirection(reply: Any) -> bool:
    return isinstance(reply, load_exceptions().AskError)
