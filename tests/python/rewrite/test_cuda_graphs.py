"""`fuse(model, mode="reduce-overhead")`: steps that are CUDA graphs are the steps that they were."""

import copy
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.rewrite.cuda_graphs import recorded
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


def step(model, x):
    """A loss and the gradients that are there after it."""
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


def test_steps_are_those_of_the_model(cuda):
    """New inputs, weights that an optimizer has changed, and gradients that add up are seen by what was recorded."""
    model = nn.Sequential(Block(), Block()).to(cuda)
    fused = onepass.fuse(copy.deepcopy(model), mode="reduce-overhead")
    optimizers = [torch.optim.SGD(m.parameters(), lr=10.0) for m in (model, fused)]
    for i, x in enumerate(inputs(6, cuda)):
        expected, ours = step(model, x), step(fused, x)
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


def test_two_models_that_add_up_gradients(cuda):
    """The first call of a step overwrites what backward of another model left."""
    models = [Block().to(cuda) for _ in range(2)]
    fused = [onepass.fuse(copy.deepcopy(m), mode="reduce-overhead") for m in models]
    for x in inputs(5, cuda):
        expected, ours = [step(m, x) for m in models], [step(m, x) for m in fused]
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
