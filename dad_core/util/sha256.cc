#include "util/sha256.h"

// The functions of SHA-256 itself: those that replace them would bring all of libcrypto along.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

namespace dad {
namespace {

constexpr size_t kBlockBytes = SHA256_CBLOCK;

class Hasher {
 public:
  Hasher() { SHA256_Init(&state_); }
  void Add(std::string_view data) { SHA256_Update(&state_, data.data(), data.size()); }

  std::string Finish() {
    std::string digest(kSha256Bytes, '\0');
    SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), &state_);
    return digest;
  }

 private:
  SHA256_CTX state_;
};

}  // namespace

std::string Sha256(std::string_view data) {
  Hasher hasher;
  hasher.Add(data);
  return hasher.Finish();
}

std::string HmacSha256(std::string_view key, std::string_view data) {
  std::string padded = key.size() > kBlockBytes ? Sha256(key) : std::string(key);
  padded.resize(kBlockBytes, '\0');
  const auto with = [&padded](unsigned char pad) {
    std::string block = padded;
    for (char& byte : block) byte = static_cast<char>(static_cast<unsigned char>(byte) ^ pad);
    return block;
  };
  Hasher inner;
  inner.Add(with(0x36));
  inner.Add(data);
  Hasher outer;
  outer.Add(with(0x5c));
  outer.Add(inner.Finish());
  return outer.Finish();
}

bool SameBytes(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t at = 0; at < count;) {
    const ssize_t got = getrandom(bytes.data() + at, count - at, 0);
    if (got > 0) at += static_cast<size_t>(got);
    if (got < 0 && errno != EINTR) std::abort();
  }
  return bytes;
}

std::string HexOf(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace dad
