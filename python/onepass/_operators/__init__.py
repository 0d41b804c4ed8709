"""A line's operators, as PyTorch has them: fakes, derivatives, vmap, flops, decompositions."""
