// The kernels of exchanges by a method: the plan of a step, and the exchange of layers.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dad/engine.h"
#include "dad/gradient.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"
#include "tf_ops/kernels/call.h"
#include "tf_ops/kernels/tensor_adapter.h"
#include "tf_ops/plan/board.h"

namespace dad_tensorflow {
namespace {

using dad::Contribution;
using dad::LayerInput;
using dad::Request;
using dad::Result;
using dad::Status;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

Status NoBoard() {
  return Status::FailedPrecondition("the optimizer or tape that this graph was made for is gone");
}

class Plan final : public AsyncOpKernel {
 public:
  explicit Plan(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("board", &board_));
    OP_REQUIRES_OK(context, context->GetAttr("trace", &trace_));
    OP_REQUIRES_OK(context, context->GetAttr("pairs", &pairs_));
    OP_REQUIRES_OK(context, context->GetAttr("has_rows", &has_rows_));
    OP_REQUIRES(context, pairs_.size() == has_rows_.size(),
                absl::InvalidArgumentError("pairs and has_rows differ in length"));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto board = FindBoard(board_);
    OP_REQUIRES_ASYNC(context, board != nullptr, ToTensorFlow(NoBoard()), done);
    const auto flat = context->input(0).flat<int64_t>();
    std::vector<int64_t> counts(flat.data(), flat.data() + flat.size());
    board->Begin(trace_, std::move(counts), [this, board, context, done](const Status& status) {
      if (status.code() == dad::StatusCode::kFailedPrecondition) {
        // Other tensors of the step need no plan, and may have been sent.
        if (const auto engine = dad::ProcessEngine()) engine->GiveUp(StepOf(context), status);
      }
      OP_REQUIRES_ASYNC(context, status.ok(), ToTensorFlow(status), done);
      Tensor* as_rows = nullptr;
      Tensor* in_chain = nullptr;
      const tensorflow::TensorShape shape({static_cast<int64_t>(pairs_.size())});
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &as_rows), done);
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, shape, &in_chain), done);
      Tensor* compares = nullptr;
      OP_REQUIRES_OK_ASYNC(context, context->allocate_output(2, {}, &compares), done);
      compares->scalar<bool>()() = board->TakeCompare();
      for (size_t i = 0; i < pairs_.size(); ++i) {
        const PairWays ways = board->Ways(pairs_[i]);
        as_rows->vec<bool>()(static_cast<int64_t>(i)) = has_rows_[i] && ways.weight.as_rows;
        in_chain->vec<bool>()(static_cast<int64_t>(i)) = has_rows_[i] && ways.in_chain;
      }
      done();
    });
  }

 private:
  int64_t board_ = 0;
  int64_t trace_ = 0;
  std::vector<int> pairs_;
  std::vector<bool> has_rows_;
};

// What comes of one pair; see ops.cc.
struct Part {
  int pair = 0;
  int rows = 0;
  int indexed = 0;
  bool has_dense = false;
  bool has_bias = false;
  bool transposed = false;  // the result, and in a chain the weight, lie as in × out
  bool forms = false;  // the rows come in any case: where the plan wants it formed, form it here
  std::vector<int64_t> begins;
  std::vector<int64_t> samples;  // of each (A, D) and (index, rows); kComes: as a tensor
};
constexpr int64_t kComes = -1;

std::string_view Next(std::string_view& rest, char end) {
  const size_t at = rest.find(end);
  const std::string_view found = rest.substr(0, at);
  rest = at == std::string_view::npos ? std::string_view() : rest.substr(at + 1);
  return found;
}

Part ParsePart(std::string_view text) {
  Part part;
  while (!text.empty()) {
    std::string_view value = Next(text, ';');
    const std::string_view key = Next(value, '=');
    const int number = std::atoi(std::string(value).c_str());
    if (key == "pair") part.pair = number;
    if (key == "rows") part.rows = number;
    if (key == "indexed") part.indexed = number;
    if (key == "dense") part.has_dense = number != 0;
    if (key == "bias") part.has_bias = number != 0;
    if (key == "transposed") part.transposed = number != 0;
    if (key == "forms") part.forms = number != 0;
    while ((key == "begin" || key == "samples") && !value.empty()) {
      std::vector<int64_t>& numbers = key == "begin" ? part.begins : part.samples;
      numbers.push_back(std::atoll(std::string(Next(value, ',')).c_str()));
    }
  }
  return part;
}

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

// What exchanges of pairs and of chains share.
class MethodKernel : public AsyncOpKernel {
 public:
  explicit MethodKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("board", &board_));
    std::vector<std::string> parts;
    OP_REQUIRES_OK(context, context->GetAttr("parts", &parts));
    for (const std::string& text : parts) {
      parts_.push_back(ParsePart(text));
      transposed_.push_back(parts_.back().transposed);
      if (parts_.back().has_bias) transposed_.push_back(false);
    }
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    OP_REQUIRES_OK(context, context->GetAttr("dtypes", &dtypes_));
    std::vector<tensorflow::PartialTensorShape> shapes;
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes));
    for (const auto& partial : shapes) {
      tensorflow::TensorShape shape;
      OP_REQUIRES(context, partial.AsTensorShape(&shape),
                  absl::InvalidArgumentError("the shape of a result is not known"));
      shapes_.push_back(shape);
    }
    int op = 0;
    OP_REQUIRES_OK(context, context->GetAttr("reduce_op", &op));
    prototype_.kind = dad::OpKind::kAllReduce;
    prototype_.op = static_cast<dad::ReduceOp>(op);
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &prototype_.process_set));
    int64_t stream = 0;
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream));
    prototype_.stream = static_cast<uint32_t>(stream);
    std::string prescale, postscale;
    OP_REQUIRES_OK(context, context->GetAttr("prescale", &prescale));
    OP_REQUIRES_OK(context, context->GetAttr("postscale", &postscale));
    prototype_.prescale = std::strtod(prescale.c_str(), nullptr);
    prototype_.postscale = std::strtod(postscale.c_str(), nullptr);
    OP_REQUIRES_OK(context, context->GetAttr("user_waits", &user_waits_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override;

 protected:
  // A product of factors that the plan wants formed.
  struct Product {
    LayerInput layer;
    dad::TensorView to;  // out × in
  };
  // A result that comes as out × in, and the output that is its transpose.
  struct Turned {
    Tensor from;
    int output;
  };
  // The state of one run.
  struct Run {
    OpKernelContext* context;
    Call* call;
    double loss_scale;
    int input = 2;
    int output = 0;
    std::vector<Request> requests;
    std::vector<Note> notes;  // whose each request is
    std::vector<Product> products;
    std::vector<Turned> turned;

    // The gradient at the output of a layer whose rows are sent.
    dad::TensorView NextDelta() {
      const Tensor delta = WithoutNegativeZeros(NextInput());
      call->Hold(delta);
      return ViewOf(delta);
    }
    const Tensor& NextInput() {
      const Tensor& tensor = context->input(input++);
      call->Hold(tensor);
      return tensor;
    }
    // For segments of `rows` rows; 0: every row is a sample.
    int64_t NextSamples(int64_t given, int64_t rows) {
      const int64_t samples = given == kComes ? NextInput().scalar<int64_t>()() : given;
      return samples > 0 && rows % samples == 0 ? samples : 0;
    }
  };

  virtual Status AddRequests(const Board& board, Run* run) const = 0;
  static void Form(OpKernelContext* context, const std::vector<Product>& products);
  Request MakeRequest(const Way& way, size_t name, double loss_scale) const;
  // Output number run->output, which is counted up.
  Result<dad::TensorView> NewResult(Run* run) const;
  Status EmptyResult(Run* run) const;

  const std::vector<Part>& parts() const { return parts_; }
  const std::string& name(size_t number) const { return names_[number]; }

 private:
  int64_t board_ = 0;
  std::vector<Part> parts_;
  std::vector<std::string> names_;
  std::vector<bool> transposed_;  // of each result
  tensorflow::DataTypeVector dtypes_;
  std::vector<tensorflow::TensorShape> shapes_;
  Request prototype_;
  bool user_waits_ = false;
};

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

int64_t Elements(const dad::TensorView& view) {
  int64_t count = 1;
  for (int64_t extent : view.shape) count *= extent;
  return count;
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

// Pairs of weights and biases.
class Exchange final : public MethodKernel {
 public:
  using MethodKernel::MethodKernel;

 private:
  Status AddRequests(const Board& board, Run* run) const override {
    for (const Part& part : parts()) {
      const Status status = AddPair(part, board.Ways(part.pair), run);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }
  Status AddPair(const Part& part, const PairWays& ways, Run* run) const;
  // One tensor, or a layer, formed.
  Status AddFormed(const Way& way, const dad::TensorView& gradient, const dad::TensorView& result,
                   const Note& whose, Run* run) const;
};

Status Exchange::AddFormed(const Way& way, const dad::TensorView& gradient,
                           const dad::TensorView& result, const Note& whose, Run* run) const {
  Request request = MakeRequest(way, static_cast<size_t>(run->output) - 1, run->loss_scale);
  Contribution mine;
  if (way.by_layer) {
    LayerInput layer;
    layer.dense = gradient;
    layer.output = result;
    mine.input.dtype = result.dtype;
    mine.input.shape = {Elements(result)};
    mine.layers.push_back(std::move(layer));
  } else {
    mine.input = gradient;
    mine.output = result;
  }
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back(whose);
  return Status::Ok();
}

Status Exchange::AddPair(const Part& part, const PairWays& ways, Run* run) const {
  const bool by_layer = ways.weight.by_layer;
  const bool sends_rows = dad::ExchangesRows(ways.weight.method);
  LayerInput layer;
  int64_t rows = 0;
  for (int i = 0; i < part.rows; ++i) {
    dad::RowsSegment segment;
    segment.a = ViewOf(run->NextInput());
    segment.d = sends_rows ? run->NextDelta() : ViewOf(run->NextInput());
    segment.out_begin = part.begins[static_cast<size_t>(i)];
    rows += segment.a.shape[0];
    segment.samples = run->NextSamples(part.samples[static_cast<size_t>(i)], segment.a.shape[0]);
    // An empty batch has no rows.
    if (segment.a.shape[0] > 0) layer.rows.push_back(std::move(segment));
  }
  for (int i = 0; i < part.indexed; ++i) {
    dad::IndexedSegment segment;
    segment.index = ViewOf(run->NextInput());
    segment.x = ViewOf(run->NextInput());
    rows += segment.x.shape[0];
    segment.samples =
        run->NextSamples(part.samples[static_cast<size_t>(part.rows + i)], segment.x.shape[0]);
    if (segment.x.shape[0] > 0) layer.indexed.push_back(std::move(segment));
  }
  bool has_rows = part.rows + part.indexed > 0;
  bool has_dense = part.has_dense;
  dad::TensorView dense;
  if (part.has_dense) dense = ViewOf(run->NextInput());
  const Tensor* bias = part.has_bias ? &run->NextInput() : nullptr;
  const auto weight_name = static_cast<size_t>(run->output);
  Result<dad::TensorView> result = NewResult(run);
  if (!result.ok()) return result.status();
  dad::TensorView plain_result = result.value();  // out × in
  if (has_rows && part.forms && !ways.weight.as_rows) {
    dense = plain_result;
    if (by_layer || part.transposed) {
      if (part.transposed) std::swap(dense.shape[0], dense.shape[1]);
      Result<Tensor> formed = run->call->NewTensor(dense.dtype, dense.shape);
      if (!formed.ok()) return formed.status();
      dense = ViewOf(formed.value());
      run->call->Hold(formed.value());
      if (!by_layer) {
        plain_result = dense;
        run->turned.push_back({std::move(formed).value(), run->output - 1});
      }
    }
    run->products.push_back({std::exchange(layer, {}), dense});
    has_rows = false;
    has_dense = true;
  }
  if (!by_layer) {
    if (has_rows || !has_dense) {
      return Status::Internal("the plan changed within a step of \"" + name(weight_name) + '"');
    }
    const Status status = AddFormed(ways.weight, dense, plain_result, {.pair = part.pair}, run);
    if (!status.ok()) return status;
  }
  dad::TensorView bias_result;
  const bool rides = by_layer && ways.bias_rides && bias != nullptr;
  if (bias != nullptr) {
    Result<dad::TensorView> second = NewResult(run);
    if (!second.ok()) return second.status();
    bias_result = second.value();
    if (!rides) {
      const Status status = AddFormed(ways.bias, ViewOf(*bias), bias_result,
                                      {.pair = part.pair, .of_bias = true}, run);
      if (!status.ok()) return status;
    }
  }
  if (!by_layer) return Status::Ok();

  Request request = MakeRequest(ways.weight, weight_name, run->loss_scale);
  Contribution mine;
  layer.dense = dense;
  layer.output = result.value();
  layer.transposed = part.transposed;
  int64_t elements = Elements(layer.output);
  if (rides) {
    layer.output_bias = bias_result;
    elements += Elements(bias_result);
    if (has_dense && !has_rows) {
      layer.dense_bias = ViewOf(*bias);
    } else if (has_dense) {
      // The rows have all of the bias's gradient.
      Tensor zeros(bias->dtype(), bias->shape());
      std::memset(zeros.data(), 0, zeros.TotalBytes());
      run->call->Hold(zeros);
      layer.dense_bias = ViewOf(zeros);
    }
  }
  mine.input.dtype = layer.output.dtype;
  mine.input.shape = {elements};
  // A graph that cannot give what was planned for, or gives more of it.
  mine.replan = ways.weight.as_rows && (!has_rows || rows > ways.weight.most_rows);
  mine.layers.push_back(std::move(layer));
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back({.pair = part.pair});
  return Status::Ok();
}

// Layers that may form chains.
class ExchangeChain final : public MethodKernel {
 public:
  using MethodKernel::MethodKernel;

 private:
  // A layer, with the places of its results among the outputs.
  struct Given {
    LayerInput layer;
    int output = 0;
    bool has_bias = false;
  };

  Status AddRequests(const Board& board, Run* run) const override;
  Status AddChain(const Chain& chain, std::map<int, Given>* given, Run* run) const;
};

Status ExchangeChain::AddRequests(const Board& board, Run* run) const {
  std::map<int, Given> given;  // by pair
  int output = 0;
  for (const Part& part : parts()) {
    Given& one = given[part.pair];
    dad::RowsSegment segment;
    segment.a = ViewOf(run->NextInput());
    segment.d = run->NextDelta();
    if (segment.a.shape[0] > 0) one.layer.rows.push_back(std::move(segment));
    one.layer.weight = ViewOf(run->NextInput());
    if (part.has_bias) one.layer.bias = ViewOf(run->NextInput());
    one.layer.transposed = part.transposed;
    one.has_bias = part.has_bias;
    one.output = output;
    output += part.has_bias ? 2 : 1;
  }
  for (const Chain& chain : board.Chains()) {
    bool is_here = true;
    for (const auto& member : chain.members) is_here = is_here && given.contains(member.pair);
    if (!is_here) continue;
    const Status status = AddChain(chain, &given, run);
    if (!status.ok()) return status;
    for (const auto& member : chain.members) {
      if (!member.passes) given.erase(member.pair);
    }
  }
  for (const auto& [pair, one] : given) {
    for (int i = 0; i < (one.has_bias ? 2 : 1); ++i) {
      run->output = one.output + i;
      const Status status = EmptyResult(run);
      if (!status.ok()) return status;
    }
  }
  return Status::Ok();
}

Status ExchangeChain::AddChain(const Chain& chain, std::map<int, Given>* given, Run* run) const {
  const size_t first = static_cast<size_t>((*given)[chain.members[0].pair].output);
  Request request = MakeRequest(chain.way, first, run->loss_scale);
  Contribution mine;
  int64_t elements = 0;
  for (size_t i = 0; i < chain.members.size(); ++i) {
    const Given& one = (*given)[chain.members[i].pair];
    LayerInput layer = one.layer;
    const bool is_top = i + 1 == chain.members.size();
    for (dad::RowsSegment& segment : layer.rows) {
      mine.replan = mine.replan || segment.a.shape[0] > chain.way.most_rows;
      if (!is_top) segment.d = dad::TensorView();  // follows from the layer above
    }
    if (!chain.members[i].passes) {
      run->output = one.output;
      Result<dad::TensorView> result = NewResult(run);
      if (!result.ok()) return result.status();
      layer.output = result.value();
      elements += Elements(layer.output);
      if (one.has_bias) {
        Result<dad::TensorView> bias = NewResult(run);
        if (!bias.ok()) return bias.status();
        layer.output_bias = bias.value();
        elements += Elements(layer.output_bias);
      }
    }
    mine.layers.push_back(std::move(layer));
  }
  mine.input.dtype = mine.layers[0].weight.dtype;
  mine.input.shape = {elements};
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back({.pair = chain.members[0].pair});
  return Status::Ok();
}

class ReturnLast final : public tensorflow::OpKernel {
 public:
  explicit ReturnLast(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream_));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
    if (engine && !context->input(0).scalar<bool>()()) {
      engine->ReturnLast(process_set_, static_cast<uint32_t>(stream_));
    }
  }

 private:
  int process_set_ = 0;
  int64_t stream_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("DadReturnLast").Device(tensorflow::DEVICE_CPU), ReturnLast);
REGISTER_KERNEL_BUILDER(Name("DadPlan").Device(tensorflow::DEVICE_CPU), Plan);
REGISTER_KERNEL_BUILDER(Name("DadExchange").Device(tensorflow::DEVICE_CPU), Exchange);
REGISTER_KERNEL_BUILDER(Name("DadExchangeChain").Device(tensorflow::DEVICE_CPU), ExchangeChain);

}  // namespace
}  // namespace dad_tensorflow
