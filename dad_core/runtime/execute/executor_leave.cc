// Batches that end before their last round, because a member is gone or this rank ends.
#include <utility>

#include "runtime/execute/executor_batch.h"
#include "util/byte_io.h"

namespace dad {

// Ends a batch before its last round.
void Executor::Leave(Batch& batch) {
  batch.finished = true;
  for (const auto& [round, member] : batch.offered) {
    if (batch.shares[round][member].arrived) continue;
    if (!wire_->TakeBackMemory(member, batch.id, round)) ++batch.writing;
  }
  ReleaseWhenUnused(batch);
}

void Executor::MemberGone(int member, const Status& why) {
  std::vector<std::pair<uint64_t, int>> stuck;  // in which round
  for (auto& [id, batch] : running_) {
    if (batch->finished) continue;
    for (int round = batch->round; round < batch->num_rounds; ++round) {
      if (batch->shares[round][member].arrived) continue;
      stuck.emplace_back(id, round);
      break;
    }
  }
  for (const auto& [id, round] : stuck) {
    Batch& batch = *running_.at(id);
    // A member that waits for the same message notices by itself that it will not come.
    LeaveAndTell(batch, why, [&batch, member, in_round = round](int m) {
      return m == member || batch.Speaks(in_round, member, m);
    });
  }
}

// In a ring, for example, only the next member waits for the one that is gone.
void Executor::LeaveAndTell(Batch& batch, const Status& why,
                            const std::function<bool(int member)>& knows) {
  for (int m = 0; m < num_members_; ++m) {
    bool waits_for_us = false;
    for (int round = batch.round + (batch.held ? 0 : 1); round < batch.num_rounds; ++round) {
      waits_for_us = waits_for_us || batch.Speaks(round, member_, m);
    }
    if (m != member_ && waits_for_us && !knows(m)) TellLeft(m, batch.id, batch.signature, why);
  }
  left_.insert(batch.id);
  batch.outcome = why;
  Leave(batch);
}

void Executor::TellLeft(int member, uint64_t id, uint64_t signature, const Status& why) {
  MessageHeader header;
  header.kind = MessageKind::kLeft;
  header.batch = id;
  header.signature = signature;
  ByteWriter reason;
  reason.Text(why.message());
  GatherBuffer payload;
  payload.Append(reason.bytes());
  wire_->Send(member, header, std::move(payload), nullptr);
}

void Executor::StartNoMore(const Status& why) {
  start_no_more_ = why;
  for (const auto& [id, messages] : std::exchange(early_, {})) {
    for (const Early& early : messages) {
      if (early.header.kind == MessageKind::kLeft) continue;
      TellLeft(early.member, id, early.header.signature, why);
    }
  }
}

void Executor::LeaveAll(const Status& why) {
  early_.clear();
  std::vector<uint64_t> ids;
  for (const auto& [id, batch] : running_) ids.push_back(id);
  for (uint64_t id : ids) {
    Batch& batch = *running_.at(id);
    const bool on_device = batch.parts[0].exchange->device_turn() != nullptr;
    if (batch.finished && !on_device) continue;
    batch.outcome = why;
    batch.finished ? Release(batch) : Leave(batch);
  }
}

void Executor::FailAll(const Status& why) {
  auto running = std::move(running_);
  running_.clear();
  early_.clear();
  for (auto& [id, batch] : running) {
    if (batch->taken_back) continue;
    for (BatchPart& part : batch->parts) {
      if (part.request) EndPart(part, why);
    }
  }
}

}  // namespace dad
