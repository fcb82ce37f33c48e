"""What a Redis server promises of its answers, told from its settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.errors import StoreError
from perdure.stores.redis.server import Server

UNKNOWN = "unknown"

_SETTINGS = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "maxmemory",
    "maxmemory-policy",
    "min-replicas-to-write",
)
_WANTED = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}

_FSYNC = {
    "always": "an answer is on the primary's disk before it is given; a power cut costs nothing",
    "everysec": "the disk is about a second behind; a power cut costs the answers of that time",
    "no": "the system writes to disk when it likes; a power cut costs up to half a minute",
}


@dataclass(frozen=True, slots=True)
class DurabilityReport:
    """What the server is, how it is set, and what follows from that, a sentence each.

    A setting that this user may not see is "unknown"; where primaries of a cluster differ, all
    values are named.
    """

    where: str
    version: str
    primaries: int
    replicas: int | None
    settings: Mapping[str, str]
    promises: tuple[str, ...]

    def __str__(self) -> str:
        servers = "one primary" if self.primaries == 1 else f"{self.primaries} primaries"
        head = f"Redis {self.version} at {self.where}: {servers}"
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return "\n".join([head, settings, *(f"- {promise}" for promise in self.promises)])


async def durability_report(server: Server) -> DurabilityReport:
    """Ask the server for its settings and tell what they promise."""
    settings = await _settings(server)
    about = [_fields(reply) for reply in await server.ask(("INFO", "server"))]
    replication = [_fields(reply) for reply in await server.ask(("INFO", "replication"))]
    replicas = _sum([fields.get("connected_slaves") for fields in replication])
    return DurabilityReport(
        where=server.link.where,
        version=_joined([fields.get("redis_version", UNKNOWN) for fields in about]),
        primaries=len(about),
        replicas=replicas,
        settings=settings,
        promises=tuple(_promises(settings, replicas)),
    )


async def require_durability(server: Server) -> None:
    """Raise `StoreError` unless the server's answers survive a power cut."""
    settings = await _settings(server)
    wrong = [name for name, expected in _WANTED.items() if settings[name] != expected]
    found = [f"{name} is {settings[name]}" for name in wrong]
    remedies = [f"CONFIG SET {name} {_WANTED[name]}" for name in wrong]
    if _may_evict(settings):
        found.append(f"maxmemory-policy is {settings['maxmemory-policy']}, which evicts runs")
        remedies.append("CONFIG SET maxmemory-policy noeviction")
    if found:
        raise StoreError(
            f"Redis at {server.link.where} does not promise that its answers survive a power cut: "
            f"{'; '.join(found)}. Run: {'; '.join(remedies)}; CONFIG REWRITE. Or pass "
            'durability="normal" and take what the server gives'
        )


async def _settings(server: Server) -> dict[str, str]:
    return {
        name: _joined([_setting(reply) for reply in await server.ask(("CONFIG", "GET", name))])
        for name in _SETTINGS
    }


def _setting(reply: Any) -> str:
    values = [*reply.values()] if isinstance(reply, Mapping) else reply
    if isinstance(values, Exception) or not values:
        return UNKNOWN
    value: bytes = values[-1]
    return value.decode() or '""'


def _fields(reply: Any) -> dict[str, str]:
    """Give the fields of INFO, which some clients take apart; none when it was refused."""
    if isinstance(reply, Exception):
        return {}
    if isinstance(reply, Mapping):
        return {name: str(value) for name, value in reply.items()}
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


def _joined(values: Sequence[str]) -> str:
    return " / ".join(sorted(set(values)))


def _sum(counts: Sequence[str | None]) -> int | None:
    return None if None in counts else sum(int(count or 0) for count in counts)


def _may_evict(settings: Mapping[str, str]) -> bool:
    return settings["maxmemory"] != "0" and settings["maxmemory-policy"].startswith("allkeys")


def _promises(settings: Mapping[str, str], replicas: int | None) -> Iterator[str]:
    yield _about_disk(settings)
    if settings["appendonly"] == "yes" and settings["no-appendfsync-on-rewrite"] == "yes":
        yield "no-appendfsync-on-rewrite: while the log is rewritten, the disk may be far behind"
    yield _about_replicas(settings, replicas)
    if _may_evict(settings):
        yield f"maxmemory-policy {settings['maxmemory-policy']}: a full server evicts whole runs"


def _about_disk(settings: Mapping[str, str]) -> str:
    fsync = settings["appendfsync"]
    match settings["appendonly"]:
        case "yes":
            promise = _FSYNC.get(fsync, "what a power cut costs cannot be told")
            return f"appendonly yes, appendfsync {fsync}: {promise}"
        case "no":
            saved = settings["save"]
            return (
                f"appendonly no, save {saved}: when the server process ends, all answers since its "
                "last dump are lost"
            )
        case other:
            return f"appendonly {other}: what a crash of the server costs cannot be told"


def _about_replicas(settings: Mapping[str, str], replicas: int | None) -> str:
    if replicas is None:
        return "replication unknown: what a failover costs cannot be told"
    if replicas == 0:
        return "no replicas: when the primary's disk is lost, so are the runs"
    least = settings["min-replicas-to-write"]
    return (
        f"{replicas} connected replicas (min-replicas-to-write {least}): they are sent each answer "
        "after it was given, so a failover loses the last ones; those steps run again"
    )
