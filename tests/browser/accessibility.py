"""axe-core, run inside a page."""

from functools import cache

from playwright.async_api import Page

from tests.servers.process import node_package

_RUN = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map(
    violation => ({
        rule: violation.id,
        help: violation.help,
        nodes: violation.nodes.map(node => node.html.slice(0, 200)),
    }))"""


@cache
def _axe() -> str:
    return (node_package("axe-core") / "axe.min.js").read_text()


async def axe(page: Page) -> list[str]:
    """Return the violations of accessibility rules on a page, as one line per element.

    The script is evaluated by the debugger and not loaded by the page, so that the page's content
    security policy stays in force.
    """
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_axe())
    violations = await page.evaluate(_RUN)
    return [
        f"{each['rule']}: {each['help']}: {node}" for each in violations for node in each["nodes"]
    ]
