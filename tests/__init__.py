"""Tests. Run them with `make test`."""

import engine  # noqa: F401 - before torch: it says how OpenMP's threads wait
