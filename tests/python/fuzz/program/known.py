"""Statements that the rewriter knows: chains of a row, in all their spellings."""

from __future__ import annotations

import math

import torch

from fuzz.program.builder import Builder, Skip, form
from fuzz.program.operands import broadcast, dtype_of, fresh, like, mask_for, number, operand

ACTIVATIONS = (
    *("F.relu({0})", "torch.relu({0})", "{0}.relu()", "F.gelu({0})", "F.gelu({0}, approximate='tanh')"),
    *("F.silu({0})", "F.mish({0})", "F.hardswish({0})", "F.softplus({0})", "F.softplus({0}, 2.0)", "F.elu({0})"),
    *("F.elu({0}, 0.5)", "F.leaky_relu({0}, 0.2)", "F.leaky_relu({0})", "torch.tanh({0})", "{0}.tanh()", "F.tanh({0})"),
    *("torch.sigmoid({0})", "{0}.sigmoid()", "F.sigmoid({0})", "nn.GELU()({0})", "nn.ReLU()({0})", "F.softsign({0})"),
    *("F.leaky_relu({0}, -0.2)", "F.elu({0}, -0.5)", "F.gelu(input={0})", "F.relu(input={0})", "torch.relu(input={0})"),
    *(
        "F.leaky_relu(input={0}, negative_slope=0.3)",
        "torch.tanh(input={0})",
        "F.leaky_relu({0}, 1)",
        "F.elu({0}, alpha=2)",
    ),
)
_C = math.sqrt(2 / math.pi)
WRITTEN = (
    f"0.5 * {{0}} * (1 + torch.tanh({_C!r} * ({{0}} + 0.044715 * {{0}}**3)))",
    f"{{0}} * 0.5 * (1 + torch.tanh(({{0}} + 0.044715 * torch.pow({{0}}, 3.0)) * {_C!r}))",
    f"0.5 * {{0}} * (1.0 + torch.tanh({_C!r} * {{0}} * (1.0 + 0.044715 * {{0}} * {{0}})))",
    "{0} * 0.5 * (1.0 + torch.erf({0} / math.sqrt(2.0)))",
    *("{0} * torch.sigmoid(1.702 * {0})", "{0} * torch.sigmoid({0})", "torch.sigmoid({0}).mul({0})"),
    *("{0} * torch.tanh(F.softplus({0}))", "torch.square(F.relu({0}))", "F.relu({0}).pow(2)", "F.relu({0}) ** 2"),
    *("{0} * torch.sigmoid(1.5 * {0})", "torch.exp(-({0} ** 2))", "{0} / (1 + {0}.abs())", "-{0}", "{0} ** 2"),
)
WRITTEN_NORMS = (
    "{0} * torch.rsqrt({0}.pow(2).mean(-1, keepdim=True) + 1e-3)",
    "{0} / torch.sqrt(({0} ** 2).mean(-1, keepdim=True) + 1e-3)",
    "{0} * torch.rsqrt(({0} * {0}).mean(dim=-1, keepdim=True) + 1e-3)",
    "({0} - {0}.mean(-1, keepdim=True)) / torch.sqrt({0}.var(-1, unbiased=False, keepdim=True) + 1e-3)",
    "({0} - {0}.mean(-1, keepdim=True)) * torch.rsqrt(({0} - {0}.mean(-1, True)).pow(2).mean(-1, keepdim=True) + 1e-3)",
    "({0} - {0}.mean(-1, keepdim=True)) / torch.sqrt({0}.var(-1, keepdim=True) + 1e-3)",
    "{0} * torch.rsqrt({0}.pow(2).mean(0, keepdim=True) + 1e-3)",
)
SUMS = (
    *("{0} + {1}", "{1} + {0}", "torch.add({0}, {1})", "torch.add({0}, {1}, alpha=2)", "{0} - {1}", "{1} - {0}"),
    *("{0} + 1.0 * {1}", "torch.sub({0}, {1})", "torch.add(input={0}, other={1})", "{0}.add(other={1})", "{0} - -{1}"),
    *(
        "torch.add({0}, {1}, alpha=1)",
        "{0}.__add__({1})",
        "operator.add({0}, {1})",
        "torch.ops.aten.add.Tensor({0}, {1})",
    ),
)
PRODUCTS = ("torch.mul(input={0}, other={1})", "{0}.mul(other={1})", "{0} * {1}", "{1} * {0}", "torch.mul({0}, {1})")
GATES = ("F.silu({0}) * {1}", "F.gelu({0}) * {1}", "{1} * F.gelu({0}, approximate='tanh')", "F.relu({0}) * {1}")
SOFTMAXES = (
    "F.softmax({0}, -1, dtype=torch.float32)",
    "torch.softmax({0}, -1, torch.float32)",
    "F.softmax({0}, -1, dtype=torch.float64)",
    "torch.softmax(input={0}, dim=-1)",
    "F.softmax({0}, -1)",
    "torch.softmax({0}, -1)",
    "{0}.softmax(-1)",
    "F.softmax({0}, dim={1})",
)
KEEP = (
    "F.dropout({0}, 0.0)",
    "F.dropout({0}, 1.0)",
    "F.dropout({0}, 0.5, False)",
    "F.dropout({0}, 0.5, training=False)",
    "torch.dropout({0}, 0.0, True)",
)


@form(9)
def activation(b: Builder) -> None:
    b.emit(activation_of(b, b.row()))


def activation_of(b: Builder, x: str) -> str:
    return b.one_of(*ACTIVATIONS, *WRITTEN).format(x)


def sum_of(b: Builder, x: str) -> str:
    return b.one_of(*SUMS[:3], *SUMS).format(x, operand(b, x))


def product_of(b: Builder, x: str) -> str:
    if b.often(0.3):
        return b.one_of("{0} * {1}", "{0} / {1}", "{1} * {0}", "torch.div({0}, {1})").format(x, number(b))
    return b.one_of(*PRODUCTS).format(x, operand(b, x))


@form(10)
def residual(b: Builder) -> None:
    b.emit(sum_of(b, b.row()))


@form(6)
def scale(b: Builder) -> None:
    b.emit(product_of(b, b.row()))


@form(4)
def gate(b: Builder) -> None:
    x = b.row()
    b.emit(b.one_of(*GATES).format(x, b.one_of(like(b, x), operand(b, x))))


@form(8)
def norm(b: Builder) -> None:
    b.emit(norm_of(b, b.row()))


def norm_of(b: Builder, x: str) -> str:
    n, dtype = b.size(x, -1), dtype_of(b[x])
    columns = [fresh(b, b.shape(x)[-1:], dtype) if b.often(0.6) else "None" for _ in range(2)]
    eps = b.one_of("1e-5", "1e-3", "1e-6" if dtype else "1e-8")
    kind = b.chance.random()
    if kind < 0.4:
        return f"F.layer_norm({x}, ({n},), {columns[0]}, {columns[1]}, {eps})"
    if kind < 0.7:
        return f"F.rms_norm({x}, ({n},), {columns[0]}{b.one_of('', f', {eps}', f', eps={eps}')})"
    if kind < 0.8 and b[x].dim() > 1:
        return f"F.layer_norm({x}, ({b.size(x, -2)}, {n}))"
    return b.one_of(*WRITTEN_NORMS).format(x)


@form(3)
def norm_module(b: Builder) -> None:
    """A module of its own; the program becomes one."""
    x = b.row()
    n = b.size(x, -1)
    if not n.isdigit() or b[x].dtype != torch.float64:
        raise Skip
    kind = b.one_of("nn.LayerNorm({})", "nn.RMSNorm({})", "nn.Linear({0}, {0})", "nn.Linear({0}, 2 * {0})")
    module = b.attribute("{} = " + kind.format(n))
    b.emit(f"{module}({x})")


@form(4)
def softmax(b: Builder) -> None:
    x = b.row()
    text = b.one_of(*SOFTMAXES).format(x, b.chance.randrange(b[x].dim()))
    if b.often(0.4):
        text = b.one_of(*SOFTMAXES[:7]).format(f"({x} * 0.125 + {operand(b, x, 0)})")
    b.emit(text)


@form(3)
def masked_softmax(b: Builder) -> None:
    x = b.row()
    b.emit(f"F.softmax({x}.masked_fill({mask_for(b, x)}, -1e4), -1)")


@form(3)
def no_dropout(b: Builder) -> None:
    """Probabilities with which nothing is drawn."""
    b.emit(b.one_of(*KEEP).format(b.row()))


@form(4)
def dropout(b: Builder) -> None:
    """A block that is called twice has two draws of one."""
    p = b.probability()
    b.emit(
        b.one_of("F.dropout({}, {})", "F.dropout({}, {}, training=True)", "torch.dropout({}, {}, True)").format(
            b.row(), p
        )
    )


@form(6)
def linear(b: Builder) -> None:
    b.emit(linear_of(b, b.row()))


@form(5)
def linears(b: Builder) -> None:
    """Two layers or three that take one tensor."""
    x = b.row()
    n, dtype = b.shape(x)[-1], dtype_of(b[x])
    for _ in range(b.one_of(2, 2, 3)):
        m = b.one_of(n, "4", "6")
        bias = fresh(b, (m,), dtype) if b.often(0.5) else None
        b.emit(f"F.linear({x}, {fresh(b, (m, n), dtype)}, {bias})")


def linear_of(b: Builder, x: str) -> str:
    n, dtype = b.shape(x)[-1], dtype_of(b[x])
    m = b.one_of(n, n, "4", "6")
    bias = fresh(b, (m,), dtype) if b.often(0.7) else None
    kind = b.chance.random()
    if kind < 0.5 or b[x].dim() < 2:
        return f"F.linear({x}, {fresh(b, (m, n), dtype)}, {bias})"
    w = fresh(b, (n, m), dtype)
    if kind < 0.65:
        return f"{x} @ {w}" + (f" + {bias}" if bias else "")
    if kind < 0.75:
        return f"torch.matmul({x}, {w})" + (f" + {bias}" if bias else "")
    flat = x if b[x].dim() == 2 else f"{x}.reshape(-1, {b.size(x, -1)})"
    wide = bias or fresh(b, b.one_of((m,), ("1", m)), dtype)
    product = f"torch.addmm({wide}, {flat}, {w}{b.one_of('', '', ', beta=2, alpha=0.5')})"
    return product if b[x].dim() == 2 or b.often(0.3) else f"{product}.view(*{x}.shape[:-1], -1)"


@form(3)
def product_with(b: Builder) -> None:
    """Of two tensors that are there."""
    x = b.row(2)
    y = like(b, x)
    b.emit(
        b.one_of("{0} @ {1}.mT", "torch.matmul({0}, {1}.transpose(-2, -1))", "{0}.transpose(-1, -2) @ {1}").format(x, y)
    )


MASKS = (
    *("torch.ones({0}, {1}, dtype=torch.bool).tril()", "torch.ones({0}, {1}, dtype=torch.bool)", "causal({0})"),
    *("torch.full(({0}, {1}), -math.inf).triu(1)", "torch.zeros({0}, {1})", "torch.ones({0}, {1}).tril()"),
    *(
        "torch.ones({0}, {1}, dtype=torch.bool).tril(1)",
        "causal({0})[None, None].expand(1, 1, {0}, {1})",
        "None",
        "None",
    ),
    "torch.ones({0}, {1}, dtype=torch.bool).tril().logical_not().logical_not()",
)


@form(8)
def attention(b: Builder) -> None:
    """With a mask that is built in the program, given, or none."""
    q = b.row(2)
    k, v = b.one_of((q, q), (like(b, q), like(b, q)), (q, like(b, q)))
    rows = b.size(q, -2)
    kind, dtype = b.chance.random(), dtype_of(b[q])
    if kind < 0.6:
        mask = b.one_of(*MASKS).format(rows, rows)
        if mask != "None" and b.often(0.6):
            mask = b.emit(mask, "m")
            if b.often(0.3):
                mask = b.one_of("{0}.clone()", "{0}.contiguous()", "{0}[None]", "{0}.view({0}.shape)").format(mask)
    elif kind < 0.8:
        mask = fresh(b, (b.shape(q)[-2],) * 2, dtype)
    else:
        mask = f"({fresh(b, (b.shape(q)[-2],) * 2, '', False)} > -1)"
    rest = b.one_of("", "", ", scale=0.3", ", dropout_p=0.0")
    if mask == "None" and b.often(0.5):
        rest += ", is_causal=True"
    b.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask}{rest})")


REPEATED = (
    "{0}[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)",
    "{0}[:, :, None, :, :].expand(-1, -1, 2, -1, -1).reshape({0}.shape[0], -1, *{0}.shape[2:])",
    "{0}.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(-1, 2 * {0}.shape[1], *{0}.shape[2:])",
)
COPIED = (
    *("{0}.contiguous()", "torch.cat([{0}.new_empty(0), {0}], dim=-2)", "{0}.clone()"),
    "torch.cat([torch.tensor([], dtype={0}.dtype), {0}], dim=-2)",
)
MULTIPLIED = ("{0} * 0.5", "0.3 * {0}", "{0} / 4.0", "{0} * -1.0", "({0} * 2.0).transpose(-1, -2).contiguous().mT")


@form(5)
def attention_of_copies(b: Builder) -> None:
    """Of heads that models repeat, make contiguous or put behind a cache that is empty."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() == 3 and t.shape[-1] > 1)  # noqa: PLR2004
    q, k, v = (b.emit(f"{each}[:, None]") for each in (x, like(b, x), like(b, x)))
    k, v = (b.emit(b.one_of(*REPEATED).format(each)) for each in (k, v))
    q = b.emit(f"torch.cat([{q}, {q} * 0.5], 1)")
    q, k, v = (b.emit(b.one_of(*COPIED).format(each)) if b.often(0.5) else each for each in (q, k, v))
    if b.often(0.5):
        q = b.emit(b.one_of(*MULTIPLIED).format(q))
    b.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}{b.one_of('', ', is_causal=True', ', scale=1.0')})")


@form(4)
def routed(b: Builder) -> None:
    """Rows sorted by a permutation, each once or twice, and sorted back, as those of experts are."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() > 1 and t.shape[0] > 1)
    times = b.one_of(1, 2)
    ids = b.emit(f"torch.arange({x}.shape[0] * {times}) * 7 % 5", "i")
    order = b.emit(
        b.one_of("torch.sort({0})[1]", "torch.argsort({0})", "{0}.sort()[1]", "{0}.argsort()").format(ids), "i"
    )
    rows = b.emit(f"{x}[{order} // {times}]" if times > 1 or b.often(0.3) else f"{x}[{order}]")
    if b.often(0.6):
        rows = b.emit(b.one_of("{0}.tanh()", "{0} * 2.0", "{0}.masked_fill_({0} > 1, 0.0)").format(rows))
    written = b.often(0.2)
    if written:
        b.statement(b.one_of("{0}.zero_()", "{0}[0] = 1", "{0}.flip(0)").format(order), effect=True)
    if b.often(0.5):
        back = b.emit(f"torch.argsort({order})", "i")
    else:
        made = b.one_of("torch.empty_like({0})", "torch.zeros_like({0})")
        made = "torch.zeros_like({0})" if written else made  # what is no permutation leaves numbers undefined
        back = b.emit(made.format(order), "i")
        b.statement(f"{back}[{order}] = torch.arange({order}.shape[0])", effect=True)
        if b.often(0.2):
            b.statement(b.one_of("{0}[0] = 0", "{0}.add_(0)").format(back), effect=True)
    y = b.emit(f"{rows}[{back}]")
    if times > 1:
        b.emit(f"{y}.view(-1, {times}, *{y}.shape[1:]).sum(dim=1)")


@form(4)
def attention_written_out(b: Builder) -> None:
    q = b.row(3)
    k, v = like(b, q), like(b, q)
    scores = b.emit(
        b.one_of("{0} @ {1}.mT * 0.5", "torch.matmul({0}, {1}.transpose(-2, -1)) / 2.0", "{0} @ {1}.mT").format(q, k)
    )
    if b.often(0.4):
        scores = b.emit(sum_of(b, scores))
    if b.often(0.25):
        scores = b.emit(f"torch.tanh({scores} / 5.0) * 5.0")
    if b.often(0.3):
        scores = b.emit(f"{scores}.masked_fill({mask_for(b, scores)}, -1e4)")
    weights = b.emit(f"F.softmax({scores}, -1)")
    if b.often(0.3):
        weights = b.emit(b.one_of(*KEEP).format(weights))
    b.emit(f"{weights} @ {v}")


ROWS = ("{0}.reshape(-1, {0}.shape[-1])", "{0}.flatten(0, -2)", "{0}.contiguous().view(-1, {0}.shape[-1])")
LOSSES = (
    *("", "", ", reduction='sum'", ", label_smoothing=0.1", ", ignore_index=2", ", None, reduction='mean'"),
    *(", reduction='none'", ", ignore_index=0, reduction='sum', label_smoothing=0.2"),
)


@form(4)
def loss_of_a_head(b: Builder) -> None:
    """A linear layer and a cross entropy, with what stands between them."""
    x = b.row(2)
    n, dtype = b.shape(x)[-1], dtype_of(b[x])
    m = b.one_of(n, "4", "6")
    logits = b.emit(f"F.linear({x}, {fresh(b, (m, n), dtype)}, {fresh(b, (m,), dtype) if b.often(0.5) else None})")
    ways = (
        "{0} + {1}",
        "{0} / 4.0",
        "{0}[..., :-1, :]",
        "{0}.float()",
        "torch.tanh({0} / 5.0) * 5.0",
        "{0}.contiguous()",
    )
    for way in ways:
        if b.often(0.15):
            logits = b.emit(way.format(logits, fresh(b, ("1", m), dtype) if "{1}" in way else None))
    rows = logits if b[logits].dim() == 2 and b.often(0.6) else b.emit(b.one_of(*ROWS).format(logits))
    target = f"torch.arange({rows}.shape[0]) % {rows}.shape[-1]"
    b.emit(f"F.cross_entropy({rows}, {b.emit(target, 'm') if b.often(0.3) else target}{b.one_of(*LOSSES)})")


@form(3)
def heads(b: Builder) -> None:
    """Split off the features and, later, joined again."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() == 3 and t.shape[-1] % 2 == 0 and t.shape[-1] > 2)
    split = b.emit(f"{x}.view({x}.shape[0], -1, 2, {x}.shape[2] // 2).transpose(1, 2)")
    if b.often(0.5):
        other = b.emit(b.one_of(*ACTIVATIONS, "{0} * 2.0", "F.softmax({0}, -1)").format(split))
        b.emit(b.one_of("{0}.transpose(1, 2).flatten(2)", "{0}.transpose(1, 2).reshape({1}.shape)").format(other, x))


PERMUTATIONS = (
    *("{0}.transpose(0, 1)", "{0}.transpose(-2, -3)", "{0}.permute(1, 0, *range(2, {0}.dim()))", "{0}.swapaxes(1, 0)"),
    *("{0}.movedim(0, -2)", "{0}.permute(*range({0}.dim() - 2, -1, -1), -1)", "torch.transpose({0}, 0, -2)"),
    *("{0}.transpose(0, -1)", "{0}.movedim(0, -1)", "{0}.transpose(0, 1).contiguous()"),
)


@form(8)
def permuted(b: Builder) -> None:
    """Rows that stand elsewhere, between two words."""
    x = b.row(3)
    before = b.emit(b.one_of(norm_of, sum_of, product_of, activation_of)(b, x))
    there = b.emit(b.one_of(*PERMUTATIONS[:7], *PERMUTATIONS).format(before))
    if b.often(0.3) and b[there].shape[-1] % 2 == 0:
        rope_of(b, there)
    else:
        behind = b.emit(b.one_of(norm_of, sum_of, product_of, activation_of)(b, there))
        if b.often(0.4):
            b.emit(b.one_of(*PERMUTATIONS, "{0} + 1.0").format(behind))


ROPES = ("rotated", "rotated", "turned", "cast_twice", "in_pairs", "halves_apart", "of_first_numbers")


@form(3)
def rope(b: Builder) -> None:
    rope_of(b, b.pick(lambda t: t.is_floating_point() and t.dim() > 1 and t.shape[-1] % 2 == 0))


def rope_of(b: Builder, x: str) -> None:
    shape, dtype = b.shape(x), dtype_of(b[x])
    spelling, columns = b.one_of(*ROPES) if shape[-1].isdigit() else "rotated", b[x].shape[-1]
    turned = {"halves_apart": columns // 2, "of_first_numbers": (columns + 2) // 4 * 2}.get(spelling)
    sizes = shape if turned is None else (*shape[:-1], str(turned))
    table = b.one_of(sizes[-2:], ("1",) * (len(shape) - 2) + sizes[-2:], sizes[-1:], sizes)
    cos, sin = (fresh(b, table, dtype, b.often(0.1)) for _ in range(2))
    b.emit(f"{spelling}({x}, {cos}, {sin})")


@form(5)
def views_around(b: Builder) -> None:
    """A sum of another shape between two views, as in windows of attention."""
    x = b.pick(lambda t: t.is_floating_point() and t.dim() > 1 and t.shape[-1] > 1)
    shape = b[x].shape
    if len(b.environments) > 1:
        inner = b.one_of(f"{x}.unsqueeze(0)", f"{x}.flatten(0, -2)", f"{x}.unsqueeze(1)")
    else:
        count = shape[:-1].numel()
        first = b.one_of(*[d for d in range(1, count + 1) if count % d == 0])
        second = b.one_of(*[d for d in range(1, count // first + 1) if (count // first) % d == 0])
        sizes = b.one_of((first, count // first), (first, second, count // first // second))
        subject, method, last = b.one_of(x, f"({x} * 2.0)"), b.one_of("view", "reshape"), b.one_of("-1", shape[-1])
        inner = f"{subject}.{method}({', '.join(map(str, (*sizes, last)))})"
    y = b.emit(inner)
    z = b.emit(b.one_of("{0} + {1}", "{1} + {0}", "{0} * {1}").format(y, broadcast(b, y)))
    b.emit(
        b.one_of("F.gelu({0}.view({1}.shape))", "F.softmax({0}.view({1}.shape), -1)", "{0}.reshape({1}.shape)").format(
            z, x
        )
    )
