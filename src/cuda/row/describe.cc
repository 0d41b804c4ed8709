// What a request, its tensors, dtypes and alignment say, before anything is chosen.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "src/cuda/row/tensors.h"
#include "src/cuda/row/tuned.h"

namespace onepass::cuda {
namespace {

// Calls body(view) for every tensor that the kernel touches by column.
template <class Body>
void each_view(const arguments& a, const Body& body) {
  if (a.x.data) body(a.x);
  body(a.y);
  if (a.dx.data) body(a.dx);
  if (a.recomputed.data) body(a.recomputed);
  for (int i = 0; i < kMaxOperands; ++i) {
    if (a.operand[i].data) body(a.operand[i]);
    if (a.operand_gradient[i].data) body(a.operand_gradient[i]);
  }
  for (int k = 0; k < kMaxKeeps; ++k) {
    if (a.kept[k].data) body(a.kept[k]);
    if (a.kept_gradient[k].data) body(a.kept_gradient[k]);
  }
}

// The most elements, `most` or fewer, that one access may move where rows begin: a divisor of every tensor's alignment.
// Where a line has no row word, behind a single row nothing begins; one that has does not depend on how many rows there
// are.
int access_for(const request& r, const arguments& a, int most) {
  int access = most;
  each_view(a, [&](const view& v) {
    if (v.column_stride == 0 || v.column_stride > kOneForTwo) return;  // numbers are moved one by one
    const int size = size_of(v.type);
    auto fits = [&](int numbers) {
      const auto bytes = static_cast<std::uintptr_t>(std::min(numbers * size, 16));
      if (reinterpret_cast<std::uintptr_t>(v.data) % bytes != 0) return false;
      for (int d = 0; d < kMaxDims; ++d)
        if ((r.rowwise || a.size[d] > 1) && static_cast<std::uintptr_t>(v.stride[d] * size) % bytes != 0) return false;
      return true;
    };
    while (access > 1 && !fits(access)) access /= 2;
  });
  return access;
}

bool is_one_number(const view& v) {
  return v.data && v.column_stride == 0 && std::all_of(v.stride, v.stride + kMaxDims, [](int64 s) { return s == 0; });
}

// Rows, even a single one, lie behind each other: one for all is not dense, however many those are.
bool is_dense(const view& v, const arguments& a) {
  constexpr int kRow = kMaxDims - 1;
  bool dense = v.column_stride == 1 && v.stride[kRow] == a.columns;
  int64 run = a.columns * a.size[kRow];
  for (int d = kRow - 1; d >= 0; run *= a.size[d--]) dense &= a.size[d] == 1 || v.stride[d] == run;
  return dense;
}

// Results that leave through shared memory: those as wide as x, where accesses are smaller than lanes.
uint64 staged_results(const request& r, const arguments& a, const configuration& c) {
  const int size = size_of(r.x);
  if (c.access == c.vector_size || r.rope >= 0 || has_long_lanes(r, c)) return 0;
  const bool gives = r.backward ? r.wants_dx : a.y.data != nullptr && !r.gives_number && size_of(a.y.type) == size;
  uint64 results = gives ? bit_of(stream::y) : 0;
  for (int i = 0; i < kMaxOperands; ++i)
    if (a.operand_gradient[i].data && (r.wants_tensor >> i & 1) != 0 && size_of(r.operand[i]) == size)
      results |= bit_of(stream::operand + i);
  for (int k = 0; k < kMaxKeeps; ++k)
    if (!r.backward && a.kept[k].data && a.kept[k].column_stride == 1 && size_of(a.kept[k].type) == size)
      results |= bit_of(stream::kept + k);
  if (r.wants_recompute) results |= bit_of(stream::recomputed);
  return results;
}

// Of the operands of words by channels, all.
channel_columns columns_of_channels(const request& r, const arguments& a, int vector_size) {
  channel_columns columns = of_power_of_two;
  for (int i = 0; i < kMaxOperands; ++i) {
    if ((r.channels >> i & 1) == 0 || !a.operand[i].data || a.operand[i].column_stride == 0) continue;
    const int own = a.operand[i].column_stride;
    columns = own % vector_size != 0                            ? of_any
              : std::has_single_bit(static_cast<unsigned>(own)) ? columns
                                                                : std::min(columns, of_whole_lanes);
    if (columns == of_any) break;
  }
  return r.channels == 0 ? of_any : columns;
}

}  // namespace

request::request(const spec::line& line, bool is_backward)
    : rowwise(line.by_rows()),
      backward(is_backward),
      operands(line.operands),
      keeps(line.keeps),
      parameters(static_cast<int>(line.parameters.size())),
      features(line.features),
      row_words(static_cast<int>(line.row_words.size())),
      draws(line.dropouts > 0),
      begins_with_row(!line.words.empty() && line.words.front().about->kind == word_kind::row) {
  gives_number = only_endings = line.result(0).is_number();
  if (!backward) result = line.result(0).own, group = line.group();
  for (int k = 0; k < keeps; ++k) kept[k] = line.result(1 + k).own;
  if (const spec::word* const w = line.rotary()) rope = w->operand, turned = line.turned(0);
  for (int i = 0; i < row_words; ++i) {
    const descriptor& about = *line.words[static_cast<std::size_t>(line.row_words[static_cast<std::size_t>(i)])].about;
    summed |= static_cast<uint64>(about.sums > 0) << i;
    paired = paired || is_paired(about);
    only_endings = only_endings && about.gives_number;
    has_target = has_target || about.operand == operand_kind::target;
  }
  const descriptor* const first = line.words.empty() ? nullptr : line.words.front().about;
  scales_alone = line.words.size() == 1 && first->scales && first->operand == operand_kind::tensor;
  bool is_behind = false;
  for (const spec::word& w : line.words) {
    const bool has_columns = w.about->operand == operand_kind::column || w.about->operand == operand_kind::tensor;
    if (is_behind && has_columns && !w.about->by_channels && &w != line.rotary()) behind |= uint64{1} << w.operand;
    is_behind = is_behind || w.about->kind == word_kind::row;
    channels |= w.about->by_channels ? uint64{1} << w.operand : 0;
    tensors |= w.about->operand == operand_kind::tensor ? uint64{1} << w.operand : 0;
    if (w.about->kind != word_kind::row) flops += backward ? w.about->flops_backward : w.about->flops_forward;
  }
}

int result_bits(const request& r) {
  const auto bits_of = [](dtype type) { return type == dtype::bf16 ? 8 : type == dtype::f16 ? 11 : 53; };
  if ((r.gives_number || is_code(r.result)) && !r.backward) return bits_of(dtype::none);  // scales are numbers
  int bits = bits_of(r.x);
  for (int i = 0; i < kMaxOperands; ++i) {
    if (((r.wants_tensor | r.wants_column) >> i & 1) != 0) bits = std::max(bits, bits_of(r.operand[i]));
  }
  for (const dtype own : r.kept)
    if (own != dtype::none && !r.backward) bits = std::max(bits, bits_of(result_dtype(r.x, own)));
  return bits;
}

request request_of(const spec::frame& f, bool backward, std::string line) {
  request r(f.of, backward);
  r.line = std::move(line);
  if (is_listening() && f.of.features == 0) r.words = f.of.text;
  r.x = f.type;
  r.of_batches = f.columns_of_batches();
  std::copy(f.operand_types, f.operand_types + kMaxOperands, r.operand);
  return r;
}

request request_of(const spec::frame& f, const spec::gradients& plan, std::string line) {
  request r = request_of(f, true, std::move(line));
  r.wants_column = plan.wants_column, r.wants_tensor = plan.wants_tensor, r.has_groups = plan.grouped != 0;
  r.unit = plan.unit;
  r.wants_dx = f.a.dx.data != nullptr, r.wants_recompute = f.a.recomputed.data != nullptr;
  return r;
}

configuration describe(const request& r, const arguments& a, bool may_be_ragged) {
  configuration c{};
  c.vector_size = std::max(16 / size_of(r.x), r.group / kWarp);  // no more than a warp shares a group of columns
  c.access = access_for(r, a, c.vector_size);
  c.ragged = may_be_ragged && c.access == c.vector_size && a.columns % c.access != 0 && r.rope < 0 && together(r) <= 1;
  while (!c.ragged && a.columns % c.access != 0) c.access /= 2;
  // A lane of one small access needs no shifts; but dropout draws for eight elements at once.
  c.unit = static_cast<uint64>(r.unit > 1 ? r.unit : 0);
  if (together(r) <= 1 && c.access * size_of(r.x) >= (r.draws ? 8 : 4)) c.vector_size = c.access;
  if (r.rope >= 0) {  // a lane is two accesses, and all of it is turned or nothing
    const int64 turned = r.turned > 0 ? r.turned : a.columns;
    while (turned / 2 % c.access != 0 || a.columns / 2 % c.access != 0) c.access /= 2;
    c.vector_size = 2 * c.access;
  }
  c.channels = columns_of_channels(r, a, c.vector_size);
  c.dims = kMaxDims;
  while (c.dims > 1 && a.size[kMaxDims - c.dims] == 1) --c.dims;
  c.grouped_operand = r.backward ? a.groups.operands : 0;
  c.apart = c.grouped_operand != 0 && !a.groups.together();
  c.single_x = a.x.data && a.x.column_stride == 0;
  c.single_y = a.y.column_stride == 0;
  c.saves_statistics = !r.backward && a.statistics != nullptr;
  c.only_statistics = r.only_statistics;
  c.in_place = r.in_place, c.strided_dx = a.dx.data && !is_dense(a.dx, a);
  const bool writes_dx_alone = (r.wants_tensor | r.wants_column) == 0 && !r.wants_recompute;
  c.one_factor = static_cast<uint64>(r.in_place && r.scales_alone && writes_dx_alone && is_one_number(a.operand[0]));
  c.cluster = 1;
  c.spare_vectors = c.access < c.vector_size && r.rope < 0 ? 8 : 0;
  c.staged = staged_results(r, a, c);
  c.dense = tensors_of(a, [&](const view& v) { return is_dense(v, a); });
  c.small = a.rows * a.columns <= int64{1} << 30;
  for (int i = 0; i < kMaxOperands; ++i) {
    const view& v = a.operand[i];
    const bool repeated = is_repeated(v), aligned = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
    c.one_for_two |= static_cast<uint64>(v.data && v.column_stride == kOneForTwo) << i;
    c.single_operand |= static_cast<uint64>(v.data && v.column_stride == 0) << i;
    c.repeated_operand |= static_cast<uint64>(repeated) << i;
    c.aligned_operand |= static_cast<uint64>(repeated && aligned && c.access < c.vector_size && r.rope < 0) << i;
  }
  for (int k = 0; k < kMaxKeeps; ++k)
    c.single_kept_gradient |= static_cast<uint64>(a.kept_gradient[k].data && a.kept_gradient[k].column_stride == 0)
                              << k;
  return c;
}

}  // namespace onepass::cuda
