// The executor with a wire that only takes notes: what it sends, waits for, keeps and refuses.
#include "runtime/execute/executor.h"

#include <gtest/gtest.h>

#include "runtime/lane/batch_id.h"
#include "runtime/observe/timeline.h"
#include "tests/cpp/engine/engine_fixture.h"
#include "util/byte_io.h"

namespace dad {
namespace {

using std::chrono::seconds;

class NotingWire final : public WireOut {
 public:
  struct Sent {
    int member;
    MessageHeader header;
    size_t num_bytes;
    std::shared_ptr<void> keep;
  };

  void Send(int member, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override {
    sent.push_back({member, header, payload.size(), std::move(keep)});
  }
  void OfferMemory(int, uint64_t, int, std::span<std::byte> memory) override {
    offered.push_back(memory);
  }
  bool TakeBackMemory(int, uint64_t, int) override { return !is_writing; }
  std::shared_ptr<SendPin> MakePin(uint64_t batch) override {
    return std::make_shared<SendPin>(inbox, uint16_t{0}, batch);
  }
  void RunOnDevice(DeviceTask) override { ADD_FAILURE(); }
  void Fatal(int member, const std::string& why) override {
    fatal.push_back(std::to_string(member) + ": " + why);
  }
  Timeline* timeline() override { return &timeline_; }
  std::chrono::steady_clock::time_point Now() const override { return now; }
  double LineRate() const override { return 0; }

  std::vector<Sent> sent;
  std::vector<std::span<std::byte>> offered;
  bool is_writing = false;
  std::vector<std::string> fatal;
  std::chrono::steady_clock::time_point now{seconds(100)};
  const std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();

 private:
  Timeline timeline_{0};
};

// Two rounds of four bytes each; every rank sends to every other one.
class TwoRounds : public Exchange {
 public:
  Status Begin(const StepInput&, const Group&) override { return Status::Ok(); }
  int num_rounds() const override { return 2; }
  Status Send(int, int, GatherBuffer& out) override {
    if (large != nullptr) out.Reference(large->data(), large->size());
    out.AppendValue(uint32_t{1});
    return Status::Ok();
  }
  int64_t ReceiveBytes(int, int) const override { return 4; }
  std::span<std::byte> Destination(int, int) override { return destination; }
  Status Receive(int, std::span<const ByteSpan>) override {
    ++received;
    return Status::Ok();
  }
  Status Finish() override {
    finished = true;
    return Status::Ok();
  }
  void Cancel() override { cancelled = true; }

  const std::vector<std::byte>* large = nullptr;
  std::span<std::byte> destination;
  int received = 0;
  bool finished = false;
  bool cancelled = false;
};

class ExecutorTest : public testing::Test {
 protected:
  static constexpr uint64_t kId = 5;
  static constexpr uint64_t kSignature = 77;

  void Start() {
    request_->parts_left = 1;
    executor_.Start(kId, kSignature, {{exchange_, request_, 0}}, {0, 3, {}});
  }
  void Get(int member, int round, size_t num_bytes = 4, uint64_t signature = kSignature) {
    MessageHeader header;
    header.round = static_cast<uint8_t>(round);
    header.batch = kId;
    header.signature = signature;
    header.payload_bytes = num_bytes;
    executor_.OnData(member, header, AlignedBuffer(num_bytes));
  }
  void GetLeft(int member) {
    MessageHeader header;
    header.kind = MessageKind::kLeft;
    header.batch = kId;
    header.signature = kSignature;
    ByteWriter reason;
    reason.Text("rank 9 has shut down");
    AlignedBuffer payload(reason.bytes().size());
    std::copy(reason.bytes().begin(), reason.bytes().end(), payload.data());
    executor_.OnLeft(member, header, std::move(payload));
  }
  bool done() const { return done_.size() == 1; }
  // The transport lets go of all that it was given; the worker hears of it.
  void AllLeave() {
    wire_.sent.clear();
    std::vector<Event> events;
    wire_.inbox->Take(Inbox::Clock::time_point(), events);
    for (const Event& event : events) executor_.OnSent(std::get<SentEvent>(event).batch);
  }

  NotingWire wire_;
  std::vector<std::shared_ptr<RequestState>> done_;
  Executor executor_{
      0, {0, 1, 2}, &wire_, [this](const std::shared_ptr<RequestState>& r) { done_.push_back(r); }};
  std::shared_ptr<TwoRounds> exchange_ = std::make_shared<TwoRounds>();
  Values values_{std::vector<float>(4)};
  std::shared_ptr<RequestState> request_ =
      std::make_shared<RequestState>(values_.AllReduce("x"), nullptr, nullptr, wire_.now);
};

TEST_F(ExecutorTest, ARoundEndsWhenAllHaveSentTheirs) {
  Start();
  EXPECT_EQ(wire_.sent.size(), 2u);
  Get(1, 0);
  Get(1, 1);  // ahead of the others
  EXPECT_EQ(exchange_->received, 0);
  EXPECT_EQ(executor_.Awaited(), (std::vector<bool>{false, false, true}));
  Get(2, 0);
  EXPECT_EQ(exchange_->received, 1);
  EXPECT_EQ(wire_.sent.size(), 4u);
  EXPECT_FALSE(done());
  Get(2, 1);
  EXPECT_TRUE(done());
  EXPECT_TRUE(exchange_->finished);
  EXPECT_FALSE(executor_.busy());
}

TEST_F(ExecutorTest, MessagesThatComeBeforeTheirBatchAreKept) {
  Get(1, 0);
  Get(2, 0);
  EXPECT_EQ(executor_.num_unread(), 2u);
  Start();
  EXPECT_EQ(executor_.num_unread(), 0u);
  EXPECT_EQ(exchange_->received, 1);
}

TEST_F(ExecutorTest, MessagesOfARecalledScheduleAreDroppedEvenIfTheyComeLate) {
  const auto get = [this](uint32_t schedule) {
    MessageHeader header;
    header.batch = ScheduledBatchId(schedule, 0, 1);
    executor_.OnData(1, header, {});
  };
  get(6);
  get(7);
  get(8);
  executor_.RetireSchedule(7);
  EXPECT_EQ(executor_.num_unread(), 1u) << "only that of the next schedule";
  get(7);
  get(6);
  EXPECT_EQ(executor_.num_unread(), 1u);
  get(9);
  EXPECT_EQ(executor_.num_unread(), 2u);
}

TEST_F(ExecutorTest, AMessageThatDoesNotFitEndsEverything) {
  Start();
  Get(1, 0, 4, kSignature + 1);
  EXPECT_EQ(wire_.fatal.size(), 1u) << "another signature";
  Get(1, 2);
  EXPECT_EQ(wire_.fatal.size(), 2u) << "a round too many";
  Get(2, 0);
  Get(2, 0);
  ASSERT_EQ(wire_.fatal.size(), 3u) << "twice";
  EXPECT_EQ(wire_.fatal[2], "2: sent a message that does not belong to the batch it names");
  Get(1, 0, 3);
  EXPECT_EQ(wire_.fatal.size(), 4u) << "too short";
}

TEST_F(ExecutorTest, ARequestIsDoneWhenItsBytesHaveLeft) {
  const std::vector<std::byte> large(10'000);
  exchange_->large = &large;
  Start();
  for (int round = 0; round < 2; ++round) {
    for (int member = 1; member < 3; ++member) Get(member, round);
  }
  EXPECT_TRUE(exchange_->finished);
  EXPECT_FALSE(done());
  EXPECT_TRUE(executor_.busy());
  AllLeave();
  EXPECT_TRUE(done());
}

TEST_F(ExecutorTest, ARequestThatWasTakenBackEndsWhenItsBytesHaveLeft) {
  const std::vector<std::byte> large(10'000);
  exchange_->large = &large;
  Start();
  EXPECT_TRUE(executor_.Carries(request_));
  EXPECT_EQ(executor_.Cancel(kId), std::vector<std::shared_ptr<RequestState>>{request_});
  EXPECT_TRUE(exchange_->cancelled);
  EXPECT_FALSE(executor_.Carries(request_));
  EXPECT_EQ(request_->leaving, 1);
  request_->ended = true;
  EXPECT_FALSE(done());
  AllLeave();
  EXPECT_TRUE(done());
  EXPECT_TRUE(executor_.Cancel(kId).empty());
}

TEST_F(ExecutorTest, AMemberThatIsGoneFailsWhatItHasNotSent) {
  Start();
  Get(1, 0);
  Get(1, 1);
  executor_.MemberGone(1, Status::Aborted("rank 1 has shut down"));
  EXPECT_FALSE(done()) << "it has sent all";
  executor_.MemberGone(2, Status::Aborted("rank 2 has shut down"));
  ASSERT_TRUE(done());
  EXPECT_EQ(request_->first_error.message(), "rank 2 has shut down");
  EXPECT_EQ(wire_.sent.size(), 2u) << "the others know by themselves";
}

TEST_F(ExecutorTest, ARequestThatFailsIsDoneWhenNothingIsWrittenToItAnyMore) {
  std::vector<std::byte> memory(4);
  exchange_->destination = memory;
  Start();
  EXPECT_EQ(wire_.offered.size(), 2u);
  Get(1, 0);
  Get(2, 0);
  Get(1, 1);
  wire_.is_writing = true;  // the message of rank 2
  executor_.MemberGone(2, Status::Aborted("rank 2 has shut down"));
  EXPECT_FALSE(done());
  MessageHeader header;
  header.round = 1;
  header.batch = kId;
  header.signature = kSignature;
  header.payload_bytes = 4;
  executor_.OnData(2, header, AlignedBuffer());
  EXPECT_TRUE(done());
}

TEST_F(ExecutorTest, ABatchThatAMemberHasLeftFails) {
  Start();
  GetLeft(2);
  ASSERT_TRUE(done());
  EXPECT_EQ(request_->first_error.message(), "rank 9 has shut down");
  ASSERT_EQ(wire_.sent.size(), 3u);
  EXPECT_EQ(wire_.sent[2].member, 1) << "who waits for the second round";
  EXPECT_EQ(wire_.sent[2].header.kind, MessageKind::kLeft);
  Get(1, 0);
  EXPECT_EQ(wire_.sent.size(), 3u) << "is not told again";
}

TEST_F(ExecutorTest, ABatchThatAMemberHasLeftBeforeItStartsFails) {
  GetLeft(2);
  Start();
  EXPECT_TRUE(done());
}

TEST_F(ExecutorTest, WhoSendsOfABatchThatNeverStartsIsTold) {
  Get(1, 0);
  executor_.StartNoMore(Status::Aborted("rank 9 has shut down"));
  Get(2, 0);
  ASSERT_EQ(wire_.sent.size(), 2u);
  for (int member = 1; member < 3; ++member) {
    const NotingWire::Sent& sent = wire_.sent[static_cast<size_t>(member) - 1];
    EXPECT_EQ(sent.member, member);
    EXPECT_EQ(sent.header.kind, MessageKind::kLeft);
    EXPECT_EQ(sent.header.batch, kId);
    EXPECT_EQ(sent.header.signature, kSignature);
  }
  EXPECT_EQ(executor_.num_unread(), 0u);
}

TEST_F(ExecutorTest, ALateMemberIsNamedByTheAgeOfTheRound) {
  Start();
  Get(1, 0);
  wire_.now += seconds(10);
  EXPECT_TRUE(executor_.LateSince(wire_.now - seconds(11)).empty());
  const auto late = executor_.LateSince(wire_.now - seconds(10));
  ASSERT_EQ(late.size(), 1u);
  EXPECT_EQ(late[0].request, request_);
  EXPECT_EQ(late[0].members, std::vector<int>{2});
}

}  // namespace
}  // namespace dad
