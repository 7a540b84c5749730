#include "runtime/peers.h"

#include <gtest/gtest.h>

namespace dad {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class PeersTest : public testing::Test {
 protected:
  // Checks as often as the worker would, for `time`; the first peer found silent. Between two
  // checks `bytes` move to or from peer 1.
  std::optional<int> Watch(milliseconds time, std::vector<bool> awaited, bool answers = false,
                           int64_t bytes = 0) {
    for (milliseconds passed{0}; passed <= time; passed += peers_.interval()) {
      now_ += peers_.interval();
      progress_[1] += bytes;
      const Peers::Verdict verdict = peers_.Check(awaited, progress_, now_);
      pings_ += static_cast<int>(verdict.ping.size());
      if (verdict.silent.has_value()) return verdict.silent;
      if (answers) {
        for (int peer : verdict.ping) peers_.Heard(peer, now_);
      }
    }
    return std::nullopt;
  }

  Peers peers_{0, 3, seconds(10)};
  Peers::Clock::time_point now_ = Peers::Clock::time_point() + seconds(1000);
  std::vector<int64_t> progress_ = {0, 0, 0};
  int pings_ = 0;
};

TEST_F(PeersTest, ASilentPeerIsPingedAndThenNamed) {
  EXPECT_EQ(Watch(seconds(20), {false, false, true}), 2);
  EXPECT_GT(pings_, 1);
}

TEST_F(PeersTest, APeerThatAnswersPingsMayTakeItsTime) {
  EXPECT_EQ(Watch(seconds(100), {false, true, true}, /*answers=*/true), std::nullopt);
}

TEST_F(PeersTest, APeerWhoseBytesMoveIsAliveThoughNoMessageIsComplete) {
  EXPECT_EQ(Watch(seconds(100), {false, true, false}, /*answers=*/false, /*bytes=*/1),
            std::nullopt);
  EXPECT_EQ(Watch(seconds(20), {false, true, false}), 1) << "the line has gone quiet";
}

TEST_F(PeersTest, BytesOfOnePeerSayNothingAboutAnother) {
  EXPECT_EQ(Watch(seconds(20), {false, true, true}, /*answers=*/false, /*bytes=*/1), 2);
}

TEST_F(PeersTest, NobodyIsTimedWhileNobodyWaits) {
  EXPECT_EQ(Watch(seconds(100), {false, false, false}), std::nullopt);
  EXPECT_EQ(pings_, 0);
}

TEST_F(PeersTest, TheTimeBetweenTwoWaitsDoesNotCount) {
  EXPECT_EQ(Watch(seconds(5), {false, true, false}), std::nullopt);
  now_ += seconds(100);  // no checks: an idle engine has no timer
  EXPECT_EQ(Watch(seconds(5), {false, true, false}), std::nullopt);
}

TEST_F(PeersTest, WhoHasSaidGoodbyeIsNotMissed) {
  peers_.Set(1, Peers::State::kGone);
  EXPECT_EQ(Watch(seconds(100), {false, true, false}), std::nullopt);
}

}  // namespace
}  // namespace dad
