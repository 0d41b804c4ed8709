// Softmax statistics of a row in backward of attention, and the scores' gradients from them.
#pragma once

#include "onepass/kernel/attention/arguments.h"
#include "onepass/kernel/common/cursor.cuda.h"

ONEPASS_BEGIN

// From the saved shift and inverse sum: probabilities are exp(x - shift) · inverse; the inverse is 0 where all is
// masked.
ONEPASS_FUNCTION softmax_statistics statistics_of(word::row_numbers<float> saved, float delta) {
  const exponent e = exponent_of(saved.first);
  return {e.factor, e.offset + log2_number(saved.second), delta};
}

// Loads them in one access.
ONEPASS_FUNCTION softmax_statistics load_statistics(const softmax_statistics* at) {
  const float4 all = *reinterpret_cast<const float4*>(at);
  return {all.x, all.y, all.z};
}

// Recomputes a vector of probabilities P and computes dS: replaces scores by their gradients, and dP by P.
template <class Behind, class L, class Cursor>
ONEPASS_FUNCTION void softmax_backward(L& scores, L& gradients, const softmax_statistics& row, Cursor& at) {
  const L probabilities = exp2_of(Behind::pre::recompute(scores, at), exponent{row.factor, row.offset});
  const L before = Behind::post::backward(probabilities, gradients, at);
  const L of_scores =
      word::softmax::backward(probabilities, before, word::row_numbers<float>{}, {row.delta, 0.0f}, 0.0f);
  scores = Behind::pre::backward(scores, of_scores, at);
  gradients = Behind::post::recompute(probabilities, at);
}

ONEPASS_END
