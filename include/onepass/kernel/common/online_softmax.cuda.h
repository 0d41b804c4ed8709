// Online softmax: the largest element of a row and Σ exp(x - largest), of parts of the row that are merged or follow
// each other (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018).
//
// Rows that are whole in registers have their largest element first, and need no rescaling:
// thread_row::exponentials (kernel/row/statistics.cuda.h), register_resident_softmax::take_exponentials.
#pragma once

#include "onepass/kernel/common/reduce.cuda.h"
#include "onepass/word/row.h"

ONEPASS_BEGIN

// A row that is empty or all masked has -infinity as its largest element, and is not shifted.
template <class T>
ONEPASS_FUNCTION T shift_of(T largest) {
  return largest == static_cast<T>(-kInfinity) ? T(0) : largest;
}

// softmax's statistics: exp(x - shift) · inverse are the probabilities, 0 where all is masked.
ONEPASS_FUNCTION word::row_numbers<float> statistics_of(float largest, float sum) {
  return {shift_of(largest), sum == 0.0f ? 0.0f : reciprocal_number(sum)};
}

// Merges {largest, sum} of two parts (see reduce.cuda.h), and numbers behind them: with kProducts the sum of each
// exponential times its exponent, and numbers that are added up.
template <bool kProducts>
struct merge_exponentials_and {
  // Of `width` threads of a warp at once: each scales its sums once.
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> in_warp(numbers<T, N> own, int width) {
    numbers<T, N> all = own;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < width) all.v[0] = max_number(all.v[0], __shfl_xor_sync(0xffffffffu, all.v[0], distance));
    }
    const T shift = shift_of(all.v[0]), factor = exp_minus_number(own.v[0], shift);
    all.v[1] = own.v[1] * factor;
    if constexpr (kProducts) all.v[2] = shifted(own, shift, factor);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 1; i < N; ++i) {
        if (distance < width) all.v[i] += __shfl_xor_sync(0xffffffffu, all.v[i], distance);
      }
    }
    return all;
  }
  // What came before, and what follows, whose shift is the largest of both.
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> onto(numbers<T, N> own, numbers<T, N> before) {
    const T shift = shift_of(own.v[0]), factor = exp_minus_number(before.v[0], shift);
    own.v[1] = fma_number(before.v[1], factor, own.v[1]);
    if constexpr (kProducts) own.v[2] += shifted(before, shift, factor);
#pragma unroll
    for (int i = kProducts ? 3 : 2; i < N; ++i) own.v[i] += before.v[i];
    return own;
  }
  ONEPASS_FUNCTION void next_level() {}
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> none() {
    numbers<T, N> all{};
    all.v[0] = static_cast<T>(-kInfinity);
    return all;
  }
  template <class T, int N>
  ONEPASS_FUNCTION numbers<T, N> operator()(numbers<T, N> a, numbers<T, N> b) const {
    numbers<T, N> all;
    all.v[0] = max_number(a.v[0], b.v[0]);
    const T shift = shift_of(all.v[0]);
    const T factor_a = exp_minus_number(a.v[0], shift), factor_b = exp_minus_number(b.v[0], shift);
    all.v[1] = a.v[1] * factor_a + b.v[1] * factor_b;
    if constexpr (kProducts) all.v[2] = shifted(a, shift, factor_a) + shifted(b, shift, factor_b);
#pragma unroll
    for (int i = kProducts ? 3 : 2; i < N; ++i) all.v[i] = a.v[i] + b.v[i];
    return all;
  }

 private:
  template <class T, int N>
  static ONEPASS_FUNCTION T shifted(numbers<T, N> of, T to, T factor) {
    if (!(of.v[1] > T(0))) return of.v[2];  // nothing, whose shift may be infinitely far away
    return (of.v[2] + of.v[1] * (shift_of(of.v[0]) - to)) * factor;
  }
};

struct merge_exponentials : merge_exponentials_and<false> {
  // Of kCount parts in each of four neighbouring threads. (As in_warp, but for the order of the sum.)
  template <int kCount>
  static ONEPASS_FUNCTION numbers<float, 2> in_four(const numbers<float, 2> (&of)[kCount]) {
    float largest = of[0].v[0], sum = 0.0f;
#pragma unroll
    for (int k = 1; k < kCount; ++k) largest = max_number(largest, of[k].v[0]);
    largest = largest_of_four(largest);
    const float shift = shift_of(largest);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum = fmaf(of[k].v[1], exp_minus_number(of[k].v[0], shift), sum);
    return {{largest, sum_of_four(sum)}};
  }
};

// {the largest, not below 0}; a NaN is the largest of all.
struct merge_magnitude {
  ONEPASS_FUNCTION void next_level() {}
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> none() {
    return {{T(0)}};
  }
  template <class T>
  ONEPASS_FUNCTION numbers<T, 1> operator()(numbers<T, 1> a, numbers<T, 1> b) const {
    return {{larger_magnitude(a.v[0], b.v[0])}};
  }
};

// {largest, how often it is there}.
struct merge_largest {
  ONEPASS_FUNCTION void next_level() {}
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> none() {
    return {{static_cast<T>(-kInfinity), T(0)}};
  }
  template <class T>
  static ONEPASS_FUNCTION void add(T& largest, T& times, T other, T other_times) {
    if (other > largest || other != other) largest = other, times = other_times;
    else if (other == largest) times += other_times;
  }
  template <class T>
  ONEPASS_FUNCTION numbers<T, 2> operator()(numbers<T, 2> a, numbers<T, 2> b) const {
    add(a.v[0], a.v[1], b.v[0], b.v[1]);
    return a;
  }
};

// The running statistics of a row: its largest score, and this thread's part of the sum.
struct online_softmax {
  float largest = -kInfinity, sum = 0.0f;

  ONEPASS_FUNCTION float shift() const { return shift_of(largest); }

  // `most`: the largest score up to now. Returns what earlier exponentials are to be multiplied with.
  ONEPASS_FUNCTION float raise(float most) {
    const float before = largest;
    largest = most;
    return exp_minus_number(before, shift());
  }
  // Exponentials of the next scores, after raise() gave `factor` for the earlier ones.
  template <int V>
  ONEPASS_FUNCTION pack<float, V> add(pack<float, V> scores, float factor) {
    const pack<float, V> exponentials = exp_minus(scores, shift());
    sum = fmaf(sum, factor, sum_lanes(exponentials));
    return exponentials;
  }
};

ONEPASS_END
