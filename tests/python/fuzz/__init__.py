"""A differential fuzzer of `onepass.fuse`: random programs, run by eager PyTorch and fused, must not be told apart.

`programs` are data and the Python source that they render to, `builder` and `forms` draw them, `execution` runs one and
observes all that a caller can see, `comparison` tells two observations apart, `minimise` makes a failing program small.
`python -m fuzz --help` (with PYTHONPATH=tests/python) hunts; rewrite/test_fuse_fuzz.py draws with hypothesis.
"""
