"""Misuse of runtimes."""

from perdure import Keep, Runtime


def react_in_an_unknown_way() -> Runtime:
    return Runtime(on_definition_change="raise")  # refused


def keep_paused_runs() -> Keep:
    return Keep(paused="7d")  # refused
