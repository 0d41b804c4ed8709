"""Losses and log-probabilities of rows of logits, and of rows of which `linear` makes logits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .._arguments.shapes import check_tensor, given
from .._arguments.symbolic import traceable
from ..autograd import is_jit_traced, is_transformed
from ..call import fused
from ._weighted_sum import weighted_sum

_REDUCTIONS = ("none", "mean", "sum")


@traceable
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The cross entropy of softmax(input) and a class each, with `torch.nn.functional.cross_entropy`'s arguments.

    Args:
        input: logits, (C,), (N, C) or (N, C, d1, ...), floating point. The classes are best the last dimension in
            memory, as in (N, C): others are copied.
        target: (), (N,) or (N, d1, ...), int64, int32 or uint8: classes from 0 to C - 1, or `ignore_index`. Or
            floating point and of input's shape: the probability of each class, which may have a gradient.
        weight: (C,), of each class; it gets no gradient.
        ignore_index: the target whose loss and gradient are 0, and which a mean does not count.
        reduction: "none", "mean" (of the targets that are not ignored, by their weights; of rows of probabilities) or
            "sum".
        label_smoothing: from 0 to 1, the part of a target that all classes share (Szegedy et al., arXiv:1512.00567).
        z_loss: times the square of log Σ exp(input), added to each loss (Chowdhery et al., arXiv:2204.02311).
        softcap: c of c tanh(input / c), in input's place; None leaves it.

    Returns:
        A number, or target's shape for "none"; float32, of float64 logits float64.

    Raises:
        IndexError: a target that is no class, on the CPU; on CUDA a device-side assertion fails, as PyTorch's.
        RuntimeError: shapes that do not fit, a weight that is not of floating-point numbers, an ignore_index from 0 on
            beside probabilities.
        TypeError: a target that is none of these, an ignore_index that is not int.
        ValueError: an unknown reduction, or label_smoothing that is not from 0 to 1.

    Saved for backward: input, target, and two numbers a row.
    Line: `cross_entropy(label_smoothing, z_loss, ignore_index)`; of probabilities `log_softmax | times | scale | sum`.
    """
    check_tensor("cross_entropy", "input", input)
    check_tensor("cross_entropy", "target", target)
    words = () if softcap is None else (f"softcap({float(softcap)!r})",)
    logits = input.movedim(1, -1) if input.dim() > 2 else input  # noqa: PLR2004
    if target.is_floating_point() and target.dim() > 2:  # noqa: PLR2004
        target = target.movedim(1, -1)
    of = _Logits("cross_entropy", words, logits, (), logits.shape[-1] if logits.dim() else 1)
    how = _How(weight, ignore_index, reduction, label_smoothing, z_loss)
    return _cross_entropy(of, target, how)


@traceable
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, linear_weight, linear_bias), target)` without the logits: a chunk of rows of them
    exists at a time.

    Args:
        input: (..., K), floating point.
        linear_weight: (C, K), a row for each class.
        target: (...), int64, int32 or uint8: classes from 0 to C - 1, or `ignore_index`; or (..., C), floating point:
            the probability of each class.
        linear_bias: (C,) or None.
        weight, reduction, ignore_index, label_smoothing, z_loss, softcap: as in `cross_entropy`.

    Returns:
        A number, or target's shape for "none"; float32, of a float64 matrix float64.

    Raises:
        RuntimeError, ValueError: as `cross_entropy` and `linear`.

    Saved for backward: for "mean" and "sum" input, matrix and bias, and their gradients, which forward makes while a
    chunk's logits are there; for "none", in torch.compile, checkpoints and torch.func input, matrix, bias, target and
    two numbers a row, and backward computes a chunk's logits again. The matrix' gradient is summed in float32 over more
    than three chunks. Eager calls leave out rows with ignored targets where they are a quarter of all or more.
    Line: `linear | bias | softcap | cross_entropy(label_smoothing, z_loss, ignore_index)`; of probabilities the product
    runs twice, before `logsumexp` and before `times | scale | sum`.
    """
    of = _linear_logits("linear_cross_entropy", input, linear_weight, linear_bias, softcap)
    check_tensor("linear_cross_entropy", "target", target)
    return _cross_entropy(of, target, _How(weight, ignore_index, reduction, label_smoothing, z_loss))


class _Logits(NamedTuple):
    """Rows of logits, or words that make them."""

    function: str  # that was called
    words: tuple[str, ...]
    x: Tensor
    operands: tuple[Tensor, ...]
    classes: int

    @property
    def is_product(self) -> bool:
        return "linear" in self.words

    def line(self, *endings: str) -> str:
        return " | ".join([*self.words, *endings])

    def run(self, *endings: str, taken: Sequence[Tensor] = ()) -> Any:
        """The endings' numbers; taken: their operands."""
        return fused(self.line(*endings), self.x, *self.operands, *taken)


def _linear_logits(
    function: str, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, softcap: float | None
) -> _Logits:
    check_tensor(function, "input", input)
    check_tensor(function, "linear_weight", linear_weight)
    if linear_weight.dim() != 2:  # noqa: PLR2004
        raise RuntimeError(f"{function}(): expected linear_weight of shape [C, K], but got {list(linear_weight.shape)}")
    words = ["linear"]
    if linear_bias is not None:
        check_tensor(function, "linear_bias", linear_bias)
        words.append("bias")
    if softcap is not None:
        words.append(f"softcap({float(softcap)!r})")
    return _Logits(function, tuple(words), input, tuple(given(linear_weight, linear_bias)), linear_weight.shape[0])


class _How(NamedTuple):
    """The arguments of a cross entropy, as `torch.nn.functional.cross_entropy` has them."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float

    def check(self, of: _Logits, target: Tensor) -> None:
        _check_reduction(of.function, self.reduction)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(
                f"{of.function}(): expected label_smoothing to be between 0 and 1, but got {self.label_smoothing!r}"
            )
        rows = of.x.shape[:-1]
        if target.is_floating_point():
            if target.shape != (*rows, of.classes):
                raise RuntimeError(
                    f"{of.function}(): expected target of torch.int64, torch.int32 or torch.uint8, a class for each of "
                    f"{list(rows)} rows, or {of.classes} probabilities, but got {target.dtype} of shape "
                    f"{list(target.shape)}"
                )
            if self.ignore_index >= 0:
                raise RuntimeError(f"{of.function}(): ignore_index is not supported for floating point target")
            return
        if target.dtype not in _CLASSES:
            raise TypeError(
                f"{of.function}(): expected target to be torch.int64, torch.int32 or torch.uint8, but got "
                f"{target.dtype}"
            )
        if of.is_product and target.shape != rows:
            raise RuntimeError(
                f"{of.function}(): expected target of shape {list(rows)}, one class for each row of input, but got "
                f"{list(target.shape)}"
            )


def _check_reduction(function: str, reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{function}(): expected reduction to be one of {_REDUCTIONS}, but got {reduction!r}")


def _cross_entropy(of: _Logits, target: Tensor, how: _How) -> Tensor:
    how.check(of, target)
    if target.is_floating_point():
        return _of_probabilities(of, target, how)
    target, ignored = _told_apart(of.function, target, how.ignore_index)
    word = f"cross_entropy({float(how.label_smoothing)!r}, {float(how.z_loss)!r}, {ignored})"
    if how.weight is None and how.reduction == "none":
        return of.run(word, taken=(target,))
    is_counted = target != ignored
    dtype = _arithmetic(of.operands[0] if of.is_product else of.x)
    if how.weight is None:
        return _reduced(of, word, target, is_counted, is_counted.to(dtype), how)
    weight = _checked_weight(of, how.weight)
    share = weight[target.where(is_counted, 0)].to(dtype) * is_counted
    if how.reduction != "none" and not (how.label_smoothing or how.z_loss):
        return _reduced(of, word, target, is_counted, share, how)
    if how.reduction != "none":
        of, target, share, is_counted = _of_counted_rows(of, is_counted, None, target, share, is_counted)
    log_p, log_sum = of.run(f"logprob({ignored})", "logsumexp", taken=(target,))
    loss = -log_p * share
    if how.label_smoothing:
        columns = weight.to(loss.dtype)
        of_all = log_sum * columns.sum() - of.run("scale", "sum", taken=(columns,))
        smoothed = how.label_smoothing / of.classes * of_all
        loss = (1 - how.label_smoothing) * loss + smoothed.where(is_counted, 0)  # ignored rows may have a NaN
    if how.z_loss:
        loss = loss + (how.z_loss * log_sum.square()).where(is_counted, 0)
    if how.reduction == "none":
        return loss
    return loss.sum() if how.reduction == "sum" else loss.sum() / share.sum()


def _of_probabilities(of: _Logits, target: Tensor, how: _How) -> Tensor:
    """-Σ target log softmax(logits), each class by its weight."""
    if how.label_smoothing:
        target = target * (1 - how.label_smoothing) + how.label_smoothing / of.classes
    columns = () if how.weight is None else (_checked_weight(of, how.weight).to(_arithmetic(of.x)),)
    words = ("scale", "sum") if columns else ("sum",)
    log_sum = of.run("logsumexp") if of.is_product or how.z_loss else None
    if of.is_product:  # behind which a row word has no kernel
        loss = log_sum * fused(" | ".join(words), target, *columns) - of.run("times", *words, taken=(target, *columns))
    else:
        loss = -of.run("log_softmax", "times", *words, taken=(target, *columns))
    if how.z_loss:
        loss = loss + how.z_loss * log_sum.square()
    return loss if how.reduction == "none" else loss.sum() if how.reduction == "sum" else loss.mean()


def _reduced(of: _Logits, word: str, target: Tensor, is_counted: Tensor, share: Tensor, how: _How) -> Tensor:
    """The sum of a word's numbers, each times its share; or their mean."""
    if not of.is_product:
        loss = of.run(word, taken=(target,))
        loss = (loss if how.weight is None else loss * share).sum()  # of an ignored row it is 0
        return loss if how.reduction == "sum" else loss / share.sum()
    line, total = of.line(word), share.sum() if how.reduction == "mean" else None
    of_loss = share if total is None else share / total
    of, target, of_loss = _of_counted_rows(of, is_counted, total if how.weight is None else None, target, of_loss)
    loss = weighted_sum(line, of_loss, of.x, *of.operands, target)
    return loss if total is None or share.numel() else loss + total / total  # of no rows NaN, and gradients of zero


_MANY_LOGITS = 1 << 24  # from here on the products outlast a look at the targets
_MANY_IGNORED = 0.25
_EXACT = 1 << 24  # float32 counts up to here


def _of_counted_rows(of: _Logits, is_counted: Tensor, count: Tensor | None, *numbers: Tensor) -> tuple[Any, ...]:
    """`of` and tensors of one number a row; where many rows do not count, and who asks may look at the targets' values,
    of those that do. The look waits for the device, which is idle from then on: what can stand before it does.

    count: the sum of is_counted, where it is known.
    """
    as_given = (of, *numbers)
    if torch.compiler.is_compiling() or type(is_counted) is not Tensor or is_counted.is_meta or not of.is_product:
        return as_given
    rows = is_counted.numel()
    if rows * of.classes < _MANY_LOGITS or is_counted.dim() == 0 or is_counted.shape != of.x.shape[:-1]:
        return as_given
    if is_transformed() or is_jit_traced() or get_proxy_mode() is not None:  # a graph is for other targets, too
        return as_given
    if is_counted.is_cuda and torch.cuda.is_current_stream_capturing():
        return as_given
    known = int(is_counted.sum() if count is None or rows > _EXACT else count)
    if not 0 < known <= (1 - _MANY_IGNORED) * rows:
        return as_given
    places = is_counted.flatten().nonzero_static(size=known).squeeze(1)  # `nonzero` would wait once more
    of = of._replace(x=of.x.flatten(0, -2).index_select(0, places))
    return of, *(t.flatten().index_select(0, places) for t in numbers)


def _checked_weight(of: _Logits, weight: Tensor) -> Tensor:
    """Without a gradient, as a column of the logits."""
    check_tensor(of.function, "weight", weight)
    if weight.shape != (of.classes,):
        raise RuntimeError(
            f"{of.function}(): expected weight of shape [{of.classes}], one number a class, but got "
            f"{list(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise RuntimeError(f"{of.function}(): expected weight of floating-point numbers, but got {weight.dtype}")
    return weight.detach()


_CLASSES = (torch.int64, torch.int32, torch.uint8)
_LEAST_NUMBER = -(1 << 53)  # of those that a line's numbers, which are of double precision, tell apart


def _told_apart(function: str, target: Tensor, ignore_index: int) -> tuple[Tensor, int]:
    """Targets as a line takes them, and which of them are ignored."""
    try:
        ignored = operator.index(ignore_index)  # NumPy's integers, too
    except TypeError:
        got = type(ignore_index).__name__
        raise TypeError(f"{function}(): argument 'ignore_index' must be int, not {got}") from None
    if target.dtype == torch.uint8:
        target = target.long()
    if abs(ignored) <= -_LEAST_NUMBER:
        return target, ignored
    return (target.where(target != ignored, _LEAST_NUMBER) if target.dtype == torch.int64 else target), _LEAST_NUMBER


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@traceable
def log_prob(
    input: Tensor, target: Tensor, *, temperature: float = 1.0, entropy: bool = False, ignore_index: int = -100
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(input / temperature) at each row's target, and the entropy of that softmax, in one pass.

    Args:
        input: logits, (..., N), floating point.
        target: (...), int64, int32 or uint8: columns from 0 to N - 1, or `ignore_index`.
        temperature: what logits are divided by.
        entropy: whether the entropies are asked for, too.
        ignore_index: the target whose log-probability is 0, without a gradient.

    Returns:
        (...), float32, of float64 logits float64; with `entropy` two such tensors.

    Raises:
        IndexError: a target that is no column, on the CPU; on CUDA a device-side assertion fails, as PyTorch's.
        RuntimeError: shapes or dtypes that do not fit.
        TypeError: an ignore_index that is not int.
        ValueError: a temperature of 0.

    Saved for backward: input, target, and two numbers a row (four with `entropy`, of more than 16 bits five).
    Line: `mul(1 / temperature) | logprob(ignore_index) | entropy`.
    """
    check_tensor("log_prob", "input", input)
    check_tensor("log_prob", "target", target)
    return _log_prob(_Logits("log_prob", (), input, (), input.shape[-1]), target, temperature, entropy, ignore_index)


@traceable
def linear_log_prob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_prob(linear(input, linear_weight, linear_bias), target)` without the logits: a chunk of rows of them exists
    at a time, and backward computes it again.

    Args:
        input: (..., K), floating point.
        linear_weight: (N, K).
        target: (...), int64, int32 or uint8: columns from 0 to N - 1, or `ignore_index`.
        linear_bias: (N,) or None.
        temperature, entropy, ignore_index: as in `log_prob`.
        softcap: c of c tanh(logits / c), in the logits' place, before the temperature; None leaves them.

    Returns:
        (...), float32, of a float64 matrix float64; with `entropy` two such tensors.

    Raises:
        RuntimeError, ValueError: as `log_prob` and `linear`.

    Saved for backward: input, matrix, bias, target, and two numbers a row (four with `entropy`, of more than 16 bits
    five).
    Line: `linear | bias | softcap | mul(1 / temperature) | logprob(ignore_index) | entropy`.
    """
    of = _linear_logits("linear_log_prob", input, linear_weight, linear_bias, softcap)
    check_tensor("linear_log_prob", "target", target)
    return _log_prob(of, target, temperature, entropy, ignore_index)


def _log_prob(
    of: _Logits, target: Tensor, temperature: float, entropy: bool, ignore_index: int
) -> Tensor | tuple[Tensor, Tensor]:
    target, ignored = _told_apart(of.function, target, ignore_index)
    if temperature == 0:
        raise ValueError(f"{of.function}(): expected temperature to be other than 0, but got {temperature!r}")
    words = [] if temperature == 1.0 else [f"mul({1.0 / float(temperature)!r})"]
    words += [f"logprob({ignored})", *(["entropy"] if entropy else [])]
    return of.run(*words, taken=(target,))


@traceable
def kl_div_logits(
    input: Tensor, teacher: Tensor, *, beta: float = 0.0, temperature: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """The divergence of softmax(input / temperature) from a teacher's softmax, both of logits, in one pass over both.

    With p the softmax of input and q that of the teacher it is KL(q || p), what distillation minimises; with beta 1
    KL(p || q), the reverse; between them beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q, the
    generalised Jensen-Shannon divergence (Agarwal et al., arXiv:2306.13649), with .5 the symmetric one. Neither
    softmax is stored. Class probabilities of 0 count as nothing, so that classes both leave out (-inf) are allowed.

    Args:
        input: logits, (..., N), floating point.
        teacher: logits, of input's shape or broadcast to it, floating point. It gets a gradient where it wants one.
        beta: from 0 to 1.
        temperature: what both are divided by, above 0. Nothing is multiplied by its square.
        reduction: "none", "mean" (over the rows, as "batchmean" of `torch.nn.functional.kl_div` for (B, N)) or "sum".

    Returns:
        A number, or (...) for "none"; float32, of float64 input float64.

    Raises:
        RuntimeError: shapes that do not fit, tensors that are not floating point.
        ValueError: an unknown reduction, beta that is not from 0 to 1, a temperature that is not above 0.

    Saved for backward: input, teacher, and four numbers a row, of more than 16 bits six.
    Line: `kl_div(beta, temperature)`.
    """
    check_tensor("kl_div_logits", "input", input)
    check_tensor("kl_div_logits", "teacher", teacher)
    _check_reduction("kl_div_logits", reduction)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"kl_div_logits(): expected beta to be between 0 and 1, but got {beta!r}")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"kl_div_logits(): expected temperature to be above 0, but got {temperature!r}")
    loss = fused(f"kl_div({float(beta)!r}, {float(temperature)!r})", input, teacher)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()
