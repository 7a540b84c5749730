#include "exchange/device/sparse_coder.h"

#include <algorithm>
#include <limits>

namespace dad {

using cuda::DivideUp;
using cuda::kTile;

template <typename T>
int64_t SparseCoder<T>::NumChunks(const SparseSettings& settings, int64_t count) {
  return DivideUp(count, MaxSparseExtent(settings.value_bits()));
}

template <typename T>
Status SparseCoder<T>::Encode(const SparseTensor<T>& tensor, TensorHead<T>* head,
                              ChunkHead* chunk_heads, int* not_finite, DeviceArena& arena,
                              std::vector<CodedChunk>& chunks) {
  DeviceArena work;
  DAD_RETURN_IF_ERROR(FindThreshold(tensor, head, not_finite, work));
  cuda::Rule<T> rule{T(-1), settings_.alpha, static_cast<T>(settings_.zeta)};
  const cuda::Threshold<T>* threshold = settings_.has_tau() ? &head->threshold : nullptr;
  const int64_t chunk = MaxSparseExtent(settings_.value_bits());
  std::vector<Lists> lists;
  for (int64_t begin = 0; begin < tensor.count; begin += chunk) {
    const int64_t extent = std::min(chunk, tensor.count - begin);
    DAD_RETURN_IF_ERROR(
        Select(tensor, rule, threshold, begin, extent, not_finite, work, lists.emplace_back()));
    chunks.push_back({begin, extent, chunk_heads++, nullptr, nullptr, nullptr});
    // The largest of all chunks, before any is coded.
    if (settings_.rule != SparseRule::kVgc) continue;
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::TopKernel<T>>(
        {lists.back().selected.r, lists.back().total, extent, &head->top}));
  }
  for (size_t c = 0; c < lists.size(); ++c) {
    auto* words = arena.Take<uint32_t>(bench_, chunks[c].extent);
    DAD_RETURN_IF_ERROR(arena.status());
    DAD_RETURN_IF_ERROR(EncodeWords(tensor, lists[c], head, chunks[c], words, work));
    if (settings_.coding == Coding::kRice) DAD_RETURN_IF_ERROR(EncodeRice(chunks[c], arena, work));
  }
  return Status::Ok();
}

template <typename T>
Status SparseCoder<T>::KeepAll(const SparseTensor<T>& tensor, int* not_finite) {
  const cuda::Rule<T> rule{std::numeric_limits<T>::infinity(), settings_.alpha,
                           static_cast<T>(settings_.zeta)};
  const int64_t chunk = MaxSparseExtent(settings_.value_bits());
  for (int64_t begin = 0; begin < tensor.count; begin += chunk) {
    DeviceArena work;
    Lists lists;
    DAD_RETURN_IF_ERROR(Select(tensor, rule, nullptr, begin, std::min(chunk, tensor.count - begin),
                               not_finite, work, lists));
  }
  return Status::Ok();
}

template <typename T>
Status SparseCoder<T>::FindThreshold(const SparseTensor<T>& tensor, TensorHead<T>* head,
                                     int* not_finite, DeviceArena& work) {
  if (!settings_.has_tau()) return Status::Ok();
  typename cuda::TauKernel<T>::Args tau{};
  tau.threshold = &head->threshold;
  tau.not_finite = not_finite;
  if (settings_.absolute()) {
    tau.absolute = true;
    tau.tau = settings_.tau_absolute;
    return bench_.Run<cuda::TauKernel<T>>(tau);
  }
  tau.count = tensor.count;
  tau.num_sums = DivideUp(tensor.count, cuda::kSumOver);
  auto* sums = work.Take<double>(bench_, tau.num_sums);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::SumSquaresKernel<T>>({tensor.g, tensor.count, tensor.scale, sums}));
  tau.sums = sums;
  tau.tau = settings_.tau;
  tau.mean = tensor.mean;
  tau.new_mean = tensor.new_mean;
  return bench_.Run<cuda::TauKernel<T>>(tau);
}

template <typename T>
Status SparseCoder<T>::Select(const SparseTensor<T>& tensor, const cuda::Rule<T>& rule,
                              const cuda::Threshold<T>* threshold, int64_t begin, int64_t extent,
                              int* not_finite, DeviceArena& work, Lists& lists) {
  const bool variance = settings_.has_variance();
  lists.blocks = DivideUp(extent, kTile);
  const int64_t room = lists.blocks * kTile;
  // Once in the blocks' own parts, once put together.
  auto take = [&] {
    return cuda::Selection<T>{work.Take<uint32_t>(bench_, room), work.Take<T>(bench_, room),
                              variance ? work.Take<T>(bench_, room) : nullptr};
  };
  const cuda::Selection<T> scratch = take();
  lists.selected = take();
  lists.block_count = work.Take<int32_t>(bench_, lists.blocks);
  lists.offset = work.Take<int64_t>(bench_, lists.blocks);
  lists.total = work.Take<int64_t>(bench_, 1);
  DAD_RETURN_IF_ERROR(work.status());

  typename cuda::AccumulateKernel<T>::Args pass{};
  pass.count = extent;
  pass.rule = rule;
  pass.threshold = threshold;
  pass.scale = tensor.scale;
  pass.g = tensor.g + begin;
  pass.s = tensor.s == nullptr ? nullptr : tensor.s + begin;
  pass.r = tensor.r + begin;
  pass.new_r = tensor.new_r + begin;
  if (variance) {
    pass.v = tensor.v + begin;
    pass.new_v = tensor.new_v + begin;
  }
  pass.scratch = scratch;
  pass.block_count = lists.block_count;
  pass.not_finite = not_finite;
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::AccumulateKernel<T>>(pass));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::OffsetsKernel>(
      {lists.block_count, lists.blocks, lists.offset, lists.total}));
  return bench_.Run<cuda::GatherKernel<T>>(
      {lists.block_count, lists.offset, lists.blocks, scratch, lists.selected});
}

template <typename T>
Status SparseCoder<T>::EncodeWords(const SparseTensor<T>& tensor, const Lists& lists,
                                   const TensorHead<T>* head, CodedChunk& chunk, uint32_t* words,
                                   DeviceArena& work) {
  T* r = tensor.new_r + chunk.begin;
  T* v = settings_.has_variance() ? tensor.new_v + chunk.begin : nullptr;
  chunk.words = words;
  if (settings_.has_tau()) {
    DAD_RETURN_IF_ERROR(bench_.Run<cuda::EncodeStromKernel<T>>(
        {lists.selected, lists.total, chunk.extent, &head->threshold, !settings_.absolute(), 0, r,
         v, words}));
    return bench_.Copy(&chunk.head->count, lists.total, sizeof(int64_t));
  }
  auto* scratch = work.Take<uint32_t>(bench_, lists.blocks * kTile);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::EncodeVgcKernel<T>>(
      {lists.selected, lists.total, chunk.extent, &head->top, static_cast<T>(settings_.zeta),
       settings_.feedback, 0, r, v, scratch, lists.block_count}));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::OffsetsKernel>(
      {lists.block_count, lists.blocks, lists.offset, &chunk.head->count}));
  return bench_.Run<cuda::GatherKernel<T>>({lists.block_count,
                                            lists.offset,
                                            lists.blocks,
                                            {scratch, nullptr, nullptr},
                                            {words, nullptr, nullptr}});
}

template <typename T>
Status SparseCoder<T>::EncodeRice(CodedChunk& chunk, DeviceArena& arena, DeviceArena& work) {
  const int64_t capacity = chunk.extent;
  const int64_t blocks = DivideUp(capacity, kTile);
  const int64_t* count = &chunk.head->count;
  auto* index = work.Take<uint32_t>(bench_, capacity);
  auto* code = work.Take<uint8_t>(bench_, capacity);
  auto* costs = work.Take<cuda::Counter>(bench_, cuda::kRiceParameters);
  auto* block_bits = work.Take<int64_t>(bench_, blocks);
  auto* offset = work.Take<int64_t>(bench_, blocks);
  // With k = 0 an element takes as many bits as there are elements from the one before to it: never
  // more than the chunk has, and the best k needs no more.
  const int64_t gap_words = DivideUp(capacity, 32) + 1;
  auto* gaps = arena.Take<uint32_t>(bench_, gap_words);
  auto* codes = arena.Take<uint32_t>(bench_, DivideUp(capacity * settings_.value_bits(), 32) + 1);
  DAD_RETURN_IF_ERROR(work.status());
  DAD_RETURN_IF_ERROR(arena.status());
  chunk.gaps = gaps;
  chunk.codes = codes;
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::SplitWordsKernel>(
      {chunk.words, count, capacity, settings_.value_bits(), index, code}));
  DAD_RETURN_IF_ERROR(bench_.Clear(costs, cuda::kRiceParameters * sizeof *costs));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::RiceCostKernel>({index, count, capacity, costs}));
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::RiceChooseKernel>({costs, &chunk.head->k, &chunk.head->bits}));
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::RiceBlockBitsKernel>({index, count, capacity, &chunk.head->k, block_bits}));
  DAD_RETURN_IF_ERROR(bench_.Run<cuda::RiceOffsetsKernel>({block_bits, blocks, offset}));
  DAD_RETURN_IF_ERROR(bench_.Clear(gaps, static_cast<size_t>(gap_words) * sizeof *gaps));
  DAD_RETURN_IF_ERROR(
      bench_.Run<cuda::RiceWriteKernel>({index, count, capacity, &chunk.head->k, offset, gaps}));
  return bench_.Run<cuda::PackCodesKernel>({code, count, capacity, settings_.value_bits(), codes});
}

template class SparseCoder<float>;
template class SparseCoder<double>;

}  // namespace dad
