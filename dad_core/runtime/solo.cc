#include "runtime/solo.h"

#include "exchange/exchange.h"
#include "runtime/lane/schedule.h"

namespace dad {

Status RunAlone(RequestState& request) {
  const int root[] = {request.meta.root_rank};
  const Group group{0, 1, {}};
  const ByteSpan nothing;
  ExchangeEnv env;  // no state: with one rank, nothing that is left out now would be sent later
  env.cpu_level = BestCpuLevel();
  for (size_t i = 0; i < request.request.tensors.size(); ++i) {
    const Contribution& mine = request.request.tensors[i];
    Result<std::unique_ptr<Exchange>> made =
        MakeExchange(SpecOf(request.meta, i, root), {0, mine.input.num_elements()},
                     static_cast<int64_t>(mine.input.num_bytes()), env);
    if (!made.ok()) return made.status();
    Exchange& exchange = *made.value();
    StepInput input;
    input.mine = &mine;
    input.received_splits = &request.splits;
    input.allocate = [&](const Shape& shape) {
      return request.request.allocate(static_cast<int>(i), mine.input.dtype, shape);
    };
    DAD_RETURN_IF_ERROR(exchange.Begin(input, group));
    for (int round = 0; round < exchange.num_rounds(); ++round) {
      DAD_RETURN_IF_ERROR(exchange.Receive(round, {&nothing, 1}));
    }
    DAD_RETURN_IF_ERROR(exchange.Finish());
  }
  return Status::Ok();
}

}  // namespace dad
