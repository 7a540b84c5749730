#include "runtime/observe/inquiry.h"

#include <algorithm>

#include "wire/snapshot.h"

namespace dad {
namespace {

// One question of each rank, and a few of users, may be open at a time.
constexpr size_t kMostAsked = 1024;

constexpr const char* kNoPosition =
    "not known: the program did not answer within 2 s; a call into C code may hold Python's lock";

}  // namespace

Inquiry::Inquiry(int rank, std::shared_ptr<Inbox> inbox, Owner* owner)
    : rank_(rank), inbox_(std::move(inbox)), owner_(owner) {}

void Inquiry::Ask(const std::vector<int>& ranks, Done done, Clock::time_point now) {
  const uint64_t number = ++last_number_;
  Question& question = questions_[number];
  question.deadline = now + kPatience;
  question.done = std::move(done);
  for (int rank : ranks) {
    if (rank == rank_ || owner_->CanAsk(rank)) question.answers[rank] = std::nullopt;
  }
  bool here = false;
  for (const auto& [rank, answer] : question.answers) {
    here = here || rank == rank_;
    if (rank != rank_) owner_->SendTo(rank, MessageKind::kAsk, number, {});
  }
  if (here) OnAsk(rank_, number, now);  // this may finish it
  FinishIfComplete(number);
}

void Inquiry::OnAsk(int peer, uint64_t number, Clock::time_point now) {
  if (asked_.size() >= kMostAsked) return;
  const bool is_first = asked_.empty();
  asked_.emplace_back(peer, number);
  if (!HasProgramReader()) return Position({});
  if (!is_first) return;  // the program is being asked already
  program_deadline_ = now + kProgramPatience;
  // Only this worker takes from its inbox.
  AskProgramPosition([inbox = inbox_, this](const ProgramPosition& position) {
    inbox->Post(CallEvent{[this, position] { Position(position); }});
  });
}

void Inquiry::Position(const ProgramPosition& position) {
  if (asked_.empty()) return;
  Snapshot snapshot = owner_->Look();
  snapshot.where = position.where;
  snapshot.stack = position.stack;
  const std::vector<std::byte> bytes = Encode(snapshot);
  for (const auto& [peer, number] : std::exchange(asked_, {})) {
    if (peer == rank_) {
      OnState(peer, number, bytes);
    } else if (owner_->CanAsk(peer)) {
      owner_->SendTo(peer, MessageKind::kState, number, bytes);
    }
  }
}

void Inquiry::OnState(int peer, uint64_t number, std::span<const std::byte> payload) {
  const auto question = questions_.find(number);
  if (question == questions_.end()) return;  // the answer came too late
  const auto answer = question->second.answers.find(peer);
  Result<Snapshot> snapshot = DecodeSnapshot(payload);
  if (answer == question->second.answers.end() || !snapshot.ok()) return;
  answer->second = std::move(snapshot).value();
  answer->second->rank = peer;
  FinishIfComplete(number);
}

void Inquiry::FinishIfComplete(uint64_t number) {
  const auto found = questions_.find(number);
  if (found == questions_.end()) return;
  const bool complete = std::all_of(found->second.answers.begin(), found->second.answers.end(),
                                    [](const auto& answer) { return answer.second.has_value(); });
  if (complete) found->second.deadline = Clock::time_point();
}

void Inquiry::Check(Clock::time_point now) {
  if (!asked_.empty() && now >= program_deadline_) Position({kNoPosition, ""});
  std::vector<Question> over;
  std::erase_if(questions_, [&](auto& entry) {
    if (now < entry.second.deadline) return false;
    over.push_back(std::move(entry.second));
    return true;
  });
  for (Question& question : over) {
    std::vector<Snapshot> answers;
    for (auto& [rank, answer] : question.answers) {
      if (answer.has_value()) answers.push_back(std::move(*answer));
    }
    question.done(std::move(answers));
  }
}

std::optional<Inquiry::Clock::time_point> Inquiry::NextDeadline() const {
  std::optional<Clock::time_point> deadline;
  if (!asked_.empty()) deadline = program_deadline_;
  for (const auto& [number, question] : questions_) {
    if (!deadline.has_value() || question.deadline < *deadline) deadline = question.deadline;
  }
  return deadline;
}

}  // namespace dad
