"""Small commands: doctor, completion and version."""

import platform

import click
from click.shell_completion import get_completion_class

from perdure.cli.connections import existing_store
from perdure.cli.context import Settings, command, message, option
from perdure.cli.failures import FAILED, Failure
from perdure.cli.output import print_findings, progress
from perdure.insights import Insights
from perdure.insights.model import Finding
from perdure.operations import Operations
from perdure.version import __version__

EXAMINED = 1000
"""How many runs are examined for acts that are missing in the audit trail, without --fix."""


@command
@option("--fix", is_flag=True, help="Restore entries of the audit trail that a crash has lost.")
async def doctor(settings: Settings, fix: bool) -> None:
    """Look for problems and say how to fix them.

    It prints nothing and exits with 0 if there are none. The audit trail is checked for the runs
    that changed last, and with --fix for all runs.
    """
    # Opened once: an application's store cannot be opened again after it was closed.
    async with existing_store(settings) as (store, url):
        findings = [*await Insights(store, url=url).check()]
        if not any(each.code == "store" for each in findings):
            findings += await _missing_acts(settings, Operations(store, via="cli"), fix=fix)
    print_findings(settings, findings)


async def _missing_acts(settings: Settings, act: Operations, *, fix: bool) -> list[Finding]:
    """Look for acts that are missing in the audit trail; with `fix`, restore them."""
    limit = None if fix else EXAMINED
    with progress("Examining runs") as show:
        count = await act.restore_acts(limit=limit, dry_run=not fix, on_progress=show)
    entries = f"{count:,} {'entry' if count == 1 else 'entries'} of the audit trail"
    if fix and count:
        message(settings, f"{entries} restored.")
    if fix or not count:
        return []
    return [Finding("acts", f"{entries} missing after a crash.", "perdure doctor --fix")]


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
