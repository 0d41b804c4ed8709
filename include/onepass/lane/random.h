// Random numbers of a place: Philox4x32-7 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011), a pure function of seed, offset and element, so the same on every device and in backward.
//
// Eight elements of a row share one call. Element (row, column) of a tensor with `columns` columns:
//   group   = row · ceil(columns / 8) + column / 8
//   counter = (lo32(group), hi32(group), lo32(offset), hi32(offset) ^ ordinal), key = (lo32(seed), hi32(seed))
//   number  = 16 bits of the result: word (column % 8) / 2, the low half for even columns, the high half for odd ones.
#if defined(ONEPASS_LANE_RANDOM_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_LANE_RANDOM_H_
#undef ONEPASS_LANE_RANDOM_H_
#else
#define ONEPASS_LANE_RANDOM_H_
#endif

#include "onepass/lane/target.h"
#include "onepass/lane/types.h"
#if defined(ONEPASS_HIGHWAY)
#include "onepass/lane/cpu.h"
#endif

ONEPASS_BEGIN

struct philox_words {
  uint32 word[4];
};

constexpr uint32 kPhiloxMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32 kPhiloxKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kPhiloxRounds = 7;

// Of 32 bits each.
ONEPASS_FUNCTION constexpr uint64 wide_product(uint32 a, uint32 b) {
#if defined(__CUDACC__)  // of a constant and a number, NVRTC makes a longer product otherwise
  uint64 product = 0;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64>(a) * b;
#endif
}

ONEPASS_FUNCTION constexpr philox_words philox(philox_words counter, uint32 key0, uint32 key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64 product0 = wide_product(kPhiloxMultiplier[0], counter.word[0]);
    const uint64 product1 = wide_product(kPhiloxMultiplier[1], counter.word[2]);
    counter = {{static_cast<uint32>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32>(product1),
                static_cast<uint32>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32>(product0)}};
    key0 += kPhiloxKeyStep[0];
    key1 += kPhiloxKeyStep[1];
  }
  return counter;
}

// The four words of a group of eight elements.
ONEPASS_FUNCTION constexpr philox_words random_group(uint64 seed, uint64 offset, uint32 ordinal, uint64 group) {
  return philox({{static_cast<uint32>(group), static_cast<uint32>(group >> 32), static_cast<uint32>(offset),
                  static_cast<uint32>(offset >> 32) ^ ordinal}},
                static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
}

// The random number of one element.
ONEPASS_FUNCTION constexpr uint32 random_number(uint64 seed, uint64 offset, uint32 ordinal, int64 row, int64 column,
                                                int64 columns) {
  const uint64 group = static_cast<uint64>(row * ((columns + 7) / 8) + column / 8);
  const int element = static_cast<int>(column % 8);
  return (random_group(seed, offset, ordinal, group).word[element / 2] >> (16 * (element % 2))) & 0xffffu;
}

#if defined(ONEPASS_HIGHWAY)

// Numbers for one dropout of a line, made a block at a time. Rows follow each other in the counter, so a block runs on
// into the rows behind: short rows waste nothing.
class random_source {
 public:
  ONEPASS_FUNCTION void reset(const int64* state, int ordinal, int64 columns) {
    seed_ = static_cast<uint64>(state[0]);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      key_[round][0] = static_cast<uint32>(seed_) + static_cast<uint32>(round) * kPhiloxKeyStep[0];
      key_[round][1] = static_cast<uint32>(seed_ >> 32) + static_cast<uint32>(round) * kPhiloxKeyStep[1];
    }
    offset_ = static_cast<uint64>(state[1]);
    ordinal_ = static_cast<uint32>(ordinal);
    row_elements_ = (columns + 7) / 8 * 8;
    block_ = -kBlock;
    row_ = 0;
  }
  ONEPASS_FUNCTION void set_row(int64 row) { row_ = row * row_elements_; }

  // Numbers from 0 to 65535 for columns column, column + 1, ...; those past the row's end are arbitrary.
  template <class L>
  ONEPASS_FUNCTION L next(int64 column) {
    const int64 element = row_ + column;
    if (HWY_UNLIKELY(element < block_ || element + L::kLanes > block_ + kBlock)) fill(element & ~int64(7));
    const uint16* at = numbers_ + (element - block_);
    const hn::Rebind<uint16_t, typename L::tag> d16;
    const hn::Rebind<int32_t, typename L::tag> d32;
    const auto whole = hn::PromoteTo(d32, hn::LoadU(d16, at));
    if constexpr (sizeof(typename L::scalar) == 4) return L(hn::ConvertTo(typename L::tag(), whole));
    else return L(hn::PromoteTo(typename L::tag(), whole));
  }

 private:
  static constexpr int kBlock = 512;

#if HWY_TARGET == HWY_SCALAR
  HWY_NOINLINE void fill(int64 first) {
    block_ = first;
    for (int i = 0; i < kBlock; i += 8) {
      const philox_words w = random_group(seed_, offset_, ordinal_, static_cast<uint64>((first + i) / 8));
      for (int j = 0; j < 8; ++j) numbers_[i + j] = static_cast<uint16>(w.word[j / 2] >> (16 * (j % 2)));
    }
  }
#else
  using word_tag = hn::ScalableTag<uint64_t>;
  using word = hn::Vec<word_tag>;
  static constexpr int64 kLanes = static_cast<int64>(hn::MaxLanes(word_tag()));

  // The counters of kLanes groups. Each word is the low half of its lane; the high half is noise, which the
  // multiplication ignores.
  struct counters {
    word w0, w1, w2, w3;

    ONEPASS_FUNCTION void round(word key0, word key1) {
      const hn::Repartition<uint32_t, word_tag> d32;
      const auto product0 = hn::MulEven(hn::BitCast(d32, w0), hn::Set(d32, kPhiloxMultiplier[0]));
      const auto product1 = hn::MulEven(hn::BitCast(d32, w2), hn::Set(d32, kPhiloxMultiplier[1]));
      w0 = hn::Xor3(hn::ShiftRight<32>(product1), w1, key0);
      w2 = hn::Xor3(hn::ShiftRight<32>(product0), w3, key1);
      w1 = product1;
      w3 = product0;
    }
    // Lanes 2i and 2i + 1 hold groups i and kLanes / 2 + i, so that interleaving gives memory order.
    ONEPASS_FUNCTION void write(uint16* to) const {
      const word_tag d;
      const word low_half = hn::Set(d, 0xffffffffu);
      const word low = hn::Or(hn::And(w0, low_half), hn::ShiftLeft<32>(w1));
      const word high = hn::Or(hn::And(w2, low_half), hn::ShiftLeft<32>(w3));
      hn::Store(hn::InterleaveLower(d, low, high), d, reinterpret_cast<uint64_t*>(to));
      hn::Store(hn::InterleaveUpper(d, low, high), d, reinterpret_cast<uint64_t*>(to) + kLanes);
    }
  };

  HWY_NOINLINE void fill(int64 first) {
    const word_tag d;
    block_ = first;
    HWY_ALIGN uint64_t order[kLanes];
    for (int64 i = 0; i < kLanes; ++i) order[i] = static_cast<uint64_t>(first / 8 + i / 2 + i % 2 * (kLanes / 2));
    word group = hn::Load(d, order);
    const word step = hn::Set(d, static_cast<uint64_t>(kLanes));
    const word w2 = hn::Set(d, offset_ & 0xffffffffu), w3 = hn::Set(d, (offset_ >> 32) ^ ordinal_);
    // Two registers at a time, since one alone waits for its multiplications: 0.16 against 0.18 ns a number on AVX-512.
    for (int64 done = 0; done < kBlock; done += 16 * kLanes) {
      counters a{group, hn::ShiftRight<32>(group), w2, w3};
      group = hn::Add(group, step);
      counters b{group, hn::ShiftRight<32>(group), w2, w3};
      group = hn::Add(group, step);
      for (const auto& key : key_) {
        const word key0 = hn::Set(d, key[0]), key1 = hn::Set(d, key[1]);
        a.round(key0, key1);
        b.round(key0, key1);
      }
      a.write(numbers_ + done);
      b.write(numbers_ + done + 8 * kLanes);
    }
  }
#endif

  uint64 seed_ = 0, offset_ = 0;
  uint32 ordinal_ = 0;
  uint64_t key_[kPhiloxRounds][2] = {};  // of each round, widened to a word
  int64 row_elements_ = 0, row_ = 0, block_ = -kBlock;
  alignas(64) uint16 numbers_[kBlock];
};

#endif

ONEPASS_END
#endif
