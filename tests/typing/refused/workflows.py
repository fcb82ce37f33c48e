"""Misuse of runtimes."""

from perdure import Runtime


def react_in_an_unknown_way() -> Runtime:
    return Runtime(on_definition_change="raise")  # refused
