"""What all commands share: their options, and how an async function becomes a command."""

import asyncio
import getpass
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Literal, TypeAlias

import click

from perdure.cli.formatting import hide_passwords, printable

Format: TypeAlias = Literal["table", "json", "jsonl", "ids"]
TimeFormat: TypeAlias = Literal["relative", "iso", "local"]


def _operator() -> str:
    """Return `user@host`, the default name that is recorded with an act."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without this user in /etc/passwd
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@dataclass(slots=True)
class Settings:
    """The options that every command takes."""

    app: str | None = None
    store: str | None = None
    output: Format = "table"
    time: TimeFormat | None = None
    color: Literal["auto", "always", "never"] = "auto"
    by: str = field(default_factory=_operator)
    quiet: bool = False
    verbose: int = 0


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    name = parameter.name or ""
    if name == "store" and value is not None:
        _refuse_password(context, parameter, value)
    if value:
        setattr(context.ensure_object(Settings), name, value)
    return value


def _refuse_password(context: click.Context, parameter: click.Parameter, url: str) -> None:
    source = context.get_parameter_source("store")
    if source is click.core.ParameterSource.COMMANDLINE and hide_passwords(url) != url:
        raise click.BadParameter(
            "a password in an argument can be read by every user of this machine. Set "
            "PERDURE_STORE, or pass --store @FILE or --store - (standard input)",
            context,
            parameter,
        )


def shared_options(*, of_root: bool) -> list[click.Parameter]:
    """Return the options of `perdure`, which every command accepts after its name too.

    Only those of the root read environment variables: elsewhere, a variable would override what was
    passed before the command's name.
    """

    def shared(*names: str, **options: Any) -> click.Option:
        variable = f"PERDURE_{names[-1].removeprefix('--').upper()}" if of_root else None
        return click.Option(
            names,
            envvar=variable,
            show_envvar=True,
            allow_from_autoenv=False,
            expose_value=False,
            callback=_remember,
            hidden=not of_root,
            **options,
        )

    formats, times = ["table", "json", "jsonl", "ids"], ["relative", "iso", "local"]
    return [
        shared("--app", metavar="MODULE:NAME", help="The Runtime or Worker to use."),
        shared("--store", metavar="URL", help="The store; @FILE or - reads the URL from there."),
        shared("-o", "--output", type=click.Choice(formats), help="How to print the answer."),
        shared("--time", type=click.Choice(times), help="How to print times."),
        shared(
            "--color", type=click.Choice(["auto", "always", "never"]), help="When to use colours."
        ),
        shared("--by", metavar="NAME", help="The name to record; by default user@host."),
        shared("-q", "--quiet", is_flag=True, help="Print no messages."),
        shared("-v", "--verbose", count=True, help="Print the log, -vv with details."),
    ]


class Command(click.Command):
    """A command that accepts the options of `perdure` after its name too."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of this command and the shared ones."""
        return [*super().get_params(ctx), *shared_options(of_root=False)]


option = partial(click.option, show_envvar=True)

AsyncCommand: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def command(function: AsyncCommand) -> Command:
    """Turn an async function whose first argument is the `Settings` into a command."""

    @click.pass_context
    def run(context: click.Context, /, **arguments: Any) -> None:
        settings = context.ensure_object(Settings)
        # Read here, since these options may follow the command's name.
        colors = {"always": True, "never": False}
        context.color = colors.get(settings.color, False if os.environ.get("NO_COLOR") else None)
        if settings.verbose:
            show_log(logging.INFO if settings.verbose == 1 else logging.DEBUG)
        asyncio.run(function(settings, **arguments))

    return click.command(cls=Command)(update_wrapper(run, function))


class Group(click.Group):
    """A command with subcommands; without a subcommand it lists."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Complete the arguments."""
        names_none = not args or (args[0].startswith("-") and args[0] not in ("-h", "--help"))
        is_list = names_none and "list" in self.commands
        return super().parse_args(ctx, ["list", *args] if is_list else args)


def group(help: str, **commands: click.Command) -> click.Group:
    """Return a command with subcommands."""
    return Group(help=help, commands=commands)


class _Formatter(logging.Formatter):
    """Formats log records so that their contents cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def show_log(level: int) -> None:
    """Print the log on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def message(settings: Settings, text: str) -> None:
    """Print a message for people, on stderr."""
    if not settings.quiet:
        click.echo(text, err=True)
