"""The services that the workflows of this guide call."""

from typing import Any


class Shop:
    """A small shop. `calls` lists the services that were called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.down: set[str] = set()

    def _called(self, service: str) -> None:
        self.calls.append(service)
        if service in self.down:
            raise ConnectionError(f"{service} is down")

    async def fetch_user(self, id: str) -> dict[str, Any]:
        self._called("fetch_user")
        return {"id": id, "name": "Ana", "email": "ana@example.com"}

    async def fetch_posts(self, user_id: str) -> list[dict[str, Any]]:
        self._called("fetch_posts")
        return [{"by": user_id, "title": "Hello"}]

    async def create_order(self, user: dict[str, Any]) -> dict[str, Any]:
        self._called("create_order")
        return {"id": "o-1", "user": user["id"]}

    async def process_payment(self, user_id: str, amount: int) -> dict[str, Any]:
        self._called("process_payment")
        return {"id": "p-1", "amount": amount}

    async def send_confirmation(self, email: str, payment_id: str) -> None:
        self._called("send_confirmation")
