// The entropy coder of holdfast beside that of htscodecs (rANS 4x16 and 32x16 of order 0, by J.
// Bonfield, which CRAM uses), on the exponents of f32: size, and GB/s of symbols in one thread.
// `make build/core/.built`, `apt-get install libhtscodecs-dev` (holdfast does not use it), then
//
//   O="-O3 -std=c++20 -Icore/include -Icore/src -pthread"
//   g++ $O benchmarks/rans_peers.cpp build/core/libholdfast_core.a -lhtscodecs -o build/rans_peers
//   build/rans_peers
//
// With the name of a file of f32 as its argument it codes the exponents of those. Times are those
// of the thread, and of each piece the shortest counts: other programs disturb them little.
#include <htscodecs/rANS_static4x16.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "codec/codec_kernel.h"
#include "codec/entropy.h"

namespace {

using Bytes = std::vector<unsigned char>;

constexpr std::size_t kCount = 16 << 20;      // elements
constexpr std::size_t kPieceBytes = 1 << 20;  // what one call codes: the exponents of a chunk
constexpr int kRounds = 9;                    // the best one counts

struct Coder {
  std::string name;
  // Each returns the bytes that it wrote or read, 0 when it failed.
  std::size_t (*encode)(unsigned char* symbols, std::size_t count, unsigned char* out);
  std::size_t (*decode)(unsigned char* coded, std::size_t size, unsigned char* symbols,
                        std::size_t count);
};

template <int order>
std::size_t encode_by_htscodecs(unsigned char* symbols, std::size_t count, unsigned char* out) {
  auto size = rans_compress_bound_4x16(static_cast<unsigned>(count), order);
  const auto length = static_cast<unsigned>(count);
  return rans_compress_to_4x16(symbols, length, out, &size, order) == nullptr ? 0 : size;
}

std::size_t decode_by_htscodecs(unsigned char* coded, std::size_t size, unsigned char* symbols,
                                std::size_t count) {
  auto length = static_cast<unsigned>(count);
  const auto given = static_cast<unsigned>(size);
  return rans_uncompress_to_4x16(coded, given, symbols, &length) == nullptr ? 0 : size;
}

std::size_t encode_by_holdfast(unsigned char* symbols, std::size_t count, unsigned char* out) {
  return holdfast::encode_symbols({.data = symbols, .count = count}, out);
}

std::size_t decode_by_holdfast(unsigned char* coded, std::size_t size, unsigned char* symbols,
                               std::size_t count) {
  std::span<const std::uint8_t> left(coded, size);
  return holdfast::decode_symbols(left, {symbols, count}) ? size - left.size() : 0;
}

const Coder kCoders[] = {
    {"holdfast", encode_by_holdfast, decode_by_holdfast},
    {"htscodecs 32x16", encode_by_htscodecs<RANS_ORDER_X32>, decode_by_htscodecs},
    {"htscodecs 4x16", encode_by_htscodecs<0>, decode_by_htscodecs},
};

// The exponents of f32: their highest plane, as the codecs split them.
Bytes exponents_of(const std::vector<float>& data) {
  std::vector<Bytes> planes(4, Bytes(data.size()));
  std::uint8_t* const targets[] = {planes[0].data(), planes[1].data(), planes[2].data(),
                                   planes[3].data()};
  holdfast::best_codec_kernel().split(data.data(), data.size(), 4, true, targets);
  return planes[3];
}

double thread_s() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Figures {
  std::size_t coded_bytes = 0;
  double encode_s = 1e9;
  double decode_s = 1e9;
};

// Codes a piece and decodes it; keeps the shortest times.
void measure(const Coder& coder, unsigned char* symbols, std::size_t count, Figures& best) {
  static Bytes coded(2 * kPieceBytes + (1 << 16)), decoded(kPieceBytes);
  const double begin = thread_s();
  best.coded_bytes = coder.encode(symbols, count, coded.data());
  const double middle = thread_s();
  const std::size_t read = coder.decode(coded.data(), best.coded_bytes, decoded.data(), count);
  best.decode_s = std::min(best.decode_s, thread_s() - middle);
  best.encode_s = std::min(best.encode_s, middle - begin);
  if (read != 0 && std::memcmp(decoded.data(), symbols, count) == 0) return;
  std::fprintf(stderr, "%s does not give back what it was given\n", coder.name.c_str());
  std::exit(1);
}

void compare(Bytes symbols) {
  const std::size_t pieces = (symbols.size() + kPieceBytes - 1) / kPieceBytes;
  std::vector<std::array<Figures, std::size(kCoders)>> best(pieces);
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t piece = 0; piece < pieces; ++piece) {
      const std::size_t at = piece * kPieceBytes;
      const std::size_t count = std::min(kPieceBytes, symbols.size() - at);
      for (std::size_t i = 0; i < std::size(kCoders); ++i) {
        measure(kCoders[i], &symbols[at], count, best[piece][i]);
      }
    }
  }
  for (std::size_t i = 0; i < std::size(kCoders); ++i) {
    Figures sum{0, 0, 0};
    for (const auto& figures : best) {
      sum.coded_bytes += figures[i].coded_bytes;
      sum.encode_s += figures[i].encode_s;
      sum.decode_s += figures[i].decode_s;
    }
    const auto bytes = static_cast<double>(symbols.size());
    std::printf("| %s | %.2f %% | %.2f | %.2f |\n", kCoders[i].name.c_str(),
                100 * static_cast<double>(sum.coded_bytes) / bytes, bytes / sum.encode_s / 1e9,
                bytes / sum.decode_s / 1e9);
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::pair<std::string, std::vector<float>>> all;
  if (count > 1) {
    std::ifstream file(arguments[1], std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    all.push_back({arguments[1], std::vector<float>(bytes.size() / 4)});
    std::memcpy(all[0].second.data(), bytes.data(), bytes.size() / 4 * 4);
  } else {
    std::vector<float> weights(kCount), moments(kCount);
    for (float& weight : weights) weight = 0.02F * normal(random);
    for (float& moment : moments) moment = 1e-4F * std::exp(2 * normal(random)) * normal(random);
    all = {{"weights: normal", weights}, {"moments: normal, of log-normal scale", moments}};
  }
  for (const auto& [name, data] : all) {
    std::printf("\n%s, %zu f32\n| coder | size | encode GB/s | decode GB/s |\n|---|---|---|---|\n",
                name.c_str(), data.size());
    compare(exponents_of(data));
  }
}
