"""Whether the process of an owner id still exists."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import pytest

from perdure.durable.owners import describe_owner, is_gone, new_owner

CHILD = """
from random import Random
from perdure.durable.owners import new_owner

print(new_owner(Random()), flush=True)
input()
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


class Child:
    """Another process, and its owner id."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.owner = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()


def altered(owner: str, **parts: str) -> str:
    """Return an owner id with some of its parts replaced."""
    names = ("host", "boot", "namespace", "pid", "start", "random")
    values = dict(zip(names, owner.split("/"), strict=True))
    return "/".join((values | parts).values())


def test_each_owner_id_is_different() -> None:
    """Two owners in one process are two owners, even if their generators have the same seed."""
    assert len({new_owner(Random(7)) for _ in range(100)}) == 100


def test_this_process_is_not_gone() -> None:
    """A call in the same process waits for the other one, or for its lease."""
    assert not is_gone(new_owner(Random()))


@linux
def test_a_killed_process_is_gone(child: Child) -> None:
    """Even before its parent has waited for it."""
    assert not is_gone(child.owner)
    child.process.kill()
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(child.owner)
    child.process.wait()
    assert is_gone(child.owner)


@linux
def test_a_stopped_process_is_not_gone(child: Child) -> None:
    """It may be continued at any time, so its lease decides."""
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    assert not is_gone(child.owner)


@linux
def test_a_reused_pid_is_another_process(child: Child) -> None:
    """The start time tells them apart."""
    assert is_gone(altered(child.owner, start="1"))


@linux
@pytest.mark.parametrize("part", ["host", "boot", "namespace"])
def test_a_process_elsewhere_is_never_gone(child: Child, part: str) -> None:
    """Another machine, another boot, another container: the pid means nothing here."""
    child.process.kill()
    child.process.wait()
    assert is_gone(child.owner)
    assert not is_gone(altered(child.owner, **{part: "other"}))


@pytest.mark.parametrize(
    "owner", ["", "ana", "worker-17", "a/b/c/d/e/f", "/////", "shared:order", "1/2/3/4/5/6/7"]
)
def test_an_unknown_form_is_never_gone(owner: str) -> None:
    """The lease decides."""
    assert not is_gone(owner)


@linux
def test_an_owner_is_described_by_process_and_host(child: Child) -> None:
    """For error messages."""
    host = child.owner.split("/")[0]
    assert describe_owner(child.owner) == f"process {child.process.pid} on {host}"
    assert describe_owner("ana") == "owner 'ana'"
