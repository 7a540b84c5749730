#include "torch_ops/ops/collective.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <sstream>

#include "dad/engine.h"
#include "torch_ops/device/device_stream.h"
#include "torch_ops/ops/tensor_adapter.h"

namespace dad_torch {

namespace py = pybind11;
using dad::OpKind;
using dad::Result;
using dad::Status;
using dad::StatusCode;

namespace {

bool ResultHasShapeOfInput(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kBroadcast;
}

at::Tensor NewOutput(const std::optional<c10::Stream>& stream, dad::DType dtype,
                     const dad::Shape& shape) {
  return stream.has_value() ? AllocateOn(*stream, dtype, shape) : Allocate(dtype, shape);
}

Status NotFinished(const std::string& name, double seconds) {
  std::ostringstream message;
  message << '"' << name << "\": not finished after " << seconds
          << " s; it goes on, and its handle can be waited for again";
  return Status::Timeout(message.str());
}

// Never destroyed: at exit there may be no interpreter.
py::object& WhileWaiting() {
  static auto* callback = new py::object(py::none());
  return *callback;
}

}  // namespace

void SetWhileWaiting(py::object callback) { WhileWaiting() = std::move(callback); }

Result<std::unique_ptr<Pending>> Pending::Start(Collective collective) {
  auto engine = dad::ProcessEngine();
  if (!engine) return Status::InvalidArgument("dad has not been initialized; call init() first");

  auto pending = std::make_unique<Pending>();
  pending->kind_ = collective.kind;
  pending->process_set_ = collective.process_set;
  pending->in_place_ = collective.in_place;

  dad::Request request;
  request.kind = collective.kind;
  request.op = collective.op;
  request.root_rank = collective.root_rank;
  request.prescale = collective.prescale;
  request.postscale = collective.postscale;
  request.process_set = collective.process_set;
  request.stream = collective.stream;
  request.method = collective.method;

  const bool like_input = ResultHasShapeOfInput(collective.kind);
  auto alive = std::make_shared<std::vector<at::Tensor>>();
  alive->reserve(collective.inputs.size());
  request.tensors.reserve(collective.inputs.size());
  auto& outputs = pending->outputs_->tensors;
  outputs.reserve(collective.inputs.size());
  for (at::Tensor& input : collective.inputs) {
    auto dense = Dense(input);
    if (!dense.ok()) {
      const Status& why = dense.status();
      if (why.code() != dad::StatusCode::kInvalidArgument || collective.name.empty()) return why;
      return Status::InvalidArgument('"' + collective.name + "\": " + why.message());
    }
    dad::Contribution contribution;
    contribution.input = ViewOf(dense.value());
    contribution.splits = collective.splits;
    contribution.scale = collective.scale;
    if (const size_t i = request.tensors.size(); i < collective.uncompressed_bytes.size()) {
      contribution.uncompressed_bytes = collective.uncompressed_bytes[i];
    }
    pending->device_ = dense.value().device();
    if (!like_input) {
      outputs.emplace_back();
    } else if (!collective.in_place) {
      outputs.push_back(NewOutput(CurrentStream(pending->device_), contribution.input.dtype,
                                  contribution.input.shape));
      contribution.output = ViewOf(outputs.back());
      // Ctrl-C ends a wait, but not the request: it still writes its result.
      alive->push_back(outputs.back());
    } else {
      if (at::has_internal_overlap(input) == at::MemOverlap::Yes) {
        return Status::InvalidArgument(
            "several elements of the tensor are one place in memory (expand()), which cannot be "
            "written in place; clone() it first");
      }
      const bool staged = dense.value().data_ptr() != input.data_ptr();
      if (staged) pending->copy_back_.emplace_back(input, outputs.size());
      outputs.push_back(staged ? dense.value() : input);
      contribution.output = contribution.input;
    }
    alive->push_back(std::move(dense).value());
    request.tensors.push_back(std::move(contribution));
  }
  if (!like_input) {
    // On the stream that it was asked for on, by the worker: whose memory it is, and for whom its
    // last user has to be waited for.
    request.allocate = [results = pending->outputs_, stream = CurrentStream(pending->device_)](
                           int index, dad::DType dtype,
                           const dad::Shape& shape) -> Result<dad::TensorView> {
      at::Tensor& output = results->tensors[static_cast<size_t>(index)];
      try {
        output = NewOutput(stream, dtype, shape);
        dad::TensorView view = ViewOf(output);
        if (stream.has_value()) {
          const c10::StreamGuard guard(*stream);
          results->events.push_back(ReadyEvent(stream->device()));
          view.ready_event = results->events.back().get();
        }
        return view;
      } catch (const std::exception& failure) {  // no memory on the device
        return Status::Unavailable(failure.what());
      }
    };
  }
  request.keep_alive = std::move(alive);
  SetReady(request);
  request.recurring = !collective.name.empty();
  if (!request.recurring) {
    request.name =
        std::string(request.tensors.size() > 1 ? "grouped_" : "") + dad::Name(request.kind);
    pending->ticket_ = engine->SubmitUnnamed(std::move(request), &pending->name_);
    return pending;
  }
  request.name = std::move(collective.name);
  pending->name_ = request.name;
  pending->ticket_ = engine->Submit(std::move(request));
  return pending;
}

Result<std::unique_ptr<Pending>> Pending::Submit(dad::Request request,
                                                 std::vector<at::Tensor> outputs) {
  auto engine = dad::ProcessEngine();
  if (!engine) return Status::InvalidArgument("dad has not been initialized; call init() first");
  auto pending = std::make_unique<Pending>();
  pending->kind_ = request.kind;
  pending->process_set_ = request.process_set;
  if (!outputs.empty()) pending->device_ = outputs[0].device();
  pending->outputs_->tensors = std::move(outputs);
  SetReady(request);
  pending->ticket_ = engine->Submit(std::move(request));
  return pending;
}

bool Pending::Done() const {
  if (!ticket_->Done()) return false;
  if (device_.is_cpu()) return true;
  const Result<bool> passed = dad::EventPassed(device_.index(), ticket_->done_event());
  return !passed.ok() || passed.value();  // an error: Finish tells
}

Status Pending::Await(std::optional<double> timeout_seconds) {
  using std::chrono::milliseconds;
  const auto started = std::chrono::steady_clock::now();
  // Wakes up now and then only to let Python handle signals, and help others.
  constexpr milliseconds kSignalCheck(200);
  for (;;) {
    milliseconds wait = kSignalCheck;
    bool last = false;
    if (timeout_seconds) {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - started;
      const double left_ms = std::max(0.0, std::ceil((*timeout_seconds - waited.count()) * 1e3));
      last = left_ms <= static_cast<double>(kSignalCheck.count());
      if (last) wait = milliseconds(static_cast<int64_t>(left_ms));
    }
    std::optional<py::gil_scoped_release> release;
    if (PyGILState_Check()) release.emplace();
    const Status status = ticket_->Wait(wait);
    if (status.code() != dad::StatusCode::kTimeout) return status;
    if (last) return NotFinished(name_, *timeout_seconds);
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (const py::object& callback = WhileWaiting(); !callback.is_none()) callback();
  }
}

Status Pending::Finish(std::optional<double> timeout_seconds) {
  if (Status status = Await(timeout_seconds); !status.ok()) return status;
  WaitOnCurrentStream(device_, ticket_->done_event());
  for (auto& [tensor, index] : copy_back_) {
    tensor.detach().copy_(outputs_->tensors[index]);
    outputs_->tensors[index] = tensor;
  }
  if (in_place_) {
    // Autograd must see the write, as it sees torch's own in-place ops.
    for (const at::Tensor& tensor : outputs_->tensors) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  return Status::Ok();
}

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  py::gil_scoped_acquire acquire;
  py::object error = py::module_::import("dad.errors")
                         .attr("from_status")(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace dad_torch
