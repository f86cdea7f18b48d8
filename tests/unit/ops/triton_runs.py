"""Runs Triton kernels in tests: interpreted on the CPU, compiled on a GPU, and compiled ahead of time without a GPU.

Triton decides at its own import whether `@triton.jit` interprets or compiles (TRITON_INTERPRET=1). So one process can
do only one of the two. The pytest process compiles; a child process interprets. A kernel has two test files:

    <op>_cases.py         ordinary tests that take the fixture `device`. pytest collects this file only in the child.
    test_<op>_triton.py   three tests: `run_cases(file)` in the interpreter, `run_cases(file, "cuda")` marked `gpu`, and
                          `compile_ahead(kernel, signature, constants)`, which needs neither a GPU nor the interpreter.

The interpreter computes `tl.dot` of bf16 wrongly and says nothing. In the child, such a product raises an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parents[2] / "src"
TARGETS = (80, 90)
"""Compute capabilities that kernels are compiled for: sm_80 (A100) and sm_90 (H100, H200)."""
LIMIT_S = {"cpu": 300, "cuda": 900}
"""Seconds for all cases of a file: on a CPU ten times what they need alone, on a GPU mostly compilation."""


def run_cases(name: str, device: str = "cpu", *options: str) -> str:
    """Runs the tests of the file `name` of this folder in a child process; returns what pytest printed.

    On `cpu` kernels are interpreted, on `cuda` they are compiled. Fails with the child's output if a test fails, and if
    a test is skipped. `options` go to pytest, such as `-k name`.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-p", "no:xdist"]
    command += ["-p", "triton_runs", "--durations=3", *options, name]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(FOLDER))), "TACKBOARD_TEST_DEVICE": device}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    done = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=LIMIT_S[device], check=False
    )
    if done.returncode or "skipped" in done.stdout:
        pytest.fail(f"{name} on {device}:\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout


def compile_ahead(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], num_warps: int = 4) -> None:
    """Compiles a kernel for all TARGETS. `signature` gives the types of arguments ("*fp32", "i64"), in their order.

    Pointers are aligned to 16 bytes, as tensors of torch are: Triton then chooses other layouts, and may fail there.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(signature) | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, type_ in enumerate(types.values()) if type_.startswith("*")}
    for capability in TARGETS:
        source = ASTSource(fn=kernel, signature=types, constexprs=dict(constants), attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]


@pytest.fixture
def device() -> str:
    """`cpu` in the interpreter, else `cuda`."""
    return os.environ["TACKBOARD_TEST_DEVICE"]


def pytest_configure() -> None:
    """Runs in the child process: refuses products of bf16 in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_dot

    def checked(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar.is_bf16() or b.dtype.scalar.is_bf16():
            raise TypeError("Triton's interpreter computes tl.dot of bf16 wrongly: interpret fp32 or fp16")
        return original(self, a, b, *others)

    InterpreterBuilder.create_dot = checked
