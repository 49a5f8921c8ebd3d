// Runs a fuzz target without libFuzzer, built by any compiler: over the inputs of a corpus, and
// over so many random changes of them. Exit 1 where there is no corpus; a fault ends the process.
//
//   NAME_corpus FILE CHANGES SEED
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

// Each input behind its length, a u16.
std::vector<Bytes> corpus_in(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const Bytes all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<Bytes> inputs;
  for (std::size_t at = 0; at + 2 <= all.size();) {
    const std::size_t size = static_cast<std::size_t>(all[at] | all[at + 1] << 8);
    const std::size_t end = std::min(at + 2 + size, all.size());
    inputs.emplace_back(all.data() + at + 2, all.data() + end);
    at = end;
  }
  return inputs;
}

void run(const Bytes& input) {
  const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[input.size()]);
  std::copy(input.begin(), input.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
}

void change(Bytes& input, std::mt19937_64& random) {
  for (std::uint64_t left = 1 + random() % 4; left > 0 && !input.empty(); --left) {
    const auto at = static_cast<std::ptrdiff_t>(random() % input.size());
    switch (random() % 4) {
      case 0:
        input[static_cast<std::size_t>(at)] ^= static_cast<std::uint8_t>(1u << random() % 8);
        break;
      case 1:
        input[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(random());
        break;
      case 2:
        input.insert(input.begin() + at, static_cast<std::uint8_t>(random()));
        break;
      default:
        input.erase(input.begin() + at);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  const std::vector<Bytes> inputs = corpus_in(words[1]);
  const std::uint64_t changes = std::strtoull(words[2], nullptr, 10);
  std::mt19937_64 random(std::strtoull(words[3], nullptr, 10));
  for (const Bytes& input : inputs) run(input);
  for (std::uint64_t i = 0; i < changes && !inputs.empty(); ++i) {
    Bytes input = inputs[random() % inputs.size()];
    change(input, random);
    run(input);
  }
  std::printf("%zu inputs, %llu changed; seed %s\n", inputs.size(),
              static_cast<unsigned long long>(changes), words[3]);
  return inputs.empty() ? 1 : 0;
}
