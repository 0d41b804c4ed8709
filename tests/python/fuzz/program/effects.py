"""Statements that overwrite: methods, functions, assignments, out=, foreach, views, operators."""

from __future__ import annotations

import torch

from fuzz.program.builder import Builder, Skip, form
from fuzz.program.operands import dtype_of, fresh, like, operand

NUMBERED = (
    *("{0}.add_(1.0)", "{0}.mul_(0.5)", "{0}.sub_(0.25)", "{0}.div_(2.0)", "{0} += 1.0", "{0} *= 0.5", "{0} -= 0.5"),
    *(
        "{0} /= 2.0",
        "{0}[0] = 0.0",
        "{0}[..., :1] = 1.0",
        "{0}[...] = 0.5",
        "{0}[..., -1] += 1.0",
        "{0}.clamp_(-1.0, 1.0)",
    ),
    *("{0}.clamp_min_(0.0)", "{0}.zero_()", "{0}.fill_(0.5)", "{0}.relu_()", "torch.relu_({0})", "{0}.tanh_()"),
    *(
        "{0}.sigmoid_()",
        "{0}.exp_().clamp_(max=5.0)",
        "{0}.neg_()",
        "{0}.abs_()",
        "{0}.square_()",
        "torch.sigmoid_({0})",
    ),
    *("F.relu({0}, inplace=True)", "F.relu({0}, True)", "F.leaky_relu({0}, 0.2, True)", "F.elu({0}, 1.0, True)"),
    *("F.leaky_relu({0}, inplace=True)", "F.elu({0}, inplace=True)", "F.silu({0}, inplace=True)", "F.mish({0}, True)"),
    *("F.hardswish({0}, True)", "F.hardtanh({0}, inplace=True)", "F.selu({0}, True)", "F.celu({0}, 1.0, inplace=True)"),
    *("F.relu6({0}, True)", "F.threshold({0}, 0.1, 0.0, True)", "F.dropout({0}, 0.0, True, True)"),
    *("F.hardsigmoid({0}, True)", "nn.ReLU(inplace=True)({0})", "nn.LeakyReLU(0.2, inplace=True)({0})"),
    *("F.dropout({0}, 1.0, inplace=True)", "F.leaky_relu_({0}, 0.2)", "F.elu_({0})", "operator.iadd({0}, 1.0)"),
    *("operator.imul({0}, 0.5)", "torch._foreach_add_([{0}], 1.0)", "torch._foreach_mul_(({0},), 0.5)"),
    *("torch._foreach_neg_([{0}])", "torch._foreach_tanh_([{0}])", "{0}.detach().add_(1.0)", "{0}.view(-1)[0] = 1.0"),
    *(
        "{0}.select(0, 0).mul_(2.0)",
        "{0}[..., 0].fill_(0.5)",
        "{0}.unbind()[0].add_(1.0)",
        "{0}.narrow(-1, 0, 1).zero_()",
    ),
    *("{0}.flatten()[0] = 2.0", "{0}.unsqueeze(0).mul_(0.5)", "{0}.T.add_(1.0)", "{0}.data.add_(1.0)"),
    *("torch.ops.aten.add_.Scalar({0}, 1.0)", "{0}.__iadd__(1.0)", "torch.clamp_({0}, -1.0, 1.0)", "shift_({0}, 1.0)"),
    *("{0}.masked_fill_({0} > 0.3, 0.0)", "{0}.requires_grad_({0}.requires_grad)", "torch.nn.init.constant_({0}, 0.5)"),
    *("{0}.chunk(2, -1)[0].add_(1.0)", "{0}.expand_as({0}).add_(1.0)", "{0}.as_strided((1,), (1,)).add_(1.0)"),
    *("{0}.index_fill_(0, torch.tensor([0]), 0.5)", "{0}.unflatten(0, (1, -1)).mul_(0.5)", "{0}.squeeze().mul_(0.5)"),
)
WITH_ANOTHER = (
    *("{0}.add_({1})", "{0} += {1}", "{0} -= {1}", "{0} *= {1}", "{0}.sub_({1})", "{0}.mul_({1})", "{0}.copy_({1})"),
    *("{0}[...] = {1}", "{0}[:] = {1}", "torch._foreach_add_([{0}], [{1}])", "torch._foreach_mul_([{0}], [{1}])"),
    *("torch._foreach_copy_([{0}], [{1}])", "{0}.lerp_({1}, 0.5)", "{0}.addcmul_({1}, {1})", "{0}.add_({1}, alpha=2)"),
    *("{0}.index_copy_(0, torch.tensor([0]), {1}[:1])", "{0}.index_add_(0, torch.tensor([0]), {1}[:1])"),
    *(
        "{0}.index_put_((torch.tensor([0]),), {1}[:1])",
        "{0}.scatter_(0, torch.zeros_like({1}[:1], dtype=torch.int64), {1}[:1])",
    ),
    *("{0}[:1].copy_({1}[:1])", "{0}[..., :1] += {1}[..., :1]", "torch.ops.aten.add_.Tensor({0}, {1})"),
    *(
        "torch._foreach_lerp_([{0}], [{1}], 0.5)",
        "torch._foreach_addcmul_([{0}], [{1}], [{1}])",
        "{0}.masked_scatter_({0} > 0, {1})",
    ),
    *(
        "{0}.copy_({1}.flip(-1))",
        "{0}.minimum({1}); {0}.clamp_({1} - 1.0, {1} + 1.0)",
        "torch.nn.init.zeros_({0}); {0}.copy_({1})",
    ),
)
OUT = (
    *("torch.add({0}, {1}, out={2})", "torch.mul({0}, {1}, out={2})", "torch.sub({0}, {1}, out={2})"),
    *(
        "torch.tanh({0}, out={2})",
        "torch.sigmoid({0}, out={2})",
        "torch.sin({0}, out={2})",
        "torch.square({0}, out={2})",
    ),
    *("torch.maximum({0}, {1}, out={2})", "torch.softmax({0}, -1, out={2})", "torch.clamp({0}, -1.0, 1.0, out={2})"),
    *(
        "torch.stack([{0}[0], {1}[0]], out={2}[:2])",
        "torch.cat([{0}[:1], {1}[:1]], out={2}[:2])",
        "torch.where({0} > 0, {0}, {1}, out={2})",
    ),
)
RESHAPED = ("{0}.t_()", "{0}.unsqueeze_(0)", "{0}.squeeze_(0)", "{0}.transpose_(0, -1)", "{0}.swapdims_(0, 1)")
COUNTERS = (
    *(
        "{0}.add_(1)",
        "{0} += 1",
        "{0}.mul_(2)",
        "{0}[...] = 3",
        "{0}.copy_({0} + 1)",
        "{0}.fill_(5)",
        "shift_({0}, 1.0)",
    ),
    *(
        "torch._foreach_add_([{0}], 1)",
        "torch.add({0}, 1, out={0})",
        "{0}.data.add_(1)",
        "{0}.index_fill_(-1, torch.tensor([0]), 7)",
    ),
    *(
        "{0}.view(-1)[0] += 1",
        "{0}.clamp_(max=0.5)",
        "{0}.masked_fill_({0} > -9, 2)",
        "torch.ops.aten.add_.Scalar({0}, 1)",
    ),
    *("{0}.index_copy_(0, torch.tensor([0]), torch.ones_like({0}[:1]))", "{0}.set_({0} + 1)", "operator.iadd({0}, 1)"),
)


def overwritable(b: Builder) -> str:
    """A tensor that may be overwritten; new ones, mostly."""
    return b.pick(is_overwritable)


def is_overwritable(t: torch.Tensor) -> bool:
    """Whether it has one memory for each number, and is no leaf."""
    dense = all(stride or size == 1 for stride, size in zip(t.stride(), t.shape))
    return t.is_floating_point() and t.dim() > 0 and dense and not (t.is_leaf and t.requires_grad)


def effect(b: Builder, text: str, subject: str) -> None:
    """As a statement of its own, or with a name for what it returns."""
    first = text.split("(")[0]
    named = b.often(0.35) and "=" not in first and " = " not in text and ";" not in text and "foreach" not in text
    if named and not text.startswith(("shift_", "torch.ops")):
        name = b.new()
        b.statement(f"{name} = {text}", (name,), effect=True)
    else:
        b.statement(text, (), effect=True)


@form(13)
def overwrite(b: Builder) -> None:
    x = overwritable(b)
    effect(b, b.one_of(*NUMBERED).format(x), x)


@form(8)
def overwrite_with(b: Builder) -> None:
    x = overwritable(b)
    other = like(b, x) if b.often(0.7) else operand(b, x, 0)
    effect(b, b.one_of(*WITH_ANOTHER).format(x, other), x)


@form(3)
def out(b: Builder) -> None:
    """Nothing that gets a gradient may be overwritten so."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() > 0 and not t.requires_grad)
    into = (
        fresh(b, b.shape(x), dtype_of(b[x]), False)
        if b.often(0.5)
        else b.pick(lambda t: t.shape == b[x].shape and t.dtype == b[x].dtype and not t.requires_grad)
    )
    other = b.pick(lambda t: t.shape == b[x].shape and t.dtype == b[x].dtype and not t.requires_grad)
    effect(b, b.one_of(*OUT).format(x, other, into), into)


@form(1.5)
def turned_in_place(b: Builder) -> None:
    """A tensor's shape, not its numbers."""
    x = overwritable(b)
    effect(b, b.one_of(*RESHAPED).format(x), x)


@form(7)
def count(b: Builder) -> None:
    """A counter or a cache that nothing else reads: an input or a buffer."""
    source = b.one_of("torch.zeros(1)", "torch.zeros(())", "torch.zeros(1, dtype=torch.int64)", "torch.zeros(3)")
    old = [n for n in b.names if n.startswith(("x", "self")) and b[n].numel() in (1, 3) and not b[n].requires_grad]
    if old and b.often(0.4):
        counter = b.one_of(*old)
    elif b.often(0.4):
        counter = b.attribute('self.register_buffer("{1}", %s)' % source, "b")  # noqa: UP031
        b.names.append(counter)
    else:
        counter = b.input(source, False)
    effect(b, b.one_of(*COUNTERS).format(counter), counter)


@form(2)
def assigned_buffer(b: Builder) -> None:
    """The module's attribute is another tensor afterwards."""
    counter = b.attribute('self.register_buffer("{1}", torch.zeros(()))', "b")
    b.names.append(counter)
    b.statement(b.one_of("{0} = {0} + 1", "{0} = {1}.detach().mean()").format(counter, b.row()), (), effect=True)


@form(3)
def batch_norm(b: Builder) -> None:
    """In training: running statistics and a counter."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() in (2, 3, 4) and t.dtype == torch.float64 and t.shape[0] > 1)
    features = b.shape(x)[1]
    if not features.isdigit():
        raise Skip
    module = b.attribute(f"{{}} = nn.BatchNorm{max(1, b[x].dim() - 1)}d({features})")
    b.emit(f"{module}({x}.contiguous())")  # PyTorch's fake tensors tell other strides than it gives


@form(2)
def custom_operator(b: Builder) -> None:
    x = b.row()
    into = fresh(b, b.one_of(("1",), ("3",)), "", False)
    name = b.new()
    b.statement(f"{name} = note({x}.detach(), {into})", (name,), effect=True)


@form(3)
def overwritten_view(b: Builder) -> None:
    """A view is made, its base or it is overwritten, and the other is read."""
    x = overwritable(b)
    view = b.emit(
        b.one_of(
            "{0}.view(-1)",
            "{0}[0]",
            "{0}.mT",
            "{0}[..., ::2]",
            "{0}.unsqueeze(0)",
            "{0}.detach()",
            "{0}.view_as({0})",
            "{0}.flatten()",
            "{0}.reshape(-1)",
        ).format(x)
    )
    first, second = b.one_of((x, view), (view, x))
    used = b.emit(b.one_of("{0} * 2.0", "{0} + 1.0", "F.gelu({0})").format(second)) if b.often(0.4) else None
    effect(b, b.one_of(*NUMBERED[:12]).format(first), first)
    y = b.emit(b.one_of("{0} * 2.0 + 1.0", "{0} + 1.0", "F.relu({0})").format(second))
    if used is not None:
        b.emit(f"{used} + {y}")
