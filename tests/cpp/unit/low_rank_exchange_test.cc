// rank-dAD and int8: what is sent and what is kept add up to the gradient.
#include <cmath>

#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

using Vector = std::vector<double>;

constexpr int64_t kOut = 11;
constexpr int64_t kIn = 17;
constexpr int64_t kColumns = kIn + 1;

// W ranks with a layer of kOut x kIn and a bias, in float64.
class Ranks {
 public:
  Ranks(int size, const std::string& options, DType dtype = DType::kFloat64)
      : spec_(Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {kOut * kColumns})),
        members_(
            (spec_.method = "low_rank;" + options + ";layer=11x17:bias", MakeMembers(spec_, size))),
        memory_(static_cast<size_t>(size)),
        total_(kOut * kColumns),
        applied_(kOut * kColumns) {}

  // A step with random rows; the mean gradient is added to what was asked for in all.
  std::vector<Status> Step(std::mt19937& random, const std::vector<int64_t>& rows,
                           const std::vector<bool>& joined = {}, const Tamper& tamper = {},
                           bool counts = true) {
    for (size_t r = 0; r < members_.size(); ++r) {
      auto& memory = memory_[r];
      memory.clear();
      LayerInput layer;
      RowsSegment segment;
      segment.a = New(memory, {rows[r], kIn}, random);
      segment.d = New(memory, {rows[r], kOut}, random);
      if (poison_ == static_cast<int>(r)) memory[0].Set(0, INFINITY);
      if (rows[r] > 0) layer.rows = {segment};
      layer.output = New(memory, {kOut, kIn}, random);
      layer.output_bias = New(memory, {kOut}, random);
      members_[r].mine.layers = {layer};
      const bool has_joined = !joined.empty() && joined[r];
      if (counts && !has_joined) Count(memory, rows[r]);
    }
    const auto status = RunStep(members_, spec_.dtype, joined, tamper);
    if (AnyFailed(status) || !counts) return status;
    const size_t shown = !joined.empty() && joined[0] ? 1 : 0;
    for (int64_t i = 0; i < kOut; ++i) {
      for (int64_t j = 0; j < kIn; ++j) {
        applied_[static_cast<size_t>(i * kColumns + j)] += memory_[shown][2].At(i * kIn + j);
      }
      applied_[static_cast<size_t>(i * kColumns + kIn)] += memory_[shown][3].At(i);
    }
    return status;
  }

  void ExpectSameBits(const std::vector<bool>& joined = {}) const {
    const size_t first = !joined.empty() && joined[0] ? 1 : 0;
    for (size_t r = first; r < memory_.size(); ++r) {
      if (!joined.empty() && joined[r]) continue;
      EXPECT_EQ(memory_[r][2].bytes(), memory_[first][2].bytes()) << "rank " << r;
      EXPECT_EQ(memory_[r][3].bytes(), memory_[first][3].bytes()) << "rank " << r;
    }
  }

  // What is kept: E_o + (1/W) Σ E_w, in the layout of the totals.
  Vector Kept() const {
    Vector kept(kOut * kColumns);
    for (const Member& member : members_) {
      const auto state = member.states->Export({0, 0, "fc1.weight"});
      AddSide(state, "rank_", 1.0 / static_cast<double>(members_.size()), kept);
      AddSide(state, "owner_", 1.0, kept);
    }
    return kept;
  }

  void ExpectNothingLost(double tolerance) const {
    const Vector kept = Kept();
    for (size_t i = 0; i < total_.size(); ++i) {
      ASSERT_NEAR(applied_[i] + kept[i], total_[i], tolerance) << i;
    }
  }

  // |applied - asked for|, in the largest element.
  double Behind() const {
    double worst = 0;
    for (size_t i = 0; i < total_.size(); ++i) {
      worst = std::max(worst, std::fabs(applied_[i] - total_[i]));
    }
    return worst;
  }

  std::vector<Member>& members() { return members_; }
  std::vector<std::deque<Tensor>>& memory() { return memory_; }
  const TensorSpec& spec() const { return spec_; }
  void Poison(int rank) { poison_ = rank; }
  void Forget() {
    std::fill(applied_.begin(), applied_.end(), 0);
    std::fill(total_.begin(), total_.end(), 0);
  }
  // The last step was not applied after all.
  void TakeBack() {
    for (int64_t i = 0; i < kOut; ++i) {
      for (int64_t j = 0; j < kIn; ++j) {
        applied_[static_cast<size_t>(i * kColumns + j)] -= memory_[0][2].At(i * kIn + j);
      }
      applied_[static_cast<size_t>(i * kColumns + kIn)] -= memory_[0][3].At(i);
    }
    for (Member& member : members_) member.states->ReturnLast(0, 0);
  }
  void Remake(const std::string& options) {
    spec_.method = "low_rank;" + options + ";layer=11x17:bias";
    for (Member& member : members_) {
      const ExchangeEnv env{0, 0, BestCpuLevel(), member.states.get()};
      member.exchange = MakeExchange(spec_, {}, 1, env).value();
    }
  }

 private:
  TensorView New(std::deque<Tensor>& memory, Shape shape, std::mt19937& random) {
    memory.emplace_back(spec_.dtype, std::move(shape));
    memory.back().FillRandom(random, -1, 1);
    return memory.back().View();
  }
  void Count(std::deque<Tensor>& memory, int64_t rows) {
    const double weight = 1.0 / static_cast<double>(members_.size());
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t i = 0; i < kOut; ++i) {
        const double d = memory[1].At(k * kOut + i) * weight;
        for (int64_t j = 0; j < kIn; ++j) {
          total_[static_cast<size_t>(i * kColumns + j)] += d * memory[0].At(k * kIn + j);
        }
        total_[static_cast<size_t>(i * kColumns + kIn)] += d;
      }
    }
  }
  static void AddSide(const std::vector<StateTensor>& state, const std::string& prefix,
                      double weight, Vector& kept) {
    auto find = [&](const std::string& name) -> const StateTensor* {
      for (const StateTensor& tensor : state) {
        if (tensor.name == prefix + name) return &tensor;
      }
      return nullptr;
    };
    auto at = [](const StateTensor& tensor, int64_t i) {
      double x = 0;
      std::memcpy(&x, tensor.bytes.data() + static_cast<size_t>(i) * sizeof x, sizeof x);
      return x;
    };
    if (const StateTensor* residual = find("residual")) {
      for (int64_t i = 0; i < kOut; ++i) {
        for (int64_t j = 0; j < kIn; ++j) {
          kept[static_cast<size_t>(i * kColumns + j)] += weight * at(*residual, i * kIn + j);
        }
        kept[static_cast<size_t>(i * kColumns + kIn)] += weight * at(*residual, kOut * kIn + i);
      }
    }
    for (const auto& [name, sign] : {std::pair<std::string, double>{"pending", -1}, {"rows", 1}}) {
      const StateTensor* d = find(name + "_d");
      const StateTensor* a = find(name + "_a");
      if (d == nullptr) continue;
      for (int64_t k = 0; k < d->shape[0]; ++k) {
        for (int64_t i = 0; i < kOut; ++i) {
          for (int64_t j = 0; j < kColumns; ++j) {
            kept[static_cast<size_t>(i * kColumns + j)] +=
                weight * sign * at(*d, k * kOut + i) * at(*a, k * kColumns + j);
          }
        }
      }
    }
  }

  TensorSpec spec_;
  std::vector<Member> members_;
  std::vector<std::deque<Tensor>> memory_;  // a, d, output, output of the bias
  Vector total_;
  Vector applied_;
  int poison_ = -1;
};

TEST(LowRankExchangeTest, GatherOfFullRankIsExact) {
  std::mt19937 random(1);
  Ranks ranks(3, "rank=11;wire=fp32;combine=gather;feedback=none");
  for (int step = 0; step < 3; ++step) {
    ExpectAllOk(ranks.Step(random, {4, 0, 7}));
    ranks.ExpectSameBits();
    EXPECT_LT(ranks.Behind(), 1e-11);
  }
}

TEST(LowRankExchangeTest, OwnerOfFullRankIsExact) {
  std::mt19937 random(2);
  Ranks ranks(4, "rank=18;wire=fp32;combine=owner;owner=2;feedback=none");
  for (int step = 0; step < 3; ++step) {
    ExpectAllOk(ranks.Step(random, {4, 1, 7, 3}));
    ranks.ExpectSameBits();
    EXPECT_LT(ranks.Behind(), 1e-11);
  }
}

// What found nothing once would never find anything again.
TEST(LowRankExchangeTest, PowerStartsAnewWhereThereWasNothing) {
  std::mt19937 random(5);
  Ranks ranks(2, "rank=11;combine=power");
  ranks.Step(random, {0, 0});
  ranks.Step(random, {1, 0});
  ranks.Step(random, {7, 9});
  ranks.ExpectSameBits();
  EXPECT_LT(ranks.Behind(), 1e-9);
}

class IdentityTest : public ::testing::TestWithParam<std::string> {};

TEST_P(IdentityTest, WhatWasSentAndWhatIsKeptAddUpToTheGradient) {
  for (int size : {1, 2, 3, 4}) {
    std::mt19937 random(3);
    Ranks ranks(size, GetParam());
    const std::vector<std::vector<int64_t>> rows = {{3, 2, 0, 5}, {1, 4, 2, 0}, {0, 0, 0, 0}};
    for (int step = 0; step < 30; ++step) {
      ExpectAllOk(ranks.Step(random, rows[static_cast<size_t>(step % 3)]));
      ranks.ExpectSameBits();
      ASSERT_NO_FATAL_FAILURE(ranks.ExpectNothingLost(1e-10)) << size << " ranks, step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, IdentityTest,
                         ::testing::Values("rank=2;wire=int4", "rank=4;wire=int8;iterations=2",
                                           "rank=3;wire=bf16", "rank=1;wire=fp32",
                                           "rank=4;wire=int4;tol=0.3",
                                           "rank=8;wire=int4;energy=0.5",
                                           "rank=2;wire=int4;combine=gather",
                                           "rank=2;wire=fp32;combine=power", "rank=40;wire=int4"));

TEST(LowRankExchangeTest, WithFeedbackItKeepsUpWithTheGradient) {
  std::mt19937 random(4);
  Ranks ranks(4, "rank=4;wire=int4");
  for (int step = 0; step < 40; ++step) ExpectAllOk(ranks.Step(random, {4, 4, 4, 4}));
  // The sum of 40 random gradients is far larger than what is behind.
  const double behind = ranks.Behind();
  ranks.Forget();
  for (int step = 0; step < 40; ++step) ExpectAllOk(ranks.Step(random, {0, 0, 0, 0}));
  EXPECT_LT(ranks.Behind(), behind * 1.5);  // nothing new came; what was kept has been sent
  const Vector kept = ranks.Kept();
  double worst = 0;
  for (double x : kept) worst = std::max(worst, std::fabs(x));
  EXPECT_LT(worst, behind / 20);
}

TEST(LowRankExchangeTest, ReportsThePartOfTheEnergyThatItSent) {
  const auto captured = [](const std::string& options, int owner) {
    std::mt19937 random(4);
    Ranks ranks(4, options);
    EXPECT_LT(ranks.members()[0].report.captured, 0);  // nothing was measured yet
    for (int step = 0; step < 17; ++step) ExpectAllOk(ranks.Step(random, {9, 9, 9, 9}));
    return ranks.members()[static_cast<size_t>(owner)].report.captured;
  };
  // Each rank brings 9 directions of 11. With all of them sent, only rounding is left.
  EXPECT_GT(captured("rank=40;wire=fp32;combine=gather", 0), 0.999);
  const double of_four = captured("rank=4;wire=fp32;combine=gather", 0);
  const double of_one = captured("rank=1;wire=fp32;combine=gather", 0);
  EXPECT_GT(of_one, 0.05);
  EXPECT_LT(of_one, of_four);
  EXPECT_LT(of_four, 0.999);
  // The owner sends on a part of what it was sent.
  EXPECT_LT(captured("rank=1;wire=fp32;combine=owner;owner=2", 2),
            captured("rank=1;wire=fp32;combine=owner;owner=2", 1));
}

TEST(LowRankExchangeTest, ResidualAsRowsForgetsLittle) {
  std::mt19937 random(4);
  Ranks ranks(3, "rank=2;wire=int8;feedback=rows");
  for (int step = 0; step < 20; ++step) {
    ExpectAllOk(ranks.Step(random, {2, 2, 2}));
    ranks.ExpectSameBits();
  }
  const Vector kept = ranks.Kept();
  EXPECT_TRUE(std::any_of(kept.begin(), kept.end(), [](double x) { return x != 0; }));
}

TEST(LowRankExchangeTest, AJoinedOwnerServesAndKeepsItsResidual) {
  std::mt19937 random(5);
  Ranks ranks(3, "rank=3;wire=int4;owner=1");
  for (int step = 0; step < 4; ++step) ExpectAllOk(ranks.Step(random, {3, 3, 3}));
  const std::vector<bool> joined = {false, true, false};
  for (int step = 0; step < 4; ++step) {
    ExpectAllOk(ranks.Step(random, {3, 3, 3}, joined));
    ranks.ExpectSameBits(joined);
    ranks.ExpectNothingLost(1e-10);
  }
}

TEST(LowRankExchangeTest, ANewOwnerLosesNothing) {
  std::mt19937 random(6);
  Ranks ranks(3, "rank=2;wire=int4;owner=1");
  for (int step = 0; step < 4; ++step) ExpectAllOk(ranks.Step(random, {3, 3, 3}));
  ranks.Remake("rank=2;wire=int4;owner=2");
  for (int step = 0; step < 4; ++step) {
    ExpectAllOk(ranks.Step(random, {3, 3, 3}));
    ranks.ExpectNothingLost(1e-10);
  }
}

class NotFiniteTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NotFiniteTest, AllRanksGetNaNAndNoStateChanges) {
  for (int poisoned : {0, 2}) {
    std::mt19937 random(7);
    Ranks ranks(3, GetParam() + ";owner=2");
    for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random, {3, 3, 3}));
    ranks.Poison(poisoned);
    ExpectAllOk(ranks.Step(random, {3, 3, 3}, {}, {}, /*counts=*/false));
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(std::isnan(ranks.memory()[r][2].At(0))) << r;
      EXPECT_TRUE(std::isnan(ranks.memory()[r][3].At(kOut - 1))) << r;
      EXPECT_TRUE(ranks.members()[r].report.not_finite) << r;
    }
    ranks.Poison(-1);
    ranks.ExpectNothingLost(1e-10);
    for (int step = 0; step < 3; ++step) {
      ExpectAllOk(ranks.Step(random, {3, 3, 3}));
      ranks.ExpectSameBits();
      ranks.ExpectNothingLost(1e-10);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, NotFiniteTest,
                         ::testing::Values("rank=2;wire=int4", "rank=2;wire=int8;combine=gather",
                                           "rank=2;wire=fp32;combine=power"));

TEST(LowRankExchangeTest, AMeanThatWasNotUsedReturnsToTheResiduals) {
  for (const char* options : {"rank=2;wire=int4;owner=1", "rank=2;wire=int4;combine=gather",
                              "rank=2;wire=fp32;combine=power"}) {
    std::mt19937 random(8);
    Ranks ranks(3, options);
    for (int step = 0; step < 6; ++step) {
      ExpectAllOk(ranks.Step(random, {3, 3, 3}));
      if (step % 2 == 1) ranks.TakeBack();
      ASSERT_NO_FATAL_FAILURE(ranks.ExpectNothingLost(1e-10)) << options;
    }
  }
}

TEST(LowRankExchangeTest, AResumedRunIsTheRunThatWentOn) {
  for (const char* options : {"rank=2;wire=int4;owner=1", "rank=2;wire=int4;combine=gather",
                              "rank=3;wire=int8;feedback=rows", "rank=2;wire=fp32;combine=power"}) {
    std::mt19937 random(9);
    Ranks straight(3, options, DType::kFloat32);
    for (int step = 0; step < 5; ++step) ExpectAllOk(straight.Step(random, {3, 2, 3}));
    Ranks resumed(3, options, DType::kFloat32);
    for (size_t r = 0; r < 3; ++r) {
      const StateKey key{0, 0, "fc1.weight"};
      resumed.members()[r].states->Import(key, straight.members()[r].states->Export(key));
    }
    std::mt19937 same = random;
    for (int step = 0; step < 5; ++step) {
      ExpectAllOk(straight.Step(random, {3, 2, 3}));
      ExpectAllOk(resumed.Step(same, {3, 2, 3}));
      for (size_t r = 0; r < 3; ++r) {
        ASSERT_EQ(straight.memory()[r][2].bytes(), resumed.memory()[r][2].bytes()) << options;
      }
    }
  }
}

TEST(LowRankExchangeTest, AStateOfAnotherShapeIsRefused) {
  std::mt19937 random(9);
  Ranks ranks(2, "rank=2");
  ranks.members()[0].states->Import(
      {0, 0, "fc1.weight"}, {{"rank_residual", DType::kFloat64, {3}, std::vector<std::byte>(24)}});
  EXPECT_EQ(ranks.Step(random, {1, 1})[0].code(), StatusCode::kInvalidArgument);
}

TEST(LowRankExchangeTest, MalformedFactorsAreRefused) {
  for (const char* options : {"rank=2;wire=int4;owner=1", "rank=2;wire=fp32;combine=gather",
                              "rank=2;wire=fp32;combine=power"}) {
    for (int round = 0; round < 4; ++round) {
      std::mt19937 random(10);
      Ranks ranks(3, options);
      bool changed = false;
      const auto status =
          ranks.Step(random, {3, 3, 3}, {}, [&](int at, int, int, std::vector<std::byte>& bytes) {
            if (at != round || bytes.empty() || changed) return;
            bytes.pop_back();
            changed = true;
          });
      EXPECT_EQ(AnyFailed(status), changed) << options << " round " << round;
    }
  }
}

TEST(LowRankExchangeTest, RankThatASmallLayerCannotHaveIsCut) {
  std::mt19937 random(11);
  Ranks ranks(2, "rank=200;wire=fp32;feedback=none");
  ExpectAllOk(ranks.Step(random, {30, 30}));
  EXPECT_LT(ranks.Behind(), 1e-10);
  EXPECT_LE(ranks.members()[0].report.effective, kOut);
}

// ---- int8

struct Int8Ranks {
  Int8Ranks(int size, int64_t count, const std::string& options)
      : spec(Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat64, {count})) {
    spec.method = "int8;" + options;
    members = MakeMembers(spec, size);
    for (int r = 0; r < size; ++r) {
      inputs.emplace_back(DType::kFloat64, Shape{count});
      outputs.emplace_back(DType::kFloat64, Shape{count});
    }
    total.assign(static_cast<size_t>(count), 0);
    applied = total;
  }
  std::vector<Status> Step(std::mt19937& random, const std::vector<bool>& joined = {}) {
    for (size_t r = 0; r < members.size(); ++r) {
      inputs[r].FillRandom(random, -3, 3);
      if (poison == static_cast<int>(r)) inputs[r].Set(0, NAN);
      members[r].mine.input = inputs[r].View();
      members[r].mine.output = outputs[r].View();
    }
    const auto status = RunStep(members, DType::kFloat64, joined);
    if (poison >= 0) return status;
    for (size_t i = 0; i < total.size(); ++i) {
      for (size_t r = 0; r < members.size(); ++r) {
        if (!joined.empty() && joined[r]) continue;
        total[i] += inputs[r].At(static_cast<int64_t>(i)) / static_cast<double>(members.size());
      }
      applied[i] += outputs[0].At(static_cast<int64_t>(i));
    }
    return status;
  }
  void ExpectNothingLost() {
    Vector kept(total.size());
    const auto count = static_cast<int64_t>(total.size());
    const auto size = static_cast<int64_t>(members.size());
    size_t owned = 0;
    for (int64_t r = 0; r < size; ++r) {
      for (const StateTensor& tensor :
           members[static_cast<size_t>(r)].states->Export({0, 0, "fc1.weight"})) {
        const bool owner = tensor.name == "owner_residual";
        for (int64_t i = 0; i < tensor.shape[0]; ++i) {
          double x = 0;
          std::memcpy(&x, tensor.bytes.data() + i * 8, 8);
          kept[owner ? owned++ : static_cast<size_t>(i)] +=
              owner ? x : x / static_cast<double>(size);
        }
      }
    }
    EXPECT_EQ(static_cast<int64_t>(owned), count);
    for (size_t i = 0; i < total.size(); ++i)
      ASSERT_NEAR(applied[i] + kept[i], total[i], 1e-11) << i;
  }

  TensorSpec spec;
  std::vector<Member> members;
  std::deque<Tensor> inputs;
  std::deque<Tensor> outputs;
  Vector total;
  Vector applied;
  int poison = -1;
};

TEST(Int8ExchangeTest, WhatWasSentAndWhatIsKeptAddUpToTheGradient) {
  for (int size : {1, 2, 3, 4}) {
    for (int64_t count : {1, 7, 130, 1000}) {
      std::mt19937 random(12);
      Int8Ranks ranks(size, count, "bucket=16");
      for (int step = 0; step < 10; ++step) {
        ExpectAllOk(ranks.Step(random));
        for (int r = 1; r < size; ++r) {
          EXPECT_EQ(ranks.outputs[static_cast<size_t>(r)].bytes(), ranks.outputs[0].bytes());
        }
        ASSERT_NO_FATAL_FAILURE(ranks.ExpectNothingLost()) << size << " ranks, " << count;
      }
    }
  }
}

TEST(Int8ExchangeTest, NaNOnOneRankIsNaNOnAllAndChangesNoState) {
  std::mt19937 random(13);
  Int8Ranks ranks(3, 100, "bucket=8");
  for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random));
  ranks.poison = 1;
  ExpectAllOk(ranks.Step(random));
  for (int r = 0; r < 3; ++r) {
    for (int64_t i : {0, 50, 99}) {
      EXPECT_TRUE(std::isnan(ranks.outputs[static_cast<size_t>(r)].At(i))) << r << " " << i;
    }
    EXPECT_TRUE(ranks.members[static_cast<size_t>(r)].report.not_finite);
  }
  ranks.poison = -1;
  ranks.ExpectNothingLost();
  for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random));
  ranks.ExpectNothingLost();
}

TEST(Int8ExchangeTest, JoinedRanksServeAsOwners) {
  std::mt19937 random(14);
  Int8Ranks ranks(3, 100, "bucket=8");
  for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random));
  for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random, {false, false, true}));
  ranks.ExpectNothingLost();
}

}  // namespace
}  // namespace dad::exchange_test
