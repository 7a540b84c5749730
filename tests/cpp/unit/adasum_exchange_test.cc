#include <gtest/gtest.h>

#include <cmath>

#include "exchange/collective/adasum.h"
#include "exchange_harness.h"

namespace dad {
namespace {

using namespace exchange_test;  // NOLINT: the harness
using Vector = std::vector<double>;

Vector Pair(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  if (aa == 0) return b;
  if (bb == 0) return a;
  Vector c(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    c[i] = (1 - ab / (2 * aa)) * a[i] + (1 - ab / (2 * bb)) * b[i];
  }
  return c;
}

Vector Tree(std::vector<Vector> all) {
  while (all.size() > 1) {
    std::vector<Vector> next;
    for (size_t i = 0; i + 1 < all.size(); i += 2) next.push_back(Pair(all[i], all[i + 1]));
    if (all.size() % 2 == 1) next.push_back(all.back());
    all = std::move(next);
  }
  return all[0];
}

TensorSpec Adasum(DType dtype, int64_t count) {
  return Spec(OpKind::kAllReduce, ReduceOp::kAdasum, dtype, {count});
}

// Runs one step in place and returns what every rank holds then.
std::vector<Tensor> RunInPlace(const TensorSpec& spec, std::vector<Tensor> tensors,
                               std::vector<bool> joined = {}) {
  auto members = MakeMembers(spec, static_cast<int>(tensors.size()));
  for (size_t r = 0; r < tensors.size(); ++r) {
    members[r].mine.input = members[r].mine.output = tensors[r].View();
  }
  ExpectAllOk(RunStep(members, spec.dtype, std::move(joined)));
  return tensors;
}

std::vector<Tensor> RandomGradients(const TensorSpec& spec, int size) {
  std::mt19937 random(17);
  std::vector<Tensor> tensors;
  for (int r = 0; r < size; ++r) {
    tensors.emplace_back(spec.dtype, spec.shape);
    tensors.back().FillRandom(random, -1, 1.5);
  }
  return tensors;
}

Vector Values(const Tensor& t) {
  Vector values;
  for (int64_t i = 0; i < t.size(); ++i) values.push_back(t.At(i));
  return values;
}

TEST(AdasumExchangeTest, EqualsTheTreeInDouble) {
  const std::pair<DType, double> kinds[] = {{DType::kFloat64, 1e-12},
                                            {DType::kFloat32, 1e-6},
                                            {DType::kFloat16, 4e-3},
                                            {DType::kBFloat16, 3e-2}};
  for (const auto& [dtype, tolerance] : kinds) {
    for (int size : {1, 2, 3, 4, 5, 7}) {
      for (int64_t count : {0, 1, 5, 3001}) {
        TensorSpec spec = Adasum(dtype, count);
        spec.prescale = 0.5;
        spec.postscale = 2;  // cancels: Adasum is linear in a common factor
        const std::vector<Tensor> inputs = RandomGradients(spec, size);
        std::vector<Vector> gradients;
        for (const Tensor& t : inputs) gradients.push_back(Values(t));
        const Vector expected = Tree(gradients);
        const std::vector<Tensor> got = RunInPlace(spec, inputs);
        for (const Tensor& t : got) EXPECT_EQ(t.bytes(), got[0].bytes());
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_NEAR(got[0].At(static_cast<int64_t>(i)), expected[i], tolerance)
              << Name(dtype) << " W=" << size << " n=" << count;
        }
      }
    }
  }
}

TEST(AdasumExchangeTest, EqualGradientsComeBack) {
  const TensorSpec spec = Adasum(DType::kFloat32, 100);
  for (int size : {2, 3, 4, 7}) {
    const std::vector<Tensor> inputs(static_cast<size_t>(size), RandomGradients(spec, 1)[0]);
    const std::vector<Tensor> got = RunInPlace(spec, inputs);
    for (int64_t i = 0; i < 100; ++i) EXPECT_NEAR(got[0].At(i), inputs[0].At(i), 1e-6);
  }
}

TEST(AdasumExchangeTest, OrthogonalGradientsAddUp) {
  const TensorSpec spec = Adasum(DType::kFloat32, 4);
  std::vector<Tensor> inputs(4, Tensor(spec.dtype, spec.shape));
  for (int64_t r = 0; r < 4; ++r) inputs[static_cast<size_t>(r)].Set(r, static_cast<double>(r + 1));
  const std::vector<Tensor> got = RunInPlace(spec, inputs);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(got[3].At(i), static_cast<double>(i + 1));
}

TEST(AdasumExchangeTest, JoinedRanksLeaveTheOthersAsTheyAre) {
  const TensorSpec spec = Adasum(DType::kFloat32, 50);
  const std::vector<Tensor> inputs = RandomGradients(spec, 3);
  const std::vector<Tensor> one = RunInPlace(spec, inputs, {true, false, true});
  EXPECT_EQ(one[1].bytes(), inputs[1].bytes());
  EXPECT_EQ(one[0].bytes(), inputs[0].bytes());
  const std::vector<Tensor> two = RunInPlace(spec, inputs, {false, true, false});
  const Vector expected = Pair(Values(inputs[0]), Values(inputs[2]));
  for (int64_t i = 0; i < 50; ++i) {
    EXPECT_NEAR(two[0].At(i), expected[static_cast<size_t>(i)], 1e-6);
  }
  EXPECT_EQ(two[0].bytes(), two[2].bytes());
}

TEST(AdasumExchangeTest, TruncatedSharesAreRejectedInEveryRound) {
  const TensorSpec spec = Adasum(DType::kFloat32, 50);
  for (int bad_round = 0; bad_round < 4; ++bad_round) {
    auto members = MakeMembers(spec, 4);
    std::vector<Tensor> tensors = RandomGradients(spec, 4);
    for (size_t r = 0; r < 4; ++r) {
      members[r].mine.input = members[r].mine.output = tensors[r].View();
    }
    const auto status = RunStep(members, spec.dtype, {},
                                [&](int round, int from, int to, std::vector<std::byte>& bytes) {
                                  if (round == bad_round && from == 3 && to == 1) bytes.pop_back();
                                });
    EXPECT_EQ(status[1].code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status[1].message().find("\"fc1.weight\": rank 3"), std::string::npos);
  }
}

}  // namespace
}  // namespace dad
