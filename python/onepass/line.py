"""The line: parsed once; its facts, its cost, the names of its operands, its plan and its reference. `call` runs it."""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from onepass import _native
from onepass._arguments.autocast import under_autocast
from onepass._arguments.shapes import check_dense
from onepass._native import LineError
from onepass._tracing import assume_constant_result
from onepass.plan import (
    MADE_AGAIN,
    Cost,
    Plan,
    Strategy,
    Traffic,
    checked_shape,
    checked_size,
    chip_of,
    reason,
    reason_of_launches,
)
from onepass.reference import compose
from onepass.word import load_words, word_of

__all__ = ["Line", "LineError", "parsed"]

_is_traced = torch.compiler.is_dynamo_compiling


def _described(line: str) -> dict:
    """Its facts; a word that is not known may come with a package."""
    try:
        facts = _native.describe(line)
    except LineError:
        if not load_words(line):
            raise
        facts = _native.describe(line)
    if facts["old_strategy"]:
        _warn_of_old_name(next(word for word in facts["words"] if word["strategy"]), facts["old_strategy"])
    return facts


_INSIDE = tuple(os.path.dirname(module.__file__) + os.sep for module in (_native, torch))
_warned: set[tuple[str, str]] = set()


def _warn_of_old_name(word: dict, old: str) -> None:
    """Once for each old name of a strategy, at the user's line. (FutureWarning, as torch has it for what users write:
    Python hides a DeprecationWarning in all modules but __main__.)"""
    if (word["name"], old) in _warned:
        return
    _warned.add((word["name"], old))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    message = f"onepass: '{word['name']}({old})' is now called '{word['name']}({word['strategy']})'"
    warnings.warn(message, FutureWarning, stacklevel=level)


class Line:
    """A line of words, parsed once and callable.

    Args:
        line: words separated by ``|``, for example ``"layer_norm(1e-5) | scale | bias | relu"``.

    Raises:
        LineError: (a ValueError) for a line that cannot be read, quoting it with carets under the fault.

    Attributes:
        text: the line as given; an old name of a strategy has become the present one.
        words: its words, a list of :class:`Word`.
    """

    _call: ClassVar[Callable[..., Any]]
    """`call.call`, which reads a line's facts and so lies above."""

    def __init__(self, line: str) -> None:
        if not isinstance(line, str):
            raise TypeError(f"Line(): argument 'line' must be str, not {type(line).__name__}")
        facts = _described(line)
        self.text = facts["text"] if facts["old_strategy"] else line
        self.words = [word_of(w, tuple(w["parameters"])) for w in facts["words"]]
        self.rowwise: bool = facts["rowwise"]
        self.keeps: int = facts["keeps"]
        """Results behind the first: kept values, and numbers of endings behind the first ending."""
        self.numbers: list[bool] = facts["numbers"]
        """Of each result, whether it is one number a row: without x's last dimension, and in the arithmetic's dtype."""
        self.scales: list[bool] = facts["scales"]
        """Of these, whether it is codes' scale: its last dimension is 1, or has one for each group of columns."""
        self.group: int = facts["group"]
        """Columns that share a scale of its codes; 0: a row, or it has no codes."""
        self.differentiable: list[bool] = facts["differentiable"]
        """Of each result: codes and their scales are not."""
        self.reads_x: bool = facts["reads_x"]
        self.reads_operands: list[bool] = facts["reads_operands"]
        self.reads_statistics: bool = facts["reads_statistics"]
        self.resumes_from: int | None = facts["resumes_from"]
        self.weight: int | None = facts["weight"]
        self.resumes_behind: int | None = facts["resumes_behind"]
        self.reads_product: bool = facts["reads_product"]
        self.x_for_weight: bool = facts["x_for_weight"]
        self.operands_for_weight: list[bool] = facts["operands_for_weight"]
        self._operand_words = [w for w in self.words if w.operand != "none" for _ in range(w.operands)]
        self.operand_count = len(self._operand_words)
        keeps = itertools.accumulate((word.kind == "keep" for word in self.words), initial=0)
        self.keeps_before = [n for w, n in zip(self.words, keeps) if w.operand != "none" for _ in range(w.operands)]
        """Of each operand: keeps that stand before its word."""
        self.tensor_operands = [i for i, w in enumerate(self._operand_words) if w.operand == "tensor"]
        self.column_operands = [i for i, w in enumerate(self._operand_words) if w.operand == "column"]
        self.channel_operands = [i for i, w in enumerate(self._operand_words) if "by_channels" in w.properties]
        """Columns with a number for each channel, which is some neighbouring columns of the row."""
        self.target_operands = [i for i, w in enumerate(self._operand_words) if w.operand == "target"]
        self.has_dropout: bool = facts["dropouts"] > 0
        self.table_operands = [i for i, w in enumerate(self._operand_words) if w.kind == "rotary"]
        """cos and sin of `rope`, which get no gradient."""
        self.looks_at_rows = any("is_causal" in word.properties for word in self.words)
        self._without_dropout: str = facts["without_dropout"]
        self.scores = self.words[0].operand == "keys"
        self.values: bool = facts["values"]
        contraction = "linear" if self.weight is not None else None
        if self.scores:
            contraction = "attention" if self.values else "scores"
        kind = contraction or ("rowwise" if self.rowwise else "elementwise")
        self.forward_op = getattr(torch.ops.onepass, f"{kind}_forward").default
        self.backward_op = getattr(torch.ops.onepass, f"{kind}_backward").default
        self._matrix_operands = [i for i, w in enumerate(self._operand_words) if w.kind == "contraction"]
        self._mask_operands = [i for i, w in enumerate(self._operand_words) if w.kind == "mask"]
        self._ready_on_cpu: dict[tuple[int, torch.dtype | None], bool] = {}

    def __call__(
        self, x, *operands, training: bool = True, generator: torch.Generator | None = None, stack: bool = False
    ):
        """Runs the line; see :func:`fused`."""
        return self._call(x, operands, training, generator, stack)

    def reference(self, x, *operands, training: bool = True, dropout_state=None):
        """The same line as a plain composition of PyTorch's operators, differentiable by PyTorch's own rules.

        dropout_state: int64 [2], {seed, offset}, for the masks that a kernel draws from it; PyTorch's own otherwise.
        """
        if self.weight is not None:
            operands = under_autocast(x.device.type, operands, self._matrix_operands)
        results = compose(self.words, x, operands, dropout_state=dropout_state, training=training)
        return results[0] if self.keeps == 0 else results

    def cost(self, shape, dtype: torch.dtype = torch.float32, out_features: int | None = None) -> Cost:
        """Bytes that must move and flops of the line on a tensor of this shape and dtype, forward and backward.

        out_features: of `linear`, or how many keys `scores` has, in a line with one of them.
        """
        return self._cost("cost", shape, dtype, out_features)

    def _cost(self, function: str, shape, dtype: torch.dtype, out_features: int | None) -> Cost:
        if (out_features is None) != (self.weight is None):
            raise TypeError(
                f"{function}(): argument 'out_features' is for lines with 'linear' or 'scores', and they need it"
            )
        _native.dtype_number(function, dtype)
        behind = 0 if out_features is None else checked_size(function, "out_features", out_features)
        rows, columns, matrices = self._sizes(function, shape)
        if self.weight is None:
            _native.check_shape(self.text, checked_shape(function, shape))
        cost = _native.cost(self.text, rows, columns, behind, matrices, dtype)
        return Cost(Traffic(**cost["forward"]), Traffic(**cost["backward"]), cost["saved_bytes"])

    def plan(
        self,
        shape,
        dtype: torch.dtype = torch.bfloat16,
        out_features: int | None = None,
        *,
        device: torch.device | str | None = None,
        training: bool = True,
    ) -> Plan:
        """How the line is computed forward on a tensor of this shape and dtype, without running it.

        Args:
            shape, dtype: of x; the matrix has the same dtype.
            out_features: of `linear`, or how many keys `scores` has, in a line with one of them.
            device: a torch device, or one that need not be here, as in `explain` ("h200", "h100", "a100", "cpu", a file
                that `onepass calibrate` wrote) or a chip such as "sm_90a"; the present one if None.
            training: whether tensors are saved for backward.

        Returns:
            The strategy, the reason, and all strategies with the bytes that they move and their predicted time, from
            rates measured on an H200, and for other chips from those and their data sheets. Without a contraction there
            is one: "fused", with the kernels that a CUDA chip launches: one, or those of a row's parts where rows do
            not fit on chip. A call is computed so where its tensors lie dense, values are as long as the keys, and
            tensors among the words have a row for each row: behind `scores`, a boolean one that all rows share may be
            taken another way.

        Raises:
            RuntimeError, ValueError: for a dtype that no line takes, a shape that this one does not (rows that are not
                whole groups of `quantize`, or of a length that `rope` cannot turn), negative sizes, a device that is
                not known.
        """
        cost, chip = self._cost("plan", shape, dtype, out_features), chip_of(device)
        rows, columns, matrices = self._sizes("plan", shape)
        if self.weight is None:
            return self._plan_of_rows(chip, rows, columns, dtype, training, cost)
        told = _native.strategies(self.text, rows, columns, out_features, matrices, dtype, training, chip)
        ways = {
            row["strategy"]: Strategy(row["strategy"], row["bytes"], row["seconds"], row["why_not"], row["kernel"])
            for row in told
        }
        chosen = next(ways[row["strategy"]] for row in told if row["chosen"])
        why = reason(chosen, ways.values())
        if training and chosen.name == "chunked":
            why += MADE_AGAIN
        return Plan(chosen.name, why, tuple(ways.values()))

    def _plan_of_rows(self, chip: str, rows: int, columns: int, dtype: torch.dtype, saves: bool, cost: Cost) -> Plan:
        if chip == "cpu" or not rows * columns:
            why, kernels = ("one kernel" if rows * columns else "no kernel: there are no elements"), []
        else:
            kernels = _native.launches(self.text, rows, columns, dtype, saves, chip)
            why = reason_of_launches(kernels)
        names = ", ".join(of["kernel"] for of in kernels)
        return Plan("fused", why, (Strategy("fused", cost.forward.bytes, None, kernel=names),))

    def _sizes(self, function: str, shape) -> tuple[int, int, int]:
        """Rows, columns, and matrices that a contraction takes."""
        shape = checked_shape(function, shape)
        return math.prod(shape[:-1]), shape[-1] if shape else 1, math.prod(shape[:-2]) if self.scores else 1

    def __repr__(self) -> str:
        return f"onepass.Line({' | '.join(map(str, self.words))!r})"

    def __reduce__(self):
        return Line, (self.text,)

    @functools.cached_property
    def differentiable_part(self) -> Line:
        """The words on which gradients depend: of a line that gives codes those up to the last kept value."""
        if all(self.differentiable):
            return self
        last = max(i for i, word in enumerate(self.words) if word.kind == "keep")
        return Line(" | ".join(map(str, self.words[: last + 1])))

    def is_behind(self, operand: int) -> bool:
        """Whether an operand's word stands behind the contraction."""
        return self.weight is not None and operand > self.weight

    def shape_behind(self, x, operands) -> torch.Size:
        """Of what the contraction gives."""
        return torch.Size((*x.shape[:-1], operands[self.weight].shape[-2]))

    def _operand_names(self) -> list[str]:
        takers = [w for w in self.words if w.operand != "none"]
        return [f"{name} of '{w.name}'" for w in takers for name in w.operand_name.split(", ")]

    def _operand_message(self, got: int) -> str:
        taken = ", ".join(self._operand_names())
        expected = f"{self.operand_count} operands ({taken})" if taken else "no operands"
        return f'fused(): the line "{self.text}" takes {expected} after x, got {got}'

    def _check_tensors(self, x, operands):
        """Raises for what no line takes; only where something has failed, since it takes time."""
        for name, given in zip(["x", *self._operand_names()], (x, *operands)):
            for value in given if isinstance(x, (list, tuple)) and isinstance(given, (list, tuple)) else [given]:
                if not isinstance(value, torch.Tensor):
                    raise TypeError(f"fused(): {name} must be Tensor, not {type(value).__name__}") from None
                check_dense("fused", name, value)

    def _check_shapes(self, x, operands):
        """As the kernels do: PyTorch's operators would broadcast a column of another length."""
        shape = x.shape
        if self.group:
            _native.result_shapes(self.text, shape)
        for i, (o, word) in enumerate(zip(operands, self._operand_words)):
            if word.operand == "target":
                if o.shape != shape[:-1]:
                    raise RuntimeError(f"onepass: operand {i} must have shape {list(shape[:-1])}, got {list(o.shape)}")
                continue
            if word.kind == "rotary":
                turned = int(word.numbers[0]) if word.numbers else shape[-1]
                own = o.shape[-1] if o.dim() else 1
                fits = own in (1, turned, turned // 2)
                fits = fits and torch.broadcast_shapes(shape[:-1], o.shape[:-1]) == shape[:-1]
            elif word.operand == "tensor":
                fits = torch.broadcast_shapes(shape, o.shape) == shape
            elif word.operand == "matrix":
                fits = o.dim() == 2 and o.shape[1] == shape[-1]
            elif word.operand == "keys":
                fits = o.dim() == len(shape) > 1 and o.shape[-1] == shape[-1]
            elif word.operand == "values":
                fits = o.shape[:-1] == operands[0].shape[:-1]
            elif "by_channels" in word.properties:
                fits = o.dim() > 0 and o.shape[-1] > 0 and shape[-1] % o.shape[-1] == 0
                fits = fits and o.dim() <= len(shape) and torch.broadcast_shapes(shape[:-1], o.shape[:-1]) == shape[:-1]
            else:
                fits = o.shape == shape[-1:] or self._is_batch_of_columns(o, shape)
            if not fits:
                matrix = {
                    "matrix": f"[N, {shape[-1]}]",
                    "keys": f"[..., N, {shape[-1]}]",
                    "values": f"[..., {shape[-1]}, N]",
                }
                channels = f"[C] with C a divisor of {shape[-1]}"
                wanted = channels if "by_channels" in word.properties else matrix.get(word.operand, f"[{shape[-1]}]")
                expected = "x's shape, or broadcast to it" if word.operand == "tensor" else f"shape {wanted}"
                raise RuntimeError(f"onepass: operand {i} must have {expected}, got {list(o.shape)}")
            if word.kind == "contraction":
                shape = torch.Size((*shape[:-1], o.shape[-1 if word.operand == "values" else -2]))

    def _is_batch_of_columns(self, operand, shape) -> bool:
        """Whether it is a column operand with rows of numbers, each for some rows of x."""
        if self.weight is not None or operand.dim() < 2 or operand.shape[-1] != shape[-1]:
            return False
        return operand.dim() <= len(shape) and all(o in (1, s) for o, s in zip(operand.shape[::-1], shape[::-1]))


_parse = functools.lru_cache(maxsize=_native.REMEMBERED)(Line)


class _Registry:
    """Lines as attributes: Dynamo looks an attribute up when it is asked for, but remembers a dictionary as it first
    saw it, without the lines that a trace adds. They stay as the graphs do that Dynamo keeps, which are far larger."""


_REGISTRY = _Registry()


def forget(word: str) -> None:
    """Lines with a word that is none any more, or another."""
    _parse.cache_clear()
    for name, line in list(vars(_REGISTRY).items()):
        if any(word in (w.name, w.activation) for w in line.words):
            delattr(_REGISTRY, name)


@assume_constant_result
def _registered(line: str) -> str:
    name = f"line_{line.encode().hex()}"
    setattr(_REGISTRY, name, _parse(line))
    return name


def parsed(line: str) -> Line:
    """The line of a text, from the cache; in a trace, from where Dynamo looks it up anew."""
    return getattr(_REGISTRY, _registered(line)) if _is_traced() else _parse(line)
