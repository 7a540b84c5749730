#include "transport/nccl/nccl_group.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "util/half.h"

namespace dad::nccl {
namespace {

// What is under way when a group goes is given this long.
constexpr std::chrono::seconds kGrace{2};

class NcclWork : public DeviceWork {
 public:
  NcclWork(std::shared_ptr<Communicator> communicator,
           std::shared_ptr<Communicator::Operation> operation)
      : communicator_(std::move(communicator)), operation_(std::move(operation)) {}

  void* event() const override { return operation_->event(); }
  Result<bool> Done() override { return communicator_->Poll(*operation_); }

  Status Wait(std::chrono::milliseconds timeout) override {
    const auto deadline = Communicator::Clock::now() + timeout;
    std::chrono::microseconds pause{10};
    for (;;) {
      const Result<bool> done = Done();
      if (!done.ok()) return done.status();
      if (done.value()) return Status::Ok();
      if (Communicator::Clock::now() >= deadline) {
        return Status::Timeout("the device has not finished in the time given");
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(1000));
    }
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<Communicator::Operation> operation_;
};

// Pointers into what a group sends to one member and gets from it.
struct Block {
  const std::byte* send;
  size_t send_bytes;
  std::byte* receive;
  size_t receive_bytes;
};

// A factor in the tensor's own type, as NCCL wants it.
class Scalar {
 public:
  Scalar(DType dtype, double value) : value_(value) {
    switch (dtype) {
      case DType::kFloat64: std::memcpy(bytes_, &value, sizeof value); break;
      case DType::kFloat32: Store(static_cast<float>(value)); break;
      case DType::kFloat16: Store(FloatToHalf(static_cast<float>(value))); break;
      default: Store(FloatToBFloat16(static_cast<float>(value)));
    }
  }
  void* data() { return bytes_; }
  double value() const { return value_; }

 private:
  template <typename T>
  void Store(T value) {
    std::memcpy(bytes_, &value, sizeof value);
  }
  const double value_;
  alignas(8) char bytes_[8] = {};
};

Status Bad(const std::string& what, const std::string& why) {
  return Status::InvalidArgument(what + ": " + why);
}

template <typename T>
T Sum(std::span<const T> counts) {
  return std::accumulate(counts.begin(), counts.end(), T{0});
}

}  // namespace

NcclGroup::~NcclGroup() {
  communicator_->Close(std::chrono::duration_cast<Millis>(kGrace));
  closing_(communicator_.get());
}

DeviceGroup::Work NcclGroup::Submit(std::string what, std::span<const TensorView> views,
                                    bool grouped, const Communicator::Enqueue& enqueue,
                                    Millis timeout) {
  Result<std::shared_ptr<Communicator::Operation>> operation =
      communicator_->Submit(std::move(what), views, grouped, enqueue, timeout);
  if (!operation.ok()) return operation.status();
  submitted_();
  return std::unique_ptr<DeviceWork>(
      std::make_unique<NcclWork>(communicator_, std::move(operation).value()));
}

Status NcclGroup::CheckPeer(const char* what, int peer) const {
  if (peer >= 0 && peer < size()) return Status::Ok();
  return Bad(what, "no rank " + std::to_string(peer) + " in a group of " + std::to_string(size()));
}

DeviceGroup::Work NcclGroup::AllReduce(const TensorView& in, const TensorView& out, ReduceOp op,
                                       double scale, Millis timeout) {
  const Result<DataType> type = ToNccl(in.dtype);
  if (!type.ok()) return type.status();
  const Result<RedOp> reduction = ToNccl(op, in.dtype);
  if (!reduction.ok()) return reduction.status();
  if (in.dtype != out.dtype || in.num_elements() != out.num_elements()) {
    return Bad("allreduce", "input and output differ");
  }
  const NcclApi& nccl = libraries_->nccl;
  const auto count = static_cast<size_t>(in.num_elements());
  if (scale == 1.0) {
    return Submit(
        "ncclAllReduce", std::array{in, out}, false,
        [&](Comm comm, CudaStream stream) {
          return nccl.AllReduce(in.data, out.data, count, type.value(), reduction.value(), comm,
                                stream);
        },
        timeout);
  }
  if (!IsFloating(in.dtype) || (op != ReduceOp::kSum && op != ReduceOp::kAverage)) {
    return Bad("allreduce",
               std::string("NCCL does not scale the ") + Name(op) + " of " + Name(in.dtype));
  }
  Scalar factor(in.dtype, op == ReduceOp::kAverage ? scale / size() : scale);
  return Submit(
      "ncclAllReduce", std::array{in, out}, false,
      [&](Comm comm, CudaStream stream) {
        auto [scaled, fresh] = scaled_sums_.try_emplace({in.dtype, factor.value()}, RedOp{0});
        if (fresh) {
          const ResultCode code = nccl.RedOpCreatePreMulSum(
              &scaled->second, factor.data(), type.value(), kScalarHostImmediate, comm);
          if (code != kSuccess) {
            scaled_sums_.erase(scaled);
            return code;
          }
        }
        return nccl.AllReduce(in.data, out.data, count, type.value(), scaled->second, comm, stream);
      },
      timeout);
}

DeviceGroup::Work NcclGroup::Broadcast(const TensorView& inout, int root, Millis timeout) {
  DAD_RETURN_IF_ERROR(CheckPeer("broadcast", root));
  return Submit(
      "ncclBroadcast", std::array{inout}, false,
      [&](Comm comm, CudaStream stream) {
        return libraries_->nccl.Broadcast(inout.data, inout.data, inout.num_bytes(), kUint8, root,
                                          comm, stream);
      },
      timeout);
}

DeviceGroup::Work NcclGroup::ReduceScatter(const TensorView& in, std::span<const int64_t> counts,
                                           const TensorView& out, ReduceOp op, Millis timeout) {
  const Result<DataType> type = ToNccl(in.dtype);
  if (!type.ok()) return type.status();
  const Result<RedOp> reduction = ToNccl(op, in.dtype);
  if (!reduction.ok()) return reduction.status();
  const bool fits = counts.size() == static_cast<size_t>(size()) &&
                    Sum(counts) == in.num_elements() && in.dtype == out.dtype &&
                    out.num_elements() == counts[static_cast<size_t>(rank())];
  if (!fits) return Bad("reducescatter", "counts do not fit the tensors");
  const auto views = std::array{in, out};
  const NcclApi& nccl = libraries_->nccl;
  if (std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts[0]; })) {
    return Submit(
        "ncclReduceScatter", views, false,
        [&](Comm comm, CudaStream stream) {
          return nccl.ReduceScatter(in.data, out.data, static_cast<size_t>(counts[0]), type.value(),
                                    reduction.value(), comm, stream);
        },
        timeout);
  }
  // NCCL has it for equal blocks only: one reduction per block, in one group.
  return Submit(
      "ncclReduce of each block", views, true,
      [&](Comm comm, CudaStream stream) {
        const std::byte* block = in.bytes();
        for (int root = 0; root < size(); ++root) {
          const auto count = static_cast<size_t>(counts[static_cast<size_t>(root)]);
          if (count == 0) continue;
          const ResultCode code = nccl.Reduce(block, out.data, count, type.value(),
                                              reduction.value(), root, comm, stream);
          if (code != kSuccess) return code;
          block += count * SizeOf(in.dtype);
        }
        return kSuccess;
      },
      timeout);
}

DeviceGroup::Work NcclGroup::AllGatherV(const TensorView& in, std::span<const size_t> counts,
                                        const TensorView& out, Millis timeout) {
  if (counts.size() != static_cast<size_t>(size()) ||
      in.num_bytes() != counts[static_cast<size_t>(rank())]) {
    return Bad("allgather", "counts do not fit the tensors");
  }
  const std::vector<size_t> to_each(counts.size(), in.num_bytes());
  return Exchange("ncclSend, ncclRecv of an allgather", in, to_each, true, out, counts, timeout);
}

DeviceGroup::Work NcclGroup::AllToAllV(const TensorView& in, std::span<const size_t> send_counts,
                                       const TensorView& out,
                                       std::span<const size_t> receive_counts, Millis timeout) {
  const auto members = static_cast<size_t>(size());
  if (send_counts.size() != members || receive_counts.size() != members ||
      Sum(send_counts) != in.num_bytes()) {
    return Bad("alltoall", "counts do not fit the tensors");
  }
  return Exchange("ncclSend, ncclRecv of an alltoall", in, send_counts, false, out, receive_counts,
                  timeout);
}

DeviceGroup::Work NcclGroup::Exchange(std::string what, const TensorView& in,
                                      std::span<const size_t> send_counts, bool same_to_all,
                                      const TensorView& out, std::span<const size_t> receive_counts,
                                      Millis timeout) {
  const auto self = static_cast<size_t>(rank());
  if (Sum(receive_counts) != out.num_bytes() || send_counts[self] != receive_counts[self]) {
    return Bad(what, "counts do not fit the tensors");
  }
  std::vector<Block> blocks;
  const std::byte* send = in.bytes();
  std::byte* receive = out.bytes();
  for (size_t member = 0; member < send_counts.size(); ++member) {
    blocks.push_back({send, send_counts[member], receive, receive_counts[member]});
    if (!same_to_all) send += send_counts[member];
    receive += receive_counts[member];
  }
  const auto enqueue = [&](Comm comm, CudaStream stream) {
    const NcclApi& nccl = libraries_->nccl;
    for (size_t member = 0; member < blocks.size(); ++member) {
      const Block& block = blocks[member];
      if (member == self) {
        if (block.receive_bytes == 0 || block.receive == block.send) continue;
        const CudaError error = libraries_->cuda.MemcpyAsync(
            block.receive, block.send, block.receive_bytes, kCudaMemcpyDefault, stream);
        if (error != kCudaSuccess) return ResultCode{1};  // ncclUnhandledCudaError
        continue;
      }
      // Both sides know when there is nothing to send.
      const int peer = static_cast<int>(member);
      if (block.send_bytes != 0) {
        const ResultCode code = nccl.Send(block.send, block.send_bytes, kUint8, peer, comm, stream);
        if (code != kSuccess) return code;
      }
      if (block.receive_bytes != 0) {
        const ResultCode code =
            nccl.Recv(block.receive, block.receive_bytes, kUint8, peer, comm, stream);
        if (code != kSuccess) return code;
      }
    }
    return kSuccess;
  };
  return Submit(std::move(what), std::array{in, out}, true, enqueue, timeout);
}

DeviceGroup::Work NcclGroup::Send(const TensorView& in, int peer, Millis timeout) {
  DAD_RETURN_IF_ERROR(CheckPeer("send", peer));
  return Submit(
      "ncclSend", std::array{in}, false,
      [&](Comm comm, CudaStream stream) {
        return libraries_->nccl.Send(in.data, in.num_bytes(), kUint8, peer, comm, stream);
      },
      timeout);
}

DeviceGroup::Work NcclGroup::Receive(const TensorView& out, int peer, Millis timeout) {
  DAD_RETURN_IF_ERROR(CheckPeer("receive", peer));
  return Submit(
      "ncclRecv", std::array{out}, false,
      [&](Comm comm, CudaStream stream) {
        return libraries_->nccl.Recv(out.data, out.num_bytes(), kUint8, peer, comm, stream);
      },
      timeout);
}

}  // namespace dad::nccl
