// What the kernels that exchange layers by a method share: from attributes and inputs to requests,
// from results to outputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tf_ops/kernels/call.h"
#include "tf_ops/kernels/part.h"
#include "tf_ops/kernels/tensor_adapter.h"
#include "tf_ops/plan/board.h"

namespace dad_tensorflow {

using dad::Contribution;
using dad::LayerInput;
using dad::Request;
using dad::Result;
using dad::Status;
using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The error of a graph whose optimizer or tape no longer exists.
Status NoBoard();

int64_t Elements(const dad::TensorView& view);

// What exchanges of pairs and of chains share.
class MethodKernel : public AsyncOpKernel {
 public:
  explicit MethodKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("board", &board_));
    std::vector<std::string> parts;
    OP_REQUIRES_OK(context, context->GetAttr("parts", &parts));
    for (const std::string& text : parts) {
      dad::Result<Part> part = ParsePart(text);
      OP_REQUIRES(context, part.ok(), ToTensorFlow(part.status()));
      parts_.push_back(std::move(part).value());
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
    dad::TensorView NextDelta();
    const Tensor& NextInput();
    // For segments of `rows` rows; 0: every row is a sample.
    int64_t NextSamples(int64_t given, int64_t rows);
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

}  // namespace dad_tensorflow
