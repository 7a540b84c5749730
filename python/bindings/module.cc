// dad._lib._core: the core without any framework. Every call that may wait gives
// up the GIL; a failed status becomes the exception that dad.errors has for it.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dad/digest.h"
#include "dad/engine.h"
#include "dad/overflows.h"
#include "dad/plugins.h"
#include "observe.h"

namespace py = pybind11;

namespace {

using dad::Status;

void Check(const Status& status) {
  if (status.ok()) return;
  py::object error = py::module_::import("dad.errors")
                         .attr("from_status")(static_cast<int>(status.code()), status.message());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

std::shared_ptr<dad::Engine> Running() {
  std::shared_ptr<dad::Engine> engine = dad::ProcessEngine();
  if (!engine) throw py::value_error("dad has not been initialized; call init() first");
  return engine;
}

// A dictionary of which every entry must be asked for.
struct Fields {
  const py::dict& entries;
  std::set<std::string> known = {};

  void CheckNoOther() const {
    for (const auto& [key, value] : entries) {
      const auto name = key.cast<std::string>();
      if (!known.contains(name)) throw py::value_error("init: unknown field \"" + name + "\"");
    }
  }
};

template <typename T>
T Get(Fields& from, const char* key, T otherwise) {
  from.known.insert(key);
  return from.entries.contains(key) ? from.entries[key].cast<T>() : otherwise;
}

dad::World WorldFrom(Fields& from) {
  dad::World world;
  world.rank = Get(from, "rank", 0);
  world.size = Get(from, "size", 1);
  world.local_rank = Get(from, "local_rank", 0);
  world.local_size = Get(from, "local_size", 1);
  world.cross_rank = Get(from, "cross_rank", 0);
  world.cross_size = Get(from, "cross_size", 1);
  world.hostname = Get<std::string>(from, "hostname", "");
  world.rendezvous = Get<std::string>(from, "rendezvous", "");
  world.generation = Get<std::string>(from, "generation", "0");
  world.job = Get<std::string>(from, "job", "");
  world.secret = Get<py::bytes>(from, "secret", "");
  world.store_key = Get<py::bytes>(from, "store_key", "");
  world.transport = Get<std::string>(from, "transport", "");
  world.plugin_dir = Get<std::string>(from, "plugin_dir", "");
  return world;
}

// Plug-ins lie beside this module.
std::string PluginDir() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&PluginDir), &info);
  const std::string path = info.dli_fname == nullptr ? "" : info.dli_fname;
  return path.substr(0, path.find_last_of('/'));
}

void Init(const py::dict& fields, std::vector<std::vector<int>> process_sets) {
  Fields from{fields};
  dad::World world = WorldFrom(from);
  const auto threads = Get<int64_t>(from, "threads", 0);
  from.CheckNoOther();
  dad::Result<dad::Options> options =
      dad::Options::FromEnvironment([](const char* name) { return std::getenv(name); });
  Check(options.status());
  // The number that Python chose for this rank, unless DAD_THREADS says otherwise.
  if (options.value().threads == 0) options.value().threads = threads;
  if (world.transport.empty()) world.transport = options.value().transport;
  if (world.plugin_dir.empty()) world.plugin_dir = PluginDir();
  Status status;
  {
    py::gil_scoped_release release;
    status = dad::InitProcess(world, options.value(), std::move(process_sets));
  }
  Check(status);
}

// Never destroyed: at exit there may be no interpreter.
py::object& WhileWaiting() {
  static auto* callback = new py::object(py::none());
  return *callback;
}

// With the GIL, which it gives up. Now and then Python handles signals and calls WhileWaiting.
Status Await(dad::Ticket& ticket) {
  constexpr std::chrono::milliseconds kInterval(200);
  for (;;) {
    Status status;
    {
      py::gil_scoped_release release;
      status = ticket.Wait(kInterval);
    }
    if (status.code() != dad::StatusCode::kTimeout) return status;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (const py::object& callback = WhileWaiting(); !callback.is_none()) callback();
  }
}

// Submits a request that carries no tensor and waits for it.
int64_t RunBare(dad::Request request) {
  std::shared_ptr<dad::Engine> engine = Running();
  std::shared_ptr<dad::Ticket> ticket;
  const bool unnamed = request.name.empty();
  if (unnamed) request.name = dad::Name(request.kind);
  {
    py::gil_scoped_release release;
    ticket =
        unnamed ? engine->SubmitUnnamed(std::move(request)) : engine->Submit(std::move(request));
  }
  Check(Await(*ticket));
  return ticket->value();
}

dad::Request Bare(dad::OpKind kind, int process_set = 0, std::vector<int> ranks = {}) {
  dad::Request request;
  request.kind = kind;
  // Barriers of one process set are told apart by their order; so are changes of sets.
  if (kind == dad::OpKind::kBarrier) request.name = "barrier";
  request.recurring = kind == dad::OpKind::kBarrier;
  request.process_set = process_set;
  request.ranks = std::move(ranks);
  return request;
}

// A gather of every rank's bytes that is under way. It may be dropped before it is done.
class BytesGather {
 public:
  BytesGather(const std::string& name, const std::string& mine, int process_set) {
    // Each contribution has a head of its own, since an allgather tells no borders.
    const int64_t size = static_cast<int64_t>(mine.size());
    buffers_->mine.assign(reinterpret_cast<const char*>(&size), sizeof(size));
    buffers_->mine += mine;
    dad::Request request;
    request.name = name;
    request.kind = dad::OpKind::kAllGather;
    request.process_set = process_set;
    // It comes now and then: it must not become part of a schedule.
    request.recurring = false;
    request.keep_alive = buffers_;
    dad::Contribution contribution;
    contribution.input.data = buffers_->mine.data();
    contribution.input.dtype = dad::DType::kUint8;
    contribution.input.shape = {static_cast<int64_t>(buffers_->mine.size())};
    request.tensors.push_back(std::move(contribution));
    request.allocate = [buffers = buffers_](
                           int, dad::DType,
                           const dad::Shape& shape) -> dad::Result<dad::TensorView> {
      buffers->gathered.resize(static_cast<size_t>(shape[0]));
      dad::TensorView view;
      view.data = buffers->gathered.data();
      view.dtype = dad::DType::kUint8;
      view.shape = shape;
      return view;
    };
    std::shared_ptr<dad::Engine> engine = Running();
    py::gil_scoped_release release;
    ticket_ = engine->Submit(std::move(request));
  }

  // Whether it is over by then. It goes on if it is not.
  bool WaitFor(double seconds) {
    py::gil_scoped_release release;
    const std::chrono::duration<double> limit(seconds);
    const Status status =
        ticket_->Wait(std::chrono::duration_cast<std::chrono::milliseconds>(limit));
    return status.code() != dad::StatusCode::kTimeout;
  }

  // Every rank's bytes, in the order of the set's ranks; joined ones have none.
  std::vector<py::bytes> Wait() {
    Check(Await(*ticket_));
    const std::string& gathered = buffers_->gathered;
    std::vector<py::bytes> all;
    for (size_t at = 0; at + sizeof(int64_t) <= gathered.size();) {
      int64_t count = 0;
      std::memcpy(&count, gathered.data() + at, sizeof(count));
      at += sizeof(count);
      all.emplace_back(gathered.data() + at, static_cast<size_t>(count));
      at += static_cast<size_t>(count);
    }
    return all;
  }

 private:
  struct Buffers {
    std::string mine;
    std::string gathered;
  };
  std::shared_ptr<Buffers> buffers_ = std::make_shared<Buffers>();
  std::shared_ptr<dad::Ticket> ticket_;
};

std::vector<py::bytes> GatherBytes(const std::string& name, const std::string& mine,
                                   int process_set) {
  return BytesGather(name, mine, process_set).Wait();
}

// Sends a part to each rank of the set; what each of them has sent to this one.
std::vector<py::bytes> SendBytes(const std::string& name, const std::vector<std::string>& parts,
                                 int process_set) {
  std::shared_ptr<dad::Engine> engine = Running();
  struct Buffers {
    std::string mine;
    std::string received;
  };
  auto buffers = std::make_shared<Buffers>();
  dad::Contribution contribution;
  for (const std::string& part : parts) {
    buffers->mine += part;
    contribution.splits.push_back(static_cast<int64_t>(part.size()));
  }
  contribution.input.data = buffers->mine.data();
  contribution.input.dtype = dad::DType::kUint8;
  contribution.input.shape = {static_cast<int64_t>(buffers->mine.size())};
  dad::Request request;
  request.name = name;
  request.kind = dad::OpKind::kAllToAll;
  request.process_set = process_set;
  request.recurring = false;
  request.keep_alive = buffers;
  request.tensors.push_back(std::move(contribution));
  request.allocate = [buffers](int, dad::DType,
                               const dad::Shape& shape) -> dad::Result<dad::TensorView> {
    buffers->received.resize(static_cast<size_t>(shape[0]));
    dad::TensorView view;
    view.data = buffers->received.data();
    view.dtype = dad::DType::kUint8;
    view.shape = shape;
    return view;
  };
  std::shared_ptr<dad::Ticket> ticket;
  Status status;
  {
    py::gil_scoped_release release;
    ticket = engine->Submit(std::move(request));
    status = ticket->Wait();
  }
  Check(status);
  std::vector<py::bytes> all;
  size_t at = 0;
  for (const int64_t count : ticket->received_splits()) {
    all.emplace_back(buffers->received.data() + at, static_cast<size_t>(count));
    at += static_cast<size_t>(count);
  }
  return all;
}

uint64_t DigestOf(const py::buffer& memory) {
  const py::buffer_info info = memory.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw py::value_error("digest() needs memory without gaps");
  }
  py::gil_scoped_release release;
  return dad::Digest(info.ptr, static_cast<size_t>(info.size * info.itemsize));
}

// The sum of so many zeros: it takes what a dense gradient of that size takes. Integers, since
// zeros of float32 would hardly take anything where tensors travel packed.
void ReduceZeros(const std::string& name, int64_t count, int process_set) {
  std::shared_ptr<dad::Engine> engine = Running();
  py::gil_scoped_release release;
  std::vector<int32_t> zeros(static_cast<size_t>(count));
  dad::Request request;
  request.name = name;
  request.process_set = process_set;
  dad::Contribution contribution;
  contribution.input.data = zeros.data();
  contribution.input.dtype = dad::DType::kInt32;
  contribution.input.shape = {count};
  contribution.output = contribution.input;
  request.tensors.push_back(std::move(contribution));
  const Status status = engine->Submit(std::move(request))->Wait();
  py::gil_scoped_acquire acquire;
  Check(status);
}

dad::DType DTypeNamed(const std::string& name) {
  for (int i = 0; i < dad::kNumDTypes; ++i) {
    const auto dtype = static_cast<dad::DType>(i);
    if (name == dad::Name(dtype)) return dtype;
  }
  throw py::value_error("a saved state of type " + name);
}

dad::StateTensor StateFrom(std::string name, const std::string& dtype, dad::Shape shape,
                           const py::bytes& data) {
  dad::StateTensor tensor;
  tensor.name = std::move(name);
  tensor.dtype = DTypeNamed(dtype);
  tensor.shape = std::move(shape);
  const std::string_view bytes = data;
  const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
  tensor.bytes.assign(first, first + bytes.size());
  return tensor;
}

py::bytes BytesOf(const dad::StateTensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
}

// How many times less than dense was sent; None where nothing was sent that could be compared.
py::object Ratio(int64_t dense_bytes, int64_t sent_bytes, int64_t device_bytes) {
  if (sent_bytes == 0 || (dense_bytes == 0 && device_bytes > 0)) return py::none();
  return py::float_(static_cast<double>(dense_bytes) / static_cast<double>(sent_bytes));
}

py::dict StatsAsDict() {
  std::shared_ptr<dad::Engine> engine = Running();
  const bool between_hosts = !engine->Hosts().empty();
  dad::Stats stats;
  {
    py::gil_scoped_release release;
    stats = engine->GetStats();
  }
  py::dict tensors;
  for (const dad::TensorStats& tensor : stats.tensors) {
    py::dict row;
    row["steps"] = tensor.steps;
    row["wire_bytes_sent"] = tensor.wire_bytes_sent;
    row["wire_bytes_received"] = tensor.wire_bytes_received;
    if (between_hosts) row["hosts_bytes_sent"] = tensor.hosts_bytes_sent;
    row["device_bytes"] = tensor.device_bytes;
    row["dense_bytes"] = tensor.dense_bytes;
    row["ratio"] = Ratio(tensor.dense_bytes, tensor.wire_bytes_sent, tensor.device_bytes);
    row["seconds"] = tensor.seconds;
    py::dict recent;
    recent["steps"] = tensor.recent.steps;
    recent["wire_bytes_sent"] = tensor.recent.sent;
    recent["seconds"] = tensor.recent.seconds;
    if (between_hosts) recent["hosts_bytes_sent"] = tensor.recent.hosts_sent;
    row["recent"] = recent;
    if (tensor.effective >= 0) row["effective"] = tensor.effective;
    if (tensor.captured >= 0) row["captured"] = tensor.captured;
    if (tensor.worst.step > 0) {
      py::dict worst;
      worst["step"] = tensor.worst.step;
      worst["seconds"] = tensor.worst.seconds;
      worst["waited_seconds"] = tensor.worst.waited;
      worst["last_rank"] = tensor.worst.last_rank;
      row["worst"] = worst;
    }
    tensors[py::str(tensor.name)] = row;
  }
  py::dict all;
  all["steps"] = stats.steps;
  all["wire_bytes_sent"] = stats.wire_bytes_sent;
  all["wire_bytes_received"] = stats.wire_bytes_received;
  all["payload_bytes_sent"] = stats.payload_bytes_sent;
  all["control_bytes_sent"] = stats.control_bytes_sent;
  all["messages_sent"] = stats.messages_sent;
  all["device_bytes"] = stats.device_bytes;
  all["dense_bytes"] = stats.dense_bytes;
  all["ratio"] = Ratio(stats.dense_bytes, stats.wire_bytes_sent, stats.device_bytes);
  all["negotiations"] = stats.negotiations;
  all["predicted_batches"] = stats.predicted_batches;
  all["line_bytes_per_second"] = stats.line_bytes_per_second;
  all["tensors"] = tensors;
  if (const dad::SlowestRank& slowest = stats.slowest; slowest.rank >= 0) {
    py::dict row;
    row["rank"] = slowest.rank;
    row["lag_seconds"] = slowest.seconds / static_cast<double>(slowest.last_in);
    row["worst_seconds"] = slowest.worst_seconds;
    row["last_in"] = slowest.last_in;
    row["steps"] = slowest.steps;
    all["slowest"] = row;
  }
  return all;
}

bool Homogeneous() {
  // Hosts with different numbers of ranks give some rank a size that the product misses.
  const dad::World world = Running()->world();
  return world.local_size * world.cross_size == world.size;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The core of dad: engine, settings, statistics.";

  m.def("init", &Init, py::arg("world"), py::arg("process_sets"));
  m.def("shutdown", &dad::ShutdownProcess, py::call_guard<py::gil_scoped_release>());
  m.def("is_initialized", [] { return dad::ProcessEngine() != nullptr; });
  m.def("is_healthy", [] { return Running()->health().ok(); });
  m.def("rank", [] { return Running()->world().rank; });
  m.def("size", [] { return Running()->world().size; });
  m.def("local_rank", [] { return Running()->world().local_rank; });
  m.def("local_size", [] { return Running()->world().local_size; });
  m.def("cross_rank", [] { return Running()->world().cross_rank; });
  m.def("cross_size", [] { return Running()->world().cross_size; });
  m.def("is_homogeneous", &Homogeneous);

  m.def("start_timeline", [](const std::string& path, bool mark_cycles) {
    Check(Running()->StartTimeline(path, mark_cycles));
  });
  m.def("stop_timeline", [] { Check(Running()->StopTimeline()); });
  m.def("stats", &StatsAsDict);
  m.def(
      "wanted",
      [] {
        std::shared_ptr<dad::Engine> engine = Running();
        std::vector<dad::Wanted> all;
        {
          py::gil_scoped_release release;
          all = engine->GetWanted();
        }
        std::vector<std::pair<std::string, std::vector<int>>> wanted;
        for (dad::Wanted& one : all) wanted.emplace_back(std::move(one.name), one.ranks);
        return wanted;
      },
      "What other ranks wait for this one with: (name, ranks that have submitted it).");
  m.def(
      "set_while_waiting", [](py::object callback) { WhileWaiting() = std::move(callback); },
      py::arg("callback"),
      "Called from time to time by threads that wait for other ranks; None: nothing is.");
  dad_bindings::AddObservers(m);
  m.def("reset_stats", [] {
    std::shared_ptr<dad::Engine> engine = Running();
    py::gil_scoped_release release;
    engine->ResetStats();
  });
  py::class_<dad::StateTensor>(m, "State", "One array that is kept between steps.")
      .def(py::init(&StateFrom), py::arg("name"), py::arg("dtype"), py::arg("shape"),
           py::arg("data"))
      .def_readonly("name", &dad::StateTensor::name)
      .def_property_readonly("dtype",
                             [](const dad::StateTensor& tensor) { return dad::Name(tensor.dtype); })
      .def_readonly("shape", &dad::StateTensor::shape)
      .def_property_readonly("data", &BytesOf);
  m.def(
      "export_state",
      [](int process_set, uint32_t stream, const std::string& name) {
        return Running()->ExportState(process_set, stream, name);
      },
      py::arg("process_set"), py::arg("stream"), py::arg("name"));
  m.def(
      "import_state",
      [](int process_set, uint32_t stream, const std::string& name,
         std::vector<dad::StateTensor> states) {
        Running()->ImportState(process_set, stream, name, std::move(states));
      },
      py::arg("process_set"), py::arg("stream"), py::arg("name"), py::arg("states"));
  m.def("return_last",
        [](int process_set, uint32_t stream) { Running()->ReturnLast(process_set, stream); });
  m.def("drop_states",
        [](int process_set, uint32_t stream) { Running()->DropStates(process_set, stream); });
  m.def("option_table", [] {
    py::list rows;
    for (const dad::OptionInfo& row : dad::OptionTable()) {
      rows.append(py::make_tuple(row.name, row.default_value, row.dad_variable,
                                 row.horovod_variable, row.meaning));
    }
    return rows;
  });

  m.def("add_process_set", [](std::vector<int> ranks) {
    return RunBare(Bare(dad::OpKind::kAddProcessSet, 0, std::move(ranks)));
  });
  m.def("remove_process_set",
        [](int id) { RunBare(Bare(dad::OpKind::kRemoveProcessSet, 0, {id})); });
  m.def("process_set_ranks", [](int id) { return Running()->ProcessSetRanks(id); });
  m.def("process_set_ids", [] { return Running()->ProcessSetIds(); });
  m.def("hosts", [] { return Running()->Hosts(); });
  m.def("join", [] { return RunBare(Bare(dad::OpKind::kJoin)); });
  m.def("expect_overflows", &dad::ExpectOverflows,
        "A loss scaler is in use: the core does not warn of gradients that are not finite.");
  m.def("joins", &dad::ProcessJoins, "How many joins all ranks have come to in this process.");
  m.def(
      "barrier",
      [](int process_set, const std::string& name, const std::string& terms) {
        dad::Request request = Bare(dad::OpKind::kBarrier, process_set);
        request.recurring = name.empty();
        if (!name.empty()) request.name = name;
        request.terms = terms;
        RunBare(std::move(request));
      },
      py::arg("process_set") = 0, py::arg("name") = "", py::arg("terms") = "");

  m.def("gather_bytes", &GatherBytes, py::arg("name"), py::arg("mine"), py::arg("process_set"));
  py::class_<BytesGather>(m, "BytesGather")
      .def(py::init<const std::string&, const std::string&, int>(), py::arg("name"),
           py::arg("mine"), py::arg("process_set"))
      .def("wait", &BytesGather::Wait)
      .def("wait_for", &BytesGather::WaitFor, py::arg("seconds"));
  m.def("send_bytes", &SendBytes, py::arg("name"), py::arg("parts"), py::arg("process_set"));
  m.def("digest", &DigestOf, py::arg("memory"));

  m.def("reduce_zeros", &ReduceZeros, py::arg("name"), py::arg("count"), py::arg("process_set"));

  m.def("plugin_status", [](const std::string& name) {
    const Status status = dad::PluginAvailable(name, PluginDir());
    if (!status.ok()) return py::make_tuple(false, status.message());
    dad::Result<std::string> text = dad::DescribePlugin(name, PluginDir());
    return py::make_tuple(true, text.ok() ? text.value() : text.status().message());
  });
  m.def("mpi_bootstrap", [](const std::string& mine) {
    dad::Result<std::string> text = [&] {
      py::gil_scoped_release release;
      return dad::MpiBootstrap(mine, PluginDir());
    }();
    Check(text.status());
    return text.value();
  });
}
