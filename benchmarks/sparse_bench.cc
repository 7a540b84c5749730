// What sparse gradients cost on one core.
//
//   cmake --build build --target dad_sparse_bench && build/benchmarks/dad_sparse_bench
//
// An argument chooses tables by name: codec, update, largest.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "best_seconds.h"
#include "codec/accumulate.h"
#include "codec/chunk_pick.h"
#include "codec/chunk_topk.h"
#include "codec/sparse_code.h"
#include "codec/topk.h"
#include "util/aligned_buffer.h"

namespace dad {
namespace {

// ---- codec: indices and codes <-> bytes

constexpr int64_t kExtent = 32 << 20;

std::vector<uint32_t> RandomIndex(double density) {
  std::mt19937 random(1);
  std::geometric_distribution<int64_t> gap(density);
  std::vector<uint32_t> index;
  for (int64_t i = gap(random); i < kExtent; i += 1 + gap(random)) {
    index.push_back(static_cast<uint32_t>(i));
  }
  return index;
}

// A row: millions of indices per second.
void CodecRow(Coding coding, double density, int value_bits, const std::vector<uint32_t>& index) {
  std::mt19937 random(2);
  std::vector<uint8_t> code(value_bits == 0 ? 0 : index.size());
  for (uint8_t& c : code) c = static_cast<uint8_t>(random() & ((1u << value_bits) - 1));
  const auto rate = [&](const std::function<void()>& run) {
    return 1e-6 * static_cast<double>(index.size()) / BestSeconds(run);
  };
  std::vector<std::byte> bytes;
  const double encode = rate([&] {
    bytes.clear();
    EncodeSparse(coding, kExtent, index, code, value_bits, bytes);
  });
  std::vector<uint32_t> decoded_index;
  std::vector<uint8_t> decoded_code;
  const double decode = rate([&] {
    ByteReader in(bytes);
    (void)DecodeSparse(coding, kExtent, value_bits, in, decoded_index, decoded_code);
  });
  const double in_blocks = rate([&] {
    ByteReader in(bytes);
    SparseReader reader(coding, kExtent, value_bits, in);
    while (reader.Next()) {
    }
  });
  std::vector<float> sum(static_cast<size_t>(kExtent));
  float value_of[16];
  for (int c = 0; c < 16; ++c) value_of[c] = static_cast<float>(c) - 8.0f;
  const double add = rate([&] {
    ByteReader in(bytes);
    SparseReader reader(coding, kExtent, value_bits, in);
    while (reader.Next()) {
      for (size_t i = 0; i < reader.index().size(); ++i) {
        sum[reader.index()[i]] += value_of[value_bits == 0 ? 0 : reader.code()[i]];
      }
    }
  });
  std::printf("%-6s %8.4f %6d %10.2f %10.0f %10.0f %10.0f %10.0f\n",
              coding == Coding::kWord ? "word" : "rice", density, value_bits,
              8.0 * static_cast<double>(bytes.size()) / static_cast<double>(index.size()), encode,
              decode, in_blocks, add);
}

void Codec() {
  std::printf("\nsparse code, of %ld elements: millions of indices per second\n",
              static_cast<long>(kExtent));
  std::printf("%-6s %8s %6s %10s %10s %10s %10s %10s\n", "coding", "density", "code", "bits/index",
              "encode", "decode", "in blocks", "add");
  for (const double density : {0.3, 0.1, 0.03, 0.01, 0.003, 0.001}) {
    const std::vector<uint32_t> index = RandomIndex(density);
    for (const Coding coding : {Coding::kWord, Coding::kRice}) {
      CodecRow(coding, density, 4, index);
    }
  }
  const std::vector<uint32_t> index = RandomIndex(0.01);
  for (const Coding coding : {Coding::kWord, Coding::kRice}) {
    for (const int value_bits : {1, 0}) CodecRow(coding, 0.01, value_bits, index);
  }
}

// ---- update: the pass over r and v, against a loop that only reads and writes

constexpr int64_t kElements = 16 << 20;

struct Array {
  explicit Array(float value) : bytes(kElements * sizeof(float)) {
    std::fill_n(data(), kElements, value);
  }
  float* data() { return reinterpret_cast<float*>(bytes.data()); }
  AlignedBuffer bytes;
};

// Not inlined, so that it is compiled as a loop over memory and nothing else.
[[gnu::noinline]] void Triad(const float* b, const float* c, float* a) {
  for (int64_t i = 0; i < kElements; ++i) a[i] = b[i] + 3.0f * c[i];
}

void Update() {
  std::printf("\nthe pass of vgc over %ld elements, 24 bytes each, against a triad of 12\n",
              static_cast<long>(kElements));
  std::printf("%-28s %10s %10s\n", "pass", "GB/s", "of triad");
  Array g(0), s(0), r(0), v(0), new_r(0), new_v(0);
  const auto rate = [&](double bytes, const std::function<void()>& run) {
    return 1e-9 * bytes * static_cast<double>(kElements) / BestSeconds(run);
  };
  const double triad = rate(12, [&] { Triad(g.data(), s.data(), r.data()); });
  std::printf("%-28s %10.1f %10.2f\n", "triad", triad, 1.0);
  for (const double density : {0.0, 0.01, 0.1, 0.3}) {
    std::mt19937 random(1);
    for (int64_t i = 0; i < kElements; ++i) {
      const bool passes = static_cast<double>(random() % 1000) < 1000 * density;
      g.data()[i] = passes ? 2.0f : 0.5f;
      s.data()[i] = 1.0f;
      r.data()[i] = v.data()[i] = 0.0f;
    }
    for (const bool in_place : {false, true}) {
      AccumulateBlock<float> block;
      block.count = kElements;
      block.g = g.data();
      block.s = s.data();
      block.r = r.data();
      block.v = v.data();
      block.new_r = in_place ? r.data() : new_r.data();
      block.new_v = in_place ? v.data() : new_v.data();
      block.stream = !in_place;
      if (in_place) block.scale = 0.0f;  // so that runs do not build on each other
      Selected<float> selected;
      const double found = rate(24, [&] {
        selected.Clear();
        (void)Accumulate(BestCpuLevel(), {-1.0f, 1.0, 0.999f}, block, selected);
      });
      if (in_place && density > 0) continue;
      char name[64];
      std::snprintf(name, sizeof name, "%s, %.0f %% selected",
                    in_place ? "in place" : "to other memory", 100 * density);
      std::printf("%-28s %10.1f %10.2f\n", name, found, found / triad);
    }
  }
}

// ---- largest: what topk and chunk_topk do with a tensor, against the same loop over memory

// g + e, then the largest of it, and their encoding, as exchange/sparse.cc has it.
void TopK(Array& g, Array& e, Array& sum, double ratio) {
  AccumulateBlock<float> block;
  block.count = kElements;
  block.g = g.data();
  block.r = e.data();
  block.new_r = sum.data();
  block.stream = true;
  Selected<float> none;
  (void)Accumulate(BestCpuLevel(), {std::numeric_limits<float>::infinity()}, block, none);
  TopKLimit limit =
      FindTopK(sum.data(), kElements, static_cast<int64_t>(ratio * static_cast<double>(kElements)));
  std::vector<uint32_t> index;
  std::vector<float> value;
  TakeTopK(sum.data(), kElements, limit, index, value);
  for (const uint32_t i : index) sum.data()[i] = 0;
  std::vector<std::byte> bytes;
  EncodeSparse(Coding::kRice, kElements, index, {}, 0, bytes);
}

std::vector<uint32_t> PickChunks(const ChunkCode& code, Array& g, Array& e, Array& sum) {
  ChunkPicker<float> picker(BestCpuLevel());
  std::vector<uint32_t> index;
  for (int64_t at = 0; at < kElements; at += code.chunk) {
    const int64_t n = std::min(code.chunk, kElements - at);
    (void)picker.Pick({g.data() + at, 1, e.data() + at, 1, sum.data() + at, n}, code.k,
                      static_cast<uint32_t>(at), index);
  }
  return index;
}

std::vector<std::byte> EncodeChunks(const ChunkCode& code, const std::vector<uint32_t>& index,
                                    Array& sum) {
  std::vector<float> values(index.size());
  for (size_t i = 0; i < index.size(); ++i) values[i] = sum.data()[index[i]];
  std::vector<float> left = values;
  std::vector<std::byte> bytes;
  EncodeChunkRun<float>(code, index, left, bytes);
  // An exchange writes what is left; here the next run is to find the same.
  for (size_t i = 0; i < index.size(); ++i) sum.data()[index[i]] = values[i];
  return bytes;
}

void Largest() {
  std::printf("\nthe largest of %ld normal elements, 12 bytes each, against a triad\n",
              static_cast<long>(kElements));
  std::printf("%-34s %10s %10s\n", "what", "GB/s", "of triad");
  Array g(0), e(0), sum(0);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kElements; ++i) {
    g.data()[i] = normal(random);
    e.data()[i] = normal(random);
  }
  const auto row = [&](const char* what, double triad, const std::function<void()>& run) {
    const double rate = 12e-9 * static_cast<double>(kElements) / BestSeconds(run);
    std::printf("%-34s %10.2f %10.3f\n", what, rate, triad > 0 ? rate / triad : 1.0);
    return rate;
  };
  const double triad = row("triad", 0, [&] { Triad(g.data(), e.data(), sum.data()); });
  row("topk, 1/64, with its encoding", triad, [&] { TopK(g, e, sum, 1.0 / 64); });
  for (const auto& [chunk, k] : {std::pair{4096, 64}, {4096, 256}, {1024, 16}, {64, 1}}) {
    const ChunkCode code{.chunk = chunk, .k = k, .bits = 2};
    char name[64];
    std::snprintf(name, sizeof name, "pick %d of %d", k, chunk);
    std::vector<uint32_t> index;
    row(name, triad, [&] { index = PickChunks(code, g, e, sum); });
    std::vector<std::byte> bytes;
    row("  encode it in 2 bits", triad, [&] { bytes = EncodeChunks(code, index, sum); });
    std::vector<float> result(static_cast<size_t>(kElements), 0.0f);
    row("  decode and add it", triad, [&] {
      ByteReader in(bytes);
      (void)AddChunks<float>(code, kElements, in, result.data());
    });
    std::printf("  %.2f bits each\n",
                8.0 * static_cast<double>(bytes.size()) / static_cast<double>(index.size()));
  }
}

// A new table is a function and a line here.
struct Table {
  std::string_view name;
  void (*run)();
};
constexpr Table kTables[] = {{"codec", Codec}, {"update", Update}, {"largest", Largest}};

int Main(int argc, char** argv) {
  std::printf("one thread, best of several runs\n");
  for (const Table& table : kTables) {
    const bool chosen = argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* name) {
                          return table.name == name;
                        });
    if (chosen) table.run();
  }
  return 0;
}

}  // namespace
}  // namespace dad

int main(int argc, char** argv) { return dad::Main(argc, argv); }
