"""Records the Python files that this user has trained with. `evaluate` and `export` may run recorded files.

    ${XDG_STATE_HOME:-~/.local/state}/tackboard/trusted-code/<hash of path and SHA-256>.json

A run names the Python file of its model. But a run may come from anybody, so the name alone does not make the file
safe. Therefore `train` records the file's path and SHA-256 in the folder above. Decided: each entry is a small file, so
that concurrent trainings cannot lose an entry. Folders have mode 0700 and files 0600. A folder or file is refused if
another user owns it or may write to it. If the record cannot be written, training continues with a warning.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path

from tackboard.core.errors import StorageError, UsageError
from tackboard.core.files import write_json_atomic
from tackboard.core.progress import say


def trust_code(path: Path, sha256: str) -> None:
    """Records that this user has trained with a file. Prints a warning if the record cannot be written."""
    try:
        folder = _folder()
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(os.lstat(part), part)
        entry = folder / _name(path, sha256)
        write_json_atomic(entry, _content(path, sha256))
        entry.chmod(0o600)
    except (OSError, StorageError) as error:
        reason = error.got if isinstance(error, StorageError) else f"{error.strerror}: {error.filename}"
        say(f"warning: no record of {path} could be kept ({reason}); evaluate and export will need --code {path}")


def check_trusted(path: Path, sha256: str) -> None:
    """Raises UsageError unless `trust_code` recorded this file for this user.

    If another user owns the record or may write to it, StorageError is raised.
    """
    refusal = UsageError(
        f"this run names {path} as its model's code, but you have no record of training with its present content",
        allowed="allowed: a file that you name with --code, or that your `tackboard train` has recorded",
        fix=f"if you trust that file, name it: --code {path}",
    )
    try:
        folder = _folder()
        for part in (folder.parent, folder):
            _check_own(os.lstat(part), part)
        entry = folder / _name(path, sha256)
        with open(os.open(entry, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            _check_own(os.fstat(file.fileno()), entry)
            recorded = json.load(file)
    except (OSError, ValueError):
        raise refusal from None
    if recorded != _content(path, sha256):
        raise refusal


def _folder() -> Path:
    state, home = os.environ.get("XDG_STATE_HOME", ""), os.environ.get("HOME", "")
    root = Path(state) if os.path.isabs(state) else Path(home, ".local", "state")
    if not root.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "neither XDG_STATE_HOME nor HOME names a folder", "$HOME")
    return root / "tackboard" / "trusted-code"


def _content(path: Path, sha256: str) -> dict[str, str]:
    return {"code_file": str(path), "code_sha256": sha256}


def _name(path: Path, sha256: str) -> str:
    return hashlib.sha256(json.dumps(_content(path, sha256)).encode()).hexdigest() + ".json"


def _check_own(status: os.stat_result, path: Path) -> None:
    plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    if not plain or status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError(
            f"{path} is a link, is owned by somebody else, or others may write to it",
            allowed="allowed: a record that you own and that nobody else may write to",
            fix="remove it and train again, or name the model's file with --code",
        )
