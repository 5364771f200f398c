"""`python -m deploy` is the `baton` command."""

from deploy.cli import main

main()
