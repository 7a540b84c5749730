// The signatures of dad's ops.
//
// All that talk to other ranks are stateful: no optimizer may run them while it folds constants,
// merge two of them or drop one. In a tf.function that would also make them run one after the
// other; python/dad/tensorflow/graph.py says which may run at any time.
//
//   names        of the tensors on the wire. One for all: they are sent together or not at all.
//   Empty:
//                a running number
//   stream       requests of different streams never wait for each other
//   uncompressed_bytes
//                of each tensor, before it was compressed for the wire; empty: none was
//   user_waits   whether nothing else is submitted before this is done: eager calls
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status LikeInputs(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(i));
  return absl::OkStatus();
}

// How many rows come out depends on the other ranks. Numbers gather to a vector.
absl::Status OpenRows(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    ShapeHandle shape = c->input(i);
    if (c->RankKnown(shape) && c->Rank(shape) == 0) {
      shape = c->Vector(c->UnknownDim());
    } else if (c->RankKnown(shape)) {
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
    }
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status AlltoallShape(InferenceContext* c) {
  ShapeHandle shape, splits;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &splits));
  TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->UnknownDim(), &shape));
  c->set_output(0, shape);
  c->set_output(1, c->Vector(c->UnknownDim()));
  return absl::OkStatus();
}

#define DAD_TYPES "{uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool}"

REGISTER_OP("DadAllreduce")
    .Attr("T: list(" DAD_TYPES ") >= 1")
    .Attr("names: list(string)")
    .Attr("uncompressed_bytes: list(int) = []")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")  // as text: an attribute of type float has 24 bits
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("tensors: T")
    .Output("reduced: T")
    .SetIsStateful()
    .SetShapeFn(LikeInputs);

REGISTER_OP("DadReducescatter")
    .Attr("T: list(" DAD_TYPES ") >= 1")
    .Attr("names: list(string)")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("tensors: T")
    .Output("scattered: T")
    .SetIsStateful()
    .SetShapeFn(OpenRows);

REGISTER_OP("DadAllgather")
    .Attr("T: list(" DAD_TYPES ") >= 1")
    .Attr("names: list(string)")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("tensors: T")
    .Output("gathered: T")
    .SetIsStateful()
    .SetShapeFn(OpenRows);

REGISTER_OP("DadBroadcast")
    .Attr("T: list(" DAD_TYPES ") >= 1")
    .Attr("names: list(string)")
    .Attr("root_rank: int")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("tensors: T")
    .Output("sent: T")
    .SetIsStateful()
    .SetShapeFn(LikeInputs);

REGISTER_OP("DadBroadcastVariables")
    .Attr("N: int >= 1")
    .Attr("names: list(string)")
    .Attr("root_rank: int")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("resources: N * resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("DadAlltoall")
    .Attr("T: " DAD_TYPES)
    .Attr("names: list(string)")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("tensor: T")
    .Input("splits: int32")  // empty: even
    .Output("received: T")
    .Output("received_splits: int32")
    .SetIsStateful()
    .SetShapeFn(AlltoallShape);

// The plan (board.h) of this step. pairs: those of this graph, by their places in the plan; counts:
// the rows, indexed rows and samples that this rank has of each; has_rows: whether the graph can
// give factors of it.
REGISTER_OP("DadPlan")
    .Attr("board: int")
    .Attr("trace: int")
    .Attr("pairs: list(int)")
    .Attr("has_rows: list(bool)")
    .Input("counts: int64")
    .Output("as_rows: bool")   // for each pair
    .Output("in_chain: bool")  // for each pair
    .Output("compares: bool")  // the graph compares its replica in this step
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<bool> has_rows;
      TF_RETURN_IF_ERROR(c->GetAttr("has_rows", &has_rows));
      for (int i = 0; i < 2; ++i) {
        c->set_output(i, c->Vector(static_cast<int64_t>(has_rows.size())));
      }
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    });

absl::Status GivenShapes(InferenceContext* c) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  for (size_t i = 0; i < shapes.size(); ++i) {
    ShapeHandle shape;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
    c->set_output(static_cast<int>(i), shape);
  }
  return absl::OkStatus();
}

// Pairs of a weight and a bias by the methods that the plan has for them.
//   parts   what comes of each pair: "pair=0;rows=1;indexed=0;dense=0;bias=1;begin=0;transposed=1":
//           its place in the plan; how many (A, D) and (index, rows); whether a formed part of the
//           weight's gradient comes, as out x columns; whether there is a bias, of which the
//           gradient comes; where the D of each (A, D) begin among the outputs; whether the result
//           is wanted as columns x out. "samples=32,-1": how many samples each (A, D) and (index,
//           rows) has; -1: that comes as a tensor behind them. "forms=1": the plan may want it
//           formed, then it is formed here
//   names   of each pair: the weight's, and the bias's if there is one
// Results: of each pair the weight's gradient, and the bias's.
REGISTER_OP("DadExchange")
    .Attr("board: int")
    .Attr("parts: list(string) >= 1")
    .Attr("names: list(string)")
    .Attr("T: list(type)")
    .Attr("dtypes: list({half, bfloat16, float, double})")
    .Attr("shapes: list(shape)")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("as_rows: bool")  // that the plan has been made
    .Input("loss_scale: double")
    .Input("tensors: T")
    .Output("results: dtypes")
    .SetIsStateful()
    .SetShapeFn(GivenShapes);

// Layers of which each one's delta follows from that of the next, by the chains that the plan makes
// of them. Of each comes A, D, the number of samples, its weight as the result is wanted, and its
// bias, if there is one. The results of those that are in no chain are empty.
REGISTER_OP("DadExchangeChain")
    .Attr("board: int")
    .Attr("parts: list(string) >= 1")
    .Attr("names: list(string)")
    .Attr("T: list(type)")
    .Attr("dtypes: list({half, bfloat16, float, double})")
    .Attr("shapes: list(shape)")
    .Attr("reduce_op: int")
    .Attr("prescale: string = '1'")
    .Attr("postscale: string = '1'")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Attr("user_waits: bool = false")
    .Input("as_rows: bool")
    .Input("loss_scale: double")
    .Input("tensors: T")
    .Output("results: dtypes")
    .SetIsStateful()
    .SetShapeFn(GivenShapes);

// Unless the gradients were finite, what the stream's last requests applied is kept: the step is
// left out.
REGISTER_OP("DadReturnLast")
    .Attr("process_set: int = 0")
    .Attr("stream: int = 0")
    .Input("finite: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Its inputs, once all are there. TensorFlow's own IdentityN would do, if its optimizer of
// dependencies did not take it apart.
REGISTER_OP("DadAllOrNone")
    .Attr("T: list(type) >= 1")
    .Input("tensors: T")
    .Output("same: T")
    .SetShapeFn(LikeInputs);

REGISTER_OP("DadJoin")
    .Attr("user_waits: bool = false")
    .Output("last_rank: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("DadBarrier")
    .Attr("process_set: int = 0")
    .Attr("user_waits: bool = false")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

REGISTER_OP("DadRank")
    .Output("rank: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("DadSize")
    .Attr("process_set: int = 0")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("DadLocalRank")
    .Output("local_rank: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("DadLocalSize")
    .Output("local_size: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("DadProcessSetIncluded")
    .Attr("process_set: int = 0")
    .Output("included: int32")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

}  // namespace
