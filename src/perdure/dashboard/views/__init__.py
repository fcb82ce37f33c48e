"""The pages: each view asks `Insights` or `Operations`, and returns a template with its data."""
