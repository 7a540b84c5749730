// Fused buffers: the kernel that packs and unpacks them, emulated on the host, and what the engine
// puts on the stream with it and without it. No GPU has run any of it.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "codec/cuda/pack_kernel.h"
#include "device_job.h"
#include "emulate.h"

namespace dad {
namespace {

using cuda::PackKernel;

std::vector<uint8_t> Noise(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(PackKernelTest, CopiesEveryByteOnceAndNoneBesideThem) {
  constexpr int64_t kBlock = PackKernel::kBlockBytes;
  const std::vector<int64_t> counts{1,    3,          15,     16,         17,         255, 256,
                                    4097, kBlock - 1, kBlock, kBlock + 1, 3 * kBlock, 2,   7};
  // Where a piece begins: whole words, whole floats, anywhere; on either side.
  for (const int from_shift : {0, 4, 1}) {
    for (const int to_shift : {0, 4, 2}) {
      PackKernel::Args args{};
      std::vector<std::vector<uint8_t>> sources, targets;
      for (const int64_t count : counts) {
        sources.push_back(Noise(static_cast<size_t>(count + 32), static_cast<uint32_t>(count)));
        targets.emplace_back(static_cast<size_t>(count + 300), uint8_t{0x5a});
        const int zeros = static_cast<int>(count % 256);
        ASSERT_TRUE(PackKernel::Add(args, sources.back().data() + from_shift,
                                    targets.back().data() + to_shift, count, zeros));
      }
      cuda::Emulate<PackKernel>(args, static_cast<uint32_t>(from_shift * 8 + to_shift));
      for (size_t k = 0; k < counts.size(); ++k) {
        const auto count = static_cast<size_t>(counts[k]);
        std::vector<uint8_t> wanted(count + 300, uint8_t{0x5a});
        std::memcpy(wanted.data() + to_shift, sources[k].data() + from_shift, count);
        std::memset(wanted.data() + to_shift + count, 0, count % 256);
        EXPECT_EQ(targets[k], wanted) << count << " bytes";
      }
    }
  }
}

TEST(PackKernelTest, ALaunchThatIsFullTakesNoMore) {
  PackKernel::Args args{};
  uint8_t from = 1;
  std::vector<uint8_t> to(PackKernel::kMostPieces + 1);
  for (int i = 0; i < PackKernel::kMostPieces; ++i) {
    ASSERT_TRUE(PackKernel::Add(args, &from, to.data() + i, 1, 0));
  }
  EXPECT_FALSE(PackKernel::Add(args, &from, to.data() + PackKernel::kMostPieces, 1, 0));
  cuda::Emulate<PackKernel>(args);
  EXPECT_EQ(to.back(), 0);
  to.pop_back();
  EXPECT_EQ(to, std::vector<uint8_t>(PackKernel::kMostPieces, 1));
  PackKernel::Args large{};
  EXPECT_FALSE(PackKernel::Add(large, &from, to.data(), int64_t{1} << 50, 0));
}

class FusedBufferTest : public DeviceTest {};

// A request of `count` tensors of different sizes, of which some have nothing.
Request Group(std::vector<DeviceValues>& values, const UserStream& stream, int count) {
  for (int i = 0; i < count; ++i) {
    values.emplace_back(std::vector<float>(static_cast<size_t>(37 * i % 101), 1.0f * i), stream);
  }
  Request group = values[0].AllReduce("group");
  for (int i = 1; i < count; ++i) {
    values[static_cast<size_t>(i)].ready = values[0].ready;
    group.tensors.emplace_back();
    group.tensors.back().input = group.tensors.back().output =
        values[static_cast<size_t>(i)].View();
  }
  return group;
}

TEST_F(FusedBufferTest, IsOneKernelEachWayAndTheSameSumsAsByCopies) {
  for (const Methods methods : {Methods::kOnHost, Methods::kOnDevice}) {
    fake_gpu::Reset();
    DeviceJob job(2, Wire::kNccl, {}, {}, methods);
    job.Run([&](int rank) {
      UserStream stream(rank);
      std::vector<DeviceValues> values;
      values.reserve(12);
      auto ticket = job[rank].Submit(Group(values, stream, 12));
      ASSERT_TRUE(stream.Use(*ticket).ok());
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(values[i].data, std::vector<float>(37 * i % 101, 2.0f * static_cast<float>(i)));
      }
      const bool emulated = methods == Methods::kOnDevice;
      EXPECT_EQ(Calls(rank, "dad_cuda_pack").size(), emulated ? 2u : 0u);
      EXPECT_EQ(Calls(rank, "cudaMemcpyAsync").size(), emulated ? 0u : 22u);
      if (emulated) {
        EXPECT_TRUE(Calls(rank, "cudaMemsetAsync").empty());
      }
      // In, the reduction, out: on one stream.
      std::vector<std::string> order;
      const void* on = Calls(rank, "ncclAllReduce")[0].stream;
      for (const fake_gpu::Record& record : fake_gpu::Log(rank)) {
        const bool counts = record.call == "dad_cuda_pack" || record.call == "ncclAllReduce";
        if (counts && record.stream == on) order.push_back(record.call);
      }
      if (emulated) {
        EXPECT_EQ(order,
                  (std::vector<std::string>{"dad_cuda_pack", "ncclAllReduce", "dad_cuda_pack"}));
      }
    });
  }
}

TEST_F(FusedBufferTest, OfMoreTensorsThanALaunchTakesIsSeveral) {
  DeviceJob job(2, Wire::kNccl, {}, {}, Methods::kOnDevice);
  job.Run([&](int rank) {
    UserStream stream(rank);
    std::vector<DeviceValues> values;
    values.reserve(300);
    auto ticket = job[rank].Submit(Group(values, stream, 300));
    ASSERT_TRUE(stream.Use(*ticket).ok());
    EXPECT_EQ(values[299].data, std::vector<float>(37 * 299 % 101, 598.0f));
    EXPECT_EQ(Calls(rank, "dad_cuda_pack").size(), 6u);  // 297 with something in them
    EXPECT_EQ(Calls(rank, "ncclAllReduce").size(), 1u);
  });
}

}  // namespace
}  // namespace dad
