"""The length of tests that have a short form for `make test` and a long one for `make verify`."""

import os

LONG = bool(os.environ.get("PERDURE_TEST_LONG"))
