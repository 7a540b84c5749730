// The engine of this process, the only global state: frameworks in one process must share it, and a
// forked child must not touch its parent's.
#include <unistd.h>

#include <atomic>

#include "dad/engine.h"
#include "dad/overflows.h"
#include "util/mutex.h"

namespace dad {
namespace {

Mutex g_mutex;
pid_t g_owner GUARDED_BY(g_mutex) = 0;
std::atomic<bool> g_expects_overflows{false};
int64_t g_joins_before GUARDED_BY(g_mutex) = 0;  // of the engines before this one

// Never destroyed by the C++ runtime: at exit other libraries may be gone already.
std::shared_ptr<Engine>& Slot() REQUIRES(g_mutex) {
  static auto* slot = new std::shared_ptr<Engine>;
  return *slot;
}

// In a child, the threads behind the engine do not exist, so it is left alone.
bool IsOwner() REQUIRES(g_mutex) { return g_owner == getpid(); }

void ForgetParentsEngine() REQUIRES(g_mutex) {
  if (Slot() && !IsOwner()) new std::shared_ptr<Engine>(std::move(Slot()));
}

}  // namespace

Status InitProcess(const World& world, const Options& options,
                   std::vector<std::vector<int>> process_sets) {
  MutexLock lock(g_mutex);
  ForgetParentsEngine();
  if (Slot()) return Status::Ok();
  Result<std::unique_ptr<Engine>> engine = Engine::Create(world, options, std::move(process_sets));
  if (!engine.ok()) return engine.status();
  Slot() = std::move(engine).value();
  g_owner = getpid();
  return Status::Ok();
}

void ShutdownProcess() {
  std::shared_ptr<Engine> engine;
  {
    MutexLock lock(g_mutex);
    if (!IsOwner()) return;
    engine = std::move(Slot());
    if (engine) g_joins_before += engine->num_joins();
  }
}

std::shared_ptr<Engine> ProcessEngine() {
  MutexLock lock(g_mutex);
  return IsOwner() ? Slot() : nullptr;
}

void ExpectOverflows() { g_expects_overflows = true; }
bool OverflowsAreExpected() { return g_expects_overflows; }

int64_t ProcessJoins() {
  MutexLock lock(g_mutex);
  return g_joins_before + (IsOwner() && Slot() ? Slot()->num_joins() : 0);
}

}  // namespace dad
