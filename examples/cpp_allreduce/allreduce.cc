// Averages a tensor over all ranks, using dad's C++ core alone. CMakeLists.txt says how to build
// and run it.
#include <dad/engine.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace {

// What dadrun tells each process about its place in the job; one process without a launcher.
std::string Setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

dad::World WorldFromEnvironment() {
  dad::World world;
  world.rank = std::stoi(Setting("DAD_RANK", "0"));
  world.size = std::stoi(Setting("DAD_SIZE", "1"));
  world.local_rank = std::stoi(Setting("DAD_LOCAL_RANK", "0"));
  world.local_size = std::stoi(Setting("DAD_LOCAL_SIZE", "1"));
  world.hostname = Setting("DAD_HOSTNAME", "localhost");
  world.rendezvous = Setting("DAD_RENDEZVOUS", "");
  return world;
}

int Fail(const dad::Status& status) {
  std::cerr << status.message() << std::endl;
  return 1;
}

}  // namespace

int main() {
  dad::World world = WorldFromEnvironment();
  const auto environment = [](const char* name) { return std::getenv(name); };
  if (const dad::Status taken = dad::TakeSecret(&world, environment); !taken.ok()) {
    return Fail(taken);
  }
  const auto options = dad::Options::FromEnvironment(environment);
  if (!options.ok()) return Fail(options.status());
  const auto engine = dad::Engine::Create(world, options.value());
  if (!engine.ok()) return Fail(engine.status());

  // Rank r contributes r, r, r; every rank gets the average, in place.
  std::vector<float> values(3, static_cast<float>(world.rank));
  dad::TensorView view;
  view.data = values.data();
  view.shape = {static_cast<int64_t>(values.size())};

  dad::Request request;
  request.name = "values";
  request.op = dad::ReduceOp::kAverage;
  request.tensors.resize(1);
  request.tensors[0].input = view;
  request.tensors[0].output = view;
  if (const dad::Status done = engine.value()->Submit(std::move(request))->Wait(); !done.ok()) {
    return Fail(done);
  }
  std::cout << "rank " << world.rank << " of " << world.size << ": the average is " << values[0]
            << std::endl;
  return 0;
}
