"""Defines the errors that users see.

An error says what happened, what is allowed and what to do, in at most three lines. Its class decides the exit code:

    TackboardError            1   our bug
    ├── UsageError            2   wrong use
    │   └── ConfigError       2   a setting that does not exist or has a value that is not allowed
    ├── StorageError          2   the disk is full, or a path may not be read or written
    ├── DataError             3   invalid data
    │   └── CorruptFileError  3   a file that is missing, differs from its checksum, or cannot be parsed
    ├── DivergedError         4   training diverged and could not recover
    ├── Preempted            75   stopped on request with the state saved; run again to continue
    └── LostProcess          75   another process of the run is gone or hangs; run again to continue
"""

from __future__ import annotations

import traceback

EXIT_BUG = 1
USER_MODULE_PREFIX = "tackboard_user_code_"
"""A user's Python file is imported under a module name with this prefix."""


class TackboardError(Exception):
    """An error with a remedy. `got` says what happened, `allowed` says what is allowed, `fix` says what to do."""

    exit_code = EXIT_BUG
    is_common = False
    """Whether all processes of a run raise this error with the same words. Then one process of each host prints it."""

    def __init__(self, got: str, *, allowed: str = "", fix: str = "") -> None:
        self.got = one_line(got)
        self.allowed = one_line(allowed)
        self.fix = one_line(fix)
        super().__init__("\n".join(line for line in (self.got, self.allowed, self.fix) if line))


class UsageError(TackboardError):
    """The command or request is wrong or impossible."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type or out of range."""


class StorageError(TackboardError):
    """The disk, a path or a permission prevented a read or write. Files that were complete stay complete."""

    exit_code = 2


class DataError(TackboardError):
    """The data breaks a rule. The message states the rule."""

    exit_code = 3


class CorruptFileError(DataError):
    """A file is missing, differs from its checksum, or cannot be parsed."""


class DivergedError(TackboardError):
    """Training met non-finite or spiking values more often than the run's settings allow."""

    exit_code = 4


class Preempted(TackboardError):
    """A job was asked to stop, has lost no finished work, and can be run again to continue."""

    exit_code = 75


class LostProcess(TackboardError):
    """Another process of the run ended or does not answer. The work since the last checkpoint is lost."""

    exit_code = 75


def line_of_user_code(error: BaseException) -> str | None:
    """Returns the innermost line of user code in the traceback of `error`, as `file.py:12`; None if there is none."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(USER_MODULE_PREFIX):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 user`, `2 users`, `1,000 users`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def shown_bytes(num_bytes: int) -> str:
    """Returns a size for a message: `1.5 GB`, `2.0 MB` or `3.1 kB`."""
    size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= pair[0]), (1e3, "kB"))
    return f"{num_bytes / size:.1f} {unit}"


def one_line(text: str) -> str:
    """Joins the lines of `text` into one line, so that a message never has more than three lines."""
    return " ".join(text.split())
