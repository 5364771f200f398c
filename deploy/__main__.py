"""The `baton` command, also as `python -m deploy`."""

from deploy.interrupts import quiet_at_the_edges


def main() -> None:
    """Run the command. Its modules are imported here, and Ctrl-C during that prints no traceback."""
    quiet_at_the_edges(running=False)
    from deploy.cli import main as run

    run()


if __name__ == "__main__":
    main()
