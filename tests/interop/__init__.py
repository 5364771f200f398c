"""Real clients against a real cluster. Run them with `make interop`; docs/conformance.md has the last result."""
