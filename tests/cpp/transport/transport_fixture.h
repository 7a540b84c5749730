// Ranks as threads of one process, joined by any backend, for transport tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dad/engine.h"
#include "transport/local/local_network.h"
#include "transport/registry.h"

namespace dad {

inline constexpr Transport::Millis kLong{20'000};

// A directory that goes away with the test.
class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dad_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Makes the transports of one world.
class TransportMaker {
 public:
  TransportMaker(std::string backend, int size)
      : backend_(std::move(backend)), size_(size), local_(size) {}

  Result<std::unique_ptr<Transport>> Connect(int rank, double start_timeout = 20) {
    if (backend_ == "local") return local_.Connect(rank);
    World world;
    world.rank = rank;
    world.size = world.local_size = size_;
    world.rendezvous = "file://" + directory_.path();
    world.plugin_dir = DAD_PLUGIN_DIR;
    Options options;
    options.start_timeout_seconds = start_timeout;
    return ConnectTransport(backend_, world, options);
  }

  int size() const { return size_; }

 private:
  const std::string backend_;
  const int size_;
  LocalNetwork local_;
  TempDirectory directory_;
};

inline void RunRanks(TransportMaker& maker, const std::function<void(Transport&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < maker.size(); ++rank) {
    threads.emplace_back([&, rank] {
      Result<std::unique_ptr<Transport>> transport = maker.Connect(rank);
      ASSERT_TRUE(transport.ok()) << transport.status().ToString();
      body(*transport.value());
      // Nobody leaves while another may still wait for what was sent.
      EXPECT_TRUE(transport.value()->Flush(kLong).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void RunRanks(const std::string& backend, int size,
                     const std::function<void(Transport&)>& body) {
  TransportMaker maker(backend, size);
  RunRanks(maker, body);
}

// Keeps what arrives; a test waits for it.
class RecordingSink : public MessageSink {
 public:
  struct Message {
    int peer;
    MessageHeader header;
    AlignedBuffer payload;
  };

  void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) override {
    std::lock_guard<std::mutex> lock(mutex_);
    messages_.push_back({peer, header, std::move(payload)});
    changed_.notify_all();
  }
  void PeerLost(int peer, const Status& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_.emplace_back(peer, why);
    changed_.notify_all();
  }

  bool WaitForMessages(size_t count) {
    return Wait([&] { return messages_.size() >= count; });
  }
  bool WaitForLost(size_t count) {
    return Wait([&] { return lost_.size() >= count; });
  }

  // Read them once nothing comes any more.
  const std::vector<Message>& messages() const { return messages_; }
  const std::vector<std::pair<int, Status>>& lost() const { return lost_; }

 private:
  bool Wait(const std::function<bool()>& done) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kLong, done);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
  std::vector<std::pair<int, Status>> lost_;
};

inline GatherBuffer BytesOf(const std::string& text) {
  GatherBuffer bytes;
  bytes.Append(text.data(), text.size());
  return bytes;
}

inline std::string TextOf(const AlignedBuffer& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

inline MessageHeader DataHeader(uint64_t batch) {
  MessageHeader header;
  header.batch = batch;
  return header;
}

// Of /proc/self/fd or /proc/self/task, say.
inline size_t CountEntries(const char* directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) {
    ++count;
  }
  return count;
}

// The kernel takes a joined thread out of the list a little later.
inline bool EntriesFallTo(size_t expected, const char* directory) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (CountEntries(directory) > expected) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace dad
