// dad._lib._torch: the asynchronous calls, for Python. Loading it also registers
// the ops of register.cc.
#include <torch/csrc/utils/pybind.h>

#include "torch_ops/capture/python.h"
#include "torch_ops/ops/collective.h"
#include "torch_ops/ops/handles.h"
#include "torch_ops/ops/layers.h"
#include "torch_ops/ops/tensor_adapter.h"

namespace dad_torch {

namespace py = pybind11;
using dad::OpKind;
using dad::ReduceOp;

namespace {

int64_t Submit(int kind, std::vector<at::Tensor> tensors, bool grouped, bool in_place,
               std::string name, int op, int root_rank, double prescale, double postscale,
               int process_set, std::vector<int64_t> splits, uint32_t stream, std::string method,
               double scale, std::vector<int64_t> uncompressed_bytes) {
  Collective collective;
  collective.kind = static_cast<OpKind>(kind);
  collective.inputs = std::move(tensors);
  collective.in_place = in_place;
  collective.name = std::move(name);
  collective.op = static_cast<ReduceOp>(op);
  collective.root_rank = root_rank;
  collective.prescale = prescale;
  collective.postscale = postscale;
  collective.process_set = process_set;
  collective.splits = std::move(splits);
  collective.stream = stream;
  collective.method = std::move(method);
  collective.scale = scale;
  collective.uncompressed_bytes = std::move(uncompressed_bytes);
  auto pending = Pending::Start(std::move(collective));
  ThrowIfError(pending.status());
  return KeepHandle(std::move(pending).value(), grouped);
}

// (segments, derive, dense, dense_bias, output, output_bias, weight, bias) and perhaps
// (dense_square, dense_bias_square).
LayerParts ParseLayer(const py::tuple& layer) {
  constexpr size_t kParts = 8;
  constexpr size_t kPartsWithSquares = 10;
  if (layer.size() != kParts && layer.size() != kPartsWithSquares) {
    throw py::value_error("a layer has 8 or 10 parts, not " + std::to_string(layer.size()));
  }
  const auto tensor = [&](size_t i) {
    return i < layer.size() ? layer[i].cast<std::optional<at::Tensor>>() : std::nullopt;
  };
  LayerParts parts;
  parts.segments = layer[0].cast<std::vector<Segment>>();
  parts.derive = layer[1].cast<bool>();
  parts.dense = tensor(2);
  parts.dense_bias = tensor(3);
  parts.output = tensor(4);
  parts.output_bias = tensor(5);
  parts.weight = tensor(6);
  parts.bias = tensor(7);
  parts.dense_square = tensor(8);
  parts.dense_bias_square = tensor(9);
  return parts;
}

int64_t SubmitLayers(std::string name, std::string method, const std::vector<py::tuple>& layers,
                     const at::Tensor& like, int op, double prescale, double postscale,
                     int process_set, uint32_t stream, double scale, bool replan) {
  LayersRequest request;
  request.name = std::move(name);
  request.method = std::move(method);
  for (const py::tuple& layer : layers) request.layers.push_back(ParseLayer(layer));
  auto dtype = ToDType(like.scalar_type());
  ThrowIfError(dtype.status());
  request.dtype = dtype.value();
  request.op = static_cast<ReduceOp>(op);
  request.prescale = prescale;
  request.postscale = postscale;
  request.process_set = process_set;
  request.stream = stream;
  request.scale = scale;
  request.replan = replan;
  auto pending = StartLayers(std::move(request));
  ThrowIfError(pending.status());
  return KeepHandle(std::move(pending).value(), true);
}

bool Poll(int64_t handle) {
  auto done = PollHandle(handle);
  ThrowIfError(done.status());
  return done.value();
}

// (tensor or list of tensors or None, received splits, value)
py::tuple Wait(int64_t handle, std::optional<double> timeout_seconds) {
  auto taken = TakeHandle(handle);
  ThrowIfError(taken.status());
  Pending& pending = *taken.value().pending;
  const dad::Status status = pending.Finish(timeout_seconds);
  if (status.code() == dad::StatusCode::kTimeout) {
    GiveBackHandle(handle, std::move(taken).value());
    // Not an internal error: nothing is wrong with the engine, only the caller's patience ended.
    PyErr_SetString(PyExc_TimeoutError, status.message().c_str());
    throw py::error_already_set();
  }
  ThrowIfError(status);
  py::object output = py::none();
  if (taken.value().grouped) {
    output = py::cast(pending.results());
  } else if (!pending.results().empty()) {
    output = py::cast(pending.results()[0]);
  }
  return py::make_tuple(std::move(output), pending.received_splits(), pending.value());
}

// Nobody else may use the handle meanwhile.
bool WaitFor(int64_t handle, double seconds) {
  auto taken = TakeHandle(handle);
  ThrowIfError(taken.status());
  try {
    const bool done = taken.value().pending->WaitFor(seconds);
    GiveBackHandle(handle, std::move(taken).value());
    return done;
  } catch (...) {  // Ctrl-C
    GiveBackHandle(handle, std::move(taken).value());
    throw;
  }
}

void Forget(int64_t handle) { (void)TakeHandle(handle); }

}  // namespace

PYBIND11_MODULE(_torch, m) {
  m.def("submit", &Submit, py::arg("kind"), py::arg("tensors"), py::arg("grouped") = false,
        py::arg("in_place") = false, py::arg("name") = "", py::arg("op") = 0,
        py::arg("root_rank") = -1, py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
        py::arg("process_set") = 0, py::arg("splits") = std::vector<int64_t>(),
        py::arg("stream") = 0, py::arg("method") = "none", py::arg("scale") = 1.0,
        py::arg("uncompressed_bytes") = std::vector<int64_t>(), "Starts a collective; its handle.");
  m.def(
      "submit_layers", &SubmitLayers, py::kw_only(), py::arg("name"), py::arg("method"),
      py::arg("layers"), py::arg("like"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
      py::arg("process_set"), py::arg("stream"), py::arg("scale"), py::arg("replan"),
      "Starts the exchange of layers by a factor method; its handle. A layer is (segments, "
      "derive, dense, dense_bias, output, output_bias, weight, bias), and for methods that look at "
      "the variance (…, dense_square, dense_bias_square).");
  m.def(
      "is_unshared",
      // The caller's Python object and the argument here are two.
      [](const at::Tensor& tensor) {
        return tensor.use_count() <= 2 && tensor.storage().use_count() == 1;
      },
      "Whether nobody but the caller has the tensor or its memory.");
  m.def("poll", &Poll, "Whether wait() would return at once.");
  m.def("wait", &Wait, py::arg("handle"), py::arg("timeout_seconds") = std::nullopt,
        "Ends a handle: (result, received splits, value). TimeoutError leaves it as it is.");
  m.def("wait_for", &WaitFor, py::arg("handle"), py::arg("seconds"),
        "Whether a collective is over by then. Its handle is left as it is.");
  m.def("set_while_waiting", &SetWhileWaiting, py::arg("callback"),
        "Called from time to time by threads that wait for a collective; None: nothing is.");
  m.def("forget", &Forget, "Ends a handle without waiting for it.");

  DefineCapture(m);

  py::dict kinds;
  for (auto kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kAllToAll,
                    OpKind::kReduceScatter, OpKind::kBarrier, OpKind::kJoin}) {
    kinds[dad::Name(kind)] = static_cast<int>(kind);
  }
  m.attr("KINDS") = kinds;
}

}  // namespace dad_torch
