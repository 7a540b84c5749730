// The tracked parameters and what was kept for them: the part of capture.h that knows no autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_ops/capture/capture.h"
#include "torch_ops/device/device_stream.h"

namespace dad_torch {

// A segment, the versions of a, d and x when it was kept, and, of tensors on a device, where they
// were made: autograd runs an op's backward on the stream of its forward, while whoever takes the
// segments may be on another one, and no gradient goes there for which autograd would order them.
struct KeptSegment {
  Segment segment;
  std::array<int64_t, 3> versions;
  std::optional<MadeOn> made;
};

// A tracked parameter. Autograd nodes hold it; after UntrackParameter its mode is kOff for good.
// Members without a comment are guarded by the registry's lock.
struct Entry {
  Entry(int the_id, const at::Tensor& the_param);

  const int id;                                          // const
  const c10::weak_intrusive_ptr<c10::TensorImpl> param;  // const
  std::atomic<CaptureMode> mode{CaptureMode::kOff};      // read without the lock

  int owner = 0;
  std::vector<KeptSegment> segments;
  std::weak_ptr<Entry> bias;    // rides in this one's segments
  std::weak_ptr<Entry> weight;  // in whose segments this one rides
  bool alone = false;           // has segments of its own, and so rides with none
  bool captured = false;        // in this step
  std::string declined;         // the first reason in this step
  uint64_t earliest_op = std::numeric_limits<uint64_t>::max();
  int64_t samples = -1;  // of the earliest op
};
using EntryPtr = std::shared_ptr<Entry>;

// Whether no parameter is to be captured: one load.
bool CaptureIdle();

// The entry of a tensor that is itself tracked; null if it is not.
EntryPtr FindEntry(const c10::TensorImpl* param);
// By id, also when it is not tracked any more; null if the parameter is gone.
EntryPtr FindEntry(int id);

// A rising number for an op that runs forward now.
uint64_t NextOpNumber();

struct Place {
  uint64_t serial;
  int64_t index;
};
// Keeps `segment`, which the op with this number made.
Place Keep(Entry& entry, Segment segment, uint64_t op_number);

struct Batch {
  uint64_t number = 0;
  int64_t samples = -1;  // -1: no op has told
};
// The batch that goes forward in this thread. The first op that has a leading dimension (not -1)
// after a backward pass begins one, and says how many samples it has; ops that are computed again
// in a backward pass do not.
Batch CurrentBatch(int64_t leading, bool in_backward);

// Notes why a use of the parameter is not captured.
void Decline(Entry& entry, const char* reason);

// Whether the bias rides with the weight, pairing the two if neither is paired yet. Notes why not.
bool Pair(const EntryPtr& weight, const EntryPtr& bias);
// Whether the parameter may have segments of its own; it rides with no weight from then on. Notes
// why not.
bool StandAlone(Entry& entry);

}  // namespace dad_torch
