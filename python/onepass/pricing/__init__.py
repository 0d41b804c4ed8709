"""Seconds and bytes: what a device can do, what PyTorch's operators take on it, and what lines take."""
