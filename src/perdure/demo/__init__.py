"""A sample shop that shows what perdure does: used by `perdure demo` and by tests."""
