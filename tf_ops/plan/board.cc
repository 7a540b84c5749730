#include "tf_ops/plan/board.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <utility>

#include "dad/engine.h"
#include "tf_ops/kernels/completion.h"

namespace dad_tensorflow {

using dad::Status;

namespace {

std::atomic<Board::Planner> the_planner{nullptr};

struct Boards {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<Board>> by_id;
  int64_t last_id = 0;
};

Boards& AllBoards() {
  static auto* boards = new Boards;
  return *boards;
}

}  // namespace

std::shared_ptr<Board> FindBoard(int64_t id) {
  Boards& boards = AllBoards();
  std::lock_guard lock(boards.mutex);
  const auto found = boards.by_id.find(id);
  return found == boards.by_id.end() ? nullptr : found->second;
}

void Board::SetPlanner(Planner planner) { the_planner = planner; }

bool Board::MustAsk() const {
  return ask_ || steps_ == ask_at_step_ || joins_ != dad::ProcessJoins() ||
         engine_.lock() != dad::ProcessEngine();
}

void Board::Begin(int64_t trace, std::vector<int64_t> counts,
                  std::function<void(const Status&)> done) {
  int64_t step = 0;
  bool must_ask = false;
  {
    std::lock_guard lock(mutex_);
    must_ask = MustAsk();
    step = steps_++;
    if (last_received_ > last_sent_) exposed_ += last_received_ - last_sent_;
    last_sent_ = last_received_ = {};
    // A plan that holds for the largest batch is not made anew with every other one.
    std::vector<int64_t>& most = most_counts_[trace];
    most.resize(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) most[i] = std::max(most[i], counts[i]);
    if (must_ask) counts = most;
  }
  if (!must_ask) return done(Status::Ok());
  // Python waits for other ranks, and for its own lock: not on a thread of TensorFlow's pools.
  RunLater([this, self = FindBoard(id_), trace, step, counts = std::move(counts),
            done = std::move(done)] {
    const Planner planner = the_planner;
    Status status = Status::FailedPrecondition("the optimizer or tape of this step is gone");
    if (self && planner != nullptr) {
      const int code =
          planner(id_, trace, step, counts.data(), static_cast<int64_t>(counts.size()));
      std::lock_guard lock(mutex_);
      const std::string why = std::exchange(failure_, "");
      parted_ = parted_ || code == 1;
      status = code == 0     ? Status::Ok()
               : code == 1   ? Status::FailedPrecondition(why)
               : why.empty() ? Status::Internal("the planner failed")
                             : Status::Internal(why);
    }
    done(status);
  });
}

PairWays Board::Ways(int pair) const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(pair) < ways_.size() ? ways_[static_cast<size_t>(pair)] : PairWays();
}

std::vector<Chain> Board::Chains() const {
  std::lock_guard lock(mutex_);
  return chains_;
}

void Board::Add(Note note) {
  std::lock_guard lock(mutex_);
  notes_.push_back(note);
  ask_ = true;  // all ranks have the same note
}

void Board::Sent() {
  std::lock_guard lock(mutex_);
  last_sent_ = std::chrono::steady_clock::now();
}

void Board::Received() {
  std::lock_guard lock(mutex_);
  last_received_ = std::chrono::steady_clock::now();
}

double Board::ExposedSeconds() const {
  std::lock_guard lock(mutex_);
  return exposed_.count();
}

void Board::Part() {
  std::lock_guard lock(mutex_);
  parted_ = true;
  ask_ = true;
}

bool Board::TakeParted() {
  std::lock_guard lock(mutex_);
  return std::exchange(parted_, false);
}

void Board::Set(std::vector<PairWays> ways, std::vector<Chain> chains, int64_t ask_at_step) {
  std::lock_guard lock(mutex_);
  ways_ = std::move(ways);
  chains_ = std::move(chains);
  ask_at_step_ = ask_at_step;
  ask_ = false;
  engine_ = dad::ProcessEngine();
  joins_ = dad::ProcessJoins();
}

void Board::Fail(std::string message) {
  std::lock_guard lock(mutex_);
  failure_ = std::move(message);
}

std::vector<Note> Board::TakeNotes() {
  std::lock_guard lock(mutex_);
  return std::exchange(notes_, {});
}

void Board::AskAgain() {
  std::lock_guard lock(mutex_);
  ask_ = true;
}

void Board::Compare() {
  std::lock_guard lock(mutex_);
  compare_ = true;
}

bool Board::TakeCompare() {
  std::lock_guard lock(mutex_);
  return std::exchange(compare_, false);
}

void Board::Return(std::string name, std::vector<double> values) {
  std::lock_guard lock(mutex_);
  returned_[std::move(name)] = std::move(values);
}

std::vector<double> Board::TakeReturned(const std::string& name) {
  std::lock_guard lock(mutex_);
  const auto found = returned_.find(name);
  if (found == returned_.end()) return {};
  std::vector<double> values = std::move(found->second);
  returned_.erase(found);
  return values;
}

}  // namespace dad_tensorflow

// What python/dad/tensorflow/board.py calls.
namespace {

using dad_tensorflow::Board;
using dad_tensorflow::Chain;
using dad_tensorflow::Note;
using dad_tensorflow::PairWays;
using dad_tensorflow::Way;

// As python/dad/tensorflow/board_structs.py has them, which compares the sizes.
struct PyWay {
  const char* method;
  int64_t most_rows;
  bool by_layer, as_rows, keeps;
};
struct PyPairWays {
  PyWay weight, bias;
  bool bias_rides, in_chain;
};
struct PyMember {
  int64_t pair;
  bool passes;
};
struct PyChain {
  PyWay way;
  const PyMember* members;
  int64_t num_members;
};
struct PyNote {
  int64_t pair, value;
  bool of_bias;
};

Way WayOf(const PyWay& from) {
  Way way;
  way.method = from.method;
  way.most_rows = from.most_rows;
  way.by_layer = from.by_layer;
  way.as_rows = from.as_rows;
  way.keeps = from.keeps;
  return way;
}

}  // namespace

#define DAD_FOR_PYTHON extern "C" __attribute__((visibility("default")))

DAD_FOR_PYTHON int64_t dad_tf_new_board() {
  auto& boards = dad_tensorflow::AllBoards();
  std::lock_guard lock(boards.mutex);
  const int64_t id = ++boards.last_id;
  boards.by_id[id] = std::make_shared<Board>(id);
  return id;
}

DAD_FOR_PYTHON void dad_tf_drop_board(int64_t id) {
  auto& boards = dad_tensorflow::AllBoards();
  std::lock_guard lock(boards.mutex);
  boards.by_id.erase(id);
}

DAD_FOR_PYTHON void dad_tf_set_planner(Board::Planner planner) { Board::SetPlanner(planner); }

// Of PyPairWays, PyChain, PyMember and PyNote.
DAD_FOR_PYTHON void dad_tf_struct_sizes(int64_t sizes[4]) {
  sizes[0] = sizeof(PyPairWays);
  sizes[1] = sizeof(PyChain);
  sizes[2] = sizeof(PyMember);
  sizes[3] = sizeof(PyNote);
}

DAD_FOR_PYTHON void dad_tf_set_board(int64_t id, const PyPairWays* pairs, int64_t num_pairs,
                                     const PyChain* chains, int64_t num_chains,
                                     int64_t ask_at_step) {
  const auto board = dad_tensorflow::FindBoard(id);
  if (!board) return;
  std::vector<PairWays> ways;
  for (const PyPairWays& pair : std::span(pairs, static_cast<size_t>(num_pairs))) {
    ways.push_back({WayOf(pair.weight), pair.bias_rides, WayOf(pair.bias), pair.in_chain});
  }
  std::vector<Chain> all;
  for (const PyChain& from : std::span(chains, static_cast<size_t>(num_chains))) {
    Chain& chain = all.emplace_back();
    chain.way = WayOf(from.way);
    for (const PyMember& one : std::span(from.members, static_cast<size_t>(from.num_members))) {
      chain.members.push_back({static_cast<int>(one.pair), one.passes});
    }
  }
  board->Set(std::move(ways), std::move(all), ask_at_step);
}

DAD_FOR_PYTHON void dad_tf_fail_board(int64_t id, const char* message) {
  if (const auto board = dad_tensorflow::FindBoard(id)) board->Fail(message);
}

DAD_FOR_PYTHON int dad_tf_take_parted(int64_t id) {
  const auto board = dad_tensorflow::FindBoard(id);
  return board && board->TakeParted() ? 1 : 0;
}

DAD_FOR_PYTHON double dad_tf_exposed_seconds(int64_t id) {
  const auto board = dad_tensorflow::FindBoard(id);
  return board ? board->ExposedSeconds() : 0.0;
}

DAD_FOR_PYTHON void dad_tf_ask_again(int64_t id) {
  if (const auto board = dad_tensorflow::FindBoard(id)) board->AskAgain();
}

DAD_FOR_PYTHON void dad_tf_compare(int64_t id) {
  if (const auto board = dad_tensorflow::FindBoard(id)) board->Compare();
}

DAD_FOR_PYTHON void dad_tf_return(int64_t id, const char* name, const double* values,
                                  int64_t count) {
  if (const auto board = dad_tensorflow::FindBoard(id))
    board->Return(name, {values, values + count});
}

// At most `most` of them; how many.
DAD_FOR_PYTHON int64_t dad_tf_take_notes(int64_t id, PyNote* notes, int64_t most) {
  const auto board = dad_tensorflow::FindBoard(id);
  if (!board) return 0;
  int64_t count = 0;
  for (const Note& note : board->TakeNotes()) {
    if (count == most) break;
    notes[count++] = {note.pair, note.value, note.of_bias};
  }
  return count;
}

DAD_FOR_PYTHON int64_t dad_tf_num_joins() { return dad::ProcessJoins(); }
