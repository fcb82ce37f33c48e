"""The long form of proofs of which `make test` runs a short form; `make verify` runs them."""

import os

LONG = bool(os.environ.get("PERDURE_TEST_LONG"))
