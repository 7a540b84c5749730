// The fuzz targets without a fuzzer: replays a corpus, then mutations of it, the same ones in
// every run. For machines without libFuzzer, and for `make test`.
//
//   dad_fuzz_replay CORPUS [TARGET...]        CORPUS/TARGET/* and mutations of them
//   dad_fuzz_replay --mutations=N CORPUS      N of each target; 3000 unless told
//   dad_fuzz_replay --write-seeds CORPUS      writes seeds of real encoders, runs nothing
//   dad_fuzz_replay --input=FILE TARGET       one input
//   dad_fuzz_replay --list                    names of targets
//
// An input that makes a target fail is left in the file dad_fuzz_failed.<target>.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <string_view>

#include "fuzz.h"

namespace dad::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLongest = 1 << 16;

// ---- what to leave behind

struct {
  char file[256];
  const std::byte* data;
  size_t size;
} running;

void LeaveInput(int number) {
  const int fd = open(running.file, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0) {
    const ssize_t written = write(fd, running.data, running.size);
    (void)written;
    close(fd);
  }
  signal(number, SIG_DFL);
  raise(number);
}

void Run(const Target& target, const Bytes& input) {
  // Memory of exactly this size, so that a sanitizer sees a read beyond it.
  const Bytes exact(input.begin(), input.end());
  std::snprintf(running.file, sizeof running.file, "dad_fuzz_failed.%s", target.name);
  running.data = exact.data();
  running.size = exact.size();
  RunTarget(target, exact);
}

// ---- inputs

Bytes ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// In the order of their names: the same mutations everywhere.
std::vector<Bytes> ReadFolder(const fs::path& folder) {
  std::set<fs::path> paths;
  if (fs::is_directory(folder)) {
    for (const auto& entry : fs::directory_iterator(folder)) paths.insert(entry.path());
  }
  std::vector<Bytes> inputs;
  for (const fs::path& path : paths) inputs.push_back(ReadFile(path));
  return inputs;
}

void WriteSeeds(const Target& target, const fs::path& folder) {
  fs::create_directories(folder);
  int number = 0;
  for (const Bytes& seed : target.seeds()) {
    char name[32];
    std::snprintf(name, sizeof name, "seed-%03d", number++);
    std::ofstream file(folder / name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()),
               static_cast<std::streamsize>(seed.size()));
  }
}

// ---- mutations

class Mutator {
 public:
  Mutator(const std::vector<Bytes>& inputs, std::string_view name)
      : inputs_(inputs), random_(static_cast<uint32_t>(name.size())) {
    for (const char c : name) random_.seed(random_() ^ static_cast<uint32_t>(c));
  }

  Bytes Next() {
    Bytes bytes = inputs_.empty() ? Bytes() : inputs_[Below(inputs_.size())];
    for (size_t i = 0, times = 1 + Below(5); i < times; ++i) Mutate(bytes);
    if (bytes.size() > kLongest) bytes.resize(kLongest);
    return bytes;
  }

 private:
  // Not a distribution of the library: those differ between libraries.
  size_t Below(size_t bound) { return bound == 0 ? 0 : random_() % bound; }

  void Mutate(Bytes& bytes) {
    const size_t at = Below(bytes.size() + 1);
    const size_t length = std::min(Below(17), bytes.size() - at);
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = place + static_cast<std::ptrdiff_t>(length);
    switch (Below(8)) {
      case 0:
        if (at < bytes.size()) bytes[at] ^= std::byte{1} << Below(8);
        return;
      case 1:
        if (at < bytes.size()) bytes[at] = static_cast<std::byte>(random_() & 0xff);
        return;
      case 2: {
        constexpr uint8_t kValues[] = {0, 1, 2, 0x7f, 0x80, 0xfe, 0xff};
        for (auto it = place; it != end; ++it) *it = std::byte{kValues[Below(7)]};
        return;
      }
      case 3: bytes.erase(place, end); return;
      case 4: bytes.insert(place, 1 + Below(16), static_cast<std::byte>(random_() & 0xff)); return;
      case 5: {
        const Bytes copy(place, end);
        const auto to = bytes.begin() + static_cast<std::ptrdiff_t>(Below(bytes.size() + 1));
        bytes.insert(to, copy.begin(), copy.end());
        return;
      }
      case 6: bytes.resize(at); return;
      case 7: {
        // The end of another.
        if (inputs_.empty()) return;
        const Bytes& other = inputs_[Below(inputs_.size())];
        bytes.resize(at);
        bytes.insert(bytes.end(),
                     other.begin() + static_cast<std::ptrdiff_t>(std::min(at, other.size())),
                     other.end());
        return;
      }
    }
  }

  const std::vector<Bytes>& inputs_;
  std::mt19937 random_;
};

void Replay(const Target& target, const fs::path& corpus, int mutations) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Bytes> inputs = ReadFolder(corpus / target.name);
  const size_t num_files = inputs.size();
  for (Bytes& seed : target.seeds()) inputs.push_back(std::move(seed));
  for (const Bytes& input : inputs) Run(target, input);
  Mutator mutator(inputs, target.name);
  for (int i = 0; i < mutations; ++i) Run(target, mutator.Next());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("fuzz: %-14s %4zu files, %3zu seeds, %d mutations: ok, %.1f s\n", target.name,
              num_files, inputs.size() - num_files, mutations, seconds.count());
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  int mutations = 3000;
  bool write_seeds = false;
  fs::path single;
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.starts_with("--mutations=")) {
      mutations = std::atoi(arg.c_str() + 12);
    } else if (arg.starts_with("--input=")) {
      single = arg.substr(8);
    } else if (arg == "--write-seeds") {
      write_seeds = true;
    } else if (arg == "--list") {
      for (const Target& target : Targets()) std::printf("%s\n", target.name);
      return 0;
    } else {
      words.push_back(arg);
    }
  }
  if (words.empty()) {
    std::fprintf(stderr, "usage: the head of tests/fuzz/standalone_main.cc\n");
    return 2;
  }
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, LeaveInput);
  const auto chosen = [&](const Target& target) {
    const auto names = words.begin() + (single.empty() ? 1 : 0);
    return names == words.end() || std::find(names, words.end(), target.name) != words.end();
  };
  for (const Target& target : Targets()) {
    if (!chosen(target)) continue;
    if (!single.empty()) {
      Run(target, ReadFile(single));
    } else if (write_seeds) {
      WriteSeeds(target, fs::path(words[0]) / target.name);
    } else {
      Replay(target, words[0], mutations);
    }
  }
  return 0;
}

}  // namespace
}  // namespace dad::fuzz

int main(int argc, char** argv) {
  std::sort(dad::fuzz::Targets().begin(), dad::fuzz::Targets().end(),
            [](const auto& a, const auto& b) { return std::string_view(a.name) < b.name; });
  return dad::fuzz::Main(argc, argv);
}
