"""Makes `.rivals/venv` with the libraries that `tackboard bench features` and `bench loader` compare Tackboard with.

The script reads requirements/rivals.txt and pip's configuration. It makes an environment with exactly those packages,
and writes a stamp. If nothing has changed, the next run finds the stamp and returns at once.

torch is not installed twice: a path file adds the packages of `.venv` at the end of the search path. So the rivals
compute with the same torch, and 0.7 GB are saved. If both environments have a package, the rivals use their own copy.
Decided: the Python of `.venv` makes the environment (`make rivals` ensures that), because a comparison between two
Pythons says little. An environment with another stamp is made anew, never repaired, because nobody changes it by hand.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "rivals.txt"
VENV = ROOT / ".rivals" / "venv"
STAMP = ROOT / ".rivals" / "stamp"
LENT = "packages_of_tackboard.pth"
EXIT_USAGE = 2


class InstallError(Exception):
    """The installation cannot go on. The message is at most three lines: what failed, what is needed, what to do."""


def wanted_stamp() -> str:
    """Returns a hash of everything that decides what is installed."""
    words = (REQUIREMENTS.read_text(encoding="utf-8"), sys.version, str(ROOT))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def is_up_to_date() -> bool:
    """Returns whether the last finished run installed exactly what is wanted now."""
    try:
        return STAMP.read_text(encoding="utf-8") == wanted_stamp() and (VENV / "bin" / "python").exists()
    except OSError:
        return False


def install() -> None:
    """Makes the environment. Raises InstallError with a message for the user."""
    if is_up_to_date():
        return
    STAMP.unlink(missing_ok=True)
    STAMP.parent.mkdir(parents=True, exist_ok=True)
    print("making .rivals/venv (Polars, pandas, Feast, datasets and Ray, about 1 GB)", flush=True)
    _run("making .rivals/venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    # --no-deps, because the list is complete and pip must not add to it. A file with another hash is refused.
    _run(
        "installing the rivals",
        [
            str(VENV / "bin" / "python"),
            *("-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"),
            *("install", "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(REQUIREMENTS)),
        ],
    )
    lend_torch()
    words = "import polars, pandas, feast, torch, datasets, ray.data"
    _run("loading the rivals", [str(VENV / "bin" / "python"), "-I", "-c", words])
    STAMP.write_text(wanted_stamp(), encoding="utf-8")


def lend_torch() -> None:
    """Adds the packages of the Python that runs this script at the end of the environment's search path."""
    ours = Path(sysconfig.get_path("purelib"))
    folder = VENV / "lib" / ours.parent.name / "site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LENT).write_text(f"{ours}\n", encoding="utf-8")


def _run(stage: str, command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise InstallError(
            f"{stage} failed: {next((line for line in lines if line.startswith('ERROR')), lines[-1])[:200]}\n"
            "needed: a package index or a folder of wheels that has the versions in requirements/rivals.txt\n"
            "fix: set PIP_INDEX_URL or PIP_FIND_LINKS to such a place, and run `make rivals` again"
        )


def _environment() -> dict[str, str]:
    """Returns the user's environment variables, except variables that would send packages to another place."""
    dropped = {"PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_DRY_RUN", "PYTHONHOME", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def main() -> int:
    """Installs the rivals. Prints an error if that fails; returns the exit code."""
    try:
        install()
    except InstallError as error:
        print("error: " + str(error).replace("\n", "\n  "), file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
