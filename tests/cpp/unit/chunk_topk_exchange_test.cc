// Chunked top-k between ranks: nothing is lost, replicas are equal, and faults end as they should.
#include <cmath>
#include <map>

#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

using Vector = std::vector<double>;

// W ranks with a tensor of `count` elements.
class ChunkRanks {
 public:
  ChunkRanks(int size, const std::string& options, int64_t count, DType dtype = DType::kFloat64,
             ReduceOp op = ReduceOp::kAverage)
      : spec_(Spec(OpKind::kAllReduce, op, dtype, {count})),
        members_((spec_.method = "chunk_topk;" + options, MakeMembers(spec_, size))),
        inputs_(members_.size()),
        outputs_(members_.size()),
        total_(static_cast<size_t>(count)),
        applied_(static_cast<size_t>(count)) {}

  // A step with this gradient of element i on rank r.
  std::vector<Status> Step(const std::function<double(size_t r, int64_t i)>& gradient,
                           const std::vector<bool>& joined = {}, const Tamper& tamper = {}) {
    const double ranks = spec_.op == ReduceOp::kAverage ? static_cast<double>(size()) : 1.0;
    for (size_t r = 0; r < size(); ++r) {
      inputs_[r] = Tensor(spec_.dtype, spec_.shape);
      outputs_[r] = Tensor(spec_.dtype, spec_.shape);
      for (int64_t i = 0; i < count(); ++i) inputs_[r].Set(i, gradient(r, i));
      members_[r].mine.input = inputs_[r].View();
      members_[r].mine.output = outputs_[r].View();
    }
    const auto status = RunStep(members_, spec_.dtype, joined, tamper);
    const size_t shown = !joined.empty() && joined[0] ? 1 : 0;
    if (AnyFailed(status) || members_[shown].report.not_finite) return status;
    for (int64_t i = 0; i < count(); ++i) {
      for (size_t r = 0; r < size(); ++r) {
        if (joined.empty() || !joined[r])
          total_[static_cast<size_t>(i)] += inputs_[r].At(i) / ranks;
      }
      applied_[static_cast<size_t>(i)] += outputs_[shown].At(i);
    }
    return status;
  }
  std::vector<Status> RandomStep(std::mt19937& random, const std::vector<bool>& joined = {}) {
    std::normal_distribution<double> normal;
    return Step([&](size_t, int64_t) { return normal(random); }, joined);
  }

  std::map<std::string, Vector> State(size_t rank) const {
    std::map<std::string, Vector> state;
    for (const StateTensor& tensor : members_[rank].states->Export({0, 0, "fc1.weight"})) {
      Tensor copy(tensor.dtype, tensor.shape);
      std::memcpy(copy.View().data, tensor.bytes.data(), tensor.bytes.size());
      Vector& values = state[tensor.name];
      for (int64_t i = 0; i < copy.size(); ++i) values.push_back(copy.At(i));
    }
    return state;
  }

  // Σ sent + what waits = Σ gradients.
  void ExpectNothingLost(double tolerance) const {
    const double ranks = spec_.op == ReduceOp::kAverage ? static_cast<double>(size()) : 1.0;
    Vector kept(total_.size());
    for (size_t r = 0; r < size(); ++r) {
      const auto state = State(r);
      if (const auto found = state.find("rank_residual"); found != state.end()) {
        for (size_t i = 0; i < kept.size(); ++i) kept[i] += found->second[i] / ranks;
      }
      if (const auto found = state.find("owner_residual"); found != state.end()) {
        const auto begin = static_cast<size_t>(state.at("owner_begin").at(0));
        for (size_t i = 0; i < found->second.size(); ++i) kept[begin + i] += found->second[i];
      }
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      ASSERT_NEAR(applied_[i] + kept[i], total_[i], tolerance) << i;
    }
  }
  void ExpectSameBits(const std::vector<bool>& joined = {}) const {
    const size_t first = !joined.empty() && joined[0] ? 1 : 0;
    for (size_t r = first + 1; r < size(); ++r) {
      if (!joined.empty() && joined[r]) continue;
      EXPECT_EQ(outputs_[r].bytes(), outputs_[first].bytes()) << r;
    }
  }
  void TakeBack() {
    for (int64_t i = 0; i < count(); ++i) applied_[static_cast<size_t>(i)] -= outputs_[0].At(i);
    for (Member& member : members_) member.states->ReturnLast(0, 0);
  }
  // A checkpoint goes into new exchanges.
  void Restart() {
    for (Member& member : members_) {
      const StateKey key{0, 0, "fc1.weight"};
      auto saved = member.states->Export(key);
      member.states = std::make_unique<StateStore>();
      member.states->Import(key, std::move(saved));
      ExchangeEnv env;
      env.cpu_level = BestCpuLevel();
      env.states = member.states.get();
      member.exchange = MakeExchange(spec_, {}, 1, env).value();
    }
  }

  size_t size() const { return members_.size(); }
  int64_t count() const { return NumElements(spec_.shape); }
  std::vector<Member>& members() { return members_; }
  const Tensor& output(size_t rank) const { return outputs_[rank]; }

 private:
  TensorSpec spec_;
  std::vector<Member> members_;
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  Vector total_;
  Vector applied_;
};

const char* const kCombines[] = {"gather", "owner"};

std::string Options(const char* combine, const std::string& rest = "chunk=16;k=3;bits=2") {
  return rest + ";combine=" + combine;
}

TEST(ChunkTopKExchange, NothingIsLost) {
  for (const char* combine : kCombines) {
    for (const int size : {1, 2, 3, 4}) {
      // Of one element, shorter than k and than a chunk, with a short last chunk, of many chunks.
      for (const int64_t count : {1, 2, 15, 16, 17, 200}) {
        for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum}) {
          SCOPED_TRACE(std::string(combine) + " " + std::to_string(size) + " ranks, " +
                       std::to_string(count) + " elements");
          std::mt19937 random(1);
          ChunkRanks ranks(size, Options(combine), count, DType::kFloat64, op);
          for (int step = 0; step < 8; ++step) {
            ExpectAllOk(ranks.RandomStep(random));
            ranks.ExpectSameBits();
          }
          ranks.ExpectNothingLost(1e-12);
          EXPECT_GT(ranks.members()[0].report.effective, 0.0);
          ranks.Restart();
          ExpectAllOk(ranks.RandomStep(random));
          ranks.ExpectNothingLost(1e-12);
          // A step that is not applied after all.
          ExpectAllOk(ranks.RandomStep(random));
          ranks.TakeBack();
          ranks.ExpectNothingLost(1e-12);
        }
      }
    }
  }
}

// Scales and levels have 8 bits each, so of powers of two nothing is rounded in double: what is
// sent and what waits add up to the bit. The other types round what they are given as any sum does.
TEST(ChunkTopKExchange, PowersOfTwoAddUpToTheBit) {
  for (const char* combine : kCombines) {
    for (const auto& [dtype, tolerance] : std::map<DType, double>{{DType::kFloat64, 0},
                                                                  {DType::kFloat32, 1e-6},
                                                                  {DType::kFloat16, 2e-2},
                                                                  {DType::kBFloat16, 1e-1}}) {
      SCOPED_TRACE(std::string(combine) + " " + Name(dtype));
      std::mt19937 random(2);
      ChunkRanks ranks(4, Options(combine), 100, dtype);
      for (int step = 0; step < 10; ++step) {
        ExpectAllOk(ranks.Step([&](size_t, int64_t i) {
          return i % 5 == step % 5 ? (random() % 2 == 0 ? 0.5 : -0.5) : 0.0;
        }));
        ranks.ExpectNothingLost(tolerance);
      }
    }
  }
}

TEST(ChunkTopKExchange, TheKLargestOfEachChunkAreAppliedFirst) {
  for (const char* combine : kCombines) {
    ChunkRanks ranks(3, Options(combine, "chunk=8;k=2;bits=1"), 24);
    ExpectAllOk(ranks.Step([](size_t, int64_t i) { return i % 8 >= 6 ? 4.0 : 1.0; }));
    for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(ranks.output(2).At(i), i % 8 >= 6 ? 4.0 : 0.0) << i;
    // Of equal ones the first; the sent ones have grown by 4 again, less than 3 + 3 of the others.
    ExpectAllOk(ranks.Step([](size_t, int64_t i) { return i % 8 >= 6 ? 4.0 : 5.0; }));
    for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(ranks.output(1).At(i), i % 8 < 2 ? 6.0 : 0.0) << i;
  }
}

TEST(ChunkTopKExchange, WhatWaitsDecays) {
  for (const char* combine : kCombines) {
    ChunkRanks ranks(2, Options(combine, "chunk=4;k=1;bits=1;decay=0.5"), 4);
    ExpectAllOk(ranks.Step([](size_t, int64_t i) { return i == 0 ? 8.0 : 2.0; }));
    ExpectAllOk(ranks.Step([](size_t, int64_t i) { return i == 0 ? 8.0 : 0.0; }));
    EXPECT_EQ(ranks.State(1).at("rank_residual"), (Vector{0, 1, 1, 1}));
    ExpectAllOk(ranks.Step([](size_t, int64_t) { return 0.0; }));
    EXPECT_EQ(ranks.output(0).At(1), 0.5);
    EXPECT_EQ(ranks.State(0).at("rank_residual"), (Vector{0, 0, 0.5, 0.5}));
  }
}

TEST(ChunkTopKExchange, BytesOfAnOwnerDoNotGrowWithTheRanks) {
  std::map<std::string, std::vector<int64_t>> sent;
  for (const char* combine : kCombines) {
    for (const int size : {2, 4, 8}) {
      std::mt19937 random(3);
      ChunkRanks ranks(size, Options(combine, "chunk=256;k=8;bits=2"), 64 * 256);
      int64_t bytes = 0;
      ExpectAllOk(ranks.RandomStep(random));
      std::normal_distribution<double> normal;
      ExpectAllOk(ranks.Step([&](size_t, int64_t) { return normal(random); }, {},
                             [&](int, int from, int, const std::vector<std::byte>& message) {
                               if (from == 0) bytes += static_cast<int64_t>(message.size());
                             }));
      sent[combine].push_back(bytes);
    }
  }
  EXPECT_GT(sent["gather"][2], 6 * sent["gather"][0]);
  EXPECT_LT(sent["owner"][2], 2 * sent["owner"][0]);
  EXPECT_LT(sent["owner"][1], sent["gather"][1]);
}

// As an embedding's: rows that nobody touches cost nothing, however large the tensor.
TEST(ChunkTopKExchange, ChunksOfZerosTakeNoBytes) {
  for (const char* combine : kCombines) {
    ChunkRanks ranks(3, Options(combine, "chunk=64;k=4;bits=2"), 1000 * 64);
    int64_t bytes = 0;
    ExpectAllOk(ranks.Step(
        [](size_t r, int64_t i) { return i / 64 == 500 ? 1.0 + static_cast<double>(r) : 0.0; }, {},
        [&](int, int from, int, const std::vector<std::byte>& message) {
          if (from == 0) bytes += static_cast<int64_t>(message.size());
        }));
    EXPECT_LT(bytes, 120);
    ranks.ExpectNothingLost(1e-12);
  }
}

TEST(ChunkTopKExchange, ARankThatHasJoinedServesAsOwnerAndKeepsItsResidual) {
  for (const char* combine : {"gather", "owner", "owner;first=1"}) {
    for (const size_t away : {0, 1, 2}) {
      SCOPED_TRACE(combine + std::to_string(away));
      std::mt19937 random(4);
      ChunkRanks ranks(3, Options(combine), 100);
      for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.RandomStep(random));
      const Vector before = ranks.State(away).at("rank_residual");
      std::vector<bool> joined(3);
      joined[away] = true;
      for (int step = 0; step < 3; ++step) {
        ExpectAllOk(ranks.RandomStep(random, joined));
        ranks.ExpectSameBits(joined);
      }
      EXPECT_EQ(ranks.State(away).at("rank_residual"), before);
      ranks.ExpectNothingLost(1e-12);
      ExpectAllOk(ranks.RandomStep(random));
      ranks.ExpectNothingLost(1e-12);
    }
  }
}

TEST(ChunkTopKExchange, WhatIsNotFiniteGivesNanEverywhereAndChangesNoState) {
  for (const char* combine : kCombines) {
    // With one chunk only one rank owns something.
    for (const int64_t count : {10, 100}) {
      for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
        SCOPED_TRACE(combine);
        std::mt19937 random(5);
        ChunkRanks ranks(3, Options(combine), count);
        for (int step = 0; step < 3; ++step) ExpectAllOk(ranks.RandomStep(random));
        std::vector<std::map<std::string, Vector>> before;
        for (size_t r = 0; r < 3; ++r) before.push_back(ranks.State(r));
        ExpectAllOk(ranks.Step([&](size_t r, int64_t i) { return r == 1 && i == 3 ? bad : 1.0; }));
        for (size_t r = 0; r < 3; ++r) {
          EXPECT_TRUE(ranks.members()[r].report.not_finite);
          EXPECT_TRUE(std::isnan(ranks.output(r).At(0)));
          EXPECT_TRUE(std::isnan(ranks.output(r).At(count - 1)));
          EXPECT_EQ(ranks.State(r), before[r]);
        }
        EXPECT_EQ(ranks.members()[1].report.not_finite_rank, 1);
        ExpectAllOk(ranks.RandomStep(random));
        ranks.ExpectNothingLost(1e-12);
      }
    }
  }
}

TEST(ChunkTopKExchange, ACancelledStepBeginsAgainAsIfItWereNew) {
  for (const char* combine : kCombines) {
    std::mt19937 first(6), second(6);
    ChunkRanks plain(2, Options(combine), 100), again(2, Options(combine), 100);
    for (int step = 0; step < 4; ++step) {
      ExpectAllOk(plain.RandomStep(first));
      for (size_t r = 0; r < 2; ++r) {
        Tensor input(DType::kFloat64, {100}), output(DType::kFloat64, {100});
        again.members()[r].mine.input = input.View();
        again.members()[r].mine.output = output.View();
        StepInput step_input;
        step_input.mine = &again.members()[r].mine;
        step_input.submit_id = 1u << 30;
        const Group group{static_cast<int>(r), 2, {}};
        ASSERT_TRUE(again.members()[r].exchange->Begin(step_input, group).ok());
        again.members()[r].exchange->Cancel();
      }
      ExpectAllOk(again.RandomStep(second));
      EXPECT_EQ(plain.output(0).bytes(), again.output(0).bytes());
    }
  }
}

TEST(ChunkTopKExchange, MalformedSharesAreRefusedWithTheNameOfTensorAndRank) {
  for (const char* combine : kCombines) {
    for (const int in_round : {0, 1}) {
      if (in_round == 1 && std::string(combine) == "gather") continue;
      for (const bool longer : {false, true}) {
        std::mt19937 random(7);
        ChunkRanks ranks(3, Options(combine), 100);
        std::normal_distribution<double> normal;
        const auto status =
            ranks.Step([&](size_t, int64_t) { return normal(random); }, {},
                       [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                         if (round != in_round || from != 2 || to != 0) return;
                         longer ? bytes.push_back(std::byte{0}) : bytes.pop_back();
                       });
        EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument);
        EXPECT_NE(status[0].message().find("\"fc1.weight\": rank 2"), std::string::npos);
      }
    }
  }
}

TEST(ChunkTopKExchange, ThreadsGiveTheSameBits) {
  for (const char* combine : kCombines) {
    std::vector<std::vector<std::byte>> results;
    for (const int threads : {1, 4}) {
      TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {1100, 1003});
      spec.method = std::string("chunk_topk;combine=") + combine;
      std::vector<Member> members(2);
      std::vector<Tensor> inputs(2), outputs(2);
      std::mt19937 random(8);
      for (size_t r = 0; r < 2; ++r) {
        const ExchangeEnv env{0, 0, BestCpuLevel(), members[r].states.get(), threads};
        members[r].exchange = MakeExchange(spec, {}, 1, env).value();
        inputs[r] = Tensor(spec.dtype, spec.shape);
        outputs[r] = Tensor(spec.dtype, spec.shape);
        inputs[r].FillRandom(random, -1, 1);
        members[r].mine.input = inputs[r].View();
        members[r].mine.output = outputs[r].View();
      }
      for (int step = 0; step < 2; ++step) ExpectAllOk(RunStep(members, spec.dtype));
      results.push_back(outputs[0].bytes());
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

// Ranks with an embedding of kRows x kColumns, of which each looks up some rows.
class Embeddings {
 public:
  static constexpr int64_t kRows = 50, kColumns = 6, kCount = kRows * kColumns;

  Embeddings(int size, const std::string& options)
      : spec_(Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat64, {kCount})),
        members_((spec_.method = "chunk_topk_rows;" + options + ";layer=50x6",
                  MakeMembers(spec_, size))),
        memory_(members_.size()),
        total_(kCount),
        applied_(kCount) {}

  // Indices may repeat. `formed`: rank 0 brings a part that came formed beside them.
  void Step(std::mt19937& random, const std::vector<std::vector<int64_t>>& indices,
            bool formed = false) {
    for (size_t r = 0; r < members_.size(); ++r) {
      std::deque<Tensor>& memory = memory_[r];
      memory.clear();
      const auto fresh = [&](DType dtype, Shape shape) -> Tensor& {
        Tensor& tensor = memory.emplace_back(dtype, std::move(shape));
        tensor.FillRandom(random, -1, 1);
        return tensor;
      };
      const auto n = static_cast<int64_t>(indices[r].size());
      Tensor& output = fresh(DType::kFloat64, {kRows, kColumns});
      Tensor& index = fresh(DType::kInt64, {n});
      Tensor& x = fresh(DType::kFloat64, {n, kColumns});
      for (int64_t i = 0; i < n; ++i) {
        index.Set(i, static_cast<double>(indices[r][static_cast<size_t>(i)]));
        for (int64_t j = 0; j < kColumns; ++j) {
          Total(indices[r][static_cast<size_t>(i)] * kColumns + j, x.At(i * kColumns + j));
        }
      }
      LayerInput layer;
      layer.indexed = {{index.View(), x.View(), 0}};
      layer.output = output.View();
      if (formed && r == 0) {
        Tensor& dense = fresh(DType::kFloat64, {kRows, kColumns});
        layer.dense = dense.View();
        for (int64_t i = 0; i < kCount; ++i) Total(i, dense.At(i));
      }
      members_[r].mine.layers = {layer};
    }
    bytes_ = 0;
    ExpectAllOk(RunStep(members_, spec_.dtype, {},
                        [&](int, int from, int, const std::vector<std::byte>& message) {
                          if (from == 0) bytes_ += static_cast<int64_t>(message.size());
                        }));
    for (int64_t i = 0; i < kCount; ++i) applied_[static_cast<size_t>(i)] += memory_[0][0].At(i);
    for (size_t r = 1; r < memory_.size(); ++r) {
      EXPECT_EQ(memory_[r][0].bytes(), memory_[0][0].bytes());
    }
  }

  void ExpectNothingLost() const {
    Vector kept(kCount);
    for (const Member& member : members_) {
      std::map<std::string, Vector> state;
      for (const StateTensor& tensor : member.states->Export({0, 0, "fc1.weight"})) {
        Tensor copy(tensor.dtype, tensor.shape);
        std::memcpy(copy.View().data, tensor.bytes.data(), tensor.bytes.size());
        for (int64_t i = 0; i < copy.size(); ++i) state[tensor.name].push_back(copy.At(i));
      }
      const Vector& mine = state.at("rank_residual");
      for (size_t i = 0; i < kCount; ++i) kept[i] += mine[i] / static_cast<double>(members_.size());
      if (!state.contains("owner_residual")) continue;
      const auto begin = static_cast<size_t>(state.at("owner_begin").at(0));
      const Vector& owned = state.at("owner_residual");
      for (size_t i = 0; i < owned.size(); ++i) kept[begin + i] += owned[i];
    }
    for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(applied_[i] + kept[i], total_[i], 1e-12) << i;
  }

  double applied(int64_t i) const { return memory_[0][0].At(i); }
  int64_t bytes() const { return bytes_; }

 private:
  void Total(int64_t i, double x) {
    total_[static_cast<size_t>(i)] += x / static_cast<double>(members_.size());
  }

  TensorSpec spec_;
  std::vector<Member> members_;
  std::vector<std::deque<Tensor>> memory_;
  Vector total_;
  Vector applied_;
  int64_t bytes_ = 0;
};

TEST(ChunkTopKRowsExchange, NothingIsLostWhateverRowsAreLookedUp) {
  for (const char* combine : kCombines) {
    // Rows that fill chunks, and rows that lie across them.
    for (const char* options : {"chunk=12;k=3;bits=2", "chunk=16;k=3;bits=3", "chunk=4;k=1;bits=1",
                                "chunk=4096;k=64;bits=2"}) {
      SCOPED_TRACE(options);
      std::mt19937 random(10);
      Embeddings ranks(3, Options(combine, options));
      ranks.Step(random, {{4, 4, 7}, {49, 0}, {}});
      ranks.Step(random, {{}, {}, {}});
      ranks.Step(random, {{1, 2, 3, 4, 5}, {3}, {3, 48, 49}});
      ranks.Step(random, {{9}, {9}, {9}}, true);
      ranks.Step(random, {{4}, {4, 4, 4}, {0, 49}});
      ranks.ExpectNothingLost();
    }
  }
}

TEST(ChunkTopKRowsExchange, OnlyRowsThatWereLookedUpAreSentInProportion) {
  for (const char* combine : kCombines) {
    std::mt19937 random(11);
    Embeddings ranks(2, Options(combine, "chunk=60;k=20;bits=2"));
    std::vector<int64_t> all(50);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    ranks.Step(random, {all, all});
    const int64_t whole = ranks.bytes();
    // One row of each of two chunks: 2 of its 6 elements, though all rows have something waiting.
    ranks.Step(random, {{3, 31}, {3, 31}});
    EXPECT_LT(ranks.bytes(), whole / 3);
    int applied = 0;
    for (int64_t i = 0; i < Embeddings::kCount; ++i) {
      const int64_t row = i / Embeddings::kColumns;
      if (ranks.applied(i) == 0) continue;
      EXPECT_TRUE(row == 3 || row == 31 || std::string(combine) == "owner") << row;
      ++applied;
    }
    EXPECT_LE(applied, std::string(combine) == "owner" ? 4 : 8);
    ranks.ExpectNothingLost();
  }
}

TEST(ChunkTopKExchange, WrongOptionsAreRefused) {
  for (const auto& [options, what] :
       std::map<std::string, std::string>{{"chunk=0", "chunk must be 1"},
                                          {"chunk=16777217", "chunk must be 1"},
                                          {"chunk=8;k=9", "k must be 1 to chunk"},
                                          {"k=0", "k must be 1"},
                                          {"bits=0", "bits must be 1 to 8"},
                                          {"bits=9", "bits must be 1 to 8"},
                                          {"decay=-0.1", "decay must be 0 to 1"},
                                          {"decay=1.5", "decay must be 0 to 1"},
                                          {"first=-1", "first must be a rank"},
                                          {"combine=power", "neither owner nor gather"}}) {
    TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat32, {8});
    spec.method = "chunk_topk;" + options;
    const auto made = MakeExchange(spec, {}, 1, {});
    ASSERT_FALSE(made.ok()) << options;
    EXPECT_NE(made.status().message().find(what), std::string::npos) << made.status().message();
  }
}

TEST(ChunkTopKExchange, ASavedStateOfAnotherSizeIsRefused) {
  std::mt19937 random(9);
  ChunkRanks ranks(2, Options("owner"), 100);
  ExpectAllOk(ranks.RandomStep(random));
  ChunkRanks other(2, Options("owner"), 101);
  const StateKey key{0, 0, "fc1.weight"};
  other.members()[0].states->Import(key, ranks.members()[0].states->Export(key));
  const auto status = other.RandomStep(random);
  EXPECT_NE(status[0].message().find("does not fit"), std::string::npos) << status[0].ToString();
}

}  // namespace
}  // namespace dad::exchange_test
