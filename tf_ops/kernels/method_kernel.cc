#include "tf_ops/kernels/method_kernel.h"

#include <algorithm>
#include <utility>

#include "dad/gradient.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace dad_tensorflow {
namespace {

// TensorFlow's gradient of ReLU multiplies with 0 or 1, and so leaves zeros with a sign; where rows
// are sent those without are packed.
template <typename Bits>
bool DropSigns(const Tensor& from, Tensor* to) {
  constexpr Bits kNegativeZero = Bits{1} << (8 * sizeof(Bits) - 1);
  const auto* first = static_cast<const Bits*>(from.data());
  const auto* last = first + from.NumElements();
  if (std::find(first, last, kNegativeZero) == last) return false;
  *to = Tensor(from.dtype(), from.shape());
  std::replace_copy(first, last, static_cast<Bits*>(to->data()), kNegativeZero, Bits{0});
  return true;
}

Tensor WithoutNegativeZeros(const Tensor& tensor) {
  Tensor copy;
  const size_t size = tensorflow::DataTypeSize(tensor.dtype());
  const bool copied = size == 2   ? DropSigns<uint16_t>(tensor, &copy)
                      : size == 4 ? DropSigns<uint32_t>(tensor, &copy)
                                  : DropSigns<uint64_t>(tensor, &copy);
  return copied ? copy : tensor;
}

// The values are in the order of the wire: a result that is transposed is cols × rows.
template <typename T>
void AddTo(Tensor* tensor, const std::vector<double>& values, double scale, bool transposed) {
  auto flat = tensor->flat<T>();
  const int64_t rows = transposed ? tensor->dim_size(1) : 1;
  const int64_t cols = transposed ? tensor->dim_size(0) : flat.size();
  for (int64_t i = 0; i < flat.size(); ++i) {
    T& to = flat(i % cols * rows + i / cols);
    to = static_cast<T>(static_cast<double>(to) + scale * values[static_cast<size_t>(i)]);
  }
}

void AddTo(Tensor* tensor, const std::vector<double>& values, double scale, bool transposed) {
  if (tensor->NumElements() != static_cast<int64_t>(values.size())) return;
  switch (tensor->dtype()) {
    case tensorflow::DT_FLOAT: return AddTo<float>(tensor, values, scale, transposed);
    case tensorflow::DT_DOUBLE: return AddTo<double>(tensor, values, scale, transposed);
    case tensorflow::DT_HALF: return AddTo<Eigen::half>(tensor, values, scale, transposed);
    case tensorflow::DT_BFLOAT16:
      return AddTo<tensorflow::bfloat16>(tensor, values, scale, transposed);
    default: return;
  }
}

template <typename Bits>
void Transpose(const Tensor& from, Tensor* to) {
  constexpr int64_t kTile = 16;
  const int64_t rows = from.dim_size(0), cols = from.dim_size(1);
  const auto* in = static_cast<const Bits*>(from.data());
  auto* out = static_cast<Bits*>(to->data());
  for (int64_t row = 0; row < rows; row += kTile) {
    for (int64_t j = 0; j < cols; ++j) {
      for (int64_t i = row; i < std::min(row + kTile, rows); ++i) {
        out[j * rows + i] = in[i * cols + j];
      }
    }
  }
}

void Transpose(const Tensor& from, Tensor* to) {
  switch (tensorflow::DataTypeSize(from.dtype())) {
    case 2: return Transpose<uint16_t>(from, to);
    case 4: return Transpose<uint32_t>(from, to);
    default: return Transpose<uint64_t>(from, to);
  }
}

}  // namespace

Status NoBoard() {
  return Status::FailedPrecondition("the optimizer or tape that this graph was made for is gone");
}

int64_t Elements(const dad::TensorView& view) {
  int64_t count = 1;
  for (int64_t extent : view.shape) count *= extent;
  return count;
}

dad::TensorView MethodKernel::Run::NextDelta() {
  const Tensor delta = WithoutNegativeZeros(NextInput());
  call->Hold(delta);
  return ViewOf(delta);
}

const Tensor& MethodKernel::Run::NextInput() {
  const Tensor& tensor = context->input(input++);
  call->Hold(tensor);
  return tensor;
}

int64_t MethodKernel::Run::NextSamples(int64_t given, int64_t rows) {
  const int64_t samples = given == kComes ? NextInput().scalar<int64_t>()() : given;
  return samples > 0 && rows % samples == 0 ? samples : 0;
}

Request MethodKernel::MakeRequest(const Way& way, size_t name, double loss_scale) const {
  Request request = prototype_;
  request.name = names_[name];
  request.method = way.method;
  if (way.keeps) {
    request.prescale = 1.0 / loss_scale;
    request.postscale = loss_scale;
  }
  return request;
}

Result<dad::TensorView> MethodKernel::NewResult(Run* run) const {
  const int number = run->output++;
  Tensor* tensor = nullptr;
  const absl::Status allocated =
      run->context->allocate_output(number, shapes_[static_cast<size_t>(number)], &tensor);
  if (!allocated.ok()) return Status::InvalidArgument(std::string(allocated.message()));
  run->call->Hold(*tensor);
  return ViewOf(*tensor);
}

Status MethodKernel::EmptyResult(Run* run) const {
  Tensor* tensor = nullptr;
  const absl::Status allocated =
      run->context->allocate_output(run->output++, tensorflow::TensorShape({0}), &tensor);
  return allocated.ok() ? Status::Ok() : Status::InvalidArgument(std::string(allocated.message()));
}

// On the threads that TensorFlow has for its own products.
void MethodKernel::Form(OpKernelContext* context, const std::vector<Product>& products) {
  if (products.empty()) return;
  int64_t most = 0;
  for (const Product& product : products) {
    int64_t rows = 0;
    for (const dad::RowsSegment& segment : product.layer.rows) rows += segment.a.shape[0];
    most = std::max(most, rows * Elements(product.to));
  }
  const auto form = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Product& product = products[static_cast<size_t>(i)];
      dad::FormWeight(product.layer, product.to);
    }
  };
  constexpr int64_t kMultipliesPerCycle = 4;
  context->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      static_cast<int64_t>(products.size()), most / kMultipliesPerCycle + 1, form);
}

void MethodKernel::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  auto call = std::make_shared<Call>(context, std::move(done));
  const auto board = FindBoard(board_);
  if (!board) return call->Fail(NoBoard());
  Run run{.context = context,
          .call = call.get(),
          .loss_scale = context->input(1).scalar<double>()(),
          .requests = {},
          .notes = {},
          .products = {},
          .turned = {}};
  if (const Status status = AddRequests(*board, &run); !status.ok()) return call->Fail(status);
  Form(context, run.products);
  board->Sent();
  call->Start(
      std::move(run.requests), user_waits_,
      [this, board, loss_scale = run.loss_scale, notes = std::move(run.notes),
       turned = std::move(run.turned)](OpKernelContext* results,
                                       const Call::Tickets& tickets) mutable {
        board->Received();
        for (const Turned& one : turned) {
          Transpose(one.from, results->mutable_output(one.output));
        }
        for (size_t i = 0; i < tickets.size(); ++i) {
          notes[i].value = tickets[i]->value();
          if (notes[i].value > 0) board->Add(notes[i]);
        }
        for (size_t i = 0; i < names_.size(); ++i) {
          const std::vector<double> more = board->TakeReturned(names_[i]);
          if (!more.empty()) {
            AddTo(results->mutable_output(static_cast<int>(i)), more, loss_scale, transposed_[i]);
          }
        }
        return absl::OkStatus();
      },
      [board](const Status& error) {
        if (error.code() == dad::StatusCode::kFailedPrecondition) board->Part();
      });
}

}  // namespace dad_tensorflow
