"""Print the SHA-256 of every tensor of a checkpoint, to show that a change of the code changed no number.

    python scripts/tensor_hashes.py RUN > before.json                 at the commit before the change
    python scripts/tensor_hashes.py RUN --against before.json         after the change; exit code 1 if a tensor differs
    python scripts/tensor_hashes.py RUN --against before.json --names NAMES.json

RUN is a run folder or a checkpoint folder. Both runs must have the same settings, machine and number of threads. The
SHA-256 covers type, shape and bytes. `--names` takes a JSON file that maps old names to new names, for a change that
renamed tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

from tackboard.checkpoint.store import find_checkpoint
from tackboard.checkpoint.trained import load_trained, stored_optimizer, stored_tables
from tackboard.models.changed_rows import Stored, whole_tensor


def hashes_of(path: Path) -> dict[str, str]:
    """Returns the digest of every tensor, by group and name."""
    found = {}
    checkpoint = load_trained(find_checkpoint(path), ("dense", "tables", "optimizer"))
    groups: dict[str, dict[str, Stored]] = {
        "dense": dict(checkpoint.tensors["dense"]),
        "tables": stored_tables(checkpoint),
        "optimizer": stored_optimizer(checkpoint),
    }
    for group, tensors in groups.items():
        for name, stored in tensors.items():
            found[f"{group}/{name}"] = digest_of(whole_tensor(stored, checkpoint.path))
    return dict(sorted(found.items()))


def digest_of(tensor: torch.Tensor) -> str:
    """Returns a digest of the type, the shape and the bytes of a tensor."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def differences(before: dict[str, str], after: dict[str, str], names: dict[str, str]) -> list[str]:
    """Says in words what differs between two sets of digests."""
    renamed = {names.get(name, name): digest for name, digest in before.items()}
    words = [f"{name}: only before" for name in renamed.keys() - after.keys()]
    words += [f"{name}: only after" for name in after.keys() - renamed.keys()]
    words += [f"{name}: other bytes" for name in renamed.keys() & after.keys() if renamed[name] != after[name]]
    return sorted(words)


def main(arguments: list[str]) -> int:
    """Prints digests, or compares them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--names", type=Path)
    options = parser.parse_args(arguments)
    found = hashes_of(options.run)
    if options.against is None:
        print(json.dumps(found, indent=1))
        return 0
    names = json.loads(options.names.read_text()) if options.names else {}
    words = differences(json.loads(options.against.read_text()), found, names)
    print("\n".join(words) or f"{len(found)} tensors are equal")
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
