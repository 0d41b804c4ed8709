"""`fuse(model, mode="reduce-overhead")`: steps that are CUDA graphs are the steps that they were."""

import copy
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.cudagraph_trees import MarkStepBox
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.rewrite.cuda_graphs import _Gradients, recorded
from onepass.rewrite.fuse import rewrite

ROWS, WIDTH = 4096, 1024
"""Enough that lines are worth it."""


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = p

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


@pytest.fixture(autouse=True)
def nobody_has_marked_a_step(monkeypatch):
    """Who marks one does so for the process: PyTorch does not count backwards any more."""
    monkeypatch.setattr(MarkStepBox, "mark_step_counter", 0)


def step(model, x, marks=True):
    """A loss and the gradients that are there after it."""
    if marks:
        torch.compiler.cudagraph_mark_step_begin()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach().clone(), [p.grad.clone() for p in model.parameters()]


def inputs(n, device):
    generator = torch.Generator(device).manual_seed(7)
    return [torch.randn(ROWS, WIDTH, device=device, generator=generator) for _ in range(n)]


def kernels_launched(run):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    return sum(n in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx") for n in names), names.count(
        "cudaGraphLaunch"
    )


@pytest.mark.parametrize("marks", [False, True])
def test_steps_are_those_of_the_model(marks, cuda):
    """New inputs, weights that an optimizer has changed, and gradients that add up are seen by what was recorded."""
    model = nn.Sequential(Block(), Block()).to(cuda)
    fused = onepass.fuse(copy.deepcopy(model), mode="reduce-overhead")
    optimizers = [torch.optim.SGD(m.parameters(), lr=10.0) for m in (model, fused)]
    for i, x in enumerate(inputs(6, cuda)):
        expected, ours = step(model, x, marks), step(fused, x, marks)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        if i % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    assert any(onepass.report(fused).graphs)


def test_what_is_launched(cuda):
    model = onepass.fuse(nn.Sequential(Block(), Block()).to(cuda), mode="reduce-overhead")
    (x,) = inputs(1, cuda)

    def run():
        torch.compiler.cudagraph_mark_step_begin()
        model(x).backward(x)
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        run()
    launched, graphs = kernels_launched(run)
    assert graphs == 2  # noqa: PLR2004
    assert launched < 8  # noqa: PLR2004  # what is given to backward is copied, parameters are not


def test_masks_of_dropout_are_drawn_anew(cuda):
    model = onepass.fuse(Block(p=0.5).to(cuda), mode="reduce-overhead")
    (x,) = inputs(1, cuda)
    drops = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        result = model(x)
        result.sum().backward()
        drops.append((result.detach() == x).clone())
    assert all(0.45 < drop.double().mean() < 0.55 for drop in drops)  # noqa: PLR2004
    assert not any(torch.equal(a, b) for i, a in enumerate(drops) for b in drops[i + 1 :])


def test_inference_and_sizes(cuda):
    model = Block().to(cuda).eval()
    fused = onepass.fuse(copy.deepcopy(model), mode="reduce-overhead")
    with torch.no_grad():
        for rows in (ROWS, ROWS, ROWS // 2, 100, 2 * ROWS, ROWS, ROWS // 2, 100):
            x = torch.randn(rows, WIDTH, device=cuda)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_checkpointed_block(cuda):
    blocks = nn.ModuleList([Block(), Block()]).to(cuda)

    def run(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    fused = onepass.fuse(run, mode="reduce-overhead")
    for x in inputs(4, cuda):
        torch.compiler.cudagraph_mark_step_begin()
        expected = torch.autograd.grad(run(x).square().mean(), blocks.parameters())
        ours = torch.autograd.grad(fused(x).square().mean(), blocks.parameters())
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpointed_block_draws_its_mask_again(cuda):
    def run(x, w):
        return checkpoint(lambda x, w: F.dropout(torch.tanh(x * w), 0.5), x, w, use_reentrant=False)

    fused = onepass.fuse(run, mode="reduce-overhead")
    w = torch.ones(ROWS, WIDTH, device=cuda, requires_grad=True)
    for x in inputs(4, cuda):
        torch.compiler.cudagraph_mark_step_begin()
        y = fused(x, w)
        (dw,) = torch.autograd.grad(y.sum(), w)
        assert torch.equal(dw != 0, y != 0)
        assert 0.45 < (y != 0).double().mean() < 0.55  # noqa: PLR2004


def test_gradients_copied_in_inference_mode_can_be_added_to():
    gradients, parameter = _Gradients(), nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    known = gradients.remember_parameters([parameter])
    gradients.remember_results([parameter.grad])
    before = parameter.grad
    with torch.inference_mode():
        gradients.copy_to_own_memory()
    assert parameter.grad is not before
    parameter.sum().backward()
    assert parameter.grad.tolist() == [3.0] * 3
    assert known[0]() is parameter
    del parameter
    gc.collect()
    assert not gradients.parameters


def test_gradients_within_wrappers_are_copied():
    """As those of DTensors."""
    inner = torch.ones(3)
    gradients, parameter = _Gradients(), nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    parameter.grad = given = TwoTensor(inner, torch.zeros(3))
    known = gradients.remember_parameters([parameter])
    gradients.remember_results([inner])
    gradients.copy_to_own_memory()
    assert parameter.grad is not given
    assert len(known) == 1


def test_a_head_and_its_loss(cuda):
    norm, head = nn.LayerNorm(256, device=cuda), nn.Linear(256, 2000, bias=False, device=cuda)

    def run(x, target):
        return F.cross_entropy(head(norm(x)), target)

    fused, parameters = onepass.fuse(run, mode="reduce-overhead"), [*norm.parameters(), *head.parameters()]
    for _ in range(4):
        x, target = torch.randn(512, 256, device=cuda), torch.randint(0, 2000, (512,), device=cuda)
        torch.compiler.cudagraph_mark_step_begin()
        expected, ours = run(x, target), fused(x, target)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(ours, parameters), torch.autograd.grad(expected, parameters), rtol=1e-4, atol=1e-6
        )


def test_numbers_on_the_cpu(cuda, caplog):
    """What kernels are launched with is recorded; what is copied to the device is not, and the call goes on."""

    def divides(x):
        return F.layer_norm(x / torch.tensor(2.0).sqrt(), (WIDTH,)) + x

    def chooses(x):
        return F.layer_norm(torch.where(x > 0, torch.tensor(-1.0), x), (WIDTH,)) + x

    def fills(x):
        return F.layer_norm(torch.where(x > 0, torch.tensor(-1.0, device=x.device), x), (WIDTH,)) + x

    def writes(x):  # as decoders' first tokens are written
        y = x.new_zeros(x.shape)
        y[:, 1:] = x[:, :-1].clone()
        y[..., 0] = 5
        return F.layer_norm(y, (WIDTH,)) + x

    for run in (divides, chooses, fills, writes):
        fused = onepass.fuse(run, mode="reduce-overhead")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for x in inputs(4, cuda):
                torch.compiler.cudagraph_mark_step_begin()
                torch.testing.assert_close(fused(x), run(x), rtol=1e-5, atol=1e-5)
        assert ("skipping cudagraphs" in caplog.text) == (run is chooses)


@pytest.mark.parametrize("marks", [False, True])
def test_two_models_that_add_up_gradients(marks, cuda):
    """The first call of a step overwrites what backward of another model left."""
    models = [Block().to(cuda) for _ in range(2)]
    fused = [onepass.fuse(copy.deepcopy(m), mode="reduce-overhead") for m in models]
    for x in inputs(5, cuda):
        expected, ours = ([step(m, x, marks) for m in each] for each in (models, fused))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_is_run_and_said(caplog):
    model, reports = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()), []

    def backend(gm, example_inputs):
        reports.append(rewrite(gm))
        return recorded(gm, example_inputs)

    compiled, x = torch.compile(model, backend=backend), torch.randn(300, 64, requires_grad=True)
    with caplog.at_level(logging.WARNING):
        ours = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert reports
    assert "skipping cudagraphs due to a tensor on the CPU" in caplog.text
