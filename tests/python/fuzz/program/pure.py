"""Statements that the rewriter does not know, without effects."""

from __future__ import annotations

from fuzz.program.builder import Builder, Skip, form
from fuzz.program.operands import dtype_of, fresh, like, mask_for, operand

UNARY = (
    *(
        "torch.sin({0})",
        "torch.cos({0})",
        "{0}.clamp(-2, 2).exp()",
        "{0}.abs()",
        "({0} + 0.3).sign()",
        "{0}.floor()",
        "{0}.cumsum(-1)",
    ),
    *("{0}.cumsum(0)", "F.log_softmax({0}, -1)", "F.selu({0})", "F.celu({0})", "F.softsign({0})"),
    "F.logsigmoid({0}.contiguous())",  # its tensors without data have other strides
    *(
        "F.normalize({0}, dim=-1)",
        "F.relu6({0})",
        "F.hardtanh({0})",
        "F.softmin({0}, -1)",
        "torch.atan({0})",
        "{0}.square()",
    ),
    *(
        "torch.zeros_like({0})",
        "torch.ones_like({0}) * 0.5",
        "{0}.new_ones({0}.shape)",
        "F.glu({0}, -1)",
        "torch.nan_to_num({0})",
    ),
    *(
        "{0}.logsumexp(-1, keepdim=True)",
        "torch.logcumsumexp({0}, -1)",
        "{0}.sort(-1)[0]",
        "{0}.topk(2)[0]",
        "torch.erf({0})",
    ),
    *("Doubled.apply({0})", "torch.sinh({0}.clamp(-2, 2))", "torch.expm1({0}.clamp(-2, 2))", "torch.log1p({0}.abs())"),
    *("{0}.pow(3)", "{0} ** 0", "{0} ** 1", "torch.clone({0})", "{0}.rsub(1.0)", "F.tanhshrink({0})", "{0}.max(-1)[0]"),
)
REDUCTIONS = (
    *(
        "{0}.sum(-1)",
        "{0}.sum(0)",
        "{0}.mean(-1)",
        "{0}.mean(0)",
        "{0}.mean(-1, keepdim=True)",
        "{0}.sum()",
        "{0}.mean()",
    ),
    *(
        "{0}.amax(-1, keepdim=True)",
        "{0}.var(-1, keepdim=True)",
        "{0}.norm(dim=-1, keepdim=True)",
        "{0}.std(-1, unbiased=False)",
    ),
    *("{0}.mean(1, keepdim=True)", "{0}.sum((0, -1))", "{0}.mean((0, 1), keepdim=True)", "{0}.argmax(-1)", "{0}.max()"),
)
BINARY = (
    *(
        "torch.maximum({0}, {1})",
        "torch.minimum({0}, {1})",
        "torch.atan2({0} + 0.0, {1} + 0.0)",
        "torch.lerp({0}, {1}, 0.3)",
    ),
    *(
        "torch.addcmul({0}, {1}, {1}, value=0.5)",
        "torch.hypot({0}, {1} + 1)",
        "{0} / (2.0 + {1}.abs())",
        "F.mse_loss({0}, {1})",
    ),
    *(
        "torch.where({0} > {1}, {0}, {1})",
        "torch.einsum('...i,...i->...i', {0}, {1})",
        "torch.cross({0}, {1})",
        "F.smooth_l1_loss({0}, {1})",
    ),
    *(
        "torch.einsum('...ij,...kj->...ik', {0}, {1})",
        "torch.baddbmm({0}, {0}, {1})",
        "torch.bmm({0}, {1}.mT)",
        "{0}.fmod({1}.detach().abs() + 1)",
    ),
)


@form(4)
def unknown(b: Builder) -> None:
    b.emit(b.one_of(*UNARY).format(b.row()))


@form(3)
def reduction(b: Builder) -> None:
    b.emit(b.one_of(*REDUCTIONS).format(b.row()))


@form(3)
def of_two(b: Builder) -> None:
    x = b.row()
    b.emit(b.one_of(*BINARY).format(x, like(b, x) if b.often(0.6) else operand(b, x, 0)))


@form(2)
def masked(b: Builder) -> None:
    x = b.row()
    b.emit(b.one_of("torch.where({1}, {0}, 0.0)", "{0}.masked_fill({1}, 0.0)", "{0} * {1}").format(x, mask_for(b, x)))


@form(2.5)
def group_norm(b: Builder) -> None:
    """Alone, or with numbers added to the channels before it and an activation behind it."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() > 1 and t.shape[1] % 2 == 0)
    if b.often(0.2) and b[x].dim() > 2:
        b.emit(f"F.instance_norm({x})")
        return
    channels, dtype = b.shape(x)[1], dtype_of(b[x])
    if b.often(0.4) and b[x].dim() > 2:
        shift = fresh(b, (b.one_of("1", b.shape(x)[0]), channels, *["1"] * (b[x].dim() - 2)), dtype)
        x = b.emit(b.one_of("{0} + {1}", "{1} + {0}", "{0}.add_({1})", "{0} * 1.0 + {1}").format(x, shift))
    affine = [fresh(b, (channels,), dtype) if b.often(0.7) else "None" for _ in range(2)]
    y = b.emit(f"F.group_norm({x}, {b.one_of('2', '2', '1')}, {', '.join(affine)}, {b.one_of('1e-5', '1e-3')})")
    if b.often(0.6):
        b.emit(b.one_of("F.silu({0})", "F.silu({0}, inplace=True)", "F.leaky_relu({0}, 0.2)", "F.gelu({0})").format(y))


@form(1.5)
def convolution(b: Builder) -> None:
    x = b.pick(lambda t: t.is_floating_point() and t.dim() in (3, 4))
    channels = b.shape(x)[1]
    if not channels.isdigit() or b[x].dim() == 4 and b[x].shape[-1] < 3:
        raise Skip
    kernel = ("3",) * (b[x].dim() - 2)
    weight = fresh(b, (channels, channels, *kernel), dtype_of(b[x]))
    b.emit(f"F.conv{b[x].dim() - 2}d({x}, {weight}, padding=1)")


@form(1)
def constant(b: Builder) -> None:
    """A tensor that is made of shapes alone."""
    x = b.row()
    b.emit(
        b.one_of(
            "torch.arange({1}, dtype={0}.dtype)", "torch.ones({1}, dtype={0}.dtype) * 0.5", "torch.linspace(0, 1, {1})"
        ).format(x, b.size(x, -1))
    )


@form(1)
def integers(b: Builder) -> None:
    x = b.row()
    y = b.emit(b.one_of("({0} * 3).long()", "({0} > 0)", "{0}.argsort(-1)", "({0} * 2).int() + 1").format(x))
    if b.often(0.7):
        b.emit(b.one_of("{0} * {1}", "{0} + {1}", "{1} + {0}").format(x, y))
