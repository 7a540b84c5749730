#include "codec/chunk_topk.h"

#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "util/half.h"

namespace dad {
namespace {

// bfloat16 numbers in the order of their bits. The largest scale times the largest level is finite
// in float, with room for a sum over ranks.
constexpr uint16_t kMostScale = (127 + 100) << 7;  // 2^100
constexpr uint16_t kLeastLevel = (127 - 10) << 7;  // 2^-10
constexpr uint16_t kMostLevel = (127 + 24) << 7;   // 2^24: of one among the largest chunk's

uint16_t AsScale(double mean) {
  const auto most = static_cast<double>(BFloat16ToFloat(kMostScale));
  return FloatToBFloat16(static_cast<float>(std::min(mean, most)));
}

uint16_t AsLevel(double ratio) {
  const auto least = static_cast<double>(BFloat16ToFloat(kLeastLevel));
  const auto most = static_cast<double>(BFloat16ToFloat(kMostLevel));
  return FloatToBFloat16(static_cast<float>(std::clamp(ratio, least, most)));
}

// Ratios |x| / scale, weighted with scale², in bins an eighth of an octave wide or less.
class RatioHistogram {
 public:
  void Add(double ratio, double weight) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(ratio));
    const int bin = std::clamp(static_cast<int>(bits >> kShift) - kFirst, 0, kBins - 1);
    weight_[static_cast<size_t>(bin)] += weight;
    moment_[static_cast<size_t>(bin)] += weight * ratio;
    low_ = std::min(low_, bin);
    high_ = std::max(high_, bin);
  }

  // The levels with which Σ weight (ratio - level)² is least, or near it: Lloyd's iteration, from
  // levels that have equal parts of the weight.
  std::vector<uint16_t> Levels(int64_t count) const {
    std::vector<double> levels = EqualParts(count);
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<double> before = levels;
      Improve(levels);
      if (levels == before) break;
    }
    std::vector<uint16_t> rounded;
    for (const double level : levels) rounded.push_back(AsLevel(level));
    return rounded;
  }

 private:
  static constexpr int kShift = 19;               // 4 bits of the mantissa
  static constexpr int kFirst = (127 - 10) << 4;  // 2^-10
  static constexpr int kBins = 35 << 4;           // to 2^25
  static constexpr int kRounds = 20;

  double Mean(int bin) const {
    return moment_[static_cast<size_t>(bin)] / weight_[static_cast<size_t>(bin)];
  }

  std::vector<double> EqualParts(int64_t count) const {
    double total = 0;
    for (int bin = low_; bin <= high_; ++bin) total += weight_[static_cast<size_t>(bin)];
    std::vector<double> levels;
    double passed = 0;
    for (int bin = low_; bin <= high_; ++bin) {
      if (weight_[static_cast<size_t>(bin)] == 0) continue;
      passed += weight_[static_cast<size_t>(bin)];
      while (static_cast<int64_t>(levels.size()) < count &&
             passed * static_cast<double>(count) >=
                 total * (static_cast<double>(levels.size()) + 0.5)) {
        levels.push_back(Mean(bin));
      }
    }
    if (levels.empty()) levels.push_back(1);
    while (static_cast<int64_t>(levels.size()) < count) levels.push_back(levels.back());
    return levels;
  }

  // Each level becomes the mean of what is nearest to it.
  void Improve(std::vector<double>& levels) const {
    int bin = low_;
    for (size_t l = 0; l < levels.size(); ++l) {
      const bool last = l + 1 == levels.size();
      const double end = last ? 0 : (levels[l] + levels[l + 1]) / 2;
      double weight = 0, moment = 0;
      for (; bin <= high_; ++bin) {
        if (weight_[static_cast<size_t>(bin)] == 0) continue;
        if (!last && Mean(bin) >= end) break;
        weight += weight_[static_cast<size_t>(bin)];
        moment += moment_[static_cast<size_t>(bin)];
      }
      if (weight > 0) levels[l] = moment / weight;
    }
  }

  std::array<double, kBins> weight_{};
  std::array<double, kBins> moment_{};
  int low_ = kBins - 1;
  int high_ = 0;
};

// The number of the nearest level; of two that are equally near, the larger.
class NearestLevel {
 public:
  explicit NearestLevel(const std::vector<uint16_t>& levels) {
    for (size_t l = 0; l + 1 < levels.size(); ++l) {
      bounds_.push_back((static_cast<double>(BFloat16ToFloat(levels[l])) +
                         static_cast<double>(BFloat16ToFloat(levels[l + 1]))) /
                        2);
    }
  }
  uint8_t operator()(double ratio) const {
    if (bounds_.size() == 1) return ratio >= bounds_[0] ? 1 : 0;
    const auto at = std::upper_bound(bounds_.begin(), bounds_.end(), ratio);
    return static_cast<uint8_t>(at - bounds_.begin());
  }

 private:
  std::vector<double> bounds_;
};

// Elements that share a chunk.
struct Stretch {
  size_t begin = 0;
  size_t end = 0;
  uint16_t scale = 0;
};

template <typename T>
std::vector<Stretch> Stretches(const ChunkCode& code, std::span<const uint32_t> index,
                               std::span<const T> values) {
  std::vector<Stretch> stretches;
  for (size_t i = 0; i < index.size();) {
    const int64_t end = (index[i] / code.chunk + 1) * code.chunk;
    Stretch stretch{.begin = i};
    double sum = 0;
    for (; i < index.size() && index[i] < end; ++i)
      sum += std::fabs(static_cast<double>(values[i]));
    stretch.end = i;
    stretch.scale = AsScale(sum / static_cast<double>(stretch.end - stretch.begin));
    // Magnitudes below the smallest scale wait until they are larger.
    if (stretch.scale != 0) stretches.push_back(stretch);
  }
  return stretches;
}

void AppendNumbers(std::span<const uint16_t> numbers, std::vector<std::byte>& out) {
  const auto bytes = std::as_bytes(numbers);
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Status Malformed(const char* what) {
  return Status::InvalidArgument(std::string("chunked top-k: ") + what);
}

// The values of one run's codes, once its places are known.
template <typename T>
class RunValues {
 public:
  Status Read(const ChunkCode& code, ByteReader& in) {
    levels_.resize(static_cast<size_t>(code.num_levels()));
    uint16_t before = 0;
    for (T& level : levels_) {
      const auto number = in.Value<uint16_t>();
      if (!in.ok()) return Malformed("cut short");
      if (number < kLeastLevel || number > kMostLevel || number < before) {
        return Malformed("a level out of range or order");
      }
      before = number;
      level = static_cast<T>(BFloat16ToFloat(number));
    }
    return Status::Ok();
  }
  Status NextScale(ByteReader& in) {
    const auto number = in.Value<uint16_t>();
    if (!in.ok()) return Malformed("cut short");
    if (number == 0 || number > kMostScale) return Malformed("a scale out of range");
    scale_ = static_cast<T>(BFloat16ToFloat(number));
    return Status::Ok();
  }
  T Value(uint8_t code, uint8_t sign) const {
    const T magnitude = levels_[code & (sign - 1)] * scale_;
    return (code & sign) != 0 ? -magnitude : magnitude;
  }

 private:
  std::vector<T> levels_;
  T scale_ = 0;
};

template <typename T>
Result<int64_t> AddRun(const ChunkCode& code, int64_t extent, ByteReader& in, T* sum,
                       uint32_t* most) {
  std::vector<uint32_t> index;
  std::vector<uint8_t> codes;
  DAD_RETURN_IF_ERROR(DecodeSparse(Coding::kRice, extent, code.bits, in, index, codes));
  if (index.empty()) return int64_t{0};
  RunValues<T> values;
  DAD_RETURN_IF_ERROR(values.Read(code, in));
  const auto sign = static_cast<uint8_t>(code.num_levels());
  for (size_t i = 0; i < index.size();) {
    DAD_RETURN_IF_ERROR(values.NextScale(in));
    const size_t begin = i;
    const int64_t chunk = index[i] / code.chunk;
    const int64_t end = (chunk + 1) * code.chunk;
    for (; i < index.size() && index[i] < end; ++i) sum[index[i]] += values.Value(codes[i], sign);
    if (most != nullptr) most[chunk] = std::max(most[chunk], static_cast<uint32_t>(i - begin));
  }
  return static_cast<int64_t>(index.size());
}

}  // namespace

int64_t ChunkCode::ExpectedBytes(int64_t count) const {
  const int64_t chunks = num_chunks(count);
  const int64_t sent = std::min(count, chunks * k);
  // A gap takes about log2 of its mean and a half, and two bits.
  const double gap = std::log2(static_cast<double>(std::min(count, chunk)) /
                               static_cast<double>(std::min({count, chunk, k})));
  const double bits_each = static_cast<double>(bits) + 1.5 + gap;
  return 4 + 2 * num_levels() + 2 * chunks +
         static_cast<int64_t>(static_cast<double>(sent) * bits_each / 8);
}

template <typename T>
void EncodeChunkRun(const ChunkCode& code, std::span<const uint32_t> index, std::span<T> values,
                    std::vector<std::byte>& out) {
  const std::vector<Stretch> stretches = Stretches<T>(code, index, values);
  RatioHistogram histogram;
  for (const Stretch& stretch : stretches) {
    const auto scale = static_cast<double>(BFloat16ToFloat(stretch.scale));
    for (size_t i = stretch.begin; i < stretch.end; ++i) {
      histogram.Add(std::fabs(static_cast<double>(values[i])) / scale, scale * scale);
    }
  }
  const std::vector<uint16_t> levels = histogram.Levels(code.num_levels());
  const NearestLevel nearest(levels);
  std::vector<T> magnitudes;
  for (const uint16_t level : levels) magnitudes.push_back(static_cast<T>(BFloat16ToFloat(level)));

  std::vector<uint32_t> sent;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales;
  sent.reserve(index.size());
  codes.reserve(index.size());
  for (const Stretch& stretch : stretches) {
    const auto scale = static_cast<T>(BFloat16ToFloat(stretch.scale));
    scales.push_back(stretch.scale);
    for (size_t i = stretch.begin; i < stretch.end; ++i) {
      const double ratio = std::fabs(static_cast<double>(values[i])) / static_cast<double>(scale);
      const uint8_t level = nearest(ratio);
      const bool negative = values[i] < 0;
      const T decoded = magnitudes[level] * scale;
      values[i] -= negative ? -decoded : decoded;
      sent.push_back(index[i]);
      codes.push_back(static_cast<uint8_t>(level | (negative ? code.num_levels() : 0)));
    }
  }
  EncodeSparse(Coding::kRice, code.run(), sent, codes, code.bits, out);
  if (sent.empty()) return;
  AppendNumbers(levels, out);
  AppendNumbers(scales, out);
}

template <typename T>
Result<int64_t> AddChunks(const ChunkCode& code, int64_t count, ByteReader& in, T* sum,
                          std::vector<uint32_t>* most) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < count; begin += code.run()) {
    const int64_t extent = std::min(code.run(), count - begin);
    uint32_t* const counts = most == nullptr ? nullptr : most->data() + begin / code.chunk;
    const Result<int64_t> added = AddRun(code, extent, in, sum + begin, counts);
    if (!added.ok()) return added.status();
    total += added.value();
  }
  return total;
}

#define DAD_INSTANTIATE(T)                                                                   \
  template void EncodeChunkRun<T>(const ChunkCode&, std::span<const uint32_t>, std::span<T>, \
                                  std::vector<std::byte>&);                                  \
  template Result<int64_t> AddChunks<T>(const ChunkCode&, int64_t, ByteReader&, T*,          \
                                        std::vector<uint32_t>*)
DAD_INSTANTIATE(float);
DAD_INSTANTIATE(double);
#undef DAD_INSTANTIATE

}  // namespace dad
