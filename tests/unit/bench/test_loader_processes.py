"""CPU time and memory are those of the whole process tree."""

import os
import subprocess
import sys
import time

from tackboard.bench.loader_processes import cpu_seconds, resident_bytes, run_watched, tree_of

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_cpu_time_of_a_child_counts_while_it_lives_and_after() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY + "print(1, flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert child.pid in tree_of(os.getpid())
        alive = cpu_seconds() - before
        child.communicate(b"\n")
    ended = cpu_seconds() - before
    assert alive >= 0.28
    assert ended >= 0.28


def test_memory_of_a_tree_is_seen() -> None:
    child = "import time\nx = bytearray(b'1') * (64 << 20)\ntime.sleep(0.6)\n"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\nprint('done')"
    start = time.monotonic()
    code, output, errors, peak = run_watched([sys.executable, "-c", parent], os.environ, watch=True)
    assert (code, output.strip(), errors) == (0, "done", "")
    assert 64 << 20 < peak < 300 << 20
    assert time.monotonic() - start < 60


def test_a_process_that_is_not_there_or_fails() -> None:
    assert resident_bytes(2**22 + 1) == 0
    assert resident_bytes(os.getpid()) > 1 << 20
    code, _, errors, peak = run_watched([sys.executable, "-c", "raise SystemExit('no')"], os.environ, watch=False)
    assert (code, errors.strip(), peak) == (1, "no", 0)
