// A layer's gradient, and the squares of its samples, against plain loops.
#include "exchange/layer/form_gradient.h"

#include <gtest/gtest.h>

#include <vector>

#include "dad/gradient.h"

namespace dad {
namespace {

TensorView View(std::vector<float>& values, Shape shape) {
  TensorView view;
  view.data = values.data();
  view.shape = std::move(shape);
  return view;
}

// 3 x 2 with a bias: two samples of two rows each, an indexed row, and a part that came formed.
class FormGradientTest : public ::testing::Test {
 protected:
  FormGradientTest() {
    shape_.out = 3;
    shape_.in = 2;
    shape_.bias = true;
    RowsSegment rows;
    rows.a = View(a_, {4, 2});
    rows.d = View(d_, {4, 3});
    rows.samples = 2;
    layer_.rows = {rows};
    IndexedSegment indexed;
    indexed.index.data = &index_;
    indexed.index.dtype = DType::kInt64;
    indexed.index.shape = {1};
    indexed.x = View(x_, {1, 2});
    layer_.indexed = {indexed};
    layer_.dense = View(dense_, {3, 2});
    layer_.dense_bias = View(dense_bias_, {3});
  }

  // Element (i, j) of sample s of the rows; the bias is column 2.
  float OfSample(size_t s, size_t i, size_t j, size_t rows) const {
    float sum = 0;
    for (size_t k = s * rows; k < (s + 1) * rows; ++k) {
      sum += d_[3 * k + i] * (j < 2 ? a_[2 * k + j] : 1);
    }
    return sum;
  }

  void Expect(double scale, bool by_sample) {
    FormedLayer formed{View(weight_, {3, 2}), View(bias_, {3}), View(weight_square_, {3, 2}),
                       View(bias_square_, {3})};
    FormGradient(shape_, layer_, scale, by_sample, formed);
    const auto c = static_cast<float>(scale);
    const size_t rows = by_sample ? 2 : 1;
    for (size_t i = 0; i < 3; ++i) {
      for (size_t j = 0; j < 3; ++j) {
        float g = 0, s = 0;
        for (size_t sample = 0; sample < 4 / rows; ++sample) {
          const float one = c * OfSample(sample, i, j, rows);
          g += one;
          s += one * one;
        }
        const float indexed = j < 2 && i == 1 ? x_[j] : 0;
        const float dense = j < 2 ? dense_[2 * i + j] : dense_bias_[i];
        g += c * (indexed + dense);
        s += c * c * (indexed * indexed + dense * dense);
        EXPECT_NEAR(j < 2 ? weight_[2 * i + j] : bias_[i], g, 1e-5) << i << ", " << j;
        EXPECT_NEAR(j < 2 ? weight_square_[2 * i + j] : bias_square_[i], s, 1e-4) << i << ", " << j;
      }
    }
  }

  LayerShape shape_;
  LayerInput layer_;
  std::vector<float> a_{1, 2, -1, 0, 3, 1, 0.5f, -2}, x_{4, -3}, dense_{1, -1, 2, 0, 0, 5};
  std::vector<float> d_{1, 0, 2, -1, 1, 1, 0, 2, -2, 1, 1, 3}, dense_bias_{1, 0, -2};
  int64_t index_ = 1;
  std::vector<float> weight_ = std::vector<float>(6), weight_square_ = std::vector<float>(6);
  std::vector<float> bias_ = std::vector<float>(3), bias_square_ = std::vector<float>(3);
};

TEST_F(FormGradientTest, RowsAreSamples) { Expect(1.0, false); }

TEST_F(FormGradientTest, SamplesOfSeveralRows) { Expect(1.0, true); }

TEST_F(FormGradientTest, AScaleGoesIntoSquaresTwice) { Expect(0.5, true); }

TEST_F(FormGradientTest, AWeightAloneForFrameworks) {
  Expect(1.0, false);
  std::vector<float> alone(6);
  FormWeight(layer_, View(alone, {3, 2}));
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(alone[i], weight_[i], 1e-5) << i;
}

TEST_F(FormGradientTest, NothingButABias) {
  shape_.in = 0;
  layer_ = LayerInput();
  layer_.dense_bias = View(dense_bias_, {3});
  FormedLayer formed;
  formed.bias = View(bias_, {3});
  FormGradient(shape_, layer_, 2.0, false, formed);
  EXPECT_EQ(bias_, (std::vector<float>{2, 0, -4}));
}

TEST_F(FormGradientTest, WithoutAnyPartItIsZero) {
  layer_ = LayerInput();
  weight_.assign(6, 7);
  FormedLayer formed;
  formed.weight = View(weight_, {3, 2});
  FormGradient(shape_, layer_, 1.0, false, formed);
  EXPECT_EQ(weight_, std::vector<float>(6));
}

}  // namespace
}  // namespace dad
