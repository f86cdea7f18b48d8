"""Lists the installed packages, each with its version, licence, entry in the lock, and known vulnerabilities.

The script reads the packages of the Python that runs it, requirements/, and PyPI's JSON pages if they can be reached.
It prints a table. It exits with 1 if a licence is not on the list below, a package of a lock has no hash, or
docs/licences.md is outdated; with `--strict` also if a vulnerability is known. `--write` rewrites docs/licences.md.

Decided:
- A package states its licence in one of three places, read in this order: License-Expression, License, classifiers.
- Every licence in an expression must be on the list, even an alternative after OR, so that a person reads each new
  licence once.
- Without `--strict`, a known vulnerability is not a failure, because it can become known while nothing here changes.
- Without a network the script skips the advisories, says so in capitals, and checks the rest.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lock import BY_HAND, REQUIREMENTS, RESOLVED, ROOT, WITHOUT_HASHES, Pin, normalised, read_lock

ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
    *("CC0-1.0", "ISC", "MIT", "PSF-2.0", "Zlib", "ZPL-2.1"),
    # Changes to files under this licence must be published; using them has no conditions.
    "MPL-2.0",
    # NVIDIA's own terms, for packages that the CUDA build of torch needs; other builds need none of these packages.
    "LicenseRef-NVIDIA-Proprietary",
}
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD",
    "BSD-3": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "MIT licensed, as found in the LICENSE file": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
    "Python Software Foundation License": "PSF-2.0",
}
NOT_STATED = "not stated"
TABLE = ROOT / "docs" / "licences.md"
TABLE_HEAD = """# Licences of what is installed

`.venv/bin/python scripts/audit.py --write` wrote this list, in an environment with the groups dev, ray and distributed.
`make audit` checks that the list is current. `scripts/audit.py` holds the list of allowed licences. Two groups of
packages are left out: those that only the comparisons in `benchmarks/rivals/` need, and the NVIDIA packages that the
CUDA build of torch installs, which are under NVIDIA's own terms.

| package | version | licence, as the package states it |
|---|---|---|
"""
ADVISORIES = "https://pypi.org/pypi"
REQUEST_LIMIT_S = 10
ADVISORY_LIMIT_S = 60


class Package(NamedTuple):
    """One installed package."""

    name: str
    version: str
    licence: str


def licence_of(name: str, expression: str, text: str, classifiers: list[str]) -> str:
    """Returns the licence that a package states, as an SPDX expression if the spelling is known."""
    lines = text.strip().splitlines()
    stated = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: OSI Approved :: ")]
    found = expression or (lines[0] if lines else "")
    if found:
        return SPELLINGS.get(found, found)
    if not stated and normalised(name).startswith(("nvidia-", "cuda-")):
        return "LicenseRef-NVIDIA-Proprietary"
    return " AND ".join(SPELLINGS.get(line, line) for line in stated) or NOT_STATED


def is_allowed(licence: str) -> bool:
    """Returns whether every licence in the expression is on the list."""
    return all(part in ALLOWED for part in re.split(r"\s+(?:AND|OR)\s+", re.sub(r"[()]", "", licence)))


def installed_packages() -> list[Package]:
    """Returns the packages of the Python that runs this script, except tackboard, without local version suffixes."""
    packages = {}
    for found in importlib.metadata.distributions():
        data = found.metadata
        fields = data.json
        name = normalised(str(data["Name"]))
        licence = licence_of(
            name,
            str(fields.get("license_expression", "")),
            str(fields.get("license", "")),
            data.get_all("Classifier") or [],
        )
        packages[name] = Package(name, found.version.partition("+")[0], licence)
    packages.pop("tackboard", None)
    return sorted(packages.values())


def read_locks() -> dict[str, Pin]:
    """Returns every package that .venv can hold, with its hashes. The rivals are in another environment."""
    files = [REQUIREMENTS / f"{name}.txt" for name in (*RESOLVED, *BY_HAND) if name != "rivals"]
    return {name: pin for path in (WITHOUT_HASHES, *files) for name, pin in read_lock(path).items()}


def without_hash() -> list[str]:
    """Returns the packages of the locks that have no hash, as `file: name`."""
    return [
        f"{group}.txt: {name}"
        for group in (*RESOLVED, *BY_HAND)
        for name, pin in read_lock(REQUIREMENTS / f"{group}.txt").items()
        if not pin.hashes
    ]


def lock_word(package: Package, locks: dict[str, Pin]) -> str:
    """Returns how the lock treats an installed package: not locked, hash, or version only."""
    pin = locks.get(package.name)
    if pin is None or pin.version != package.version:
        return "not locked"
    return "hash" if pin.hashes else "version only"


def ask_advisories(package: Package, source: str, deadline: float) -> list[str] | None:
    """Returns the known vulnerabilities of this version, or None if unknown. Raises OSError if there is no answer."""
    # Some indexes have only the second of these pages, which describes the newest version of the package.
    for path in (f"{package.name}/{package.version}", package.name):
        if time.monotonic() > deadline:
            return None
        try:
            with urllib.request.urlopen(f"{source}/{path}/json", timeout=REQUEST_LIMIT_S) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            continue
        if content["info"]["version"] == package.version:
            return [
                f"{found['id']} (fixed in {', '.join(found.get('fixed_in') or ['no version'])})"
                for found in content.get("vulnerabilities", [])
                if not found.get("withdrawn")
            ]
    return None


def report_advisories(packages: list[Package], source: str) -> bool:
    """Prints the advisories; returns whether there is a known vulnerability."""
    deadline = time.monotonic() + ADVISORY_LIMIT_S
    try:
        # One request is sent first. So without a network there is one wait, and not one wait per package.
        ask_advisories(packages[0], source, deadline)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda package: ask_advisories(package, source, deadline), packages))
    except (OSError, ValueError, KeyError) as error:
        print(f"ADVISORIES SKIPPED: {source} gave no answer ({error}). KNOWN VULNERABILITIES WERE NOT LOOKED FOR.")
        return False
    known = [(package, found) for package, found in zip(packages, answers, strict=True) if found]
    unknown = [package.name for package, found in zip(packages, answers, strict=True) if found is None]
    for package, found in known:
        print(f"VULNERABLE: {package.name} {package.version}: {'; '.join(found)}")
    print(f"advisories: {len(packages) - len(unknown)} packages looked up, {len(known)} with a known vulnerability")
    if unknown:
        print(f"ADVISORIES UNKNOWN for {len(unknown)} (no page for the version, or no time left): {', '.join(unknown)}")
    return bool(known)


def table(packages: list[Package]) -> str:
    """Returns the text of docs/licences.md for these packages."""
    return TABLE_HEAD + "".join(f"| {name} | {version} | {licence} |\n" for name, version, licence in packages)


def write_table(packages: list[Package]) -> int:
    """Rewrites docs/licences.md. Returns 2, and writes nothing, if a package of the locks is not installed."""
    wanted = {name: pin.version for name, pin in read_locks().items() if pin.hashes} | {"torch": ""}
    listed = [package for package in packages if package.name in wanted]
    missing = wanted.keys() - {package.name for package in listed}
    if missing:
        fix = "make install GROUP=dev, make install GROUP=ray, make distributed"
        print(f"error: not installed: {', '.join(sorted(missing))}\n  fix: {fix}", file=sys.stderr)
        return 2
    TABLE.write_text(table(listed), encoding="utf-8")
    return 0


def outdated_rows(packages: list[Package]) -> list[str]:
    """Returns the installed packages that are locked with a hash and have a wrong or no row in docs/licences.md."""
    rows = TABLE.read_text(encoding="utf-8").splitlines()
    locks = read_locks()
    locked = [package for package in packages if lock_word(package, locks) == "hash"]
    return [name for name, version, licence in locked if f"| {name} | {version} | {licence} |" not in rows]


def audit(source: str, *, strict: bool) -> int:
    """Prints the table and the errors; returns the exit code."""
    packages, locks = installed_packages(), read_locks()
    widths = [max(len(package[column]) for package in packages) for column in range(2)]
    for package in packages:
        mark = "" if is_allowed(package.licence) else "   <- NOT ON THE LIST"
        word = lock_word(package, locks)
        print(f"{package.name:{widths[0]}}  {package.version:{widths[1]}}  {word:12}  {package.licence}{mark}")
    refused = [package.name for package in packages if not is_allowed(package.licence)]
    bare, outdated = without_hash(), outdated_rows(packages)
    print(f"{len(packages)} packages installed, {len(refused)} with a licence that is not on the list")
    print(f"locks: {len(bare)} packages without a hash")
    vulnerable = report_advisories(packages, source)
    for what, names, fix in (
        ("licence not on the list", refused, "replace the package, or add the licence to ALLOWED in scripts/audit.py"),
        ("no hash in the lock", bare, "run scripts/lock.py"),
        ("docs/licences.md is outdated", outdated, "run scripts/audit.py --write"),
    ):
        if names:
            print(f"error: {what}: {', '.join(names)}\n  fix: {fix}", file=sys.stderr)
    return int(bool(refused or bare or outdated or (strict and vulnerable)))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="List installed packages, their licences and known vulnerabilities.")
    parser.add_argument("--strict", action="store_true", help="also exit with 1 if a vulnerability is known")
    parser.add_argument("--write", action="store_true", help="rewrite docs/licences.md, and do nothing else")
    parser.add_argument("--advisories", default=ADVISORIES, metavar="URL", help="read PyPI's JSON pages from this URL")
    arguments = parser.parse_args()
    if arguments.write:
        return write_table(installed_packages())
    return audit(arguments.advisories.rstrip("/"), strict=arguments.strict)


if __name__ == "__main__":
    raise SystemExit(main())
