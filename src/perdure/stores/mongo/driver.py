"""PyMongo's asynchronous client, or an error that names the package to install."""

from perdure.errors import MissingDependency

try:
    from pymongo import AsyncMongoClient
except ImportError:
    raise MissingDependency("pymongo", "mongo") from None

__all__ = ["AsyncMongoClient"]
