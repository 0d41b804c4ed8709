"""Statements in blocks: checkpoints, modes, dtype islands, hooks, transforms; and modules with hooks."""

from __future__ import annotations

import torch

from fuzz.program.builder import Builder, Skip, form
from fuzz.program.effects import NUMBERED, effect, is_overwritable
from fuzz.program.known import ACTIVATIONS, WRITTEN
from fuzz.program.operands import dtype_of, fresh, like

MODES = (
    "with torch.no_grad():",
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(False):",
)
HOOKS = ("lambda g: g * 2.0", "lambda g: None", "lambda g: g * g.abs()", "lambda g: g.clamp(-1, 1)", "torch.tanh")
MAPPED = (
    *("torch.vmap(lambda r: torch.tanh(r + 1.0) * r)({0})", "torch.vmap(lambda r: F.gelu(r * 2.0))({0})"),
    *(
        "torch.vmap(lambda r: F.layer_norm(r + 1.0, r.shape[-1:]))({0})",
        "torch.func.grad(lambda r: F.gelu(r * 2.0 + 1.0).sum())({0})",
    ),
    *(
        "torch.func.grad(lambda r: (torch.softmax(r * 0.5, -1) ** 2).sum())({0})",
        "torch.vmap(lambda r: (F.relu(r) * 2.0 + r), in_dims=1)({0})",
    ),
    *(
        "torch.func.jvp(lambda r: F.gelu(r + 1.0), ({0},), ({0},))[1]",
        "torch.func.vjp(lambda r: F.silu(r) * r, {0})[0]",
    ),
)


@form(8)
def checkpointed(b: Builder) -> None:
    if b.depth > 1:
        raise Skip
    x = b.row()
    arguments = [x] if b.often(0.6) else [x, like(b, x)]
    name = b.function(arguments, b.chance.randrange(1, 5))
    b.emit(f"checkpoint({name}, {', '.join(arguments)}, use_reentrant=False)")
    if b.often(0.1):
        b.emit(f"checkpoint({name}, {', '.join(arguments)}, use_reentrant=False)")


@form(1.5)
def called(b: Builder) -> None:
    """A function within, called plainly."""
    if b.depth > 1:
        raise Skip
    x = b.row()
    b.emit(f"{b.function([x], b.chance.randrange(1, 4))}({x})")


@form(4)
def mode(b: Builder) -> None:
    if len(b.contexts) > 1:
        raise Skip
    with b.within(b.one_of(*MODES)):
        b.steps(b.chance.randrange(1, 4))


@form(2)
def autocast(b: Builder) -> None:
    """It casts float32, which is made here."""
    if b.contexts:
        raise Skip
    x = b.emit(f"{b.row()}.float()")
    with b.within("with torch.autocast('cpu', torch.bfloat16):"):
        n = b.shape(x)[-1]
        w = fresh(b, (n, n), ", dtype=torch.float32")
        y = b.emit(b.one_of("F.linear({0}, {1})", "{0} @ {1}", "F.linear(F.gelu({0}), {1})").format(x, w))
        b.emit(b.one_of(*ACTIVATIONS, "{0} + 1.0", "F.layer_norm({0}, {0}.shape[-1:])", "F.softmax({0}, -1)").format(y))
        if b.often(0.5):
            b.steps(1)


@form(4)
def dtype_island(b: Builder) -> None:
    x = b.row()
    narrow = b.emit(
        b.one_of(
            "{0}.float()",
            "{0}.to(torch.float32)",
            "{0}.bfloat16()",
            "{0}.half()",
            "{0}.to(torch.bfloat16)",
            "{0}.type(torch.float32)",
        ).format(x)
    )
    written = [name for name in (narrow, x) if is_overwritable(b[name])]
    if written and b.often(0.3):
        written = b.one_of(*written)
        effect(b, b.one_of(*NUMBERED[:12]).format(written), written)
    y = b.emit(
        b.one_of(*ACTIVATIONS, *WRITTEN, *WRITTEN, "{0} * 2.0", "{0} + {1}", "{0} * {1}", "{1} + {0}").format(
            narrow, fresh(b, b.shape(x)[-1:], b.one_of("", dtype_of(b[narrow])))
        )
    )
    if b.often(0.6):
        b.emit(b.one_of("{0}.double()", "{0}.to({1}.dtype)", "{0}.to(torch.float64)", "{0}.type_as({1})").format(y, x))


WITH_NUMBERS = (
    *(
        "{0} * {1}",
        "{0} + {1}",
        "F.gelu({0} * {1})",
        "F.leaky_relu({0}, {1})",
        "F.elu({0}, {1})",
        "{0} / {1}",
        "{0} - {1}",
    ),
    *(
        "F.softmax({0} * {1}, -1)",
        "F.layer_norm({0}, {0}.shape[-1:], eps={1})",
        "F.rms_norm({0}, {0}.shape[-1:], eps={1})",
    ),
    *(
        "{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + {1})",
        "F.dropout({0}, {1} * 0.0)",
        "{0} * torch.sigmoid({1} * {0})",
    ),
    *(
        "torch.add({0}, {0}, alpha={1})",
        "{0}.clamp(-{1}, {1})",
        "F.relu({0}) ** {1}",
        "F.softplus({0}, {1})",
        "{1} * {0} + {0}",
    ),
)
NUMBERS = ("0.5", "0.25 + 0.25 * C", "2 + C", "2", "1.702", "True")


@form(3)
def with_a_number(b: Builder) -> None:
    """That is an argument, of this value or another in each call."""
    b.emit(b.one_of(*WITH_NUMBERS).format(b.row(), b.number(b.one_of(*NUMBERS))))


@form(2)
def graph_break(b: Builder) -> None:
    """Two graphs, between which all tensors can be seen."""
    if b.contexts or b.depth:
        raise Skip
    b.statement("torch._dynamo.graph_break()")


ALIASES = (
    "{0}.detach()",
    "{0}.detach().flatten()",
    "{0}.detach()[:1]",
    "{0}.detach().permute(*range({0}.dim())[::-1])",
    "{0}.detach()[..., :2]",
    "{0}",
)


@form(3)
def alias(b: Builder) -> None:
    """An argument that shares memory with another, always or from the second call on; often one of them is written."""
    x = b.one_of(*[i.name for i in b.inputs if i.name in b.names and not b[i.name].is_nested] or [None])
    view = b.one_of(*ALIASES)
    if x is None or not b.runs(view.format(x)):
        raise Skip
    source = view.format(x)
    if b.often(0.6):
        shape = [str(s) for s in eval(source, b.environments[0]).shape]  # noqa: S307
        if len(b.environments) > 1:
            raise Skip
        source = f"{source} if C % 2 else R({', '.join(shape)}{dtype_of(b[x])})"
    name = b.input(source, False, argument=True)
    if b.often(0.6):
        written = b.one_of(name, x)
        b.statement(
            b.one_of("{0}.add_(1.0)", "{0}.mul_(0.5)", "{0} += 1.0", "{0}[..., :1] = 0.5", "{0}.zero_()").format(
                written
            ),
            (),
            effect=True,
        )


@form(2)
def dropout_module(b: Builder) -> None:
    x = b.row()
    p = b.probability()
    module = b.attribute("{} = nn.Dropout(%r)" % b.one_of(0.0, p, p))  # noqa: UP031
    b.emit(f"{module}({x})")


@form(3)
def hook(b: Builder) -> None:
    x = b.pick(lambda t: t.requires_grad and t.is_floating_point())
    if b.contexts or b.depth or x.startswith("self"):
        raise Skip
    b.statement(f"{x}.register_hook({b.one_of(*HOOKS)})", ())


@form(1)
def retained(b: Builder) -> None:
    x = b.pick(lambda t: t.requires_grad and not t.is_leaf)
    if b.contexts or b.depth:
        raise Skip
    b.statement(f"{x}.retain_grad()", ())


@form(2)
def transformed(b: Builder) -> None:
    transformed = b.one_of(*MAPPED).format(b.row(2))
    if b.depth and "jvp" in transformed:
        raise Skip  # a checkpointed block that is left early leaves its level open (torch 2.15)
    b.emit(transformed)


@form(2)
def module_with_hook(b: Builder) -> None:
    """Hooks of a submodule change what it takes or gives."""
    x = b.row()
    n = b.size(x, -1)
    if not n.isdigit() or b[x].dtype != torch.float64:
        raise Skip
    module = b.attribute(
        "{} = " + b.one_of("nn.LayerNorm({0})", "nn.Linear({0}, {0})", "nn.GELU()", "nn.RMSNorm({0})").format(n)
    )
    hooked = b.one_of(
        "{0}.register_forward_hook(lambda m, a, y: y * 2.0)",
        "{0}.register_forward_pre_hook(lambda m, a: (a[0] + 1.0,))",
        "{0}.register_forward_hook(lambda m, a, y: None)",
        "{0}.register_full_backward_hook(lambda m, gi, go: None)",
    ).format(module)
    b.attribute(hooked)
    b.emit(f"{module}({x})")


ON_JAGGED = (
    *(
        "F.gelu({0})",
        "{0} * 2.0",
        "{0} + {0}",
        "F.relu({0} + 1.0)",
        "F.layer_norm({0}, ({1},))",
        "F.silu({0}) * {0}",
        "-{0}",
    ),
    *("F.linear({0}, {2})", "{0} @ {2}", "F.dropout({0}, 0.0)", "F.layer_norm({0} * 2.0, ({1},), {3})", "{0} + {3}"),
)


@form(1)
def jagged(b: Builder) -> None:
    """A nested tensor, given or made here, and its values."""
    n = b.one_of("4", "6")
    if b.often(0.5):
        x = b.input(f"torch.nested.nested_tensor([R(2, {n}), R(3, {n})], layout=torch.jagged)", b.often(0.5))
    else:
        values = fresh(b, ("5", n))
        x = f"torch.nested.nested_tensor_from_jagged({values}, torch.tensor([0, 2, 5]))"
    text = b.one_of(*ON_JAGGED).format(x, n, fresh(b, (n, n)), fresh(b, (n,)))
    if b.often(0.5):
        text = b.one_of(*ON_JAGGED).format(f"({text})", n, fresh(b, (n, n)), fresh(b, (n,)))
    b.emit(f"({text}).values()")


@form(1)
def subclass(b: Builder) -> None:
    x = b.input(f"R({', '.join(b.shape(b.row()))}).as_subclass(Tagged)", False)
    b.emit(b.one_of(*ACTIVATIONS, *WRITTEN, "{0} * 2.0 + 1.0", "F.softmax({0}, -1)").format(x))
