// Where the program around the core is: its main thread's line. The core cannot read that itself;
// the Python binding has a thread that waits here for questions and answers them. Thread-safe. A
// forked child has no reader until it starts one.
#pragma once

#include <functional>
#include <string>

#include "dad/export.h"

namespace dad {

struct ProgramPosition {
  std::string where;  // the line of the user's code: "train.py:31 in main"
  std::string stack;  // all lines, the innermost last
};

// Whether anybody reads the questions.
DAD_EXPORT bool HasProgramReader();
// Does not block. `done` is called by the reader's thread, or never.
DAD_EXPORT void AskProgramPosition(std::function<void(const ProgramPosition&)> done);

// The reader's thread: waits for the next question, and answers all that there are.
DAD_EXPORT void AwaitProgramQuestion();
DAD_EXPORT void TellProgramPosition(const ProgramPosition& position);

}  // namespace dad
