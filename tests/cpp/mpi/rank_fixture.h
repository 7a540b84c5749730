// This process is one rank of a job that mpirun has started; all ranks run the same
// tests in the same order. The control connections meet in $DAD_TEST_DIR.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "tests/cpp/transport/transport_fixture.h"

namespace dad {

inline int FromLauncher(const char* openmpi, const char* mpich) {
  const char* value = std::getenv(openmpi);
  if (value == nullptr) value = std::getenv(mpich);
  if (value == nullptr)
    ADD_FAILURE() << "not started by mpirun: no " << openmpi << ", no " << mpich;
  return value == nullptr ? 0 : std::atoi(value);
}

class RankFixture : public testing::Test {
 protected:
  int rank() const { return rank_; }
  int size() const { return size_; }

  Result<std::unique_ptr<Transport>> TryConnect() {
    static int generation = 0;
    World world;
    world.rank = rank_;
    world.size = world.local_size = size_;
    world.rendezvous = "file://" + std::string(std::getenv("DAD_TEST_DIR"));
    world.generation = std::to_string(generation++);
    world.plugin_dir = DAD_PLUGIN_DIR;
    Options options;
    options.start_timeout_seconds = 60;
    return ConnectTransport("mpi", world, options);
  }

  std::unique_ptr<Transport> Connect() {
    Result<std::unique_ptr<Transport>> transport = TryConnect();
    EXPECT_TRUE(transport.ok()) << transport.status().ToString();
    // The others would wait for this rank until they time out.
    if (!transport.ok()) std::exit(1);
    return std::move(transport).value();
  }

  template <typename Body>
  void ForEachPeer(const Body& body) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) body(peer);
    }
  }

 private:
  const int rank_ = FromLauncher("OMPI_COMM_WORLD_RANK", "PMI_RANK");
  const int size_ = FromLauncher("OMPI_COMM_WORLD_SIZE", "PMI_SIZE");
};

}  // namespace dad
