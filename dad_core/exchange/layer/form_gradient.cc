#include "exchange/layer/form_gradient.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "dad/gradient.h"
#include "exchange/by_method.h"
#include "exchange/share/share_io.h"
#include "linalg/moments.h"

namespace dad {
namespace {

template <typename T>
class Former {
 public:
  Former(const LayerShape& shape, double scale, bool squares, bool by_sample)
      : shape_(shape),
        scale_(static_cast<T>(scale)),
        moments_(BestCpuLevel(), shape.out, shape.in, squares, by_sample) {}

  void Add(const LayerInput& layer) {
    for (const RowsSegment& segment : layer.rows) {
      const int64_t rows = segment.a.shape[0];
      const int64_t count = segment.d.shape[1];
      moments_.AddRows({Matrix(segment.d, rows, count), Matrix(segment.a, rows, shape_.in), scale_,
                        count == shape_.out ? 0 : segment.out_begin},
                       Divides(segment.samples, rows));
    }
    for (const IndexedSegment& segment : layer.indexed) {
      const int64_t rows = segment.index.num_elements();
      const auto* index = static_cast<const int64_t*>(segment.index.data);
      moments_.AddIndexed({index, Matrix(segment.x, rows, shape_.in), scale_},
                          Divides(segment.samples, rows));
    }
    if (layer.dense.data != nullptr || layer.dense_bias.data != nullptr) {
      const DenseTerm<T> term = {Matrix(layer.dense, shape_.out, shape_.in),
                                 Array(layer.dense_bias, shape_.out), scale_};
      moments_.AddDense(term, Array(layer.dense_square, shape_.out * shape_.in),
                        Array(layer.dense_bias_square, shape_.out));
    }
    moments_.Prepare();
  }

  void WriteWeight(const TensorView& weight, const TensorView& square) const {
    const bool squares = square.data != nullptr;
    std::vector<T> g(static_cast<size_t>(shape_.out * shape_.in));
    std::vector<T> s(squares ? g.size() : 0);
    const int64_t block = moments_.block_rows();
    for (int64_t begin = 0; begin < shape_.out; begin += block) {
      const int64_t at = begin * shape_.in;
      moments_.Block(begin, std::min(block, shape_.out - begin), g.data() + at,
                     squares ? s.data() + at : nullptr);
    }
    Write(g, weight, s, square);
  }

  void WriteBias(const TensorView& bias, const TensorView& square) const {
    const bool squares = square.data != nullptr;
    std::vector<T> g(static_cast<size_t>(shape_.out));
    std::vector<T> s(squares ? g.size() : 0);
    moments_.Bias(g.data(), squares ? s.data() : nullptr);
    Write(g, bias, s, square);
  }

 private:
  static void Write(const std::vector<T>& g, const TensorView& to, const std::vector<T>& s,
                    const TensorView& square) {
    ConvertFrom(g.data(), to);
    if (!s.empty()) ConvertFrom(s.data(), square);
  }

  MatrixView<const T> Matrix(const TensorView& values, int64_t rows, int64_t cols) {
    if (values.dtype == DTypeOf<T>()) return ViewOf(static_cast<const T*>(values.data), rows, cols);
    std::vector<T>& wide = converted_.emplace_back(static_cast<size_t>(rows * cols));
    ConvertTo(values, wide.data());
    return ViewOf<const T>(wide.data(), rows, cols);
  }
  const T* Array(const TensorView& values, int64_t count) {
    return values.data == nullptr ? nullptr : Matrix(values, 1, count).data;
  }
  static int64_t Divides(int64_t samples, int64_t rows) {
    return samples > 0 && rows % samples == 0 ? samples : 0;
  }

  const LayerShape shape_;
  const T scale_;
  SampleMoments<T> moments_;
  std::deque<std::vector<T>> converted_;
};

template <typename T>
void Form(const LayerShape& shape, const LayerInput& layer, double scale, bool by_sample,
          const FormedLayer& formed) {
  const bool squares = formed.weight_square.data != nullptr || formed.bias_square.data != nullptr;
  Former<T> former(shape, scale, squares, by_sample);
  former.Add(layer);
  if (formed.weight.data != nullptr) former.WriteWeight(formed.weight, formed.weight_square);
  if (formed.bias.data != nullptr) former.WriteBias(formed.bias, formed.bias_square);
}

}  // namespace

void FormGradient(const LayerShape& shape, const LayerInput& layer, double scale, bool by_sample,
                  const FormedLayer& formed) {
  if (formed.weight.dtype == DType::kFloat64) {
    Form<double>(shape, layer, scale, by_sample, formed);
  } else {
    Form<float>(shape, layer, scale, by_sample, formed);
  }
}

void FormWeight(const LayerInput& layer, const TensorView& weight) {
  LayerShape shape;
  shape.out = weight.shape[0];
  shape.in = weight.shape[1];
  FormedLayer formed;
  formed.weight = weight;
  FormGradient(shape, layer, 1.0, false, formed);
}

}  // namespace dad
