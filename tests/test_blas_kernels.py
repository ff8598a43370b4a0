"""Exactness under other kernels of OpenBLAS and NumPy, each in a process of its own."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from test_exactness import CASES

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
KERNELS = {"Haswell": {"AVX2", "FMA3"}, "SkylakeX": {"AVX512F", "AVX512VL"}, "Zen": {"AVX2", "FMA3"}}
SHOW_CORE = "import sys; sys.path.insert(0, sys.argv[1]); import test_blas_kernels as t; print(t.openblas_core())"
FILES = ("test_exactness.py", "test_reference_ops.py", "test_differential.py")
NO_CPU = "not cpu and not instruction_set"
"""The CPU device has no BLAS."""
FEWEST_TESTS = 4 * len(CASES) + 60


def openblas_core() -> str | None:
    """Return the name of the kernels that NumPy's own OpenBLAS uses, or None if it was built with another library."""
    libraries = list((Path(np.__file__).parent.parent / "numpy.libs").glob("*scipy_openblas64*"))
    if not libraries:
        return None
    corename = ctypes.CDLL(str(libraries[0])).scipy_openblas_get_corename64_
    corename.restype = ctypes.c_char_p
    name: bytes = corename()
    return name.decode()


def run_child(environment: dict[str, str], *arguments: str) -> str:
    """Run Python and return what it printed."""
    child = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, f"{environment}:\n{child.stdout}{child.stderr}"
    return child.stdout


def run_under(environment: dict[str, str]) -> None:
    """Run the exactness and the differential tests in an environment."""
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", "-k", NO_CPU)
    printed = run_child(environment, *options, *(str(HERE / file) for file in FILES))
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None, printed
    assert int(passed[1]) >= FEWEST_TESTS, printed


def test_exactness_holds_under_every_kernel_that_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = ["kernels of OpenBLAS:"]
    ran: set[str] = set()
    features = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    simd = np.show_config("dicts")["SIMD Extensions"]["found"]
    # NumPy's own loops follow the processor, so with the smaller kernels they are held to the smaller instructions too.
    small = {"NPY_DISABLE_CPU_FEATURES": " ".join(name for name in simd if "512" in name or "V4" in name)}
    for kernel, needed in KERNELS.items() if openblas_core() is not None else ():
        if not all(features.get(feature) for feature in needed):
            told.append(f"left out: {kernel}, as this processor lacks one of {sorted(needed)}")
            continue
        environment = {"OPENBLAS_CORETYPE": kernel} | ({} if kernel == "SkylakeX" else small)
        core = run_child(environment, "-c", SHOW_CORE, str(HERE)).strip()
        if core in ran:
            told.append(f"left out: {kernel}, for which this OpenBLAS takes its {core} kernels, as before")
            continue
        ran.add(core)
        run_under(environment)
        told.append(f"ran: {kernel} ({core})")
    if openblas_core() is None:
        told.append("left out: all, as NumPy has no OpenBLAS of its own here")
    with capsys.disabled():
        print("\n" + "\n".join(told))  # noqa: T201  what was left out is to be seen
    assert ran or openblas_core() is None or platform.machine() != "x86_64"
