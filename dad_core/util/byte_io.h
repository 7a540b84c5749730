// Writing and reading plain values in a control message. A reader never reads
// past its input: after the first short read everything is zero and ok() is false.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace dad {

class ByteWriter {
 public:
  template <typename T>
  void Value(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof value);
  }
  // Small numbers take one byte.
  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) Value(static_cast<uint8_t>(value | 0x80));
    Value(static_cast<uint8_t>(value));
  }
  void Bytes(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void Text(const std::string& text) {
    Varint(text.size());
    const auto* from = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), from, from + text.size());
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <typename T>
  T Value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (rest_.size() < sizeof value) {
      Fail();
      return value;
    }
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return value;
  }
  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = Value<uint8_t>();
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return value;
    }
    Fail();
    return 0;
  }
  // A count of things of which each takes at least one byte: never more than the
  // input can hold, so that a bad message cannot make us allocate.
  size_t Count() {
    const uint64_t count = Varint();
    if (count > rest_.size()) {
      Fail();
      return 0;
    }
    return static_cast<size_t>(count);
  }
  std::string Text() {
    const size_t length = Count();
    std::string text(reinterpret_cast<const char*>(rest_.data()), length);
    rest_ = rest_.subspan(length);
    return text;
  }

  // A view of the next bytes; empty and not ok() when there are fewer.
  std::span<const std::byte> Take(uint64_t num_bytes) {
    if (num_bytes > rest_.size()) {
      Fail();
      return {};
    }
    const auto taken = rest_.first(static_cast<size_t>(num_bytes));
    rest_ = rest_.subspan(static_cast<size_t>(num_bytes));
    return taken;
  }

  bool ok() const { return ok_; }
  size_t left() const { return rest_.size(); }
  bool AtEnd() const { return ok_ && rest_.empty(); }

 private:
  void Fail() {
    ok_ = false;
    rest_ = {};
  }
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace dad
