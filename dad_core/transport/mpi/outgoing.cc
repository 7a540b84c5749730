#include "transport/mpi/outgoing.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace dad::mpi_transport {
namespace {

constexpr size_t kCopyBelow = 64 * 1024;
constexpr size_t kLongestPart = size_t{1} << 30;

}  // namespace

Outgoing::Outgoing(GatherBuffer payload, std::shared_ptr<void> keep)
    : payload_(std::move(payload)), keep_(std::move(keep)) {
  const std::vector<ByteSpan> pieces = payload_.Pieces();
  const auto is_large = [](ByteSpan piece) { return piece.size() >= kCopyBelow; };
  for (auto piece = pieces.begin(); piece != pieces.end();) {
    if (is_large(*piece)) {
      AddPart(*piece++);
      continue;
    }
    const auto end = std::find_if(piece, pieces.end(), is_large);
    AddCopyOf({piece, end});
    piece = end;
  }
}

void Outgoing::AddPart(ByteSpan bytes) {
  for (size_t at = 0; at < bytes.size(); at += kLongestPart) {
    parts_.push_back(bytes.subspan(at, std::min(kLongestPart, bytes.size() - at)));
  }
}

void Outgoing::AddCopyOf(std::span<const ByteSpan> pieces) {
  if (pieces.size() == 1) return AddPart(pieces.front());
  size_t total = 0;
  for (const ByteSpan piece : pieces) total += piece.size();
  AlignedBuffer& copy = copies_.emplace_back(total);
  std::byte* at = copy.data();
  for (const ByteSpan piece : pieces) at = std::copy(piece.begin(), piece.end(), at);
  AddPart(copy.span());
}

}  // namespace dad::mpi_transport
