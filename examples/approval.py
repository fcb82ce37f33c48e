"""An expense report that waits for an approval. Each command runs in its own process:

    python examples/approval.py submit "train to Vienna" 120
    python examples/approval.py approve report-1 --by eva
    python examples/approval.py show report-1

Between two commands no process runs: the report is a row in `expenses.db`.
"""

import argparse
import asyncio
from dataclasses import dataclass

from perdure import Run, Runtime, Step, workflow
from perdure.stores import sqlite


@dataclass
class Report:
    purpose: str
    amount: int


@dataclass
class Approval:
    by: str


async def pay_out(amount: int) -> str:
    print(f"paying out {amount} €")
    return f"transfer of {amount} €"


@workflow("expense-report")
async def expense_report(step: Step, report: Report) -> str:
    if report.amount > 50:
        approval = await step.wait_for_event(
            "approval", "approved", timeout="14d", returns=Approval
        )
        if approval is None:
            return "not approved within two weeks"
        print(f"approved by {approval.by}")
    return await step("pay", pay_out, report.amount)


async def main() -> None:
    arguments = parse_arguments()
    async with sqlite("expenses.db") as store:
        runtime = Runtime(store, workflows=[expense_report])
        run: Run | None
        match arguments.command:
            case "submit":
                count = len(await runtime.list_runs(workflow="expense-report"))
                report = Report(arguments.purpose, arguments.amount)
                run = await runtime.trigger(expense_report, report, run_id=f"report-{count + 1}")
            case "approve":
                await runtime.signal(arguments.id, "approved", {"by": arguments.by})
                run = await runtime.get_run(arguments.id)
            case _:
                run = await runtime.get_run(arguments.id)
    if run is None:
        print("no such report")
    else:
        print(f"{run.id}: {run.status} {run.output or ''}".rstrip())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    submit = commands.add_parser("submit")
    submit.add_argument("purpose")
    submit.add_argument("amount", type=int)
    approve = commands.add_parser("approve")
    approve.add_argument("id")
    approve.add_argument("--by", default="anonymous")
    show = commands.add_parser("show")
    show.add_argument("id")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
