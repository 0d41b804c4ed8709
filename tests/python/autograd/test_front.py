"""The front in C++: which calls it takes, that it says what the operators say, and what it needs of Python."""

import re
import shutil
import subprocess

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from helpers import BUILT_FOR_THIS_TORCH
from onepass import _native
from onepass.autograd import differentiable, front

NORM = "layer_norm(1e-5) | scale | bias"


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """For the torch that the library was not built with."""
    differentiable()
    if front() is None:
        pytest.skip("needs a C++ compiler, and Python's headers")


@pytest.fixture(scope="module", autouse=True)
def ready():
    """What would have to be compiled is not for the front."""
    _native.cpu_prepare("scale", 0, torch.float32)


def taken(*call):
    return front()(*call) is not None


@pytest.fixture
def x(device):
    return torch.randn(4, 64, device=device)


@pytest.mark.parametrize("line", ["softmax", NORM, "bias | gelu", "add | keep | rms_norm | scale", "linear | bias"])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_same_as_the_operators(line, recorded, x, monkeypatch):
    shapes = {"add | keep | rms_norm | scale": [(4, 64), (64,)], "linear | bias": [(64, 64), (64,)]}
    count = len(onepass.Line(line)._operand_names())
    operands = [torch.randn(s, device=x.device) for s in shapes.get(line, [(64,)] * count)]
    given = [t.requires_grad_(recorded) for t in (x, *operands)]
    ours = front()(line, *given)
    monkeypatch.setattr("onepass.call.front", lambda: None)
    expected = onepass.fused(line, *given)
    assert type(ours) is type(expected)
    for one, other in zip(ours, expected):  # of one tensor: its rows
        assert torch.equal(one, other) and (one.grad_fn is None) == (other.grad_fn is None) != recorded


def test_lines_are_taken_once_they_are_compiled():
    x, mask = torch.randn(4, 8), torch.rand(4, 8) < 0.5
    line = "mask | leaky_relu(0.3) | mul(3.0)"
    assert not taken(line, x, mask) and not taken(line, x, mask.float())
    onepass.fused(line, x, mask)
    assert taken(line, x, mask) and not taken(line, x, mask.float()), "a kernel for each kind of mask"


def test_plain_tensors_are_taken(x):
    w = torch.nn.Parameter(torch.ones(64, device=x.device))
    assert taken("scale", x, w)
    with torch.no_grad():
        assert taken("scale", x, w)
    with torch.inference_mode():
        assert taken("scale", x, w) and front()("scale", x, w).is_inference()
    with torch.autocast(x.device.type, torch.bfloat16):
        assert taken("scale", x, w)


def test_others_are_not(x):
    w = torch.ones(64, device=x.device)
    for call in (
        (x,),
        (x, w, w),
        (x, None),
        ([x], w),
        (x.as_subclass(Named), w),
        (x, w.to("meta")),
        (x.to_sparse(), w),
    ):
        assert not taken("scale", *call)
    for mode in (
        Functions(),
        Operators(),
        torch.device("cpu"),
        torch.profiler.profile(),
        torch.autograd.profiler.profile(),
    ):
        with mode:
            assert not taken("scale", x, w)
    with torch.autocast(x.device.type, torch.bfloat16):  # which casts a matrix
        assert not taken("linear", x, torch.ones(64, 64, device=x.device))
    seen = []
    torch.func.vmap(lambda row: seen.append(taken("scale", row, w)) or row)(x)
    torch.func.grad(lambda t: seen.append(taken("scale", t, w)) or t.sum())(x)
    with forward_ad.dual_level():
        seen.append(taken("scale", forward_ad.make_dual(x, x), w))
    assert seen == [False] * 3


def test_its_errors_are_the_operators(x, monkeypatch):
    for operand in (torch.ones(63), torch.ones(64, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as ours:
            onepass.fused("scale", x, operand.to(x.device))
        with monkeypatch.context() as without, pytest.raises(RuntimeError) as theirs:
            without.setattr("onepass.call.front", lambda: None)
            onepass.fused("scale", x, operand.to(x.device))
        assert str(ours.value) == str(theirs.value)


@pytest.mark.skipif(not BUILT_FOR_THIS_TORCH, reason="built for another torch")
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_it_needs_of_python_what_all_versions_have():
    """The stable ABI's functions: the wheel is one for every Python."""
    library = _native.LIBRARY.parent / f"autograd-{torch.__version__}.so"
    undefined = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\bU (_?Py\w+)", undefined)) <= {
        "PyCMethod_New",
        "PyEval_RestoreThread",
        "PyEval_SaveThread",
        "PyTuple_New",
        "PyTuple_SetItem",
        "PyUnicode_AsUTF8AndSize",
        "_Py_NoneStruct",
    }


@pytest.mark.parametrize(
    ("line", "count"), [("gelu | add", 0), ("scores | mul(2.0)", 0), ("linear | add", 0), ("gelu | add", 2)]
)
def test_results_of_a_subclass_can_be_overwritten(line, count, device, monkeypatch):
    """Without the C++ library too, which compiles nothing where there is no compiler."""
    monkeypatch.setattr("onepass.call.differentiable", lambda: None)
    monkeypatch.setattr("onepass.call.front", lambda: None)
    x, other = (torch.randn(6, 6, device=device).requires_grad_() for _ in range(2))
    operands = [other] * onepass.Line(line).operand_count

    def results(x):
        made = onepass.fused(line, [x] * count if count else x, *operands)
        return made if count else [made]

    plain, named = results(x), results(x.as_subclass(Named))
    assert all(isinstance(t, Named) for t in named)
    (expected,) = torch.autograd.grad(sum(t.sigmoid().sum() for t in plain), other)
    (given,) = torch.autograd.grad(sum(t.sigmoid_().sum() for t in named), other)
    torch.testing.assert_close(given.as_subclass(torch.Tensor), expected)
