// One rank of a LocalNetwork. Its thread delivers what is due.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "transport/local/hub.h"
#include "transport/transport.h"

namespace dad::local {

class LocalTransport final : public Transport, private Inbox {
 public:
  LocalTransport(int rank, std::shared_ptr<Hub> hub);
  ~LocalTransport() override;

  std::string_view name() const override { return "local"; }
  TransportCounters counters() const override;
  double LineRate() const override { return hub_->line_rate(); }
  void Send(int peer, MessageHeader header, GatherBuffer payload,
            std::shared_ptr<void> keep) override;
  Status Flush(Millis timeout) override;
  void Close() override;

 private:
  void Put(Parcel parcel) override;
  void Run();
  void HandOut(Parcel parcel);

  const std::shared_ptr<Hub> hub_;
  std::atomic<int64_t> bytes_sent_{0};
  std::atomic<int64_t> bytes_received_{0};
  std::atomic<int64_t> messages_sent_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Parcel> heap_;  // the one due first on top
  bool closing_ = false;

  std::mutex close_mutex_;  // one Close at a time
  std::thread thread_;
};

}  // namespace dad::local
