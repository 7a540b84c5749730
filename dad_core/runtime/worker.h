// The thread of an engine and everything that only this thread uses: lanes, peers, timers.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "dad/engine.h"
#include "exchange/feedback/state_store.h"
#include "runtime/device/device_lane.h"
#include "runtime/device/stager.h"
#include "runtime/execute/receive_table.h"
#include "runtime/inbox.h"
#include "runtime/lane/lane.h"
#include "runtime/observe/inquiry.h"
#include "runtime/observe/stall_watch.h"
#include "runtime/observe/timeline.h"
#include "runtime/peers.h"
#include "runtime/start_up.h"
#include "transport/transport.h"

namespace dad {

class Worker final : public MessageSink, private LaneOwner, private Inquiry::Owner {
 public:
  using Clock = std::chrono::steady_clock;

  // `why_staged`: why device tensors go by way of the host, if the transport has nothing for them.
  Worker(std::unique_ptr<Transport> transport, std::string hostname, const Options& options,
         CpuLevel cpu_level, std::vector<std::vector<int>> process_sets, std::string why_staged,
         DeviceMethods device_methods);
  // Says goodbye, ends the thread, closes the transport.
  ~Worker() override;

  // Any thread.
  const std::shared_ptr<Inbox>& inbox() const { return inbox_; }
  Timeline& timeline() { return timeline_; }
  StateStore& states() { return states_; }
  std::vector<int> ProcessSetRanks(int id) const;
  std::vector<int> ProcessSetIds() const;
  Status health() const;
  uint32_t num_joins() const override { return num_joins_; }
  bool HasOpenInSets() const override;
  Stats GetStats();
  std::vector<Wanted> GetWanted();
  void Inspect(Inquiry::Done done);
  void ResetStats();
  void GiveUp(uint64_t step, const Status& why);

  // The transport's thread.
  std::byte* Reserve(int peer, const MessageHeader& header) override {
    return receive_table_.Take(peer, header);
  }
  void Deliver(int peer, const MessageHeader& header, AlignedBuffer payload) override {
    inbox_->Post(MessageEvent{peer, header, std::move(payload)});
  }
  void PeerLost(int peer, const Status& why) override { inbox_->Post(PeerLostEvent{peer, why}); }

 private:
  class LaneWire;
  struct LaneSlot {
    std::unique_ptr<LaneWire> wire;
    std::unique_ptr<uint64_t> next_turn;
    std::unique_ptr<DeviceLane> device;  // when first needed
    std::unique_ptr<Lane> lane;
  };

  // All below: the worker's thread.
  void Run();
  void PumpLanes();
  // A request has failed because a peer left: the engine cannot be used any more.
  void NoteBroken(const Status& why);
  // The contribution of a rank to a gradient was not finite.
  void WarnOfSuspect(const RequestState& request);
  void DropRemoved();
  void Handle(Event& event);
  void HandleSubmit(const std::shared_ptr<RequestState>& request);
  void HandleMessage(MessageEvent& message);
  void HandleInLane(Lane& lane, MessageEvent& message);
  void KeepForLater(MessageEvent& message);  // until its process set exists
  // Device tensors.
  void SubmitFromDevice(Lane& lane, const std::shared_ptr<RequestState>& request);
  void TakeStaged();
  void SendHeld();
  void SayOnce(bool& said, const char* what, const std::string& why);
  void RunOnDevice(int lane, DeviceTask task);
  void HandleJoin(const std::shared_ptr<RequestState>& request);
  void CheckTimers(Clock::time_point now);
  std::optional<Clock::time_point> NextDeadline();
  std::vector<bool> Awaited() const;
  std::vector<int64_t> Progress() const;  // Transport::ProgressWith of each rank
  void MakeLane(int id, const std::vector<int>& ranks);
  Lane* FindLane(int id);
  void PeerSaidGoodbye(int peer);
  void SendControl(int peer, MessageKind kind, ByteSpan payload = {});
  // Aborts the engine; the first reason counts. `culprit` < 0: no particular rank.
  void Abort(int culprit, const std::string& why);
  void DoAbort();
  void BeginShutdown();
  void FailAll(const Status& status);  // fails all open requests, in whatever stage
  bool ShutdownDone(Clock::time_point now);
  Stats CollectStats();
  void CallOnWorker(std::function<void()> call);

  void Completed(const std::shared_ptr<RequestState>& request) override;
  void ProcessSetDecided(const RequestMeta& meta,
                         const std::shared_ptr<RequestState>& mine) override;
  void AllJoined(int last_rank) override;

  Snapshot Look() override;
  bool CanAsk(int rank) const override {
    return !aborted_ && !shutting_down_ && peers_.Alive(rank);
  }
  void SendTo(int rank, MessageKind kind, uint64_t number,
              std::span<const std::byte> payload) override;

  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  const std::unique_ptr<Transport> transport_;
  const std::string hostname_;
  const Options options_;
  const CpuLevel cpu_level_;
  Timeline timeline_;
  ReceiveTable receive_table_;

  mutable std::mutex shared_mutex_;
  std::map<int, std::vector<int>> process_sets_;  // guarded by shared_mutex_
  std::set<int> hidden_sets_;                     // guarded by shared_mutex_
  Status health_;                                 // guarded by shared_mutex_

  const std::string why_staged_;
  bool said_staged_ = false;
  const DeviceMethods device_methods_;  // before the states, which use its memory
  bool said_methods_ = false;
  Stager stager_;
  std::shared_ptr<RequestState> join_after_staging_;

  StateStore states_;  // before the lanes, whose exchanges use it
  std::map<int, LaneSlot> lanes_;
  // Messages of process sets that do not exist yet; at most one per peer and set.
  std::map<int, std::vector<MessageEvent>> unborn_;
  std::vector<int> removed_;  // process sets to be dropped when nobody uses their memory
  int next_process_set_ = 1;
  Peers peers_;
  Inquiry inquiry_;
  StallWatch stall_watch_;
  // The last request that this rank has submitted, and the last one that is done.
  std::string last_submitted_;
  OpKind last_kind_ = OpKind::kAllReduce;
  Clock::time_point last_submit_;
  Clock::time_point last_result_;
  std::set<std::pair<int, uint32_t>> warned_streams_;  // process set and stream; WarnOfSuspect
  Clock::time_point next_stall_check_;
  Clock::time_point next_peer_check_;
  std::shared_ptr<RequestState> join_;
  std::atomic<uint32_t> num_joins_{0};

  bool abort_wanted_ = false;
  bool aborted_ = false;
  int culprit_ = -1;
  std::string abort_reason_;
  bool abort_heard_ = false;  // a peer told us, so it has told the others, too

  bool shutting_down_ = false;
  Clock::time_point shutdown_deadline_;
  std::vector<int64_t> progress_at_shutdown_;  // or at the last check after that

  TransportCounters counters_at_reset_;
  int64_t payload_sent_ = 0;
  int64_t negotiations_at_reset_ = 0;
  int64_t predicted_at_reset_ = 0;

  std::thread thread_;
};

}  // namespace dad
