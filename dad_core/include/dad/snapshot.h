// What a rank is doing at a moment, for people who look for the reason of a hang.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dad {

// Times are in seconds up to the moment; negative: never.
struct Snapshot {
  // A request, or a batch, that is not done.
  struct Open {
    std::string what;  // "allreduce "fc1.weight""
    double seconds = 0.0;
    std::vector<int> waits_for;  // ranks; empty: for none, or for this rank's own tensors
    int round = -1;              // of a batch
    int num_rounds = 0;
  };
  // What other ranks have submitted and this one has not.
  struct Missing {
    std::string name;
    std::vector<int> ranks;
  };

  int rank = 0;
  std::string hostname;
  int64_t pid = 0;
  std::string error;  // why the engine has given up; empty: it works
  bool joined = false;

  std::string last_submitted;  // "allreduce "fc1.weight""
  double since_submit = -1.0;
  double since_result = -1.0;  // a request was done
  double since_cycle = -1.0;   // a negotiation ended
  int64_t negotiations = 0;

  // The oldest; there may be more than are listed.
  int64_t num_requests = 0;
  std::vector<Open> requests;
  int64_t num_batches = 0;
  std::vector<Open> batches;
  int64_t num_missing = 0;
  std::vector<Missing> missing;

  // Of the program's main thread: the line of the user's code, and all lines, the innermost last.
  // Empty where the program has no way to tell.
  std::string where;
  std::string stack;
};

}  // namespace dad
