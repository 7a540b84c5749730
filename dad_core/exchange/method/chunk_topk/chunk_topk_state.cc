#include "exchange/method/chunk_topk/chunk_topk_state.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "exchange/by_method.h"

namespace dad {
namespace {

template <typename T>
void Save(const char* name, const Accumulators<T>& values, std::vector<StateTensor>& out) {
  if (values.empty()) return;
  const AlignedBuffer& from = values.r_bytes();
  StateTensor tensor{name, DTypeOf<T>(), {static_cast<int64_t>(from.size() / sizeof(T))}, {}};
  tensor.bytes.assign(from.data(), from.data() + from.size());
  out.push_back(std::move(tensor));
}

template <typename T>
Status Load(const StateTensor& tensor, Accumulators<T>& values) {
  const auto count = static_cast<size_t>(NumElements(tensor.shape));
  if (tensor.dtype != DTypeOf<T>() || tensor.bytes.size() != count * sizeof(T)) {
    return Status::InvalidArgument("a saved " + tensor.name + " has another type");
  }
  values = Accumulators<T>(static_cast<int64_t>(count), false);
  if (count > 0) std::memcpy(values.r(), tensor.bytes.data(), tensor.bytes.size());
  return Status::Ok();
}

}  // namespace

Result<ChunkTopKSettings> ParseChunkTopK(const Method& method) {
  const auto wrong = [](const std::string& what) { return Status::InvalidArgument(what); };
  ChunkTopKSettings settings;
  const auto chunk = method.Integer("chunk", settings.code.chunk);
  const auto k = method.Integer("k", settings.code.k);
  const auto bits = method.Integer("bits", settings.code.bits);
  const auto decay = method.Real("decay", settings.decay);
  const auto first = method.Integer("first", 0);
  DAD_RETURN_IF_ERROR(chunk.status());
  DAD_RETURN_IF_ERROR(k.status());
  DAD_RETURN_IF_ERROR(bits.status());
  DAD_RETURN_IF_ERROR(decay.status());
  DAD_RETURN_IF_ERROR(first.status());
  if (chunk.value() < 1 || chunk.value() > ChunkCode::kMostChunk) {
    return wrong("chunk must be 1 to " + std::to_string(ChunkCode::kMostChunk));
  }
  if (k.value() < 1 || k.value() > chunk.value()) return wrong("k must be 1 to chunk");
  if (bits.value() < 1 || bits.value() > ChunkCode::kMostBits) return wrong("bits must be 1 to 8");
  if (!(decay.value() >= 0 && decay.value() <= 1)) return wrong("decay must be 0 to 1");
  settings.code = {chunk.value(), k.value(), static_cast<int>(bits.value())};
  if (first.value() < 0 || first.value() > std::numeric_limits<int>::max()) {
    return wrong("first must be a rank");
  }
  settings.decay = decay.value();
  settings.first = static_cast<int>(first.value());
  const std::string combine = method.Text("combine", "owner");
  if (combine != "owner" && combine != "gather") {
    return wrong("combine=" + combine + " is neither owner nor gather");
  }
  settings.by_owner = combine == "owner";
  settings.by_layer = method.name() == "chunk_topk_rows";
  if (settings.by_layer && (method.layers().size() != 1 || method.layers()[0].bias)) {
    return wrong("expected one layer without a bias");
  }
  return settings;
}

template <typename T>
int64_t ChunkTopKState<T>::CountOf(const Accumulators<T>& values) {
  return static_cast<int64_t>(values.r_bytes().size() / sizeof(T));
}

template <typename T>
void ChunkTopKState<T>::Export(std::vector<StateTensor>& out) {
  Save("rank_residual", rank, out);
  if (owner.empty()) return;
  Save("owner_residual", owner, out);
  StateTensor begin{"owner_begin", DType::kInt64, {1}, std::vector<std::byte>(sizeof owner_begin_)};
  std::memcpy(begin.bytes.data(), &owner_begin_, sizeof owner_begin_);
  out.push_back(std::move(begin));
}

template <typename T>
Status ChunkTopKState<T>::Import(const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (tensor.name == "owner_begin") {
      if (tensor.bytes.size() != sizeof owner_begin_) {
        return Status::InvalidArgument("a bad owner_begin");
      }
      std::memcpy(&owner_begin_, tensor.bytes.data(), sizeof owner_begin_);
    } else {
      DAD_RETURN_IF_ERROR(Load(tensor, tensor.name == "rank_residual" ? rank : owner));
    }
  }
  return Status::Ok();
}

template <typename T>
void ChunkTopKState<T>::ReturnLast() {
  Accumulators<T>& to = last_is_of_owner ? owner : rank;
  if (last.empty() || to.empty()) return;
  ByteReader in(last);
  (void)AddChunks(code_, CountOf(to), in, to.r());
  last.clear();
}

template <typename T>
Status ChunkTopKState<T>::Fit(int64_t count, int64_t piece_begin, int64_t piece_count) {
  const auto make = [](Accumulators<T>& values, int64_t expected) {
    if (!values.empty() || expected == 0) return;
    values = Accumulators<T>(expected, false);
    values.Clear();
  };
  make(rank, count);
  if (owner.empty()) owner_begin_ = piece_begin;
  make(owner, piece_count);
  const bool same_place = piece_count == 0 || owner_begin_ == piece_begin;
  if (CountOf(rank) == count && CountOf(owner) == piece_count && same_place) return Status::Ok();
  return Status::InvalidArgument(
      "a saved residual of " + std::to_string(CountOf(rank)) + " elements, and as owner of " +
      std::to_string(CountOf(owner)) + " from " + std::to_string(owner_begin_) +
      " on, does not fit: expected " + std::to_string(count) + " and " +
      std::to_string(piece_count) + " from " + std::to_string(piece_begin) + " on");
}

template class ChunkTopKState<float>;
template class ChunkTopKState<double>;

}  // namespace dad
