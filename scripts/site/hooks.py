"""What the documentation site has beyond the Markdown in docs/: the API reference, and diagrams.

MkDocs calls the functions `on_…` while it builds the site; `mkdocs.yml` names this file. Diagrams
are drawn here, because the script that draws them in a browser is 3 MB, from another host.
"""

import re
from importlib import import_module
from typing import Any

from mkdocs.structure.files import File, Files

from scripts.site.diagrams import draw, edges_in

MODULES = {
    "perdure": "The names that programs import.",
    "perdure.durable": "`durable.run` and its relatives: one function, recorded in a store.",
    "perdure.sync": "A client for code without an event loop.",
    "perdure.stores": "The built-in stores.",
    "perdure.caches": "The built-in caches.",
    "perdure.callbacks": "Answers to approvals and callbacks over HTTP.",
    "perdure.testing": "Tools for tests.",
    "perdure.insights": "What an operator can ask.",
    "perdure.operations": "What an operator can do.",
    "perdure.dashboard": "The dashboard as an ASGI app.",
    "perdure.integrations.fastapi": "A runtime in a FastAPI app.",
    "perdure.integrations.starlette": "Runs over HTTP, as an ASGI app.",
    "perdure.integrations.opentelemetry": "Spans and metrics.",
    "perdure.integrations.logging": "Log lines that name their run.",
    "perdure.integrations.pydantic_ai": "Agents of pydantic-ai.",
    "perdure.integrations.openai_agents": "Agents of the OpenAI Agents SDK.",
    "perdure.integrations.mcp": "Workflows as tools of an MCP server.",
    "perdure.integrations.langgraph": "Checkpoints of LangGraph.",
    "perdure.integrations.sqlalchemy": "SQLAlchemy sessions in transactional steps.",
    "perdure.store": "The contract that a store implements.",
    "perdure.errors": "Every exception.",
    "perdure.events": "What happened, for listeners.",
}
"""The modules of the API reference, each a page."""

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./){2,}(?!docs/)[^)]*\)")
_DIAGRAM = re.compile(r"^```mermaid\nflowchart TD\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Add the pages of the API reference to the navigation."""
    [reference] = [each["Reference"] for each in config["nav"] if "Reference" in each]
    [api] = [each for each in reference if isinstance(each, dict) and "API" in each]
    api["API"] = [{module: _path_of(module)} for module in MODULES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API reference."""
    for module, summary in MODULES.items():
        page = _page_of(module, summary)
        files.append(File.generated(config, _path_of(module), content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Draw diagrams, and turn links to files that are not part of the site into plain text."""
    markdown = _DIAGRAM.sub(lambda found: draw(edges_in(found[1])), markdown)
    return _OUTSIDE.sub(r"\1", markdown)


def _path_of(module: str) -> str:
    return f"reference/api/{module}.md"


def _page_of(module: str, summary: str) -> str:
    names = public_names(module)
    entries = "\n".join(f"::: {module}.{name}\n" for name in names)
    return f"# `{module}`\n\n{summary}\n\n{entries}"


def public_names(module: str) -> list[str]:
    """Return the public names of a module that are documented on its page.

    Modules among them have pages of their own.
    """
    loaded = import_module(module)
    names: list[str] = list(getattr(loaded, "__all__", None) or _own_names(loaded))
    return [name for name in names if f"{module}.{name}" not in MODULES]


def _own_names(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
