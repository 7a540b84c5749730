// A peer that goes away in the middle. MPI is of no use afterwards, so each of these runs
// in a job of its own; whether mpirun calls that job a failure is mpirun's business, so a
// rank says here that it has survived.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "tests/cpp/mpi/rank_fixture.h"

namespace dad {
namespace {

class MpiFault : public RankFixture {
 protected:
  // Returns what keeps the message.
  static std::weak_ptr<std::string> SendLarge(Transport& transport, int peer) {
    auto text = std::make_shared<std::string>(32 << 20, 'x');
    GatherBuffer payload;
    payload.Reference(text->data(), text->size());
    std::weak_ptr<std::string> kept = text;
    transport.Send(peer, DataHeader(0), std::move(payload), std::move(text));
    return kept;
  }

  static void SaySurvived() {
    if (HasFailure()) return;
    std::puts("survived");
    std::fflush(stdout);
  }
};

TEST_F(MpiFault, PeerThatClosesEarlyIsLost) {
  auto transport = Connect();
  if (rank() == 1) {
    ASSERT_TRUE(transport->Barrier(kLong).ok());
    transport->Close();
    return SaySurvived();
  }
  RecordingSink sink;
  transport->SetSink(&sink);
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  const auto kept = SendLarge(*transport, 1);
  ASSERT_TRUE(sink.WaitForLost(1));
  EXPECT_EQ(sink.lost()[0].first, 1);
  EXPECT_NE(sink.lost()[0].second.message().find("rank 1"), std::string::npos);
  EXPECT_TRUE(transport->Flush(kLong).ok());  // nobody is left to take it
  transport->Close();
  EXPECT_TRUE(kept.expired());
  SaySurvived();
}

TEST_F(MpiFault, PeerThatStopsDoesNotHoldUpClose) {
  const std::string pid_file = std::string(std::getenv("DAD_TEST_DIR")) + "/pid";
  auto transport = Connect();
  if (rank() == 1) std::ofstream(pid_file) << getpid();
  ASSERT_TRUE(transport->Barrier(kLong).ok());
  ASSERT_TRUE(transport->Flush(kLong).ok());
  if (rank() == 1) {
    raise(SIGSTOP);
    return;
  }
  const auto kept = SendLarge(*transport, 1);
  const Status flushed = transport->Flush(Transport::Millis(300));
  EXPECT_EQ(flushed.code(), StatusCode::kTimeout);
  EXPECT_NE(flushed.message().find("rank 1"), std::string::npos) << flushed.ToString();
  const auto before = Transport::Clock::now();
  transport->Close();
  EXPECT_LT(Transport::Clock::now() - before, std::chrono::seconds(10));
  EXPECT_TRUE(kept.expired());
  SaySurvived();
  pid_t stopped = 0;
  std::ifstream(pid_file) >> stopped;
  kill(stopped, SIGKILL);
}

}  // namespace
}  // namespace dad
