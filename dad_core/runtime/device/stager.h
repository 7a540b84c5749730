// Device tensors by way of the host: for methods, whose exchanges compute on the CPU, and for
// everything if there is no NCCL. A request's tensors are copied to page-locked memory before its
// lane sees it, and its results are copied back when it is done; in between it is like any other
// request. The host never waits: it polls until the copies are done.
//
// Order on the device: copies out start after the ready_event of each view, the ticket's
// done_event comes after the copies back. Worker only.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "dad/device.h"
#include "dad/status.h"
#include "device/pinned_pool.h"
#include "runtime/request_state.h"

namespace dad {

class Stager {
 public:
  Stager() = default;
  ~Stager();
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  // Starts the copies to the host. On error the request is as it was.
  Status Bring(const std::shared_ptr<RequestState>& request);

  // Requests whose tensors are on the host now, in the order of Bring. A request that could not be
  // copied has its first_error set.
  std::vector<std::shared_ptr<RequestState>> Arrived();
  bool busy() const { return !under_way_.empty(); }

  // Starts the copies of a request's results to the device and sets its done_event.
  Status Return(RequestState& request);

  // Gives up copies that have not arrived; returns their requests.
  std::vector<std::shared_ptr<RequestState>> TakeAll();

 private:
  struct Streams {
    CudaStream to_host = nullptr;
    CudaStream to_device = nullptr;
  };
  struct UnderWay {
    std::shared_ptr<RequestState> request;
    DeviceEvent event;
  };

  // Page-locked memory that a copy uses.
  struct Kept {
    int device;
    DeviceEvent event;
    std::shared_ptr<std::byte> block;
  };

  Status Load();
  void Keep(int device, const DeviceEvent& event, std::shared_ptr<std::byte> block);
  Result<Streams> StreamsOf(int device);

  const CudaApi* cuda_ = nullptr;  // set when first needed
  std::unique_ptr<PinnedPool> pool_;
  std::map<int, Streams> streams_;
  std::deque<UnderWay> under_way_;
  std::deque<Kept> kept_;
};

}  // namespace dad
