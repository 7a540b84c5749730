#include <gtest/gtest.h>

#include <cmath>

#include "exchange/collective/dense.h"
#include "exchange_harness.h"
#include "linalg/reduce.h"

namespace dad {
namespace {

using namespace exchange_test;  // NOLINT: the harness

struct World {
  std::vector<Tensor> inputs, outputs;
};

World MakeWorld(const TensorSpec& spec, std::vector<Member>& members, bool in_place,
                uint32_t seed = 1) {
  World world;
  std::mt19937 random(seed);
  for (size_t r = 0; r < members.size(); ++r) {
    world.inputs.emplace_back(spec.dtype, spec.shape);
    const bool is_unsigned = IsUnsigned(spec.dtype);
    world.inputs.back().FillRandom(random, is_unsigned ? 0 : -9, 10);
    world.outputs.emplace_back(spec.dtype, spec.shape);
  }
  for (size_t r = 0; r < members.size(); ++r) {
    members[r].mine.input = world.inputs[r].View();
    members[r].mine.output = in_place ? world.inputs[r].View() : world.outputs[r].View();
  }
  return world;
}

TensorSpec Float32Sum(Shape shape) {
  return Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, std::move(shape));
}

Tensor Expected(const TensorSpec& spec, std::vector<Tensor>& inputs,
                const std::vector<bool>& joined) {
  std::vector<const void*> pointers;
  for (size_t r = 0; r < inputs.size(); ++r) {
    pointers.push_back(!joined.empty() && joined[r] ? nullptr : inputs[r].View().data);
  }
  Tensor out(spec.dtype, spec.shape);
  ReduceInRankOrder(pointers, out.View().data, out.size(), spec.dtype, spec.op, spec.prescale,
                    spec.postscale, static_cast<int>(inputs.size()));
  return out;
}

TEST(DenseExchangeTest, BothFormsGiveTheBitsOfTheRankOrderSum) {
  for (DType dtype : AllDTypes()) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (int64_t count : {0, 1, 3, 100, 40001}) {
        for (bool in_place : {false, true}) {
          for (bool direct : {false, true}) {
            const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {count});
            auto members = MakeMembers(spec, size, direct);
            World world = MakeWorld(spec, members, in_place);
            const Tensor expected = Expected(spec, world.inputs, {});
            ExpectAllOk(RunStep(members, dtype));
            for (int r = 0; r < size; ++r) {
              const auto& got = in_place ? world.inputs : world.outputs;
              ASSERT_EQ(got[static_cast<size_t>(r)].bytes(), expected.bytes())
                  << Name(dtype) << " W=" << size << " n=" << count << " rank " << r
                  << (in_place ? " in place" : "") << (direct ? " direct" : " owner");
            }
          }
        }
      }
    }
  }
}

TEST(DenseExchangeTest, EveryOpAndScale) {
  for (ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (bool direct : {false, true}) {
      TensorSpec spec = Spec(OpKind::kAllReduce, op, DType::kFloat32, {5, 7});
      spec.prescale = 0.5;
      spec.postscale = 3;
      auto members = MakeMembers(spec, 3, direct);
      World world = MakeWorld(spec, members, false);
      const Tensor expected = Expected(spec, world.inputs, {});
      ExpectAllOk(RunStep(members, spec.dtype));
      for (const Tensor& out : world.outputs) EXPECT_EQ(out.bytes(), expected.bytes());
    }
  }
}

TEST(DenseExchangeTest, JoinedRanksContributeNothingAndServeAsOwners) {
  for (int size : {2, 3, 4, 7}) {
    for (int64_t count : {0, 2, 1000}) {
      for (bool direct : {false, true}) {
        const TensorSpec spec =
            Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {count});
        auto members = MakeMembers(spec, size, direct);
        World world = MakeWorld(spec, members, true);
        std::vector<bool> joined(static_cast<size_t>(size));
        joined[0] = true;
        if (size > 3) joined[2] = true;
        const Tensor expected = Expected(spec, world.inputs, joined);
        const std::vector<std::byte> untouched = world.inputs[0].bytes();
        ExpectAllOk(RunStep(members, spec.dtype, joined));
        EXPECT_EQ(world.inputs[0].bytes(), untouched);
        for (size_t r = 0; r < joined.size(); ++r) {
          if (joined[r]) continue;
          EXPECT_EQ(world.inputs[r].bytes(), expected.bytes());
        }
      }
    }
  }
}

// What ranks bring to a step and what comes of it, with and without packing: outputs, and the bytes
// that went from each rank to each other.
struct Outcome {
  std::vector<Tensor> outputs;
  size_t sent = 0;
};

Outcome RunOwners(const TensorSpec& spec, int size, bool pack, bool in_place,
                  const std::vector<bool>& joined = {}) {
  auto members = MakeMembers(spec, size);
  for (Member& member : members) {
    const Slice all{0, NumElements(spec.shape)};
    member.exchange = MakeDenseExchange(spec, all, DenseForm::kOwner, pack);
  }
  World world = MakeWorld(spec, members, in_place);
  // Patterns that arithmetic would not keep, where all ranks but one are zero.
  if (spec.op == ReduceOp::kMax && world.inputs[0].size() > 8) {
    world.inputs[0].Set(3, std::nan(""));
    world.inputs[0].Set(5, INFINITY);
  }
  Outcome outcome;
  ExpectAllOk(
      RunStep(members, spec.dtype, joined,
              [&](int, int, int, std::vector<std::byte>& bytes) { outcome.sent += bytes.size(); }));
  outcome.outputs = in_place ? world.inputs : world.outputs;
  return outcome;
}

TEST(DenseExchangeTest, PackedPiecesGiveTheSameBits) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kInt32}) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (int64_t count : {0, 1, 300, 511, 512, 1023, 1793, 40'001}) {
        for (bool in_place : {false, true}) {
          SCOPED_TRACE(std::string(Name(dtype)) + " W=" + std::to_string(size) +
                       " n=" + std::to_string(count) + (in_place ? " in place" : ""));
          const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {count});
          const Outcome plain = RunOwners(spec, size, false, in_place);
          const Outcome packed = RunOwners(spec, size, true, in_place);
          for (size_t r = 0; r < plain.outputs.size(); ++r) {
            ASSERT_EQ(packed.outputs[r].bytes(), plain.outputs[r].bytes()) << "rank " << r;
          }
          const bool packs = (dtype == DType::kFloat32 || dtype == DType::kBFloat16) && size > 1 &&
                             count / size >= 256;
          const bool some_pack = packs || count / size == 255;
          if (packs) {
            EXPECT_LT(packed.sent, plain.sent * 9 / 10);
          } else if (!some_pack) {
            EXPECT_EQ(packed.sent, plain.sent);
          }
        }
      }
    }
  }
}

TEST(DenseExchangeTest, PackedPiecesOfEveryOpScaleAndJoinedRank) {
  for (ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (int size : {2, 3, 4, 7}) {
      for (int joins : {0, 1, 2}) {
        if (joins >= size) continue;
        TensorSpec spec = Spec(OpKind::kAllReduce, op, DType::kFloat32, {71, 131});
        spec.prescale = 0.5;
        spec.postscale = 3;
        std::vector<bool> joined(joins == 0 ? 0 : static_cast<size_t>(size));
        for (int i = 0; i < joins; ++i) joined[static_cast<size_t>(2 * i % size)] = true;
        const Outcome plain = RunOwners(spec, size, false, true, joined);
        const Outcome packed = RunOwners(spec, size, true, true, joined);
        for (size_t r = 0; r < plain.outputs.size(); ++r) {
          ASSERT_EQ(packed.outputs[r].bytes(), plain.outputs[r].bytes())
              << "op " << static_cast<int>(op) << " W=" << size << " joined " << joins << " rank "
              << r;
        }
        EXPECT_LT(packed.sent, plain.sent);
      }
    }
  }
}

TEST(DenseExchangeTest, MalformedPackedPiecesAreRejectedByName) {
  for (int bad_round : {0, 1}) {
    for (int change : {-1, 1}) {
      const TensorSpec spec = Float32Sum({3000});
      auto members = MakeMembers(spec, 3);
      for (Member& member : members) {
        member.exchange = MakeDenseExchange(spec, {0, 3000}, DenseForm::kOwner, true);
      }
      World world = MakeWorld(spec, members, false);
      const auto status = RunStep(
          members, spec.dtype, {}, [&](int round, int from, int to, std::vector<std::byte>& bytes) {
            if (round != bad_round || from != 2 || to != 0) return;
            bytes.resize(static_cast<size_t>(static_cast<int>(bytes.size()) + change));
          });
      EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status[0].message().find("fc1.weight"), std::string::npos);
      EXPECT_NE(status[0].message().find("rank 2"), std::string::npos);
    }
  }
}

// The bytes of a message outlive what they were made from, and the step.
TEST(DenseExchangeTest, PackedPiecesLiveAsLongAsTheirMessage) {
  const TensorSpec spec = Float32Sum({8000});
  auto members = MakeMembers(spec, 2);
  for (Member& member : members) {
    member.exchange = MakeDenseExchange(spec, {0, 8000}, DenseForm::kOwner, true);
  }
  World world = MakeWorld(spec, members, true);
  std::vector<GatherBuffer> messages;
  std::vector<std::vector<std::byte>> before;
  for (int step = 0; step < 2; ++step) {
    for (int round = 0; round < 2; ++round) {
      std::vector<std::vector<std::byte>> bytes(2);
      for (int r = 0; r < 2; ++r) {
        Exchange& exchange = *members[static_cast<size_t>(r)].exchange;
        StepInput input;
        input.mine = &members[static_cast<size_t>(r)].mine;
        if (round == 0) {
          ASSERT_TRUE(exchange.Begin(input, {r, 2, {}}).ok());
        }
        GatherBuffer& out = messages.emplace_back();
        EXPECT_TRUE(exchange.SendsLength(round, 1 - r));
        EXPECT_EQ(exchange.ReceiveBytes(round, 1 - r), -1);
        ASSERT_TRUE(exchange.Send(round, 1 - r, out).ok());
        bytes[static_cast<size_t>(r)] = BytesOf(out);
        before.push_back(BytesOf(out));
      }
      for (int r = 0; r < 2; ++r) {
        std::vector<ByteSpan> shares(2);
        shares[static_cast<size_t>(1 - r)] = bytes[static_cast<size_t>(1 - r)];
        ASSERT_TRUE(members[static_cast<size_t>(r)].exchange->Receive(round, shares).ok());
      }
    }
    for (Member& member : members) ASSERT_TRUE(member.exchange->Finish().ok());
  }
  members.clear();
  world = {};
  for (size_t i = 0; i < messages.size(); ++i) EXPECT_EQ(BytesOf(messages[i]), before[i]);
}

TEST(DenseExchangeTest, SlicesGiveTheBitsOfTheWhole) {
  const TensorSpec spec = Float32Sum({10, 100});
  auto whole = MakeMembers(spec, 3);
  World world = MakeWorld(spec, whole, false);
  const Tensor expected = Expected(spec, world.inputs, {});
  for (Slice slice : {Slice{0, 333}, Slice{333, 1}, Slice{334, 666}}) {
    for (Member& member : whole) {
      member.exchange = MakeDenseExchange(spec, slice, DenseForm::kOwner);
    }
    ExpectAllOk(RunStep(whole, spec.dtype));
  }
  for (const Tensor& out : world.outputs) EXPECT_EQ(out.bytes(), expected.bytes());
}

TEST(DenseExchangeTest, AnExchangeServesManySteps) {
  const TensorSpec spec = Float32Sum({5000});
  auto members = MakeMembers(spec, 4);
  for (uint32_t step = 0; step < 3; ++step) {
    World world = MakeWorld(spec, members, true, step);
    const Tensor expected = Expected(spec, world.inputs, {});
    ExpectAllOk(RunStep(members, spec.dtype));
    for (const Tensor& out : world.inputs) EXPECT_EQ(out.bytes(), expected.bytes());
  }
}

TEST(DenseExchangeTest, TruncatedAndOversizedSharesAreRejected) {
  for (bool direct : {false, true}) {
    for (int bad_round = 0; bad_round < (direct ? 1 : 2); ++bad_round) {
      for (int change : {-1, 1}) {
        const TensorSpec spec = Float32Sum({50});
        auto members = MakeMembers(spec, 3, direct);
        World world = MakeWorld(spec, members, false);
        const auto status =
            RunStep(members, spec.dtype, {},
                    [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                      if (round != bad_round || from != 2 || to != 0) return;
                      bytes.resize(static_cast<size_t>(static_cast<int>(bytes.size()) + change));
                    });
        EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
        EXPECT_NE(status[0].message().find("fc1.weight"), std::string::npos);
        EXPECT_NE(status[0].message().find("rank 2"), std::string::npos);
      }
    }
  }
}

TEST(DenseExchangeTest, OwnerFormSendsResultsFromItsOwnMemory) {
  const TensorSpec spec = Float32Sum({8000});
  auto members = MakeMembers(spec, 2);
  World world = MakeWorld(spec, members, false);
  Exchange& exchange = *members[0].exchange;
  StepInput input;
  input.mine = &members[0].mine;
  ASSERT_TRUE(exchange.Begin(input, {0, 2, {}}).ok());
  const std::vector<std::byte> piece(4000 * 4);
  const ByteSpan shares[] = {{}, piece};
  ASSERT_TRUE(exchange.Receive(0, shares).ok());
  GatherBuffer out;
  ASSERT_TRUE(exchange.Send(1, 1, out).ok());
  const auto* output = static_cast<const std::byte*>(members[0].mine.output.data);
  for (ByteSpan bytes : out.Pieces()) {
    EXPECT_TRUE(bytes.data() < output || bytes.data() >= output + 8000 * 4);
  }
}

TEST(DenseExchangeTest, WrongMemoryIsRefusedAtTheBeginning) {
  const TensorSpec spec = Float32Sum({8});
  auto members = MakeMembers(spec, 1);
  Tensor input(DType::kFloat32, {8}), small(DType::kFloat32, {7});
  StepInput step;
  Contribution mine{.input = input.View(), .output = small.View(), .splits = {}};
  step.mine = &mine;
  EXPECT_EQ(members[0].exchange->Begin(step, {}).code(), StatusCode::kInvalidArgument);
  mine = {.input = small.View(), .output = small.View(), .splits = {}};
  EXPECT_EQ(members[0].exchange->Begin(step, {}).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dad
