"""Lines with `linear` in one kernel whose warps multiply: of few rows (small_m) and of short ones (small_k)."""

import pytest
import torch

import onepass
from helpers import HALF_TYPES, LINEAR_LINES, assert_equal, check_line, make_inputs, with_strategy
from onepass import functional as F

BY_WARPS = ("small_m", "small_k")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestByWarps:
    """Few rows, which stay in shared memory, or short ones, which stay in registers."""

    @pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
    @pytest.mark.parametrize("line", (*LINEAR_LINES, "causal | softmax | linear | bias | keep | gelu"))
    @pytest.mark.parametrize(
        "how, shape, out_features", [("small_m", (3, 4, 264), 392), ("small_k", (5, 50, 200), 328)], ids=str
    )
    def test_is_as_accurate_as_pytorchs_chain(self, line, dtype, how, shape, out_features):
        inputs = make_inputs(line, shape, dtype, "cuda", out_features=out_features)
        check_line(with_strategy(line, how), inputs, slack=2.0)

    @pytest.mark.parametrize(
        "how, rows, columns, out_features",
        [
            ("small_m", 1, 8, 8),
            ("small_m", 1, 14336, 72),
            ("small_m", 2, 72, 4096),
            ("small_m", 7, 4096, 136),
            ("small_m", 8, 520, 16),
            ("small_m", 9, 2048, 2120),
            ("small_m", 16, 1024, 40),
            ("small_k", 1, 8, 8),
            ("small_k", 50000, 8, 8),
            ("small_k", 65, 256, 64),
            ("small_k", 30000, 256, 64),
            ("small_k", 60001, 128, 40),
            ("small_k", 60001, 104, 96),
            ("small_k", 60001, 40, 512),
            ("small_k", 30000, 232, 352),
        ],
    )
    def test_shapes(self, how, rows, columns, out_features):
        line = f"layer_norm(1e-5) | scale | bias | linear({how}) | bias | gelu_tanh"
        check_line(
            line, make_inputs(line, (rows, columns), torch.bfloat16, "cuda", out_features=out_features), slack=2.0
        )

    @pytest.mark.parametrize(
        "how, columns, counts", [("small_m", 4096, (16, 1, 5, 8)), ("small_k", 128, (60000, 1, 20, 9000))]
    )
    def test_a_rows_result_does_not_depend_on_the_others(self, how, columns, counts):
        x, w = (torch.randn(s, columns, device="cuda", dtype=torch.bfloat16) for s in (counts[0], 264))
        line = f"rms_norm | scale | linear({how}) | silu"
        together = onepass.fused(line, x, w[0], w)
        for rows in counts[1:]:
            assert_equal(onepass.fused(line, x[:rows], w[0], w), together[:rows])

    @pytest.mark.parametrize("how", BY_WARPS)
    def test_a_kept_value_is_written_once(self, how):
        x, r, w = (torch.randn(s, 256, device="cuda", dtype=torch.bfloat16) for s in (5, 5, 64))
        y, kept = onepass.fused(f"add | keep | rms_norm | linear({how})", x, r, w)
        expected, sums = onepass.fused("add | keep | rms_norm | linear(unfused)", x, r, w)
        assert_equal(kept, sums)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())

    @pytest.mark.parametrize("how", BY_WARPS)
    @pytest.mark.parametrize("layout", ["rows", "columns"])
    def test_rows_that_lie_apart(self, layout, how):
        x, w = (torch.randn(s, 272, device="cuda", dtype=torch.bfloat16)[:, :256] for s in (6, 256))
        if layout == "columns":
            x = torch.randn(256, 6, device="cuda", dtype=torch.bfloat16).t()
        line = f"rms_norm | linear({how})"
        assert_equal(onepass.fused(line, x, w), onepass.fused(line, x.contiguous(), w.contiguous()))

    @pytest.mark.parametrize("how, rows, columns", [("small_m", 8, 1024), ("small_k", 20000, 256)])
    def test_behind_other_kernels_and_in_a_cuda_graph(self, how, rows, columns):
        """It begins before the kernel that writes x, or the matrix, has ended."""
        x, w = (torch.randn(s, columns, device="cuda", dtype=torch.bfloat16) for s in (rows, columns))
        line = f"rms_norm | linear({how})"
        expected = x
        for _ in range(4):
            expected = onepass.fused(line, expected, w)
            torch.cuda.synchronize()
        for _ in range(20):
            larger = torch.cat([w] * 16)
            w.zero_(), torch.mul(larger[:columns], 1, out=w)
            got = onepass.fused(line, x, w)
        assert_equal(got, onepass.fused(line, x, w))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(4):
                y = onepass.fused(line, y, w)
        for _ in range(3):
            graph.replay()
            assert_equal(y, expected)

    def test_refuses_what_it_cannot_take(self):
        x, w = (torch.randn(s, 64, device="cuda").half() for s in (17, 64))
        with pytest.raises(RuntimeError, match=r"linear\(small_m\).*at most 16 rows"):
            F.linear(x, w, strategy="small_m")
        with pytest.raises(RuntimeError, match="bfloat16 and float16"):
            F.linear(x[:4].float(), w.float(), strategy="small_m")
        with pytest.raises(RuntimeError, match="16 bytes"):
            F.linear(x[:4, 1:57], w[:, :56], strategy="small_m")
        long, large = (torch.randn(s, device="cuda").half() for s in ((304, 264), (1024, 256)))
        with pytest.raises(RuntimeError, match=r"linear\(small_k\).*at most 256 elements"):
            F.linear(long, long, strategy="small_k")
        with pytest.raises(RuntimeError, match=r"linear\(small_k\).*matrix does not fit"):
            F.linear(large, large, strategy="small_k")
