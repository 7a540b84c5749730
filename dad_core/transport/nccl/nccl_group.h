// The collectives of a DeviceGroup as calls of NCCL.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "transport/nccl/communicator.h"

namespace dad::nccl {

class NcclGroup : public DeviceGroup {
 public:
  // `submitted` is called after each operation, because the watcher has to check it from now on.
  // `closing` is called when the group is destroyed.
  NcclGroup(std::shared_ptr<const Libraries> libraries, std::shared_ptr<Communicator> communicator,
            std::function<void()> submitted, std::function<void(Communicator*)> closing)
      : libraries_(std::move(libraries)),
        communicator_(std::move(communicator)),
        submitted_(std::move(submitted)),
        closing_(std::move(closing)) {}
  ~NcclGroup() override;

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }

  int device() const override { return communicator_->device(); }
  void* stream() const override { return communicator_->stream(); }

  using DeviceGroup::AllReduce;
  using DeviceGroup::ReduceScatter;
  Work AllReduce(const TensorView& in, const TensorView& out, ReduceOp op, double scale,
                 Millis timeout) override;
  Work AllGatherV(const TensorView& in, std::span<const size_t> counts, const TensorView& out,
                  Millis timeout) override;
  Work Broadcast(const TensorView& inout, int root, Millis timeout) override;
  Work ReduceScatter(const TensorView& in, std::span<const int64_t> counts, const TensorView& out,
                     ReduceOp op, double scale, Millis timeout) override;
  Work AllToAllV(const TensorView& in, std::span<const size_t> send_counts, const TensorView& out,
                 std::span<const size_t> receive_counts, Millis timeout) override;
  Work Exchange(std::span<const Transfer> transfers, std::span<const TensorView> views,
                Millis timeout) override;
  Work Send(const TensorView& in, int peer, Millis timeout) override;
  Work Receive(const TensorView& out, int peer, Millis timeout) override;
  Status status() const override { return communicator_->status(); }

 private:
  Work Submit(std::string what, std::span<const TensorView> views, bool grouped,
              const Communicator::Enqueue& enqueue, Millis timeout);
  // Bytes to and from each member, one block after the other in `in` and `out`. With `same_to_all`,
  // all of `in` goes to every member.
  Work ExchangeBlocks(std::string what, const TensorView& in, std::span<const size_t> send_counts,
                      bool same_to_all, const TensorView& out,
                      std::span<const size_t> receive_counts, Millis timeout);
  Work ExchangeAs(std::string what, std::span<const Transfer> transfers,
                  std::span<const TensorView> views, Millis timeout);
  Status CheckPeer(const char* what, int peer) const;
  // How NCCL reduces contributions that are multiplied by `scale` first. Find completes it with a
  // call on the communicator if there is a scale.
  struct Reduction;
  Result<Reduction> ReductionOf(ReduceOp op, DType dtype, double scale) const;
  ResultCode Find(Reduction& reduction, Comm comm);

  const std::shared_ptr<const Libraries> libraries_;
  const std::shared_ptr<Communicator> communicator_;
  const std::function<void()> submitted_;
  const std::function<void(Communicator*)> closing_;
  // NCCL's sums of scaled contributions, by type and factor; they are destroyed with the
  // communicator. Used while an operation is put on the stream, one at a time.
  std::map<std::pair<DType, double>, RedOp> scaled_sums_;
};

}  // namespace dad::nccl
