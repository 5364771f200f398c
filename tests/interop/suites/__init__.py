"""One module per suite, each with `run(target, environment) -> SuiteResult`."""
