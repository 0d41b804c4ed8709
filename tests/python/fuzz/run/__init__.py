"""Trials: `execution` observes a call, `comparison` compares two observations, `trial` judges eager against fused.

`hunt` tries many programs in processes, `minimise` makes a failing one small, `reproduction` writes it as a script.
"""
