// Asks ranks what they are doing, and answers ranks that ask. Workers do both, so it works even if
// the threads of a program are stuck. Worker only.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dad/program.h"
#include "dad/snapshot.h"
#include "runtime/inbox.h"
#include "wire/message.h"

namespace dad {

class Inquiry {
 public:
  using Clock = std::chrono::steady_clock;
  // The answers that arrived in time, ordered by rank.
  using Done = std::function<void(std::vector<Snapshot>)>;

  // How long the program may take to say where it is. A call that holds Python's lock may take
  // longer.
  static constexpr std::chrono::milliseconds kProgramPatience{2000};
  // How long the answers of other ranks may take.
  static constexpr std::chrono::milliseconds kPatience{4000};

  // What an inquiry needs from its rank.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Everything but the position of the program.
    virtual Snapshot Look() = 0;
    virtual bool CanAsk(int rank) const = 0;
    virtual void SendTo(int rank, MessageKind kind, uint64_t number,
                        std::span<const std::byte> payload) = 0;
  };

  Inquiry(int rank, std::shared_ptr<Inbox> inbox, Owner* owner);

  // Asks these ranks, which may include this one. `done` is called once, at the latest when
  // the time is over, with the answers so far. It is dropped if the worker ends before.
  void Ask(const std::vector<int>& ranks, Done done, Clock::time_point now);

  void OnAsk(int peer, uint64_t number, Clock::time_point now);
  void OnState(int peer, uint64_t number, std::span<const std::byte> payload);

  void Check(Clock::time_point now);
  std::optional<Clock::time_point> NextDeadline() const;

 private:
  struct Question {
    Clock::time_point deadline;
    std::map<int, std::optional<Snapshot>> answers;
    Done done;
  };
  void Position(const ProgramPosition& position);
  void FinishIfComplete(uint64_t number);

  const int rank_;
  const std::shared_ptr<Inbox> inbox_;
  Owner* const owner_;
  uint64_t last_number_ = 0;
  std::map<uint64_t, Question> questions_;
  std::vector<std::pair<int, uint64_t>> asked_;  // the ranks that wait for our answer
  Clock::time_point program_deadline_;
};

}  // namespace dad
