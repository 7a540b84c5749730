#include "exchange/method/low_rank/power_share.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "linalg/low_rank.h"
#include "util/byte_io.h"

namespace dad {

template <typename T>
Status ReadPowerShare(const TensorSpec& spec, int rank, ByteSpan share, int64_t count,
                      uint8_t& flags, std::vector<T>& values) {
  ByteReader in(share);
  flags = in.Value<uint8_t>();
  values.resize((flags & kLowRankNotFinite) != 0 ? 0 : static_cast<size_t>(count));
  const ByteSpan bytes = in.Take(values.size() * sizeof(T));
  if (!in.AtEnd()) return MalformedLowRank(spec, rank);
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return Status::Ok();
}

template <typename T>
void AddWeighted(std::span<const T> values, T weight, std::vector<T>& sum) {
  for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i] * weight;
}

template <typename T>
void OrthonormaliseRows(MatrixView<T> p) {
  for (int64_t k = 0; k < p.rows; ++k) {
    double before = 0;
    for (int64_t i = 0; i < p.cols; ++i) before += double{p.row(k)[i]} * p.row(k)[i];
    for (int turn = 0; turn < 2; ++turn) {
      for (int64_t other = 0; other < k; ++other) {
        double dot = 0;
        for (int64_t i = 0; i < p.cols; ++i) dot += double{p.row(k)[i]} * p.row(other)[i];
        for (int64_t i = 0; i < p.cols; ++i) {
          p.row(k)[i] = static_cast<T>(p.row(k)[i] - dot * p.row(other)[i]);
        }
      }
    }
    double norm = 0;
    for (int64_t i = 0; i < p.cols; ++i) norm += double{p.row(k)[i]} * p.row(k)[i];
    const double tiny = sizeof(T) == 8 ? 1e-24 : 1e-12;
    const double inverse = norm > tiny * before && norm > 0 ? 1.0 / std::sqrt(norm) : 0.0;
    for (int64_t i = 0; i < p.cols; ++i) p.row(k)[i] = static_cast<T>(p.row(k)[i] * inverse);
  }
}

template <typename T>
std::vector<T> NextPowerStart(MatrixView<const T> vt) {
  std::vector<T> start(vt.data, vt.data + vt.rows * vt.cols);
  for (int64_t k = 0; k < vt.rows; ++k) {
    const T* row = vt.row(k);
    if (std::any_of(row, row + vt.cols, [](T x) { return x != T(0); })) continue;
    RandomStart(kRefillSeed + static_cast<uint64_t>(k),
                ViewOf(start.data() + k * vt.cols, 1, vt.cols));
  }
  return start;
}

#define DAD_INSTANTIATE(T)                                                               \
  template Status ReadPowerShare<T>(const TensorSpec&, int, ByteSpan, int64_t, uint8_t&, \
                                    std::vector<T>&);                                    \
  template void AddWeighted<T>(std::span<const T>, T, std::vector<T>&);                  \
  template void OrthonormaliseRows<T>(MatrixView<T>);                                    \
  template std::vector<T> NextPowerStart<T>(MatrixView<const T>)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
