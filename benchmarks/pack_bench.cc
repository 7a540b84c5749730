// What packing floats costs on one core, and what it saves.
//
//   cmake --build build --target dad_pack_bench && build/benchmarks/dad_pack_bench [FILE...]
//
// A file has float32 values, such as a gradient's; without one the values are made up.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "best_seconds.h"
#include "codec/float_pack.h"

namespace dad {
namespace {

void Row(const std::string& name, const std::vector<std::byte>& x, DType dtype) {
  const auto count = static_cast<int64_t>(x.size() / SizeOf(dtype));
  std::vector<std::byte> room(PackFloatsRoom(count, dtype)), back(x.size());
  size_t size = 0;
  const double pack = BestSeconds([&] { size = PackFloats(x.data(), count, dtype, room); });
  bool same = true;
  const double unpack = BestSeconds([&] {
    same = UnpackFloats(std::span(room).first(size), count, dtype, back.data()).ok() && same;
  });
  const auto raw = static_cast<double>(x.size());
  std::printf("%-28s %-9s %8.3f %10.2f %10.2f%s\n", name.c_str(), Name(dtype),
              static_cast<double>(size) / raw, 1e-9 * raw / pack, 1e-9 * raw / unpack,
              same && back == x ? "" : "  NOT THE SAME");
}

void BothTypes(const std::string& name, const std::vector<std::byte>& x) {
  Row(name, x, DType::kFloat32);
  std::vector<std::byte> upper(x.size() / 2);
  for (size_t i = 0; i < x.size() / 4; ++i) std::memcpy(&upper[2 * i], &x[4 * i + 2], 2);
  Row(name, upper, DType::kBFloat16);
}

// Normal values of which some are zero.
std::vector<std::byte> MadeUp(double zeros) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0f, 1e-3f);
  std::vector<float> values(1 << 20);
  for (float& x : values)
    x = static_cast<double>(random() % 1000) < 1000 * zeros ? 0 : normal(random);
  std::vector<std::byte> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

int Main(int argc, char** argv) {
  std::printf("one thread, best of several runs\n");
  std::printf("%-28s %-9s %8s %10s %10s\n", "values", "type", "size", "pack GB/s", "unpack");
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    const std::vector<char> read{std::istreambuf_iterator<char>(file), {}};
    std::vector<std::byte> bytes(read.size() / 4 * 4);
    std::memcpy(bytes.data(), read.data(), bytes.size());
    BothTypes(argv[i], bytes);
  }
  for (const double zeros : {0.0, 0.01, 0.1, 0.5, 0.9, 1.0}) {
    if (argc > 1) break;
    char name[64];
    std::snprintf(name, sizeof name, "normal, %.0f %% are zero", 100 * zeros);
    BothTypes(name, MadeUp(zeros));
  }
  return 0;
}

}  // namespace
}  // namespace dad

int main(int argc, char** argv) { return dad::Main(argc, argv); }
