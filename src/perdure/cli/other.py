"""Small commands: doctor, completion and version."""

import platform

import click
from click.shell_completion import get_completion_class

from perdure.cli.connections import insights
from perdure.cli.context import Settings, command
from perdure.cli.failures import FAILED, Failure
from perdure.cli.output import print_findings
from perdure.version import __version__


@command
async def doctor(settings: Settings) -> None:
    """Look for problems and say how to fix them.

    It prints nothing and exits with 0 if there are none.
    """
    async with insights(settings) as ask:
        findings = await ask.check()
    print_findings(settings, findings)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands in a shell.

    For example: perdure completion bash > ~/.local/share/bash-completion/completions/perdure
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise Failure(f"there is no completion for {shell}", FAILED)
    root = context.find_root().command
    click.echo(kind(root, {}, "perdure", "_PERDURE_COMPLETE").source())


@click.command()
def version() -> None:
    """Print the versions of perdure and Python."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    click.echo(f"perdure {__version__} ({python}, {platform.system()})")
