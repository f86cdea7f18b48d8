"""Reads the bearer token that guards a server, from a file or from the environment.

The token is never taken from the command line, where every user of the machine could read it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tackboard.core.errors import UsageError

TOKEN_VARIABLE = "TACKBOARD_TOKEN"
MIN_TOKEN_LENGTH = 16


def read_token(token_file: Path | None) -> str | None:
    """Returns the token from a file, or from the environment if no file is given. Raises UsageError for a bad file."""
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"--token-file {token_file} cannot be read", fix="give a text file with the token") from None
    if not token:
        raise UsageError(f"--token-file {token_file} is empty", fix="write the token into the file")
    return token


def check_token(token: str) -> None:
    """Raises UsageError if a token is short enough to be guessed, or cannot be part of a header."""
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"the token ({len(token)} characters) is not long enough, or a header cannot hold one of its characters",
            allowed=f"allowed: {MIN_TOKEN_LENGTH} or more characters, visible ASCII",
            fix="make a token with: python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
