// The plan of one optimizer or tape, as its kernels see it.
//
// Which method a tensor goes by is decided while the graph runs: it depends on how many rows a
// batch has, on what other ranks saw, and on what a step ended with. Python decides
// (python/dad/tensorflow/board.py), and only when something has changed; in every other step the
// kernels read what it left here. A step begins with Begin(), which the op DadPlan calls before any
// exchange of the step.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dad/engine.h"
#include "dad/method.h"
#include "dad/status.h"

namespace dad_tensorflow {

// How one tensor is sent.
struct Way {
  bool by_layer = false;  // the method takes a layer, in factors or formed; else a plain tensor
  bool as_rows = false;   // by factors, where the graph has them
  int64_t most_rows = 0;  // with more of them this rank asks for a new plan
  bool keeps = false;     // what is kept between steps is kept without the loss scale
  dad::Method method;
};

// A weight, and the bias that may ride with it.
struct PairWays {
  Way weight;
  bool bias_rides = false;
  Way bias;               // else
  bool in_chain = false;  // its gradient comes out of a chain
};

// Layers that travel as one request, from the lowest to the top.
struct Chain {
  Way way;
  struct Member {
    int pair;
    bool passes;  // only hands its delta down
  };
  std::vector<Member> members;
};

// What a request ended with that a plan should know.
struct Note {
  int pair = 0;
  bool of_bias = false;
  int64_t value = 0;  // dad::Ticket::value()
};

class Board {
 public:
  explicit Board(int64_t id) : id_(id) {}

  // What Python is asked when a step cannot go on as the last one: returns when the board is set.
  // counts: rows, indexed rows and samples of each pair of the trace, the most there have been.
  using Planner = int (*)(int64_t board, int64_t trace, int64_t steps, const int64_t* counts,
                          int64_t num_counts);
  static void SetPlanner(Planner planner);

  // Begins a step. `done` is called at once, or from another thread when Python has planned.
  void Begin(int64_t trace, std::vector<int64_t> counts,
             std::function<void(const dad::Status&)> done);

  // Valid in a step. A pair that Python does not know goes dense.
  PairWays Ways(int pair) const;
  std::vector<Chain> Chains() const;
  void Add(Note note);
  // An exchange of the step was handed to the core, or its results are there.
  void Sent();
  void Received();
  // Whether the graph is to compare this step's replica.
  bool TakeCompare();
  // Ranks disagreed: before the next step they have to compare what they are about.
  void Part();
  // What was kept for the tensor of this name while it went another way: added to its next result,
  // the same on all ranks. Empty if there is nothing.
  std::vector<double> TakeReturned(const std::string& name);

  // For Python.
  void Set(std::vector<PairWays> ways, std::vector<Chain> chains, int64_t ask_at_step);
  void Fail(std::string message);
  std::vector<Note> TakeNotes();
  bool TakeParted();
  void AskAgain();
  void Compare();
  void Return(std::string name, std::vector<double> values);
  // The exposed time of all steps but the current one: from the last exchange that was sent to the
  // last result. The optimizer waits for all results of a step, and nothing is sent any more.
  double ExposedSeconds() const;

 private:
  bool MustAsk() const;  // needs mutex_

  const int64_t id_;
  mutable std::mutex mutex_;
  std::vector<PairWays> ways_;
  std::vector<Chain> chains_;
  std::vector<Note> notes_;
  std::map<std::string, std::vector<double>> returned_;
  std::string failure_;
  std::map<int64_t, std::vector<int64_t>> most_counts_;  // of each trace
  int64_t steps_ = 0;                                    // that have begun
  int64_t ask_at_step_ = 0;  // negative: not because of the number of steps
  std::chrono::steady_clock::time_point last_sent_;
  std::chrono::steady_clock::time_point last_received_;
  std::chrono::duration<double> exposed_{0.0};
  bool ask_ = true;
  bool parted_ = false;
  bool compare_ = false;
  // For which the ways were made. Not its address: the next engine may have the same.
  std::weak_ptr<dad::Engine> engine_;
  int64_t joins_ = 0;  // when they were
};

// Null if Python has dropped it.
std::shared_ptr<Board> FindBoard(int64_t id);

}  // namespace dad_tensorflow
