"""Programs by hand: what the fuzzer found once, and what somebody thought of that might be told apart."""

from __future__ import annotations

import re

from fuzz.program.programs import Input, Program, Statement

__all__ = ["CORPUS"]


def written(inputs: str, body: str, returns: str, state: str = "", modes: tuple[str, ...] = ("training",)) -> Program:
    """Of arguments ("x1 = R(2, 3)!; ...", with ! where they get a gradient), statements, results and state."""
    arguments = []
    for part in inputs.split("; "):
        name, source = part.split(" = ", 1)
        arguments.append(Input(name, source.rstrip("!"), source.endswith("!")))
    kept = tuple(Input(part.split(" = ")[0], part) for part in filter(None, state.split("; ")))
    blocks = re.split(r"\n(?=\S)", body.strip("\n"))
    bound = [re.match(r"(t\d+) = ", block) for block in blocks]
    statements = tuple(Statement(block, (m.group(1),) if m else ()) for block, m in zip(blocks, bound))
    return Program(tuple(arguments), kept, statements, tuple(returns.split(", ")), (4,), modes)


CORPUS = {
    "a chain that is viewed and turned": written(
        "x1 = R(3, 2, 6)!; x2 = R(6, 1, 1, 6).movedim(0, -1)!",
        "t1 = ((x1 * 2.0).reshape(1, 1, 6, -1) + x2).reshape(x1.shape)",
        "t1",
    ),
    "heads that are normalised, transposed and turned": written(
        "x1 = R(2, T, 24)!; x2 = R(8)!; x3 = R(1, T, 8); x4 = R(1, T, 8)",
        """
t1 = F.rms_norm(x1.view(2, -1, 3, 8), (8,), x2, 1e-6)
t2 = t1.transpose(1, 2)
t3 = rotated(t2, x3.unsqueeze(1), x4.unsqueeze(1))
t4 = F.scaled_dot_product_attention(t3, t3, t3)""",
        "t4",
    ),
    "a value before a permutation that is overwritten behind it": written(
        "x1 = R(3, 4, 8)!; x2 = R(3, 4, 8)!; x3 = R(4, 3, 8)",
        """
t1 = x1 + x2
t2 = F.relu(t1.transpose(0, 1)) * x3
t1.mul_(2.0)
t3 = F.gelu(t1.permute(1, 0, 2) - x3)""",
        "t2, t3, t1",
    ),
    "arguments that share memory from the second call on": written(
        "x1 = R(3, 8); x2 = x1.detach().view(-1) if C % 2 else R(24); x3 = R(8)!",
        """
t1 = x1 + x3
x2.add_(1.0)
t2 = F.gelu(t1 * 2.0 + x1)
t3 = F.layer_norm(x1 + t2, (8,))
x2.mul_(2.0)
t4 = F.gelu(x1 + t3)""",
        "t2, t3, t4",
    ),
    "an operand that is late, and memory that is shared later": written(
        "x1 = R(3, 4); x2 = x1.detach() if C % 2 else R(3, 4); x3 = R(3, 4)!",
        """
t1 = x1 * 2.0
x2.add_(1.0)
t2 = torch.sin(x2)
t3 = F.gelu(t1 + t2)""",
        "t3",
    ),
    "calls by keywords": written(
        "x1 = R(2, 3, 8)!; x2 = R(3, 8); x3 = R(3, 8)",
        "t1 = x1 * x2 + torch.cat(tensors=(-x1[..., 4:], x1[..., :4]), dim=-1) * x3\nt2 = F.relu(input=t1)",
        "t2",
    ),
    "two softmaxes of one product": written(
        "x1 = R(2, 3, 4, 8)!; x2 = R(2, 3, 4, 8)!; x3 = R(4, 4)!",
        """
t1 = x1 @ x2.mT
t2 = F.softmax(t1 * 0.5 + x3, -1)
t3 = F.softmax(t1 * 0.25 + x3, -1)
t4 = t2 @ x1 + t3 @ x2""",
        "t4",
    ),
    "weights with dropout that is off": written(
        "x1 = R(2, 3, 4, 8)!; x2 = R(2, 3, 4, 8)!; x3 = R(4, 4)!",
        """
t1 = F.softmax((x1 @ x2.mT) * 0.5 + x3, -1)
t2 = F.dropout(t1, 0.0)
t3 = t2 @ x1
t4 = t1 @ x2""",
        "t3, t4, t2, t1",
    ),
    "a view of a kept value": written(
        "x1 = R(3, 8)!; x2 = R(8)!",
        """
t1 = x1 + x2
t2 = F.layer_norm(t1, (8,)) + t1
t3 = t1.view(-1)
t4 = t1.detach()
t4.add_(1.0)""",
        "t2, t3, t4",
    ),
    "checkpoints within checkpoints": written(
        "x1 = R(8, 16)!; x2 = R(16)!",
        """
def f1(p1):
    def f2(p2):
        return F.dropout(F.gelu(p2 + x2), 0.25)
    t2 = checkpoint(f2, p1, use_reentrant=False)
    t3 = F.layer_norm(t2 + p1, (16,), x2)
    return F.dropout(t3, 0.5)
t4 = checkpoint(f1, x1 * 2.0, use_reentrant=False)
t5 = F.gelu(t4 + x1)""",
        "t5, t4",
    ),
    "a block that overwrites what it made": written(
        "x1 = R(8, 16)!; x2 = R(16)!",
        """
def f1(p1):
    t1 = p1 + x2
    F.leaky_relu(t1, 0.2, True)
    return F.layer_norm(t1 + p1, (16,)) * t1
t4 = checkpoint(f1, x1 * 1.5, use_reentrant=False)""",
        "t4",
    ),
    "modes in turn": written(
        "x1 = R(3, 8)!; x2 = R(8)!",
        """
t1 = x1 + x2
with torch.no_grad():
    t2 = F.gelu(t1 * 2.0)
    t3 = F.layer_norm(t2 + x1, (8,))
t4 = F.gelu(t1 + t3) * t2""",
        "t4, t2, t3",
        modes=("training", "no_grad"),
    ),
    "rows of a product that is viewed": written(
        "x1 = R(2, 3, 8)!; x2 = R(8, 8)!; x3 = R(8)!",
        """
t1 = torch.addmm(x3, x1.view(-1, 8), x2)
t2 = t1.view(2, 3, 8)
t2.add_(1.0)
t3 = F.gelu(t1.view(2, 3, 8)) * t2""",
        "t3, t2",
        modes=("training", "no_grad"),
    ),
    "a gradient within": written(
        "x1 = R(3, 8)!; x2 = R(8)!",
        """
t1 = F.gelu(x1 + x2)
t2 = torch.func.grad(lambda r: F.layer_norm(r + x2, (8,)).pow(2).sum())(x1)
t3 = F.layer_norm(t1 + t2, (8,))""",
        "t3",
    ),
    "narrow types": written(
        "x1 = R(4, 8, dtype=torch.bfloat16)!; x2 = R(8, dtype=torch.float32)!; x3 = R(8, dtype=torch.bfloat16)!",
        """
t1 = x1 + x2
t2 = F.layer_norm(x1.float(), (8,), x2, x2).to(x1.dtype) * x3
t3 = (x1.float() * torch.rsqrt(x1.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16) * x3
t4 = F.softmax(x1 * 0.5, -1, dtype=torch.float32).to(x1.dtype)""",
        "t1, t2, t3, t4",
    ),
    "channels last": written(
        "x1 = R(2, 4, 3, 8).contiguous(memory_format=torch.channels_last)!; x2 = R(2, 4, 3, 8)!",
        """
t1 = F.gelu(x1 * 2.0 + x2)
t2 = F.gelu(x2 + x1)
t3 = F.softmax(t1, -1)
t4 = torch.cat([t1, t2], 1)""",
        "t1, t2, t3, t4",
    ),
    "a mask that is constant beside a counter": written(
        "x1 = R(2, 2, 8, 4)!; x2 = torch.zeros(1)",
        """
x2.add_(1.0)
t1 = F.scaled_dot_product_attention(x1, x1, x1, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril())""",
        "t1",
        modes=("training", "no_grad"),
    ),
    "pieces with an operand of more dimensions": written(
        "x1 = R(4, 8)!; x2 = R(4, 8)!",
        "t1 = torch.stack([p + x2 for p in x1.unbind()])\nt2 = torch.stack([p.unsqueeze(0) for p in x1.unbind()])",
        "t1, t2",
    ),
    "numbers drawn before a line's": written(
        "x1 = R(4, 8)!; x2 = R(8)!",
        """
t1 = torch.rand_like(x1)
t2 = F.gelu(x1 + t1)
t3 = torch.rand(4, 8) + t2
t4 = torch.rand(4, 8) * F.layer_norm(t3, (8,))""",
        "t4",
    ),
    "a block of a subclass whose backward Dynamo alone refuses": written(
        "x1 = R(4, 8).as_subclass(Tagged); x2 = R(4, 8)!",
        """
t1 = x1 * torch.sigmoid(x1)
def f1(p1):
    return self.b1(t1.contiguous())
t2 = checkpoint(f1, x2, use_reentrant=False)
t3 = t2.transpose(0, 1)
t4 = t3.sum()""",
        "t3, t4",
        state="self.b1 = nn.BatchNorm1d(8)",
    ),
}
