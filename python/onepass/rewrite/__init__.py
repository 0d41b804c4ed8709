"""Lines in graphs that torch.compile captures: what could be fused in a model, and the model with it fused."""
