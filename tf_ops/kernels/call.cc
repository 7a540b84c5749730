#include "tf_ops/kernels/call.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "dad/device.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/tensor_adapter.h"

namespace dad_tensorflow {

using dad::Contribution;
using dad::Result;
using dad::Status;
using tensorflow::Tensor;

namespace {

// When a request has not been done for so long, and no other has come meanwhile, what its batch
// lacks may depend on its result. After kMostPatience no matter what comes: it may be of others.
constexpr std::chrono::milliseconds kStrayPatience(20);
constexpr std::chrono::milliseconds kGradientPatience(300);
constexpr std::chrono::seconds kMostPatience(5);
using Clock = std::chrono::steady_clock;

// Tells the core which requests are in flight together: only those may wait for each other. It
// counts a new phase when a user has waited, which in TensorFlow nobody does; a new step says the
// same, and so does a request that comes when none is under way. Gradients of a step may well
// trickle in one by one and still belong together: they have a stream of their own.
class Phases {
 public:
  void Begin(int64_t step, bool is_stray) {
    std::lock_guard lock(mutex_);
    const bool waited = step != step_ || (is_stray && num_open_ == 0);
    step_ = step;
    ++num_open_;
    last_begin_ = Clock::now();
    // A ticket that is done only passes it on.
    if (waited && last_) last_->UserWaits();
  }
  Clock::time_point last_begin() const {
    std::lock_guard lock(mutex_);
    return last_begin_;
  }
  void End(std::shared_ptr<dad::Ticket> last) {
    std::lock_guard lock(mutex_);
    --num_open_;
    last_.swap(last);
  }

 private:
  mutable std::mutex mutex_;
  int64_t step_ = 0;
  int num_open_ = 0;
  Clock::time_point last_begin_;
  std::shared_ptr<dad::Ticket> last_;
};

Phases& ThePhases() {
  static auto* phases = new Phases;
  return *phases;
}

}  // namespace

uint64_t StepOf(const tensorflow::OpKernelContext* context) {
  return static_cast<uint64_t>(context->step_id());
}

Call::Call(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done)
    : context_(context), done_(std::move(done)) {}

void Call::UseStream(int device, void* stream) {
  device_ = device;
  stream_ = stream;
  allocator_ = context_->device()->GetAllocator(tensorflow::AllocatorAttributes());
}

Result<Contribution> Call::Elementwise(int input) {
  Contribution contribution;
  tensorflow::TensorShape shape;
  {
    const Tensor& tensor = context_->input(input);
    if (auto dtype = ToDType(tensor.dtype()); !dtype.ok()) return dtype.status();
    shape = tensor.shape();
    contribution.input = ViewOf(tensor);
  }
  Tensor* output = nullptr;
  const absl::Status allocated =
      context_->forward_input_or_allocate_output({input}, input, shape, &output);
  if (!allocated.ok()) return Status::InvalidArgument(std::string(allocated.message()));
  contribution.output = contribution.input;
  contribution.output.data = output->data();
  held_.push_back(*output);
  if (contribution.output.data != contribution.input.data) held_.push_back(context_->input(input));
  return contribution;
}

Result<Contribution> Call::Gathered(int input) {
  const Tensor& tensor = context_->input(input);
  if (auto dtype = ToDType(tensor.dtype()); !dtype.ok()) return dtype.status();
  Contribution contribution;
  contribution.input = ViewOf(tensor);
  held_.push_back(tensor);
  return contribution;
}

dad::OutputAllocator Call::Allocator(int first_output) {
  gathered_.resize(static_cast<size_t>(context_->num_outputs()));
  return [self = shared_from_this(), first_output](
             int index, dad::DType dtype, const dad::Shape& shape) -> Result<dad::TensorView> {
    Result<Tensor> tensor = self->NewTensor(dtype, shape);
    if (!tensor.ok()) return tensor.status();
    auto& place = self->gathered_[static_cast<size_t>(first_output + index)];
    place = std::move(tensor).value();
    dad::TensorView view = ViewOf(*place);
    if (self->device_ < 0) return view;
    // TensorFlow gives out memory again when the work that used it last is on its stream: that
    // may be later than what the inputs waited for.
    Result<dad::DeviceEvent> free = dad::RecordEvent(self->device_, self->stream_);
    if (!free.ok()) return free.status();
    self->allocated_.push_back(std::move(free).value());
    view.device = dad::DeviceType::kCuda;
    view.device_index = self->device_;
    view.ready_event = self->allocated_.back().get();
    return view;
  };
}

void Call::Start(std::vector<dad::Request> requests, bool user_waits, OnSuccess on_success,
                 OnError on_error) {
  const std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
  if (!engine) {
    return Fail(Status::InvalidArgument("dad has not been initialized; call init() first"));
  }
  if (const Status ready = SetReady(requests); !ready.ok()) return Fail(ready);
  engine_ = engine;
  SetStep(requests, user_waits);
  on_success_ = std::move(on_success);
  on_error_ = std::move(on_error);
  num_open_ = requests.size();
  cancellation_ = context_->cancellation_manager();
  if (cancellation_ != nullptr) {
    token_ = cancellation_->get_cancellation_token();
    const bool registered = cancellation_->RegisterCallback(token_, [self = shared_from_this()] {
      RunLater([self] { self->Finish(absl::CancelledError("the step was cancelled"), false); });
    });
    if (!registered) {
      cancellation_ = nullptr;
      return Finish(absl::CancelledError("the step was cancelled"), false);
    }
  }
  const bool is_stray = requests[0].stream == 0;
  ThePhases().Begin(context_->step_id(), is_stray);
  Submit(engine, std::move(requests), user_waits);
  if (user_waits) return;
  const auto patience = is_stray ? kStrayPatience : kGradientPatience;
  LosePatience(Clock::now(), patience, patience);
}

void Call::Submit(const std::shared_ptr<dad::Engine>& engine, std::vector<dad::Request> requests,
                  bool user_waits) {
  tickets_.resize(requests.size());
  const auto done = [self = shared_from_this()](
                        size_t place, const std::shared_ptr<dad::Ticket>& ticket,
                        const Status& status) { self->PartDone(place, ticket, status); };
  Tickets tickets;
  const bool named = std::none_of(requests.begin(), requests.end(),
                                  [](const dad::Request& request) { return request.name.empty(); });
  if (named) {
    tickets = engine->SubmitAll(std::move(requests), user_waits, done);
  } else {
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].name = std::string("tf.") + dad::Name(requests[i].kind);
      const std::shared_ptr<dad::Ticket> ticket = engine->SubmitUnnamed(std::move(requests[i]));
      ticket->OnDone([done, i, ticket](const Status& status) { done(i, ticket, status); });
      tickets.push_back(ticket);
    }
    for (const auto& ticket : tickets) ticket->UserWaits();
  }
  std::lock_guard lock(mutex_);
  if (num_open_ > 0) tickets_ = std::move(tickets);
}

void Call::LosePatience(Clock::time_point begin, Clock::duration patience, Clock::duration after) {
  // Not held by the timer: most calls have ended by then.
  const auto lose = [weak = weak_from_this(), begin, patience] {
    const std::shared_ptr<Call> self = weak.lock();
    if (!self) return;
    Tickets open;
    {
      std::lock_guard lock(self->mutex_);
      if (self->num_open_ == 0) return;
      open = self->tickets_;
    }
    const auto now = Clock::now();
    const auto quiet = now - ThePhases().last_begin();
    if (quiet < patience && now < begin + kMostPatience) {
      return self->LosePatience(begin, patience, patience - quiet);
    }
    for (const auto& ticket : open) ticket->UserWaits();
  };
  RunAfter(std::chrono::ceil<std::chrono::milliseconds>(after), lose);
}

Status Call::SetReady(std::vector<dad::Request>& requests) {
  if (device_ < 0) return Status::Ok();
  const Result<dad::DeviceEvent> event = dad::RecordEvent(device_, stream_);
  if (!event.ok()) return event.status();
  for (dad::Request& request : requests) {
    request.keep_alive = event.value();
    for (Contribution& tensor : request.tensors) {
      for (dad::TensorView* view : {&tensor.input, &tensor.output}) {
        view->device = dad::DeviceType::kCuda;
        view->device_index = device_;
        view->ready_event = event.value().get();
      }
    }
  }
  return Status::Ok();
}

// In eager mode an op is a step by itself.
void Call::SetStep(std::vector<dad::Request>& requests, bool user_waits) {
  static std::atomic<uint64_t> last_eager_step{uint64_t{1} << 63};
  step_ = user_waits ? ++last_eager_step : StepOf(context_);
  for (dad::Request& request : requests) request.step = step_;
}

void Call::PartDone(size_t place, const std::shared_ptr<dad::Ticket>& ticket,
                    const Status& status) {
  // The work is on the device; what TensorFlow puts on its stream from now on comes after it.
  Status waits;
  if (device_ >= 0) waits = dad::StreamWaits(device_, stream_, ticket->done_event());
  {
    std::lock_guard lock(mutex_);
    tickets_[place] = ticket;
    if (first_error_.ok()) first_error_ = status.ok() ? waits : status;
    if (--num_open_ > 0) return;
  }
  ThePhases().End(ticket);
  RunLater([self = shared_from_this()] {
    const Status& error = self->first_error_;
    const bool all_have_it = error.code() == dad::StatusCode::kFailedPrecondition;
    // TensorFlow ends the step here as there, whatever else has been sent in any process set.
    if (const auto engine = all_have_it ? self->engine_.lock() : nullptr) {
      engine->GiveUp(self->step_, error);
    }
    if (!error.ok() && self->on_error_) self->on_error_(error);
    self->Finish(ToTensorFlow(error), true);
  });
}

void Call::Fail(const Status& status) { Finish(ToTensorFlow(status), false); }

void Call::Finish(const absl::Status& status, bool ended) {
  if (finished_.exchange(true)) return;
  if (cancellation_ != nullptr) cancellation_->DeregisterCallback(token_);
  if (!status.ok()) {
    context_->SetStatus(status);
  } else {
    for (size_t i = 0; i < gathered_.size(); ++i) {
      if (gathered_[i]) context_->set_output(static_cast<int>(i), *gathered_[i]);
    }
    if (on_success_) {
      if (absl::Status set = on_success_(context_, tickets_); !set.ok()) context_->SetStatus(set);
    }
  }
  on_success_ = nullptr;
  if (ended) {
    // The next op may then work in the memory of the result.
    held_.clear();
    gathered_.clear();
    tickets_.clear();
  }
  auto done = std::move(done_);
  done();
}

}  // namespace dad_tensorflow
