"""`tackboard ARGUMENTS` that stops once at a point of its writer until it is told to go on.

    python namespace_writer.py POINT STOPPED GO ARGUMENTS...

At the first pass of POINT it makes the file STOPPED and waits for the file GO. An empty POINT stops nowhere.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tackboard.cli import main as command_line
from tackboard.core import files

GIVE_UP_S = 60.0


def main() -> None:
    """Runs the command."""
    point, stopped, go = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

    def observe(reached: str) -> None:
        if reached != point or stopped.exists():
            return
        stopped.touch()
        deadline = time.monotonic() + GIVE_UP_S
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    files.observer = observe
    sys.argv = ["tackboard", *sys.argv[4:]]
    command_line.run()


if __name__ == "__main__":
    main()
