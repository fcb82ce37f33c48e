"""Workflows and errors that the tests of insights share."""


class CarrierDown(Exception):
    """A service that a step calls is unavailable."""
