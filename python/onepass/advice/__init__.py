"""Should this be fused: what a model's operators cost on a device, what lines would save, and what won't help."""
