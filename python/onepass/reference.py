"""Every word in plain PyTorch: what a line means, what the tests compare with, and what runs where nothing compiles."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    *("ACTIVATIONS", "IN_TORCH", "WORDS", "InTorch", "add", "compose", "dropout_numbers", "forget", "philox"),
    *("machine_epsilon", "words_called"),
]


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Written out, in the arithmetic of F.layer_norm, whose third derivatives are wrong (torch 2.15)."""
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # what rounding took from the mean
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def softmax(x: Tensor) -> Tensor:
    """Zeros, with zero gradients, where a whole row is -inf."""
    fully_masked = (x == -math.inf).all(-1, keepdim=True)
    return F.softmax(x.masked_fill(fully_masked, 0), -1).masked_fill(fully_masked, 0)


def _softmax_from_result(y: Tensor, dy: Tensor) -> Tensor:
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def _log_softmax_from_result(y: Tensor, dy: Tensor) -> Tensor:
    return dy - y.exp() * dy.sum(-1, keepdim=True)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(_wide(x), -1)


def entropy(x: Tensor) -> Tensor:
    """Of softmax(x); what is -inf counts as nothing."""
    log_p = F.log_softmax(_wide(x), -1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(-1)


def cross_entropy(x: Tensor, target: Tensor, label_smoothing=0.0, z_loss=0.0, ignore_index=-100.0) -> Tensor:
    """Of each row; 0 of an ignored one."""
    if target.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"onepass: target must be torch.int64 or torch.int32, got {target.dtype}")
    wide, ignored = _wide(x).reshape(target.numel(), x.shape[-1]), target.flatten() == ignore_index
    loss = F.cross_entropy(
        wide,
        target.flatten().long(),
        ignore_index=int(ignore_index),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(wide, -1).square().masked_fill(ignored, 0)
    return loss.view(target.shape)


def logprob(x: Tensor, target: Tensor, ignore_index=-100.0) -> Tensor:
    """Of each row's target; 0 of an ignored one."""
    return -cross_entropy(x, target, ignore_index=ignore_index)


def kl_div(x: Tensor, teacher: Tensor, beta=0.0, temperature=1.0) -> Tensor:
    """Of each row, from p = softmax(x / temperature) and q = softmax(teacher / temperature): KL(q || p), with beta 1
    KL(p || q), between them beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q."""
    wide = torch.promote_types(_wide(x).dtype, _wide(teacher).dtype)
    log_p = F.log_softmax(x.to(wide) / temperature, -1)
    log_q = F.log_softmax(teacher.to(wide).expand_as(x) / temperature, -1)
    if beta in (0, 1):
        of = _divergence(log_p, log_q) if beta == 1 else _divergence(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
        of = beta * _divergence(log_q, log_m) + (1 - beta) * _divergence(log_p, log_m)
    return of.to(_wide(x).dtype)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ p log(p / q); what has no probability counts as nothing."""
    p, apart = log_p.exp(), log_p - log_q
    return (p * apart.masked_fill(p == 0, 0)).sum(-1)


CODES = {"fp8": torch.float8_e4m3fn, "fp8e5m2": torch.float8_e5m2, "int8": torch.int8}
"""What `quantize` stores, by its names."""
_LEAST_SCALE = 2.0**-126  # the smallest normal float32: its inverse is finite


def quantize(x: Tensor, *how: Any, group: int = 0) -> Any:
    """Codes of a dtype, and their scale [..., 1]: x is about codes · scale. Or, with a scale that is given before the
    dtype, codes alone. Or codes of groups of columns, with a scale for each [..., N / group]. Nothing has a
    gradient."""
    if group:
        if not x.dim() or x.shape[-1] % group:
            raise RuntimeError(f"quantize(): expected rows of a multiple of {group} columns, got x of {list(x.shape)}")
        codes, scales = quantize(x.unflatten(-1, (x.shape[-1] // group, group)), *how)
        return codes.flatten(-2), scales.squeeze(-1)
    *given, dtype = how
    wide, of = _wide(x.detach()), CODES[dtype]
    largest = torch.iinfo(of).max if of == torch.int8 else torch.finfo(of).max
    if given:
        return _codes(wide / given[0].detach().to(wide.dtype), of, largest)
    magnitude = wide.abs().amax(-1, keepdim=True) if x.shape[-1:] != (0,) else wide.new_zeros((*x.shape[:-1], 1))
    # By a tensor: CUDA tensors divided by a number are multiplied by its rounded inverse.
    scale = (magnitude / torch.full_like(magnitude, largest)).clamp(min=_LEAST_SCALE)
    return _codes(wide * scale.reciprocal(), of, largest), scale


def _codes(scaled: Tensor, of: torch.dtype, largest: float) -> Tensor:
    values = scaled.clamp(-largest, largest).float()  # of float64, too: as the kernels convert it
    return (values.nan_to_num(0).round() if of == torch.int8 else values).to(of)


def _wide(x: Tensor) -> Tensor:
    """In the arithmetic's dtype, which that of an ending's number is."""
    return x if x.dtype == torch.float64 else x.float()


def mask(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else x + mask


def causal(x: Tensor) -> Tensor:
    above_diagonal = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(above_diagonal, -math.inf)


def dropout(x: Tensor, p: float = 0.5, numbers: Tensor | None = None) -> Tensor:
    """With `numbers` (0 to 65535, one an element) the mask that the kernels draw, else torch's own dropout.

    p is rounded to a multiple of 2^-16, and what is kept is scaled by the inverse of that rounded probability.
    """
    if numbers is None:
        return F.dropout(x, p)
    threshold = int(p * 65536 + 0.5)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return torch.where(numbers >= threshold, x * scale, 0)


def bias(x: Tensor, b: Tensor, channels: bool = False) -> Tensor:
    return x + (of_columns(b, x.shape[-1]) if channels else b)


def scale(x: Tensor, g: Tensor, c: float | None = None, channels: bool = False) -> Tensor:
    """With a number, x (c + g) with one rounding, of a product that does not round c + g."""
    g = of_columns(g, x.shape[-1]) if channels else g
    return x * g if c is None else torch.addcmul(x if c == 1 else c * x, x, g)


def of_columns(of_channels: Tensor, columns: int) -> Tensor:
    """Numbers of channels, each for as many neighbouring columns.

    Raises:
        RuntimeError: where those are not as many.
    """
    if not of_channels.dim() or not of_channels.shape[-1] or columns % of_channels.shape[-1]:
        raise RuntimeError(
            f"onepass: expected a number for each channel, as many as divide the {columns} columns of x, "
            f"got {list(of_channels.shape)}"
        )
    each = columns // of_channels.shape[-1]
    return of_channels.unsqueeze(-1).expand(*of_channels.shape, each).flatten(-2)


def rope(x: Tensor, cos: Tensor, sin: Tensor, r: float | None = None, interleaved: bool = False) -> Tensor:
    """cos and sin have r numbers, or one for each pair of them."""
    if r is not None and r < x.shape[-1]:
        first, rest = x.split((int(r), x.shape[-1] - int(r)), -1)
        return torch.cat((rope(first, cos, sin, None, interleaved), rest), -1)
    cos, sin = (_for_each(table, x.shape[-1], interleaved) for table in (cos, sin))
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return x * cos + turned * sin


def _for_each(table: Tensor, columns: int, interleaved: bool) -> Tensor:
    """One number for each of the columns, of a table that may have one for each pair."""
    if table.dim() == 0 or table.shape[-1] in (1, columns):
        return table
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def scores(x: Tensor, keys: Tensor) -> Tensor:
    return x @ keys.transpose(-2, -1)


def values(x: Tensor, values: Tensor) -> Tensor:
    return x @ values


def _no_number(inplace: bool = False) -> tuple[float, ...]:
    return ()


@dataclass(frozen=True)
class InTorch:
    """A word in PyTorch: what it computes, and how models say it. `fuse`, `explain` and the prices know an activation
    from here and from its descriptor.

    Attributes:
        reference: of x, operands and numbers.
        targets: functions that compute it, and names of a tensor's methods: what Dynamo leaves in a graph. Modules call
            one of them. The result is a new tensor, or x overwritten.
        numbers: the word's numbers, from the arguments that targets take behind x; None where the call is not the word.
        formulas: how models write it out, as expressions of `x` and of the word's numbers; mean and var are those of
            the last dimension.
        from_result: x's gradient, of the result and its gradient, where a line may save the result in x's place.
    """

    reference: Callable[..., Tensor]
    targets: tuple[Any, ...] = ()
    numbers: Callable[..., tuple[float, ...] | None] = _no_number
    formulas: tuple[str, ...] = ()
    from_result: Callable[[Tensor, Tensor], Tensor] | None = None


def _exponent(exponent: Any) -> tuple[float, ...] | None:
    return (float(exponent),) if isinstance(exponent, (int, float)) and math.isfinite(exponent) else None


def clamp(x: Tensor, lo: float, hi: float) -> Tensor:
    return torch.clamp(x, None if lo == -math.inf else lo, None if hi == math.inf else hi)


def _bounds(min: Any = None, max: Any = None) -> tuple[float, ...] | None:
    given = [bound for bound in (min, max) if bound is not None]
    if not all(isinstance(bound, (int, float)) and math.isfinite(bound) for bound in given):
        return None
    return (-math.inf if min is None else float(min), math.inf if max is None else float(max))


_nn = torch._C._nn
_ROOT = math.sqrt(2 / math.pi)

_ACTIVATIONS: dict[str, InTorch] = {
    "relu": InTorch(F.relu, (F.relu, torch.relu, "relu", torch.relu_, "relu_")),
    "gelu": InTorch(
        F.gelu,
        (F.gelu, _nn.gelu),
        lambda approximate="none": () if approximate == "none" else None,
        (f"0.5 * x * (1 + erf({math.sqrt(0.5)} * x))",),
    ),
    "gelu_tanh": InTorch(
        lambda x: F.gelu(x, approximate="tanh"),
        (F.gelu, _nn.gelu),
        lambda approximate="none": () if approximate == "tanh" else None,
        (
            f"0.5 * x * (1 + tanh({_ROOT} * (x + 0.044715 * x ** 3)))",
            f"0.5 * x * (1 + tanh({_ROOT} * x * (1 + 0.044715 * x * x)))",
            f"0.5 * x * (1 + tanh({_ROOT} * (x + 0.044715 * x * x * x)))",
        ),
    ),
    "silu": InTorch(F.silu, (F.silu, _nn.silu), formulas=("x * sigmoid(x)",)),
    "tanh": InTorch(torch.tanh, (torch.tanh, F.tanh, "tanh", torch.tanh_, "tanh_")),
    "sigmoid": InTorch(torch.sigmoid, (torch.sigmoid, F.sigmoid, "sigmoid", torch.sigmoid_, "sigmoid_")),
    "relu_squared": InTorch(lambda x: F.relu(x).square(), formulas=("relu(x) ** 2", "square(relu(x))")),
    "quick_gelu": InTorch(lambda x: x * torch.sigmoid(1.702 * x), formulas=("x * sigmoid(1.702 * x)",)),
    "softplus": InTorch(
        F.softplus,
        (F.softplus, _nn.softplus),
        lambda beta=1.0, threshold=20.0: () if beta == 1 and threshold == 20 else None,
    ),
    "mish": InTorch(F.mish, (F.mish, _nn.mish), formulas=("x * tanh(softplus(x))",)),
    "hardswish": InTorch(F.hardswish, (F.hardswish, _nn.hardswish)),
    "elu": InTorch(lambda x, alpha=1.0: F.elu(x, alpha), (F.elu,), lambda alpha=1.0, inplace=False: (float(alpha),)),
    "leaky_relu": InTorch(
        lambda x, negative_slope=0.01: F.leaky_relu(x, negative_slope),
        (F.leaky_relu, _nn.leaky_relu),
        lambda negative_slope=0.01, inplace=False: (float(negative_slope),),
    ),
    "softsign": InTorch(F.softsign, (F.softsign,), formulas=("x / (1 + abs(x))",)),
    **{name: InTorch(getattr(torch, name), (getattr(torch, name), name)) for name in ("exp", "log", "sqrt", "abs")},
    "neg": InTorch(torch.neg),  # of a product with -1, which a negative is read as
    "square": InTorch(torch.square, (torch.square, "square")),
    "softcap": InTorch(lambda x, c: c * torch.tanh(x / c), formulas=("c * tanh(x / c)",)),
    "clamp": InTorch(
        clamp,
        (torch.clamp, torch.clip, torch.clamp_min, "clamp", "clip", "clamp_min"),
        _bounds,
    ),
    "pow": InTorch(lambda x, p: torch.pow(x, p), (torch.pow, operator.pow, "pow"), _exponent),
}

IN_TORCH: dict[str, InTorch] = {
    **_ACTIVATIONS,
    "bias": InTorch(bias),
    "scale": InTorch(scale),
    "mul": InTorch(lambda x, c: x * c),
    "add": InTorch(lambda x, r: x + r),
    "sub": InTorch(lambda x, t: x - t),
    "times": InTorch(lambda x, t: x * t),
    "div": InTorch(lambda x, t: x / t),
    "gate": InTorch(lambda x, u, activation: activation(x) * u),
    "gated": InTorch(lambda x, u, activation: x * activation(u)),
    "mask": InTorch(mask),
    "causal": InTorch(causal),
    "rope": InTorch(rope),
    "dropout": InTorch(dropout),
    "keep": InTorch(lambda x: x),
    "round": InTorch(lambda x: x),
    "linear": InTorch(F.linear),
    "scores": InTorch(scores),
    "values": InTorch(values),
    "layer_norm": InTorch(
        layer_norm,
        formulas=(
            "(x - mean(x)) / sqrt(var(x) + eps)",
            "(x - mean(x)) * rsqrt(var(x) + eps)",
            "(x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)",
            "(x - mean(x)) * rsqrt(mean((x - mean(x)) ** 2) + eps)",
        ),
    ),
    "rms_norm": InTorch(
        rms_norm,
        formulas=(
            "x * rsqrt(mean(x ** 2) + eps)",
            "x * rsqrt(mean(x * x) + eps)",
            "x * rsqrt(mean(square(x)) + eps)",
            "x / sqrt(mean(x ** 2) + eps)",
        ),
    ),
    "l2_norm": InTorch(lambda x, eps=1e-12: F.normalize(x, dim=-1, eps=eps)),
    "softmax": InTorch(softmax, from_result=_softmax_from_result),
    "log_softmax": InTorch(lambda x: F.log_softmax(x, -1), from_result=_log_softmax_from_result),
    "logsumexp": InTorch(logsumexp),
    "entropy": InTorch(entropy),
    "sum": InTorch(lambda x: _wide(x).sum(-1)),
    "mean": InTorch(lambda x: _wide(x).mean(-1)),
    "amax": InTorch(lambda x: _wide(x).amax(-1)),
    "cross_entropy": InTorch(cross_entropy),
    "logprob": InTorch(logprob),
    "kl_div": InTorch(kl_div),
    "quantize": InTorch(quantize),
}
"""Every word of the vocabulary, users' words among them."""

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {name: word.reference for name, word in _ACTIVATIONS.items()}
WORDS: dict[str, Callable[..., Tensor]] = {name: word.reference for name, word in IN_TORCH.items()}


def add(name: str, word: InTorch, is_activation: bool) -> None:
    """A user's word."""
    IN_TORCH[name], WORDS[name] = word, word.reference
    if is_activation:
        ACTIVATIONS[name] = word.reference
    _called.cache_clear()


def forget(name: str) -> None:
    """A user's word, which is none any more."""
    for table in (IN_TORCH, WORDS, ACTIVATIONS):
        table.pop(name, None)
    _called.cache_clear()


def words_called(target: Any) -> tuple[str, ...]:
    """The words that a call of this function, or of a method of this name, may be."""
    return _called().get(target, ())


@functools.cache
def _called() -> dict[Any, tuple[str, ...]]:
    found: dict[Any, tuple[str, ...]] = {}
    for name, word in IN_TORCH.items():
        for target in word.targets:
            found[target] = (*found.get(target, ()), name)
    return found


def compose(
    words: Sequence[Any],
    x: Tensor,
    operands: Sequence[Tensor] = (),
    dropout_state: Tensor | None = None,
    training: bool = True,
    *,
    eps_dtype: torch.dtype | None = None,
    dropouts: int = 0,
    first_row: int = 0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Runs a line word by word as plain, differentiable PyTorch.

    Args:
        words: the line's words, as `Line.words` gives them.
        x: (..., N), floating point.
        operands: the tensors that the words take, in the order in which the words stand.
        dropout_state: int64 [2], seed and offset: dropout draws exactly the mask that the kernels draw. Without it
            `torch.nn.functional.dropout` draws from torch's generator.
        training: whether dropout acts.
        eps_dtype: the dtype whose machine epsilon a `rms_norm` without a number adds, x's by default. A reference
            that computes in a wider dtype passes the original one.
        dropouts: how many dropouts stand before these words, where they are a part of a line.
        first_row: of x among those of a list, whose dropout counts all their rows.
        dtype: of the whole line's x, where these words are a part of one that begins with a value kept in another.

    Returns:
        The result, then the values of each `keep` in order, all of x's dtype (of a `keep(float32)` of float32, or
        float64 beside float64), behind a contraction of its matrix's; of endings their numbers, the first one's as the
        result, the others' behind the kept values; of `quantize` codes as the result, and behind the kept values the
        scale. In between, types promote as PyTorch's operators promote them; a kept value is rounded to its dtype
        before the line goes on, and what a contraction takes to its matrix's.
    """
    pending = iter(operands)
    kept: list[Tensor] = []
    number: Tensor | None = None
    value, dtype = x, dtype or x.dtype
    for word in words:
        function = WORDS[word.name]
        if word.kind == "dropout":
            if training:
                numbers = None
                if dropout_state is not None:
                    numbers = dropout_numbers(value.shape, dropout_state, dropouts, x.device, first_row)
                value = function(value, *word.numbers, numbers)
            dropouts += 1
            continue
        if word.kind in ("keep", "rounding"):
            value = value.to(torch.promote_types(dtype, torch.float32) if word.dtype else dtype)
            kept += [value] if word.kind == "keep" else []
            continue
        taken = [] if word.operand == "none" else [next(pending) for _ in range(word.operands)]
        if word.kind == "contraction":
            dtype = taken[0].dtype
            value = value.to(dtype)
        arguments: list[Any] = [value, *taken]
        if word.option:
            function = functools.partial(function, **{word.option: True})
        if word.group:
            function = functools.partial(function, group=word.group)
        if word.kind == "gate":
            arguments.append(lambda v, f=ACTIVATIONS[word.activation], numbers=word.numbers: f(v, *numbers))
        else:
            arguments += [word.dtype] if word.dtype else []
            arguments += [machine_epsilon(eps_dtype or x.dtype) if math.isnan(n) else n for n in word.parameters]
        result = function(*arguments)
        if "gives_codes" in word.properties:
            number, *scale = result if isinstance(result, tuple) else (result,)  # in the result's place
            kept += scale
        elif "gives_number" not in word.properties:
            value = result
        elif number is None:
            number = result
        else:
            kept.append(result)
    return (value.to(dtype) if number is None else number, *kept)


def machine_epsilon(dtype: torch.dtype) -> float:
    """Of the arithmetic: `torch.rms_norm` without eps adds float32's for bfloat16 and float16, too (read off 2.15)."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def dropout_numbers(
    shape: Sequence[int], state: Tensor, ordinal: int, device: torch.device | str, first_row: int = 0
) -> Tensor:
    """The 16 random bits of every element, as int64 from 0 to 65535, of the line's dropout number `ordinal`.

    Eight neighbours of a row share one Philox call. Its counter holds their group, counted over the whole tensor, and
    the offset; its key is the seed: a pure function of the state and the logical place, the same on every device.
    """
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    groups_a_row = (columns + 7) // 8
    seed, offset = state.to(device).unbind()
    group = torch.arange(rows * groups_a_row, dtype=torch.int64, device=device) + first_row * groups_a_row
    counter = (low_word(group), high_word(group), low_word(offset), high_word(offset) ^ ordinal)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (low_word(seed), high_word(seed)))), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.reshape(rows, groups_a_row * 8)[:, :columns].reshape(tuple(shape))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-7 (Salmon et al., SC 2011): four counter words and two key words to four random words.

    Words are int64 tensors that hold 32 bits. A product wraps modulo 2^64, and masking after the shift undoes the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_word(second) ^ c1 ^ k0, low_word(second), high_word(first) ^ c3 ^ k1, low_word(first)
        k0, k1 = low_word(k0 + 0x9E3779B9), low_word(k1 + 0xBB67AE85)
    return c0, c1, c2, c3


def low_word(value: Tensor) -> Tensor:
    return value & 0xFFFFFFFF


def high_word(value: Tensor) -> Tensor:
    return (value >> 32) & 0xFFFFFFFF
