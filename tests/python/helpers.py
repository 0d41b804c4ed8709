"""What the tests share: inputs for a line, running it beside PyTorch's chain, and the rule that judges the error.

The rule (the package's accuracy contract): the error against an fp64 reference is at most 1.5 times that of PyTorch's
own unfused chain at the same dtype, as the largest error and as the relative L2 norm, for results and every gradient.
Below a few units in the last place of the tensor's largest value both count as exact.
"""

import math
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass import _native
from onepass.reference import compose

RATIO = 1.5
# Units in the last place of the largest value. 16-bit results are fp32 arithmetic and one rounding: half a unit.
# A fp32 result carries the lane functions' error too, of up to two units, and a sum's.
FLOOR = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 4.0, torch.float64: 16.0}
HALF_TYPES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Lines of the named functions: compiled ahead of time on the CPU.
NAMED_LINES = (
    "bias | gelu",
    "bias | gelu_tanh",
    "bias | relu",
    "bias | silu",
    "layer_norm(1e-5) | scale | bias",
    "layer_norm(1e-5) | scale | bias | gelu",
    "rms_norm(1e-6) | scale",
    "rms_norm",
    "add | keep | layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias",
    "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale",
    "dropout(0.1) | add",
    "bias | gelu | dropout(0.1) | add",
    "gate(silu)",
    "gate(gelu)",
    "gate(relu)",
    "softmax",
    "mul(0.125) | mask | softmax | dropout(0.1)",
    "mul(0.125) | causal | softmax",
)
# With `linear`: what stands on its sides is compiled ahead of time, too.
LINEAR_LINES = (
    "linear",
    "linear | bias",
    "linear | bias | gelu",
    "linear | add",
    "linear | bias | dropout(0.1) | add",
    "layer_norm(1e-5) | scale | bias | linear | bias",
    "layer_norm(1e-5) | scale | bias | gelu | linear | bias | gelu_tanh",
    "layer_norm(1e-5) | linear",
    "rms_norm(1e-6) | scale | linear | bias | silu",
    "gate(silu) | linear",
    "bias | gelu | linear | bias",
    "softmax | linear",
    "add | keep | rms_norm(1e-6) | scale | linear",
    "add | keep | layer_norm(1e-5) | scale | bias | linear | bias | gelu",
    "dropout(0.1) | add | keep | linear | dropout(0.1) | add",
)
SCORES_LINES = (
    "scores",
    "scores | mul(0.125) | softmax",
    "scores | mul(0.125) | mask | softmax",
    "scores | mul(0.125) | causal | softmax",
    "scores | mul(0.125) | mask | softmax | dropout(0.1)",
)
ATTENTION_LINES = (
    "scores | mul(0.125) | softmax | values",
    "scores | mul(0.125) | mask | softmax | values",
    "scores | mul(0.125) | causal | softmax | values",
    "scores | mul(0.125) | mask | softmax | dropout(0.1) | values",
    "scores | mul(0.125) | mask | softmax | dropout(0.1) | keep | values",
)
# Any other line costs a compilation on the CPU, so the tests draw from these, which have every word and every order.
COMPILED_LINES = (
    "scale",
    "mul(0.7)",
    "add",
    "dropout(0.25)",
    "keep",
    "keep | add | keep | softplus | add",
    "mul(0.7) | softplus | mul(1.3) | tanh",
    "scale | bias | mish | add",
    "bias | scale | hardswish | mul(-0.5)",
    "elu(0.7) | scale | leaky_relu(0.2)",
    "add | gate(gelu_tanh) | keep | scale",
    "quick_gelu | gate(sigmoid) | bias | keep",
    "dropout(0.25) | scale | dropout(0.5) | add",
    "relu_squared | bias | rms_norm(1e-5) | gate(silu)",
    "bias | scale | add | layer_norm(1e-3) | mul(2.0) | tanh | add",
    "gate(silu) | keep | layer_norm(1e-5) | scale | keep | bias | sigmoid",
    "scale | mask | softmax | keep | scale",
    "mul(0.3) | causal | mask | softmax | dropout(0.3) | gate(relu)",
    "mish | rms_norm | scale | add | keep",
    "dropout(0.1) | rms_norm(1e-6) | dropout(0.2) | scale | bias",
    "add | softmax | mul(3.0) | add",
    "bias | layer_norm | elu | gate(elu(0.5)) | dropout(0.1)",
    "add | add | scale | rms_norm(1e-5) | bias | quick_gelu",
    "tanh | scale | keep | softmax",
    "scale | layer_norm(1e-5) | scale",
    "rms_norm(1e-6) | scale | add | keep | rms_norm(1e-5) | scale",
    "gelu | layer_norm(1e-5) | scale | bias | dropout(0.2) | softmax | mul(3.0) | keep | layer_norm | gate(silu)",
    "softmax | rms_norm(1e-7) | softmax",
    "sigmoid | log | softcap(2.0) | add | square",
    "clamp(-0.97, 1.47) | exp | sqrt | gate(abs) | neg | pow(3.0) | bias",
    "sub | times | round | gated(silu) | l2_norm | scale | keep | log_softmax | neg",
    "add | keep | rms_norm(1e-3) | scale | logsumexp | entropy",
    "bias | gelu | mean | sum",
    "add | keep | softcap(3.0) | cross_entropy(0.1, 0.01) | logprob",
    "bias | kl_div",
    "mul(2.0) | gelu | kl_div(0.3, 1.5)",
    "add | keep(float32) | rms_norm(1e-6) | scale",
    "scale | keep(float32) | gelu | add | keep | softmax",
)

NO_COMPILER = {"ONEPASS_CXX": "/nonexistent/compiler"}  # a process's environment

# With another torch the autograd library is compiled at first use, and stands in the cache.
BUILT_FOR_THIS_TORCH = (_native.LIBRARY.parent / f"autograd-{torch.__version__}.so").exists()


SHOWN = {
    "elu": "elu(0.7)",
    "leaky_relu": "leaky_relu(0.2)",
    "softcap": "softcap(2.0)",
    "clamp": "clamp(-0.51, 1.47)",  # at a bound the gradient is 0, as in PyTorch 2.15; in 2.11 it is 1
    "pow": "pow(3.0)",
}
OF_POSITIVE = ("log", "sqrt")


def shown(activation):
    """An activation with numbers that are not its defaults."""
    return SHOWN.get(activation, activation)


def words_of(line):
    return onepass.Line(line).words


def has_row_word(line):
    return any(word.kind == "row" for word in words_of(line))


@dataclass
class Inputs:
    """x and the operands of a line. Leaves; bool masks and what `rope` takes have no gradient."""

    x: torch.Tensor
    operands: list = field(default_factory=list)

    @property
    def tensors(self):
        return [self.x, *self.operands]

    @property
    def differentiable(self):
        return [t for t in self.tensors if t.requires_grad]

    def to(self, dtype, device=None):
        """The same numbers as fresh leaves of another dtype, and device."""
        of = {True: dtype, False: None}
        moved = [t.detach().to(device, of[t.is_floating_point()]) for t in self.tensors]
        return Inputs(*_split([_leaf(t, old.requires_grad) for t, old in zip(moved, self.tensors)]))

    def clone(self):
        return Inputs(*_split([_leaf(t.detach().clone(), t.requires_grad) for t in self.tensors]))


def _split(tensors):
    return tensors[0], tensors[1:]


def _leaf(tensor, differentiable=True):
    return tensor.requires_grad_(differentiable) if tensor.is_floating_point() else tensor


def with_strategy(line, name):
    """The line, whose `linear` or `scores` names its strategy."""
    return line.replace("linear", f"linear({name})").replace("scores", f"scores({name})")


def make_inputs(
    line,
    shape,
    dtype,
    device="cpu",
    *,
    parameter_dtype=None,
    bool_mask=True,
    seed=0,
    out_features=24,
    tables_of_pairs=False,
):
    """Normal numbers of the given dtype, columns in parameter_dtype; a mask keeps four of five, at least one a row.

    out_features: of `linear`, whose matrix keeps a row's size, or how many keys `scores` has.
    tables_of_pairs: whether those of `rope` have a number for each pair, else for each number that it turns.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size, of):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(of).to(device)

    operands, constants = [], []
    x = normal(shape, dtype)
    words = words_of(line)
    for word, behind in zip(words, [*words[1:], None]):
        if word.operand == "matrix":
            operands.append((normal((out_features, shape[-1]), torch.float64) / math.sqrt(max(shape[-1], 1))).to(dtype))
            shape = (*shape[:-1], out_features)
        elif word.operand == "keys":
            operands.append(normal((*shape[:-2], out_features, shape[-1]), dtype))
            shape = (*shape[:-1], out_features)
        elif word.operand == "values":
            operands.append(normal((*shape[:-2], out_features, shape[-1] // 2 + 3), dtype))
        elif word.name == "mask":
            keep = torch.rand(shape, generator=generator) < 0.8
            if shape[-1]:
                keep[..., 0] = True
            mask = keep.to(device) if bool_mask else normal(shape, dtype).masked_fill(~keep.to(device), -math.inf)
            operands.append(mask)
        elif word.operand == "column":
            numbers = channels_of(shape[-1]) if "by_channels" in word.properties else shape[-1]
            operands.append(normal((numbers,), parameter_dtype or dtype))
        elif word.operand == "target":  # one of seven is ignored
            target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
            ignored = torch.rand(shape[:-1], generator=generator) < 1 / 7
            operands.append(target.masked_fill(ignored, int(word.parameters[-1])).to(device))
        elif word.kind == "rotary":
            turned = int(word.numbers[0]) if word.numbers else shape[-1] if shape else 1
            columns = turned // 2 if tables_of_pairs else turned
            operands += [normal((*shape[:-1], columns), dtype) for _ in range(word.operands)]
            constants += operands[-2:]
        elif word.operand == "tensor":
            of = _kept_dtype(behind, dtype) if behind is not None else dtype  # a residual is kept as it comes
            operands.append(normal(shape, of))
    return Inputs(*_split([_leaf(t, all(t is not c for c in constants)) for t in (x, *operands)]))


def channels_of(columns):
    """How many channels a row of so many is made of: few columns each, but two at least where that may be."""
    return columns // next((n for n in range(2, columns + 1) if columns % n == 0), 1)


def _kept_dtype(word, dtype):
    return torch.promote_types(dtype, getattr(torch, word.dtype)) if word.dtype and word.kind == "keep" else dtype


class Recorder(TorchDispatchMode):
    """Notes every call of an onepass op that runs under it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "onepass":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def dropout_state(self):
        for func, args, kwargs in self.calls:
            for position, argument in enumerate(func._schema.arguments):
                if argument.name == "dropout_state":
                    state = args[position] if position < len(args) else kwargs.get("dropout_state")
                    if state is not None:
                        return state.clone()
        return None


def as_tuple(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def run(line, inputs, *, training=True, generator=None):
    """The fused line's results, and the dropout state that it drew."""
    recorder = Recorder()
    with recorder:
        results = onepass.fused(line, inputs.x, *inputs.operands, training=training, generator=generator)
    assert recorder.calls, f"no kernel ran {line!r}: it was composed of PyTorch operators"
    return as_tuple(results), recorder.dropout_state


def upstream(results, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype).to(r.device) for r in results]


def gradients(results, inputs, grads):
    return torch.autograd.grad(results, inputs.differentiable, grads, allow_unused=True)


class _Rounded(torch.autograd.Function):
    """Rounds to a narrower dtype on the way forward, as a stored value is; the gradient passes."""

    @staticmethod
    def forward(ctx, value, dtype):
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def compose_exactly(line, inputs, state, dtype, *, round_kept, training=True):
    """The line in float64, with `keep` as in exact arithmetic or rounding to dtype as its stored tensor does."""
    if not round_kept:
        return compose(words_of(line), inputs.x, inputs.operands, state, training, eps_dtype=dtype)
    operands, value, kept, numbers, dropouts = iter(inputs.operands), inputs.x, [], [], 0
    for word in words_of(line):
        if word.kind in ("keep", "rounding"):
            value = _Rounded.apply(value, _kept_dtype(word, dtype))
            kept += [value] if word.kind == "keep" else []
            continue
        taken = [next(operands) for _ in range(word.operands)] if word.operand != "none" else []
        numbered = (
            None if state is None else state.to(value.device) ^ torch.tensor([0, dropouts << 32], device=value.device)
        )
        (result,) = compose([word], value, taken, numbered, training, eps_dtype=dtype)
        if "gives_number" in word.properties:
            numbers.append(result)
        else:
            value = result
        dropouts += word.kind == "dropout"
    return (*(numbers[:1] or [value]), *kept, *numbers[1:])


def check_line(line, inputs, *, training=True, grad_outputs=None, floor_scales=None, slack=1.0):
    """Runs a line, PyTorch's chain and the exact references; applies the rule to every result and gradient.

    floor_scales: one number a gradient, where rounding is to be measured against something else than the gradient's
    own largest value (a normalisation of two columns, whose exact gradient is almost nothing).
    slack: times the floor. On a few numbers, long lines round by luck more often or less often than PyTorch's chain.
    """
    dtype = inputs.x.dtype
    results, state = run(line, inputs, training=training)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    for result, expected in zip(results, _native.result_dtypes(line, dtype), strict=True):
        assert result.dtype == expected and result.is_contiguous()
    grad_outputs = upstream(results) if grad_outputs is None else grad_outputs
    ours = gradients(results, inputs, grad_outputs)

    chain_inputs = inputs.clone()
    chain = compose(words_of(line), chain_inputs.x, chain_inputs.operands, state, training)
    theirs = gradients(chain, chain_inputs, grad_outputs)

    exact = []
    wide = [g.double().cpu() for g in grad_outputs]
    rounds = dtype in HALF_TYPES and any(word.kind in ("keep", "rounding") for word in words_of(line))
    for round_kept in (False, True) if rounds else (False,):
        # On the CPU: PyTorch's fp64 on CUDA is not exact everywhere (hardswish is off by 2e-8, seen in 2.11).
        exact_inputs = inputs.to(torch.float64, "cpu")
        outputs = compose_exactly(line, exact_inputs, state, dtype, round_kept=round_kept, training=training)
        exact.append((outputs, gradients(outputs, exact_inputs, wide)))

    # What comes through a matrix product is rounded to x's dtype, numbers of float32 behind it, too.
    through_product = dtype in HALF_TYPES and onepass.Line(line).weight is not None
    for i, result in enumerate(results):
        assert result.shape == chain[i].shape
        expected, precision = [outputs[i] for outputs, _ in exact], dtype if through_product else None
        check_error(result, chain[i], expected, f"result {i} of {line!r}", precision=precision, slack=slack)
    for i, tensor in enumerate(inputs.differentiable):
        what = f"gradient {i} of {line!r}"
        if ours[i] is None or theirs[i] is None:
            assert ours[i] is None or not ours[i].any(), f"{what}: given although nothing depends on it"
            continue
        assert ours[i].dtype == tensor.dtype and ours[i].shape == tensor.shape, what
        scale = None if floor_scales is None else floor_scales[i]
        # An fp64 operand beside a narrower x is computed with in fp32, by contract.
        precision = arithmetic if tensor.dtype == torch.float64 else tensor.dtype
        if through_product:
            precision = dtype
        check_error(
            ours[i], theirs[i], [grads[i] for _, grads in exact], what, scale=scale, precision=precision, slack=slack
        )
    return results, ours


LARGEST_CODES = {"fp8": 448.0, "fp8e5m2": 57344.0, "int8": 127.0}


def check_codes(line, inputs):
    """Codes times scales are the values before them to half a unit of a code, and rounding of the words before."""
    dtype, name = inputs.x.dtype, words_of(line)[-1].dtype
    (codes, *kept, scale), state = run(line, inputs)
    before, _, _ = line.rpartition(" | ")
    wide = inputs.to(torch.float64)
    rounds = dtype in HALF_TYPES and any(word.kind in ("keep", "rounding") for word in words_of(before))
    value, *their_kept = compose_exactly(before, wide, state, dtype, round_kept=rounds)
    unit = {"fp8": 2.0**-4, "fp8e5m2": 2.0**-3, "int8": 0.0}[name]
    group = words_of(line)[-1].group or value.shape[-1]  # columns that share a scale
    of_group = (*scale.shape, group)
    value, found, wide_scale = value.reshape(of_group), codes.double().reshape(of_group), scale.double().unsqueeze(-1)
    half = (unit * value.abs()).maximum(wide_scale * (0.5 if name == "int8" else 2.0**-10))
    largest = value.abs().amax(-1, keepdim=True)
    rounding = 1e-5 if not rounds else 8 * torch.finfo(dtype).eps
    assert ((found * wide_scale - value).abs() <= half + rounding * largest).all(), line
    torch.testing.assert_close(wide_scale, largest / LARGEST_CODES[name], rtol=rounding, atol=2.0**-126)
    for ours, theirs in zip(kept, their_kept, strict=True):
        error = (ours.double() - theirs).abs().max()
        assert error <= max(2 * torch.finfo(ours.dtype).eps, 1e-5) * theirs.abs().max(), line
    return codes, *kept, scale


def check_error(ours, theirs, exact, what, *, scale=None, precision=None, slack=1.0):
    """Passes where ours is near enough to one of the exact tensors: see the rule at the top."""
    exact = exact if isinstance(exact, (list, tuple)) else [exact]
    failures = [failure for e in exact if (failure := _excess(ours, theirs, e, scale, precision or ours.dtype, slack))]
    assert len(failures) < len(exact), f"{what} ({ours.dtype}, {tuple(ours.shape)}): {failures[0]}"


def _excess(ours, theirs, exact, scale, precision, slack):
    """What is wrong, or None. Elements that the dtype cannot hold, and NaN, must be PyTorch's or the exact ones."""
    dtype = ours.dtype
    ours, theirs, exact = ours.detach().double(), theirs.detach().double(), exact.detach().double().to(ours.device)
    held = exact.isfinite() & (exact.abs() < 0.999 * torch.finfo(dtype).max)
    if not ours[held].isfinite().all():
        return f"{int((~ours[held].isfinite()).sum())} elements are not finite though the exact ones are"
    special = exact[~held]
    if not torch.equal(ours[~held].isnan(), special.isnan()) or (ours[~held].isfinite() & special.isinf()).any():
        return "infinite and NaN elements are not where they should be"
    ours, theirs, exact = ours[held], theirs[held], exact[held]
    if exact.numel() == 0:
        return None
    unit = slack * FLOOR[precision] * torch.finfo(precision).eps
    largest = max(exact.abs().max().item(), torch.finfo(dtype).tiny, scale or 0.0)
    error, their_error = (ours - exact).abs().max().item(), (theirs - exact).abs().nan_to_num(math.inf).max().item()
    if error > max(RATIO * their_error, unit * largest):
        at = (ours - exact).abs().argmax()
        return (
            f"largest error {error:.3e} against PyTorch's {their_error:.3e} "
            f"(floor {unit * largest:.3e}; {ours[at].item():.9g} where exact is {exact[at].item():.9g})"
        )
    norm, floor = exact.norm().item(), unit * max(exact.norm().item(), (scale or 0.0) * math.sqrt(exact.numel()))
    error, their_error = (ours - exact).norm().item(), (theirs - exact).nan_to_num(math.inf).norm().item()
    if error > max(RATIO * their_error, floor, torch.finfo(dtype).tiny):
        return f"relative L2 error {error / norm:.3e} against PyTorch's {their_error / norm:.3e}"
    return None


def assert_equal(ours, expected, what=""):
    """Bit for bit, NaN included."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, what
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    assert same.all(), f"{what}: {int((~same).sum())} of {same.numel()} elements differ"
