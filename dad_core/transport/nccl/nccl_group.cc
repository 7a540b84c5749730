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

// How long work in flight gets when a group is destroyed.
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

// A call on a communicator that does not block may report that it is in progress: the next call of
// a group can follow, and the end of the group is polled.
bool Failed(ResultCode code) { return code != kSuccess && code != kInProgress; }

template <typename T>
T Sum(std::span<const T> counts) {
  return std::accumulate(counts.begin(), counts.end(), T{0});
}

template <typename T>
bool AllEqual(std::span<const T> counts) {
  return std::all_of(counts.begin(), counts.end(), [&](T count) { return count == counts[0]; });
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

// A factor other than 1 needs its own reduction operation in NCCL, which belongs to the
// communicator.
struct NcclGroup::Reduction {
  DType dtype;
  DataType type;
  RedOp op;
  double factor;
};

Result<NcclGroup::Reduction> NcclGroup::ReductionOf(ReduceOp op, DType dtype, double scale) const {
  const Result<DataType> type = ToNccl(dtype);
  if (!type.ok()) return type.status();
  const Result<RedOp> plain = ToNccl(op, dtype);
  if (!plain.ok()) return plain.status();
  if (scale == 1.0) return Reduction{dtype, type.value(), plain.value(), 1.0};
  if (!IsFloating(dtype) || (op != ReduceOp::kSum && op != ReduceOp::kAverage)) {
    return Bad("a reduction",
               std::string("NCCL does not scale the ") + Name(op) + " of " + Name(dtype));
  }
  return Reduction{dtype, type.value(), plain.value(),
                   op == ReduceOp::kAverage ? scale / size() : scale};
}

ResultCode NcclGroup::Find(Reduction& reduction, Comm comm) {
  if (reduction.factor == 1.0) return kSuccess;
  auto [scaled, fresh] = scaled_sums_.try_emplace({reduction.dtype, reduction.factor}, RedOp{0});
  if (fresh) {
    Scalar factor(reduction.dtype, reduction.factor);
    const ResultCode code = libraries_->nccl.RedOpCreatePreMulSum(
        &scaled->second, factor.data(), reduction.type, kScalarHostImmediate, comm);
    if (code != kSuccess) {
      scaled_sums_.erase(scaled);
      return code;
    }
  }
  reduction.op = scaled->second;
  return kSuccess;
}

DeviceGroup::Work NcclGroup::AllReduce(const TensorView& in, const TensorView& out, ReduceOp op,
                                       double scale, Millis timeout) {
  Result<Reduction> reduction = ReductionOf(op, in.dtype, scale);
  if (!reduction.ok()) return reduction.status();
  if (in.dtype != out.dtype || in.num_elements() != out.num_elements()) {
    return Bad("allreduce", "input and output differ");
  }
  Reduction& by = reduction.value();
  return Submit(
      "ncclAllReduce", std::array{in, out}, false,
      [&](Comm comm, CudaStream stream) {
        if (const ResultCode code = Find(by, comm); code != kSuccess) return code;
        return libraries_->nccl.AllReduce(in.data, out.data, static_cast<size_t>(in.num_elements()),
                                          by.type, by.op, comm, stream);
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
                                           const TensorView& out, ReduceOp op, double scale,
                                           Millis timeout) {
  Result<Reduction> reduction = ReductionOf(op, in.dtype, scale);
  if (!reduction.ok()) return reduction.status();
  const bool fits = counts.size() == static_cast<size_t>(size()) &&
                    Sum(counts) == in.num_elements() && in.dtype == out.dtype &&
                    out.num_elements() == counts[static_cast<size_t>(rank())];
  if (!fits) return Bad("reducescatter", "counts do not fit the tensors");
  const auto views = std::array{in, out};
  const NcclApi& nccl = libraries_->nccl;
  Reduction& by = reduction.value();
  if (AllEqual(counts)) {
    return Submit(
        "ncclReduceScatter", views, false,
        [&](Comm comm, CudaStream stream) {
          if (const ResultCode code = Find(by, comm); code != kSuccess) return code;
          return nccl.ReduceScatter(in.data, out.data, static_cast<size_t>(counts[0]), by.type,
                                    by.op, comm, stream);
        },
        timeout);
  }
  // NCCL offers it only for equal blocks: use one reduction per block, in one group.
  return Submit(
      "ncclReduce of each block", views, true,
      [&](Comm comm, CudaStream stream) {
        if (const ResultCode code = Find(by, comm); code != kSuccess) return code;
        const std::byte* block = in.bytes();
        for (int root = 0; root < size(); ++root) {
          const auto count = static_cast<size_t>(counts[static_cast<size_t>(root)]);
          if (count == 0) continue;
          const ResultCode code =
              nccl.Reduce(block, out.data, count, by.type, by.op, root, comm, stream);
          if (Failed(code)) return code;
          block += count * SizeOf(in.dtype);
        }
        return kSuccess;
      },
      timeout);
}

DeviceGroup::Work NcclGroup::AllGatherV(const TensorView& in, std::span<const size_t> counts,
                                        const TensorView& out, Millis timeout) {
  if (counts.size() != static_cast<size_t>(size()) || Sum(counts) != out.num_bytes() ||
      in.num_bytes() != counts[static_cast<size_t>(rank())]) {
    return Bad("allgather", "counts do not fit the tensors");
  }
  if (AllEqual(counts)) {
    return Submit(
        "ncclAllGather", std::array{in, out}, false,
        [&](Comm comm, CudaStream stream) {
          return libraries_->nccl.AllGather(in.data, out.data, in.num_bytes(), kUint8, comm,
                                            stream);
        },
        timeout);
  }
  const std::vector<size_t> to_each(counts.size(), in.num_bytes());
  return ExchangeBlocks("ncclSend, ncclRecv of an allgather", in, to_each, true, out, counts,
                        timeout);
}

DeviceGroup::Work NcclGroup::AllToAllV(const TensorView& in, std::span<const size_t> send_counts,
                                       const TensorView& out,
                                       std::span<const size_t> receive_counts, Millis timeout) {
  const auto members = static_cast<size_t>(size());
  if (send_counts.size() != members || receive_counts.size() != members ||
      Sum(send_counts) != in.num_bytes() || Sum(receive_counts) != out.num_bytes()) {
    return Bad("alltoall", "counts do not fit the tensors");
  }
  return ExchangeBlocks("ncclSend, ncclRecv of an alltoall", in, send_counts, false, out,
                        receive_counts, timeout);
}

DeviceGroup::Work NcclGroup::ExchangeBlocks(std::string what, const TensorView& in,
                                            std::span<const size_t> send_counts, bool same_to_all,
                                            const TensorView& out,
                                            std::span<const size_t> receive_counts,
                                            Millis timeout) {
  std::vector<Transfer> transfers;
  const std::byte* send = in.bytes();
  std::byte* receive = out.bytes();
  for (size_t member = 0; member < send_counts.size(); ++member) {
    transfers.push_back(
        {static_cast<int>(member), send, send_counts[member], receive, receive_counts[member]});
    if (!same_to_all) send += send_counts[member];
    receive += receive_counts[member];
  }
  return ExchangeAs(std::move(what), transfers, std::array{in, out}, timeout);
}

DeviceGroup::Work NcclGroup::Exchange(std::span<const Transfer> transfers,
                                      std::span<const TensorView> views, Millis timeout) {
  return ExchangeAs("ncclSend, ncclRecv", transfers, views, timeout);
}

DeviceGroup::Work NcclGroup::ExchangeAs(std::string what, std::span<const Transfer> transfers,
                                        std::span<const TensorView> views, Millis timeout) {
  for (const Transfer& transfer : transfers) {
    DAD_RETURN_IF_ERROR(CheckPeer("exchange", transfer.peer));
    if (transfer.peer == rank() && transfer.send_bytes != transfer.receive_bytes) {
      return Bad(what, "counts do not fit the tensors");
    }
  }
  const auto enqueue = [&](Comm comm, CudaStream stream) {
    const NcclApi& nccl = libraries_->nccl;
    for (const Transfer& each : transfers) {
      if (each.peer == rank()) {
        if (each.receive_bytes == 0 || each.receive == each.send) continue;
        const CudaError error = libraries_->cuda.MemcpyAsync(
            each.receive, each.send, each.receive_bytes, kCudaMemcpyDefault, stream);
        if (error != kCudaSuccess) return ResultCode{1};  // ncclUnhandledCudaError
        continue;
      }
      // Both sides know when there is nothing to send.
      if (each.send_bytes != 0) {
        const ResultCode code =
            nccl.Send(each.send, each.send_bytes, kUint8, each.peer, comm, stream);
        if (Failed(code)) return code;
      }
      if (each.receive_bytes != 0) {
        const ResultCode code =
            nccl.Recv(each.receive, each.receive_bytes, kUint8, each.peer, comm, stream);
        if (Failed(code)) return code;
      }
    }
    return kSuccess;
  };
  return Submit(std::move(what), views, true, enqueue, timeout);
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
