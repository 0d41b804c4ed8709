// The threads that share a row on CUDA, and how they combine what each has of it: through shuffles in a warp, shared
// memory in a block, mbarriers in a cluster.
//
// Config: arithmetic, kAcross, kDown, kCluster, kAhead (see kernel/row/rowwise.cuda.h).
#pragma once

#include "onepass/lane/cuda.h"
#include "onepass/kernel/common/shapes.h"
#include "onepass/word/row.h"

ONEPASS_BEGIN

// Numbers that a reduction combines. A way of combining has none(), which changes nothing; next_level() says that what
// it combines next is made of twice as many; it may have a way of its own for the threads of a warp, in_warp.
template <class T, int N>
struct numbers {
  T v[N];
};

template <int N, class T>
ONEPASS_FUNCTION numbers<T, N> load_numbers(const T* from) {
  numbers<T, N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values.v[i] = from[i];
  return values;
}
template <class T, int N>
ONEPASS_FUNCTION void store_numbers(numbers<T, N> values, T* to) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = values.v[i];
}

struct plus {
  ONEPASS_FUNCTION void next_level() {}
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> none() {
    numbers<T, N> zero;
#pragma unroll
    for (int i = 0; i < N; ++i) zero.v[i] = T(0);
    return zero;
  }
  template <class T, int N>
  ONEPASS_FUNCTION numbers<T, N> operator()(numbers<T, N> a, numbers<T, N> b) const {
#pragma unroll
    for (int i = 0; i < N; ++i) a.v[i] += b.v[i];
    return a;
  }
};

// Σ (x - mean)² and mean of two sets of numbers together (Chan, Golub, LeVeque, "Updating formulae and a pairwise
// algorithm for computing sample variances", 1979); where there is a third number, what rounding took from the mean.
// Sets of the same size, which doubles with each level:
template <class T>
struct merge_equal {
  T size;
  ONEPASS_FUNCTION void next_level() { size += size; }
  ONEPASS_FUNCTION numbers<T, 2> operator()(numbers<T, 2> a, numbers<T, 2> b) const {
    const T apart = a.v[1] - b.v[1];
    return {{fma_number(apart * apart, T(0.5) * size, a.v[0] + b.v[0]), T(0.5) * (a.v[1] + b.v[1])}};
  }
  ONEPASS_FUNCTION numbers<T, 3> operator()(numbers<T, 3> a, numbers<T, 3> b) const {
    const T apart = (a.v[1] - b.v[1]) + (a.v[2] - b.v[2]), sum = a.v[1] + b.v[1];
    return {{fma_number(apart * apart, T(0.5) * size, a.v[0] + b.v[0]), T(0.5) * sum,
             T(0.5) * (word::rest_of_sum(a.v[1], b.v[1], sum) + (a.v[2] + b.v[2]))}};
  }
};
// Of any size, which is the last number.
struct merge {
  ONEPASS_FUNCTION void next_level() {}
  template <class T, int N>
  static ONEPASS_FUNCTION numbers<T, N> none() {
    return plus::none<T, N>();
  }
  template <class T>
  ONEPASS_FUNCTION numbers<T, 3> operator()(numbers<T, 3> a, numbers<T, 3> b) const {
    const T apart = a.v[1] - b.v[1], size = a.v[2] + b.v[2];
    const T inverse = size > T(0) ? reciprocal_number(size) : T(0);
    return {{fma_number(apart * apart, a.v[2] * b.v[2] * inverse, a.v[0] + b.v[0]),
             T(0.5) * fma_number(apart, (a.v[2] - b.v[2]) * inverse, a.v[1] + b.v[1]), size}};
  }
  template <class T>
  ONEPASS_FUNCTION numbers<T, 4> operator()(numbers<T, 4> a, numbers<T, 4> b) const {
    if (a.v[3] == T(0) || b.v[3] == T(0)) return b.v[3] == T(0) ? a : b;
    const T apart = (a.v[1] - b.v[1]) + (a.v[2] - b.v[2]), size = a.v[3] + b.v[3], inverse = reciprocal_number(size);
    const T sum = a.v[1] + b.v[1], shift = apart * ((a.v[3] - b.v[3]) * inverse), mean = sum + shift;
    const T rest = word::rest_of_sum(a.v[1], b.v[1], sum) + word::rest_of_sum(sum, shift, mean);
    return {{fma_number(apart * apart, a.v[3] * b.v[3] * inverse, a.v[0] + b.v[0]), T(0.5) * mean,
             T(0.5) * (rest + (a.v[2] + b.v[2])), size}};
  }
};
// Of magnitudes; a NaN is the largest of all.
template <class T>
ONEPASS_FUNCTION T larger_magnitude(T a, T b) {
  if constexpr (sizeof(T) == 4) return max_number(a, b);
  else return b > a || b != b ? b : a;
}
// Of a vector's first `count` elements and `so_far`.
template <class T, int V>
ONEPASS_FUNCTION T largest_magnitude_of(pack<T, V> of, int count, T so_far) {
  pack<T, V> magnitudes = where(first_n<pack<T, V>>(count), abs(of), pack<T, V>(T(0)));
#pragma unroll
  for (int half = V / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) magnitudes.v[i] = larger_magnitude(magnitudes.v[i], magnitudes.v[i + half]);
  }
  return larger_magnitude(so_far, magnitudes.v[0]);
}
// Of so many neighbouring threads of a warp, a power of two, which all call it; others need not.
template <int Threads, class T>
ONEPASS_FUNCTION T largest_magnitude_of(T of) {
  const uint32 first = threadIdx.x % 32 & ~static_cast<uint32>(Threads - 1);
  const uint32 all = 0xffffffffu >> (32 - Threads) << first;
#pragma unroll
  for (int apart = Threads / 2; apart > 0; apart /= 2) of = larger_magnitude(of, __shfl_xor_sync(all, of, apart));
  return of;
}

// Of four neighbouring threads.
ONEPASS_FUNCTION float largest_of_four(float of) {
  of = max_number(of, __shfl_xor_sync(0xffffffffu, of, 1));
  return max_number(of, __shfl_xor_sync(0xffffffffu, of, 2));
}
ONEPASS_FUNCTION float sum_of_four(float of) {
  of += __shfl_xor_sync(0xffffffffu, of, 1);
  return of + __shfl_xor_sync(0xffffffffu, of, 2);
}

// Transposes 4 x 4 words among four threads of a warp, kApart from each other: what the i-th has as word j, the j-th
// gets as word i.
template <int kApart>
ONEPASS_FUNCTION void transpose_words(uint32 (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (threadIdx.x / kApart & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32 &low = words[i], &high = words[i + bit];
      const uint32 other = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit * kApart);
      if (upper) low = other;
      else high = other;
    }
  }
}

// The blocks of a cluster.
ONEPASS_FUNCTION int cluster_rank() {
  uint32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
// No data pass at this barrier: mbarriers order them, once fence_mbarrier_init has made those visible.
ONEPASS_FUNCTION void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
ONEPASS_FUNCTION void wait_for_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

ONEPASS_FUNCTION uint32 shared_address(const void* at) { return static_cast<uint32>(__cvta_generic_to_shared(at)); }
// The address in another block's shared memory (mapa).
ONEPASS_FUNCTION uint32 in_block(uint32 address, int rank) {
  uint32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// mbarriers: a phase completes when `arrivals` threads and the bytes that they expect have arrived.
ONEPASS_FUNCTION void init_mbarrier(uint64* mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
}
ONEPASS_FUNCTION void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
ONEPASS_FUNCTION void arrive(uint64* mbarrier) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(shared_address(mbarrier)) : "memory");
}
ONEPASS_FUNCTION void arrive_and_expect(uint64* mbarrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(bytes)
               : "memory");
}
ONEPASS_FUNCTION void store_async(uint32 to, uint32 mbarrier, float value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(value)), "r"(mbarrier)
               : "memory");
}
ONEPASS_FUNCTION void store_async(uint32 to, uint32 mbarrier, double value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
               "l"(__double_as_longlong(value)), "r"(mbarrier)
               : "memory");
}
ONEPASS_FUNCTION void store_async(uint32 to, uint32 mbarrier, numbers<float, 2> values) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(values.v[0])), "r"(__float_as_uint(values.v[1])), "r"(mbarrier)
               : "memory");
}
ONEPASS_FUNCTION void store_async(uint32 to, uint32 mbarrier, numbers<float, 4> values) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(__float_as_uint(values.v[0])), "r"(__float_as_uint(values.v[1])), "r"(__float_as_uint(values.v[2])),
               "r"(__float_as_uint(values.v[3])), "r"(mbarrier)
               : "memory");
}
// Arrives at another block's mbarrier, after the thread's accesses to its own shared memory. (A release to the cluster
// would also wait for stores to global memory.)
ONEPASS_FUNCTION void arrive_in_block(uint64* mbarrier, int rank) {
  asm volatile(
      "fence.acq_rel.cta; mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(shared_address(mbarrier), rank))
      : "memory");
}
// At the mbarrier at the same address in each block of the cluster.
template <int kCluster>
ONEPASS_FUNCTION void arrive_in_cluster(uint64* mbarrier) {
  if constexpr (kCluster == 1) arrive(mbarrier);
#pragma unroll
  for (int rank = 0; kCluster > 1 && rank < kCluster; ++rank)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(shared_address(mbarrier), rank))
                 : "memory");
}
ONEPASS_FUNCTION bool is_phase_complete(uint64* mbarrier, uint32 phase) {
  uint32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(mbarrier)), "r"(phase)
               : "memory");
  return done != 0;
}
ONEPASS_FUNCTION void wait_for_mbarrier(uint64* mbarrier, uint32 phase) {
  uint32 done = 0;
  while (done == 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(mbarrier)), "r"(phase)
                 : "memory");
#else
    done = is_phase_complete(mbarrier, phase);
#endif
  }
}

// Where a row's target is picked out of it: by the thread that passes its column, not here, or by the row's first
// thread, which reads the row there again.
enum class pick { in_passing, elsewhere, again };

constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// Combines over the threads of a row; every thread gets the same result. Where two rows are in flight
// (Config::kAhead), one row's numbers are sent before those of the row before are received.
template <class Config>
class row_threads {
 public:
  using T = typename Config::arithmetic;
  static constexpr int kWarps = Config::kAcross > 32 ? Config::kAcross / 32 : 1;
  static constexpr int kWidth = Config::kAcross < 32 ? Config::kAcross : 32;
  static constexpr int kCluster = Config::kCluster, kParts = kWarps * kCluster;
  static constexpr int kAllParts = power_of_two_from(kParts);  // with those that are nothing
  static constexpr int kMost = most_reduced(Config::kFeatures, kShort);
  static constexpr bool kHasNumbers = true, kAtOnce = true, kGathers = false;  // see sender below
  static constexpr pick kPick = pick::in_passing;
  static constexpr int kCombined = 1;
  static constexpr bool kAhead = Config::kAhead, kUsesMbarriers = kCluster > 1 || (kAhead && kParts > 1);
  static constexpr int kRows = kWarps > 1 ? Config::kDown : 1;  // that share a block, each with its own barrier
  // Sets are used in turn. A thread that sends a third set has received the one before last, which all others sent
  // after they had read the set before that: two sets suffice where each is received at once, three where one more is
  // in flight.
  static constexpr int kSets = kAhead ? kMostReductionSets : 2;
  struct slots {
    T of[kRows][kSets][kParts][kMost];
    uint64 mbarrier[kRows][kSets];
  };
  static_assert(kCluster == 1 || kRows == 1, "a cluster has one row at a time");
  static_assert(!kAhead || kParts > 1, "a row within a warp is not sent");

  explicit ONEPASS_FUNCTION row_threads(slots& shared)
      : shared_(shared), row_(kRows > 1 ? static_cast<int>(threadIdx.x) / Config::kAcross : 0) {
    if constexpr (kUsesMbarriers) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int mbarrier = 0; mbarrier < kRows * kSets; ++mbarrier)
          init_mbarrier(&shared.mbarrier[0][mbarrier], kCluster > 1 ? 1 : kWarps);
        if constexpr (kCluster > 1) fence_mbarrier_init();
      }
      if constexpr (kCluster > 1) arrive_at_cluster();  // no one sends before all have opened theirs
      else __syncthreads();
    }
  }

  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> reduce(numbers<T, N> own, Combine combine) {
    own = send(own, combine);  // first: it leaves in `combine` how far the numbers have come
    return receive(own, combine);
  }

  // The threads of a row in this block wait for each other.
  ONEPASS_FUNCTION void meet() const {
    if constexpr (Config::kAcross <= 32) __syncwarp();
    else if constexpr (Config::kThreads == Config::kAcross) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(row_ + 1), "n"(Config::kAcross) : "memory");
  }

  // Returns what this thread's warp has.
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> send(numbers<T, N> own, Combine& combine) {
    static_assert(N <= kMost);
    own = in_warp(own, combine, kWidth);
    if constexpr (kParts == 1) return own;
    const int lane_id = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % kWarps;
    auto& set = shared_.of[row_][to_send_];
    uint64* mbarrier = &shared_.mbarrier[row_][to_send_];
    if constexpr (kCluster > 1) {
      if (!begun_) wait_for_cluster();
      begun_ = true;
      if (threadIdx.x == 0) arrive_and_expect(mbarrier, kParts * N * static_cast<int>(sizeof(T)));
      if (lane_id < kCluster) {
        const uint32 there = in_block(shared_address(set[cluster_rank() * kWarps + warp]), lane_id),
                     its_mbarrier = in_block(shared_address(mbarrier), lane_id);
#pragma unroll
        for (int i = 0; i < N; ++i) store_async(there + i * static_cast<uint32>(sizeof(T)), its_mbarrier, own.v[i]);
      }
    } else if (lane_id == 0) {
      store_numbers(own, set[warp]);
      if constexpr (kUsesMbarriers) arrive(mbarrier);
    }
    to_send_ = to_send_ + 1 < kSets ? to_send_ + 1 : 0;
    return own;
  }

  // `own`: what send returned, where the row is within a warp.
  template <int N, class Combine>
  ONEPASS_FUNCTION numbers<T, N> receive(numbers<T, N> own, Combine combine) {
    if constexpr (kParts == 1) return own;
    const auto& set = shared_.of[row_][to_receive_];
    if constexpr (kUsesMbarriers) {
      wait_for_mbarrier(&shared_.mbarrier[row_][to_receive_], phases_ >> to_receive_ & 1);
      phases_ ^= 1u << to_receive_;
    } else {
      meet();
    }
    to_receive_ = to_receive_ + 1 < kSets ? to_receive_ + 1 : 0;
    constexpr int kEach = kAllParts < 32 ? 1 : kAllParts / 32;
    numbers<T, N> parts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int part = (static_cast<int>(threadIdx.x) % 32 + i * 32) % kAllParts;
      if constexpr (kAllParts == kParts) parts[i] = load_numbers<N>(set[part]);
      else parts[i] = part < kParts ? load_numbers<N>(set[part]) : Combine::template none<T, N>();
    }
#pragma unroll
    for (int half = kEach / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) parts[i] = combine(parts[i], parts[i + half]);
      combine.next_level();
    }
    return in_warp(parts[0], combine, kAllParts < 32 ? kAllParts : 32);
  }

 private:
  template <int N, class Combine>
  static ONEPASS_FUNCTION numbers<T, N> in_warp(numbers<T, N> own, Combine& combine, int width) {
    if constexpr (requires { Combine::in_warp(own, width); }) {
      return Combine::in_warp(own, width);
    } else {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        if (distance >= width) continue;
        numbers<T, N> other;
#pragma unroll
        for (int i = 0; i < N; ++i) other.v[i] = __shfl_xor_sync(0xffffffffu, own.v[i], distance);
        own = combine(own, other);
        combine.next_level();
      }
      return own;
    }
  }
  slots& shared_;
  const int row_;
  int to_send_ = 0, to_receive_ = 0;
  uint32 phases_ = 0;
  bool begun_ = false;
};

// The two halves of a reduction, which take row_threads' place where the next row is under way: the first sends...
// kCombined: how many threads' numbers are in those that it starts from (0: any number).
template <class Config>
struct sender {
  static constexpr bool kHasNumbers = true, kAtOnce = false, kGathers = false;
  static constexpr pick kPick = pick::in_passing;
  static constexpr int kCombined = 1;
  row_threads<Config>& threads;
  template <class Numbers, class Combine>
  ONEPASS_FUNCTION Numbers reduce(Numbers own, Combine combine) {
    return threads.send(own, combine);
  }
};
// ... and the second receives, and passes over no elements.
template <class Config>
struct receiver {
  static constexpr bool kHasNumbers = false, kAtOnce = false;
  static constexpr pick kPick = pick::in_passing;
  static constexpr int kCombined = row_threads<Config>::kWidth;
  row_threads<Config>& threads;
  template <class Numbers, class Combine>
  ONEPASS_FUNCTION Numbers reduce(Numbers own, Combine combine) {
    return threads.receive(own, combine);
  }
};

ONEPASS_END
