// The kernel of tiles for lines that begin with `scores`, of a call's tensors.
#include "src/torch/attention_kernel.h"

#include "src/torch/batches.h"
#include "src/torch/run.h"

namespace onepass::binding {
namespace {

void describe_words(const spec::line& line, bool with_values, cuda::attention_call& call) {
  call.causal = spec::is_triangular(line) && (!with_values || spec::leaves_zeros(line));
  for (int i = 0; i < line.row; ++i) {
    const spec::word& w = line.words[static_cast<std::size_t>(i)];
    if (w.about->operand == operand_kind::tensor) call.brought.push_back(w.operand);
  }
}

// In memory as the kernel takes it, if need be a copy, which `held` keeps.
cuda::batched_rows rows_of(const Tensor& t, int own, Tensor& held) {
  held = t;
  if (const auto rows = batched_rows(t, own)) return *rows;
  held = torch::stable::contiguous(t);
  return *batched_rows(held, own);
}

}  // namespace

bool launch_attention(const spec::contraction& of, cuda::attention_call call, const Tensor& queries, const Tensor& keys,
                      const Tensor* values) {
  const device on = device_of(keys);
  const std::int64_t value_depth = values ? values->size(values->dim() - 1) : 0;
  if (!cuda::why_not_attention(of.behind, keys.size(keys.dim() - 1), value_depth, keys.size(keys.dim() - 2),
                               dtype_of(keys), cuda::facts(on.index))
           .empty())
    return false;
  const int own = own_batch_sizes(keys);
  Tensor held[3];
  describe_words(of.behind, values != nullptr, call);
  call.queries = rows_of(queries, own, held[0]), call.keys = rows_of(keys, own, held[1]);
  if (values) call.values = rows_of(*values, own, held[2]);
  if (!cuda::fits(call)) return false;
  cuda::launch_attention(call, on.index, current_stream(on.index));
  return true;
}

}  // namespace onepass::binding
