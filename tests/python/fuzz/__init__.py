"""A differential fuzzer of `onepass.fuse`: random programs, run by eager PyTorch and fused, must not be told apart.

`program` draws programs, `run` runs them, compares what a caller can see, and makes those that fail small.
`python -m fuzz --help` (with PYTHONPATH=tests/python) hunts; rewrite/test_fuse_fuzz.py draws with hypothesis.
"""
