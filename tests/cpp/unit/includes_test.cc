// Reads the include lines of dad_core and checks who includes whom, as
// ARCHITECTURE.md says. The compiler cannot: inside the core all rooms share one
// include directory.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>

namespace {

namespace fs = std::filesystem;

using Rooms = std::set<std::string>;

// What the files of a room may include, besides their own room. "dad" is include/dad.
const std::map<std::string, Rooms> kMayInclude = {
    {"include", {"dad"}},
    {"util", {"dad"}},
    {"device", {"dad", "util"}},
    {"linalg", {"dad", "util"}},
    {"codec", {"dad", "util", "linalg"}},
    {"wire", {"dad", "util", "codec", "linalg"}},
    {"exchange", {"dad", "util", "device", "codec", "linalg", "wire"}},
    {"rendezvous", {"dad", "util", "wire", "linalg", "codec"}},
    {"transport", {"dad", "util", "device", "wire", "linalg", "codec", "rendezvous"}},
    {"runtime",
     {"dad", "util", "device", "codec", "linalg", "wire", "exchange", "transport", "rendezvous"}},
};

bool IsSource(const fs::path& path) {
  return path.extension() == ".h" || path.extension() == ".cc";
}

std::string RoomOf(const fs::path& relative) { return relative.begin()->string(); }

// Calls visit(file, included room) for every #include "room/..." below `root`.
template <typename Visit>
void ForEachInclude(const fs::path& root, const Visit& visit) {
  static const std::regex kInclude("^\\s*#\\s*include\\s+\"([a-z_]+)/[^\"]*\".*");
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file() || !IsSource(entry.path())) continue;
    std::ifstream file(entry.path());
    std::string line;
    std::smatch match;
    while (std::getline(file, line)) {
      if (std::regex_match(line, match, kInclude)) visit(entry.path(), match[1].str(), line);
    }
  }
}

TEST(IncludesTest, RoomsOfTheCoreIncludeOnlyWhatTheyMay) {
  const fs::path core = fs::path(DAD_SOURCE_DIR) / "dad_core";
  int seen = 0;
  ForEachInclude(
      core, [&](const fs::path& file, const std::string& target, const std::string& line) {
        ++seen;
        const fs::path relative = fs::relative(file, core);
        const std::string room = RoomOf(relative);
        const auto rule = kMayInclude.find(room);
        ASSERT_NE(rule, kMayInclude.end()) << relative << ": a room that the rules do not know";
        const bool a_room = target == "dad" || kMayInclude.count(target);  // else another library
        EXPECT_TRUE(!a_room || target == room || rule->second.count(target))
            << relative << ": " << line;
      });
  EXPECT_GT(seen, 0) << "no sources below " << core;
}

// The rooms inside exchange: a method or a collective stands on what all of them share.
TEST(IncludesTest, ExchangesDoNotKnowEachOther) {
  const fs::path room = fs::path(DAD_SOURCE_DIR) / "dad_core/exchange";
  static const std::regex kInclude("#include \"exchange/(collective|device|method/[a-z0-9_]+)/.*");
  int seen = 0;
  for (const char* part : {"collective", "method", "layer", "feedback", "share"}) {
    for (const auto& entry : fs::recursive_directory_iterator(room / part)) {
      if (!entry.is_regular_file() || !IsSource(entry.path())) continue;
      const std::string own = fs::relative(entry.path().parent_path(), room).string();
      std::ifstream file(entry.path());
      std::smatch match;
      for (std::string line; std::getline(file, line); ++seen) {
        if (!std::regex_match(line, match, kInclude)) continue;
        EXPECT_EQ(match[1].str(), own) << entry.path() << ": " << line;
      }
    }
  }
  EXPECT_GT(seen, 0);
}

// A new method must not need a change there: what it needs of the runtime is in its row.
TEST(IncludesTest, TheRuntimeAndTheOpsNameNoMethod) {
  const fs::path source = DAD_SOURCE_DIR;
  // Strings and names of headers; kInt8 is a type.
  static const std::regex kQuoted(
      "\"(exchange/)?(device/|method/)?(factor|low_rank|int8|sparse|qsgd|chunk_topk)[^\"]*\"");
  int seen = 0;
  const auto check = [&](const fs::path& path) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line); ++seen) {
      line = line.substr(0, line.find("//"));
      EXPECT_FALSE(std::regex_search(line, kQuoted)) << path << ": " << line;
    }
  };
  for (const char* folder : {"dad_core/runtime", "dad_core/wire", "tf_ops"}) {
    for (const auto& entry : fs::recursive_directory_iterator(source / folder)) {
      if (entry.is_regular_file() && IsSource(entry.path())) check(entry.path());
    }
  }
  check(source / "dad_core/exchange/factory.cc");
  EXPECT_GT(seen, 0);
}

TEST(IncludesTest, FrameworkOpsSeeOnlyThePublicHeaders) {
  for (const char* folder : {"torch_ops", "tf_ops", "python/bindings"}) {
    const fs::path root = fs::path(DAD_SOURCE_DIR) / folder;
    if (!fs::exists(root)) continue;
    ForEachInclude(root,
                   [&](const fs::path& file, const std::string& target, const std::string& line) {
                     const bool private_room = kMayInclude.count(target) != 0;
                     EXPECT_FALSE(private_room) << file << ": " << line;
                   });
  }
}

}  // namespace
