#include "exchange/order.h"

#include <cstring>

#include "exchange/shares.h"

namespace dad {
namespace {

constexpr int kFirst = 0;

class OrderExchange final : public Exchange {
 public:
  OrderExchange(const TensorSpec& spec, const ExchangeEnv& env)
      : turn_{spec, 0}, next_turn_(env.next_turn) {}

  Status Begin(const StepInput&, const Group& group) override {
    rank_ = group.rank;
    return Status::Ok();
  }
  int num_rounds() const override { return 2; }

  Status Send(int round, int peer, GatherBuffer& out) override {
    if (Speaks(round, rank_, peer) && round == 1) {
      out.Append(std::as_bytes(std::span(&turn_.number, 1)));
    }
    return Status::Ok();
  }
  bool Speaks(int round, int from, int) const override { return round == 0 || from == kFirst; }
  int64_t ReceiveBytes(int round, int peer) const override {
    return round == 1 && peer == kFirst ? sizeof turn_.number : 0;
  }

  Status Receive(int round, std::span<const ByteSpan> shares) override {
    if (round == 0) {
      if (rank_ == kFirst) turn_.number = (*next_turn_)++;
      return Status::Ok();
    }
    if (rank_ == kFirst) return Status::Ok();
    DAD_RETURN_IF_ERROR(CheckShareBytes(turn_.spec, kFirst, shares[kFirst], sizeof turn_.number));
    std::memcpy(&turn_.number, shares[kFirst].data(), sizeof turn_.number);
    return Status::Ok();
  }
  Status Finish() override { return Status::Ok(); }
  const DeviceTurn* device_turn() const override { return &turn_; }

 private:
  DeviceTurn turn_;
  uint64_t* const next_turn_;
  int rank_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> MakeOrderExchange(const TensorSpec& spec, const ExchangeEnv& env) {
  return std::make_unique<OrderExchange>(spec, env);
}

}  // namespace dad
