// A layer whose output and weight lie as in × out gets what one out × in gets, by every exchange
// that takes layers.
#include "exchange/layer/layer_result.h"

#include "exchange_harness.h"

namespace dad::exchange_test {
namespace {

constexpr int64_t kOut = 37;
constexpr int64_t kIn = 70;  // more than a square of the transposition

struct Case {
  std::string method;
  DType dtype = DType::kFloat32;
  bool parts = false;  // also parts of the rows, and a formed part
  double tolerance = 0;
};

class TransposedTest : public ::testing::TestWithParam<Case> {};

// Two layers of a chain, or one; with all that an exchange may look at.
std::vector<std::deque<Tensor>> Results(const Case& c, bool transposed) {
  constexpr int kSize = 3;
  const bool chain = c.method.find("layer=", c.method.find("layer=") + 1) != std::string::npos;
  const int64_t elements = kOut * (kIn + 1) + (chain ? kOut * (kOut + 1) : 0);
  TensorSpec spec = Spec(OpKind::kAllReduce, ReduceOp::kAverage, c.dtype, {elements});
  spec.method = c.method;
  std::vector<Member> members = MakeMembers(spec, kSize);
  std::vector<std::deque<Tensor>> outputs(kSize);
  std::deque<Tensor> memory;
  std::mt19937 random(3);
  auto fresh = [&](std::deque<Tensor>& into, Shape shape) {
    into.emplace_back(c.dtype, std::move(shape)).FillRandom(random, -1, 1);
    return into.back().View();
  };
  std::deque<Tensor> weights;
  const TensorView weight = fresh(weights, {kOut, kOut});
  const TensorView bias = fresh(weights, {kOut});
  Tensor turned(c.dtype, {kOut, kOut});
  for (int64_t i = 0; i < kOut * kOut; ++i) {
    turned.Set(i % kOut * kOut + i / kOut, weights[0].At(i));
  }
  const TensorView lower = fresh(weights, {kOut, kIn});
  Tensor lower_turned(c.dtype, {kIn, kOut});
  for (int64_t i = 0; i < kOut * kIn; ++i) {
    lower_turned.Set(i % kIn * kOut + i / kIn, weights[2].At(i));
  }
  for (size_t r = 0; r < kSize; ++r) {
    const auto rows = static_cast<int64_t>(2 + r);
    auto layer = [&](int64_t in) {
      LayerInput input;
      RowsSegment segment;
      segment.a = fresh(memory, {rows, in});
      segment.d = fresh(memory, {rows, kOut});
      input.rows = {segment};
      input.transposed = transposed;
      outputs[r].emplace_back(c.dtype, transposed ? Shape{in, kOut} : Shape{kOut, in});
      input.output = outputs[r].back().View();
      outputs[r].emplace_back(c.dtype, Shape{kOut});
      input.output_bias = outputs[r].back().View();
      return input;
    };
    LayerInput first = layer(kIn);
    if (c.parts) {
      RowsSegment part;
      part.a = fresh(memory, {rows, kIn});
      part.d = fresh(memory, {rows, 5});
      part.out_begin = 3;
      first.rows.push_back(part);
      first.dense = fresh(memory, {kOut, kIn});
      first.dense_bias = fresh(memory, {kOut});
    }
    if (chain) {
      first.rows[0].d = {};
      first.weight = transposed ? lower_turned.View() : lower;
      first.bias = bias;
      LayerInput second = layer(kOut);
      second.weight = transposed ? turned.View() : weight;
      second.bias = bias;
      members[r].mine.layers = {first, second};
    } else {
      members[r].mine.layers = {first};
    }
  }
  ExpectAllOk(RunStep(members, c.dtype));
  return outputs;
}

TEST_P(TransposedTest, GetsWhatTheMatrixGets) {
  const Case& c = GetParam();
  const auto expected = Results(c, false);
  const auto got = Results(c, true);
  for (size_t r = 0; r < got.size(); ++r) {
    double largest = 0;
    for (size_t t = 0; t < got[r].size(); ++t) {
      EXPECT_EQ(got[r][t].bytes(), got[0][t].bytes()) << "rank " << r;
      const Tensor& matrix = expected[r][t];
      const int64_t rows = matrix.shape().size() == 2 ? matrix.shape()[0] : 1;
      const int64_t cols = matrix.size() / rows;
      for (int64_t i = 0; i < matrix.size(); ++i) {
        largest = std::max(largest, std::fabs(matrix.At(i)));
        ASSERT_NEAR(got[r][t].At(i % cols * rows + i / cols), matrix.At(i), c.tolerance)
            << "tensor " << t << ", element " << i;
      }
    }
    EXPECT_GT(largest, 0.1);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TransposedTest,
    ::testing::Values(
        Case{"factor;layer=37x70:bias", DType::kFloat32, false, 1e-5},
        Case{"factor;layer=37x70:bias", DType::kFloat64, true, 1e-13},
        Case{"factor;layer=37x70:bias", DType::kBFloat16, false, 0.05},
        Case{"factor;layer=37x70:bias", DType::kFloat16, true, 0.01},
        Case{"factor;layer=37x70:bias:relu;layer=37x37:bias", DType::kFloat64, false, 1e-12},
        Case{"factor;layer=37x70:bias:gelu;layer=37x37:bias", DType::kFloat32, false, 1e-3},
        Case{"low_rank;rank=2;layer=37x70:bias", DType::kFloat32, false, 1e-5},
        Case{"low_rank;rank=3;combine=gather;layer=37x70:bias", DType::kFloat16, true, 0.02},
        Case{"sparse;rule=vgc;alpha=0.5;layer=37x70:bias", DType::kFloat32, false, 0},
        Case{"sparse;rule=topk;ratio=0.1;layer=37x70:bias", DType::kBFloat16, true, 0}));

}  // namespace
}  // namespace dad::exchange_test
