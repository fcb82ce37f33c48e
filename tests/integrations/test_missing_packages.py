"""An integration whose package is not installed says how to install it."""

import subprocess
import sys

import pytest

MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"no {{name}}", name=name)

sys.meta_path.insert(0, Missing())
import perdure.integrations
from perdure.errors import MissingDependency
try:
    import perdure.integrations.{module}
except MissingDependency as error:
    print(error)
"""

EXTRAS = {
    "fastapi": ("fastapi", ("fastapi",)),
    "langgraph": ("langgraph", ("langgraph", "langchain_core")),
    "mcp": ("mcp", ("fastmcp", "mcp")),
    "openai_agents": ("openai-agents", ("agents", "openai")),
    "opentelemetry": ("otel", ("opentelemetry",)),
    "pydantic_ai": ("pydantic-ai", ("pydantic_ai",)),
    "sqlalchemy": ("sqlalchemy", ("sqlalchemy", "greenlet")),
    "starlette": ("fastapi", ("starlette",)),
}


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(module: str) -> None:
    """In a process of its own: a package that was imported cannot be made to be missing."""
    extra, packages = EXTRAS[module]
    code = MISSING.format(packages=packages, module=module)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert f"pip install 'perdure[{extra}]'" in process.stdout
