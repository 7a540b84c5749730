// Events and streams of a device, for the framework's side of a request with device tensors. No
// framework's CUDA headers are needed: streams and events are pointers, and the CUDA runtime is the
// one that the process has loaded. Without one the calls answer kUnavailable. Thread-safe.
#pragma once

#include <chrono>
#include <memory>

#include "dad/export.h"
#include "dad/status.h"

namespace dad {

// A cudaEvent_t, destroyed with the last reference.
using DeviceEvent = std::shared_ptr<void>;

// Records a new event on `stream` (a cudaStream_t; null is the default stream): the ready_event of
// tensors that the work on that stream so far has made.
DAD_EXPORT Result<DeviceEvent> RecordEvent(int device, void* stream);

// What is put on `stream` from now on starts after the event. The host does not wait.
DAD_EXPORT Status StreamWaits(int device, void* stream, const DeviceEvent& event);

// Whether the device has come to it.
DAD_EXPORT Result<bool> EventPassed(int device, const DeviceEvent& event);

// The calling thread waits; for those who want the result on the host, and for tests.
DAD_EXPORT Status WaitForEvent(int device, const DeviceEvent& event,
                               std::chrono::milliseconds timeout);

// Holds `what` until the event has passed. It is released by a thread that calls this or
// ReleasePassed later: a framework's own, which may take the framework's locks.
DAD_EXPORT void KeepUntil(int device, DeviceEvent event, std::shared_ptr<void> what);
DAD_EXPORT void ReleasePassed();

}  // namespace dad
