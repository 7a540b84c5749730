// Ranks that connect to each other while others come to their ports: strangers, ranks of another
// job, ranks with another secret.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <random>

#include "tests/cpp/transport/transport_fixture.h"

namespace dad {
namespace {

// Ports from the returned one on are free, or were just now.
int FreePorts(int count) {
  std::mt19937 random(std::random_device{}());
  for (;;) {
    const int first = 20000 + static_cast<int>(random() % 10000);
    bool free = true;
    for (int port = first; port < first + count && free; ++port) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<uint16_t>(port));
      free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
      close(fd);
    }
    if (free) return first;
  }
}

// -1 if nobody listens there.
int ConnectTo(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

class StrangersTest : public testing::Test {
 protected:
  using Change = std::function<void(World&, Options&)>;

  Result<std::unique_ptr<Transport>> Connect(int rank, int size, const Change& change = nullptr) {
    World world;
    world.rank = world.local_rank = rank;
    world.size = world.local_size = size;
    world.rendezvous = "file://" + directory_.path();
    world.plugin_dir = DAD_PLUGIN_DIR;
    world.secret = "the secret of this job";
    world.job = "job";
    Options options;
    options.start_timeout_seconds = 20;
    options.port = port_;
    if (change) change(world, options);
    return ConnectTransport("gloo", world, options);
  }

  // What two ranks say that differ by `change`, which is made to rank 1.
  std::pair<Status, Status> Outcome(const Change& change) {
    Status first;
    std::thread other([&] {
      first = Connect(0, 2, [](World&, Options& o) { o.start_timeout_seconds = 1.5; }).status();
    });
    const Status second = Connect(1, 2, [&](World& world, Options& options) {
                            options.start_timeout_seconds = 1.5;
                            change(world, options);
                          }).status();
    other.join();
    return {first, second};
  }

  TempDirectory directory_;
  int port_ = 0;
};

TEST_F(StrangersTest, RankWithAnotherSecretIsRefusedAndToldSo) {
  const auto [first, second] = Outcome([](World& world, Options&) { world.secret = "another"; });
  EXPECT_FALSE(first.ok());
  EXPECT_NE(first.message().find("strangers were refused"), std::string::npos) << first.message();
  EXPECT_FALSE(second.ok());
  EXPECT_NE(second.message().find("rank 0"), std::string::npos) << second.message();
  EXPECT_NE(second.message().find("DAD_SECRET_FILE"), std::string::npos) << second.message();
}

TEST_F(StrangersTest, RankWithoutTheSecretIsRefused) {
  const auto [first, second] = Outcome([](World& world, Options&) { world.secret = ""; });
  EXPECT_FALSE(first.ok());
  EXPECT_FALSE(second.ok());
}

TEST_F(StrangersTest, RankOfAnotherJobIsRefused) {
  const auto [first, second] = Outcome([](World& world, Options&) { world.job = "another"; });
  EXPECT_FALSE(first.ok());
  EXPECT_FALSE(second.ok());
}

TEST_F(StrangersTest, PortIsThatOfTheOptionsAndClosesWhenAllAreThere) {
  port_ = FreePorts(4);
  std::thread later([&] {
    for (int waited = 0; waited < 500; ++waited) {
      if (const int fd = ConnectTo(port_ + 1); fd >= 0) {
        close(fd);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    auto second = Connect(1, 2);
    ASSERT_TRUE(second.ok()) << second.status().ToString();
    EXPECT_TRUE(second.value()->Barrier(kLong).ok());  // rank 0 has left its Connect, too
    EXPECT_LT(ConnectTo(port_ + 1), 0);
    EXPECT_LT(ConnectTo(port_ + 2), 0);
    EXPECT_TRUE(second.value()->Flush(kLong).ok());
  });
  auto first = Connect(0, 2);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_TRUE(first.value()->Barrier(kLong).ok());
  EXPECT_TRUE(first.value()->Flush(kLong).ok());
  later.join();
}

TEST_F(StrangersTest, NoiseFloodsAndHalfOpenConnectionsHoldNobodyUp) {
  constexpr int kRanks = 3;
  port_ = FreePorts(kRanks + 1);
  std::atomic<bool> over{false};
  std::atomic<int> attacks{0};
  std::vector<std::thread> attackers;
  for (int kind = 0; kind < 3; ++kind) {
    attackers.emplace_back([&, kind] {
      std::mt19937 random(static_cast<unsigned>(kind));
      std::vector<int> idle;
      while (!over) {
        const int fd = ConnectTo(port_ + 1 + static_cast<int>(random() % kRanks));
        if (fd < 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          continue;
        }
        ++attacks;
        std::string noise(1 + random() % 200, '\0');
        for (char& byte : noise) byte = static_cast<char>(random());
        if (kind != 0) (void)!send(fd, noise.data(), noise.size(), MSG_NOSIGNAL);
        if (kind == 2 || idle.size() > 300) {
          close(fd);
        } else {
          idle.push_back(fd);
        }
      }
      for (const int fd : idle) close(fd);
    });
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      // The strangers come first.
      const int before = attacks;
      if (rank == kRanks - 1) {
        while (attacks < before + 400) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      auto transport = Connect(rank, kRanks);
      ASSERT_TRUE(transport.ok()) << transport.status().ToString();
      EXPECT_TRUE(transport.value()->Barrier(kLong).ok());
      EXPECT_TRUE(transport.value()->Flush(kLong).ok());
    });
  }
  for (std::thread& rank : ranks) rank.join();
  over = true;
  for (std::thread& attacker : attackers) attacker.join();
  EXPECT_GE(attacks, 400);
}

}  // namespace
}  // namespace dad
