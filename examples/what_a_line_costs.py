"""Prints what lines of a transformer must move through memory, forward and backward, and what they save."""

import torch

import onepass

LINES = (
    "bias | gelu_tanh",
    "layer_norm(1e-5) | scale | bias | relu",
    "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | causal | softmax | dropout(0.1)",
)


def main() -> None:
    """A table: bytes forward and backward, and the bytes held between them."""
    shape, dtype = (8192, 4096), torch.bfloat16
    tensor = shape[0] * shape[1] * dtype.itemsize
    print(f"x: {shape}, {dtype}, {tensor / 2**20:.0f} MiB; in units of x:")
    for text in LINES:
        line = onepass.Line(text)
        cost = line.cost(shape, dtype)
        units = [f"{bytes / tensor:.2f}" for bytes in (cost.forward.bytes, cost.backward.bytes, cost.saved_bytes)]
        print(f"  forward {units[0]}, backward {units[1]}, saved {units[2]}: {text}")


if __name__ == "__main__":
    main()
