// The kernels, emulated on the host, against the CPU's codecs bit for bit: indexing, boundaries,
// order. Sizes lie around those of a block.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/accumulate.h"
#include "codec/cuda/quantise_kernels.h"
#include "codec/cuda/sparse_kernels.h"
#include "codec/factor_wire.h"
#include "codec/int_quantise.h"
#include "codec/sparse_code.h"
#include "codec/strom.h"
#include "codec/vgc.h"
#include "emulate.h"
#include "util/half.h"

namespace dad::cuda {
namespace {

constexpr int64_t kCounts[] = {0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 5000};

// Numbers of many sizes, some of them 0.
template <typename T>
std::vector<T> Numbers(int64_t count, uint32_t seed, T size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> numbers(static_cast<size_t>(count));
  for (T& x : numbers) {
    x = random() % 8 == 0 ? T(0)
                          : static_cast<T>(normal(random) * std::exp2(normal(random)) * size);
  }
  return numbers;
}

template <typename T>
void ExpectSameBits(const std::vector<T>& a, const std::vector<T>& b) {
  ASSERT_EQ(a.size(), b.size());
  if (!a.empty()) {
    ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(T)), 0);
  }
}

// ---- Integers

template <typename T>
void CheckInt8() {
  for (const int64_t count : kCounts) {
    for (const int64_t bucket : {1, 3, 256, 1000, 2048}) {
      std::vector<T> x = Numbers<T>(count, 11, T(1e-3));
      if (count > 700) x[700] = std::numeric_limits<T>::infinity();  // one bucket is NaN
      std::vector<std::byte> wanted(QuantisedBytes(count, bucket));
      std::vector<T> wanted_back(x.size());
      QuantiseInt8(x.data(), count, bucket, std::span(wanted), wanted_back.data());
      std::vector<std::byte> bytes(wanted.size());
      std::vector<T> back(x.size());
      auto* raw = reinterpret_cast<uint8_t*>(bytes.data());
      Emulate<QuantiseInt8Kernel<T>>({x.data(), count, bucket, raw, back.data()});
      ExpectSameBits(bytes, wanted);
      ExpectSameBits(back, wanted_back);
      for (const bool add : {false, true}) {
        std::vector<T> sum = Numbers<T>(count, 12);
        std::vector<T> wanted_sum = sum;
        ASSERT_TRUE((add ? AddDequantisedInt8<T>(wanted, count, bucket, wanted_sum.data())
                         : DequantiseInt8<T>(wanted, count, bucket, wanted_sum.data()))
                        .ok());
        Emulate<DequantiseInt8Kernel<T>>({raw, count, bucket, add, sum.data()});
        ExpectSameBits(sum, wanted_sum);
      }
    }
  }
}
TEST(CudaKernelsTest, Int8IsThatOfTheCpu) {
  CheckInt8<float>();
  CheckInt8<double>();
}

TEST(CudaKernelsTest, Int4IsThatOfTheCpu) {
  for (const int64_t rows : {0, 1, 3}) {
    for (const int64_t cols : {1, 2, 7, 511, 512, 513, 1025}) {
      std::vector<float> x = Numbers<float>(rows * cols, 21);
      const MatrixView<const float> in{x.data(), rows, cols, cols};
      std::vector<std::byte> wanted(EncodedBytes(Wire::kInt4, rows, cols, DType::kFloat32));
      std::vector<float> wanted_back(x.size());
      EncodeFactors<float>(Wire::kInt4, in, std::span(wanted),
                           MatrixView<float>{wanted_back.data(), rows, cols, cols});
      ASSERT_EQ(static_cast<int64_t>(wanted.size()), rows * Int4RowBytes(cols));
      std::vector<std::byte> bytes(wanted.size());
      auto* raw = reinterpret_cast<uint8_t*>(bytes.data());
      Emulate<QuantiseInt4Kernel>({x.data(), rows, cols, raw, x.data()});
      ExpectSameBits(bytes, wanted);
      ExpectSameBits(x, wanted_back);
    }
  }
}

// ---- Sparse methods

// "Device" memory of one tensor and its lists.
template <typename T>
struct Lists {
  explicit Lists(int64_t count)
      : blocks(DivideUp(count, kTile)),
        index(static_cast<size_t>(blocks * kTile)),
        r(index.size()),
        v(index.size()),
        block_count(static_cast<size_t>(blocks), -1),
        offset(static_cast<size_t>(blocks), -1),
        all_index(static_cast<size_t>(count)),
        all_r(all_index.size()),
        all_v(all_index.size()) {}
  Selection<T> scratch(bool variance) {
    return {index.data(), r.data(), variance ? v.data() : nullptr};
  }
  Selection<T> all(bool variance) {
    return {all_index.data(), all_r.data(), variance ? all_v.data() : nullptr};
  }
  int64_t blocks;
  std::vector<uint32_t> index;
  std::vector<T> r, v;
  std::vector<int32_t> block_count;
  std::vector<int64_t> offset;
  std::vector<uint32_t> all_index;
  std::vector<T> all_r, all_v;
  int64_t total = -1;
  int not_finite = 0;
};

template <typename T>
struct Tensor {
  Tensor(int64_t count, uint32_t seed)
      : g(Numbers<T>(count, seed)), s(g), r(Numbers<T>(count, seed + 1)), v(g.size()) {
    for (size_t i = 0; i < g.size(); ++i) {
      s[i] = g[i] * g[i] * T(0.6);
      v[i] = r[i] * r[i] * T(0.9);
    }
  }
  std::vector<T> g, s, r, v;
};

// Runs the three kernels of a selection in place.
template <typename T>
void Select(Tensor<T>& t, const SelectRule<T>& rule, T scale, bool variance, bool squares,
            uint32_t first, Lists<T>& lists) {
  const auto count = static_cast<int64_t>(t.g.size());
  typename AccumulateKernel<T>::Args args{};
  args.count = count;
  args.rule = {rule.tau, rule.alpha, rule.zeta};
  args.scale = scale;
  args.g = t.g.data();
  args.s = squares ? t.s.data() : nullptr;
  args.r = args.new_r = t.r.data();
  args.v = args.new_v = variance ? t.v.data() : nullptr;
  args.first = first;
  args.scratch = lists.scratch(variance);
  args.block_count = lists.block_count.data();
  args.not_finite = &lists.not_finite;
  Emulate<AccumulateKernel<T>>(args);
  Emulate<OffsetsKernel>(
      {lists.block_count.data(), lists.blocks, lists.offset.data(), &lists.total});
  Emulate<GatherKernel<T>>({lists.block_count.data(), lists.offset.data(), lists.blocks,
                            lists.scratch(variance), lists.all(variance)});
}

template <typename T>
void CheckSelection() {
  for (const int64_t count : kCounts) {
    for (const bool variance : {false, true}) {
      for (const bool squares : {false, true}) {
        for (const T tau : {T(-1), T(0.5), T(1e9)}) {
          const SelectRule<T> rule{tau, 1.5, T(0.99)};
          Tensor<T> wanted(count, 31);
          Tensor<T> mine = wanted;
          Selected<T> selected;
          AccumulateBlock<T> block;
          block.count = count;
          block.g = wanted.g.data();
          block.s = squares ? wanted.s.data() : nullptr;
          block.scale = T(0.5);
          block.r = block.new_r = wanted.r.data();
          block.v = block.new_v = variance ? wanted.v.data() : nullptr;
          block.first = 77;
          ASSERT_TRUE(Accumulate(BestCpuLevel(), rule, block, selected));
          Lists<T> lists(count);
          Select(mine, rule, T(0.5), variance, squares, 77, lists);
          ExpectSameBits(mine.r, wanted.r);
          ExpectSameBits(mine.v, wanted.v);
          ASSERT_EQ(lists.total, static_cast<int64_t>(selected.index.size()));
          ASSERT_EQ(lists.not_finite, 0);
          const auto n = static_cast<size_t>(lists.total);
          lists.all_index.resize(n);
          lists.all_r.resize(n);
          lists.all_v.resize(variance ? n : 0);
          ExpectSameBits(lists.all_index, selected.index);
          ExpectSameBits(lists.all_r, selected.r);
          ExpectSameBits(lists.all_v, selected.v);
        }
      }
    }
  }
}
TEST(CudaKernelsTest, SelectionIsThatOfTheCpuInTheSameOrder) {
  CheckSelection<float>();
  CheckSelection<double>();
}

TEST(CudaKernelsTest, WhatIsNotFiniteIsSeen) {
  for (const float strange :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Tensor<float> tensor(2000, 1);
    tensor.g[1999] = strange;
    Lists<float> lists(2000);
    Select(tensor, {0.5f, 1.0, 0.9f}, 1.0f, true, false, 0, lists);
    EXPECT_EQ(lists.not_finite, 1);
  }
}

TEST(CudaKernelsTest, OffsetsOfManyBlocks) {
  for (const int64_t blocks : {1, 255, 256, 257, 1000, 5000}) {
    std::mt19937 random(3);
    std::vector<int32_t> counts(static_cast<size_t>(blocks));
    for (int32_t& count : counts) count = static_cast<int32_t>(random() % (kTile + 1));
    std::vector<int64_t> offset(counts.size());
    int64_t total = -1;
    Emulate<OffsetsKernel>({counts.data(), blocks, offset.data(), &total});
    int64_t sum = 0;
    for (size_t b = 0; b < counts.size(); ++b) {
      ASSERT_EQ(offset[b], sum);
      sum += counts[b];
    }
    EXPECT_EQ(total, sum);
  }
}

// The whole road of VGC: pass, top, codes, words; then a receiver.
template <typename T>
void CheckVgc(bool feedback) {
  for (const int64_t count : kCounts) {
    const SelectRule<T> rule{T(0), 1.0, T(0.999)};
    Tensor<T> wanted(count, 41);
    Tensor<T> mine = wanted;
    std::vector<Selected<T>> chunks(1);
    AccumulateBlock<T> block;
    block.count = count;
    block.g = wanted.g.data();
    block.r = block.new_r = wanted.r.data();
    block.v = block.new_v = wanted.v.data();
    ASSERT_TRUE(Accumulate(BestCpuLevel(), rule, block, chunks[0]));
    const int e_max = VgcTop<T>(std::span<const Selected<T>>(chunks));
    const Coded coded =
        EncodeVgc(e_max, rule.zeta, feedback, chunks[0], wanted.r.data(), wanted.v.data());
    std::vector<std::byte> bytes;
    EncodeSparse(Coding::kWord, count, coded.index, coded.code, 4, bytes);

    Lists<T> lists(count);
    Select(mine, rule, T(1), true, false, 0, lists);
    Word<T> top = 0;
    Emulate<TopKernel<T>>({lists.all_r.data(), &lists.total, count, &top});
    EXPECT_EQ(TopExponent<T>(top), e_max);
    std::vector<uint32_t> scratch(static_cast<size_t>(lists.blocks * kTile));
    Emulate<EncodeVgcKernel<T>>({lists.all(true), &lists.total, count, &top, rule.zeta, feedback, 0,
                                 mine.r.data(), mine.v.data(), scratch.data(),
                                 lists.block_count.data()});
    int64_t num_words = -1;
    Emulate<OffsetsKernel>(
        {lists.block_count.data(), lists.blocks, lists.offset.data(), &num_words});
    ASSERT_EQ(num_words, static_cast<int64_t>(coded.index.size()));
    std::vector<uint32_t> words(coded.index.size());
    Emulate<GatherKernel<T>>({lists.block_count.data(),
                              lists.offset.data(),
                              lists.blocks,
                              {scratch.data(), nullptr, nullptr},
                              {words.data(), nullptr, nullptr}});
    ExpectSameBits(mine.r, wanted.r);
    ExpectSameBits(mine.v, wanted.v);
    const size_t head = bytes.size() - words.size() * sizeof(uint32_t);
    if (!words.empty()) {
      ASSERT_EQ(std::memcmp(bytes.data() + head, words.data(), words.size() * 4), 0);
    }

    std::vector<T> sum = Numbers<T>(count, 43);
    std::vector<T> wanted_sum = sum;
    typename AddWordsKernel<T>::Args add{};
    VgcValues(e_max, add.values);
    for (size_t k = 0; k < coded.index.size(); ++k) {
      wanted_sum[coded.index[k]] += add.values[coded.code[k]];
    }
    add.words = words.data();
    add.count = num_words;
    add.value_bits = 4;
    add.out = sum.data();
    Emulate<AddWordsKernel<T>>(add);
    ExpectSameBits(sum, wanted_sum);
  }
}
TEST(CudaKernelsTest, VgcFromGradientToWordsAndBackIsThatOfTheCpu) {
  for (const bool feedback : {false, true}) {
    CheckVgc<float>(feedback);
    CheckVgc<double>(feedback);
  }
}

template <typename T>
void CheckStrom(bool multiples, bool variance) {
  constexpr float kTau = 0.4f;
  for (const int64_t count : kCounts) {
    const SelectRule<T> rule{static_cast<T>(kTau), 0.5, T(1)};
    Tensor<T> wanted(count, 51);
    Tensor<T> mine = wanted;
    Selected<T> selected;
    AccumulateBlock<T> block;
    block.count = count;
    block.g = wanted.g.data();
    block.r = block.new_r = wanted.r.data();
    block.v = block.new_v = variance ? wanted.v.data() : nullptr;
    ASSERT_TRUE(Accumulate(BestCpuLevel(), rule, block, selected));
    const Coded coded = EncodeStrom(kTau, multiples, selected, wanted.r.data(),
                                    variance ? wanted.v.data() : nullptr);
    Lists<T> lists(count);
    Select(mine, rule, T(1), variance, false, 0, lists);
    ASSERT_EQ(lists.total, static_cast<int64_t>(coded.index.size()));
    std::vector<uint32_t> words(coded.index.size());
    const Threshold<T> threshold = ThresholdOf<T>(kTau);
    Emulate<EncodeStromKernel<T>>({lists.all(variance), &lists.total, count, &threshold, multiples,
                                   0, mine.r.data(), variance ? mine.v.data() : nullptr,
                                   words.data()});
    ExpectSameBits(mine.r, wanted.r);
    ExpectSameBits(mine.v, wanted.v);
    const int value_bits = multiples ? 4 : 1;
    for (size_t k = 0; k < words.size(); ++k) {
      ASSERT_EQ(IndexOf(words[k], value_bits), coded.index[k]);
      ASSERT_EQ(CodeOf(words[k], value_bits), coded.code[k]);
    }
  }
}
TEST(CudaKernelsTest, StromIsThatOfTheCpu) {
  for (const bool multiples : {false, true}) {
    for (const bool variance : {false, true}) {
      CheckStrom<float>(multiples, variance);
      CheckStrom<double>(multiples, variance);
    }
  }
}

}  // namespace
}  // namespace dad::cuda
