"""The whole table compiles for every chip, without one: each chip with a dtype and a row length of its own."""

import pytest
import torch

import onepass
from onepass import _native


@pytest.mark.parametrize(
    ("arch", "dtype", "columns"),
    [
        ("sm_80", torch.float16, 1000),  # no multiple of 16 bytes
        ("sm_90a", torch.bfloat16, 4096),  # rows held in registers
        ("sm_100a", torch.float32, 256),  # several rows a block
        ("sm_120", torch.float64, 1 << 20),  # rows in parts
    ],
)
def test_the_whole_table_compiles(arch, dtype, columns, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    labels = list(onepass.cache.build([arch], dtypes=[dtype], columns=[columns]))
    assert len(labels) > 2 * len(_native.common_lines())
    assert {label.split()[0] for label in labels} == {arch}
    assert {entry.label for entry in onepass.cache.list()} == set(labels)
