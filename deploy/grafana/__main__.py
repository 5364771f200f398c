"""`python -m deploy.grafana [FOLDER]`: write every dashboard as JSON, by default into the folder beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.grafana.boards import BOARDS
from deploy.grafana.dashboard_json import text_of

FOLDER = Path(__file__).parent / "dashboards"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(text_of(board))


if __name__ == "__main__":
    main()
