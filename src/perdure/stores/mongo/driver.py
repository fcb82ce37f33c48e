"""PyMongo's own async client, or the error that says how to get it; imported before its users."""

from perdure.errors import MissingDependency

try:
    from pymongo import AsyncMongoClient
except ImportError:
    raise MissingDependency("pymongo", "mongo") from None

__all__ = ["AsyncMongoClient"]
