"""Makes `.venv` in this checkout and installs one group of packages into it.

The script takes the name of the group (core, demo, dev, distributed, ray), and reads the group's lock in requirements/
and pip's configuration. It makes a working `.venv` with the package in editable mode, and writes a stamp. If nothing
has changed, the next run finds the stamp and returns at once.

Decided:
- This script uses only the standard library, and only syntax that Python 3.6 can parse, so that an old Python prints a
  message instead of a syntax error.
- Every package comes from the lock of its group, with `--require-hashes` and `--no-deps`: the lock is complete, and a
  file with another hash is refused. torch and the packages of its builds (requirements/torch.txt) are installed
  separately and without hashes, because each index has its own file of the same version.
- Pins carry no local suffix. pip is asked beforehand which torch build it would install (`--dry-run --report`), so that
  a machine without a GPU never downloads gigabytes of CUDA unannounced. For such a machine, the script looks for a CPU
  build in the configured index or wheel folder, then in PyTorch's public CPU index. If neither has a CPU build, the
  CUDA build is installed, with a warning.
- A marker is written first. At the end the stamp is written and the marker is removed. A run that finds a marker knows
  that an earlier run did not finish: it compares the size of every file with its record and replaces damaged packages.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".tackboard-stamp.json")
MARKER = os.path.join(VENV, ".tackboard-installing")
LOG = os.path.join(VENV, "install.log")
SUPPORTED = ((3, 11), (3, 12))
GROUPS = ("core", "demo", "dev", "distributed", "ray")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
EXIT_USAGE = 2

UNREACHABLE = re.compile(
    r"NewConnectionError|Connection refused|Connection reset|Max retries|Temporary failure in name resolution"
    r"|Name or service not known|ProxyError|ConnectTimeout|ReadTimeout|SSLError|CERTIFICATE_VERIFY_FAILED"
    r"|Could not fetch URL|Network is unreachable|connection broken|HTTP error|Cannot connect",
    re.IGNORECASE,
)


class InstallError(Exception):
    """The installation cannot go on. The message is at most three lines: what failed, what is needed, what to do."""


class TorchChoice(NamedTuple):
    """The torch that pip would install for a pin, as pip's report says."""

    version: str
    build: str  # "cpu" or "cuda"
    source: str  # where it comes from, in words
    index_url: Optional[str]  # set when it must be fetched from an index that is not configured


# ---- pure functions, which the unit tests call with made-up reports ----


def unsupported_python(version: Tuple[int, ...], executable: str, command: str, found: Optional[str]) -> Optional[str]:
    """Returns a message if a Python cannot run this project, else None. `found` is a better Python on the PATH."""
    if tuple(version[:2]) in SUPPORTED:
        return None
    given = ".".join(str(part) for part in version[:3])
    fix = "fix: {} PYTHON={}".format(command, found or "python3.12")
    if not found:
        fix = "fix: install Python 3.12, then {} PYTHON=python3.12".format(command)
    return "Python {} ({}) cannot run tackboard\nallowed: Python 3.11 or 3.12\n{}".format(given, executable, fix)


def applies_here(requirement: str, system: str, machine: str) -> bool:
    """Returns whether a requirement's marker applies to this platform. Conditions other than `==` count as true."""
    marker = requirement.partition(";")[2]
    if "extra ==" in marker:
        return False
    facts = {"platform_system": system, "sys_platform": system.lower(), "platform_machine": machine}
    for name, wanted in re.findall(r"(\w+)\s*==\s*[\"']([^\"']+)[\"']", marker):
        if name in facts and facts[name] != wanted:
            return False
    return True


def torch_build(version: str, requires: Sequence[str], system: str = "Linux", machine: str = "x86_64") -> str:
    """Returns "cpu" or "cuda", by the version's local part (`+cpu`) or, if it has none, by the wheel's requirements."""
    local = version.partition("+")[2].lower()
    if local:
        return "cpu" if local.startswith("cpu") else "cuda"
    names = [
        re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in requires if applies_here(line, system, machine)
    ]
    return "cuda" if any(name.startswith(("nvidia", "cuda", "triton", "pytorch-triton")) for name in names) else "cpu"


def read_torch_report(report: Dict[str, Any], index_url: Optional[str] = None) -> Optional[TorchChoice]:
    """Returns what pip's installation report says about torch, or None if torch is not in the report."""
    for item in report.get("install", ()):
        metadata = item["metadata"]
        if metadata["name"].lower() != "torch":
            continue
        url = item.get("download_info", {}).get("url", "")
        build = torch_build(
            metadata["version"], metadata.get("requires_dist") or (), platform.system(), platform.machine()
        )
        return TorchChoice(metadata["version"], build, describe_source(url, index_url), index_url)
    return None


def describe_source(url: str, index_url: Optional[str]) -> str:
    """Says in words where a wheel comes from, without credentials."""
    if index_url:
        return "PyTorch's CPU index " + without_credentials(index_url)
    if url.startswith("file:"):
        return "the configured wheel folder " + os.path.dirname(url[len("file://") :])
    host = re.match(r"https?://([^/]+)/", without_credentials(url))
    return "the configured index" + (" ({})".format(host.group(1)) if host else "")


def without_credentials(url: str) -> str:
    """Returns the URL without user name and password."""
    return re.sub(r"//[^/@]+@", "//", url)


def choose_torch(
    configured: Optional[TorchChoice], public_cpu: Optional[TorchChoice], *, has_driver: bool, wanted: str = ""
) -> Optional[TorchChoice]:
    """Returns the build to install. `wanted` ("cpu", "cuda" or "") is the user's choice and beats the driver check."""
    prefer_cpu = wanted == "cpu" or (wanted != "cuda" and not has_driver)
    if not prefer_cpu:
        return configured
    for choice in (configured, public_cpu):
        if choice is not None and choice.build == "cpu":
            return choice
    return configured


def read_pins(text: str) -> Dict[str, str]:
    """Reads the `name==version` lines of a lock or constraint file; names are normalised."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {normalised(name): version.split()[0] for name, version in pairs}


def normalised(name: str) -> str:
    """Returns a package name in the form in which pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def torch_problem(installed: Sequence[str], pinned: str) -> Optional[str]:
    """Says what is wrong with the installed torch versions. Returns None if exactly the pinned version is there."""
    if len(installed) != 1:
        return "{} installations of torch found in .venv ({})".format(len(installed), ", ".join(installed) or "none")
    if installed[0].partition("+")[0] != pinned:
        return "torch {} is installed, {} is pinned".format(installed[0], pinned)
    return None


def explain_failure(stage: str, output: str, index: str) -> str:
    """Explains a failure of pip in at most three lines: what failed, the reason if pip gives one, what to do."""
    what = "{} failed".format(stage)
    if UNREACHABLE.search(output):
        why = "the package index {} cannot be reached".format(index)
        return (
            "{}: {}\nneeded: a package index or a folder of wheels\nfix: set PIP_INDEX_URL to an index you can reach, "
            "HTTPS_PROXY to your proxy, or PIP_FIND_LINKS to a wheel folder (with PIP_NO_INDEX=1), and run again"
        ).format(what, why)
    if "DO NOT MATCH THE HASHES" in output:
        found = re.search(r"^ +(.+? from .+?)(?:#\S*?)?(?: \(from -r .*)?:$", output, re.MULTILINE)
        file = without_credentials(found.group(1)) if found else "a file"
        return (
            "{}: {} is refused: its hash is none of those in requirements/\nneeded: the file that PyPI offers; this "
            "one is damaged, was built anew by your index, or has been tampered with\nfix: .venv/bin/pip cache purge, "
            "set PIP_INDEX_URL to an index that hands on PyPI's files unchanged, and run again"
        ).format(what, file)
    errors = [line[len("ERROR:") :].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    if "No space left" in output:
        errors = ["no space left on the disk"]
    reason = errors[-1] if errors else (output.strip().splitlines() or ["pip gave no reason"])[-1]
    if "No matching distribution" in output:
        return (
            "{}: {} (index: {})\nfix: set PIP_INDEX_URL or PIP_FIND_LINKS to a place that has it, and run again".format(
                what, reason, index
            )
        )
    return "{}: {}\nfix: see .venv/install.log; running the same command again repairs what is half done".format(
        what, reason
    )


# ---- functions that read or change the machine ----


def say(line: str) -> None:
    """Prints one line to the user, without buffering."""
    print(line, flush=True)


def read_text(path: str) -> str:
    """Returns the text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def requirement_file(name: str) -> str:
    """Returns the path of a file in requirements/: the lock of a group, or `torch`, which has no hashes."""
    return os.path.join(ROOT, "requirements", name + ".txt")


def group_hash(group: str) -> str:
    """Returns a hash of everything that decides what this group installs."""
    digest = hashlib.sha256()
    requirements = os.path.join(ROOT, "requirements")
    files = [os.path.join(requirements, name) for name in sorted(os.listdir(requirements))]
    for path in [*files, os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__)]:
        digest.update(read_text(path).encode() + b"\0")
    for word in (group, ROOT, venv_version(), os.environ.get("TACKBOARD_TORCH", "")):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()


def venv_version() -> str:
    """Returns the Python version of `.venv` from its pyvenv.cfg; empty if there is no usable environment."""
    if not os.path.exists(VENV_PYTHON):
        return ""
    try:
        found = re.search(
            r"^version(?:_info)?\s*=\s*([\d.]+)", read_text(os.path.join(VENV, "pyvenv.cfg")), re.MULTILINE
        )
    except OSError:
        return ""
    return found.group(1) if found else ""


def venv_is_supported() -> bool:
    """Returns whether `.venv` exists and its Python can run this project."""
    return tuple(int(part) for part in venv_version().split(".")[:2] if part) in SUPPORTED


def site_packages() -> str:
    """Returns the folder of `.venv` that packages are installed into."""
    return os.path.join(VENV, "lib", "python" + ".".join(venv_version().split(".")[:2]), "site-packages")


def installed_records() -> List[str]:
    """Returns the names of all package records in `.venv`, for example `numpy-2.4.6.dist-info`."""
    try:
        return sorted(name for name in os.listdir(site_packages()) if name.endswith(".dist-info"))
    except OSError:
        return []


def read_stamp() -> Dict[str, Any]:
    """Returns the stamp of earlier runs; empty if there is none or it cannot be read."""
    try:
        stamp = json.loads(read_text(STAMP))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_up_to_date(group: str) -> bool:
    """Returns whether the last finished run installed what the group needs now, and nothing was removed since."""
    entry = read_stamp().get("groups", {}).get(group)
    if not entry or os.path.exists(MARKER) or not os.path.exists(os.path.join(VENV, "bin", "tackboard")):
        return False
    return bool(entry["hash"] == group_hash(group)) and set(entry["records"]) <= set(installed_records())


def has_nvidia_driver() -> bool:
    """Returns whether an NVIDIA driver is loaded on this machine."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")


def clean_environment() -> Dict[str, str]:
    """Returns the user's environment variables for pip, except variables that would send packages elsewhere."""
    environment = dict(os.environ)
    for name in (
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_REQUIRE_VIRTUALENV",
        "PYTHONHOME",
        "PYTHONPATH",
        "PIP_DRY_RUN",
    ):
        environment.pop(name, None)
    environment["PIP_USER"] = "0"
    # If an index does not answer, the error should come within seconds, not after pip's five retries.
    environment.setdefault("PIP_RETRIES", "2")
    return environment


def run_pip(arguments: Sequence[str], *, show: bool = False) -> Tuple[int, str]:
    """Runs pip in `.venv`; returns its exit code and its output. With `show` a terminal sees pip's progress."""
    command = [VENV_PYTHON, *list(PIP), *list(arguments)]
    shown = show and sys.stdout.isatty()
    if not shown:
        command.append("--quiet")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    output = (done.stdout or "") + (done.stderr or "")
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(
            "$ pip {}\n{}".format(
                " ".join(without_credentials(word) for word in arguments), without_credentials(output)
            )
        )
    return done.returncode, output


def must_pip(stage: str, arguments: Sequence[str], *, show: bool = False) -> None:
    """Runs pip and raises InstallError with an explanation if it fails."""
    code, output = run_pip(arguments, show=show)
    if code != 0:
        raise InstallError(explain_failure(stage, output, configured_index()))


def locked(name: str) -> List[str]:
    """Returns the arguments with which pip installs exactly the files that a lock names."""
    return ["install", "--require-hashes", "--no-deps", "-r", requirement_file(name)]


def configured_index() -> str:
    """Returns the URL of the index that pip uses, without credentials, to show it in messages."""
    if os.environ.get("PIP_NO_INDEX"):
        return "(none: PIP_NO_INDEX is set)"
    url = os.environ.get("PIP_INDEX_URL", "")
    if not url:
        code, output = run_pip(["config", "get", "global.index-url"])
        url = output.strip() if code == 0 else ""
    return without_credentials(url or "https://pypi.org/simple")


def ask_torch(pin: str, index_url: Optional[str] = None) -> Tuple[Optional[TorchChoice], str]:
    """Returns which torch pip would install, and pip's output. By default, pip searches the configured places."""
    report_path = os.path.join(VENV, "torch-report.json")
    arguments = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--report", report_path, "torch==" + pin]
    if index_url:
        arguments += ["--index-url", index_url, "--retries", "0", "--timeout", "15"]
    code, output = run_pip(arguments)
    if code != 0:
        return None, output
    choice = read_torch_report(json.loads(read_text(report_path)), index_url)
    os.remove(report_path)
    return choice, output


def find_python() -> Optional[str]:
    """Finds a supported Python on the PATH that really runs, if there is one."""
    for name in ("python3.12", "python3.11"):
        path = shutil.which(name)
        if path is None:
            continue
        # A shim (a small program that starts a chosen Python) may have the right name and still refuse to run.
        if exits_well([path, "-c", "import ensurepip"]):
            return name
    return None


def require_python(command: str) -> None:
    """Raises InstallError if neither `.venv` nor the running Python can be used."""
    # An environment made earlier with PYTHON=python3.12 stays usable if `python3` itself is too old.
    if venv_is_supported():
        return
    if tuple(sys.version_info[:2]) not in SUPPORTED:
        message = unsupported_python(tuple(sys.version_info[:3]), sys.executable, command, find_python())
        raise InstallError(message or "")


def ensure_venv() -> None:
    """Makes `.venv`, or makes it anew if it was moved here from another folder or cannot run pip."""
    stamp = read_stamp()
    moved = bool(stamp) and stamp.get("root") != ROOT
    if venv_is_supported() and not moved and exits_well([VENV_PYTHON, *PIP, "--version"]):
        return
    say("making .venv with Python {}.{}.{}".format(*sys.version_info[:3]))
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if done.returncode != 0:
        reason = " ".join(done.stdout.split())[-200:]
        raise InstallError(
            "making .venv failed: {}\nfix: install Python's venv module (on Debian and Ubuntu: apt install "
            "python{}.{}-venv), and run again".format(reason, *sys.version_info[:2])
        )


def exits_well(command: Sequence[str]) -> bool:
    """Returns whether a command exits with 0. Its output is dropped."""
    return subprocess.run(list(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def ensure_pip() -> None:
    """Brings pip to the pinned version, which reads a wheel's metadata without downloading the wheel."""
    pinned = read_pins(read_text(requirement_file("pip")))["pip"]
    if any(name.startswith("pip-" + pinned + ".") for name in installed_records()):
        return
    code, output = run_pip(locked("pip"))
    if code == 0:
        return
    if UNREACHABLE.search(output) or "No matching distribution" not in output:
        raise InstallError(explain_failure("updating pip", output, configured_index()))
    say("note: pip {} is not offered here; continuing with the pip that came with Python".format(pinned))


def installed_torch() -> List[str]:
    """Returns the versions of all torch records in `.venv`."""
    return [name[len("torch-") : -len(".dist-info")] for name in installed_records() if re.match(r"torch-\d", name)]


def installed_build() -> str:
    """Returns the build of the installed torch, "cpu" or "cuda"."""
    code = "import importlib.metadata as m, json; print(json.dumps([m.version('torch'), m.requires('torch') or []]))"
    version, requires = json.loads(subprocess.check_output([VENV_PYTHON, "-I", "-c", code], universal_newlines=True))
    return torch_build(version, requires, platform.system(), platform.machine())


def ensure_torch(pin: str) -> str:
    """Installs the torch build that suits this machine unless the pinned version is there; returns the build."""
    wanted = os.environ.get("TACKBOARD_TORCH", "")
    if wanted not in ("", "cpu", "cuda"):
        raise InstallError(
            "TACKBOARD_TORCH={}\nallowed: cpu, cuda, or unset to let the installer choose".format(wanted)
        )
    if torch_problem(installed_torch(), pin) is None:
        build = installed_build()
        if wanted in ("", build):
            return build
        # pip would see the same version and would not replace the build.
        must_pip("removing the {} build of torch".format(build.upper()), ["uninstall", "--yes", "torch"])
    has_driver = has_nvidia_driver()
    configured, output = ask_torch(pin)
    public_cpu = None
    if wanted != "cuda" and not (has_driver and not wanted) and (configured is None or configured.build != "cpu"):
        public_cpu, _ = ask_torch(pin, CPU_INDEX)
    choice = choose_torch(configured, public_cpu, has_driver=has_driver, wanted=wanted)
    if choice is None:
        raise InstallError(explain_failure("finding torch " + pin, output, configured_index()))
    driver = "an NVIDIA driver is loaded" if has_driver else "no NVIDIA driver"
    say("torch {}: {} build from {} ({})".format(choice.version, choice.build.upper(), choice.source, driver))
    if choice.build == "cuda" and not has_driver:
        say(
            "warning: no CPU build was found, so this machine without a GPU gets the CUDA build: a wheel of about "
            "0.5 GB, about 15 more packages, several GB installed. To avoid it, stop now (Ctrl-C) and set "
            "PIP_FIND_LINKS to a folder with a CPU wheel, or PIP_EXTRA_INDEX_URL to " + CPU_INDEX
        )
    # This installs only torch itself. Its requirements are in the locks or, for CUDA, are fetched afterwards from the
    # configured places.
    arguments = ["install", "--no-deps", "torch==" + pin]
    if choice.index_url:
        arguments += ["--index-url", choice.index_url]
    must_pip("installing torch " + pin, arguments, show=True)
    return choice.build


def damaged_packages() -> List[str]:
    """Returns the names of all installed packages with a file that is missing or has another size than recorded."""
    code = (
        "import importlib.metadata as m, os\n"
        "for d in m.distributions():\n"
        "    files = d.files\n"
        "    if files is None or any(f.size is not None and (not os.path.exists(p := d.locate_file(f))\n"
        "                            or os.path.getsize(p) != f.size) for f in files):\n"
        "        print(d.metadata['Name'])\n"
    )
    output = subprocess.check_output([VENV_PYTHON, "-I", "-c", code], universal_newlines=True)
    return [name for name in output.split() if normalised(name) != "tackboard"]


def repair_interrupted() -> None:
    """Removes packages that an unfinished run damaged. The next run that needs such a package installs it again."""
    for name in installed_records():
        if not os.path.exists(os.path.join(site_packages(), name, "RECORD")):
            # pip writes RECORD last, and refuses to remove or replace a package without a RECORD.
            shutil.rmtree(os.path.join(site_packages(), name))
    damaged = damaged_packages()
    if damaged:
        say("an earlier install did not finish; installing {} again".format(", ".join(damaged)))
    if "pip" in damaged:
        must_pip("repairing pip", [*locked("pip"), "--force-reinstall"])
    removed = [name for name in damaged if name != "pip"]
    if removed:
        must_pip("removing " + ", ".join(removed), ["uninstall", "--yes", *removed])


def install_packages(group: str, build: str, torch_pin: str) -> None:
    """Installs everything but torch itself."""
    stage = "installing the {} packages".format(group)
    must_pip(stage, locked("core" if group == "distributed" else group), show=True)
    if build == "cuda":
        must_pip(
            "installing what the CUDA build of torch requires",
            ["install", "-c", requirement_file("torch"), "torch==" + torch_pin],
            show=True,
        )
    if group == "distributed":
        # One of these packages comes as source only. It is built with the setuptools of the lock, not with another
        # version.
        name = "distributed-cpu" if build == "cpu" else "distributed"
        must_pip("installing TorchRec", [*locked(name), "--no-build-isolation"], show=True)
    if group == "dev" and build == "cpu" and platform.system() == "Linux":
        must_pip("installing Triton", ["install", "--no-deps", "-c", requirement_file("torch"), "triton"], show=True)
    if group == "distributed" and build == "cuda":
        arguments = ["install", "--no-deps", "-c", requirement_file("torch"), "fbgemm-gpu"]
        must_pip("installing FBGEMM", arguments, show=True)


def verify_torch(pin: str) -> None:
    """Raises InstallError unless exactly the pinned torch is installed and can be imported."""
    problem = torch_problem(installed_torch(), pin)
    if problem:
        raise InstallError("{}\nneeded: exactly one torch, {}\nfix: rm -rf .venv, and run again".format(problem, pin))
    done = subprocess.run([VENV_PYTHON, "-I", "-c", "import torch"], stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InstallError(
            "torch is installed but cannot be imported: {}\nfix: rm -rf .venv, and run again".format(reason)
        )


def write_stamp(group: str, build: str) -> None:
    """Records that the group is installed. This is the last action of a run."""
    stamp = read_stamp()
    groups = stamp.get("groups", {})
    groups[group] = {"hash": group_hash(group), "records": installed_records()}
    content = {"root": ROOT, "build": build, "groups": groups}
    with open(STAMP + ".tmp", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(STAMP + ".tmp", STAMP)
    if os.path.exists(MARKER):
        os.remove(MARKER)


def install(group: str, command: str) -> None:
    """Installs a group. Raises InstallError with a message for the user."""
    require_python(command)
    if is_up_to_date(group):
        return
    if tuple(sys.version_info[:2]) not in SUPPORTED:
        # The code below needs a modern Python, and the environment has one.
        os.execv(VENV_PYTHON, [VENV_PYTHON, os.path.abspath(__file__), *sys.argv[1:]])
    interrupted = os.path.exists(MARKER)
    ensure_venv()
    with open(MARKER, "w", encoding="utf-8"):
        pass
    torch_pin = read_pins(read_text(requirement_file("torch")))["torch"]
    ensure_pip()
    if interrupted:
        repair_interrupted()
    build = ensure_torch(torch_pin)
    say("installing the {} packages into .venv".format(group))
    install_packages(group, build, torch_pin)
    must_pip("installing tackboard itself", ["install", "--no-build-isolation", "--no-deps", "-e", ROOT])
    verify_torch(torch_pin)
    write_stamp(group, build)
    say(".venv is ready ({})".format(group))


def fail(message: str) -> NoReturn:
    """Prints an error and exits with the exit code of wrong usage."""
    print("error: " + message.replace("\n", "\n  "), file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make .venv and install one group of packages into it.")
    parser.add_argument("group", nargs="?", default="core", choices=GROUPS)
    parser.add_argument("--command", default="make install", help="name this command in messages, as the user typed it")
    arguments = parser.parse_args()
    try:
        install(arguments.group, arguments.command)
    except InstallError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        fail("{}\nfix: make this folder writable, or free space on the disk, and run again".format(error))


if __name__ == "__main__":
    main()
