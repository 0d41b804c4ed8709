"""The whole table compiles without a GPU: each line for a chip, dtype and kind of row, every sixteenth for the same (of
rows in parts, whose kernels are many, every other one of these)."""

import itertools

import pytest
import torch

import onepass
from onepass import _native

COLUMNS = {
    "sm_80": 1000,  # no multiple of 16 bytes
    "sm_90a": 4096,  # rows held in registers
    "sm_100a": 256,  # several rows a block
    "sm_120": 1 << 20,  # rows in parts
}
KINDS = list(itertools.product(COLUMNS, (torch.float16, torch.bfloat16, torch.float32, torch.float64)))


@pytest.mark.parametrize(("arch", "dtype"), KINDS)
def test_the_table_compiles(arch, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    step = len(KINDS) * (2 if COLUMNS[arch] >= 1 << 20 else 1)
    lines = _native.common_lines()[KINDS.index((arch, dtype)) :: step]
    labels = list(onepass.cache.build([arch], lines, [dtype], [COLUMNS[arch]]))
    assert len(labels) > 2 * len(lines)
    assert {label.split()[0] for label in labels} == {arch}
    assert {entry.label for entry in onepass.cache.list()} == set(labels)
