// Fuzz targets: functions of any bytes that must come back. Each file of this folder that is
// named after a target registers one; CONTRIBUTING.md says how they are run.
//
// A target is a pure function of its input, so that a file that made it fail does so again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dad/status.h"
#include "util/byte_io.h"
#include "util/gather_buffer.h"

namespace dad::fuzz {

using Bytes = std::vector<std::byte>;

struct Target {
  const char* name;
  // Ends the process by Require if something does not hold.
  void (*run)(ByteSpan input);
  // Inputs from real encoders, for the fuzzer to begin with.
  std::vector<Bytes> (*seeds)();
};

std::vector<Target>& Targets();

// Runs the target, and sees to what holds for all: no exception, and no single allocation of
// more than kAllocationBase bytes + kAllocationPerByte for each byte of the input.
inline constexpr size_t kAllocationBase = 1 << 20;
inline constexpr size_t kAllocationPerByte = 512;
void RunTarget(const Target& target, ByteSpan input);

// At namespace scope of a target's file.
struct Register {
  explicit Register(const Target& target) { Targets().push_back(target); }
};

// Says what is wrong and aborts.
void Require(bool holds, const char* what);
void Require(const Status& status, const char* what);

// The largest single allocation since the target was entered; without a sanitizer, of those by
// `new`.
size_t LargestAllocation();

// An input taken apart: choices come first, a byte each, then the bytes to decode. What is
// missing at the end counts as 0.
class Input {
 public:
  explicit Input(ByteSpan bytes) : rest_(bytes) {}

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(rest_[0]);
    rest_ = rest_.subspan(1);
    return byte;
  }
  size_t Below(size_t bound) { return Byte() % bound; }
  template <typename T, size_t n>
  const T& OneOf(const T (&values)[n]) {
    return values[Below(n)];
  }
  size_t Short() {
    const size_t low = Byte();
    return low | static_cast<size_t>(Byte()) << 8;
  }
  // Two bytes of length, and so many bytes or what is left, in memory of their own: a
  // sanitizer sees a read beyond them.
  Bytes Chunk();
  ByteSpan Rest() const { return rest_; }
  bool empty() const { return rest_.empty(); }

 private:
  ByteSpan rest_;
};

// Writes what Input reads.
class Seed {
 public:
  Seed& Byte(size_t value) {
    bytes_.push_back(static_cast<std::byte>(value));
    return *this;
  }
  Seed& Short(size_t value) { return Byte(value & 0xff).Byte(value >> 8); }
  Seed& Chunk(ByteSpan bytes) { return Short(bytes.size()).Rest(bytes); }
  Seed& Rest(ByteSpan bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Seed& Text(const std::string& text) { return Rest(std::as_bytes(std::span(text))); }
  const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

}  // namespace dad::fuzz
