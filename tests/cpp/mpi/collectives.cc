// The blocking collectives, with payloads that go over the control connection and ones
// that go by MPI.
#include "dad/plugins.h"
#include "tests/cpp/mpi/rank_fixture.h"
#include "tests/cpp/transport/transport_collectives.h"

namespace dad {
namespace {

// Every check then has payloads of more than 64 KB (transport/mpi/announcement.h).
constexpr int64_t kScale = 40;

class MpiCollectives : public RankFixture {
 protected:
  void TearDown() override { EXPECT_TRUE(transport_->Flush(kLong).ok()); }
  std::unique_ptr<Transport> transport_ = Connect();
};

TEST_F(MpiCollectives, AllReduceSumsEveryType) { CheckAllReduceOfEveryType(*transport_, kScale); }

TEST_F(MpiCollectives, AllReduceServesEveryOperation) {
  CheckAllReduceWithEveryOperation(*transport_, kScale);
}

TEST_F(MpiCollectives, AllGatherTakesUnequalAndEmptyParts) {
  CheckAllGatherOfUnequalParts(*transport_, kScale);
}

TEST_F(MpiCollectives, AllGatherBlobsKeepsLengths) { CheckAllGatherOfBlobs(*transport_, kScale); }

TEST_F(MpiCollectives, BroadcastFromEveryRoot) { CheckBroadcastFromEveryRoot(*transport_, kScale); }

TEST_F(MpiCollectives, ReduceScatterGivesEachItsUnequalBlock) {
  CheckReduceScatterOfUnequalBlocks(*transport_, kScale);
}

TEST_F(MpiCollectives, AllToAllTakesUnequalAndEmptyParts) {
  CheckAllToAllOfUnequalParts(*transport_, kScale);
}

TEST_F(MpiCollectives, TagsKeepSendsApart) { CheckThatTagsKeepSendsApart(*transport_, kScale); }

TEST_F(MpiCollectives, BarrierAfterBarrier) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(transport_->Barrier(kLong).ok());
}

TEST_F(MpiCollectives, EveryRankGetsTheTextOfRankZero) {
  const std::string mine = "text of rank " + std::to_string(rank());
  Result<std::string> text = MpiBootstrap(mine, DAD_PLUGIN_DIR);
  ASSERT_TRUE(text.ok()) << text.status().ToString();
  EXPECT_EQ(text.value(), "text of rank 0");
}

}  // namespace
}  // namespace dad
