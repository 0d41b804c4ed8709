"""Every test that asks for `device` runs on the CPU, and on CUDA where there is one."""

import gc
import os
from functools import cache, partial
from pathlib import Path

# Before torch is there. Several processes of tests share the cores: a thread that spins while it waits for another
# takes what that one needs, and all tests twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import onepass
from onepass import _native

# For the processes that tests start: the same package as here.
os.environ["PYTHONPATH"] = str(Path(onepass.__file__).resolve().parent.parent)
os.environ.setdefault("ONEPASS_CXX", str(Path(__file__).with_name("quick-compiler")))
os.environ.setdefault("MAX_JOBS", "1")  # compilers at once: there are several processes of tests
os.environ["COLUMNS"] = "150"  # of reports, whatever a test's terminal has: or lines are folded

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_collection_finish(session):
    """Collections of all that torch has imported take a twentieth of the time: it stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish(session):
    """And goes, in the order in which it may."""
    gc.unfreeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def compiled_for_every_dtype():
    """Most tests take a line in several: its kernels are compiled together, in half the time. Processes that tests
    start compile for one, as users' do."""
    prepare = _native.cpu_prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "cpu_prepare", lambda line, masks, dtype: prepare(line, masks, None))
        yield


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20260921)


@pytest.fixture(autouse=True, scope="module")
def memory_given_back():
    """Of a GPU: other processes of the same run need it, too."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(scope="module")
def one_clock():
    """For cases: a clock's copy bandwidth takes a second to measure, and each collection of all that torch has imported
    and tests have left another, of which a case has two dozen."""
    from onepass.pricing.timing import clock_for

    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.case.comparison.clock_for", cache(clock_for))
        yield
    gc.unfreeze()


@pytest.fixture
def replaced(monkeypatch):
    """Puts a function of a pattern and its tensors in the place of a provider's."""
    from onepass.bench.providers import PROVIDERS, Provider

    def replace(name, function):
        monkeypatch.setitem(PROVIDERS, name, Provider(name, lambda pattern: partial(function, pattern)))

    return replace


@pytest.fixture(
    scope="session", params=[(2, "cpu"), (4, "cpu"), (2, "cuda"), (4, "cuda")], ids=lambda p: f"{p[1]}x{p[0]}"
)
def ranks(request):
    """Processes of one group: gloo on the CPU, NCCL on as many GPUs."""
    from ranks import Ranks

    count, device = request.param
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
    started = Ranks(count, device)
    yield started
    started.stop()


@pytest.fixture(params=["C++", "Python"])
def way(request, monkeypatch):
    """Every test through both: the operator compiled for the installed torch, and what serves where it cannot be."""
    if request.param == "Python":
        monkeypatch.setattr("onepass.call.front", lambda: None)
        monkeypatch.setattr("onepass.call.differentiable", lambda: None)
    return request.param
