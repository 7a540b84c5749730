// SHA-256 of OpenSSL, HMAC-SHA256 (RFC 2104) on top of it, random bytes, and a comparison that
// takes as long for unequal bytes as for equal ones. OpenSSL's own HMAC would link 4 MB of
// libcrypto for fifteen lines; SHA-256 alone is 16 KB, linked statically and hidden. The tests have
// the vectors of NIST and of RFC 4231, and Python's hmac checks what ranks sign for the store, in
// every job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "dad/export.h"

namespace dad {

inline constexpr size_t kSha256Bytes = 32;

// The digest as bytes, not as text.
DAD_EXPORT std::string Sha256(std::string_view data);
DAD_EXPORT std::string HmacSha256(std::string_view key, std::string_view data);

DAD_EXPORT bool SameBytes(std::string_view a, std::string_view b);

// From the kernel. Ends the process if the kernel has none: nothing that follows would be safe.
DAD_EXPORT std::string RandomBytes(size_t count);

// Lower case.
DAD_EXPORT std::string HexOf(std::string_view bytes);

}  // namespace dad
