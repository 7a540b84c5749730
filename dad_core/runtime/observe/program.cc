#include "dad/program.h"

#include <pthread.h>

#include <utility>
#include <vector>

#include "util/mutex.h"

namespace dad {
namespace {

using Done = std::function<void(const ProgramPosition&)>;

struct Questions {
  Mutex mutex;
  Condition asked;
  std::vector<Done> open GUARDED_BY(mutex);
  bool has_reader GUARDED_BY(mutex) = false;
};

// Never destroyed, because the reader waits until the process ends. A forked child has none of its
// parent's threads, and one of them may have held the lock.
Questions* g_questions = nullptr;

Questions& All() {
  static const bool made = [] {
    g_questions = new Questions;
    pthread_atfork(nullptr, nullptr, [] { g_questions = new Questions; });
    return true;
  }();
  (void)made;
  return *g_questions;
}

}  // namespace

bool HasProgramReader() {
  Questions& all = All();
  MutexLock lock(all.mutex);
  return all.has_reader;
}

void AskProgramPosition(Done done) {
  Questions& all = All();
  {
    MutexLock lock(all.mutex);
    all.open.push_back(std::move(done));
  }
  all.asked.NotifyOne();
}

void AwaitProgramQuestion() {
  Questions& all = All();
  MutexLock lock(all.mutex);
  all.has_reader = true;
  while (all.open.empty()) all.asked.Wait(lock);
}

void TellProgramPosition(const ProgramPosition& position) {
  Questions& all = All();
  std::vector<Done> open;
  {
    MutexLock lock(all.mutex);
    open = std::exchange(all.open, {});
  }
  for (const Done& done : open) done(position);
}

}  // namespace dad
