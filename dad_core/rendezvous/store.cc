#include "rendezvous/store.h"

#include <string_view>

#include "rendezvous/file_store.h"
#include "rendezvous/http_store.h"

namespace dad {
namespace {

// Splits "HOST:PORT"; an IPv6 host is in brackets.
Result<HttpAddress> ParseAddress(std::string_view text) {
  const auto bad = [&] {
    return Status::InvalidArgument("rendezvous: '" + std::string(text) + "' is not HOST:PORT");
  };
  if (!text.empty() && text.back() == '/') text.remove_suffix(1);
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0 || colon + 1 == text.size()) return bad();
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (port.find_first_not_of("0123456789") != std::string_view::npos) return bad();
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return HttpAddress{std::string(host), std::string(port)};
}

}  // namespace

std::string PercentEncode(const std::string& text) {
  constexpr char kHex[] = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_';
    if (plain) {
      encoded += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    encoded += '%';
    encoded += kHex[byte >> 4];
    encoded += kHex[byte & 15];
  }
  return encoded;
}

Result<std::unique_ptr<Store>> OpenStore(const std::string& url, const std::string& scope,
                                         const std::string& key) {
  constexpr std::string_view kHttp = "http://";
  constexpr std::string_view kFile = "file://";
  if (scope.empty()) return Status::InvalidArgument("rendezvous: empty scope");
  if (url.starts_with(kHttp)) {
    Result<HttpAddress> address = ParseAddress(std::string_view(url).substr(kHttp.size()));
    if (!address.ok()) return address.status();
    return std::unique_ptr<Store>(new HttpStore(std::move(address).value(), scope, key));
  }
  if (url.starts_with(kFile)) return FileStore::Open(url.substr(kFile.size()), scope);
  return Status::InvalidArgument("rendezvous: '" + url +
                                 "' is neither http://HOST:PORT nor file:///DIRECTORY");
}

}  // namespace dad
