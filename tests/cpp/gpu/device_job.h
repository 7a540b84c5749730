// A job of several engines in one process, each with a device of the recording fake; with NCCL, as
// the fake plays it, or without.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dad/device.h"
#include "dad/engine.h"
#include "device/events.h"
#include "nccl_fixture.h"

namespace dad {

enum class Wire { kNccl, kStaged };
// Where methods are computed: there on the fake's stand-in for libdad_cuda.so and its cuBLAS.
enum class Methods { kOnHost, kOnDevice };

class DeviceJob {
 public:
  DeviceJob(int size, Wire wire, Options options = {}, std::vector<std::vector<int>> sets = {},
            Methods methods = Methods::kOnHost)
      : network_(size), engines_(static_cast<size_t>(size)) {
    setenv("DAD_CUDART_LIBRARY", DAD_FAKE_GPU, 1);
    const bool on_device = methods == Methods::kOnDevice;
    setenv("DAD_CUDA_LIBRARY", on_device ? DAD_FAKE_KERNELS : "/nowhere/libdad_cuda.so", 1);
    setenv("DAD_CUBLAS_LIBRARY", DAD_FAKE_GPU, 1);
    Run([&](int rank) {
      World world;
      world.rank = world.local_rank = rank;
      world.size = world.local_size = size;
      std::unique_ptr<Transport> transport = network_.Connect(rank);
      if (wire == Wire::kNccl) {
        auto both =
            nccl::NcclTransport::Connect(nccl::LoadFake(), rank, transport.get(), nccl::kLong);
        ASSERT_TRUE(both.ok()) << both.status().ToString();
        (void)transport.release();
        transport = std::move(both).value();
      }
      auto engine = Engine::CreateOn(std::move(transport), world, options, sets);
      ASSERT_TRUE(engine.ok()) << engine.status().ToString();
      engines_[static_cast<size_t>(rank)] = std::move(engine).value();
    });
  }
  ~DeviceJob() {
    Run([this](int rank) { engines_[static_cast<size_t>(rank)].reset(); });
    ReleasePassed();
    for (const char* name : {"DAD_CUDART_LIBRARY", "DAD_CUDA_LIBRARY", "DAD_CUBLAS_LIBRARY"}) {
      unsetenv(name);
    }
  }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& operator[](int rank) { return *engines_[static_cast<size_t>(rank)]; }
  LocalNetwork& network() { return network_; }

  void Run(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  LocalNetwork network_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

// The calls of one name.
inline std::vector<fake_gpu::Record> Calls(int device, const std::string& name) {
  std::vector<fake_gpu::Record> log = fake_gpu::Log(device);
  std::erase_if(log, [&](const fake_gpu::Record& record) { return record.call != name; });
  return log;
}

// Nothing is left behind on the devices.
class DeviceTest : public testing::TestWithParam<Wire> {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  void TearDown() override {
    ReleasePassed();
    EXPECT_EQ(fake_gpu::LiveComms(), 0);
    EXPECT_EQ(fake_gpu::LiveStreams(), 0);
    EXPECT_EQ(fake_gpu::LiveEvents(), 0);
    EXPECT_EQ(fake_gpu::LiveBlocks(), 0);
    fake_gpu::Reset();
  }
};

inline std::string WireName(const testing::TestParamInfo<Wire>& info) {
  return info.param == Wire::kNccl ? "Nccl" : "Staged";
}

// A framework's stream, which makes tensors and uses results.
class UserStream {
 public:
  explicit UserStream(int device) : device_(device) {
    const CudaApi& cuda = *ProcessCuda().value();
    const CudaDeviceGuard guard(cuda, device);
    stream_ = NewStream(cuda).value();
  }
  ~UserStream() { (void)ProcessCuda().value()->StreamDestroy(stream_); }
  UserStream(const UserStream&) = delete;
  UserStream& operator=(const UserStream&) = delete;

  CudaStream get() const { return stream_; }
  int device() const { return device_; }
  DeviceEvent Record() const { return RecordEvent(device_, stream_).value(); }
  void Hold() const { fake_gpu::Hold(stream_); }
  void Release() const { fake_gpu::Release(stream_); }

  // The framework's way to a result: no host waits for the device but this test.
  Status Use(Ticket& ticket) const {
    DAD_RETURN_IF_ERROR(ticket.Wait(nccl::kLong));
    DAD_RETURN_IF_ERROR(StreamWaits(device_, stream_, ticket.done_event()));
    return WaitForEvent(device_, Record(), nccl::kLong);
  }

 private:
  const int device_;
  CudaStream stream_ = nullptr;
};

// Floats in the memory of a device, made on a stream.
struct DeviceValues {
  DeviceValues(std::vector<float> v, const UserStream& s) : stream(s), data(std::move(v)) {}

  TensorView View() {
    TensorView view;
    view.data = data.data();
    view.shape = {static_cast<int64_t>(data.size())};
    view.device = DeviceType::kCuda;
    view.device_index = stream.device();
    view.ready_event = ready.get();
    return view;
  }
  Request AllReduce(const std::string& name, ReduceOp op = ReduceOp::kSum) {
    ready = stream.Record();
    Request request;
    request.name = name;
    request.op = op;
    request.keep_alive = ready;
    request.tensors.emplace_back();
    request.tensors[0].input = request.tensors[0].output = View();
    return request;
  }
  Request Broadcast(const std::string& name, int root) {
    Request request = AllReduce(name);
    request.kind = OpKind::kBroadcast;
    request.root_rank = root;
    return request;
  }
  // Of kinds whose output is asked for when its shape is known; it goes to `gathered`.
  Request Rows(const std::string& name, OpKind kind, ReduceOp op = ReduceOp::kSum) {
    Request request = AllReduce(name, op);
    request.kind = kind;
    request.tensors[0].output = {};
    request.allocate = [this](int, DType dtype, const Shape& shape) -> Result<TensorView> {
      if (no_memory) return Status::Unavailable("no memory left on the device");
      gathered.resize(static_cast<size_t>(NumElements(shape)));
      TensorView view = View();
      view.data = gathered.data();
      view.dtype = dtype;
      view.shape = shape;
      return view;
    };
    return request;
  }

  Request AllGather(const std::string& name) { return Rows(name, OpKind::kAllGather); }
  Request AllToAll(const std::string& name, std::vector<int64_t> splits = {}) {
    Request request = Rows(name, OpKind::kAllToAll);
    request.tensors[0].splits = std::move(splits);
    return request;
  }
  Request ReduceScatter(const std::string& name, ReduceOp op = ReduceOp::kSum) {
    return Rows(name, OpKind::kReduceScatter, op);
  }

  const UserStream& stream;
  DeviceEvent ready;
  bool no_memory = false;
  std::vector<float> data;
  std::vector<float> gathered;
};

}  // namespace dad
