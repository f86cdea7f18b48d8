"""Makes the lock files in requirements/ anew: exact versions, with the SHA-256 of every file that pip may use.

The script reads pyproject.toml, the present lock files, pip's answers and the pages of a package index, and rewrites
the lock files. The head of each file (comments and `-r` lines) is kept.

Decided:
- The locks of core, demo, dev and ray list the packages that pip would install for these groups of pyproject.toml. A
  version in the present files stays unless `--upgrade` names the package. The packages of the other locks are listed by
  hand.
- A package has the hashes of its wheels for Python 3.11 and 3.12 on every platform, and of its source archive. The
  hashes come from the index's own page, so one run on one machine is enough.
- Packages in requirements/torch.txt have no hash, because their builds differ from index to index.
- An index is refused if it lacks a file that the present lock has for the same version. The lock must not lose files.

    .venv/bin/python scripts/lock.py                  # after a change of pyproject.toml
    .venv/bin/python scripts/lock.py --upgrade rich   # the newest version that fits
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
RESOLVED = ("core", "demo", "dev", "ray")
BY_HAND = ("pip", "distributed", "distributed-cpu", "rivals")
WITHOUT_HASHES = REQUIREMENTS / "torch.txt"
PUBLIC_INDEX = "https://pypi.org/simple"
TIMEOUT_S = 60


class LockError(Exception):
    """The lock cannot be made. The message says what failed and what to do."""


class Pin(NamedTuple):
    """One package of a lock file."""

    version: str
    hashes: frozenset[str]


def normalised(name: str) -> str:
    """Returns a package name in the form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, Pin]:
    """Reads the packages of one file, without the packages of files that it includes with `-r`."""
    pins = {}
    for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        first, *rest = line.partition("#")[0].split() or [""]
        name, equals, version = first.partition("==")
        if equals:
            pins[normalised(name)] = Pin(version, frozenset(word.removeprefix("--hash=sha256:") for word in rest))
    return pins


def included(path: Path) -> list[Path]:
    """Returns the file and all files that it includes with `-r`."""
    found = re.findall(r"^-r (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [path, *(file for name in found for file in included(path.parent / name))]


def write_lock(path: Path, pins: dict[str, Pin]) -> None:
    """Replaces the packages of a file; its comments and `-r` lines stay."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("#", "-r "))]
    entries = [
        " \\\n".join([f"{name}=={pin.version}", *(f"    --hash=sha256:{digest}" for digest in sorted(pin.hashes))])
        for name, pin in sorted(pins.items())
    ]
    path.write_text("\n".join([*head, *entries]) + "\n", encoding="utf-8")


def is_usable(file: str) -> bool:
    """Returns whether Python 3.11 or 3.12 could install the file on some platform."""
    if not file.endswith(".whl"):
        return file.endswith((".tar.gz", ".zip"))
    pythons, abi, _platform = file.removesuffix(".whl").split("-")[-3:]
    for tag in pythons.split("."):
        if tag in ("py3", "py311", "py312", "cp311", "cp312"):
            return True
        # A wheel for the stable ABI of an older Python runs on every later Python.
        if "abi3" in abi.split(".") and re.fullmatch(r"cp3\d+", tag) and int(tag[3:]) <= 12:
            return True
    return False


def belongs_to(file: str, name: str, version: str) -> bool:
    """Returns whether the file is this version of this package."""
    if file.endswith(".whl"):
        found, its_version = file.split("-")[:2]
    else:
        found, _, its_version = re.sub(r"\.tar\.gz$|\.zip$", "", file).rpartition("-")
    return normalised(found) == name and its_version == version


def hashes_on(page: str, name: str, version: str) -> frozenset[str]:
    """Returns the SHA-256 of every usable file of one version, from an index's page of the package."""
    found = set()
    for link in re.findall(r"""<a\b[^>]*\bhref=["']([^"']+)""", page):
        path, _, fragment = html.unescape(link).partition("#")
        file = urllib.parse.unquote(path.rsplit("/", 1)[-1])
        kind, _, digest = fragment.partition("=")
        if "-" in file and belongs_to(file, name, version) and is_usable(file) and kind == "sha256":
            found.add(digest)
    return frozenset(found)


def fetch_hashes(index: str, package: tuple[str, str], known: frozenset[str]) -> Pin:
    """Returns the index's hashes for a name and version. `known` holds the hashes in the present lock."""
    name, version = package
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            page = answer.read().decode()
    except OSError as error:
        raise LockError(
            f"{name}: the package index does not answer ({error})\nfix: name another with --index"
        ) from None
    hashes = hashes_on(page, name, version)
    if not hashes or known - hashes:
        what = f"{len(known - hashes)} of the files in the lock" if hashes else "any file with a SHA-256"
        raise LockError(f"{name}=={version}: the index does not offer {what}\nfix: --index {PUBLIC_INDEX}")
    return Pin(version, hashes)


def resolve(requirements: list[str], constraints: dict[str, str]) -> dict[str, str]:
    """Returns the versions that pip would install for these requirements on this machine, by normalised name."""
    with tempfile.TemporaryDirectory() as folder:
        pins, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "-c", str(pins), *requirements]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise LockError(f"pip finds no versions: {done.stderr.strip()}\nfix: --upgrade NAME frees a version")
        items = json.loads(report.read_text())["install"]
    return {normalised(item["metadata"]["name"]): item["metadata"]["version"] for item in items}


def group_requirements(group: str) -> list[str]:
    """Returns the requirements in pyproject.toml: of the core, of the group's extra, and of the package's build."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = content["project"]["optional-dependencies"].get(group, [])
    return [*content["project"]["dependencies"], *extra, *content["build-system"]["requires"]]


def make_locks(index: str, upgrade: set[str]) -> None:
    """Makes every lock file anew."""
    present = {group: read_lock(REQUIREMENTS / f"{group}.txt") for group in (*RESOLVED, *BY_HAND)}
    without_hashes = {name: pin.version for name, pin in read_lock(WITHOUT_HASHES).items()}
    constraints = {name: pin.version for group in RESOLVED for name, pin in present[group].items()}
    for name in upgrade:
        constraints.pop(name, None)
    wanted = {group: {name: pin.version for name, pin in present[group].items()} for group in BY_HAND}
    for group in RESOLVED:
        found = resolve(group_requirements(group), constraints | without_hashes)
        # The versions of this group are pinned for the next group, so that one environment can hold all groups.
        constraints |= found
        taken = {name for path in included(REQUIREMENTS / f"{group}.txt")[1:] for name in wanted[path.stem]}
        wanted[group] = {name: found[name] for name in found.keys() - taken - without_hashes.keys()}
    known = {(name, pin.version): pin.hashes for pins in present.values() for name, pin in pins.items()}
    packages = sorted({package for versions in wanted.values() for package in versions.items()})
    with ThreadPoolExecutor(8) as pool:
        fetched = pool.map(lambda package: fetch_hashes(index, package, known.get(package, frozenset())), packages)
        pins = dict(zip(packages, fetched, strict=True))
    for group, versions in wanted.items():
        write_lock(REQUIREMENTS / f"{group}.txt", {name: pins[name, version] for name, version in versions.items()})
    print(
        f"{len(packages)} packages with {sum(len(pin.hashes) for pin in pins.values())} hashes in {len(wanted)} files"
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the lock files in requirements/ anew.")
    parser.add_argument("--upgrade", nargs="+", default=[], metavar="NAME", help="let these packages get new versions")
    parser.add_argument(
        "--index", default=os.environ.get("PIP_INDEX_URL", PUBLIC_INDEX), help="read the hashes from this index"
    )
    arguments = parser.parse_args()
    try:
        make_locks(arguments.index, {normalised(name) for name in arguments.upgrade})
    except LockError as error:
        print("error: " + str(error).replace("\n", "\n  "), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
