// Which calls are made in which order: streams, events, groups, faults, the end.
#include <algorithm>
#include <barrier>

#include "nccl_fixture.h"

namespace dad::nccl {
namespace {

using fake_gpu::Record;

std::vector<std::string> Calls(const std::vector<Record>& log) {
  std::vector<std::string> calls;
  for (const Record& record : log) calls.push_back(record.call);
  return calls;
}

size_t Find(const std::vector<Record>& log, const std::string& call) {
  const auto found =
      std::find_if(log.begin(), log.end(), [&](const Record& r) { return r.call == call; });
  return static_cast<size_t>(found - log.begin());
}

// A stream and an event of "the framework".
struct Framework {
  explicit Framework(const CudaApi& api) : cuda(api) {
    cuda.StreamCreateWithPriority(&stream, 0, 0);
    cuda.EventCreateWithFlags(&event, kCudaEventDisableTiming);
  }
  ~Framework() {
    cuda.EventDestroy(event);
    cuda.StreamDestroy(stream);
  }
  const CudaApi& cuda;
  CudaStream stream = nullptr;
  CudaEvent event = nullptr;
};

TEST_F(NcclTest, AnExchangeIsOneGroupBetweenTheReadyEventsAndItsOwn) {
  const auto libraries = LoadFake();
  RunGroup(3, [&](DeviceGroup& group) {
    libraries->cuda.SetDevice(group.rank());
    Framework framework(libraries->cuda);
    libraries->cuda.EventRecord(framework.event, framework.stream);
    const std::vector<size_t> counts{2, 3, 2};  // not equal: else it would be an ncclAllGather
    auto in = Bytes(std::vector<uint8_t>(counts[static_cast<size_t>(group.rank())]), group.rank());
    auto out = Bytes(std::vector<uint8_t>(7), group.rank());
    in.view.ready_event = framework.event;
    const size_t before = fake_gpu::Log(group.rank()).size();
    const DeviceGroup::Work work = group.AllGatherV(in.view, counts, out.view, kLong);
    ASSERT_TRUE(work.ok());
    std::vector<Record> log = fake_gpu::Log(group.rank());
    log.erase(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(before));
    // The copy of the own block stands where this rank's turn is.
    std::vector<std::string> wanted{"cudaEventCreateWithFlags", "cudaStreamWaitEvent",
                                    "ncclGroupStart"};
    for (int member = 0; member < 3; ++member) {
      if (member == group.rank()) {
        wanted.push_back("cudaMemcpyAsync");
      } else {
        wanted.insert(wanted.end(), {"ncclSend", "ncclRecv"});
      }
    }
    wanted.insert(wanted.end(), {"ncclGroupEnd", "cudaEventRecord"});
    EXPECT_EQ(Calls(log), wanted);
    // All on one stream, which is not the framework's.
    for (const Record& record : log) {
      if (record.stream == nullptr) continue;
      EXPECT_EQ(record.stream, log[1].stream);
      EXPECT_NE(record.stream, framework.stream);
    }
    EXPECT_EQ(log[1].event, framework.event);
    EXPECT_EQ(log.back().event, work.value()->event());
    EXPECT_EQ(log[0].type, static_cast<int>(kCudaEventDisableTiming));
    for (const Record& record : log) {
      if (record.call != "ncclSend" && record.call != "ncclRecv") continue;
      EXPECT_TRUE(record.group);
      const int whose = record.call == "ncclSend" ? group.rank() : record.peer;
      EXPECT_EQ(record.count, counts[static_cast<size_t>(whose)]);
      EXPECT_EQ(record.type, kUint8);
    }
    EXPECT_TRUE(work.value()->Wait(kLong).ok());
  });
}

TEST_F(NcclTest, TheStreamIsItsOwnAndGoesFirst) {
  RunGroup(2, [](DeviceGroup&) {});
  const std::vector<Record> log = fake_gpu::Log(0);
  const Record& made = log.at(Find(log, "cudaStreamCreateWithPriority"));
  EXPECT_EQ(made.type, static_cast<int>(kCudaStreamNonBlocking));
  EXPECT_EQ(made.peer, -5) << "the greatest priority of the fake";
  const Record& init = log.at(Find(log, "ncclCommInitRankConfig"));
  EXPECT_EQ(init.type, 0) << "a communicator that does not block";
  EXPECT_EQ(init.count, 2u);
}

// The producer has not finished: the work waits on the device, and the host does not.
TEST_F(NcclTest, TheDeviceWaitsForTheProducerAndTheConsumerForTheDevice) {
  const auto libraries = LoadFake();
  RunGroup(2, [&](DeviceGroup& group) {
    libraries->cuda.SetDevice(group.rank());
    Framework producer(libraries->cuda);
    Framework consumer(libraries->cuda);
    fake_gpu::Hold(producer.stream);
    libraries->cuda.EventRecord(producer.event, producer.stream);
    auto tensor = Floats({1}, group.rank());
    tensor.view.ready_event = producer.event;
    const DeviceGroup::Work work = group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong);
    ASSERT_TRUE(work.ok());
    libraries->cuda.StreamWaitEvent(consumer.stream, static_cast<CudaEvent>(work.value()->event()),
                                    0);
    libraries->cuda.EventRecord(consumer.event, consumer.stream);
    const Result<bool> done = work.value()->Done();
    ASSERT_TRUE(done.ok());
    EXPECT_FALSE(done.value());
    EXPECT_FALSE(fake_gpu::Reached(consumer.event));
    EXPECT_EQ(tensor.values[0], 1);
    fake_gpu::Release(producer.stream);
    EXPECT_TRUE(work.value()->Wait(kLong).ok());
    EXPECT_TRUE(fake_gpu::Reached(consumer.event));
    EXPECT_EQ(tensor.values[0], 2);
  });
}

TEST_F(NcclTest, AnEventIsRecordedOnlyWhenACallIsThrough) {
  fake_gpu::SetLag(5);
  RunGroup(2, [&](DeviceGroup& group) {
    for (int step = 0; step < 3; ++step) {
      auto tensor = Floats({1}, group.rank());
      ExpectDone(group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong));
      EXPECT_EQ(tensor.values[0], 2) << "the event came before the kernel";
    }
  });
}

TEST_F(NcclTest, TheCommunicatorGoesBeforeItsStreamAndIsNotAborted) {
  RunGroup(2, [&](DeviceGroup& group) {
    auto tensor = Floats({1}, group.rank());
    ExpectDone(group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong));
  });
  for (int device = 0; device < 2; ++device) {
    const std::vector<Record> log = fake_gpu::Log(device);
    EXPECT_LT(Find(log, "ncclAllReduce"), Find(log, "ncclCommFinalize"));
    EXPECT_LT(Find(log, "ncclCommFinalize"), Find(log, "ncclCommDestroy"));
    EXPECT_LT(Find(log, "ncclCommDestroy"), Find(log, "cudaStreamDestroy"));
    EXPECT_LT(Find(log, "cudaStreamDestroy"), log.size());
  }
  EXPECT_EQ(fake_gpu::Count("ncclCommAbort"), 0);
}

TEST_F(NcclTest, AHandleMayOutliveItsGroup) {
  std::unique_ptr<DeviceWork> kept[2];
  RunGroup(2, [&](DeviceGroup& group) {
    auto tensor = Floats({1}, group.rank());
    DeviceGroup::Work work = group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong);
    ASSERT_TRUE(work.ok());
    EXPECT_TRUE(work.value()->Wait(kLong).ok());
    kept[group.rank()] = std::move(work).value();
  });
  for (auto& work : kept) {
    EXPECT_TRUE(work->Wait(kShort).ok()) << "it had finished";
    work.reset();
  }
}

TEST_F(NcclTest, APeerThatNeverCallsIsATimeoutAndAnAbort) {
  RunGroup(2, [&](DeviceGroup& group) {
    if (group.rank() != 0) return;
    auto tensor = Floats({1}, 0);
    const DeviceGroup::Work work =
        group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kShort);
    ASSERT_TRUE(work.ok());
    EXPECT_EQ(work.value()->Wait(kLong).code(), StatusCode::kTimeout);
    EXPECT_EQ(fake_gpu::Count("ncclCommAbort"), 1);
    EXPECT_EQ(group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kShort).status().code(),
              StatusCode::kTimeout);
  });
  const std::vector<Record> log = fake_gpu::Log(0);
  EXPECT_EQ(Find(log, "ncclCommDestroy"), log.size()) << "an aborted one is not destroyed again";
}

TEST_F(NcclTest, TheWatcherAbortsWithoutAnybodyAsking) {
  RunGroup(2, [&](DeviceGroup& group) {
    if (group.rank() != 0) return;
    auto tensor = Floats({1}, 0);
    const DeviceGroup::Work work = group.AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong);
    ASSERT_TRUE(work.ok());
    EXPECT_TRUE(group.status().ok());
    fake_gpu::SetAsyncError(0, 6);
    const auto deadline = std::chrono::steady_clock::now() + kLong;
    while (group.status().ok() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(group.status().code(), StatusCode::kAborted);
    EXPECT_NE(group.status().message().find("remote process exited"), std::string::npos);
    EXPECT_TRUE(fake_gpu::Reached(work.value()->event())) << "the kernel has ended";
    EXPECT_EQ(work.value()->Wait(kLong).code(), StatusCode::kAborted) << "but its result is void";
  });
}

TEST_F(NcclTest, ALostPeerBreaksTheGroupsItIsInAndNoOther) {
  const auto begin = std::chrono::steady_clock::now();
  std::barrier survivors(2);
  RunRanks(3, [&](int rank, NcclTransport& transport) {
    const std::vector<int> all{0, 1, 2};
    const std::vector<int> two{0, 1};
    auto world = transport.MakeGroup(0, all, kLong);
    ASSERT_TRUE(world.ok());
    Result<std::unique_ptr<DeviceGroup>> pair = Status::Internal("no member");
    if (rank != 2) pair = transport.MakeGroup(1, two, kLong);
    EXPECT_TRUE(transport.Barrier(kLong).ok());
    if (rank == 2) {
      network_->Kill(2);
      return;
    }
    auto tensor = Floats({1}, rank);
    const DeviceGroup::Work work =
        world.value()->AllReduce(tensor.view, tensor.view, ReduceOp::kSum, kLong);
    const Status status = work.ok() ? work.value()->Wait(kLong) : work.status();
    EXPECT_EQ(status.code(), StatusCode::kAborted) << status.ToString();
    EXPECT_NE(status.message().find("2"), std::string::npos) << status.ToString();
    auto other = Floats({1}, rank);
    ExpectDone(pair.value()->AllReduce(other.view, other.view, ReduceOp::kSum, kLong));
    EXPECT_EQ(other.values[0], 2);
    survivors.arrive_and_wait();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLong);
}

TEST_F(NcclTest, AMemberThatNeverComesIsATimeout) {
  const auto libraries = LoadFake();
  UniqueId id;
  ASSERT_EQ(libraries->nccl.GetUniqueId(&id), kSuccess);
  Communicator alone(libraries, 0, {0, 1}, 0);
  EXPECT_EQ(alone.Start(id, kShort).code(), StatusCode::kTimeout);
  EXPECT_EQ(fake_gpu::Count("ncclCommAbort"), 1);
}

TEST_F(NcclTest, APeerThatIsLostEndsTheWaitForIt) {
  const auto libraries = LoadFake();
  UniqueId id;
  ASSERT_EQ(libraries->nccl.GetUniqueId(&id), kSuccess);
  Communicator alone(libraries, 0, {0, 1}, 0);
  std::thread news([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    alone.Break(Status::Aborted("rank 1 is lost"));
  });
  const Status status = alone.Start(id, kLong);
  news.join();
  EXPECT_EQ(status.message(), "rank 1 is lost");
  EXPECT_EQ(fake_gpu::Count("ncclCommAbort"), 1);
}

TEST_F(NcclTest, DifferentVersionsAreNamedOnEveryRank) {
  LocalNetwork network(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      auto libraries = LoadFake();
      if (rank == 2) libraries->nccl.version = 22105;
      std::unique_ptr<Transport> control = network.Connect(rank);
      auto transport = NcclTransport::Connect(libraries, rank, control.get(), kLong);
      ASSERT_TRUE(transport.ok());
      (void)control.release();
      const std::vector<int> all{0, 1, 2};
      const Status status = transport.value()->MakeGroup(0, all, kLong).status();
      EXPECT_EQ(status.code(), StatusCode::kUnavailable);
      EXPECT_NE(status.message().find("rank 2 has NCCL 2.21.5"), std::string::npos)
          << status.message();
      EXPECT_TRUE(transport.value()->Barrier(kLong).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(NcclTest, ARankWithoutADeviceIsNamed) {
  fake_gpu::SetDeviceCount(1);
  LocalNetwork network(1);
  std::unique_ptr<Transport> control = network.Connect(0);
  const auto transport = NcclTransport::Connect(LoadFake(), 3, control.get(), kLong);
  EXPECT_EQ(transport.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(transport.status().message().find("needs CUDA device 3"), std::string::npos);
}

TEST_F(NcclTest, AStrangerHasNoGroup) {
  RunRanks(2, [&](int rank, NcclTransport& transport) {
    const std::vector<int> alone{0};
    const auto group = transport.MakeGroup(3, alone, kLong);
    EXPECT_EQ(group.ok(), rank == 0);
  });
}

}  // namespace
}  // namespace dad::nccl
