"""A filter for log records that a planned crash causes."""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager

_LOGGERS = {"perdure", "asyncio"}


class ExpectedLogs(logging.Filter):
    """Drops expected warnings and errors.

    These are the records that a planned crash causes and, in later runs, those that the run without
    a crash has already logged.
    """

    def __init__(self, crash: type[BaseException]) -> None:
        super().__init__()
        self.is_learning = True
        self._crash = crash
        self._logged_before: set[tuple[str, int, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record should be logged."""
        if record.levelno < logging.WARNING:
            return True
        if any(self._is_planned(error) for error in _errors_of(record)):
            return False
        template = (record.name, record.levelno, str(record.msg))
        if self.is_learning:
            self._logged_before.add(template)
            return True
        return template not in self._logged_before

    def _is_planned(self, error: BaseException) -> bool:
        return any(isinstance(each, self._crash) for each in _chain(error))


@contextmanager
def without_expected_logs(crash: type[BaseException]) -> Generator[ExpectedLogs]:
    """Filter what perdure logs inside the block."""
    log_filter, loggers = ExpectedLogs(crash), _loggers()
    for logger in loggers:
        logger.addFilter(log_filter)
    try:
        yield log_filter
    finally:
        for logger in loggers:
            logger.removeFilter(log_filter)


def _loggers() -> list[logging.Logger]:
    # The filter of a logger does not see records of its child loggers.
    return [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _LOGGERS
    ]


def _errors_of(record: logging.LogRecord) -> Iterator[BaseException]:
    if record.exc_info is not None and record.exc_info[1] is not None:
        yield record.exc_info[1]
    if isinstance(record.args, tuple):
        yield from (value for value in record.args if isinstance(value, BaseException))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and all its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
