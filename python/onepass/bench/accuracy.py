"""Whether a provider computes the pattern: its largest error against float64, beside eager's at the same dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.bench.patterns import P, Pattern
from onepass.bench.providers import PROVIDERS, Trial
from onepass.line import Line

__all__ = ["LIMIT", "RATIO", "Judge", "WrongResult"]

RATIO = 1.5  # the accuracy contract: our error against fp64 over that of PyTorch's own chain
LIMIT = 10.0  # a provider whose error is more than so many times eager's is out of the comparison
ELEMENTS = 2**19  # that are compared, of the whole
SEED = 1  # of dropouts
ROWWISE = ("tensor", "keys", "values", "target")  # operands of which a row, or matrix, of x has its own
# Below so many units in the last place of a tensor's largest value an error counts as none.
UNITS = {torch.float32: 4.0}
KINK = 4.0  # times the dtype's epsilon, of the largest argument of relu: nearer to 0, rounding decides on a gradient


class WrongResult(RuntimeError):
    """A result that is not the pattern's."""


class Judge:
    """Compares a sample of rows (of attention matrices), spread over the whole tensor, or all of them.

    Upstream gradients are zero in all other rows, so that the column sums are those of the sample too. Which elements
    a dropout kept is read off the provider's own result, with a residual of zeros or an identity of values. Nor has a
    result of relu an upstream gradient where rounding decides whether it passes.
    """

    def __init__(self, pattern: Pattern, inputs: list[Tensor], *, sampled: bool = True) -> None:
        self.pattern = pattern
        line = Line(pattern.line)
        self.drops, self.rowwise, self.values = line.has_dropout, line.rowwise, line.values
        self.inputs = list(inputs)
        taken = pattern.operand_words()
        self.has_rows = [True, *(word.operand in ROWWISE for word in taken)]  # of each input
        self.in_batches = [t.dim() > pattern.own and word.operand == "column" for t, word in zip(inputs[1:], taken)]
        if self.drops:
            for i, word in enumerate(taken, start=1):
                if word.name == "add":
                    self.inputs[i] = torch.zeros_like(inputs[i]).requires_grad_()
        x = inputs[0]
        behind = x.dim() - pattern.own
        self.batch = x.shape[:behind]
        rows = math.prod(self.batch)
        count = min(rows, max(1, min(256, ELEMENTS // math.prod(x.shape[behind:])))) if sampled else rows
        sample = torch.linspace(0, rows - 1, count, dtype=torch.float64, device=x.device).round().long()
        self.sample = torch.unravel_index(sample, self.batch)
        self.upstream = []
        results = () if pattern.forward_only else zip(pattern.result_shapes(inputs), pattern.result_dtypes(inputs))
        for i, (shape, dtype) in enumerate(results):
            generator = torch.Generator(x.device).manual_seed(i + 1)
            chosen = torch.randn((count, *shape[behind:]), generator=generator, dtype=dtype, device=x.device)
            if i == 0 and line.words[-1].name == "relu":
                chosen *= self._away_from_the_kink()
            self.upstream.append(x.new_zeros(shape, dtype=dtype).index_put_(self.sample, chosen))
        self.eager: list[float] = []
        self.largest: list[float] = []  # of each exact result and gradient
        self.floor: list[float] = []

    def ask_eager(self) -> None:
        """Eager's errors, which all others are measured by."""
        provider = PROVIDERS["eager"]
        trial = Trial(provider, self.pattern, self.pattern.eager, self.inputs, self.upstream)
        self.eager = self.errors(trial, provider.keep_probability)

    def errors(self, trial: Trial, keep_probability: float) -> list[float]:
        """The largest error of each result and gradient.

        Raises:
            WrongResult: for a dropout that keeps another share than it should.
        """
        if self.drops:
            torch.manual_seed(SEED)
        trial.refresh()
        results = [t.detach()[self.sample] for t in trial.outputs]
        if not trial.forward_only:
            wanted = [rows for rows, t in zip(self.has_rows, trial.inputs) if t.requires_grad]
            results += [self._sampled(g, rows) for g, rows in zip(trial.backward(), wanted)]
        kept = self._kept(trial, results, keep_probability) if self.drops else None
        exact = self._exact(kept, keep_probability)
        self.largest = [e.abs().max().item() for e in exact]
        self.floor = [
            UNITS.get(r.dtype, 1.0) * torch.finfo(r.dtype).eps * most for r, most in zip(results, self.largest)
        ]
        return [(r.double() - e).abs().max().item() for r, e in zip(results, exact)]

    def ratios(self, errors: list[float]) -> list[float]:
        """Each error over eager's, infinite where it is not a number."""
        return [
            error / max(of_eager, floor, 1e-300) if math.isfinite(error) else math.inf
            for error, of_eager, floor in zip(errors, self.eager, self.floor)
        ]

    def ratio(self, errors: list[float]) -> float:
        """The largest error over eager's.

        Raises:
            WrongResult: if it is beyond the limit, or not a number.
        """
        worst = max(self.ratios(errors))
        if worst > LIMIT:
            raise WrongResult(f"wrong result: the largest error is {worst:.3g} times eager's")
        return worst

    def _away_from_the_kink(self) -> Tensor:
        """1 where the argument of the last word, relu, is far enough from 0."""
        *before, _ = Line(self.pattern.line).words
        argument = Line(" | ".join(map(str, before))).reference(*self._doubles()).abs()
        near = KINK * torch.finfo(self.inputs[0].dtype).eps * argument.max()
        return argument > near

    def _sampled(self, tensor: Tensor, has_rows: bool) -> Tensor:
        return tensor.detach()[self.sample] if has_rows else tensor.detach()

    def _expanded(self, tensor: Tensor) -> Tensor:
        """With x's rows, or matrices."""
        return (
            tensor if tensor.shape == self.batch else tensor.expand((*self.batch, *tensor.shape[-self.pattern.own :]))
        )

    def _probabilities(self, trial: Trial) -> Tensor:
        """What values are weighted by: the results with the identity's columns as values, some at a time."""
        *inputs, value = trial.inputs
        columns = torch.eye(value.shape[-2], dtype=value.dtype, device=value.device).split(value.shape[-1], -1)
        found = []
        for part in columns:
            torch.manual_seed(SEED)
            part = self._expanded(part).contiguous().requires_grad_(value.requires_grad)
            found.append(self._sampled(trial.function(*inputs, part), True))
        return torch.cat(found, -1)

    def _kept(self, trial: Trial, results: list[Tensor], keep_probability: float) -> Tensor:
        kept = (self._probabilities(trial) if self.values else results[0]) != 0
        if not self.rowwise:  # a value may be zero by itself; then its gradient is not
            kept |= results[1] != 0
        considered = torch.ones_like(kept)
        for mask in (t for t in self.inputs if t.dtype == torch.bool):
            considered &= self._expanded(mask)[self.sample]
        count = int(considered.sum())
        share = (kept & considered).sum().item() / count
        if abs(share - keep_probability) > 6 * math.sqrt(P * (1 - P) / count) + 1e-9:
            raise WrongResult(f"wrong result: dropout keeps {share:.4f} of the elements, not {keep_probability:.4f}")
        return kept

    def _doubles(self) -> list[Tensor]:
        """The sample of every input, in float64."""
        parts = (
            self._sampled(self._expanded(t) if has_rows else t, has_rows)
            for t, has_rows in zip(self.inputs, self.has_rows)
        )
        return [part.double() if part.is_floating_point() else part for part in parts]

    def _exact(self, kept: Tensor | None, keep_probability: float) -> list[Tensor]:
        sampled = [t.requires_grad_(given.requires_grad) for t, given in zip(self._doubles(), self.inputs)]
        known = {} if kept is None else {"dropout": lambda v, p: torch.where(kept, v / keep_probability, 0)}
        x, *operands = sampled
        batches = zip(operands, self.in_batches)  # the rows that are sampled take their own columns
        operands = [self._expanded(t)[self.sample] if in_batches else t for t, in_batches in batches]
        results = self.pattern.eager(x, *operands, **known)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [self._sampled(g, True).double() for g in self.upstream]
        wanted = [t for t in sampled if t.requires_grad]
        gradients = torch.autograd.grad(results, wanted, upstream) if wanted else ()
        return [r.detach().double() for r in results] + list(gradients)
