// Runs the exchanges of all ranks in lock step in one thread, moving bytes between them as
// the executor would: fused messages at odd addresses, destinations where they are offered.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/feedback/state_store.h"
#include "util/half.h"

namespace dad::exchange_test {

// One rank's memory. Elements are set and read as double, whatever their type.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape)
      : view_{.dtype = dtype, .shape = std::move(shape)}, bytes_(view_.num_bytes()) {}

  TensorView View() {
    view_.data = bytes_.data();
    return view_;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }
  const Shape& shape() const { return view_.shape; }
  int64_t size() const { return view_.num_elements(); }

  double At(int64_t i) const {
    switch (view_.dtype) {
      case DType::kUint8: return Read<uint8_t>(i);
      case DType::kInt8: return Read<int8_t>(i);
      case DType::kInt16: return Read<int16_t>(i);
      case DType::kInt32: return Read<int32_t>(i);
      case DType::kInt64: return static_cast<double>(Read<int64_t>(i));
      case DType::kFloat16: return HalfToFloat(Read<uint16_t>(i));
      case DType::kBFloat16: return BFloat16ToFloat(Read<uint16_t>(i));
      case DType::kFloat32: return Read<float>(i);
      case DType::kFloat64: return Read<double>(i);
      case DType::kBool: return Read<uint8_t>(i);
      case DType::kUint16: return Read<uint16_t>(i);
    }
    return 0;
  }

  void Set(int64_t i, double x) {
    switch (view_.dtype) {
      case DType::kUint8: return Write(i, static_cast<uint8_t>(x));
      case DType::kInt8: return Write(i, static_cast<int8_t>(x));
      case DType::kInt16: return Write(i, static_cast<int16_t>(x));
      case DType::kInt32: return Write(i, static_cast<int32_t>(x));
      case DType::kInt64: return Write(i, static_cast<int64_t>(x));
      case DType::kFloat16: return Write(i, FloatToHalf(static_cast<float>(x)));
      case DType::kBFloat16: return Write(i, FloatToBFloat16(static_cast<float>(x)));
      case DType::kFloat32: return Write(i, static_cast<float>(x));
      case DType::kFloat64: return Write(i, x);
      case DType::kBool: return Write(i, static_cast<uint8_t>(x != 0));
      case DType::kUint16: return Write(i, static_cast<uint16_t>(x));
    }
  }

  // Values between low and high; whole numbers for integers, 0 or 1 for bool.
  void FillRandom(std::mt19937& random, double low, double high) {
    std::uniform_real_distribution<double> uniform(low, high);
    for (int64_t i = 0; i < size(); ++i) {
      const double x = uniform(random);
      Set(i, view_.dtype == DType::kBool ? (x > (low + high) / 2) : x);
    }
  }

 private:
  template <typename T>
  T Read(int64_t i) const {
    T x;
    std::memcpy(&x, bytes_.data() + i * static_cast<int64_t>(sizeof x), sizeof x);
    return x;
  }
  template <typename T>
  void Write(int64_t i, T x) {
    std::memcpy(bytes_.data() + i * static_cast<int64_t>(sizeof x), &x, sizeof x);
  }

  TensorView view_;
  std::vector<std::byte> bytes_;
};

// One rank of a lock-step run: its exchange (which may live over several runs), what it
// contributes and what it got.
struct Member {
  Contribution mine;
  Tensor allocated;
  std::vector<int64_t> received_splits;
  StepReport report;
  std::unique_ptr<StateStore> states = std::make_unique<StateStore>();
  std::unique_ptr<Exchange> exchange;
};

// May change what `from` sends to `to` in a round, as a broken peer would.
using Tamper = std::function<void(int round, int from, int to, std::vector<std::byte>& bytes)>;

inline bool AnyFailed(const std::vector<Status>& status) {
  for (const Status& s : status) {
    if (!s.ok()) return true;
  }
  return false;
}

// Gives rank `to` its messages of a round. They are read from the memory they refer to as
// late as this, when ranks before it have taken theirs: what may not change yet shows.
inline std::vector<std::byte> BytesOf(const GatherBuffer& message) {
  std::vector<std::byte> bytes;
  for (ByteSpan piece : message.Pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  return bytes;
}

inline Status Deliver(Member& member, int round, int to,
                      const std::vector<std::vector<GatherBuffer>>& outgoing,
                      const Tamper& tamper) {
  std::vector<std::vector<std::byte>> mail(outgoing.size());
  std::vector<ByteSpan> shares(outgoing.size());
  for (size_t from = 0; from < outgoing.size(); ++from) {
    if (static_cast<int>(from) == to) continue;
    std::vector<std::byte>& bytes = mail[from];
    bytes = BytesOf(outgoing[from][static_cast<size_t>(to)]);
    const int64_t known = member.exchange->ReceiveBytes(round, static_cast<int>(from));
    if (known >= 0) {
      EXPECT_EQ(known, static_cast<int64_t>(bytes.size()));
    }
    if (tamper) tamper(round, static_cast<int>(from), to, bytes);
    bytes.insert(bytes.begin(), std::byte{0});  // so that the share has an odd address
    shares[from] = ByteSpan(bytes).subspan(1);
    if (round == 0) continue;
    const std::span<std::byte> there = member.exchange->Destination(round, static_cast<int>(from));
    if (there.empty() || there.size() != shares[from].size()) continue;
    std::memcpy(there.data(), shares[from].data(), there.size());
    shares[from] = there;
  }
  return member.exchange->Receive(round, shares);
}

// Runs one step and returns how each rank fared; it ends with the first round in which a
// rank fails.
inline std::vector<Status> RunStep(std::vector<Member>& members, DType dtype,
                                   std::vector<bool> joined = {}, const Tamper& tamper = {}) {
  const int size = static_cast<int>(members.size());
  std::vector<Status> status(members.size());
  std::vector<Group> groups(members.size());
  for (int r = 0; r < size; ++r) {
    Member& member = members[static_cast<size_t>(r)];
    Group& group = groups[static_cast<size_t>(r)];
    group = {r, size, joined};
    StepInput input;
    input.mine = group.Joined(r) ? nullptr : &member.mine;
    input.allocate = [&member, dtype](const Shape& shape) -> Result<TensorView> {
      member.allocated = Tensor(dtype, shape);
      return member.allocated.View();
    };
    input.received_splits = &member.received_splits;
    member.report = {};
    input.report = &member.report;
    static uint64_t submits = 0;
    input.submit_id = ++submits;
    // A rank may come to it before its batch begins, or not.
    if (r % 2 == 1 && input.mine != nullptr) member.exchange->Prepare(input, group);
    status[static_cast<size_t>(r)] = member.exchange->Begin(input, group);
  }
  if (AnyFailed(status)) return status;
  const int num_rounds = members[0].exchange->num_rounds();
  for (const Member& member : members) EXPECT_EQ(member.exchange->num_rounds(), num_rounds);

  // A message may leave only when its sender has finished the step.
  std::vector<std::pair<GatherBuffer, std::vector<std::byte>>> slow;
  for (int round = 0; round < num_rounds; ++round) {
    std::vector<std::vector<GatherBuffer>> outgoing(members.size());
    for (size_t from = 0; from < members.size(); ++from) {
      outgoing[from].resize(members.size());
      for (size_t to = 0; to < members.size(); ++to) {
        if (from == to) continue;
        const Status sent =
            members[from].exchange->Send(round, static_cast<int>(to), outgoing[from][to]);
        EXPECT_TRUE(sent.ok()) << sent.ToString();
      }
    }
    for (size_t to = 0; to < members.size(); ++to) {
      status[to] = Deliver(members[to], round, static_cast<int>(to), outgoing, tamper);
    }
    if (AnyFailed(status)) return status;
    // Of a method; dense sums refer to the user's memory, where the result may be by then.
    if (members.front().mine.layers.empty()) continue;
    for (std::vector<GatherBuffer>& from : outgoing) {
      for (GatherBuffer& message : from) {
        std::vector<std::byte> bytes = BytesOf(message);
        slow.emplace_back(std::move(message), std::move(bytes));
      }
    }
  }
  for (int r = 0; r < size; ++r) {
    status[static_cast<size_t>(r)] = members[static_cast<size_t>(r)].exchange->Finish();
  }
  for (const auto& [message, bytes] : slow) EXPECT_EQ(BytesOf(message), bytes);
  return status;
}

inline TensorSpec Spec(OpKind kind, ReduceOp op, DType dtype, Shape shape) {
  TensorSpec spec;
  spec.name = "fc1.weight";
  spec.kind = kind;
  spec.op = op;
  spec.dtype = dtype;
  spec.shape = std::move(shape);
  return spec;
}

// Members with an exchange each, for the whole tensor.
inline std::vector<Member> MakeMembers(const TensorSpec& spec, int size, bool direct = false,
                                       bool pack = false) {
  std::vector<Member> members(static_cast<size_t>(size));
  for (Member& member : members) {
    ExchangeEnv env;
    env.direct_bytes = direct ? 1 : 0;
    env.cpu_level = BestCpuLevel();
    env.states = member.states.get();
    env.pack = pack;
    auto exchange = MakeExchange(spec, {0, NumElements(spec.shape)}, 1, env);
    EXPECT_TRUE(exchange.ok()) << exchange.status().ToString();
    if (exchange.ok()) member.exchange = std::move(exchange).value();
  }
  return members;
}

inline void ExpectAllOk(const std::vector<Status>& status) {
  for (size_t r = 0; r < status.size(); ++r) {
    EXPECT_TRUE(status[r].ok()) << "rank " << r << ": " << status[r].ToString();
  }
}

inline bool IsUnsigned(DType dtype) {
  return dtype == DType::kUint8 || dtype == DType::kUint16 || dtype == DType::kBool;
}

inline const std::vector<DType>& AllDTypes() {
  static const std::vector<DType> all = {DType::kUint8,    DType::kInt8,    DType::kInt16,
                                         DType::kInt32,    DType::kInt64,   DType::kFloat16,
                                         DType::kBFloat16, DType::kFloat32, DType::kFloat64,
                                         DType::kBool,     DType::kUint16};
  return all;
}

}  // namespace dad::exchange_test
