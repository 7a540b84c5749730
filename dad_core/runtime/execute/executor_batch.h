// A batch under way. For the sources of Executor only.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/execute/executor.h"

namespace dad {

struct Executor::Batch {
  uint64_t id = 0;
  uint64_t signature = 0;
  std::vector<BatchPart> parts;
  Group group;
  int round = 0;
  int num_rounds = 0;
  std::vector<std::vector<Share>> shares;    // by round, by member
  std::weak_ptr<SendPin> pin;                // alive while referenced bytes are on their way
  std::vector<std::pair<int, int>> offered;  // rounds and members whose bytes have their place
  int writing = 0;                  // messages still being written there, of an abandoned batch
  bool taken_back = false;          // its requests are exchanged another way
  bool finished = false;            // waits only until its memory is unused
  Status outcome;                   // of a batch that has finished
  bool held = false;                // a device is making the bytes of the round
  std::vector<DeviceEvent> making;  // by part: the event that its bytes wait for
  std::chrono::steady_clock::time_point round_started;

  // Whether `from` sends a message to `to` in a round. An empty first one says "I agree".
  bool Speaks(int in_round, int from, int to) const {
    return in_round == 0 || std::any_of(parts.begin(), parts.end(), [&](const BatchPart& part) {
             return in_round < part.exchange->num_rounds() &&
                    part.exchange->Speaks(in_round, from, to);
           });
  }

  bool RoundComplete() const {
    for (int m = 0; m < group.size; ++m) {
      if (m != group.rank && !shares[round][m].arrived) return false;
    }
    return true;
  }
};

}  // namespace dad
