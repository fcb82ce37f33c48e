"""What no page of the dashboard may do, recorded while a test uses a browser."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Request, WebError

# The browser reports a response that is not a success as an error on its console.
_FAILED_RESPONSE = "Failed to load resource: the server responded with a status of"


@dataclass
class Watch:
    """Records external requests, CSP violations, console errors, exceptions and dialogs.

    `expected_statuses` are the HTTP errors that a test asks for.
    """

    problems: list[str] = field(default_factory=list)
    expected_statuses: set[int] = field(default_factory=set)

    def attach(self, context: BrowserContext, host: str) -> Callable[[], None]:
        """Record the problems of every page of this context, which may use only this host.

        Return a function that ends this.
        """
        listeners: dict[Any, Callable[[Any], Any]] = {
            "request": partial(self._requested, host),
            "console": self._logged,
            "weberror": self._raised,
            "dialog": self._asked,
        }
        for event, listener in listeners.items():
            context.on(event, listener)

        def detach() -> None:
            for event, listener in listeners.items():
                context.remove_listener(event, listener)

        return detach

    def _requested(self, host: str, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme != "data" and address.netloc != host:
            self.problems.append(f"external request: {request.url}")

    def _logged(self, message: ConsoleMessage) -> None:
        # A violation of the content security policy is an error on the console too.
        if message.type in ("error", "warning") and not self._is_expected(message.text):
            self.problems.append(f"console {message.type}: {message.text}")

    def _is_expected(self, text: str) -> bool:
        return any(f"{_FAILED_RESPONSE} {status}" in text for status in self.expected_statuses)

    def _raised(self, error: WebError) -> None:
        self.problems.append(f"exception: {error.error}")

    async def _asked(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        await dialog.dismiss()
