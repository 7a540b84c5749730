// Random programs on random schedules of events, in one thread: several ranks submit, wait, poll,
// give up steps, join, leave and die, while the network delivers in any order that TCP allows.
// Whatever happens, every request ends once, and ranks that get a result get the same one.
//
// A failure prints its seed. DAD_LANE_SEED=n runs that seed alone and prints what users did and
// got; DAD_LANE_SEEDS=n runs so many.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "lane_fixture.h"

namespace dad {
namespace {

constexpr float kScribble = -12345.0f;
constexpr const char* kGaveUp = "the user gave up";

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  // 0 .. n-1
  size_t operator()(size_t n) { return n < 2 ? 0 : generator_() % n; }
  bool OneIn(size_t n) { return (*this)(n) == 0; }
  template <typename T>
  T Of(std::initializer_list<T> values) {
    return *(values.begin() + (*this)(values.size()));
  }
  template <typename T>
  void Shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[(*this)(i)]);
  }

 private:
  std::mt19937 generator_;
};

// One collective of the program that all ranks run.
struct Item {
  std::string name;
  OpKind kind = OpKind::kAllReduce;
  int set = 0;
  int elements = 0;
  int root = 0;      // of a broadcast
  int spoiler = -1;  // a rank that submits another shape or kind
  bool spoils_kind = false;
};

// Items that are in flight together; a rank submits them in an order of its own.
using Phase = std::vector<Item>;
using ProgramStep = std::vector<Phase>;

struct Program {
  struct Epoch {  // ends with a join, if any
    std::vector<ProgramStep> steps;
    std::vector<size_t> num_steps;  // that each rank takes part in; all, if nobody joins
    bool joins = false;
  };

  int num_ranks = 0;
  Options options;
  std::vector<std::vector<int>> sets;
  bool numbers_steps = false;  // Request::step; else 0
  bool gives_up = false;
  std::vector<Epoch> epochs;
  enum class Fault { kNone, kLeave, kKill } fault = Fault::kNone;
  int victim = 0;
  size_t fault_after = 0;  // steps of the cluster

  explicit Program(Random& random) {
    num_ranks = random.Of({2, 3, 4});
    options.fusion_bytes = random.Of({0, 4096, 1 << 20});
    options.direct_bytes = random.Of({0, 4096});
    options.cache_capacity = random.Of({0, 3, 4096});
    options.cycle_time_ms = random.Of({0.0, 0.0, 1.0});
    options.ring_bytes = random.Of({0, 1000});
    options.pack = random.Of({0, 1});
    options.autotune = random.OneIn(4);
    if (num_ranks > 2 && random.OneIn(3)) {
      std::vector<int> set;
      const size_t left_out = random(static_cast<size_t>(num_ranks));
      for (int rank = 0; rank < num_ranks; ++rank) {
        if (static_cast<size_t>(rank) != left_out) set.push_back(rank);
      }
      sets.push_back(set);
    }
    numbers_steps = random.OneIn(2);
    gives_up = numbers_steps && random.OneIn(2);
    // A user who gives up a step tries again, and does not know whether others see an error in it.
    const size_t spoils_one_in = gives_up ? 0 : random.Of({0, 0, 8, 40});
    const bool varies = random.OneIn(2);  // what a step has
    std::vector<Item> usual;
    for (int i = 0, count = 1 + static_cast<int>(random(5)); i < count; ++i) {
      usual.push_back(RandomItem(random, i));
    }
    for (size_t e = 0, count = 1 + random(2); e < count; ++e) {
      Epoch& epoch = epochs.emplace_back();
      const size_t num_steps = 1 + random(7);
      for (size_t s = 0; s < num_steps; ++s) {
        ProgramStep& step = epoch.steps.emplace_back(1 + random(2));
        for (Item item : usual) {
          if (varies && random.OneIn(4)) continue;
          if (varies && random.OneIn(8)) item.elements = RandomElements(random);
          if (spoils_one_in > 0 && random.OneIn(spoils_one_in)) {
            const std::vector<int>& members = Members(item.set);
            item.spoiler = members[random(members.size())];
            item.spoils_kind = random.OneIn(2);
          }
          step[random(step.size())].push_back(item);
        }
      }
      epoch.joins = !gives_up && random.OneIn(2);
      for (int rank = 0; rank < num_ranks; ++rank) {
        epoch.num_steps.push_back(epoch.joins ? random(num_steps + 1) : num_steps);
      }
    }
    if (random.OneIn(3)) fault = random.OneIn(2) ? Fault::kLeave : Fault::kKill;
    victim = static_cast<int>(random(static_cast<size_t>(num_ranks)));
    fault_after = random(2000);
  }

  std::vector<int> Members(int set) const {
    if (set > 0) return sets[static_cast<size_t>(set) - 1];
    std::vector<int> all(static_cast<size_t>(num_ranks));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

 private:
  int RandomElements(Random& random) const {
    return num_ranks + static_cast<int>(random.OneIn(3) ? random(3000) : random(30));
  }
  Item RandomItem(Random& random, int number) const {
    Item item;
    item.name = "t" + std::to_string(number);
    item.kind = random.Of({OpKind::kAllReduce, OpKind::kAllReduce, OpKind::kAllReduce,
                           OpKind::kAllGather, OpKind::kBroadcast});
    item.set = sets.empty() || random.OneIn(2) ? 0 : 1;
    item.elements = RandomElements(random);
    const std::vector<int> members = Members(item.set);
    item.root = members[random(members.size())];
    return item;
  }
};

// A submit with its memory, which says who submitted it: in the result of an allreduce, element m
// is the number of member m's submit.
struct Submitted {
  Item item;
  int rank = 0;
  int place = 0;   // of the item in the program
  int number = 0;  // counts the submits of this rank from 1
  std::unique_ptr<Values> values;
  std::shared_ptr<RequestState> request;
  bool completed = false;
  std::vector<float> result;
};

class RandomRun {
 public:
  RandomRun(unsigned seed, bool prints)
      : random_(seed),
        prints_(prints),
        program_(random_),
        cluster_(program_.num_ranks, program_.options, program_.sets) {
    cluster_.on_completed = [this](RequestState& request) { Completed(request); };
    int place = 0;
    for (const Program::Epoch& epoch : program_.epochs) {
      std::vector<std::vector<std::vector<int>>> places;
      for (const ProgramStep& step : epoch.steps) {
        auto& of_step = places.emplace_back();
        for (const Phase& phase : step) {
          auto& of_phase = of_step.emplace_back();
          for (size_t i = 0; i < phase.size(); ++i) of_phase.push_back(place++);
        }
      }
      for (int rank = 0; rank < program_.num_ranks; ++rank) Write(rank, epoch, places);
    }
    users_.resize(static_cast<size_t>(program_.num_ranks));
    for (int rank = 0; rank < program_.num_ranks; ++rank) {
      users_[static_cast<size_t>(rank)].moves = std::move(scripts_[rank]);
    }
  }

  void Run() {
    const auto choose = [this](size_t n) { return random_(n); };
    for (; steps_ < 1'000'000; ++steps_) {
      if (steps_ == program_.fault_after) BringFault();
      const size_t what = random_(8);
      if (what == 0 && MoveUser(random_(users_.size()))) continue;
      if (what == 1 && random_.OneIn(4)) cluster_.Advance(std::chrono::microseconds(random_(3000)));
      if (cluster_.Step(choose)) continue;
      if (MoveAnyUser()) continue;
      if (!cluster_.AdvanceToDeadline()) break;
    }
    ASSERT_LT(steps_, 1'000'000u) << "the ranks do not come to an end";
    Check();
  }

 private:
  struct Move {
    enum Kind { kSubmit, kWait, kPoll, kGiveUp, kJoin } kind = kSubmit;
    Item item;
    int place = -1;
  };
  struct User {
    std::deque<Move> moves;
    std::shared_ptr<RequestState> blocked_on;
    std::map<int, Submitted*> open;      // the last submit of each place
    std::map<std::string, int> last_of;  // place of the last submit of each name
    std::vector<std::shared_ptr<RequestState>> joins;
    uint64_t step = 1;
    int num_submits = 0;
  };

  void Print(int rank, const std::string& what) const {
    if (prints_) std::cout << steps_ << ": rank " << rank << " " << what << "\n";
  }

  // What a rank does in an epoch.
  void Write(int rank, const Program::Epoch& epoch,
             const std::vector<std::vector<std::vector<int>>>& places) {
    std::deque<Move>& moves = scripts_[rank];
    for (size_t s = 0; s < epoch.num_steps[static_cast<size_t>(rank)]; ++s) {
      for (size_t p = 0; p < epoch.steps[s].size(); ++p) {
        std::vector<Move> mine;
        for (size_t i = 0; i < epoch.steps[s][p].size(); ++i) {
          const Item& item = epoch.steps[s][p][i];
          const std::vector<int> members = program_.Members(item.set);
          if (std::find(members.begin(), members.end(), rank) == members.end()) continue;
          mine.push_back({Move::kSubmit, item, places[s][p][i]});
        }
        random_.Shuffle(mine);
        for (const Move& move : mine) {
          moves.push_back(move);
          if (program_.gives_up && random_.OneIn(12)) {
            moves.push_back({Move::kGiveUp, {}, -1});
          }
        }
        for (Move& move : mine) {
          if (random_.OneIn(3)) continue;
          move.kind = random_.OneIn(5) ? Move::kPoll : Move::kWait;
          moves.push_back(move);
        }
      }
      moves.push_back({Move::kGiveUp, {}, 0});  // place 0: only a new number for the next step
    }
    const bool waits_for_all = !epoch.joins || random_.OneIn(2);
    for (size_t s = 0; s < epoch.num_steps[static_cast<size_t>(rank)]; ++s) {
      for (size_t p = 0; p < epoch.steps[s].size(); ++p) {
        for (size_t i = 0; i < epoch.steps[s][p].size(); ++i) {
          // A joined rank is in any collective, also in one of another kind than it has open.
          const bool must_wait = epoch.steps[s][p][i].spoils_kind;
          if (waits_for_all || must_wait) moves.push_back({Move::kWait, {}, places[s][p][i]});
        }
      }
    }
    if (!epoch.joins) return;
    moves.push_back({Move::kJoin, {}, -1});
  }

  bool MoveAnyUser() {
    const size_t first = random_(users_.size());
    for (size_t i = 0; i < users_.size(); ++i) {
      if (MoveUser((first + i) % users_.size())) return true;
    }
    return false;
  }

  // False if the user can do nothing now.
  bool MoveUser(size_t index) {
    User& user = users_[index];
    const int rank = static_cast<int>(index);
    for (auto& [place, submitted] : user.open) {
      if (!submitted->request->finished()) continue;
      const Status status = StatusOf(*submitted->request);
      if (status.message() != kGaveUp || !cluster_[rank].alive()) continue;
      const bool waits = user.blocked_on == submitted->request;
      Submit(rank, submitted->item, place);
      if (waits) Block(rank, user.open[place]->request);
      return true;
    }
    if (user.blocked_on && !user.blocked_on->finished()) return false;
    user.blocked_on = nullptr;
    // Without a join the ranks are in different places of the program.
    if (!user.joins.empty() && !StatusOf(*user.joins.back()).ok()) user.moves.clear();
    if (user.moves.empty()) {
      if (!faulty_ || !cluster_[rank].alive()) return false;
      cluster_[rank].Leave();  // a process ends when its program does
      return true;
    }
    const Move move = user.moves.front();
    switch (move.kind) {
      case Move::kSubmit: {
        // A name is free again when its last request is done.
        const auto last = user.last_of.find(move.item.name);
        if (last != user.last_of.end() && !user.open[last->second]->request->finished()) {
          Block(rank, user.open[last->second]->request);
          return true;
        }
        Submit(rank, move.item, move.place);
        break;
      }
      case Move::kWait:
      case Move::kPoll: {
        const auto found = user.open.find(move.place);
        if (found == user.open.end() || found->second->request->finished()) break;
        if (move.kind == Move::kPoll) {
          Print(rank, "polls " + found->second->item.name);
          cluster_[rank].Poll(found->second->request);
        } else {
          Block(rank, found->second->request);
        }
        break;
      }
      case Move::kGiveUp:
        if (move.place < 0) {
          Print(rank, "gives up step " + std::to_string(user.step));
          cluster_[rank].GiveUp(user.step, Status::InvalidArgument(kGaveUp));
        }
        ++user.step;
        break;
      case Move::kJoin:
        Print(rank, "joins");
        user.joins.push_back(cluster_[rank].Join());
        user.blocked_on = user.joins.back();
        break;
    }
    user.moves.pop_front();
    return true;
  }

  static OpKind KindOn(const Item& item, int rank) {
    if (item.spoiler != rank || !item.spoils_kind) return item.kind;
    return item.kind == OpKind::kAllReduce ? OpKind::kBroadcast : OpKind::kAllReduce;
  }

  void Block(int rank, const std::shared_ptr<RequestState>& request) {
    Print(rank, "waits for " + request->meta.name);
    cluster_[rank].Wait(request);
    users_[static_cast<size_t>(rank)].blocked_on = request;
  }

  void Submit(int rank, const Item& item, int place) {
    User& user = users_[static_cast<size_t>(rank)];
    auto owned = std::make_unique<Submitted>();
    Submitted& submitted = *owned;
    submitted.item = item;
    submitted.rank = rank;
    submitted.place = place;
    submitted.number = ++user.num_submits;
    const bool spoils = item.spoiler == rank && !item.spoils_kind;
    const OpKind kind = KindOn(item, rank);
    const std::vector<int> members = program_.Members(item.set);
    const auto member =
        static_cast<size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
    const auto n = static_cast<float>(submitted.number);
    std::vector<float> data(static_cast<size_t>(item.elements));
    for (size_t i = 0; i < data.size(); ++i) data[i] = n * static_cast<float>(1 + i % 5);
    for (size_t m = 0; m < members.size(); ++m) data[m] = m == member ? n : 0.0f;
    if (kind == OpKind::kAllGather) data.assign(1 + static_cast<size_t>(submitted.number) % 3, n);
    submitted.values = std::make_unique<Values>(std::move(data));
    Values& values = *submitted.values;
    Request request = kind == OpKind::kAllGather   ? values.AllGather(item.name)
                      : kind == OpKind::kBroadcast ? values.Broadcast(item.name, item.root)
                                                   : values.AllReduce(item.name);
    if (spoils) {
      Contribution& tensor = request.tensors[0];
      tensor.input.shape.push_back(1);
      if (kind != OpKind::kAllGather) tensor.output.shape = tensor.input.shape;
    }
    request.process_set = item.set;
    request.step = program_.numbers_steps ? user.step : 0;
    Print(rank, std::string("submits ") + Name(kind) + " " + item.name +
                    ToString(request.tensors[0].input.shape) + ", place " + std::to_string(place) +
                    ", step " + std::to_string(request.step) + ", set " + std::to_string(item.set));
    submitted.request = cluster_[rank].Submit(std::move(request));
    by_request_[submitted.request.get()] = &submitted;
    user.open[place] = &submitted;
    user.last_of[item.name] = place;
    all_.push_back(std::move(owned));
  }

  // From here on the memory is the user's, who uses it for something else.
  void Completed(RequestState& request) {
    Submitted& submitted = *by_request_.at(&request);
    EXPECT_FALSE(submitted.completed) << request.meta.name << " ends twice";
    submitted.completed = true;
    Print(submitted.rank, "gets " + request.meta.name + ", place " +
                              std::to_string(submitted.place) + ": " +
                              StatusOf(request).ToString());
    Values& values = *submitted.values;
    submitted.result = request.meta.kind == OpKind::kAllGather ? values.gathered : values.data;
    std::fill(values.data.begin(), values.data.end(), kScribble);
    std::fill(values.gathered.begin(), values.gathered.end(), kScribble);
  }

  void BringFault() {
    if (program_.fault == Program::Fault::kNone) return;
    faulty_ = true;
    if (!cluster_[program_.victim].alive()) return;
    Print(program_.victim, program_.fault == Program::Fault::kLeave ? "leaves" : "dies");
    if (program_.fault == Program::Fault::kLeave) cluster_[program_.victim].Leave();
    if (program_.fault == Program::Fault::kKill) {
      cluster_.Kill(program_.victim, [this](size_t n) { return random_(n); });
    }
  }

  void Check() {
    for (const auto& submitted : all_) {
      ASSERT_TRUE(submitted->request->finished())
          << "\"" << submitted->item.name << "\", place " << submitted->place << " of the program, "
          << "never ends on rank " << submitted->rank;
      if (StatusOf(*submitted->request).ok()) CheckResult(*submitted);
      for (float value : submitted->values->data) {
        ASSERT_TRUE(!submitted->completed || value == kScribble)
            << "memory of \"" << submitted->item.name << "\" was written after its end";
      }
    }
    for (const auto& user : users_) {
      ASSERT_TRUE(faulty_ || user.moves.empty()) << "a rank did not come to its end";
      for (const auto& join : user.joins) ASSERT_TRUE(join->finished()) << "a join never ends";
    }
    CheckGroups();
    if (!faulty_) CheckAgreement();
  }

  std::vector<float> Expected(const Submitted& mine, const std::vector<float>& numbers) {
    std::vector<float> expected;
    const size_t num_members = numbers.size();
    const float sum = std::accumulate(numbers.begin(), numbers.end(), 0.0f);
    for (size_t i = 0; i < mine.result.size(); ++i) {
      expected.push_back(i < num_members ? numbers[i] : sum * static_cast<float>(1 + i % 5));
    }
    return expected;
  }

  // Of a sum: whose submits are in it, all of it, and ours is.
  void CheckResult(const Submitted& mine) {
    if (mine.request->meta.kind != OpKind::kAllReduce) return;
    const std::vector<int> members = program_.Members(mine.item.set);
    const std::vector<float> numbers(mine.result.begin(),
                                     mine.result.begin() + static_cast<int64_t>(members.size()));
    ASSERT_EQ(mine.result, Expected(mine, numbers)) << mine.item.name;
    const auto member = std::find(members.begin(), members.end(), mine.rank) - members.begin();
    ASSERT_EQ(numbers[static_cast<size_t>(member)], static_cast<float>(mine.number));
  }

  // Ranks with the same result were in it together: each once, and those that brought something.
  void CheckGroups() {
    using Key = std::tuple<int, std::string, OpKind, std::vector<float>>;
    std::map<Key, std::map<int, const Submitted*>> groups;
    for (const auto& submitted : all_) {
      if (!StatusOf(*submitted->request).ok()) continue;
      const Key key{submitted->item.set, submitted->item.name, submitted->request->meta.kind,
                    submitted->result};
      const bool is_new = groups[key].emplace(submitted->rank, submitted.get()).second;
      ASSERT_TRUE(is_new) << "\"" << submitted->item.name << "\" has one result twice on rank "
                          << submitted->rank;
    }
    if (faulty_) return;
    for (const auto& [key, group] : groups) {
      if (std::get<OpKind>(key) != OpKind::kAllReduce) continue;
      const std::vector<int> members = program_.Members(std::get<int>(key));
      const std::vector<float>& numbers = std::get<std::vector<float>>(key);
      for (size_t m = 0; m < members.size(); ++m) {
        const auto found = group.find(members[m]);
        const float number =
            found == group.end() ? 0.0f : static_cast<float>(found->second->number);
        ASSERT_EQ(numbers[m], number)
            << "\"" << std::get<std::string>(key) << "\", rank " << members[m];
      }
    }
  }

  // What came of each item of the program is the same on all ranks that took part in it.
  void CheckAgreement() {
    std::map<int, std::map<int, const Submitted*>> by_place;
    for (size_t rank = 0; rank < users_.size(); ++rank) {
      for (const auto& [place, submitted] : users_[rank].open) {
        by_place[place][static_cast<int>(rank)] = submitted;
      }
    }
    for (const auto& [place, group] : by_place) {
      const Submitted& first = *group.begin()->second;
      for (const auto& [rank, submitted] : group) {
        ASSERT_EQ(StatusOf(*submitted->request).ToString(), StatusOf(*first.request).ToString())
            << "\"" << first.item.name << "\", place " << place << ", ranks " << first.rank
            << " and " << rank;
        if (!StatusOf(*first.request).ok()) continue;
        ASSERT_EQ(submitted->result, first.result) << first.item.name << ", place " << place;
      }
    }
    for (size_t j = 0; j < users_[0].joins.size(); ++j) {
      for (const User& user : users_) {
        ASSERT_TRUE(StatusOf(*user.joins[j]).ok());
        ASSERT_EQ(user.joins[j]->value(), users_[0].joins[j]->value());
      }
    }
    for (int rank = 0; rank < program_.num_ranks; ++rank) {
      ASSERT_EQ(cluster_[rank].fatal(), "");
      for (int set = 0; set <= static_cast<int>(program_.sets.size()); ++set) {
        const std::vector<int> members = program_.Members(set);
        if (std::find(members.begin(), members.end(), rank) == members.end()) continue;
        Lane& lane = cluster_[rank].lane(set);
        ASSERT_FALSE(lane.busy()) << "rank " << rank << ", set " << set;
        ASSERT_FALSE(lane.executor().busy()) << "rank " << rank << " keeps a batch";
        ASSERT_EQ(lane.num_unread(), 0u) << "rank " << rank << " keeps messages";
      }
    }
  }

  Random random_;
  const bool prints_;
  size_t steps_ = 0;
  const Program program_;
  FakeCluster cluster_;
  std::map<int, std::deque<Move>> scripts_;
  std::vector<User> users_;
  std::vector<std::unique_ptr<Submitted>> all_;
  std::map<const RequestState*, Submitted*> by_request_;
  bool faulty_ = false;
};

unsigned FromEnvironment(const char* name, unsigned otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
}

TEST(LaneRandomTest, EveryRequestEndsOnceAndEqualOnAllRanks) {
  const bool alone = std::getenv("DAD_LANE_SEED") != nullptr;
  const unsigned first = FromEnvironment("DAD_LANE_SEED", 1);
  const unsigned count = alone ? 1 : FromEnvironment("DAD_LANE_SEEDS", 400);
  for (unsigned seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("DAD_LANE_SEED=" + std::to_string(seed));
    RandomRun(seed, alone).Run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace dad
