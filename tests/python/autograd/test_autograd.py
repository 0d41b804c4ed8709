"""The gradient's manners: only what is needed, nothing damaged, nothing saved but inputs and statistics."""

import copy
import itertools

import pytest
import torch

import onepass
from helpers import (
    COMPILED_LINES,
    NAMED_LINES,
    Recorder,
    as_tuple,
    gradients,
    make_inputs,
    run,
    upstream,
    words_of,
)

LINES = [
    "bias | gelu",
    "gate(silu)",
    "add",
    "add | keep | layer_norm(1e-5) | scale | bias",
    "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale",
    "layer_norm(1e-5) | scale | bias | gelu",
    "mul(0.125) | mask | softmax | dropout(0.1)",
]


pytestmark = pytest.mark.usefixtures("way")


def test_both_ways_are_taken(way, device):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    assert ("Fused" in onepass.fused("gelu", x).grad_fn.name()) == (way == "C++")


def call(line, tensors, device, seed=3):
    return as_tuple(onepass.fused(line, *tensors, generator=torch.Generator(device).manual_seed(seed)))


@pytest.mark.parametrize("line", LINES)
def test_every_subset_of_needed_gradients(line, device):
    """Each gradient is the same, to the bit, whichever others are asked for."""
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    results = call(line, inputs.tensors, device)
    grads = upstream(results)
    everything = iter(gradients(results, inputs, grads))
    full = [next(everything) if t.is_floating_point() else None for t in inputs.tensors]
    places = [i for i, t in enumerate(inputs.tensors) if t.is_floating_point()]
    for count in range(len(places) + 1):
        for needed in itertools.combinations(places, count):
            leaves = [t.detach().clone() for t in inputs.tensors]
            for place in needed:
                leaves[place].requires_grad_()
            subset = call(line, leaves, device)
            assert all(r.requires_grad == bool(needed) for r in subset)
            for result, expected in zip(subset, results):
                assert torch.equal(result, expected)
            if needed:
                some = torch.autograd.grad(subset, [leaves[i] for i in needed], grads)
                for place, gradient in zip(needed, some):
                    if device == "cpu":
                        assert torch.equal(gradient, full[place]), f"gradient {place} of {needed}"
                    else:  # another subset is another kernel, whose compiler may fuse other operations
                        torch.testing.assert_close(gradient, full[place], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("line", LINES)
def test_only_needed_gradients_are_computed(line, device):
    """The backward operator returns no tensor that nobody asked for."""
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    leaves = [t.detach() for t in inputs.tensors]
    leaves[0].requires_grad_()
    results = call(line, leaves, device)
    recorder = Recorder()
    with recorder:
        torch.autograd.grad(results, [leaves[0]], upstream(results))
    backward = [(func, args) for func, args, _ in recorder.calls if "backward" in str(func)]
    for func, args in backward:
        assert len([t for t in func(*args) if t is not None]) == 1


def test_only_gradients_on_the_way_are_computed(way, device):
    """x requires a gradient, but this call asks for the bias alone: the engine knows, and so does C++."""
    x, b = torch.randn(9, 70, device=device, requires_grad=True), torch.randn(70, device=device, requires_grad=True)
    y = onepass.fused("bias | gelu", x, b)
    recorder = Recorder()
    with recorder:
        torch.autograd.grad(y, [b], torch.ones_like(y))
    ((func, args),) = [(func, args) for func, args, _ in recorder.calls if "backward" in str(func)]
    assert len(func(*args)) == (1 if way == "C++" else 2)


@pytest.mark.parametrize("line", LINES)
def test_two_backwards(line, device):
    """The second backward finds what the first found: nothing was written in place."""
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    results = call(line, inputs.tensors, device)
    grads = upstream(results)
    kept = [g.clone() for g in grads]
    first = torch.autograd.grad(results, inputs.differentiable, grads, retain_graph=True)
    first = [g.clone() for g in first]
    second = torch.autograd.grad(results, inputs.differentiable, grads)
    for a, b in zip(first, second):
        assert torch.equal(a, b)
    for g, k in zip(grads, kept):
        assert torch.equal(g, k), "an upstream gradient was changed"


@pytest.mark.parametrize("line", NAMED_LINES)
def test_inputs_are_not_changed(line, device):
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    before = [t.detach().clone() for t in inputs.tensors]
    versions = [t._version for t in inputs.tensors]
    results = call(line, inputs.tensors, device)
    torch.autograd.grad(results, inputs.differentiable, upstream(results))
    for tensor, old, version in zip(inputs.tensors, before, versions):
        assert torch.equal(tensor.detach(), old) and tensor._version == version


@pytest.mark.parametrize("line", LINES)
def test_results_do_not_share_memory_with_inputs_or_each_other(line, device):
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    results = call(line, inputs.tensors, device)
    addresses = [t.untyped_storage().data_ptr() for t in (*inputs.tensors, *results)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("line", ["add", "dropout(0.1) | add", "gate(silu)", "add | keep | rms_norm(1e-6) | scale"])
def test_accumulated_gradients_are_independent(line, device):
    """Gradients may be one tensor on the way; what lands in .grad of two leaves must not be."""
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    results = call(line, inputs.tensors, device)
    grads = upstream(results)
    kept = [g.clone() for g in grads]
    torch.autograd.backward(results, grads)
    expected = [t.grad.clone() for t in inputs.differentiable]
    for i, tensor in enumerate(inputs.differentiable):
        tensor.grad.add_(1000.0)
        for j, other in enumerate(inputs.differentiable):
            if j > i:
                assert torch.equal(other.grad, expected[j]), f"gradient {j} changed with gradient {i}"
    for g, k in zip(grads, kept):
        assert torch.equal(g, k), "the upstream gradient changed with a leaf's"


def test_accumulation_over_two_steps(device):
    inputs = make_inputs("add | keep | layer_norm(1e-5) | scale | bias", (9, 70), torch.float32, device)
    steps = []
    for seed in (1, 2):
        results = call("add | keep | layer_norm(1e-5) | scale | bias", inputs.tensors, device)
        grads = upstream(results, seed)
        steps.append(torch.autograd.grad(results, inputs.differentiable, grads, retain_graph=True))
        torch.autograd.backward(results, grads)
    for tensor, first, second in zip(inputs.differentiable, *steps):
        torch.testing.assert_close(tensor.grad, first + second)


def test_the_gradient_of_add_is_the_gradient_itself(device):
    """An alias, never a copy, where dtype and shape allow."""
    x, r = (torch.randn(9, 70, device=device, requires_grad=True) for _ in range(2))
    y = onepass.fused("add", x, r)
    dy = torch.randn_like(y)
    dx, dr = torch.autograd.grad(y, (x, r), dy)
    assert dx.data_ptr() == dr.data_ptr() == dy.data_ptr()
    y, h = onepass.fused("add | keep | rms_norm(1e-6) | scale", x, r, torch.ones(70, device=device))
    dx, dr = torch.autograd.grad((y, h), (x, r), (dy, dy))
    assert dx.data_ptr() == dr.data_ptr()


def test_the_gradient_of_add_in_another_dtype_is_converted(device):
    x = torch.randn(9, 70, device=device, dtype=torch.bfloat16, requires_grad=True)
    r = torch.randn(9, 70, device=device, requires_grad=True)
    y = onepass.fused("add", x, r)
    dy = torch.randn_like(y)
    dx, dr = torch.autograd.grad(y, (x, r), dy)
    assert dx.dtype == torch.bfloat16 and dr.dtype == torch.float32
    assert torch.equal(dr, dy.float()) and torch.equal(dx, dy)


@pytest.mark.parametrize("line", [*NAMED_LINES, *COMPILED_LINES])
def test_saved_are_inputs_and_statistics_only(line, device):
    inputs = make_inputs(line, (64, 96), torch.bfloat16, device)
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results, _ = run(line, inputs)
    from_result = onepass.Line(line).resumes_from == 0
    given = results if from_result else results[1:]
    known = {t.untyped_storage().data_ptr() for t in (*inputs.tensors, *given)}
    extra = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    statistics = {"layer_norm": 2, "rms_norm": 1, "softmax": 2, "l2_norm": 2, "log_softmax": 2}
    statistics |= {"logsumexp": 2, "entropy": 2, "amax": 2, "cross_entropy": 2, "logprob": 2, "kl_div": 4}
    numbers_a_row = sum(statistics.get(word.name, 0) for word in words_of(line))
    has_dropout = any(word.name == "dropout" for word in words_of(line))
    allowed = 64 * numbers_a_row * 4 + (16 if has_dropout else 0)
    assert sum(t.numel() * t.element_size() for t in extra) <= allowed, [tuple(t.shape) for t in extra]
    if numbers_a_row and not from_result:
        assert extra, "the statistics are saved, or this test sees nothing"


def test_x_is_not_saved_where_the_kept_value_serves(device):
    """add | keep | norm: backward starts from h, so neither x nor the residual is held."""
    line = "add | keep | layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (64, 96), torch.float32, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        run(line, inputs)
    assert inputs.x.data_ptr() not in saved and inputs.operands[0].data_ptr() not in saved


@pytest.mark.parametrize("line", ["softmax", "mul(0.5) | causal | softmax", "add | keep | softmax"])
def test_x_is_not_saved_where_the_result_serves(line, device):
    inputs = make_inputs(line, (64, 96), torch.float32, device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        results, _ = run(line, inputs)
    assert saved == [results[0].data_ptr()]


def test_saved_tensors_are_freed_and_a_second_backward_says_so(device):
    inputs = make_inputs("gelu", (9, 70), torch.float32, device)
    y = onepass.fused("gelu", *inputs.tensors).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        y.backward()


def test_saved_tensors_may_live_elsewhere(device):
    """save_on_cpu, which unpacks other tensors than it was given, and anomaly detection beside it."""
    line = "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale"
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    results = call(line, inputs.tensors, device)
    grads = upstream(results)
    expected = gradients(results, inputs, grads)
    with torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly(check_nan=True):
        got = gradients(call(line, inputs.tensors, device), inputs, grads)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_changing_a_saved_input_is_noticed(device):
    inputs = make_inputs("gelu", (9, 70), torch.float32, device)
    x = inputs.x * 1
    y = onepass.fused("gelu", x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_not_saved_may_change(device):
    x, r = (torch.randn(9, 70, device=device, requires_grad=True) for _ in range(2))
    a, b = x * 1, r * 1
    y = onepass.fused("add", a, b)
    a.add_(1)
    b.add_(1)
    dy = torch.randn_like(y)
    dx, dr = torch.autograd.grad(y, (x, r), dy)
    assert torch.equal(dx, dy) and torch.equal(dr, dy)


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["y", "h", "both"])
def test_results_that_nobody_uses(used, device):
    """Where y or h goes nowhere its gradient is None, not zeros that somebody made."""
    line = "add | keep | layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (9, 70), torch.float32, device)
    exact = inputs.to(torch.float64)
    ours = onepass.fused(line, *inputs.tensors)
    wide = onepass.Line(line).reference(*exact.tensors)
    grads = upstream(ours)
    loss = sum((r * g).sum() for r, g, u in zip(ours, grads, used) if u)
    expected = sum((r * g.double()).sum() for r, g, u in zip(wide, grads, used) if u)
    ours_grads = torch.autograd.grad(loss, inputs.differentiable, allow_unused=True)
    exact_grads = torch.autograd.grad(expected, exact.differentiable, allow_unused=True)
    for got, want in zip(ours_grads, exact_grads):
        assert (got is None) == (want is None)  # what steps by zeros decays its weights
        if want is not None:
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stack", [False, True])
def test_results_of_lists_that_nobody_uses(stack, way, device):
    """Of the second tensor only the kept value is used, of the third nothing."""
    tensors = [torch.randn(4, 8, device=device, requires_grad=True) for _ in range(3)]
    weights = [torch.randn(8, device=device, requires_grad=True) for _ in range(3)]
    bias = torch.randn(8, device=device, requires_grad=True)
    y, h = onepass.fused("mul(2.0) | keep | rms_norm(1e-6) | scale | bias", tensors, weights, bias, stack=stack)
    (y[0].sum() + h[1].sum()).backward()
    if stack:  # it is one tensor, all of which is used
        assert all(t.grad is not None for t in (*tensors, *weights, bias))
    else:
        assert [t.grad is None for t in (*tensors, *weights, bias)] == [False, False, True, False, True, True, False]
    torch.testing.assert_close(tensors[1].grad, torch.full_like(tensors[1], 2.0))


def test_operands_may_be_one_tensor(device):
    """x as its own residual, one weight twice: gradients add up."""
    x = torch.randn(5, 70, device=device, requires_grad=True)
    y = onepass.fused("gate(silu)", x, x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad((torch.nn.functional.silu(exact) * exact).sum(), exact)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_graph_without_need(device):
    inputs = make_inputs("bias | gelu", (4, 8), torch.float32, device)
    with torch.no_grad():
        assert not onepass.fused("bias | gelu", *inputs.tensors).requires_grad
    with torch.inference_mode():
        assert onepass.fused("bias | gelu", *inputs.tensors).is_inference()
    assert not onepass.fused("bias | gelu", *(t.detach() for t in inputs.tensors)).requires_grad


def test_hooks_and_parameters(device):
    """A Parameter's post-accumulate hook, as FSDP and optimisers in backward use it, sees the gradient once."""
    w = torch.nn.Parameter(torch.ones(70, device=device))
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(9, 70, device=device)
    onepass.fused("rms_norm(1e-6) | scale", x, w).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], w.grad)


def test_a_module_with_lines_can_be_copied(device):
    module = onepass.nn.LayerNorm(70, device=device, activation="gelu")
    other = copy.deepcopy(module)
    x = torch.randn(9, 70, device=device)
    assert torch.equal(module(x), other(x))
    assert other.weight.data_ptr() != module.weight.data_ptr()


def test_backward_in_another_thread(device):
    """The engine calls backward from its own threads on CUDA; a user may from any thread."""
    import threading

    inputs = make_inputs("layer_norm(1e-5) | scale | bias", (9, 70), torch.float32, device)
    results = call("layer_norm(1e-5) | scale | bias", inputs.tensors, device)
    grads = upstream(results)
    expected = torch.autograd.grad(results, inputs.differentiable, grads, retain_graph=True)
    got = []
    thread = threading.Thread(target=lambda: got.extend(torch.autograd.grad(results, inputs.differentiable, grads)))
    thread.start()
    thread.join()
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)


def test_modes_and_profilers_see_the_operators(device):
    """A plain call reaches the kernels without the dispatcher; one that something watches does not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    line = "layer_norm(1e-5) | scale | bias | linear | bias"
    inputs = make_inputs(line, (6, 8), torch.float32, device)
    plain, grad = onepass.fused(line, *inputs.tensors), torch.ones(6, 24, device=device)
    expected = torch.autograd.grad(plain, inputs.tensors, grad)
    with Seen():
        seen = onepass.fused(line, *inputs.tensors)
        grads = torch.autograd.grad(seen, inputs.tensors, grad)
    assert {"onepass.linear_forward.default", "onepass.linear_backward.default"} <= set(Seen.names)
    for a, b in zip((plain, *expected), (seen, *grads)):
        assert torch.equal(a, b)
    with torch.profiler.profile() as profile:
        onepass.fused(line, *inputs.tensors)
    assert "onepass::linear_forward" in {event.key for event in profile.key_averages()}
