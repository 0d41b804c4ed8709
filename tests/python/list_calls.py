"""Calls of a line for several tensors, checked against PyTorch's in float64."""

import torch

import onepass
from helpers import Recorder, check_error

FEATURES = "layer_norm(0) | tanh | linear | bias | relu"
LINES = [
    "gelu",
    "bias | gelu_tanh",
    "gate(silu)",
    "bias | scale | add",
    "layer_norm(1e-5) | scale | bias",
    "bias | add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax",
    "mul(0.5) | causal | softmax",
    FEATURES,
    "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu",
    "linear",
]
ROWS = [line for line in LINES if "linear" not in line]  # of which all tensors are one operator
LEADING = [(3,), (2, 5), (1,), (0,), (1, 2, 4)]


class Call:
    """Tensors for a line: so many x of these leading shapes, operands for all or for each."""

    def __init__(
        self, line, leading, columns=64, *, own="", dtype=torch.float32, operand_dtype=None, device="cpu", seed=0
    ):
        self.line = onepass.Line(line)
        generator = torch.Generator().manual_seed(seed)
        if "causal" in line:
            leading = [s if len(s) > 0 else (1,) for s in leading]

        def leaf(shape, of_dtype, scale=1.0):
            t = (torch.randn(shape, generator=generator) * scale).to(device, of_dtype)
            return t.requires_grad_(of_dtype.is_floating_point)

        self.xs = [leaf((*s, columns), dtype) for s in leading]
        self.operands = []
        width = columns
        for i, word in enumerate(word for word in self.line.words if word.operand != "none"):
            count = len(leading) if own == "all" or (own == "some" and i % 2 == 0) else None
            if word.operand == "matrix":
                made = [leaf((3, columns), dtype, columns**-0.5) for _ in range(count or 1)]
                width = 3
            elif word.operand == "column":
                made = [leaf((width,), operand_dtype or dtype) for _ in range(count or 1)]
            elif word.kind == "mask":
                made = [torch.rand((width,), generator=generator).to(device) > 0.3 for _ in range(count or 1)]
            else:
                shapes = [(*s, width) for s in leading] if count else [(width,)]
                made = [leaf(s, operand_dtype or dtype) for s in shapes]
            self.operands.append(made if count else made[0])

    def leaves(self):
        flat = [*self.xs]
        for o in self.operands:
            flat += o if isinstance(o, list) else [o]
        return [t for t in flat if t.requires_grad]

    def run(self, of, stack=False, layouts=(lambda x: x,)):
        """By kinds of result, one for each tensor."""
        xs = [layouts[i % len(layouts)](x) for i, x in enumerate(self.xs)]
        results = of(xs, self.operands)
        return list(results) if self.line.keeps else [results]

    def together(self, stack=False, layouts=(lambda x: x,)):
        """Of one call."""
        kinds = self.run(lambda xs, o: self.line(xs, *o, stack=stack), stack, layouts)
        return [list(k) for k in kinds]

    def each(self, of):
        """Of one call for each."""
        results = [of(x, *[o[i] if isinstance(o, list) else o for o in self.operands]) for i, x in enumerate(self.xs)]
        return list(map(list, zip(*results))) if self.line.keeps else [results]

    def double(self):
        other = object.__new__(Call)
        other.line = self.line

        def wide(t):
            if isinstance(t, list):
                return [wide(each) for each in t]
            return t.detach().double().requires_grad_() if t.is_floating_point() else t

        other.xs, other.operands = wide(self.xs), wide(self.operands)
        return other


def upstream(kinds, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in kind] for kind in kinds]


def gradients(kinds, leaves, ups):
    flat = [r for kind in kinds for r in kind]
    return torch.autograd.grad(flat, leaves, [u for kind in ups for u in kind], allow_unused=True)


def check(call, stack=False, layouts=(lambda x: x,), slack=4.0):
    """Values and gradients, against PyTorch's in float64 and in the dtype; results are those of a call for each."""
    ours, theirs = call.together(stack, layouts), call.each(call.line.reference)
    wide = call.double()
    exact = wide.each(wide.line.reference)
    for k, (a, b, c) in enumerate(zip(ours, theirs, exact)):
        for i in range(len(call.xs)):
            assert a[i].shape == b[i].shape and a[i].dtype == b[i].dtype
        # All in one: a tensor of three numbers of `linear` can be small by cancellation, and PyTorch's error by luck.
        check_error(*(torch.cat([t.flatten() for t in of]) for of in (a, b, c)), f"result {k}", slack=slack)
    ups = upstream(ours)
    wide_ups = [[u.double() for u in kind] for kind in ups]
    for t, a, b, c in zip(
        call.leaves(),
        gradients(ours, call.leaves(), ups),
        gradients(theirs, call.leaves(), ups),
        gradients(exact, wide.leaves(), wide_ups),
    ):
        assert a.shape == t.shape and a.dtype == t.dtype
        check_error(a, b, c, f"gradient of {tuple(t.shape)}", slack=slack)


def ops_of(run):
    recorder = Recorder()
    with recorder:
        result = run()
    return result, [func.name().removeprefix("onepass::") for func, _, _ in recorder.calls]


def launches_of(run):
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = run()
        torch.cuda.synchronize()
    return result, [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
