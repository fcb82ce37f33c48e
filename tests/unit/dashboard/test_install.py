"""Without the packages of the extra, the error says what to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError("not installed", name=name)

sys.meta_path.insert(0, Without())
import perdure.dashboard
"""


@pytest.mark.parametrize("package", ["starlette", "jinja2"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package: str) -> None:
    code = WITHOUT.format(package=package)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'perdure[dashboard]'" in process.stderr
    assert f"{package} is not installed" in process.stderr
