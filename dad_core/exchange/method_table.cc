#include "exchange/method_table.h"

#include <deque>
#include <mutex>
#include <string>

#include "exchange/device/factor.h"
#include "exchange/device/int8.h"
#include "exchange/device/low_rank.h"
#include "exchange/device/qsgd.h"
#include "exchange/device/sparse.h"
#include "exchange/method/chunk_topk/chunk_topk.h"
#include "exchange/method/factor/factor.h"
#include "exchange/method/int8/int8.h"
#include "exchange/method/low_rank/low_rank.h"
#include "exchange/method/qsgd/qsgd.h"
#include "exchange/method/sparse/sparse.h"

namespace dad {
namespace {

constexpr MethodRow kRows[] = {
    {.name = "factor",
     .make = MakeFactorExchange,
     .share_bytes = FactorShareBytes,
     .device = {.make = MakeDeviceFactorExchange, .can_make = FactorOnDevice, .on_all_ranks = true},
     .exchanges_rows = true},
    {.name = "low_rank",
     .make = MakeLowRankExchange,
     .share_bytes = LowRankShareBytes,
     .device = {.make = MakeDeviceLowRankExchange,
                .can_make = LowRankOnDevice,
                .on_all_ranks = true}},
    {.name = "int8",
     .make = MakeInt8Exchange,
     .share_bytes = Int8ShareBytes,
     .device = {.make = MakeDeviceInt8Exchange}},
    {.name = "sparse",
     .make = MakeSparseExchange,
     .share_bytes = SparseShareBytes,
     .dense_per_batch = 1,
     .device = {.make = MakeDeviceSparseExchange,
                .can_make = SparseOnDevice,
                .takes = SparseTakesFromDevice},
     .squares = SparseSquares},
    {.name = "qsgd",
     .make = MakeQsgdExchange,
     .share_bytes = QsgdShareBytes,
     .device = {.make = MakeDeviceQsgdExchange}},
    {.name = "chunk_topk",
     .make = MakeChunkTopKExchange,
     .share_bytes = ChunkTopKShareBytes,
     .dense_per_batch = 1},
    {.name = "chunk_topk_rows",
     .make = MakeChunkTopKExchange,
     .share_bytes = ChunkTopKShareBytes,
     .dense_per_batch = 1},
};

// What RegisterMethod has added, the newest first. A row stays where it is: others point to it.
struct Registered {
  std::mutex mutex;
  std::deque<MethodRow> rows;
};
Registered& TheRegistered() {
  static auto* const registered = new Registered;
  return *registered;
}

std::string KnownNames() {
  std::string names;
  for (const MethodRow& row : kRows) names += std::string(row.name) + ", ";
  Registered& registered = TheRegistered();
  const std::lock_guard lock(registered.mutex);
  for (const MethodRow& row : registered.rows) names += std::string(row.name) + ", ";
  return names.substr(0, names.size() - 2);
}

}  // namespace

const MethodRow* FindMethod(const Method& method) {
  Registered& registered = TheRegistered();
  const std::lock_guard lock(registered.mutex);
  for (const MethodRow& row : registered.rows) {
    if (row.name == method.name()) return &row;
  }
  for (const MethodRow& row : kRows) {
    if (row.name == method.name()) return &row;
  }
  return nullptr;
}

Result<const MethodRow*> RowOf(const Method& method) {
  DAD_RETURN_IF_ERROR(method.status());
  if (const MethodRow* row = FindMethod(method)) return row;
  return Status::InvalidArgument("unknown method \"" + method.text() + "\"; there are " +
                                 KnownNames());
}

void RegisterMethod(const MethodRow& row) {
  Registered& registered = TheRegistered();
  const std::lock_guard lock(registered.mutex);
  registered.rows.push_front(row);
}

bool ExchangesRows(const Method& method) {
  const MethodRow* const row = FindMethod(method);
  return row != nullptr && row->exchanges_rows;
}

}  // namespace dad
