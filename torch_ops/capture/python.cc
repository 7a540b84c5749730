// capture.h for Python.
#include "torch_ops/capture/python.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "torch_ops/capture/capture.h"
#include "torch_ops/capture/hooks.h"

namespace dad_torch {

namespace py = pybind11;

namespace {

// Whether tensors were changed in place since; does not keep their memory.
class Versions {
 public:
  explicit Versions(const std::vector<Segment>& segments) {
    for (const Segment& segment : segments) {
      for (const at::Tensor* tensor : {&segment.a, &segment.d, &segment.x}) {
        if (!tensor->defined() || tensor->is_inference()) continue;  // the latter have none
        const auto& counter = tensor->unsafeGetTensorImpl()->version_counter();
        seen_.emplace_back(counter, counter.current_version());
      }
    }
  }

  bool changed() const {
    return std::any_of(seen_.begin(), seen_.end(), [](const auto& counter_and_version) {
      return counter_and_version.first.current_version() != counter_and_version.second;
    });
  }

 private:
  std::vector<std::pair<c10::VariableVersion, uint32_t>> seen_;  // counters are shared
};

CaptureMode ParseMode(const std::string& mode) {
  if (mode == "off") return CaptureMode::kOff;
  if (mode == "rows") return CaptureMode::kRows;
  if (mode == "rows_and_dense") return CaptureMode::kRowsAndDense;
  if (mode == "samples") return CaptureMode::kSamples;
  throw py::value_error("\"" + mode + "\" is not a mode: off, rows, rows_and_dense, samples");
}

const char* Name(Activation activation) {
  switch (activation) {
    case Activation::kRelu: return "relu";
    case Activation::kLeakyRelu: return "leaky_relu";
    case Activation::kTanh: return "tanh";
    case Activation::kSigmoid: return "sigmoid";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kSilu: return "silu";
  }
  return "";
}

py::object OrNone(const at::Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

PyTypeObject* overlooked_hooks = nullptr;  // guarded by the GIL

// The hooks that Python puts on a tensor are in a dict, which stays when they are removed.
bool LooksAtGradient(const at::Tensor& param) {
  const py::gil_scoped_acquire acquire;
  const py::object hooks = py::cast(param).attr("_backward_hooks");
  if (!PyDict_Check(hooks.ptr())) return true;  // it was put there by C++
  Py_ssize_t place = 0;
  PyObject* each = nullptr;
  while (PyDict_Next(hooks.ptr(), &place, nullptr, &each)) {
    if (Py_TYPE(each) != overlooked_hooks) return true;
  }
  return false;
}

}  // namespace

void DefineCapture(py::module_& m) {
  py::class_<SegmentLink>(m, "SegmentLink")
      .def_property_readonly("activation", [](const SegmentLink& l) { return Name(l.activation); })
      .def_readonly("slope", &SegmentLink::slope)
      .def_readonly("upper_id", &SegmentLink::upper_id)
      .def_readonly("upper_serial", &SegmentLink::upper_serial)
      .def_readonly("upper_index", &SegmentLink::upper_index);
  py::class_<Segment>(m, "Segment")
      .def_property_readonly(
          "kind",
          [](const Segment& s) { return s.kind == SegmentKind::kRows ? "rows" : "indexed"; })
      .def_property_readonly("a", [](const Segment& s) { return OrNone(s.a); })
      .def_property_readonly("d", [](const Segment& s) { return OrNone(s.d); })
      .def_property_readonly("index", [](const Segment& s) { return OrNone(s.index); })
      .def_property_readonly("x", [](const Segment& s) { return OrNone(s.x); })
      .def_readonly("out_begin", &Segment::out_begin)
      .def_readonly("has_bias", &Segment::has_bias)
      .def_readonly("samples", &Segment::samples)
      .def_readonly("even", &Segment::even)
      .def_readonly("batch", &Segment::batch)
      .def_readonly("serial", &Segment::serial)
      .def_property_readonly("link", [](const Segment& s) -> py::object {
        return s.link ? py::cast(*s.link) : py::none();
      });

  m.def(
      "capture_track",
      [](const at::Tensor& param, const std::string& mode, int owner) {
        return TrackParameter(param, ParseMode(mode), owner);
      },
      py::arg("param"), py::arg("mode"), py::arg("owner") = 0, "Tracks a parameter; its id.");
  m.def(
      "capture_set_mode",
      [](const at::Tensor& param, const std::string& mode) {
        SetCaptureMode(param, ParseMode(mode));
      },
      py::arg("param"), py::arg("mode"));
  m.def("capture_untrack", &UntrackParameter, py::arg("param"), py::arg("owner") = 0);
  m.def("capture_fold_bias", &FoldBias, py::arg("weight"), py::arg("bias"),
        "Lets the bias ride in the weight's segments.");
  m.def(
      "capture_folded_bias", [](const at::Tensor& weight) { return OrNone(FoldedBias(weight)); },
      py::arg("weight"));
  m.def("capture_take", &TakeSegments, py::arg("param"), "The segments since the last call.");
  m.def("capture_count", &CountSegments, py::arg("param"));
  m.def("capture_reason", &CaptureReason, py::arg("param"),
        "Why its gradient did not, or not only, come as segments; empty if it did.");
  m.def(
      "capture_samples",
      [](const std::vector<at::Tensor>& params) { return CaptureSamples(params); },
      py::arg("params"), "Leading dimension of the input of the earliest captured op; -1: none.");
  m.def(
      "capture_overlook_hooks",
      [](const py::type& type) {
        overlooked_hooks = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
        SetHookJudge(&LooksAtGradient);
      },
      py::arg("type"), "Hooks of this type do not look at the gradient that they are given.");
  py::class_<Versions>(m, "Versions", "Of what segments hold, as it is now.")
      .def(py::init<const std::vector<Segment>&>(), py::arg("segments"))
      .def("changed", &Versions::changed);
  m.def(
      "capture_begin_step", [](const std::vector<at::Tensor>& params) { BeginCaptureStep(params); },
      py::arg("params"));
}

}  // namespace dad_torch
