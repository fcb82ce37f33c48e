"""Call scripts, for one run or for each of many."""

from collections.abc import Callable, Sequence
from typing import Any

from perdure.stores.redis import scripts
from perdure.stores.redis.batches import Item, make_batches
from perdure.stores.redis.errors import translate
from perdure.stores.redis.keys import SHARDS, Keys
from perdure.stores.redis.node import Value
from perdure.stores.redis.scripts import Script
from perdure.stores.redis.server import Call, Server


class Runs:
    """The runs whose stored ids start with `prefix`; arguments do not include it, replies do.

    `groups` are the shards that one script can use together.
    """

    def __init__(self, server: Server, keys: Keys, prefix: str) -> None:
        self.server = server
        self.keys = keys
        self.prefix = prefix
        self.is_sharded = server.link.is_sharded
        shards = range(SHARDS)
        self.groups: Sequence[Sequence[int]] = (
            [[shard] for shard in shards] if self.is_sharded else [shards]
        )

    async def check_permissions(self) -> None:
        """Raise unless this user may use all commands of the scripts."""
        await self.server.run(scripts.PERMISSIONS, [Call(self.keys.probes, ())])

    async def now(self) -> int:
        """Return the server's time; on a cluster, the time of the slowest clock."""
        replies = await self.server.send_everywhere(("TIME",))
        for reply in replies:
            if isinstance(reply, Exception):
                raise translate(reply, self.server.link.location) from reply
        return min(int(seconds) * 1_000_000 + int(rest) for seconds, rest in replies)

    async def one(self, script: Script, id: str, *values: Value) -> Any:
        """Return the reply of a script for one run."""
        call = Call([self.keys.run(self.prefix + id)], values)
        [reply] = await self.server.run(script, [call])
        return reply

    async def inbox(self, id: str, after: str | None, limit: int | None) -> Sequence[bytes]:
        """Return messages of a run's inbox."""
        values = ("-inf" if after is None else f"({after}", -1 if limit is None else limit)
        call = Call([self.keys.inbox(self.prefix + id)], values)
        [reply] = await self.server.run(scripts.INBOX, [call])
        messages: Sequence[bytes] = reply
        return messages

    async def together(self, script: Script, items: Sequence[Item], *head: Value) -> Any:
        """Return the reply of one script for all runs; `None` if that would take several scripts.

        `head` are its first arguments. The script is not repeated after a lost reply.
        """
        batches = make_batches(items, self.keys, self.prefix, is_sharded=self.is_sharded, head=head)
        if len(batches) > 1:
            return None
        [reply] = await self.server.run(script, [batches[0].call], repeatable=False)
        return reply

    async def each(
        self,
        script: Script,
        items: Sequence[Item],
        *head: Value,
        repeatable: bool = True,
        read: Callable[[Any], Sequence[Any]] = lambda reply: reply or (),
    ) -> Sequence[Any]:
        """Return the result of a script for each run; `head` are its first arguments.

        `read` extracts the results from a reply, if they are not the reply itself.
        """
        batches = make_batches(items, self.keys, self.prefix, is_sharded=self.is_sharded, head=head)
        calls = [batch.call for batch in batches]
        replies = await self.server.run(script, calls, repeatable=repeatable)
        if len(batches) == 1:
            return read(replies[0])
        answers: list[Any] = [None] * len(items)
        for batch, reply in zip(batches, replies, strict=True):
            for index, answer in zip(batch.indexes, read(reply), strict=False):
                answers[index] = answer
        return answers
