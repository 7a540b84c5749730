// dAD and edAD against the gradient formed in double.
#include <cmath>

#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

using Matrix = std::vector<std::vector<double>>;

Matrix Zeros(int64_t rows, int64_t cols) {
  return Matrix(static_cast<size_t>(rows), std::vector<double>(static_cast<size_t>(cols)));
}

// A layer of one rank: its rows in memory, and where its gradient goes.
struct RankLayer {
  std::deque<Tensor> tensors;
  LayerInput input;

  TensorView New(DType dtype, Shape shape, std::mt19937& random, double low, double high) {
    tensors.emplace_back(dtype, std::move(shape));
    tensors.back().FillRandom(random, low, high);
    return tensors.back().View();
  }
};

double At(const TensorView& view, int64_t i) {
  Tensor copy(view.dtype, view.shape);
  std::memcpy(copy.View().data, view.data, view.num_bytes());
  return copy.At(i);
}

std::vector<double> Values(const TensorView& view) {
  std::vector<double> values;
  Tensor copy(view.dtype, view.shape);
  if (view.num_bytes() > 0) std::memcpy(copy.View().data, view.data, view.num_bytes());
  for (int64_t i = 0; i < view.num_elements(); ++i) values.push_back(copy.At(i));
  return values;
}

void AddOuterTo(Matrix& g, std::vector<double>& bias, const RowsSegment& segment, double scale) {
  const auto a = Values(segment.a);
  const auto d = Values(segment.d);
  const auto rows = static_cast<size_t>(segment.a.shape[0]);
  const auto in = static_cast<size_t>(segment.a.shape[1]);
  const auto out = static_cast<size_t>(segment.d.shape[1]);
  for (size_t k = 0; k < rows; ++k) {
    for (size_t i = 0; i < out; ++i) {
      const size_t row = i + static_cast<size_t>(segment.out_begin);
      bias[row] += scale * d[k * out + i];
      for (size_t j = 0; j < in; ++j) g[row][j] += scale * d[k * out + i] * a[k * in + j];
    }
  }
}

void ExpectNear(const TensorView& got, const Matrix& expected, double tolerance) {
  double largest = 1e-30;
  for (const auto& row : expected) {
    for (double x : row) largest = std::max(largest, std::fabs(x));
  }
  const auto values = Values(got);
  size_t k = 0;
  for (const auto& row : expected) {
    for (double x : row) ASSERT_NEAR(values[k++], x, tolerance * largest);
  }
}

struct Case {
  DType dtype;
  int size;
  std::vector<int64_t> rows;  // by rank
  bool bias;
  std::string wire = "fp32";
  double tolerance = 1e-5;
};

class FactorExchangeTest : public ::testing::TestWithParam<Case> {};

TEST_P(FactorExchangeTest, EqualsThePooledGradientToRounding) {
  const Case& c = GetParam();
  const int64_t out = 13;
  const int64_t in = 21;
  std::mt19937 random(7);
  TensorSpec spec =
      Spec(OpKind::kAllReduce, ReduceOp::kAverage, c.dtype, {out * (in + (c.bias ? 1 : 0))});
  spec.method = "factor;wire=" + c.wire + ";layer=13x21" + (c.bias ? ":bias" : "");
  std::vector<Member> members = MakeMembers(spec, c.size);
  std::vector<RankLayer> ranks(static_cast<size_t>(c.size));
  Matrix expected = Zeros(out, in);
  std::vector<double> bias(static_cast<size_t>(out));
  for (int r = 0; r < c.size; ++r) {
    RankLayer& rank = ranks[static_cast<size_t>(r)];
    const int64_t rows = c.rows[static_cast<size_t>(r)];
    // Two uses of the layer; half of the inputs zero, as after a ReLU.
    for (int use = 0; use < 2 && rows > 0; ++use) {
      RowsSegment segment;
      segment.a = rank.New(c.dtype, {rows, in}, random, -1, 1);
      for (int64_t i = 0; i < rows * in; i += 2) {
        std::memset(segment.a.bytes() + i * static_cast<int64_t>(SizeOf(c.dtype)), 0,
                    SizeOf(c.dtype));
      }
      segment.d = rank.New(c.dtype, {rows, out}, random, -1, 1);
      AddOuterTo(expected, bias, segment, 1.0 / c.size);
      rank.input.rows.push_back(segment);
    }
    rank.input.output = rank.New(c.dtype, {out, in}, random, 5, 6);
    if (c.bias) rank.input.output_bias = rank.New(c.dtype, {out}, random, 5, 6);
    members[static_cast<size_t>(r)].mine.layers = {rank.input};
  }
  ExpectAllOk(RunStep(members, c.dtype));
  for (int r = 0; r < c.size; ++r) {
    const LayerInput& got = ranks[static_cast<size_t>(r)].input;
    ExpectNear(got.output, expected, c.tolerance);
    if (c.bias) ExpectNear(got.output_bias, {bias}, c.tolerance);
    EXPECT_EQ(std::memcmp(got.output.data, ranks[0].input.output.data, got.output.num_bytes()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FactorExchangeTest,
    ::testing::Values(Case{DType::kFloat32, 1, {5}, true}, Case{DType::kFloat32, 2, {3, 4}, true},
                      Case{DType::kFloat32, 3, {0, 9, 2}, false},
                      Case{DType::kFloat32, 4, {0, 0, 0, 0}, true},
                      Case{DType::kFloat64, 4, {8, 8, 1, 8}, true, "fp32", 1e-12},
                      Case{DType::kFloat16, 2, {4, 4}, true, "fp32", 2e-3},
                      Case{DType::kBFloat16, 3, {4, 4, 1}, true, "fp32", 2e-2},
                      Case{DType::kFloat32, 2, {6, 6}, true, "bf16", 2e-2}));

TEST(FactorExchangeTest, PartsOfAWeightIndexedRowsAndDensePartsAddUp) {
  const int size = 3;
  std::mt19937 random(3);
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {9 * 4 + 9});
  spec.method = "factor;layer=9x4:bias";
  std::vector<Member> members = MakeMembers(spec, size);
  std::vector<RankLayer> ranks(size);
  Matrix expected = Zeros(9, 4);
  std::vector<double> bias(9);
  for (size_t r = 0; r < size; ++r) {
    RankLayer& rank = ranks[r];
    const double weight = 1.0 + static_cast<double>(r);
    for (int64_t begin : {0, 3, 6}) {  // as a packed in-projection is used
      RowsSegment segment;
      segment.a = rank.New(DType::kFloat32, {2, 4}, random, -1, 1);
      segment.d = rank.New(DType::kFloat32, {2, 3}, random, -1, 1);
      segment.out_begin = begin;
      AddOuterTo(expected, bias, segment, weight);
      rank.input.rows.push_back(segment);
    }
    IndexedSegment indexed;
    indexed.index = rank.New(DType::kInt64, {3}, random, 0, 8.9);
    indexed.x = rank.New(DType::kFloat32, {3, 4}, random, -1, 1);
    for (int64_t k = 0; k < 3; ++k) {
      for (int64_t j = 0; j < 4; ++j) {
        expected[static_cast<size_t>(At(indexed.index, k))][static_cast<size_t>(j)] +=
            weight * At(indexed.x, k * 4 + j);
      }
    }
    rank.input.indexed.push_back(indexed);
    if (r == 1) {
      rank.input.dense = rank.New(DType::kFloat32, {9, 4}, random, -1, 1);
      rank.input.dense_bias = rank.New(DType::kFloat32, {9}, random, -1, 1);
      for (int64_t i = 0; i < 9; ++i) {
        bias[static_cast<size_t>(i)] += weight * At(rank.input.dense_bias, i);
        for (int64_t j = 0; j < 4; ++j) {
          expected[static_cast<size_t>(i)][static_cast<size_t>(j)] +=
              weight * At(rank.input.dense, i * 4 + j);
        }
      }
    }
    rank.input.output = rank.New(DType::kFloat32, {9, 4}, random, 5, 6);
    rank.input.output_bias = rank.New(DType::kFloat32, {9}, random, 5, 6);
    members[r].mine.layers = {rank.input};
    members[r].mine.scale = weight;
    members[r].mine.replan = r == 2;
  }
  ExpectAllOk(RunStep(members, DType::kFloat32));
  for (size_t r = 0; r < size; ++r) {
    ExpectNear(ranks[r].input.output, expected, 1e-5);
    ExpectNear(ranks[r].input.output_bias, {bias}, 1e-5);
    EXPECT_TRUE(members[r].report.replan);
  }
}

// A chain of 3 layers, forward and backward in double, with D of the top layer alone.
struct ChainCase {
  std::string activation;
  bool pass_on_top = false;
};

double Phi(const std::string& activation, double h) {
  if (activation == "relu") return h > 0 ? h : 0;
  if (activation == "leaky_relu=0.1") return h > 0 ? h : 0.1 * h;
  if (activation == "tanh") return std::tanh(h);
  if (activation == "sigmoid") return 1 / (1 + std::exp(-h));
  if (activation == "gelu") return 0.5 * h * (1 + std::erf(h / std::sqrt(2.0)));
  if (activation == "gelu_tanh") {
    return 0.5 * h * (1 + std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h)));
  }
  return h / (1 + std::exp(-h));  // silu
}

double PhiDerivative(const std::string& activation, double h) {
  const double step = 1e-6;
  return (Phi(activation, h + step) - Phi(activation, h - step)) / (2 * step);
}

class ChainTest : public ::testing::TestWithParam<ChainCase> {};

TEST_P(ChainTest, LowerDeltasFollowFromTheTop) {
  const std::string activation = GetParam().activation;
  const int size = 3;
  const std::vector<int64_t> width = {5, 7, 6, 4};
  const std::vector<int64_t> rows = {3, 0, 2};
  std::mt19937 random(11);
  std::vector<std::vector<double>> weights;
  std::vector<std::vector<double>> biases;
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (size_t l = 0; l < 3; ++l) {
    weights.emplace_back();
    biases.emplace_back();
    for (int64_t i = 0; i < width[l + 1] * width[l]; ++i) weights[l].push_back(uniform(random));
    for (int64_t i = 0; i < width[l + 1]; ++i) biases[l].push_back(uniform(random));
  }
  const std::string mark = ":" + activation;
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat64,
                         {7 * 6 + 6 * 8 + (GetParam().pass_on_top ? 0 : 4 * 7)});
  spec.method = "factor;layer=7x5:bias" + mark + ";layer=6x7:bias" + mark + ";layer=4x6:bias" +
                (GetParam().pass_on_top ? ":pass" : "");
  std::vector<Member> members = MakeMembers(spec, size);
  std::vector<RankLayer> ranks(size);
  std::vector<Matrix> expected;
  std::vector<std::vector<double>> expected_bias;
  for (size_t l = 0; l < 3; ++l) {
    expected.push_back(Zeros(width[l + 1], width[l]));
    expected_bias.emplace_back(static_cast<size_t>(width[l + 1]));
  }
  auto fill = [](const TensorView& view, const std::vector<double>& values) {
    if (!values.empty()) std::memcpy(view.data, values.data(), values.size() * sizeof(double));
  };
  for (size_t r = 0; r < size; ++r) {
    RankLayer& rank = ranks[r];
    const auto n = static_cast<size_t>(rows[r]);
    std::vector<std::vector<double>> a(4);
    std::vector<std::vector<double>> h(3);
    for (size_t i = 0; i < n * 5; ++i) a[0].push_back(uniform(random));
    for (size_t l = 0; l < 3; ++l) {
      const auto in = static_cast<size_t>(width[l]);
      const auto out = static_cast<size_t>(width[l + 1]);
      for (size_t k = 0; k < n; ++k) {
        for (size_t i = 0; i < out; ++i) {
          double sum = biases[l][i];
          for (size_t j = 0; j < in; ++j) sum += weights[l][i * in + j] * a[l][k * in + j];
          h[l].push_back(sum);
          a[l + 1].push_back(Phi(activation, sum));
        }
      }
    }
    std::vector<std::vector<double>> d(3);
    for (size_t i = 0; i < n * 4; ++i) d[2].push_back(uniform(random));
    for (size_t l = 2; l-- > 0;) {
      const auto out = static_cast<size_t>(width[l + 1]);
      const auto above = static_cast<size_t>(width[l + 2]);
      for (size_t k = 0; k < n; ++k) {
        for (size_t j = 0; j < out; ++j) {
          double sum = 0;
          for (size_t i = 0; i < above; ++i)
            sum += d[l + 1][k * above + i] * weights[l + 1][i * out + j];
          d[l].push_back(sum * PhiDerivative(activation, h[l][k * out + j]));
        }
      }
    }
    for (size_t l = 0; l < 3; ++l) {
      LayerInput layer;
      RowsSegment full;
      full.a = rank.New(DType::kFloat64, {rows[r], width[l]}, random, 0, 1);
      full.d = rank.New(DType::kFloat64, {rows[r], width[l + 1]}, random, 0, 1);
      fill(full.a, a[l]);
      fill(full.d, d[l]);
      AddOuterTo(expected[l], expected_bias[l], full, 1.0 / size);
      // Rank 2 sends D of the middle layer too: its chain was broken there.
      if (l != 2 && !(l == 1 && r == 2)) full.d = {};
      if (n > 0) layer.rows = {full};
      layer.weight = rank.New(DType::kFloat64, {width[l + 1], width[l]}, random, 0, 1);
      layer.bias = rank.New(DType::kFloat64, {width[l + 1]}, random, 0, 1);
      fill(layer.weight, weights[l]);
      fill(layer.bias, biases[l]);
      layer.output = rank.New(DType::kFloat64, {width[l + 1], width[l]}, random, 5, 6);
      layer.output_bias = rank.New(DType::kFloat64, {width[l + 1]}, random, 5, 6);
      members[r].mine.layers.push_back(layer);
    }
  }
  ExpectAllOk(RunStep(members, DType::kFloat64));
  for (size_t r = 0; r < size; ++r) {
    for (size_t l = 0; l < (GetParam().pass_on_top ? 2 : 3); ++l) {
      ExpectNear(members[r].mine.layers[l].output, expected[l], 1e-8);  // of the difference above
      ExpectNear(members[r].mine.layers[l].output_bias, {expected_bias[l]}, 1e-8);
      EXPECT_EQ(
          std::memcmp(members[r].mine.layers[l].output.data, members[0].mine.layers[l].output.data,
                      members[0].mine.layers[l].output.num_bytes()),
          0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ChainTest,
                         ::testing::Values(ChainCase{"relu"}, ChainCase{"relu", true},
                                           ChainCase{"leaky_relu=0.1"},
                                           ChainCase{"leaky_relu=0.1", true}, ChainCase{"tanh"},
                                           ChainCase{"sigmoid"}, ChainCase{"gelu"},
                                           ChainCase{"gelu_tanh"}, ChainCase{"silu"}));

TEST(FactorExchangeTest, PackedFactorsGiveTheSameBitsWithFewerBytes) {
  const int size = 3;
  const int64_t out = 24;
  const int64_t in = 40;
  const int64_t rows = 16;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, dtype, {out * in});
    spec.method = "factor;layer=24x40";
    size_t sent[2] = {};
    std::vector<std::byte> result[2];
    for (const int pack : {0, 1}) {
      std::mt19937 random(11);
      std::vector<Member> members = MakeMembers(spec, size, false, pack == 1);
      // Ranks need not agree: the rate of their lines may differ.
      if (pack == 1) members[0] = std::move(MakeMembers(spec, 1)[0]);
      std::vector<RankLayer> ranks(size);
      for (size_t r = 0; r < size; ++r) {
        RowsSegment segment;
        segment.a = ranks[r].New(dtype, {rows, in}, random, 0.5, 1);
        segment.d = ranks[r].New(dtype, {rows, out}, random, 0.5, 1);
        ranks[r].input.rows = {segment};
        ranks[r].input.output = ranks[r].New(dtype, {out, in}, random, 5, 6);
        members[r].mine.layers = {ranks[r].input};
      }
      ExpectAllOk(
          RunStep(members, dtype, {}, [&](int, int from, int, std::vector<std::byte>& bytes) {
            if (from == 1) sent[pack] += bytes.size();
          }));
      for (const RankLayer& rank : ranks) {
        const TensorView& got = rank.input.output;
        if (result[pack].empty()) result[pack].assign(got.bytes(), got.bytes() + got.num_bytes());
        EXPECT_EQ(std::memcmp(got.data, result[0].data(), got.num_bytes()), 0) << Name(dtype);
      }
    }
    if (dtype == DType::kFloat64) {
      EXPECT_EQ(sent[1], sent[0]);
    } else {
      EXPECT_LT(static_cast<double>(sent[1]), 0.9 * static_cast<double>(sent[0])) << Name(dtype);
    }
  }
}

TEST(FactorExchangeTest, AShareCutShortOrTooLongIsRefused) {
  std::mt19937 random(5);
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {3 * 4 + 3});
  spec.method = "factor;layer=3x4:bias";
  size_t length = 1;
  for (size_t cut = 0; cut <= length; ++cut) {
    std::vector<Member> members = MakeMembers(spec, 2);
    std::vector<RankLayer> ranks(2);
    for (size_t r = 0; r < 2; ++r) {
      RowsSegment segment;
      segment.a = ranks[r].New(DType::kFloat32, {2, 4}, random, -1, 1);
      segment.d = ranks[r].New(DType::kFloat32, {2, 3}, random, -1, 1);
      ranks[r].input.rows = {segment};
      ranks[r].input.output = ranks[r].New(DType::kFloat32, {3, 4}, random, -1, 1);
      ranks[r].input.output_bias = ranks[r].New(DType::kFloat32, {3}, random, -1, 1);
      members[r].mine.layers = {ranks[r].input};
    }
    const auto status = RunStep(members, DType::kFloat32, {},
                                [&](int, int from, int, std::vector<std::byte>& bytes) {
                                  if (from != 1) return;
                                  length = bytes.size();
                                  if (cut == length) {
                                    bytes.push_back(std::byte{1});
                                  } else {
                                    bytes.resize(cut);
                                  }
                                });
    EXPECT_EQ(status[0].code(), StatusCode::kInvalidArgument) << cut;
  }
}

TEST(FactorExchangeTest, RandomBytesAreRefusedOrTakenButNeverHarm) {
  std::mt19937 random(9);
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kSum, DType::kFloat32, {3 * 4 + 5 * 3});
  spec.method = "factor;layer=3x4:relu;layer=5x3";
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<Member> members = MakeMembers(spec, 2);
    std::vector<RankLayer> ranks(2);
    for (size_t r = 0; r < 2; ++r) {
      for (const auto& [out, in] : {std::pair<int64_t, int64_t>{3, 4}, {5, 3}}) {
        LayerInput layer;
        RowsSegment segment;
        segment.a = ranks[r].New(DType::kFloat32, {2, in}, random, -1, 1);
        if (out == 5) segment.d = ranks[r].New(DType::kFloat32, {2, out}, random, -1, 1);
        layer.rows = {segment};
        layer.weight = ranks[r].New(DType::kFloat32, {out, in}, random, -1, 1);
        layer.output = ranks[r].New(DType::kFloat32, {out, in}, random, -1, 1);
        members[r].mine.layers.push_back(layer);
      }
    }
    (void)RunStep(members, DType::kFloat32, {},
                  [&](int, int, int to, std::vector<std::byte>& bytes) {
                    if (to != 0) return;
                    const int changes = 1 + static_cast<int>(random() % 4);
                    for (int i = 0; i < changes; ++i) {
                      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
                    }
                    if (random() % 3 == 0) bytes.resize(random() % bytes.size());
                  });
  }
}

TEST(FactorExchangeTest, JoinedRanksContributeNothingAndTheMeanIsStillOverAll) {
  std::mt19937 random(5);
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, DType::kFloat64, {3 * 4});
  spec.method = "factor;layer=3x4";
  std::vector<Member> members = MakeMembers(spec, 3);
  std::vector<RankLayer> ranks(3);
  Matrix expected = Zeros(3, 4);
  std::vector<double> bias(3);
  for (size_t r = 0; r < 3; ++r) {
    RowsSegment segment;
    segment.a = ranks[r].New(DType::kFloat64, {2, 4}, random, -1, 1);
    segment.d = ranks[r].New(DType::kFloat64, {2, 3}, random, -1, 1);
    if (r != 1) AddOuterTo(expected, bias, segment, 1.0 / 3);
    ranks[r].input.rows = {segment};
    ranks[r].input.output = ranks[r].New(DType::kFloat64, {3, 4}, random, -1, 1);
    members[r].mine.layers = {ranks[r].input};
  }
  ExpectAllOk(RunStep(members, DType::kFloat64, {false, true, false}));
  for (size_t r : {0u, 2u}) ExpectNear(ranks[r].input.output, expected, 1e-12);
}

}  // namespace
}  // namespace dad::exchange_test
