"""What the shared library asks of torch and the system, and the kernels that may come with it."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys

import pytest

from onepass import _native
from onepass.doctor import find_nvrtc

LIBRARIES = {"libtorch.so", "libhwy.so.1", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}

needs_binutils = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")


def readelf(*options):
    command = ["readelf", "--wide", *options, str(_native.LIBRARY)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_binutils
def test_it_takes_only_the_stable_abi_of_torch():
    """One library serves torch 2.10 and newer: C functions whose names are kept, and nothing of C++."""
    wanted = re.findall(r" UND (\w+)", readelf("--dyn-syms"))
    of_torch = {name for name in wanted if "torch" in name}
    assert "torch_call_dispatcher" in of_torch
    assert all(re.match(r"(aoti_)?torch_", name) for name in of_torch), of_torch
    assert not [name for name in wanted if re.match(r"_ZNK?(2at|3c10)", name)]


@needs_binutils
def test_it_needs_no_other_libraries():
    """Not libstdc++, of which torch exports parts; Highway's lies beside it."""
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic"))) <= LIBRARIES
    assert (_native.LIBRARY.parent / "libhwy.so.1").exists()


OLD_CPU = """
import ctypes, sys
import torch, onepass
from onepass import _native
highway = ctypes.CDLL(str(_native.LIBRARY.parent / "libhwy.so.1"))
highway._ZN3hwy26SetSupportedTargetsForTestEl(ctypes.c_int64(1 << 11))  # HWY_SSE4
x, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
try:
    if sys.argv[1] == "a line":
        torch.testing.assert_close(onepass.fused("bias | gelu", x, b), torch.nn.functional.gelu(x + b))
    else:
        torch.testing.assert_close(onepass.fused("linear", x, b[None]), x @ b[:, None])
    print(_native.info()["simd_target"])
except RuntimeError as e:
    print(e)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="SSE4 is x86's")
@pytest.mark.parametrize("call", ["a line", "a product"])
def test_on_a_cpu_of_sse4_alone(call):
    """A build for all CPUs chooses, one for this machine says how to make the other; no illegal instruction."""
    said = subprocess.run([sys.executable, "-c", OLD_CPU, call], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "SSE4" or "cmake -DONEPASS_SIMD=all" in said


PREBUILT = """
import json, sys
import torch, onepass
from onepass import _native
built = [*onepass.cache.build(["sm_90a"], ["bias | gelu"], [torch.bfloat16], [1024])]
print(json.dumps([_native.info()["prebuilt_directory"], len(built), len(onepass.cache.list())]))
"""


@pytest.mark.skipif(find_nvrtc() is None, reason="needs NVRTC")
def test_kernels_that_came_with_it_are_not_built_again(tmp_path):
    """In a copy of the package whose lib/prebuilt was filled as tools/wheel fills it."""
    package = tmp_path / "onepass"
    shutil.copytree(_native.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def build_into(cache):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ONEPASS_CACHE_DIR": str(cache)}
        out = subprocess.run(
            [sys.executable, "-c", PREBUILT], env=environment, check=True, capture_output=True, text=True
        ).stdout
        return json.loads(out)

    where, built, listed = build_into(package / "lib" / "prebuilt")
    assert where == str(package / "lib" / "prebuilt")
    assert built == listed > 2
    assert build_into(tmp_path / "own") == [where, built, 0]
