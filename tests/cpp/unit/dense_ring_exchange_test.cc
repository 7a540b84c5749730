#include <gtest/gtest.h>

#include <cmath>

#include "exchange/collective/dense_ring.h"
#include "exchange_harness.h"
#include "linalg/reduce.h"
#include "runtime/start_up.h"
#include "tests/cpp/engine/engine_fixture.h"

namespace dad {
namespace {

using namespace exchange_test;  // NOLINT: the harness
using std::chrono::milliseconds;
using std::chrono::seconds;

// All ranks of a ring with what they contribute.
struct Ring {
  Ring(const TensorSpec& spec, int size, bool in_place, bool pack = false) : members(size) {
    std::mt19937 random(1);
    for (int r = 0; r < size; ++r) {
      inputs.emplace_back(spec.dtype, spec.shape);
      inputs.back().FillRandom(random, -9, 10);
      outputs.emplace_back(spec.dtype, spec.shape);
    }
    for (size_t r = 0; r < members.size(); ++r) {
      members[r].mine.input = inputs[r].View();
      members[r].mine.output = in_place ? inputs[r].View() : outputs[r].View();
      members[r].exchange = MakeDenseRingExchange(spec, {0, NumElements(spec.shape)}, pack);
    }
    before = inputs;
  }

  std::vector<Member> members;
  std::vector<Tensor> inputs, outputs, before;
};

Tensor ByOwners(const TensorSpec& spec, std::vector<Tensor>& inputs,
                const std::vector<bool>& joined = {}) {
  std::vector<const void*> pointers;
  for (size_t r = 0; r < inputs.size(); ++r) {
    pointers.push_back(!joined.empty() && joined[r] ? nullptr : inputs[r].View().data);
  }
  Tensor out(spec.dtype, spec.shape);
  ReduceInRankOrder(pointers, out.View().data, out.size(), spec.dtype, spec.op, spec.prescale,
                    spec.postscale, static_cast<int>(inputs.size()));
  return out;
}

// Sums of values up to 10 from up to 7 ranks; products are larger.
void ExpectNear(const Tensor& got, const Tensor& expected, const TensorSpec& spec) {
  const double epsilon = spec.dtype == DType::kFloat32 ? 1e-5 : 1e-13;
  for (int64_t i = 0; i < got.size(); ++i) {
    const double tolerance = epsilon * std::max(10.0, std::abs(expected.At(i)));
    ASSERT_NEAR(got.At(i), expected.At(i), tolerance) << "element " << i;
  }
}

TEST(DenseRingExchangeTest, EqualsOwnersToRoundingWithTheSameBitsOnAllRanks) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (int64_t count : {0, 1, 3, 100, 40001}) {
        for (bool in_place : {false, true}) {
          SCOPED_TRACE(std::string(Name(dtype)) + " W=" + std::to_string(size) +
                       " n=" + std::to_string(count) + (in_place ? " in place" : ""));
          const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {count});
          Ring ring(spec, size, in_place);
          ExpectAllOk(RunStep(ring.members, dtype));
          const auto& got = in_place ? ring.inputs : ring.outputs;
          ExpectNear(got[0], ByOwners(spec, ring.before), spec);
          for (const Tensor& tensor : got) ASSERT_EQ(tensor.bytes(), got[0].bytes());
        }
      }
    }
  }
}

TEST(DenseRingExchangeTest, EveryOpAndScale) {
  for (ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (double prescale : {1.0, 0.5, -0.25}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(op)) + " W=" + std::to_string(size) + " " +
                     std::to_string(prescale));
        TensorSpec spec = Spec(OpKind::kAllReduce, op, DType::kFloat64, {71, 131});
        spec.prescale = prescale;
        spec.postscale = 3;
        Ring ring(spec, size, true);
        ExpectAllOk(RunStep(ring.members, spec.dtype));
        ExpectNear(ring.inputs[0], ByOwners(spec, ring.before), spec);
        for (const Tensor& tensor : ring.inputs) ASSERT_EQ(tensor.bytes(), ring.inputs[0].bytes());
      }
    }
  }
}

TEST(DenseRingExchangeTest, JoinedRanksContributeNothingAndPassOn) {
  for (int size : {2, 3, 4, 7}) {
    for (int first : {0, 1, size - 1}) {
      for (int64_t count : {0, 2, 1000}) {
        for (double prescale : {1.0, 0.5}) {
          TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {count});
          spec.prescale = prescale;
          Ring ring(spec, size, true);
          std::vector<bool> joined(static_cast<size_t>(size));
          joined[static_cast<size_t>(first)] = true;
          if (size > 3) joined[static_cast<size_t>((first + 1) % size)] = true;
          ExpectAllOk(RunStep(ring.members, spec.dtype, joined));
          const Tensor expected = ByOwners(spec, ring.before, joined);
          const Tensor* one = nullptr;
          for (size_t r = 0; r < joined.size(); ++r) {
            if (joined[r]) {
              EXPECT_EQ(ring.inputs[r].bytes(), ring.before[r].bytes());
              continue;
            }
            if (one == nullptr) one = &ring.inputs[r];
            EXPECT_EQ(ring.inputs[r].bytes(), one->bytes());
          }
          ExpectNear(*one, expected, spec);
        }
      }
    }
  }
}

TEST(DenseRingExchangeTest, NotANumberReachesAllRanks) {
  const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kMax, DType::kFloat32, {9});
  Ring ring(spec, 4, true);
  for (int64_t i = 0; i < 9; ++i) ring.inputs[static_cast<size_t>(i % 4)].Set(i, std::nan(""));
  ExpectAllOk(RunStep(ring.members, spec.dtype));
  for (const Tensor& tensor : ring.inputs) {
    for (int64_t i = 0; i < 9; ++i) EXPECT_TRUE(std::isnan(tensor.At(i)));
  }
}

TEST(DenseRingExchangeTest, SlicesWriteNothingButTheirElements) {
  const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {10, 100});
  Ring ring(spec, 3, false);
  for (Member& member : ring.members) {
    member.exchange = MakeDenseRingExchange(spec, {333, 301});
  }
  ExpectAllOk(RunStep(ring.members, spec.dtype));
  const Tensor expected = ByOwners(spec, ring.before);
  for (const Tensor& tensor : ring.outputs) {
    for (int64_t i = 0; i < 1000; ++i) {
      ASSERT_NEAR(tensor.At(i), i >= 333 && i < 634 ? expected.At(i) : 0.0, 1e-4);
    }
  }
}

TEST(DenseRingExchangeTest, SendsToTheNextRankOnly) {
  const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {4000});
  Ring ring(spec, 4, false);
  std::vector<size_t> sent(4);
  ExpectAllOk(RunStep(ring.members, spec.dtype, {},
                      [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                        sent[static_cast<size_t>(from)] += bytes.size();
                        const bool next = to == (from + 1) % 4;
                        EXPECT_EQ(bytes.size(), next ? 4000u : 0u);
                        if (round == 0) return;
                        for (const Member& member : ring.members) {
                          EXPECT_EQ(member.exchange->Speaks(round, from, to), next);
                        }
                      }));
  for (size_t bytes : sent) EXPECT_EQ(bytes, 2u * 3 * 4000);
}

// Steps of all ranks with what they sent.
size_t RunCounting(Ring& ring, const TensorSpec& spec, const std::vector<bool>& joined) {
  size_t sent = 0;
  ExpectAllOk(RunStep(ring.members, spec.dtype, joined,
                      [&](int, int, int, std::vector<std::byte>& bytes) { sent += bytes.size(); }));
  return sent;
}

TEST(DenseRingExchangeTest, PackedPiecesGiveTheSameBits) {
  for (ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (int size : {1, 2, 3, 4, 7}) {
      for (int64_t count : {0, 1, 511, 1793, 40'001}) {
        for (bool in_place : {false, true}) {
          for (int joins : {0, 1, 2}) {
            if (joins >= size) continue;
            SCOPED_TRACE(std::to_string(static_cast<int>(op)) + " W=" + std::to_string(size) +
                         " n=" + std::to_string(count) + (in_place ? " in place " : " ") +
                         std::to_string(joins) + " joined");
            TensorSpec spec = Spec(OpKind::kAllReduce, op, DType::kFloat32, {count});
            spec.prescale = joins == 1 ? 0.5 : 1.0;
            spec.postscale = 3;
            std::vector<bool> joined(joins == 0 ? 0 : static_cast<size_t>(size));
            for (int i = 0; i < joins; ++i) joined[static_cast<size_t>(size - 1 - i)] = true;
            Ring plain(spec, size, in_place), packed(spec, size, in_place, true);
            const size_t plain_bytes = RunCounting(plain, spec, joined);
            const size_t packed_bytes = RunCounting(packed, spec, joined);
            for (size_t r = 0; r < plain.members.size(); ++r) {
              ASSERT_EQ(packed.inputs[r].bytes(), plain.inputs[r].bytes());
              ASSERT_EQ(packed.outputs[r].bytes(), plain.outputs[r].bytes());
            }
            if (size > 1 && count / size >= 256) {
              EXPECT_LT(packed_bytes, plain_bytes * 9 / 10);
            }
          }
        }
      }
    }
  }
}

// Not packed again: what another packer made of it is what all get.
TEST(DenseRingExchangeTest, AFinishedPieceGoesOnAsItCame) {
  const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {8000});
  Ring ring(spec, 4, false, true);
  std::vector<std::byte> got[6][4];  // in a round, by a rank
  ExpectAllOk(RunStep(ring.members, spec.dtype, {},
                      [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                        if (bytes.empty()) return;
                        if (round == 3) {
                          // As it is, but as another packer would have it.
                          const int piece = (from - round + 4) % 4;
                          bytes.assign(1, std::byte{0});
                          const auto& values = ring.outputs[static_cast<size_t>(from)].bytes();
                          bytes.insert(bytes.end(), values.begin() + piece * 8000,
                                       values.begin() + (piece + 1) * 8000);
                        }
                        if (round > 3) {
                          EXPECT_TRUE(bytes == got[round - 1][from]) << round << " " << from;
                        }
                        got[round][to] = bytes;
                      }));
  for (const Tensor& tensor : ring.outputs) EXPECT_EQ(tensor.bytes(), ring.outputs[0].bytes());
}

TEST(DenseRingExchangeTest, TruncatedAndOversizedSharesAreRejected) {
  for (int bad_round = 0; bad_round < 8; ++bad_round) {
    for (int change : {-1, 1}) {
      const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {900});
      Ring ring(spec, 3, false, bad_round >= 4);
      const auto status =
          RunStep(ring.members, spec.dtype, {},
                  [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                    if (round != bad_round % 4 || from != 2 || to != 0) return;
                    bytes.resize(static_cast<size_t>(static_cast<int>(bytes.size()) + change));
                  });
      EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status[0].message().find("rank 2"), std::string::npos);
    }
  }
}

TEST(DenseRingExchangeTest, OnlyLargeTensorsOfTypesThatAddInTheirOwnGoRound) {
  auto rounds = [](DType dtype, int64_t count, int64_t ring_bytes) {
    StateStore states;
    ExchangeEnv env{0, 0, BestCpuLevel(), &states};
    env.ring_bytes = ring_bytes;
    const TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, dtype, {count});
    auto exchange = MakeExchange(spec, {0, 10}, 40, env);
    EXPECT_TRUE(exchange.ok());
    EXPECT_TRUE(exchange.value()->Begin({}, {0, 4, {}}).ok());
    return exchange.value()->num_rounds();
  };
  EXPECT_EQ(rounds(DType::kFloat32, 1000, 4000), 6);
  EXPECT_EQ(rounds(DType::kFloat64, 500, 4000), 6);
  EXPECT_EQ(rounds(DType::kFloat32, 999, 4000), 2);
  EXPECT_EQ(rounds(DType::kFloat32, 1000, 0), 2);
  EXPECT_EQ(rounds(DType::kFloat16, 9000, 4000), 2);
  EXPECT_EQ(rounds(DType::kInt32, 9000, 4000), 2);
}

Options Everything() {
  Options options;
  options.fusion_bytes = 4096;  // many slices
  options.ring_bytes = 1;
  return options;
}

TEST(RingEngineTest, SlicesInFlightGiveTheSameBitsOnAllRanksInEveryStep) {
  for (int size : {1, 2, 3, 4, 7}) {
    Job job(size, Everything());
    job.network().SetJitter(std::chrono::microseconds(50), 3);
    std::vector<std::vector<float>> results(static_cast<size_t>(size));
    job.Run([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      std::normal_distribution<float> normal;
      std::vector<float> data(10'007);
      for (float& x : data) x = normal(random);
      std::vector<float> first;
      for (int step = 0; step < 5; ++step) {
        Values a(data), b(std::vector<float>(3, 1.0f));
        auto large = job[rank].Submit(a.AllReduce("large", ReduceOp::kAverage));
        auto small = job[rank].Submit(b.AllReduce("small"));
        ASSERT_TRUE(large->Wait(seconds(20)).ok());
        ASSERT_TRUE(small->Wait(seconds(20)).ok());
        EXPECT_EQ(b.data[2], 1.0f * size);
        if (step == 0) first = a.data;
        ASSERT_EQ(a.data, first);
      }
      results[static_cast<size_t>(rank)] = first;
    });
    for (const auto& result : results) EXPECT_EQ(result, results[0]);
  }
}

TEST(RingEngineTest, JoinedRanksContributeNothing) {
  Job job(4, Everything());
  job.Run([&](int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int step = 0; step < 2 + rank; ++step) {
        Values large(std::vector<float>(5000, 1.0f));
        ASSERT_TRUE(job[rank].Submit(large.AllReduce("b"))->Wait(seconds(20)).ok());
        const int present = step < 2 ? 4 : 5 - step;
        for (float x : large.data) ASSERT_EQ(x, static_cast<float>(present));
      }
      auto join = job[rank].Submit(Bare(OpKind::kJoin, "join" + std::to_string(epoch)));
      ASSERT_TRUE(join->Wait(seconds(20)).ok());
    }
  });
}

TEST(RingEngineTest, KilledPeerFailsEverybodyByName) {
  Job job(4, Everything());
  job.Run([&](int rank) {
    Values warm(std::vector<float>(5000, 1.0f));
    ASSERT_TRUE(job[rank].Submit(warm.AllReduce("v"))->Wait(seconds(20)).ok());
    // A rank may be through with a ring before others are.
    (void)job[rank].Submit(Bare(OpKind::kBarrier, "barrier"))->Wait(seconds(20));
    if (rank == 2) return job.network().Kill(2);
    Values v(std::vector<float>(5000, 1.0f));
    const Status status = job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
    EXPECT_EQ(status.message(), "rank 2 closed the connection");
  });
}

// What rank 0 and rank 1 of a job take an option for.
std::vector<int64_t> Agreed(const Options& first, const Options& second,
                            milliseconds delay = milliseconds(0),
                            int64_t Options::*option = &Options::ring_bytes) {
  LocalNetwork network(2);
  network.SetDelay(delay);
  std::vector<int64_t> agreed(2, -2);
  auto start = [&](int rank, const Options& options) {
    auto transport = network.Connect(rank);
    const Result<StartUp> result = AgreeOnStart(*transport, options, World{}, {});
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    agreed[static_cast<size_t>(rank)] = result.value().options.*option;
  };
  std::thread other([&] { start(1, second); });
  start(0, first);
  other.join();
  return agreed;
}

TEST(RingStartTest, RankZeroDecides) {
  Options first, second;
  first.ring_bytes = 1000;
  second.ring_bytes = 0;
  EXPECT_EQ(Agreed(first, second), (std::vector<int64_t>{1000, 1000}));
  EXPECT_EQ(Agreed(second, first), (std::vector<int64_t>{0, 0}));
}

TEST(PackStartTest, RankZeroDecides) {
  Options first, second;
  first.deterministic = true;
  for (const int64_t pack : {-1, 0, 1}) {
    first.pack = pack;
    second.pack = pack == 0 ? 1 : 0;
    EXPECT_EQ(Agreed(first, second, milliseconds(0), &Options::pack),
              (std::vector<int64_t>{pack, pack}));
  }
}

TEST(PackStartTest, OtherValuesAreRefusedByName) {
  for (const std::string text : {"-1", "0", "1", "2", "-2", "on", "0.5"}) {
    const Result<Options> options = Options::FromEnvironment([&](const char* variable) {
      return std::string_view(variable) == "DAD_PACK" ? text.c_str() : nullptr;
    });
    if (text == "-1" || text == "0" || text == "1") {
      ASSERT_TRUE(options.ok());
      EXPECT_EQ(std::to_string(options.value().pack), text);
    } else {
      EXPECT_EQ(options.status().message(), "DAD_PACK=\"" + text + "\": expected -1, 0 or 1");
    }
  }
}

TEST(RingStartTest, ByDefaultTheRoundTripDecides) {
  EXPECT_EQ(Agreed({}, {}, milliseconds(5)), (std::vector<int64_t>{1 << 20, 1 << 20}));
  Options never;
  never.ring_bytes = 0;
  EXPECT_EQ(Agreed(never, {}, milliseconds(5)), (std::vector<int64_t>{0, 0}));
}

TEST(RingStartTest, NoRingWhereTheClockWouldDecideOnBits) {
  Options options;
  options.ring_bytes = 1000;
  options.deterministic = true;
  EXPECT_EQ(Agreed(options, options), (std::vector<int64_t>{1000, 1000}));
  options.autotune = true;
  EXPECT_EQ(Agreed(options, options), (std::vector<int64_t>{0, 0}));
  options.autotune = false;
  options.ring_bytes = -1;
  EXPECT_EQ(Agreed(options, options, milliseconds(5)), (std::vector<int64_t>{0, 0}));
}

}  // namespace
}  // namespace dad
