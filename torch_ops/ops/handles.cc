#include "torch_ops/ops/handles.h"

#include <mutex>
#include <string>
#include <unordered_map>

namespace dad_torch {

using dad::Result;
using dad::Status;

namespace {

struct Table {
  std::mutex mutex;
  int64_t next = 0;
  std::unordered_map<int64_t, TakenHandle> handles;
};

// Never destroyed: at exit the tensors in it would need an interpreter that is gone.
Table& TheTable() {
  static auto* table = new Table;
  return *table;
}

Status Unknown(int64_t handle) {
  return Status::InvalidArgument("handle " + std::to_string(handle) +
                                 " was never given out or has been synchronized already");
}

}  // namespace

int64_t KeepHandle(std::unique_ptr<Pending> pending, bool grouped) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  const int64_t handle = table.next++;
  table.handles.emplace(handle, TakenHandle{std::move(pending), grouped});
  return handle;
}

Result<bool> PollHandle(int64_t handle) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  auto found = table.handles.find(handle);
  if (found == table.handles.end()) return Unknown(handle);
  return found->second.pending->Done();
}

Result<TakenHandle> TakeHandle(int64_t handle) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  auto found = table.handles.find(handle);
  if (found == table.handles.end()) return Unknown(handle);
  TakenHandle taken = std::move(found->second);
  table.handles.erase(found);
  return taken;
}

void GiveBackHandle(int64_t handle, TakenHandle taken) {
  Table& table = TheTable();
  std::lock_guard lock(table.mutex);
  table.handles.emplace(handle, std::move(taken));
}

}  // namespace dad_torch
