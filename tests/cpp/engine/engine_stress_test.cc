// Random submits in random order on four ranks, with mismatches, over a network that
// reorders: no hang, no wrong answer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "engine_fixture.h"

namespace dad {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

// What step `step` does is drawn from a generator that all ranks share; the order
// and who spoils it are each rank's own.
struct Plan {
  struct Item {
    int number;
    int elements;
    OpKind kind;
    int spoiler;  // rank that submits another shape, or -1
  };
  std::vector<Item> items;

  Plan(int num_ranks, std::mt19937& shared) {
    const int count = 1 + static_cast<int>(shared() % 24);
    std::vector<int> numbers(40);
    for (int i = 0; i < 40; ++i) numbers[static_cast<size_t>(i)] = i;
    std::shuffle(numbers.begin(), numbers.end(), shared);
    for (int i = 0; i < count; ++i) {
      const int number = numbers[static_cast<size_t>(i)];
      const bool spoiled = shared() % 200 == 0;
      items.push_back(
          {number, 1 + number * 37 % 3000,
           number % 5 == 0 ? OpKind::kAllGather : OpKind::kAllReduce,
           spoiled ? static_cast<int>(shared() % static_cast<unsigned>(num_ranks)) : -1});
    }
  }
};

void Stress(int num_ranks, int total_submits, unsigned seed) {
  Options options;
  options.fusion_bytes = 4096;
  Job job(num_ranks, options);
  job.network().SetJitter(microseconds(50), seed);
  job.Run([&](int rank) {
    std::mt19937 shared(seed);
    std::mt19937 own(seed * 31 + static_cast<unsigned>(rank));
    int submits = 0;
    for (int step = 0; submits < total_submits; ++step) {
      const Plan plan(num_ranks, shared);
      std::vector<size_t> order(plan.items.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), own);
      std::vector<std::unique_ptr<Values>> values(plan.items.size());
      std::vector<std::shared_ptr<Ticket>> tickets(plan.items.size());
      for (size_t i : order) {
        const Plan::Item& item = plan.items[i];
        Shape other = {1, item.elements};  // as many values, in another shape
        values[i] = std::make_unique<Values>(
            std::vector<float>(static_cast<size_t>(item.elements), 1.0f * (rank + step % 7)));
        const std::string name = "t" + std::to_string(item.number);
        Request request = item.kind == OpKind::kAllGather ? values[i]->AllGather(name)
                                                          : values[i]->AllReduce(name);
        if (item.spoiler == rank) {
          request.tensors[0].input.shape = other;
          if (item.kind == OpKind::kAllReduce) request.tensors[0].output.shape = other;
        }
        tickets[i] = job[rank].Submit(std::move(request));
        ++submits;
      }
      std::shuffle(order.begin(), order.end(), own);
      for (size_t i : order) {
        const Plan::Item& item = plan.items[i];
        const Status status = tickets[i]->Wait(seconds(60));
        if (item.spoiler >= 0) {
          ASSERT_EQ(status.code(), StatusCode::kFailedPrecondition) << status.ToString();
          continue;
        }
        ASSERT_TRUE(status.ok()) << "step " << step << ": " << status.ToString();
        if (item.kind == OpKind::kAllGather) {
          ASSERT_EQ(values[i]->gathered.size(), static_cast<size_t>(item.elements * num_ranks));
          ASSERT_EQ(values[i]->gathered.back(), 1.0f * (num_ranks - 1 + step % 7));
        } else {
          const int sum = num_ranks * (num_ranks - 1) / 2 + num_ranks * (step % 7);
          ASSERT_EQ(values[i]->data.front(), 1.0f * sum);
          ASSERT_EQ(values[i]->data.back(), 1.0f * sum);
        }
      }
    }
  });
}

// DAD_STRESS_SUBMITS asks for more, e.g. for an hour's run.
TEST(EngineStressTest, RandomSubmitsInRandomOrderWithMismatches) {
  const char* more = std::getenv("DAD_STRESS_SUBMITS");
  Stress(4, more != nullptr ? std::atoi(more) : 25'000, 1);  // on each of 4 ranks
}

TEST(EngineStressTest, OddNumberOfRanks) { Stress(3, 5'000, 2); }

}  // namespace
}  // namespace dad
