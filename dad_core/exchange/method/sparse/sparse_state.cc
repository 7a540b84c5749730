#include "exchange/method/sparse/sparse_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "codec/strom.h"
#include "codec/vgc.h"
#include "exchange/by_method.h"

namespace dad {
namespace {

// Below this a share is as small as messages get, whatever dense would have.
constexpr int64_t kSmallShare = 64;

}  // namespace

int64_t MostSparseBytes(const SparseSettings& settings, DType dtype, int num_ranks) {
  const int64_t bytes = settings.count() * static_cast<int64_t>(SizeOf(dtype));
  return std::max(kSmallShare, 2 * bytes / num_ranks);
}

template <typename T>
void SparseScale<T>::Values(const SparseSettings& settings, T* values) const {
  if (settings.rule == SparseRule::kVgc) VgcValues(e_max, values);
  if (settings.has_tau()) StromValues(tau, !settings.absolute(), values);
}

template <typename T>
void SparseScale<T>::Write(const SparseSettings& settings, ByteWriter& out) const {
  if (settings.rule == SparseRule::kVgc) out.Value(static_cast<int16_t>(e_max));
  if (settings.has_tau()) out.Value(tau);
}

template <typename T>
bool SparseScale<T>::Read(const SparseSettings& settings, ByteReader& in) {
  if (settings.rule == SparseRule::kVgc) {
    e_max = in.Value<int16_t>();
    using Limits = std::numeric_limits<T>;
    return in.ok() && e_max < Limits::max_exponent &&
           e_max >= Limits::min_exponent - Limits::digits;
  }
  if (settings.has_tau()) {
    tau = in.Value<float>();
    return in.ok() && std::isfinite(tau) && tau >= 0;
  }
  return in.ok();
}

namespace {

// The elements of one chunk of top-k, whose values come after the indices.
template <typename T>
Result<int64_t> AddValues(const SparseSettings& settings, int64_t extent, ByteReader& in, T* sum) {
  std::vector<uint32_t> index;
  std::vector<uint8_t> code;
  DAD_RETURN_IF_ERROR(DecodeSparse(settings.coding, extent, 0, in, index, code));
  const auto bytes = in.Take(index.size() * sizeof(T));
  if (!in.ok()) return Status::InvalidArgument("values are missing");
  for (size_t k = 0; k < index.size(); ++k) {
    T value;
    std::memcpy(&value, bytes.data() + k * sizeof value, sizeof value);
    if (!std::isfinite(value)) return Status::InvalidArgument("a value is not finite");
    sum[index[k]] += value;
  }
  return static_cast<int64_t>(index.size());
}

template <typename T>
Result<int64_t> AddCodes(const SparseSettings& settings, int64_t extent, const T* values,
                         ByteReader& in, T* sum) {
  int64_t added = 0;
  SparseReader reader(settings.coding, extent, settings.value_bits(), in);
  while (reader.Next()) {
    const auto index = reader.index();
    const auto code = reader.code();
    for (size_t k = 0; k < index.size(); ++k) sum[index[k]] += values[code[k]];
    added += static_cast<int64_t>(index.size());
  }
  if (!reader.status().ok()) return reader.status();
  return added;
}

}  // namespace

template <typename T>
Result<int64_t> AddTensor(const SparseSettings& settings, int64_t count, ByteReader& in, T* sum) {
  SparseScale<T> scale;
  if (!scale.Read(settings, in)) return Status::InvalidArgument("a bad scale");
  T values[16] = {};
  scale.Values(settings, values);
  int64_t total = 0;
  const int64_t chunk = MaxSparseExtent(settings.value_bits());
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t extent = std::min(chunk, count - begin);
    const Result<int64_t> added = settings.rule == SparseRule::kTopK
                                      ? AddValues(settings, extent, in, sum + begin)
                                      : AddCodes(settings, extent, values, in, sum + begin);
    if (!added.ok()) return added.status();
    total += added.value();
  }
  return total;
}

template <typename T>
Result<std::vector<SparseWords<T>>> ReadTensor(const SparseSettings& settings, int64_t count,
                                               ByteReader& in) {
  SparseScale<T> scale;
  if (!scale.Read(settings, in)) return Status::InvalidArgument("a bad scale");
  const int bits = settings.value_bits();
  std::vector<SparseWords<T>> chunks;
  for (int64_t begin = 0; begin < count; begin += MaxSparseExtent(bits)) {
    SparseWords<T>& chunk = chunks.emplace_back();
    chunk.begin = begin;
    scale.Values(settings, chunk.values);
    SparseReader reader(settings.coding, std::min(MaxSparseExtent(bits), count - begin), bits, in);
    chunk.words.reserve(static_cast<size_t>(reader.count()));
    while (reader.Next()) {
      for (size_t k = 0; k < reader.index().size(); ++k) {
        chunk.words.push_back(reader.index()[k] | uint32_t{reader.code()[k]} << (32 - bits));
      }
    }
    if (!reader.status().ok()) return reader.status();
  }
  return chunks;
}

template <typename T>
void SparseState<T>::Export(std::vector<StateTensor>& out) {
  Save("residual", kept.r_bytes(), out);
  Save("variance", kept.v_bytes(), out);
  if (!settings_.has_tau() || settings_.absolute()) return;
  StateTensor tau{"tau", DType::kFloat64, {2}, {}};
  tau.bytes.resize(sizeof mean_rms);
  std::memcpy(tau.bytes.data(), mean_rms.data(), sizeof mean_rms);
  out.push_back(std::move(tau));
}

template <typename T>
Status SparseState<T>::Import(const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (tensor.name == "tau") {
      if (tensor.bytes.size() != sizeof mean_rms) return Status::InvalidArgument("a bad tau");
      std::memcpy(mean_rms.data(), tensor.bytes.data(), sizeof mean_rms);
      continue;
    }
    const size_t expected = static_cast<size_t>(settings_.count()) * sizeof(T);
    if (tensor.dtype != DTypeOf<T>() || tensor.bytes.size() != expected) {
      return Status::InvalidArgument("a saved " + tensor.name + " of " +
                                     std::to_string(tensor.bytes.size()) + " bytes, expected " +
                                     std::to_string(expected));
    }
    MakeRoom();
    AlignedBuffer& to = tensor.name == "variance" ? kept.v_bytes() : kept.r_bytes();
    if (to.size() == expected && expected > 0) {
      std::memcpy(to.data(), tensor.bytes.data(), expected);
    }
  }
  return Status::Ok();
}

template <typename T>
void SparseState<T>::ReturnLast() {
  if (last_share.empty() || kept.empty()) return;
  ByteReader in(last_share);
  in.Value<uint8_t>();  // flags
  (void)AddTensor(settings_, settings_.weight_count(), in, kept.r());
  if (settings_.layer.bias) {
    (void)AddTensor(settings_, settings_.layer.out, in, kept.r() + settings_.weight_count());
  }
  last_share.clear();
}

template <typename T>
void SparseState<T>::MakeRoom() {
  if (!kept.empty() || !settings_.keeps_residual()) return;
  kept = Accumulators<T>(settings_.count(), settings_.has_variance());
  kept.Clear();
}

template <typename T>
void SparseState<T>::Save(const char* name, const AlignedBuffer& values,
                          std::vector<StateTensor>& out) const {
  if (values.size() == 0) return;
  StateTensor tensor{name, DTypeOf<T>(), {settings_.count()}, {}};
  tensor.bytes.assign(values.data(), values.data() + values.size());
  out.push_back(std::move(tensor));
}

#define DAD_INSTANTIATE(T)                                                                   \
  template struct SparseScale<T>;                                                            \
  template Result<int64_t> AddTensor<T>(const SparseSettings&, int64_t, ByteReader&, T*);    \
  template Result<std::vector<SparseWords<T>>> ReadTensor<T>(const SparseSettings&, int64_t, \
                                                             ByteReader&);                   \
  template class SparseState<T>
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
