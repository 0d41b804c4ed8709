"""Dropout without a stored mask: its statistics; one mask for forward, backward, every device and every way to run."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.functional as F
from helpers import as_tuple, make_inputs, run
from onepass.reference import compose, dropout_numbers, philox


def words(*values):
    return tuple(torch.tensor(v, dtype=torch.int64) for v in values)


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_the_references_philox_gives_the_papers_answers(counter, key, expected):
    """Known answers of Random123 for Philox4x32-7."""
    assert tuple(int(w) for w in philox(words(*counter), words(*key))) == expected


def test_the_layout_of_the_numbers():
    """Element by element as the contract says, without vectors."""
    state = torch.tensor([-5, 2**63 - 7])
    seed, offset = (-5) % 2**64, 2**63 - 7
    numbers = dropout_numbers((3, 21), state, 2, "cpu")
    for row, column in [(0, 0), (0, 7), (0, 8), (1, 3), (2, 20)]:
        group = row * 3 + column // 8
        counter = (group % 2**32, group >> 32, offset % 2**32, (offset >> 32) ^ 2)
        output = philox(words(*counter), words(seed % 2**32, seed >> 32))
        assert numbers[row, column] == (int(output[column % 8 // 2]) >> (16 * (column % 2))) & 0xFFFF


def mask_of(line, x, *operands, **options):
    y = onepass.fused(line, x, *operands, **options)
    return y != 0


@pytest.mark.parametrize("p", [0.001, 0.1, 1 / 3])
def test_mean_is_kept_to_1e_4(p, device):
    """2^26 elements: the standard error is 5e-6 to 9e-5. A mask of 8 bits would be off by 2e-3."""
    x = torch.ones(2**13, 2**13, device=device, dtype=torch.float32)
    y = onepass.fused(f"dropout({p!r})", x, generator=torch.Generator(device).manual_seed(11))
    standard_error = math.sqrt(p / (1 - p)) / 2**13
    assert abs(y.double().mean().item() - 1) < max(1e-4, 2 * standard_error)
    kept = (y != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 1e-4


def test_every_place_of_a_group_is_alike(device):
    """Eight neighbours share a Philox call: each of them, and each pair, is dropped as often as it should be."""
    y = mask_of("dropout(0.25)", torch.ones(2**14, 256, device=device)).view(-1, 8).double()
    assert ((y.mean(0) - 0.75).abs() < 2.5e-3).all()  # 2^19 draws: 4 standard errors
    centred = y - 0.75
    correlation = (centred.T @ centred) / len(y) / (0.75 * 0.25)
    assert (correlation - torch.eye(8, device=device)).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(64, 64), (5, 1), (7, 17), (2, 3, 5, 1001), (100,)], ids=str)
@pytest.mark.parametrize("line", ["dropout(0.25)", "dropout(0.1) | add", "softmax | dropout(0.1)"])
def test_masks_are_the_contracts(line, shape, device):
    """Element by element the reference's, which computes Philox in integers of PyTorch."""
    inputs = make_inputs(line, shape, torch.float32, device)
    inputs.x.data = inputs.x.data.abs() + 0.5
    for operand in inputs.operands:
        operand.data.zero_()
    (y,), state = run(line, inputs)
    expected = compose(onepass.Line(line).words, inputs.x.detach(), inputs.operands, state)[0]
    assert torch.equal(y == 0, expected == 0)
    torch.testing.assert_close(y, expected)


def test_two_dropouts_in_a_line_are_independent(device):
    ones, zeros = torch.ones(512, 512, device=device), torch.zeros(512, 512, device=device)
    y = onepass.fused("dropout(0.25) | scale | dropout(0.5) | add", ones, ones[0], zeros)
    assert abs((y != 0).double().mean().item() - 0.75 * 0.5) < 5e-3  # equal masks would keep 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("line", ["dropout(0.1) | add", "bias | dropout(0.1) | add"])
def test_forward_and_backward_have_one_mask(line, dtype, device):
    inputs = make_inputs(line, (33, 257), dtype, device)
    for operand in inputs.operands:
        operand.data.zero_()
    inputs.x.data.fill_(1)
    y = onepass.fused(line, inputs.x, *inputs.operands)
    (dx,) = torch.autograd.grad(y, inputs.x, torch.ones_like(y))
    assert torch.equal(dx, y) and 0 < (y == 0).double().mean().item() < 0.2


def test_forward_and_backward_have_one_mask_around_a_norm(device):
    """Where the norm comes later, the mask shows in the gradient's zeros."""
    inputs = make_inputs("bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale", (33, 257), torch.float32, device)
    inputs.operands[1].data.zero_()
    y, h = onepass.fused("bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale", inputs.x, *inputs.operands)
    (dx,) = torch.autograd.grad(y, inputs.x, torch.randn_like(y))
    assert torch.equal(dx == 0, h == 0)


def test_a_mask_does_not_depend_on_the_layout(device):
    x = torch.ones(40, 96, device=device)
    draw = lambda t: mask_of("dropout(0.1) | add", t, torch.zeros_like(x), generator=seeded(device))  # noqa: E731
    expected = draw(x)
    for other in (
        x.t().contiguous().t(),
        torch.ones(1, 1, device=device).expand(40, 96),
        torch.ones(40, 192, device=device)[:, ::2],
    ):
        assert torch.equal(draw(other), expected)


def test_a_mask_does_not_depend_on_the_dtype(device):
    masks = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x, zeros = torch.ones(40, 97, device=device, dtype=dtype), torch.zeros(97, device=device, dtype=dtype)
        masks.append(mask_of("dropout(0.1) | add", x, zeros, generator=seeded(device)))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def seeded(device, seed=17):
    return torch.Generator(device).manual_seed(seed)


@pytest.mark.parametrize("line", ["dropout(0.1) | add", "mask | softmax | dropout(0.1)"])
def test_cpu_and_cuda_have_one_mask(line, cuda):
    state = torch.tensor([-987654321, 2**40 + 3])
    x = torch.rand(31, 1003) + 0.5
    operand = torch.zeros(31, 1003) if "add" in line else torch.ones(31, 1003, dtype=torch.bool)
    name = "rowwise" if "softmax" in line else "elementwise"
    forward = getattr(torch.ops.onepass, f"{name}_forward")
    rest = (False,) if name == "rowwise" else ()
    on_cpu = forward(x, [operand], line, state, *rest)[0]
    on_cuda = forward(x.to(cuda), [operand.to(cuda)], line, state.to(cuda), *rest)[0].cpu()
    assert torch.equal(on_cpu == 0, on_cuda == 0)
    torch.testing.assert_close(on_cpu, on_cuda)


class TestEdges:
    def test_p_zero_is_the_identity(self, device):
        x = torch.randn(9, 65, device=device, requires_grad=True)
        for _ in range(2):
            y = onepass.fused("dropout(0)", x)
            assert torch.equal(y, x)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
        assert (dx == 3).all()

    @pytest.mark.parametrize("line", ["dropout(1)", "dropout(1.0) | add"])
    def test_p_one_drops_all(self, line, device):
        x = torch.randn(9, 65, device=device, requires_grad=True)
        operands = [torch.zeros(65, device=device)] if "add" in line else []
        y = onepass.fused(line, x, *operands)
        assert torch.equal(y, torch.zeros_like(y))
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx, torch.zeros_like(dx))

    def test_p_close_to_one(self, device):
        y = onepass.fused("dropout(0.9999)", torch.ones(2**10, 2**10, device=device))
        kept = y[y != 0]
        assert len(torch.unique(kept)) == 1 and 20 < len(kept) < 250  # 105 expected
        torch.testing.assert_close(kept[0].item(), 65536 / 7.0)  # 1 - p is 7 of 65536

    def test_not_training(self, device):
        x, r = torch.randn(9, 65, device=device), torch.randn(9, 65, device=device)
        assert torch.equal(onepass.fused("dropout(0.5) | add", x, r, training=False), x + r)
        assert torch.equal(onepass.fused("dropout(0.5)", x, training=False), x)
        assert torch.equal(F.dropout_add(x, r, 0.5, training=False), x + r)

    def test_not_training_draws_nothing_from_the_generator(self, device):
        x = torch.randn(9, 65, device=device)
        generator = seeded(device)
        before = generator.get_state()
        onepass.fused("dropout(0.5) | add", x, x, training=False, generator=generator)
        assert torch.equal(generator.get_state(), before)

    def test_dropped_infinities_and_nan_are_zero(self, device):
        """x · mask would make NaN of them."""
        x = torch.full((64, 64), math.inf, device=device)
        x[32:] = math.nan
        y = onepass.fused("dropout(0.5) | add", x, torch.zeros_like(x))
        dropped = y == 0
        assert 0.4 < dropped.double().mean().item() < 0.6
        assert not y[~dropped].isfinite().any()

    def test_dropped_infinite_gradients_are_zero(self, device):
        x = torch.ones(64, 64, device=device, requires_grad=True)
        y = onepass.fused("dropout(0.5) | add", x, torch.zeros(64, device=device))
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, math.inf))
        assert torch.equal(dx == 0, y == 0) and not dx.isnan().any()


class TestSeeds:
    LINE = "dropout(0.1) | add"

    def draw(self, device, **options):
        return mask_of(self.LINE, torch.ones(64, 64, device=device), torch.zeros(64, device=device), **options)

    def test_manual_seed_repeats(self, device):
        torch.manual_seed(3)
        first = [self.draw(device) for _ in range(3)]
        torch.manual_seed(3)
        second = [self.draw(device) for _ in range(3)]
        torch.manual_seed(4)
        other = self.draw(device)
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other)

    def test_rng_state_repeats(self, device):
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        first = self.draw(device)
        (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)
        assert torch.equal(self.draw(device), first)

    def test_a_generator_of_ones_own(self, device):
        torch.manual_seed(3)
        expected_of_default = self.draw(device)
        torch.manual_seed(3)
        first, second = self.draw(device, generator=seeded(device)), self.draw(device, generator=seeded(device))
        assert torch.equal(first, second)
        assert torch.equal(self.draw(device), expected_of_default), "generator= drew from the default generator"
        generator = seeded(device)
        assert not torch.equal(self.draw(device, generator=generator), self.draw(device, generator=generator))

    def test_inference_mode_and_no_grad_draw_alike(self, device):
        expected = self.draw(device, generator=seeded(device))
        with torch.no_grad():
            assert torch.equal(self.draw(device, generator=seeded(device)), expected)
        with torch.inference_mode():
            assert torch.equal(self.draw(device, generator=seeded(device)), expected)
        x = torch.ones(64, 64, device=device, requires_grad=True)
        with_grad = onepass.fused(self.LINE, x, torch.zeros(64, device=device), generator=seeded(device))
        assert torch.equal(with_grad != 0, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "line", ["dropout(0.1) | add", "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias"]
)
def test_checkpoint_draws_the_same_mask_again(line, use_reentrant, device):
    inputs = make_inputs(line, (33, 100), torch.float32, device)

    def step(x, *operands):
        results = as_tuple(onepass.fused(line, x, *operands))
        return torch.stack(results)

    grads = []
    for wrapped in (False, True):
        torch.manual_seed(8)
        leaves = [t.detach().clone().requires_grad_() for t in inputs.tensors]
        y = checkpoint(step, *leaves, use_reentrant=use_reentrant) if wrapped else step(*leaves)
        torch.rand(5, device=device)  # the generator moves on before backward recomputes
        y.square().sum().backward()
        grads.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for plain, recomputed in zip(*grads):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("line", ["dropout(0.1) | add", "mul(0.125) | mask | softmax | dropout(0.1)"])
def test_a_compiled_line_draws_eagers_mask(line, device):
    """Under manual_seed the compiled graph makes the draw that eager mode makes."""
    inputs = make_inputs(line, (33, 100), torch.float32, device)
    compiled = torch.compile(lambda *t: onepass.fused(line, *t), fullgraph=True, backend="aot_eager")
    torch.manual_seed(5)
    eager = [onepass.fused(line, *inputs.tensors) for _ in range(2)]
    torch.manual_seed(5)
    graph = [compiled(*inputs.tensors) for _ in range(2)]
    for a, b in zip(eager, graph):
        assert torch.equal(a, b)
    assert not torch.equal(graph[0], graph[1]), "the state is a constant of the graph"


def test_double_backward_through_the_state_is_not_needed(device):
    """The state is an integer tensor: it takes no part in differentiation."""
    inputs = make_inputs("dropout(0.1) | add", (4, 8), torch.float32, device)
    _, state = run("dropout(0.1) | add", inputs)
    assert state.dtype == torch.int64 and state.shape == (2,) and not state.requires_grad
