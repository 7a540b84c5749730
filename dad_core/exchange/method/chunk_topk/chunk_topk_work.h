// Picking and encoding for chunked top-k: the pass over the values that a rank, or an owner, has
// of a tensor.
//
// A rank whose gradient is that of an embedding has values of some rows only. They are stored
// contiguously, and Places gives their positions in the tensor. If n of the m elements of a chunk
// are present, ⌈k n / m⌉ are picked, so that work and bytes follow the rows that were looked up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "codec/chunk_pick.h"
#include "codec/chunk_topk.h"
#include "util/parallel.h"

namespace dad {

// Where values are in a tensor.
class Places {
 public:
  // All of it, in order.
  explicit Places(int64_t count) : count_(count), columns_(std::max<int64_t>(count, 1)) {}
  // Some of its rows, rising.
  Places(int64_t count, int64_t columns, std::vector<int64_t> rows)
      : count_(count), columns_(columns), rows_(std::move(rows)), by_rows_(true) {}

  bool by_rows() const { return by_rows_; }
  const std::vector<int64_t>& rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t size() const { return by_rows_ ? static_cast<int64_t>(rows_.size()) * columns_ : count_; }
  // The element of the tensor that value i is.
  int64_t Element(int64_t i) const {
    return by_rows_ ? rows_[static_cast<size_t>(i / columns_)] * columns_ + i % columns_ : i;
  }
  // The first value that is this element or comes after it.
  int64_t From(int64_t element) const {
    if (!by_rows_) return element;
    const int64_t row = element / columns_;
    const auto found = std::lower_bound(rows_.begin(), rows_.end(), row);
    const int64_t before = (found - rows_.begin()) * columns_;
    return found != rows_.end() && *found == row ? before + element % columns_ : before;
  }

 private:
  int64_t count_;
  int64_t columns_;
  std::vector<int64_t> rows_;
  bool by_rows_ = false;
};

// Values of one chunk.
struct ChunkPart {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t k = 0;
};

template <typename T>
class ChunkWork {
 public:
  // `quota`: at most how many are picked of a chunk; null: k.
  ChunkWork(const ChunkCode& code, const Places& places,
            const std::vector<uint32_t>* quota = nullptr)
      : code_(code), places_(places), quota_(quota) {}

  // Elements [begin, end) of the tensor, whole chunks, go into one share.
  void AddShare(int64_t begin, int64_t end) {
    shares_.push_back(runs_.size());
    for (int64_t at = begin; at < end; at += code_.run()) {
      runs_.push_back(tasks_.size());
      run_begins_.push_back(at);
      AddTasks(at, std::min(end, at + code_.run()));
    }
  }

  // Calls pick(picker, part, first, picked) for each part, on up to `threads` threads; false if one
  // of them returned false. `first` is to be added to an index within the part.
  template <typename Pick>
  bool PickAll(int threads, CpuLevel level, const Pick& pick) {
    ParallelFor(static_cast<int64_t>(tasks_.size()), threads, [&](int64_t t) {
      Task& task = tasks_[static_cast<size_t>(t)];
      ChunkPicker<T> picker(level);
      for (const ChunkPart& part : task.parts) {
        const auto first = static_cast<uint32_t>(part.begin - task.parts[0].begin);
        task.good = task.good && pick(picker, part, first, task.picked);
      }
    });
    return std::all_of(tasks_.begin(), tasks_.end(), [](const Task& task) { return task.good; });
  }

  // Appends share number `number`. What it sends is subtracted from the values.
  void Encode(size_t number, T* values, std::vector<std::byte>& out) const {
    const size_t end = number + 1 < shares_.size() ? shares_[number + 1] : runs_.size();
    for (size_t run = shares_[number]; run < end; ++run) EncodeRun(run, values, out);
  }

 private:
  struct Task {
    std::vector<ChunkPart> parts = {};
    bool good = true;
    std::vector<uint32_t> picked = {};  // from the first value of the first part
  };
  // Values that one task works on, or those of one chunk.
  static constexpr int64_t kTaskCount = 1 << 16;

  void AddTasks(int64_t begin, int64_t end) {
    int64_t room = 0;
    const int64_t last = places_.From(end);
    for (int64_t i = places_.From(begin); i < last;) {
      const int64_t chunk = places_.Element(i) / code_.chunk;
      const int64_t chunk_end = std::min(end, (chunk + 1) * code_.chunk);
      const int64_t elements = chunk_end - chunk * code_.chunk;
      const int64_t next = places_.From(chunk_end);
      const int64_t most =
          quota_ == nullptr ? code_.k : int64_t{(*quota_)[static_cast<size_t>(chunk)]};
      if (next - i > room) {
        tasks_.emplace_back();
        room = std::max(kTaskCount, next - i);
      }
      room -= next - i;
      tasks_.back().parts.push_back({i, next - i, (most * (next - i) + elements - 1) / elements});
      i = next;
    }
  }

  void EncodeRun(size_t run, T* values, std::vector<std::byte>& out) const {
    const size_t end = run + 1 < runs_.size() ? runs_[run + 1] : tasks_.size();
    std::vector<int64_t> at;
    std::vector<uint32_t> index;
    for (size_t t = runs_[run]; t < end; ++t) {
      const int64_t first = tasks_[t].parts[0].begin;
      for (const uint32_t i : tasks_[t].picked) {
        at.push_back(first + i);
        index.push_back(static_cast<uint32_t>(places_.Element(first + i) - run_begins_[run]));
      }
    }
    std::vector<T> picked(at.size());
    for (size_t i = 0; i < at.size(); ++i) picked[i] = values[at[i]];
    EncodeChunkRun<T>(code_, index, picked, out);
    for (size_t i = 0; i < at.size(); ++i) values[at[i]] = picked[i];
  }

  const ChunkCode& code_;
  const Places& places_;
  const std::vector<uint32_t>* const quota_;
  std::vector<size_t> shares_;  // the first run of each
  std::vector<size_t> runs_;    // the first task of each
  std::vector<int64_t> run_begins_;
  std::vector<Task> tasks_;
};

}  // namespace dad
