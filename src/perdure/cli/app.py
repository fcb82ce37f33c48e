"""The command tree. A command's module is imported when the command is used."""

from importlib import import_module
from typing import Any, NamedTuple, cast

import click

from perdure.cli.context import Settings, shared_options
from perdure.cli.failures import INTERRUPTED, exit_code, explain
from perdure.cli.formatting import printable
from perdure.errors import PerdureError


class Entry(NamedTuple):
    """The location of a command, or its verb, and the first sentence of its help."""

    place: str
    summary: str


SECTIONS = {
    "Inspect": {
        "list": Entry("runs:list_runs", "List the runs that match a query (ls)."),
        "show": Entry("show:show", "Show a run: its facts, its steps on a timeline, its error."),
        "why": Entry("runs:why", "Say in one sentence why a run is where it is."),
        "watch": Entry("watching:watch", "Print what a run does until it ends."),
        "top": Entry("watching:top", "Show the overview continuously; press q to quit."),
        "errors": Entry("runs:errors", "Group the failed runs by error."),
        "agenda": Entry("runs:agenda", "Show what wakes next, and what runs wait for."),
        "approvals": Entry("approvals:approvals", "List the approvals that runs wait for."),
        "compare": Entry("runs:compare", "Show how two runs differ."),
        "acts": Entry("runs:acts", "List what operators did."),
        "export": Entry("runs:export", "Print a run as a bundle that can be imported elsewhere."),
        "open": Entry("serving:open_page", "Open the dashboard's page of a run in a browser."),
    },
    "Change": {
        "start": Entry("starting:start", "Create a run, which a worker executes."),
        "signal": Entry("verb:signal", "Send an event to a run."),
        "approve": Entry("verb:approve", "Approve what a run asks for."),
        "reject": Entry("verb:reject", "Reject what a run asks for."),
        "answer": Entry("verb:answer", "Answer a callback of a run."),
        "cancel": Entry("verb:cancel", "Cancel runs."),
        "retry": Entry("verb:retry", "Continue failed runs; the steps that ended them run again."),
        "wake": Entry("verb:wake", "End a sleep now, or let a wait time out."),
        "pause": Entry("verb:pause", "Hold runs: they begin no step until they are resumed."),
        "resume": Entry("verb:unpause", "Let paused runs continue."),
        "complete-step": Entry("verb:complete_step", "Record a value for a step."),
        "skip-step": Entry("verb:skip_step", "Record a step as completed with null."),
        "fail-step": Entry("verb:fail_step", "Record a step as failed."),
        "retry-step": Entry("verb:retry_step", "Let a failed step run again."),
        "rewind": Entry("verb:rewind", "Let a step and all later ones run again."),
        "fork": Entry("verb:fork", "Create a run with the records of another one."),
        "edit-payload": Entry("verb:edit_payload", "Replace the input of a new run."),
        "delete": Entry("verb:delete", "Delete runs and everything that belongs to them."),
        "import": Entry("starting:import_run", "Create a run from an exported bundle."),
    },
    "Run": {
        "dev": Entry("dev:dev", "Run worker and dashboard, and restart them when a file changes."),
        "worker": Entry("working:worker", "Run a worker for an application."),
        "dashboard": Entry("serving:dashboard", "Serve the dashboard."),
        "demo": Entry("demo:demo", "Run a sample shop with the dashboard."),
    },
    "Fleet": {
        "workflows": Entry("fleet:workflows", "List, show, pause and resume workflows."),
        "queues": Entry("fleet:queues", "List, show, pause and resume queues, and change limits."),
        "schedules": Entry("fleet:schedules", "List, show and change schedules."),
        "workers": Entry("fleet:workers", "List, show and drain workers."),
        "views": Entry("fleet:views", "List, save and delete queries for everyone."),
        "bulk": Entry("fleet:bulk", "List, show, stop and resume bulk operations."),
    },
    "Store": {
        "store": Entry("storage:store", "Look at the store, migrate it, copy or delete runs."),
    },
    "Other": {
        "doctor": Entry("other:doctor", "Look for problems and say how to fix them."),
        "completion": Entry("other:completion", "Print a script that completes commands."),
        "version": Entry("other:version", "Print the versions of perdure and Python."),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
ALIASES = {"ls": "list"}
HIDDEN_COMMANDS = {"dev-child": Entry("dev_child:dev_child", "")}


class Root(click.Group):
    """The group `perdure`, which loads commands on first use, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, after importing its module."""
        entry = (COMMANDS | HIDDEN_COMMANDS).get(ALIASES.get(cmd_name, cmd_name))
        return None if entry is None else load(entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, without importing them."""
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, entry.summary) for name, entry in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an expected error becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except (PerdureError, TimeoutError) as error:
            text, code = explain(error), exit_code(error)
        except (KeyboardInterrupt, click.Abort):
            text, code = "interrupted", INTERRUPTED
        click.echo(f"perdure: {printable(text)}", err=True)
        return ctx.exit(code)


def load(entry: Entry) -> click.Command:
    """Import a command."""
    module, _, name = entry.place.partition(":")
    if module == "verb":
        return cast(click.Command, import_module("perdure.cli.changes").verb_command(name))
    return cast(click.Command, getattr(import_module(f"perdure.cli.{module}"), name))


@click.group(
    cls=Root,
    invoke_without_command=True,
    params=shared_options(of_root=True),
    context_settings={"auto_envvar_prefix": "PERDURE", "help_option_names": ["-h", "--help"]},
    epilog="Without a command, perdure prints an overview of the store.",
)
@click.pass_context
def root(context: click.Context) -> None:
    """Find runs, see why they do not move, repair them, and run workers."""
    context.ensure_object(Settings)
    if context.invoked_subcommand is None:
        context.invoke(load(Entry("watching:overview", "")))
