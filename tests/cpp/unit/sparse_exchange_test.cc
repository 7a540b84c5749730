// The sparse family and QSGD: increments from factors, what is sent and kept, faults. That the
// rules are followed to the bit is checked against a reference in NumPy
// (tests/python/torch/test_torch_sparse_reference.py).
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "codec/accumulate.h"
#include "codec/qsgd.h"
#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

using Vector = std::vector<double>;

constexpr int64_t kOut = 11;
constexpr int64_t kIn = 17;
constexpr int64_t kCount = kOut * kIn + kOut;

// W ranks with a layer of kOut x kIn and a bias.
class SparseRanks {
 public:
  SparseRanks(int size, const std::string& options, DType dtype = DType::kFloat64)
      : spec_(Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {kCount})),
        members_(
            (spec_.method = "sparse;" + options + ";layer=11x17:bias", MakeMembers(spec_, size))),
        memory_(static_cast<size_t>(size)),
        total_(kCount),
        applied_(kCount) {}

  // A step with `rows` random rows on each rank, of `samples` samples.
  std::vector<Status> Step(std::mt19937& random, int64_t rows, int64_t samples,
                           const std::vector<bool>& joined = {}, const Tamper& tamper = {}) {
    for (size_t r = 0; r < members_.size(); ++r) {
      auto& memory = memory_[r];
      memory.clear();
      RowsSegment segment;
      segment.a = New(memory, {rows, kIn}, random);
      segment.d = New(memory, {rows, kOut}, random);
      segment.samples = samples;
      if (poison_ == static_cast<int>(r)) memory[0].Set(3, NAN);
      LayerInput layer;
      layer.rows = {segment};
      layer.output = New(memory, {kOut, kIn}, random);
      layer.output_bias = New(memory, {kOut}, random);
      members_[r].mine.layers = {layer};
    }
    const auto status = RunStep(members_, spec_.dtype, joined, tamper);
    if (AnyFailed(status) || poison_ >= 0) return status;
    for (size_t r = 0; r < members_.size(); ++r) {
      if (joined.empty() || !joined[r]) AddGradient(memory_[r], rows);
    }
    const size_t shown = !joined.empty() && joined[0] ? 1 : 0;
    for (int64_t i = 0; i < kCount; ++i) applied_[static_cast<size_t>(i)] += Output(shown, i);
    return status;
  }

  double Output(size_t rank, int64_t i) const {
    return i < kOut * kIn ? memory_[rank][2].At(i) : memory_[rank][3].At(i - kOut * kIn);
  }

  Vector State(size_t rank, const std::string& name) const {
    for (const StateTensor& tensor : members_[rank].states->Export({0, 0, "fc1.weight"})) {
      if (tensor.name != name) continue;
      Tensor copy(tensor.dtype, tensor.shape);
      std::memcpy(copy.View().data, tensor.bytes.data(), tensor.bytes.size());
      Vector values;
      for (int64_t i = 0; i < copy.size(); ++i) values.push_back(copy.At(i));
      return values;
    }
    return {};
  }

  void ExpectNothingLost(double tolerance) const {
    for (int64_t i = 0; i < kCount; ++i) {
      double kept = 0;
      for (size_t r = 0; r < members_.size(); ++r) {
        kept += State(r, "residual")[static_cast<size_t>(i)] / static_cast<double>(members_.size());
      }
      ASSERT_NEAR(applied_[static_cast<size_t>(i)] + kept, total_[static_cast<size_t>(i)],
                  tolerance)
          << i;
    }
  }

  void ExpectSameBits() const {
    for (size_t r = 1; r < memory_.size(); ++r) {
      EXPECT_EQ(memory_[r][2].bytes(), memory_[0][2].bytes());
      EXPECT_EQ(memory_[r][3].bytes(), memory_[0][3].bytes());
    }
  }

  // Element i of the gradient of one sample's rows [begin, end).
  double Gradient(size_t rank, int64_t begin, int64_t end, int64_t i) const {
    double sum = 0;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t row = i < kOut * kIn ? i / kIn : i - kOut * kIn;
      const double a = i < kOut * kIn ? memory_[rank][0].At(k * kIn + i % kIn) : 1.0;
      sum += memory_[rank][1].At(k * kOut + row) * a;
    }
    return sum;
  }

  void TakeBack() {
    for (int64_t i = 0; i < kCount; ++i) applied_[static_cast<size_t>(i)] -= Output(0, i);
    for (Member& member : members_) member.states->ReturnLast(0, 0);
  }

  std::vector<Member>& members() { return members_; }
  std::vector<std::deque<Tensor>>& memory() { return memory_; }
  void Poison(int rank) { poison_ = rank; }

 private:
  TensorView New(std::deque<Tensor>& memory, Shape shape, std::mt19937& random) {
    Tensor& tensor = memory.emplace_back(spec_.dtype, std::move(shape));
    tensor.FillRandom(random, -1, 1);
    return tensor.View();
  }
  void AddGradient(const std::deque<Tensor>& memory, int64_t rows) {
    const size_t rank = static_cast<size_t>(&memory - memory_.data());
    for (int64_t i = 0; i < kCount; ++i) {
      total_[static_cast<size_t>(i)] +=
          Gradient(rank, 0, rows, i) / static_cast<double>(members_.size());
    }
  }

  TensorSpec spec_;
  std::vector<Member> members_;
  std::vector<std::deque<Tensor>> memory_;
  Vector total_;
  Vector applied_;
  int poison_ = -1;
};

TEST(SparseExchange, VarianceOverRowsAndSamplesIsThatOfTheirGradients) {
  for (const bool by_sample : {false, true}) {
    std::mt19937 random(1);
    // alpha so large that nothing is sent: r and v are the increments.
    SparseRanks ranks(
        2, std::string("rule=vgc;alpha=1e30;zeta=1;variance=") + (by_sample ? "sample" : "row"));
    ExpectAllOk(ranks.Step(random, 12, 4));
    for (size_t r = 0; r < 2; ++r) {
      const Vector residual = ranks.State(r, "residual");
      const Vector variance = ranks.State(r, "variance");
      ASSERT_EQ(residual.size(), static_cast<size_t>(kCount));
      ASSERT_EQ(variance.size(), static_cast<size_t>(kCount));
      const int64_t each = by_sample ? 3 : 1;
      for (int64_t i = 0; i < kCount; ++i) {
        double sum = 0, squares = 0;
        for (int64_t k = 0; k < 12; k += each) {
          const double g = ranks.Gradient(r, k, k + each, i);
          sum += g;
          squares += g * g;
        }
        ASSERT_NEAR(residual[static_cast<size_t>(i)], sum, 1e-12);
        ASSERT_NEAR(variance[static_cast<size_t>(i)], squares, 1e-12);
      }
    }
  }
}

TEST(SparseExchange, NothingIsLostByMethodsWithFeedback) {
  for (const char* rule :
       {"rule=vgc;feedback=1", "rule=vgc;feedback=1;coding=word", "rule=vgc_strom;tau=0.5",
        "rule=vgc_strom;tau_absolute=0.25;variance=sample", "rule=strom;tau=1",
        "rule=strom;tau_absolute=0.5;coding=word", "rule=topk;ratio=0.1;coding=rice"}) {
    SCOPED_TRACE(rule);
    std::mt19937 random(2);
    SparseRanks ranks(3, rule);
    for (int step = 0; step < 30; ++step) {
      ExpectAllOk(ranks.Step(random, 6, 3));
      ranks.ExpectSameBits();
    }
    ranks.ExpectNothingLost(1e-11);
    EXPECT_GT(ranks.members()[0].report.effective, 0.0);
    EXPECT_LT(ranks.members()[0].report.effective, 1.0);
    // A step that is not applied after all.
    ExpectAllOk(ranks.Step(random, 6, 3));
    ranks.TakeBack();
    ranks.ExpectNothingLost(1e-11);
    // A rank that has joined keeps what it has.
    const Vector before = ranks.State(1, "residual");
    ExpectAllOk(ranks.Step(random, 6, 3, {false, true, false}));
    EXPECT_EQ(ranks.State(1, "residual"), before);
    ranks.ExpectNothingLost(1e-11);
  }
}

// The results of a few steps of two ranks with a layer that is large enough for threads.
std::vector<std::vector<std::byte>> LargeSteps(const std::string& rule, bool as_rows, int threads) {
  constexpr int64_t kRows = 5, kM = 1100, kN = 1003;
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {kM * kN});
  spec.method = "sparse;" + rule + ";layer=1100x1003";
  std::vector<Member> members(2);
  for (Member& member : members) {
    const ExchangeEnv env{0, 0, BestCpuLevel(), member.states.get(), threads};
    member.exchange = MakeExchange(spec, {}, 1, env).value();
  }
  std::mt19937 random(11);
  std::vector<std::vector<std::byte>> results;
  for (int step = 0; step < 3; ++step) {
    std::deque<Tensor> memory;
    auto fresh = [&](Shape shape) {
      memory.emplace_back(DType::kFloat32, std::move(shape)).FillRandom(random, -1, 1);
      return memory.back().View();
    };
    for (Member& member : members) {
      LayerInput layer;
      if (as_rows) {
        RowsSegment segment;
        segment.a = fresh({kRows, kN});
        segment.d = fresh({kRows, kM});
        layer.rows = {segment};
      } else {
        layer.dense = fresh({kM, kN});
      }
      memory.emplace_back(DType::kFloat32, Shape{kM, kN});
      layer.output = memory.back().View();
      member.mine.layers = {layer};
    }
    ExpectAllOk(RunStep(members, DType::kFloat32));
    results.push_back(memory.back().bytes());
  }
  return results;
}

TEST(SparseExchange, ThreadsGiveTheSameBits) {
  for (const char* rule :
       {"rule=vgc", "rule=vgc_strom;tau=0.5", "rule=strom;tau=1", "rule=topk;ratio=0.1"}) {
    for (const bool as_rows : {false, true}) {
      SCOPED_TRACE(rule);
      EXPECT_EQ(LargeSteps(rule, as_rows, 1), LargeSteps(rule, as_rows, 4));
    }
  }
}

TEST(SparseExchange, ThePassIsTheSameAtEveryLevel) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (const bool with_squares : {false, true}) {
    for (const int64_t count : {1, 7, 8, 9, 64, 1023, 1024, 1025, 5000}) {
      std::vector<float> g, s, r, v;
      for (int64_t i = 0; i < count; ++i) {
        const float size = std::ldexp(1.0f, static_cast<int>(random() % 60) - 30);
        g.push_back(normal(random) * size);
        s.push_back(normal(random) * normal(random) * size * size);
        s.back() = std::fabs(s.back());
        r.push_back(normal(random) * size);
        v.push_back(std::fabs(normal(random)) * size * size);
      }
      const SelectRule<float> rule = {1e-5f, 1.5, 0.999f};
      std::vector<float> new_r[2], new_v[2];
      Selected<float> selected[2];
      const CpuLevel levels[2] = {CpuLevel::kBaseline, BestCpuLevel()};
      for (int l = 0; l < 2; ++l) {
        new_r[l].resize(g.size());
        new_v[l].resize(g.size());
        AccumulateBlock<float> block;
        block.count = count;
        block.g = g.data();
        block.s = with_squares ? s.data() : nullptr;
        block.scale = 0.75f;
        block.r = r.data();
        block.v = v.data();
        block.new_r = new_r[l].data();
        block.new_v = new_v[l].data();
        block.first = 5;
        block.stream = count > 1000;
        EXPECT_TRUE(Accumulate(levels[l], rule, block, selected[l]));
      }
      EXPECT_EQ(new_r[0], new_r[1]);
      EXPECT_EQ(new_v[0], new_v[1]);
      EXPECT_EQ(selected[0].index, selected[1].index);
      EXPECT_EQ(selected[0].r, selected[1].r);
      EXPECT_EQ(selected[0].v, selected[1].v);
    }
  }
}

TEST(SparseExchange, WhatIsNotFiniteGivesNanEverywhereAndChangesNoState) {
  for (const char* rule : {"rule=vgc", "rule=vgc_strom", "rule=strom", "rule=topk"}) {
    SCOPED_TRACE(rule);
    std::mt19937 random(5);
    SparseRanks ranks(3, rule);
    for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.Step(random, 4, 4));
    std::vector<Vector> before;
    for (size_t r = 0; r < 3; ++r) {
      for (const char* name : {"residual", "variance", "tau"})
        before.push_back(ranks.State(r, name));
    }
    ranks.Poison(1);
    ExpectAllOk(ranks.Step(random, 4, 4));
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(std::isnan(ranks.Output(r, 0)));
      EXPECT_TRUE(std::isnan(ranks.Output(r, kCount - 1)));
      EXPECT_TRUE(ranks.members()[r].report.not_finite);
      EXPECT_EQ(ranks.members()[r].report.not_finite_rank, 1);
      size_t at = 3 * r;
      for (const char* name : {"residual", "variance", "tau"}) {
        EXPECT_EQ(ranks.State(r, name), before[at++]) << name;
      }
    }
  }
}

TEST(SparseExchange, StateIsTwoFloatsForVgcAndOneForTheOthers) {
  for (const auto& [rule, floats] :
       std::vector<std::pair<std::string, int64_t>>{{"rule=vgc", 2},
                                                    {"rule=vgc_strom;tau_absolute=1", 2},
                                                    {"rule=strom;tau_absolute=1", 1},
                                                    {"rule=topk", 1},
                                                    {"rule=topk;feedback=0", 0}}) {
    SCOPED_TRACE(rule);
    std::mt19937 random(6);
    SparseRanks ranks(2, rule, DType::kFloat32);
    ExpectAllOk(ranks.Step(random, 4, 4));
    size_t bytes = 0;
    for (const StateTensor& t : ranks.members()[0].states->Export({0, 0, "fc1.weight"})) {
      bytes += t.bytes.size();
    }
    EXPECT_EQ(bytes, static_cast<size_t>(floats * kCount) * sizeof(float));
  }
}

TEST(SparseExchange, AShareLargerThanDenseIsNotSentAndAsksForAPlan) {
  std::mt19937 random(7);
  // Everything passes, in 32-bit words, and 8 ranks: dense would be a quarter of that.
  SparseRanks ranks(8, "rule=vgc;alpha=0;coding=word", DType::kFloat32);
  ExpectAllOk(ranks.Step(random, 4, 4));
  for (Member& member : ranks.members()) {
    EXPECT_TRUE(member.report.too_large);
    EXPECT_TRUE(member.report.replan);
    EXPECT_EQ(member.report.effective, 0.0);
  }
  ranks.ExpectNothingLost(1e-4);
}

TEST(SparseExchange, MalformedSharesAreRefused) {
  std::mt19937 random(8);
  for (const char* rule : {"rule=vgc;alpha=0.1", "rule=strom;tau=0.1", "rule=topk;ratio=0.2",
                           "rule=vgc_strom;tau_absolute=0.01;coding=word"}) {
    SCOPED_TRACE(rule);
    for (int kind = 0; kind < 4; ++kind) {
      SparseRanks ranks(2, rule);
      bool changed = false;
      const auto status =
          ranks.Step(random, 4, 4, {}, [&](int, int from, int, std::vector<std::byte>& bytes) {
            if (from != 1) return;
            changed = true;
            if (kind == 0) bytes.clear();
            if (kind == 1) bytes.resize(bytes.size() - 1);
            if (kind == 2) bytes.push_back(std::byte{0});
            if (kind == 3) bytes[0] = std::byte{0x80};
          });
      ASSERT_TRUE(changed);
      EXPECT_FALSE(status[0].ok());
      EXPECT_NE(status[0].message().find("rank 1"), std::string::npos) << status[0].ToString();
    }
  }
}

TEST(SparseExchange, OptionsOutOfRangeAreRefused) {
  for (const char* method :
       {"sparse;rule=vgc", "sparse;rule=other;layer=1x1", "sparse;rule=vgc;alpha=-1;layer=1x1",
        "sparse;rule=vgc;zeta=2;layer=1x1", "sparse;rule=topk;ratio=nan;layer=1x1",
        "sparse;rule=vgc;coding=zip;layer=1x1", "sparse;rule=vgc;variance=all;layer=1x1",
        "qsgd;bits=0", "qsgd;bits=9"}) {
    TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {1});
    spec.method = method;
    EXPECT_FALSE(MakeExchange(spec, {}, 1, {}).ok()) << method;
  }
}

// Zeros that take no memory until they are written.
class MappedFloats {
 public:
  explicit MappedFloats(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(float)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : static_cast<float*>(memory);
  }
  ~MappedFloats() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  MappedFloats(const MappedFloats&) = delete;
  float* data() { return data_; }

 private:
  const size_t bytes_;
  float* data_;
};

TEST(SparseExchange, ATensorOver2To28ElementsGoesInChunks) {
#ifdef __SANITIZE_THREAD__
  constexpr int64_t kNeedsGb = 45;  // TSan's notes on what was touched are four times as large
#else
  constexpr int64_t kNeedsGb = 9;
#endif
  const int64_t available = int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  if (available < kNeedsGb << 30) GTEST_SKIP() << "needs " << kNeedsGb << " GB of free memory";
  const int64_t count = (int64_t{1} << 28) + 1000;
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {count});
  spec.method = "sparse;rule=strom;tau=4;layer=" + std::to_string(count) + "x1";
  std::vector<Member> members = MakeMembers(spec, 2);
  MappedFloats input(count), output_a(count), output_b(count);
  ASSERT_NE(input.data(), nullptr);
  const std::vector<int64_t> places = {0, 12345, (1 << 28) - 1, 1 << 28, (1 << 28) + 999};
  for (int64_t place : places) input.data()[place] = -3.0f;
  TensorView view{.data = input.data(), .dtype = DType::kFloat32, .shape = {count}};
  for (size_t r = 0; r < 2; ++r) {
    LayerInput layer;
    layer.dense = view;
    layer.output = view;
    layer.output.data = r == 0 ? output_a.data() : output_b.data();
    members[r].mine.layers = {layer};
  }
  ExpectAllOk(RunStep(members, DType::kFloat32));
  // tau is 4 RMS, tiny here: 8 multiples of it go from each rank.
  const double tau = static_cast<float>(4 * std::sqrt(9.0 * 5 / static_cast<double>(count)));
  for (int64_t place : places) {
    EXPECT_NEAR(output_a.data()[place], -2 * 8 * tau, 1e-5) << place;
    EXPECT_EQ(output_a.data()[place], output_b.data()[place]);
  }
  EXPECT_EQ(output_a.data()[1], 0.0f);
  EXPECT_EQ(output_a.data()[(1 << 28) + 1], 0.0f);
}

TEST(QsgdExchange, IsRightOnAverageAndRepeats) {
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {700});
  for (const int bits : {1, 2, 4, 8}) {
    SCOPED_TRACE(bits);
    spec.method = "qsgd;bits=" + std::to_string(bits) + ";seed=7";
    std::vector<Member> members = MakeMembers(spec, 2);
    std::vector<Tensor> inputs(2), outputs(2);
    std::mt19937 random(9);
    for (size_t r = 0; r < 2; ++r) {
      inputs[r] = Tensor(DType::kFloat32, {700});
      inputs[r].FillRandom(random, -1, 1);
      outputs[r] = Tensor(DType::kFloat32, {700});
      members[r].mine.input = inputs[r].View();
      members[r].mine.output = outputs[r].View();
    }
    Vector sum(700);
    const int steps = 400;
    for (int step = 0; step < steps; ++step) {
      ExpectAllOk(RunStep(members, DType::kFloat32));
      EXPECT_EQ(outputs[0].bytes(), outputs[1].bytes());
      for (int64_t i = 0; i < 700; ++i) sum[static_cast<size_t>(i)] += outputs[0].At(i);
    }
    double worst = 0;
    for (int64_t i = 0; i < 700; ++i) {
      const double mean = (inputs[0].At(i) + inputs[1].At(i)) / 2;
      worst = std::max(worst, std::fabs(sum[static_cast<size_t>(i)] / steps - mean));
    }
    // Five standard deviations of the mean of so many steps: each value moves by less than a level.
    const double level = bits == 1 ? 2.0 : 1.0 / ((1 << (bits - 1)) - 1);
    EXPECT_LT(worst, 5 * level / 2 / std::sqrt(2.0 * steps));
  }
}

TEST(QsgdExchange, WhatIsNotFiniteGivesNanEverywhere) {
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {5});
  spec.method = "qsgd;bits=4";
  std::vector<Member> members = MakeMembers(spec, 2);
  std::vector<Tensor> inputs(2), outputs(2);
  for (size_t r = 0; r < 2; ++r) {
    inputs[r] = Tensor(DType::kFloat32, {5});
    outputs[r] = Tensor(DType::kFloat32, {5});
    members[r].mine.input = inputs[r].View();
    members[r].mine.output = outputs[r].View();
  }
  inputs[1].Set(2, INFINITY);
  ExpectAllOk(RunStep(members, DType::kFloat32));
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_TRUE(std::isnan(outputs[r].At(0)));
    EXPECT_EQ(members[r].report.not_finite_rank, 1);
  }
}

}  // namespace
}  // namespace dad::exchange_test
