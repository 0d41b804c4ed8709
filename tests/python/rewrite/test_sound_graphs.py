"""What fuse must not change, whatever a line could say: names, captures, hooks, modes, graphs that it cannot read.

Programs at random are in test_fuse_fuzz.py; here is one of each kind of fault that there was."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from captures import Count
from onepass.rewrite import fuse as fusing
from sound import R, agrees, grad

pytestmark = pytest.mark.usefixtures("every_line")


def test_names_stay():
    def function(x, scale: float = 2.0):
        """Its own."""
        return x * scale

    fused = onepass.fuse(function)
    assert fused.__name__ == "function" and fused.__doc__ == "Its own."
    assert list(inspect.signature(fused).parameters) == ["x", "scale"]
    assert onepass.unfuse(fused) is function


def test_captures():
    """Lengths that change are captured as often as Dynamo alone does."""

    def function(s, m, w):
        x = F.layer_norm(F.softmax(s * 0.125 + m, -1) @ s, s.shape[-1:])
        return F.linear(F.gelu(x + m), w[:, : s.shape[-1]])

    counts = []
    for call in (onepass.fuse(function), torch.compile(function, backend=(alone := Count()))):
        torch._dynamo.reset()
        for t in range(20, 27):
            s, m, w = R(2, 3, t, t), R(2, 1, t, t), R(8, 32)
            torch.testing.assert_close(call(s, m, w), function(s, m, w), rtol=1e-4, atol=1e-5)
        counts.append(len(onepass.report(call).graphs) if not counts else alone.graphs)
    assert counts[0] == counts[1] <= 2


def test_nested_tensors_are_left_alone():
    jagged = torch.nested.nested_tensor([R(3, 8), R(5, 8)], layout=torch.jagged)

    def function(x):
        return F.gelu(x * 2.0)

    found = onepass.fuse(function)(jagged)
    assert torch.equal(found.values(), function(jagged).values())


def test_hooks_that_come_later_run():
    model, seen, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), [], grad(4, 8)
    onepass.fuse(model)
    model(x)
    for add in (model[1].register_forward_hook, model[2].register_forward_pre_hook, model.register_forward_hook):
        handle = add(lambda *_: seen.append(1))
        for expected in (1, 2):
            model(x)
            assert len(seen) == expected
        handle.remove()
        model(x)
        assert len(seen) == 2
        seen.clear()
    handle = model[0].register_full_backward_hook(lambda *_: seen.append(1))
    model(x).sum().backward()
    assert len(seen) == 1
    handle.remove()
    captures = len(onepass.report(model).graphs)
    model(x)
    assert len(onepass.report(model).graphs) == captures  # the first capture serves again


def test_copies_are_not_fused():
    model, x = onepass.fuse(nn.Sequential(nn.LayerNorm(8), nn.ReLU())), R(4, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
        with pytest.raises(ValueError, match="a copy of a fused model is not: call fuse"):
            onepass.report(other)
        onepass.fuse(other)(x)
        assert onepass.report(other).lines


def test_what_compile_has_put_there_comes_back():
    model = nn.Sequential(nn.LayerNorm(8), nn.ReLU())
    model.compile(backend="eager")
    before = model._compiled_call_impl
    onepass.fuse(onepass.fuse(model))
    assert model._compiled_call_impl is not before
    assert onepass.unfuse(model)._compiled_call_impl is before


def test_mode():
    model, x = nn.Sequential(nn.LayerNorm(8), nn.ReLU()), R(4, 8)
    for call in (
        onepass.fuse(copy.deepcopy(model), then="inductor", mode="max-autotune-no-cudagraphs"),
        onepass.fuse(copy.deepcopy(model), mode="reduce-overhead"),
        torch.compile(model, backend="onepass", mode="default"),
    ):
        torch.testing.assert_close(call(x), model(x))
    with pytest.raises(ValueError, match="expected mode to be one of .*max-autotune.*, but got 'fast'"):
        onepass.fuse(model, then="inductor", mode="fast")
    with pytest.raises(ValueError, match="one of default, reduce-overhead where then='eager', but got 'max-autotune'"):
        onepass.fuse(model, mode="max-autotune")


def test_options_of_the_backend():
    model = torch.compile(nn.LayerNorm(8), backend="onepass", options={"foo": 1})
    with pytest.raises(Exception, match="no option is called 'foo'; there are then, dry_run, device, mode"):
        model(R(4, 8))


def test_a_report_before_the_first_call():
    model = onepass.fuse(nn.Sequential(nn.LayerNorm(8), nn.ReLU()))
    assert "captured when it is called" in str(onepass.report(model))
    model(R(4, 8))
    assert "captured when it is called" not in str(onepass.report(model))


def test_sizes_that_depend_on_numbers():
    def function(x):
        return F.layer_norm(F.gelu(x[x[:, 0] > 0] * 2.0), (8,))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fused, x = onepass.fuse(function), R(12, 8)
        torch.testing.assert_close(fused(x), function(x))


@pytest.mark.parametrize("other", [torch.mul, torch.add])
def test_long_chains(other, monkeypatch):
    """Of more operators than Python's stack is deep; looked at, not compiled."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: 0.0)

    def function(x):
        y = x
        for _ in range(400):
            y = other(y, x)
        return y

    fused, x = onepass.fuse(function), torch.full((4, 8), 1.0, dtype=torch.float64)
    torch.testing.assert_close(fused(x), function(x))


def test_devices_that_lines_do_not_run_on():
    model = onepass.fuse(nn.Sequential(nn.LayerNorm(8, device="meta"), nn.GELU()))
    assert model(R(4, 8, device="meta")).device.type == "meta"
    assert not onepass.report(model).lines


def test_shapes_that_change_behind_a_block():
    """Dynamo changes the one tensor that stands for the block's result."""

    def function(x, w):
        y = checkpoint(lambda x: F.layer_norm(x + 1.0, (8,)), x, use_reentrant=False)
        y.unsqueeze_(0)
        return y * w

    agrees(function, grad(6, 8), R(8))


def test_graphs_in_no_order_stay():
    gm = torch.fx.symbolic_trace(lambda x, y: F.gelu(x + 1.0) * y)
    last = next(node for node in gm.graph.nodes if node.name == "y")
    next(node for node in gm.graph.nodes if node.target == "output").prepend(last)
    rewriter = fusing.Rewriter()
    assert rewriter(gm, []) == gm.forward and not rewriter.report.lines
