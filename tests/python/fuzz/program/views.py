"""Statements that move: views, pieces and what is stacked of them, joins and look-ups."""

from __future__ import annotations

import torch

from fuzz.program.builder import Builder, Skip, form
from fuzz.program.known import ACTIVATIONS, WRITTEN
from fuzz.program.operands import broadcast, dtype_of, fresh, like, operand

VIEWS = (
    *("{0}.view(-1)", "{0}.reshape(-1)", "{0}.flatten(0, -2)", "{0}.flatten()", "{0}.unsqueeze(0)", "{0}.unsqueeze(1)"),
    *("{0}.unsqueeze(-2)", "{0}.squeeze(0)", "{0}.squeeze()", "{0}.mT", "{0}.transpose(0, -1)", "{0}.transpose(0, 1)"),
    *("{0}.transpose(-1, -2)", "{0}.permute(*range({0}.dim() - 1, -1, -1))", "{0}.movedim(-1, 0)", "{0}.contiguous()"),
    *("{0}.detach()", "{0}.clone()", "{0}.unflatten(-1, (2, -1))", "{0}.unflatten(-1, (-1, 2))", "{0}.select(0, 0)"),
    *(
        "{0}[0]",
        "{0}[-1]",
        "{0}[..., :2]",
        "{0}[..., ::2]",
        "{0}[:, :2]",
        "{0}[None]",
        "{0}[:, None]",
        "{0}[..., None]",
    ),
    *(
        "{0}.narrow(-1, 0, 2)",
        "{0}.swapaxes(0, -1)",
        "{0}.expand(2, *{0}.shape)",
        "{0}.expand_as({0})",
        "{0}.view_as({0})",
    ),
    *(
        "{0}[1:]",
        "{0}[..., 1:]",
        "{0}.as_strided({0}.shape, {0}.stride())",
        "{0}.as_strided((2,), (1,))",
        "{0}.diagonal(0, -2, -1)",
    ),
    *("{0}.to({0}.dtype)", "{0}.type_as({0})", "{0}.reshape({0}.shape[0], -1)", "{0}.view({0}.shape[0], -1)", "{0}.T"),
    *("{0}.contiguous(memory_format=torch.channels_last)", "{0}.mT.contiguous().mT", "{0}.mT.contiguous()", "{0}.real"),
    *("{0}.split(1)[0]", "{0}.chunk(2, -1)[1]", "{0}.unbind()[-1]", "{0}.split(2, -1)[0]", "{0}.unfold(-1, 2, 1)"),
    *("{0}.t()", "{0}.clone(memory_format=torch.contiguous_format)", "{0}.positive()"),
)
JOINS = (
    *("torch.cat([{0}, {1}], -1)", "torch.cat([{0}, {1}])", "torch.stack([{0}, {1}])", "torch.stack([{0}, {1}], -1)"),
    *(
        "torch.cat(({0}, {0}), dim=0)",
        "torch.stack(({1}, {0}), dim=1)",
        "torch.where({0} > 0, {0}, {1})",
        "torch.hstack([{0}, {1}])",
    ),
)
SPLITS = (
    *(
        "{0}.unbind()",
        "{0}.unbind(0)",
        "torch.unbind({0})",
        "{0}.unbind(1)",
        "{0}.unbind(-1)",
        "{0}.chunk(2)",
        "{0}.split(1)",
    ),
    *(
        "torch.split({0}, 1)",
        "{0}.chunk(2, 1)",
        "torch.split({0}, 2, 1)",
        "torch.chunk({0}, 2, dim=-1)",
        "{0}.split(2)",
    ),
    *("torch.tensor_split({0}, 2)", "{0}.split([1, {0}.shape[0] - 1])", "{0}", "[{0}[i] for i in range({0}.shape[0])]"),
    *("{0}.unbind()[::-1]", "{0}.unbind()[1:]", "({0}.unbind() * 2)", "torch.hsplit({0}, 2)"),
)
ON_PIECES = (
    *ACTIVATIONS,
    *WRITTEN[:6],
    *("{0}.unsqueeze(0)", "{0}.view(1, -1)", "{0}.view(-1)", "{0}.reshape(-1)", "{0}.view(2, -1)", "{0}.unsqueeze(-1)"),
    *(
        "{0}.contiguous()",
        "{0}.flatten()",
        "{0}.squeeze()",
        "{0} * 2.0",
        "1.0 - {0}",
        "{0} + 1.0",
        "{0} / 4",
        "{0}.to(torch.float32)",
    ),
    *(
        "F.layer_norm({0}, {0}.shape[-1:])",
        "F.rms_norm({0}, {0}.shape[-1:])",
        "F.softmax({0}, -1)",
        "torch.softmax({0}, 0)",
    ),
    *(
        "{0}.mean(-1, keepdim=True)",
        "{0}.mean(0, True)",
        "{0}.mean()",
        "{0}.sum(-1)",
        "{0}.var(-1, unbiased=False, keepdim=True)",
    ),
    *(
        "{0}.mT",
        "{0} ** 2",
        "{0}.pow(2)",
        "F.dropout({0}, 0.0)",
        "F.layer_norm({0}, {0}.shape)",
        "{0}.add_(1.0)",
        "{0}.double()",
    ),
    *("F.dropout({0}, 1.0)", "F.softmax({0}, dim={0}.dim() - 1)", "{0}[..., None]", "{0}[None]"),
)
WITH_OPERANDS = (
    "{0} + {1}",
    "{1} + {0}",
    "{0} * {1}",
    "{0} - {1}",
    "{1} - {0}",
    "torch.add({0}, {1})",
    "{0} / (1 + {1} ** 2)",
    "torch.pow({0}.abs() + 1, {1}.tanh())",
)
GATHERED = (
    *(
        "torch.stack([{0}])",
        "torch.stack([{0}], 0)",
        "torch.stack([{0}], dim=1)",
        "torch.stack([{0}], -1)",
        "torch.cat([{0}])",
    ),
    *("torch.stack([{0}])", "torch.stack([{0}])", "torch.cat([{0}], -1)", "sum([{0}])", "torch.stack(tuple({0}))"),
)


@form(10)
def view(b: Builder) -> None:
    b.emit(b.one_of(*VIEWS).format(b.row()))


@form(2)
def view_as_another(b: Builder) -> None:
    x = b.row()
    y = b.pick(lambda t: t.numel() == b[x].numel() and t.shape != b[x].shape)
    b.emit(f"{x}.{b.one_of('view', 'reshape')}({y}.shape)")


@form(2)
def join(b: Builder) -> None:
    x = b.row()
    b.emit(b.one_of(*JOINS).format(x, like(b, x)))


@form(9)
def loop(b: Builder) -> None:
    """What is done to each piece, stacked again."""
    x = b.row()
    if b[x].dim() == 1 and b.often(0.8):
        x = b.row(2)
    split = b.one_of(*SPLITS[:4], *SPLITS).format(x)
    try:
        pieces = list(eval(split, b.environments[0]))  # noqa: S307
        piece = pieces[0]
    except Exception:  # noqa: BLE001
        raise Skip from None
    if len(pieces) > 8:
        raise Skip
    expression = "p"
    for _ in range(b.chance.randrange(1, 4)):
        if b.often(0.35):
            expression = b.one_of(*WITH_OPERANDS[:4], *WITH_OPERANDS).format(
                expression, _beside(b, x, piece, len(pieces))
            )
        elif b.often(0.15) and piece.dim():
            n = str(piece.shape[-1])
            expression = f"F.linear({expression}, {fresh(b, (n, n), dtype_of(b[x]))}, {fresh(b, (n,), dtype_of(b[x]))})"
        else:
            expression = b.one_of(*ON_PIECES).format(f"({expression})" if expression != "p" else "p")
    each = f"{expression} for i, p in enumerate({split})" if b.often(0.15) else f"{expression} for p in {split}"
    if "for i, p" in each and b.often(0.7):
        each = each.replace(
            expression, b.one_of("{0} * (i + 1)", "{0} if i else F.relu(p) ", "{0} + i").format(expression), 1
        )
    b.emit(b.one_of(*GATHERED).format(each))


def _beside(b: Builder, x: str, piece: torch.Tensor, count: int) -> str:
    """An operand within a loop: one for all pieces, of the piece's shape or broadcast with it, or as many as pieces."""
    kind, dtype = b.chance.random(), dtype_of(b[x])
    if len(b.environments) > 1:
        return broadcast(b, x)
    shape = tuple(map(str, piece.shape))
    if kind < 0.3:
        return fresh(b, shape, dtype)
    if kind < 0.5:
        return fresh(b, shape[-1:], dtype)
    if kind < 0.7:
        return fresh(b, (str(count), *shape), dtype)  # broadcast in each
    if kind < 0.8:
        return fresh(b, (str(piece.shape[0]) if piece.dim() else "2", "1"), dtype)
    if kind < 0.9:
        return b.one_of("2.0", "0.5", "1")
    return operand(b, x)


@form(2)
def zipped_loop(b: Builder) -> None:
    """Each piece with an operand of its own."""
    x = b.row(2)
    y = like(b, x)
    body = b.one_of("F.gelu(p + q)", "p * q", "F.silu(p) * q", "p + q", "F.layer_norm(p + q, p.shape[-1:])", "q.relu()")
    b.emit(f"torch.stack([{body} for p, q in zip({x}.unbind(), {y}.unbind())])")


@form(2)
def split_up(b: Builder) -> None:
    """Two of the pieces have names."""
    x = b.row()
    split = b.one_of(
        "{0}.chunk(2, -1)", "{0}.unbind(0)[:2]", "torch.split({0}, 2, -1)[:2]", "{0}.chunk(2)", "{0}.split(1, 0)[:2]"
    )
    y, z = b.new(), b.new()
    b.statement(f"{y}, {z} = {split.format(x)}", (y, z))
    if b.often(0.6):
        b.emit(
            b.one_of(
                "F.silu({0}) * {1}", "F.gelu({0}) * {1}", "{0} * torch.sigmoid({1})", "torch.cat([-{1}, {0}], -1)"
            ).format(y, z)
        )


LOOKED_UP = (
    *(
        "{0}[torch.arange({1})]",
        "{0}.index_select(0, torch.tensor([0, 0]))",
        "F.embedding(torch.tensor([0, 1, 0]), {0})",
    ),
    *("{0}.gather(0, torch.zeros_like({0}, dtype=torch.int64))", "torch.take_along_dim({0}, {0}.argsort(-1), -1)"),
    *("{0}[{0}[..., 0] > 0].sum(0)", "{0}.roll(1, -1)", "{0}.flip(0)", "{0}.repeat(2, *[1] * ({0}.dim() - 1))"),
    *("{0}.repeat_interleave(2, 0)", "F.pad({0}, (1, 0))", "{0}.tril()", "{0}.triu()"),
)


@form(2)
def looked_up(b: Builder) -> None:
    x = b.row()
    n = b.size(x, 0)
    b.emit(b.one_of(*LOOKED_UP).format(x, n))
