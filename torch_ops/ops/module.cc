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

// Both take the tensors out of what they are given: Python's object keeps no memory alive.
int64_t Submit(Collective& collective) {
  const bool grouped = collective.grouped;
  auto pending = Pending::Start(std::move(collective));
  ThrowIfError(pending.status());
  return KeepHandle(std::move(pending).value(), grouped);
}

int64_t SubmitLayers(LayersRequest& request) {
  auto pending = StartLayers(std::move(request));
  ThrowIfError(pending.status());
  return KeepHandle(std::move(pending).value(), true);
}

// What a collective ended with.
struct Finished {
  py::object output;  // a tensor, a list of them, or None
  std::vector<int64_t> received_splits;
  int64_t value;
};

bool Poll(int64_t handle) {
  auto done = PollHandle(handle);
  ThrowIfError(done.status());
  return done.value();
}

Finished Wait(int64_t handle, std::optional<double> timeout_seconds) {
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
  return {std::move(output), pending.received_splits(), pending.value()};
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

// Numbers of Python, which come from KINDS and from dad.basics.
OpKind KindOf(int number) {
  if (number < 0 || number > static_cast<int>(OpKind::kJoin)) {
    throw py::value_error("there is no collective " + std::to_string(number));
  }
  return static_cast<OpKind>(number);
}
ReduceOp OpOf(int number) {
  if (number < 0 || number > static_cast<int>(ReduceOp::kAdasum)) {
    throw py::value_error("there is no op " + std::to_string(number));
  }
  return static_cast<ReduceOp>(number);
}

// What Python fills in. An attribute that does not exist is an AttributeError.
void DefineRequests(py::module& m) {
  py::class_<RequestTerms>(m, "RequestTerms", "What is said of a request, whatever it carries.")
      .def_readwrite("name", &RequestTerms::name)
      .def_readwrite("method", &RequestTerms::method)
      .def_property(
          "op", [](const RequestTerms& terms) { return static_cast<int>(terms.op); },
          [](RequestTerms& terms, int op) { terms.op = OpOf(op); })
      .def_readwrite("prescale", &RequestTerms::prescale)
      .def_readwrite("postscale", &RequestTerms::postscale)
      .def_readwrite("process_set", &RequestTerms::process_set)
      .def_readwrite("stream", &RequestTerms::stream)
      .def_readwrite("scale", &RequestTerms::scale);
  py::class_<Collective, RequestTerms>(m, "Collective", "A collective of tensors.")
      .def(py::init([](int kind, std::vector<at::Tensor> tensors) {
             Collective collective;
             collective.kind = KindOf(kind);
             collective.inputs = std::move(tensors);
             return collective;
           }),
           py::arg("kind"), py::arg("tensors") = std::vector<at::Tensor>())
      .def_readwrite("grouped", &Collective::grouped)
      .def_readwrite("in_place", &Collective::in_place)
      .def_readwrite("root_rank", &Collective::root_rank)
      .def_readwrite("splits", &Collective::splits)
      .def_readwrite("uncompressed_bytes", &Collective::uncompressed_bytes);
  py::class_<LayerParts>(m, "Layer", "One layer of a request by a method that takes factors.")
      .def(py::init<>())
      .def_readwrite("segments", &LayerParts::segments)
      .def_readwrite("derive", &LayerParts::derive)
      .def_readwrite("dense", &LayerParts::dense)
      .def_readwrite("dense_bias", &LayerParts::dense_bias)
      .def_readwrite("output", &LayerParts::output)
      .def_readwrite("output_bias", &LayerParts::output_bias)
      .def_readwrite("weight", &LayerParts::weight)
      .def_readwrite("bias", &LayerParts::bias)
      .def_readwrite("dense_square", &LayerParts::dense_square)
      .def_readwrite("dense_bias_square", &LayerParts::dense_bias_square);
  py::class_<LayersRequest, RequestTerms>(m, "LayersRequest",
                                          "Layers, whose gradients are of the "
                                          "type of `like`.")
      .def(py::init([](std::vector<LayerParts> layers, const at::Tensor& like) {
             LayersRequest request;
             request.layers = std::move(layers);
             auto dtype = ToDType(like.scalar_type());
             ThrowIfError(dtype.status());
             request.dtype = dtype.value();
             return request;
           }),
           py::arg("layers"), py::arg("like"))
      .def_readwrite("replan", &LayersRequest::replan);
  py::class_<Finished>(m, "Finished", "What a collective ended with.")
      .def_readonly("output", &Finished::output)
      .def_readonly("received_splits", &Finished::received_splits)
      .def_readonly("value", &Finished::value);
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  DefineCapture(m);
  DefineRequests(m);
  m.def("submit", &Submit, py::arg("collective"),
        "Starts a collective, whose tensors it takes; its handle.");
  m.def("submit_layers", &SubmitLayers, py::arg("request"),
        "Starts the exchange of layers by a factor method, and takes their tensors; its handle.");
  m.def(
      "is_unshared",
      // The caller's Python object and the argument here are two.
      [](const at::Tensor& tensor) {
        return tensor.use_count() <= 2 && tensor.storage().use_count() == 1;
      },
      "Whether nobody but the caller has the tensor or its memory.");
  m.def("poll", &Poll, "Whether wait() would return at once.");
  m.def("wait", &Wait, py::arg("handle"), py::arg("timeout_seconds") = std::nullopt,
        "Ends a handle. TimeoutError leaves it as it is.");
  m.def("wait_for", &WaitFor, py::arg("handle"), py::arg("seconds"),
        "Whether a collective is over by then. Its handle is left as it is.");
  m.def("set_while_waiting", &SetWhileWaiting, py::arg("callback"),
        "Called from time to time by threads that wait for a collective; None: nothing is.");
  m.def("forget", &Forget, "Ends a handle without waiting for it.");

  py::dict kinds;
  for (auto kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBroadcast, OpKind::kAllToAll,
                    OpKind::kReduceScatter, OpKind::kBarrier, OpKind::kJoin}) {
    kinds[dad::Name(kind)] = static_cast<int>(kind);
  }
  m.attr("KINDS") = kinds;
}

}  // namespace dad_torch
