"""Lets several processes write one checkpoint together: each process writes the rows that it holds as a part.

    checkpoints/.step-00000200.parts-TOKEN/r00003/   tables-r00003.safetensors · optimizer-r00003.safetensors
                                                     MANIFEST.json, renamed into place last: the part is complete

The process of rank 0 writes into the temporary folder of the checkpoint. It waits until all other processes have
completed their parts, moves the files of the parts into the temporary folder, and compares their hashes with those of
the parts' manifests. One rename completes the checkpoint, as if one process had written it. Then the folder of parts is
removed, which tells the other processes that the checkpoint is complete.

Decided: the processes coordinate their writing through files and not over the network, because a second thread writes
the checkpoint while the main thread trains and uses the network. All processes know the TOKEN of this save, so the
parts that a killed run has left are never taken. Every wait has a time limit; the error names the process for which
this process has waited.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tackboard.core.errors import StorageError
from tackboard.core.files import reach, remove_directory
from tackboard.core.manifest import MANIFEST, read_manifest, write_manifest

KIND = "checkpoint part"
POLL_S = 0.02
"""Seconds between two looks at the folder of parts."""
_PART = re.compile(r"(.+)-r(\d{5})")


def part_name(group: str, rank: int) -> str:
    """Returns the name of the group of tensors that the process of this rank writes: `tables-r00003`."""
    return f"{group}-r{rank:05d}"


def group_of(name: str) -> tuple[str, int | None]:
    """Does the inverse of `part_name`. The rank is None if the group is not a part."""
    found = _PART.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSave:
    """One attempt of several processes to write one checkpoint."""

    folder: Path
    """The folder of the run's checkpoints, which all processes see."""
    step: int
    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""
    token: str
    """Names this attempt. It is the same in all processes and never used again."""
    timeout_s: float
    """Seconds after which a process that waits for another process gives up."""
    lost: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when a process is known to be lost. Then every wait ends."""

    @property
    def place(self) -> Path:
        """The folder of parts."""
        return self.folder / f".step-{self.step:08d}.parts-{self.token}"

    def part(self, rank: int) -> Path:
        """Returns the folder of the part of one process."""
        return self.place / f"r{rank:05d}"

    def seal_part(self, names: list[str]) -> None:
        """Completes the part of this process, which has written files with these names into its folder."""
        own = self.part(self.rank)
        reach(f"{own.name}:before-seal")
        write_manifest(own, KIND, self._marks(self.rank), meant=names)
        reach(f"{own.name}:after-seal")

    def wait_for_parts(self) -> dict[int, dict[str, str]]:
        """Waits until all other processes have completed their parts. Returns rank → name of a file → its SHA-256.

        If waiting takes too long, raises a StorageError that names a process whose part is missing.
        """
        deadline = time.monotonic() + self.timeout_s
        hashes: dict[int, dict[str, str]] = {}
        for rank in range(1, self.size):
            part = self.part(rank)
            if not self._wait(lambda part=part: (part / MANIFEST).is_file(), deadline):  # type: ignore[misc]
                raise StorageError(
                    f"the checkpoint of step {self.step} is not complete: rank {rank} of {self.size} has not written "
                    f"its part {self._waited(self.timeout_s)}",
                    allowed="the checkpoints before it are intact; all ranks must see the folder of the run",
                    fix=f"look for an error of rank {rank}, or raise parallel.timeout_s",
                )
            manifest = read_manifest(part)
            if {key: manifest.get(key) for key in self._marks(rank)} != self._marks(rank):
                raise StorageError(f"{part} is the part of another checkpoint", fix="remove it")
            hashes[rank] = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        return hashes

    def move_parts(self, target: Path) -> dict[str, str]:
        """Waits for all parts and moves their files into `target`. Returns the SHA-256 of each file, by name."""
        parts = self.wait_for_parts()
        for rank, hashes in parts.items():
            for name in hashes:
                reach(f"{name}:before-move")
                os.replace(self.part(rank) / name, target / name)
                reach(f"{name}:after-move")
        return {name: digest for hashes in parts.values() for name, digest in hashes.items()}

    def release(self) -> None:
        """Removes the folder of parts after the checkpoint is complete."""
        remove_directory(self.place)

    def wait_for_checkpoint(self, final: Path) -> None:
        """Waits until the process of rank 0 has called `release`. Raises StorageError if it takes too long."""
        # Rank 0 may wait for the slowest part for timeout_s, and then moves and hashes all parts.
        deadline = time.monotonic() + 2 * self.timeout_s
        if not self._wait(lambda: not self.place.exists(), deadline) or not (final / MANIFEST).is_file():
            raise StorageError(
                f"the checkpoint of step {self.step} is not complete: rank 0 of {self.size} has not put it together "
                f"{self._waited(2 * self.timeout_s)}",
                allowed="the checkpoints before it are intact; all ranks must see the folder of the run",
                fix="look for an error of rank 0, or raise parallel.timeout_s",
            )

    def _marks(self, rank: int) -> dict[str, Any]:
        return {"step": self.step, "rank": rank, "size": self.size, "token": self.token}

    def _waited(self, seconds: float) -> str:
        return "before a process was lost" if self.lost.is_set() else f"within {seconds:g} s"

    def _wait(self, is_done: Callable[[], bool], deadline: float) -> bool:
        while not is_done():
            if time.monotonic() >= deadline or self.lost.is_set():
                return False
            time.sleep(POLL_S)
        return True
