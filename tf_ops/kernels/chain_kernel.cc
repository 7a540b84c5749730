// The exchange of layers that may form chains.
#include <map>
#include <utility>

#include "tf_ops/kernels/method_kernel.h"

namespace dad_tensorflow {
namespace {

// Layers that may form chains.
class ExchangeChain final : public MethodKernel {
 public:
  using MethodKernel::MethodKernel;

 private:
  // A layer, with the places of its results among the outputs.
  struct Given {
    LayerInput layer;
    int output = 0;
    bool has_bias = false;
  };

  Status AddRequests(const Board& board, Run* run) const override;
  Status AddChain(const Chain& chain, std::map<int, Given>* given, Run* run) const;
};

Status ExchangeChain::AddRequests(const Board& board, Run* run) const {
  std::map<int, Given> given;  // by pair
  int output = 0;
  for (const Part& part : parts()) {
    Given& one = given[part.pair];
    dad::RowsSegment segment;
    segment.a = ViewOf(run->NextInput());
    segment.d = run->NextDelta();
    if (segment.a.shape[0] > 0) one.layer.rows.push_back(std::move(segment));
    one.layer.weight = ViewOf(run->NextInput());
    if (part.has_bias) one.layer.bias = ViewOf(run->NextInput());
    one.layer.transposed = part.transposed;
    one.has_bias = part.has_bias;
    one.output = output;
    output += part.has_bias ? 2 : 1;
  }
  for (const Chain& chain : board.Chains()) {
    bool is_here = true;
    for (const auto& member : chain.members) is_here = is_here && given.contains(member.pair);
    if (!is_here) continue;
    const Status status = AddChain(chain, &given, run);
    if (!status.ok()) return status;
    for (const auto& member : chain.members) {
      if (!member.passes) given.erase(member.pair);
    }
  }
  for (const auto& [pair, one] : given) {
    for (int i = 0; i < (one.has_bias ? 2 : 1); ++i) {
      run->output = one.output + i;
      const Status status = EmptyResult(run);
      if (!status.ok()) return status;
    }
  }
  return Status::Ok();
}

Status ExchangeChain::AddChain(const Chain& chain, std::map<int, Given>* given, Run* run) const {
  const size_t first = static_cast<size_t>((*given)[chain.members[0].pair].output);
  Request request = MakeRequest(chain.way, first, run->loss_scale);
  Contribution mine;
  int64_t elements = 0;
  for (size_t i = 0; i < chain.members.size(); ++i) {
    const Given& one = (*given)[chain.members[i].pair];
    LayerInput layer = one.layer;
    const bool is_top = i + 1 == chain.members.size();
    for (dad::RowsSegment& segment : layer.rows) {
      mine.replan = mine.replan || segment.a.shape[0] > chain.way.most_rows;
      if (!is_top) segment.d = dad::TensorView();  // follows from the layer above
    }
    if (!chain.members[i].passes) {
      run->output = one.output;
      Result<dad::TensorView> result = NewResult(run);
      if (!result.ok()) return result.status();
      layer.output = result.value();
      elements += Elements(layer.output);
      if (one.has_bias) {
        Result<dad::TensorView> bias = NewResult(run);
        if (!bias.ok()) return bias.status();
        layer.output_bias = bias.value();
        elements += Elements(layer.output_bias);
      }
    }
    mine.layers.push_back(std::move(layer));
  }
  mine.input.dtype = mine.layers[0].weight.dtype;
  mine.input.shape = {elements};
  request.tensors.push_back(std::move(mine));
  run->requests.push_back(std::move(request));
  run->notes.push_back({.pair = chain.members[0].pair});
  return Status::Ok();
}

REGISTER_KERNEL_BUILDER(Name("DadExchangeChain").Device(tensorflow::DEVICE_CPU), ExchangeChain);

}  // namespace
}  // namespace dad_tensorflow
