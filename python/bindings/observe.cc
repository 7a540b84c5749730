#include "observe.h"

#include <fcntl.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dad/engine.h"
#include "dad/program.h"

namespace py = pybind11;

namespace dad_bindings {
namespace {

py::list OpenAsList(const std::vector<dad::Snapshot::Open>& all) {
  py::list list;
  for (const dad::Snapshot::Open& open : all) {
    py::dict row;
    row["what"] = open.what;
    row["seconds"] = open.seconds;
    row["waits_for"] = open.waits_for;
    row["round"] = open.round;
    row["num_rounds"] = open.num_rounds;
    list.append(row);
  }
  return list;
}

py::dict AsDict(const dad::Snapshot& snapshot) {
  py::dict row;
  row["rank"] = snapshot.rank;
  row["hostname"] = snapshot.hostname;
  row["pid"] = snapshot.pid;
  row["error"] = snapshot.error;
  row["joined"] = snapshot.joined;
  row["last_submitted"] = snapshot.last_submitted;
  row["since_submit"] = snapshot.since_submit;
  row["since_result"] = snapshot.since_result;
  row["since_cycle"] = snapshot.since_cycle;
  row["negotiations"] = snapshot.negotiations;
  row["num_requests"] = snapshot.num_requests;
  row["requests"] = OpenAsList(snapshot.requests);
  row["num_batches"] = snapshot.num_batches;
  row["batches"] = OpenAsList(snapshot.batches);
  row["num_missing"] = snapshot.num_missing;
  py::list missing;
  for (const dad::Snapshot::Missing& one : snapshot.missing) {
    missing.append(py::make_tuple(one.name, one.ranks));
  }
  row["missing"] = missing;
  row["where"] = snapshot.where;
  row["stack"] = snapshot.stack;
  return row;
}

// Of all ranks that answer; none if the engine is gone, or ends meanwhile.
py::list Inspect() {
  // A rank that does not answer takes four seconds.
  constexpr std::chrono::seconds kLongest(10);
  std::vector<dad::Snapshot> all;
  {
    py::gil_scoped_release release;
    auto answers = std::make_shared<std::promise<std::vector<dad::Snapshot>>>();
    std::future<std::vector<dad::Snapshot>> future = answers->get_future();
    // The engine is not held while we wait: who shuts it down must not wait for us.
    if (const auto engine = dad::ProcessEngine()) {
      engine->Inspect([answers](std::vector<dad::Snapshot> snapshots) {
        answers->set_value(std::move(snapshots));
      });
    }
    answers.reset();
    if (future.wait_for(kLongest) == std::future_status::ready) {
      try {
        all = future.get();
      } catch (const std::future_error&) {
        // The engine has ended, and with it the question.
      }
    }
  }
  py::list list;
  for (const dad::Snapshot& snapshot : all) list.append(AsDict(snapshot));
  return list;
}

int g_signal_pipe[2] = {-1, -1};
std::atomic<pid_t> g_signal_owner{0};

// Python's own handlers wait for the main thread, which may be stuck: this one does not.
void NoteSignal(int) {
  const int error = errno;
  if (g_signal_owner.load(std::memory_order_relaxed) == getpid()) {
    const char byte = '!';
    (void)!write(g_signal_pipe[1], &byte, 1);
  }
  errno = error;
}

// From now on the signal leaves a byte in a pipe, whose end to read from is returned; -1 if the
// program has plans of its own for it.
int CatchSignal(int number) {
  struct sigaction before {};
  if (sigaction(number, nullptr, &before) != 0) return -1;
  const bool is_ours = before.sa_handler == &NoteSignal;
  if (before.sa_handler != SIG_DFL && !is_ours) return -1;
  if (g_signal_owner.load() == getpid() && is_ours) return g_signal_pipe[0];
  // A forked child has its parent's pipe.
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return -1;
  g_signal_pipe[0] = ends[0];
  g_signal_pipe[1] = ends[1];
  g_signal_owner = getpid();
  struct sigaction action {};
  action.sa_handler = &NoteSignal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return sigaction(number, &action, nullptr) == 0 ? ends[0] : -1;
}

}  // namespace

void AddObservers(py::module_& m) {
  m.def("inspect", &Inspect,
        "What all ranks are doing, as far as they answer; takes up to four seconds.");
  m.def("await_program_question", &dad::AwaitProgramQuestion,
        py::call_guard<py::gil_scoped_release>(),
        "Waits until the core asks where the main thread is.");
  m.def(
      "tell_program_position",
      [](std::string where, std::string stack) {
        py::gil_scoped_release release;
        dad::TellProgramPosition({std::move(where), std::move(stack)});
      },
      py::arg("where"), py::arg("stack"));
  m.def("catch_signal", &CatchSignal, py::arg("number"));
}

}  // namespace dad_bindings
