// The results of the collectives over the fake: pointers, sizes and counts are right.
#include "nccl_fixture.h"

namespace dad::nccl {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 7};

TEST_F(NcclTest, AllReduceAddsUpOverAllRanks) {
  for (const int size : kSizes) {
    RunGroup(size, [&](DeviceGroup& group) {
      for (const size_t count : {0u, 1u, 10u, 1000u}) {
        auto tensor = Floats(std::vector<float>(count), group.rank());
        std::iota(tensor.values.begin(), tensor.values.end(), static_cast<float>(group.rank()));
        ExpectDone(group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong));
        for (size_t i = 0; i < count; ++i) {
          const auto ranks = static_cast<float>(size * (size - 1) / 2);
          ASSERT_EQ(tensor.values[i], static_cast<float>(size) * static_cast<float>(i) + ranks);
        }
      }
    });
  }
}

TEST_F(NcclTest, EveryReductionIsTheOneThatWasAsked) {
  RunGroup(3, [&](DeviceGroup& group) {
    const std::pair<ReduceOp, float> wanted[] = {{ReduceOp::kSum, 9},
                                                 {ReduceOp::kAverage, 3},
                                                 {ReduceOp::kMin, 2},
                                                 {ReduceOp::kMax, 4},
                                                 {ReduceOp::kProduct, 24}};
    for (const auto& [op, result] : wanted) {
      auto in = Floats({static_cast<float>(group.rank() + 2)}, group.rank());
      auto out = Floats({-1}, group.rank());
      ExpectDone(group.AllReduce(in.view, out.view, op, kLong));
      EXPECT_EQ(out.values[0], result) << Name(op);
    }
  });
}

TEST_F(NcclTest, AllGatherVOfUnequalSizesAndOfNothing) {
  for (const int size : kSizes) {
    RunGroup(size, [&](DeviceGroup& group) {
      // Rank 1 has nothing.
      const auto bytes_of = [](int rank) { return rank == 1 ? 0 : size_t(3 * rank + 1); };
      std::vector<size_t> counts;
      std::vector<uint8_t> wanted;
      for (int rank = 0; rank < size; ++rank) {
        counts.push_back(bytes_of(rank));
        wanted.insert(wanted.end(), bytes_of(rank), static_cast<uint8_t>(rank + 1));
      }
      auto in = Bytes(
          std::vector<uint8_t>(bytes_of(group.rank()), static_cast<uint8_t>(group.rank() + 1)),
          group.rank());
      auto out = Bytes(std::vector<uint8_t>(wanted.size()), group.rank());
      ExpectDone(group.AllGatherV(in.view, counts, out.view, kLong));
      EXPECT_EQ(out.values, wanted);
    });
  }
}

TEST_F(NcclTest, BroadcastFromEveryRoot) {
  RunGroup(3, [&](DeviceGroup& group) {
    for (int root = 0; root < 3; ++root) {
      auto tensor = Floats({static_cast<float>(group.rank()), 5}, group.rank());
      ExpectDone(group.Broadcast(tensor.view, root, kLong));
      EXPECT_EQ(tensor.values, (std::vector<float>{static_cast<float>(root), 5}));
    }
  });
}

TEST_F(NcclTest, ReduceScatterOfEqualAndOfUnequalBlocks) {
  const std::vector<int64_t> cases[] = {{2, 2, 2}, {1, 0, 4}, {0, 0, 0}, {0, 3, 0}};
  RunGroup(3, [&](DeviceGroup& group) {
    for (const std::vector<int64_t>& counts : cases) {
      const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      auto in = Floats(std::vector<float>(static_cast<size_t>(total)), group.rank());
      std::iota(in.values.begin(), in.values.end(), 0.0f);
      const auto rank = static_cast<size_t>(group.rank());
      auto out = Floats(std::vector<float>(static_cast<size_t>(counts[rank])), group.rank());
      ExpectDone(group.ReduceScatter(in.view, counts, out.view, ReduceOp::kSum, kLong));
      const auto first = static_cast<float>(
          std::accumulate(counts.begin(), counts.begin() + group.rank(), int64_t{0}));
      for (size_t i = 0; i < out.values.size(); ++i) {
        EXPECT_EQ(out.values[i], 3 * (first + static_cast<float>(i)));
      }
    }
  });
}

TEST_F(NcclTest, AllToAllVOfUnequalSizesAndOfNothing) {
  for (const int size : kSizes) {
    RunGroup(size, [&](DeviceGroup& group) {
      // Bytes from one rank to another, some of them 0.
      const auto bytes = [](int from, int to) { return size_t((from + 2 * to) % 4); };
      std::vector<size_t> send_counts;
      std::vector<size_t> receive_counts;
      std::vector<uint8_t> sent;
      std::vector<uint8_t> wanted;
      for (int peer = 0; peer < size; ++peer) {
        send_counts.push_back(bytes(group.rank(), peer));
        receive_counts.push_back(bytes(peer, group.rank()));
        sent.insert(sent.end(), send_counts.back(), static_cast<uint8_t>(10 * group.rank() + peer));
        wanted.insert(wanted.end(), receive_counts.back(),
                      static_cast<uint8_t>(10 * peer + group.rank()));
      }
      auto in = Bytes(sent, group.rank());
      auto out = Bytes(std::vector<uint8_t>(wanted.size()), group.rank());
      ExpectDone(group.AllToAllV(in.view, send_counts, out.view, receive_counts, kLong));
      EXPECT_EQ(out.values, wanted);
    });
  }
}

TEST_F(NcclTest, SendAndReceiveBetweenTwoOfThree) {
  RunGroup(3, [&](DeviceGroup& group) {
    auto tensor = Floats({static_cast<float>(group.rank()), 7}, group.rank());
    if (group.rank() == 2) ExpectDone(group.Send(tensor.view, 0, kLong));
    if (group.rank() == 0) {
      ExpectDone(group.Receive(tensor.view, 2, kLong));
      EXPECT_EQ(tensor.values, (std::vector<float>{2, 7}));
    }
  });
}

TEST_F(NcclTest, ProcessSetsHaveCommunicatorsOfTheirOwn) {
  RunRanks(4, [&](int rank, NcclTransport& transport) {
    const std::vector<int> even{2, 0};
    const std::vector<int> odd{1, 3};
    const std::vector<int> all{0, 1, 2, 3};
    auto set = transport.MakeGroup(1, rank % 2 == 0 ? even : odd, kLong);
    auto world = transport.MakeGroup(0, all, kLong);
    ASSERT_TRUE(set.ok() && world.ok());
    EXPECT_EQ(set.value()->rank(), rank % 2 == 0 ? (rank == 2 ? 0 : 1) : rank / 2);
    auto in_set = Floats({static_cast<float>(rank)}, rank);
    auto in_world = Floats({static_cast<float>(rank)}, rank);
    ExpectDone(set.value()->AllReduce(in_set.view, in_set.view, ReduceOp::kSum, kLong));
    ExpectDone(world.value()->AllReduce(in_world.view, in_world.view, ReduceOp::kSum, kLong));
    EXPECT_EQ(in_set.values[0], rank % 2 == 0 ? 2 : 4);
    EXPECT_EQ(in_world.values[0], 6);
    EXPECT_TRUE(transport.Barrier(kLong).ok());
  });
  EXPECT_EQ(fake_gpu::Count("ncclGetUniqueId"), 3);
}

TEST_F(NcclTest, TheTransportTakesCpuTensorsByMessagesAndDeviceTensorsByNccl) {
  RunRanks(3, [&](int rank, NcclTransport& transport) {
    float value = 1;
    TensorView on_cpu;
    on_cpu.data = &value;
    on_cpu.shape = {1};
    EXPECT_TRUE(transport.AllReduce(on_cpu, ReduceOp::kSum, kLong).ok());
    EXPECT_EQ(value, 3);
    EXPECT_TRUE(transport.Barrier(kLong).ok());
    EXPECT_EQ(fake_gpu::Count("ncclAllReduce"), 0);
    EXPECT_TRUE(transport.Barrier(kLong).ok());
    auto on_device = Floats({2}, rank);
    EXPECT_TRUE(transport.AllReduce(on_device.view, ReduceOp::kSum, kLong).ok());
    EXPECT_EQ(on_device.values[0], 6);
    auto blocks = Floats({1, 2, 3}, rank);
    auto block = Floats({0}, rank);
    const std::vector<int64_t> counts{1, 1, 1};
    EXPECT_TRUE(
        transport.ReduceScatter(blocks.view, counts, block.view, ReduceOp::kSum, kLong).ok());
    EXPECT_EQ(block.values[0], static_cast<float>(3 * (rank + 1)));
    EXPECT_TRUE(transport.Barrier(kLong).ok());
  });
  EXPECT_EQ(fake_gpu::Count("ncclAllReduce"), 3);
}

TEST_F(NcclTest, WrongUseIsRefusedBeforeAnythingIsCalled) {
  RunGroup(2, [&](DeviceGroup& group) {
    const size_t before = fake_gpu::Log(group.rank()).size();
    auto here = Floats({1, 2}, group.rank());
    auto elsewhere = Floats({1, 2}, group.rank() + 1);
    auto shorter = Floats({1}, group.rank());
    TensorView on_cpu = here.view;
    on_cpu.device = DeviceType::kCpu;
    TensorView shorts = here.view;
    shorts.dtype = DType::kInt16;
    TensorView ints = here.view;
    ints.dtype = DType::kInt32;
    const std::vector<size_t> counts{8, 4};
    const std::vector<int64_t> blocks{2, 2};
    const auto refused = [](const DeviceGroup::Work& work) {
      EXPECT_EQ(work.status().code(), StatusCode::kInvalidArgument);
    };
    refused(group.AllReduce(elsewhere.view, elsewhere.view, ReduceOp::kSum, kLong));
    refused(group.AllReduce(on_cpu, on_cpu, ReduceOp::kSum, kLong));
    refused(group.AllReduce(here.view, shorter.view, ReduceOp::kSum, kLong));
    refused(group.AllReduce(shorts, shorts, ReduceOp::kSum, kLong));
    refused(group.AllReduce(ints, ints, ReduceOp::kAverage, kLong));
    refused(group.AllReduce(here.view, here.view, ReduceOp::kAdasum, kLong));
    refused(group.Broadcast(here.view, 2, kLong));
    refused(group.Send(here.view, -1, kLong));
    refused(group.AllGatherV(here.view, counts, here.view, kLong));
    refused(group.AllToAllV(here.view, counts, here.view, counts, kLong));
    refused(group.ReduceScatter(here.view, blocks, here.view, ReduceOp::kSum, kLong));
    EXPECT_EQ(fake_gpu::Log(group.rank()).size(), before);
    EXPECT_TRUE(group.status().ok());
  });
}

}  // namespace
}  // namespace dad::nccl
