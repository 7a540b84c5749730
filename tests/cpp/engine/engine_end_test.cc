// How requests end when something else ends first: a step, a process set, a rank, the engine. The
// memory of a tensor is the user's again when its ticket is done, so nobody may use it any more.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "engine_fixture.h"

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A line that can be held up: messages that refer to memory stay in its queue, those that are
// written into reserved memory are not done yet. Everything else passes.
class HeldLine final : public Transport, private MessageSink {
 public:
  explicit HeldLine(std::unique_ptr<Transport> inner)
      : Transport(inner->rank(), inner->size()), inner_(std::move(inner)) {
    inner_->SetSink(this);
  }
  ~HeldLine() override { Close(); }

  void HoldSends(bool hold) {
    std::vector<Outgoing> queue;
    {
      std::lock_guard lock(mutex_);
      hold_sends_ = hold;
      if (!hold) queue = std::move(outgoing_);
    }
    for (Outgoing& out : queue) {
      inner_->Send(out.peer, out.header, std::move(out.payload), std::move(out.keep));
    }
  }
  // Those of this round and later ones.
  void HoldReceives(int from_round) {
    std::lock_guard lock(mutex_);
    held_from_round_ = from_round;
  }
  void LetReceivesIn() {
    std::vector<Incoming> queue;
    {
      std::lock_guard lock(mutex_);
      held_from_round_ = kNoRound;
      queue = std::move(incoming_);
    }
    for (Incoming& in : queue) DeliverMessage(in.peer, in.header, std::move(in.payload));
  }
  // Sent, or written, but not done.
  bool holds() const {
    std::lock_guard lock(mutex_);
    return !outgoing_.empty() || !incoming_.empty();
  }
  bool closed() const { return closed_; }

  std::string_view name() const override { return "held"; }
  TransportCounters counters() const override { return inner_->counters(); }
  void Send(int peer, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override {
    {
      std::lock_guard lock(mutex_);
      if (hold_sends_ && keep != nullptr) {
        outgoing_.push_back({peer, header, std::move(payload), std::move(keep)});
        return;
      }
    }
    inner_->Send(peer, header, std::move(payload), std::move(keep));
  }
  Status Flush(Millis timeout) override { return inner_->Flush(timeout); }
  // At start-up; their messages never leave the inner transport.
  Status SendTo(int peer, uint64_t tag, ByteSpan bytes, Millis timeout) override {
    return inner_->SendTo(peer, tag, bytes, timeout);
  }
  Status ReceiveFrom(int peer, uint64_t tag, std::span<std::byte> bytes, Millis timeout) override {
    return inner_->ReceiveFrom(peer, tag, bytes, timeout);
  }
  Result<std::vector<std::vector<std::byte>>> AllGatherBlobs(ByteSpan mine,
                                                             Millis timeout) override {
    return inner_->AllGatherBlobs(mine, timeout);
  }
  void Close() override {
    inner_->Close();
    closed_ = true;
    std::lock_guard lock(mutex_);
    outgoing_.clear();
  }

 private:
  static constexpr int kNoRound = 256;
  struct Outgoing {
    int peer;
    MessageHeader header;
    GatherBuffer payload;
    std::shared_ptr<void> keep;
  };
  struct Incoming {
    int peer;
    MessageHeader header;
    AlignedBuffer payload;
  };

  std::byte* Reserve(int peer, const MessageHeader& header) override {
    return ReserveFor(peer, header);
  }
  void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) override {
    {
      std::lock_guard lock(mutex_);
      if (header.kind == MessageKind::kData && header.round >= held_from_round_) {
        incoming_.push_back({peer, header, std::move(payload)});
        return;
      }
    }
    DeliverMessage(peer, header, std::move(payload));
  }
  void PeerLost(int peer, const Status& why) override { ReportLost(peer, why); }

  const std::unique_ptr<Transport> inner_;
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  bool hold_sends_ = false;
  int held_from_round_ = kNoRound;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

// A job over such lines, with tensors that go in two rounds, by reference.
class EngineEndTest : public ::testing::Test {
 protected:
  void Begin(int size, std::vector<std::vector<int>> sets = {}) {
    lines_.resize(static_cast<size_t>(size));
    const auto wrap = [this](std::unique_ptr<Transport> inner) {
      auto line = std::make_unique<HeldLine>(std::move(inner));
      lines_[static_cast<size_t>(line->rank())] = line.get();
      return line;
    };
    job_.emplace(size, Options(), std::move(sets), wrap);
  }
  Job& job() { return *job_; }
  HeldLine& line(int rank) { return *lines_[static_cast<size_t>(rank)]; }

  static void Until(const std::function<bool()>& holds) {
    for (int i = 0; i < 2000 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(5));
    EXPECT_TRUE(holds());
  }
  static constexpr milliseconds kAWhile{100};

  std::vector<HeldLine*> lines_;
  std::optional<Job> job_;
};

std::vector<float> Many() { return std::vector<float>(1 << 16, 1.0f); }

TEST_F(EngineEndTest, ATensorThatIsTakenBackIsTheUsersWhenItsBytesHaveLeft) {
  Begin(2);
  for (int step = 0; step < 5; ++step) {
    job().Run([&](int rank) {
      Values v(Many());
      ASSERT_TRUE(job()[rank].Submit(v.AllReduce("v"))->Wait(seconds(20)).ok());
    });
  }
  Values v(Many());
  Request request = v.AllReduce("v");
  request.step = 7;
  line(0).HoldSends(true);
  const std::shared_ptr<Ticket> ticket = job()[0].Submit(std::move(request));
  Until([&] { return line(0).holds(); });
  job()[0].GiveUp(7, Status::FailedPrecondition("by hand"));
  EXPECT_EQ(ticket->Wait(kAWhile).code(), StatusCode::kTimeout);
  line(0).HoldSends(false);
  EXPECT_EQ(ticket->Wait(seconds(20)).message(), "by hand");
  job().Run([&](int rank) {
    Values again(Many());
    ASSERT_TRUE(job()[rank].Submit(again.AllReduce("v"))->Wait(seconds(20)).ok());
    EXPECT_EQ(again.data[0], 2.0f);
  });
}

TEST_F(EngineEndTest, ATensorOfASetThatIsRemovedIsTheUsersWhenItsBytesHaveLeft) {
  Begin(3, {{0, 1}});
  line(0).HoldSends(true);
  Values mine(Many()), others(Many());
  Request request = mine.AllReduce("v");
  request.process_set = 1;
  const std::shared_ptr<Ticket> ticket = job()[0].Submit(std::move(request));
  request = others.AllReduce("v");
  request.process_set = 1;
  const std::shared_ptr<Ticket> other = job()[1].Submit(std::move(request));
  Until([&] { return line(0).holds(); });
  job().Run([&](int rank) {
    const auto removed = job()[rank].Submit(Bare(OpKind::kRemoveProcessSet, "remove", {1}));
    EXPECT_TRUE(removed->Wait(seconds(20)).ok());
  });
  EXPECT_EQ(ticket->Wait(kAWhile).code(), StatusCode::kTimeout);
  line(0).HoldSends(false);
  for (const auto& each : {ticket, other}) {
    EXPECT_EQ(each->Wait(seconds(20)).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(EngineEndTest, ATensorIsTheUsersWhenNothingIsWrittenToItAnyMore) {
  Begin(3);
  line(0).HoldReceives(1);
  line(2).HoldReceives(0);
  std::vector<Values> values(3, Values(Many()));
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int rank = 0; rank < 3; ++rank) {
    tickets.push_back(job()[rank].Submit(values[static_cast<size_t>(rank)].AllReduce("v")));
  }
  // Rank 0 is about to have the sum of rank 1's piece; rank 2, which hears nothing, never sends
  // its.
  Until([&] { return line(0).holds() && line(2).holds(); });
  job().Leave(2);
  EXPECT_EQ(tickets[1]->Wait(seconds(20)).code(), StatusCode::kAborted);
  EXPECT_EQ(tickets[0]->Wait(kAWhile).code(), StatusCode::kTimeout);
  line(0).LetReceivesIn();
  EXPECT_EQ(tickets[0]->Wait(seconds(20)).code(), StatusCode::kAborted);
}

TEST_F(EngineEndTest, TensorsOfAnEngineThatIsShutDownAreTheUsersWhenItsLinesAreClosed) {
  Begin(2);
  line(0).HoldSends(true);
  Values v(Many()), other(Many());
  const std::shared_ptr<Ticket> ticket = job()[0].Submit(v.AllReduce("v"));
  const std::shared_ptr<Ticket> others = job()[1].Submit(other.AllReduce("v"));
  Until([&] { return line(0).holds(); });
  std::atomic<bool> closed{false};
  ticket->OnDone([&](const Status&) { closed = line(0).closed(); });
  job().Leave(0);
  EXPECT_EQ(ticket->Wait(seconds(0)).code(), StatusCode::kAborted);
  EXPECT_TRUE(closed);
}

// What a rank has said before it leaves is all that the others need of it: whether they hear it in
// time from each other must not matter.
TEST(EngineLeaveTest, ARankMayLeaveRightAfterJoin) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Job job(4);
    job.network().SetJitter(milliseconds(30), seed);
    job.Run([&](int rank) {
      const auto ticket = job[rank].Submit(Bare(OpKind::kJoin, "join"));
      const Status status = ticket->Wait(seconds(20));
      EXPECT_TRUE(status.ok()) << "rank " << rank << ": " << status.ToString();
      EXPECT_GE(ticket->value(), 0);
      job.Leave(rank);
    });
  }
}

TEST(EngineLeaveTest, ARankThatLeavesAfterAnErrorOfAllLeavesItToTheOthers) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Job job(4);
    job.network().SetJitter(milliseconds(30), seed);
    job.Run([&](int rank) {
      Values v(std::vector<float>(rank == 1 ? 2 : 1));
      const Status status = job[rank].Submit(v.AllReduce("v"))->Wait(seconds(20));
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
      job.Leave(rank);
    });
  }
}

TEST(EngineLeaveTest, WhatIsLeftBehindTakesNoTime) {
  Job job(2);
  for (int step = 0; step < 5; ++step) {
    job.Run([&](int rank) {
      Values a({1}), b({1});
      const auto first = job[rank].Submit(a.AllReduce("a"));
      const auto second = job[rank].Submit(b.AllReduce("b"));
      ASSERT_TRUE(first->Wait(seconds(20)).ok());
      ASSERT_TRUE(second->Wait(seconds(20)).ok());
    });
  }
  // Of a batch of two.
  Values a({1});
  const auto ticket = job[0].Submit(a.AllReduce("a"));
  (void)ticket->Done();
  job.Leave(1);
  EXPECT_EQ(ticket->Wait(seconds(20)).code(), StatusCode::kAborted);
  const auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec * 1000 + usage.ru_utime.tv_usec / 1000 +
           usage.ru_stime.tv_sec * 1000 + usage.ru_stime.tv_usec / 1000;
  };
  std::this_thread::sleep_for(milliseconds(1000));  // longer than the others are waited for
  const auto before = used();
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_LT(used() - before, 10);
}

}  // namespace
}  // namespace dad
