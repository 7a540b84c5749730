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

class DeviceJob {
 public:
  DeviceJob(int size, Wire wire, Options options = {}, std::vector<std::vector<int>> sets = {})
      : network_(size), engines_(static_cast<size_t>(size)) {
    setenv("DAD_CUDART_LIBRARY", DAD_FAKE_GPU, 1);
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
    unsetenv("DAD_CUDART_LIBRARY");
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
  Request AllGather(const std::string& name) {
    Request request = AllReduce(name);
    request.kind = OpKind::kAllGather;
    request.tensors[0].output = {};
    request.allocate = [this](int, DType dtype, const Shape& shape) -> Result<TensorView> {
      gathered.resize(static_cast<size_t>(NumElements(shape)));
      TensorView view = View();
      view.data = gathered.data();
      view.dtype = dtype;
      view.shape = shape;
      return view;
    };
    return request;
  }

  const UserStream& stream;
  DeviceEvent ready;
  std::vector<float> data;
  std::vector<float> gathered;
};

}  // namespace dad
