// Finds what is wrong with a request before anything is sent.
#pragma once

#include <span>

#include "dad/request.h"
#include "dad/status.h"

namespace dad {

// `ranks`: members of the request's process set; `world_size`: of the whole job.
Status Validate(const Request& request, int my_rank, std::span<const int> ranks, int world_size);

}  // namespace dad
