// Makes events; include/dad/device.h has what is done with them.
#pragma once

#include "dad/device.h"
#include "device/cuda_api.h"

namespace dad {

inline CudaEvent AsEvent(const DeviceEvent& event) { return static_cast<CudaEvent>(event.get()); }

// Records a new event on `stream`; `device` is current for the calling thread.
Result<DeviceEvent> RecordNewEvent(const CudaApi& cuda, CudaStream stream);

// A stream ahead of the framework's kernels, and not in step with the default stream.
Result<CudaStream> NewStream(const CudaApi& cuda);

}  // namespace dad
