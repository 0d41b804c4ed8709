// What backward of attention knows of a row of scores, and how scores become gradients with it.
#pragma once

#include "onepass/kernel/common/cursor.cuda.h"

ONEPASS_BEGIN

// What backward knows of a row of scores x: its weights are exp2(x · factor + offset); Σ result · its gradient. Of one
// that does not exist, nothing has weight.
struct alignas(16) row_facts {
  exponent weight{1.0f, static_cast<float>(-kInfinity)};
  float product = 0.0f;
};

// exp(x - shift) · inverse, as softmax saved them; the inverse is 0 where all is masked.
ONEPASS_FUNCTION exponent weight_of(word::row_numbers<float> saved) {
  const exponent e = exponent_of(saved.first);
  return {e.factor, e.offset + log2_number(saved.second)};
}

// In one access.
ONEPASS_FUNCTION row_facts load_facts(const row_facts* at) {
  const float4 all = *reinterpret_cast<const float4*>(at);
  return {{all.x, all.y}, all.z};
}

// A lane's scores become their gradients, and those of weights the weights.
template <class Behind, class L, class Place>
ONEPASS_FUNCTION void finish_gradients(L& scores, L& gradients, const row_facts& row, Place& at) {
  const L weights = exp2_of(Behind::pre::recompute(scores, at), row.weight);
  const L before = Behind::post::backward(weights, gradients, at);
  const L of_scores = word::softmax::backward(weights, before, word::row_numbers<float>{}, {row.product, 0.0f}, 0.0f);
  scores = Behind::pre::backward(scores, of_scores, at);
  gradients = Behind::post::recompute(weights, at);
}

ONEPASS_END
