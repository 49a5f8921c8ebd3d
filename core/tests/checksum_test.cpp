#include "holdfast/checksum.h"

#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "hash/cpu.h"
#include "hash/checksum_variants.h"

namespace holdfast {
namespace {

constexpr std::uint64_t kPrime64 = 0x9E3779B185EBCA8D;  // the generator of xxhsum's own checks

struct Known {
  std::size_t size;
  std::uint64_t plain, seeded;  // XXH3-64 with seed 0 and kPrime64
  std::uint64_t low, high;      // XXH3-128 with seed 0
};

// Over the first bytes of xxhsum's sanity buffer; computed with libxxhash by another binding.
constexpr Known kKnown[] = {
    {0, 0x2D06800538D394C2, 0xA8A6B918B2F0364A, 0x6001C324468D497F, 0x99AA06D3014798D8},
    {1, 0xC44BDFF4074EECDB, 0x032BE332DD766EF8, 0xC44BDFF4074EECDB, 0xA6CD5E9392000F6A},
    {6, 0x27B56A84CD2D7325, 0x84589C116AB59AB9, 0x3E7039BDDA43CFC6, 0x082AFE0B8162D12A},
    {12, 0xA713DAF0DFBB77E7, 0xE7303E1B2336DE0E, 0x061A192713F69AD9, 0x6E3EFD8FC7802B18},
    {24, 0xA3FE70BF9D3510EB, 0x850E80FC35BDD690, 0x1E7044D28B1B901D, 0x0CE966E4678D3761},
    {48, 0x397DA259ECBA1F11, 0xADC2CBAA44ACC616, 0xF942219AED80F67B, 0xA002AC4E5478227E},
    {80, 0xBCDEFBBB2C47C90A, 0xC6DD0CB699532E73, 0x454AE6BF7A8A532D, 0xFDF2CEFDE9EAAC8A},
    {195, 0xCD94217EE362EC3A, 0xBA68003D370CB3D9, 0x3FB593C086A66075, 0x7729543A26B207EE},
    {241, 0xC5A639ECD2030E5E, 0xDDA9B0A161D4829A, 0xC5A639ECD2030E5E, 0x99A80ECF0ECFC647},
    {403, 0xCDEB804D65C6DEA4, 0x6259F6ECFD6443FD, 0xCDEB804D65C6DEA4, 0x1B6DE21E332DD73D},
    {512, 0x617E49599013CB6B, 0x3CE457DE14C27708, 0x617E49599013CB6B, 0x18D2D110DCC9BCA1},
    {1024, 0xDD85C9B5C1109C5C, 0xEF368A8A2EBABAEF, 0xDD85C9B5C1109C5C, 0x0D30D24071C64C57},
    {1025, 0xD870C0FA13211C6A, 0x96792BCF9AF88519, 0xD870C0FA13211C6A, 0xFD3EE4FE7F2954C6},
    {2048, 0xDD59E2C3A5F038E0, 0x66F81670669ABABC, 0xDD59E2C3A5F038E0, 0xF736557FD47073A5},
    {2240, 0x6E73A90539CF2948, 0x757BA8487D1B5247, 0x6E73A90539CF2948, 0xCCB134FBFA7CE49D},
    {2367, 0xCB37AEB9E5D361ED, 0xD2DB3415B942B42A, 0xCB37AEB9E5D361ED, 0xE89C0F6FF369B427},
};

std::vector<unsigned char> sanity_buffer() {
  std::vector<unsigned char> bytes(2367);
  std::uint64_t state = 2654435761;
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(state >> 56);
    state *= kPrime64;
  }
  return bytes;
}

Hash128 hash_of(std::uint64_t low, std::uint64_t high) {
  Hash128 bytes;
  std::memcpy(bytes.data(), &low, 8);
  std::memcpy(bytes.data() + 8, &high, 8);
  return bytes;
}

std::vector<unsigned char> random_bytes(std::size_t size) {
  std::mt19937_64 random(size);
  std::vector<unsigned char> bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

void check_copy(const ChecksumKernel& kernel, const std::vector<unsigned char>& source,
                std::size_t misaligned) {
  const std::size_t size = source.size();
  std::vector<unsigned char> memory(size + 256, 0xee);
  const auto base = (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  unsigned char* target = memory.data() + base + misaligned;
  const Digest got = kernel.digest(target, source.data(), size, 77);
  CHECK_EQ(got.xxh3_64, kernel.hash_64(source.data(), size, 77));
  CHECK(got.xxh3_128 == kernel.hash_128(source.data(), size));
  CHECK(size == 0 || std::memcmp(target, source.data(), size) == 0);
  CHECK_EQ(int{target[size]}, 0xee);
  if (target > memory.data()) CHECK_EQ(int{target[-1]}, 0xee);
  std::memset(target, 0xdd, size);
  CHECK(kernel.copy_to_cache(target, source.data(), size) == got.xxh3_128);
  CHECK(size == 0 || std::memcmp(target, source.data(), size) == 0);
  CHECK_EQ(int{target[size]}, 0xee);
}

}  // namespace

TEST(the_fastest_variant_of_this_machine_is_chosen) {
  std::fprintf(stderr, "  %s\n", checksum_kernels().front().name);
  CHECK_EQ(std::string(checksum_kernels().back().name), "baseline");
}

TEST(every_variant_gives_the_known_answers) {
  const auto bytes = sanity_buffer();
  for (const ChecksumKernel& kernel : checksum_kernels()) {
    for (const Known& known : kKnown) {
      const Hash128 wide = hash_of(known.low, known.high);
      CHECK_EQ(kernel.hash_64(bytes.data(), known.size, 0), known.plain);
      CHECK_EQ(kernel.hash_64(bytes.data(), known.size, kPrime64), known.seeded);
      CHECK(kernel.hash_128(bytes.data(), known.size) == wide);
      const Digest digest = kernel.digest(nullptr, bytes.data(), known.size, kPrime64);
      CHECK_EQ(digest.xxh3_64, known.seeded);
      CHECK(digest.xxh3_128 == wide);
      CHECK_EQ(kernel.digest(nullptr, bytes.data(), known.size, 0).xxh3_64, known.plain);
    }
  }
}

TEST(every_variant_digests_every_length_in_one_pass_like_the_two_hashes) {
  for (const ChecksumKernel& kernel : checksum_kernels()) {
    const auto bytes = random_bytes(4200);
    for (std::size_t size = 0; size <= 4200; size += size < 1200 ? 1 : 7) {
      const Digest got = kernel.digest(nullptr, bytes.data(), size, size);
      CHECK_EQ(got.xxh3_64, kernel.hash_64(bytes.data(), size, size));
      CHECK(got.xxh3_128 == checksum_kernels().back().hash_128(bytes.data(), size));
    }
  }
}

TEST(every_variant_copies_and_digests_the_copy) {
  constexpr std::size_t kSizes[] = {0,         1,
                                    63,        240,
                                    241,       1023,
                                    1024,      1025,
                                    4096,      (256 << 10) - 1,
                                    256 << 10, (256 << 10) + 1,
                                    1 << 20,   (1 << 20) + 63};
  for (const ChecksumKernel& kernel : checksum_kernels()) {
    for (const std::size_t size : kSizes) {
      const auto source = random_bytes(size);
      for (const std::size_t misaligned : {0, 1, 16, 32}) check_copy(kernel, source, misaligned);
    }
  }
}

TEST(every_variant_copies_what_lies_there_and_no_more) {
  for (const ChecksumKernel& kernel : checksum_kernels()) {
    for (const std::size_t size : {0, 1, 4095, 256 << 10, (256 << 10) + 1, 300001, 1 << 20}) {
      const auto source = random_bytes(size + 3);
      for (const std::size_t shift : {0, 1, 3}) {
        std::vector<unsigned char> target(size + 8, 0xee);
        kernel.copy(target.data() + shift, source.data() + shift, size);
        CHECK(size == 0 || std::memcmp(target.data() + shift, source.data() + shift, size) == 0);
        CHECK_EQ(int{target[shift + size]}, 0xee);
        if (shift > 0) CHECK_EQ(int{target[shift - 1]}, 0xee);
      }
    }
  }
}

TEST(the_public_functions_agree_with_the_variants) {
  const auto bytes = random_bytes(300000);
  const ChecksumKernel& baseline = checksum_kernels().back();
  CHECK_EQ(xxh3_64(bytes.data(), bytes.size(), 5), baseline.hash_64(bytes.data(), bytes.size(), 5));
  CHECK(xxh3_128(bytes.data(), bytes.size()) == baseline.hash_128(bytes.data(), bytes.size()));
  std::vector<unsigned char> target(bytes.size());
  const Digest copied = copy_and_hash_chunk(target.data(), bytes.data(), bytes.size(), 5);
  const Digest hashed = hash_chunk(bytes.data(), bytes.size(), 5);
  CHECK(target == bytes);
  CHECK_EQ(copied.xxh3_64, hashed.xxh3_64);
  CHECK(copied.xxh3_128 == hashed.xxh3_128);
  std::vector<unsigned char> near(bytes.size());
  CHECK(copy_to_cache_and_hash(near.data(), bytes.data(), bytes.size()) == hashed.xxh3_128);
  CHECK(near == bytes);
  std::vector<unsigned char> again(bytes.size());
  copy_chunk(again.data(), bytes.data(), bytes.size());
  CHECK(again == bytes);
}

TEST(samples_reach_from_the_first_byte_to_the_last) {
  constexpr std::size_t kItem = 8, kCount = 5, kRun = 16;
  for (const std::size_t size : {16, 24, 200, 1000}) {
    auto bytes = random_bytes(size);
    std::vector<unsigned char> expected(kCount * kRun);
    for (std::size_t i = 0; i < kCount; ++i) {
      const std::size_t begin = i * ((size - kRun) / kItem) / (kCount - 1) * kItem;
      std::memcpy(expected.data() + i * kRun, bytes.data() + begin, kRun);
    }
    const auto found = hash_samples(bytes.data(), size, kItem, kCount, kRun);
    CHECK(found == xxh3_128(expected.data(), expected.size()));
    for (const std::size_t at : {std::size_t{0}, size - 1}) {
      bytes[at] ^= 1;
      CHECK(hash_samples(bytes.data(), size, kItem, kCount, kRun) != found);
      bytes[at] ^= 1;
    }
  }
}

#if defined(__x86_64__) && !defined(__clang__)
TEST(the_processor_is_seen_as_the_compiler_s_library_sees_it) {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2");
  CHECK(instruction_set() == std::string(avx512 ? "AVX-512" : avx2 ? "AVX2" : "baseline"));
  CHECK(checksum_kernels().size() == std::size_t{1} + avx2 + avx512);
}
#endif

#ifdef __x86_64__
TEST(the_environment_names_the_widest_instructions_and_adds_none) {
  const Cpu cpu = detect_cpu();
  const auto check = [&cpu](const char* widest, bool avx2, bool avx512) {
    ::setenv("HOLDFAST_CPU", widest, 1);
    const Cpu found = detect_cpu();
    CHECK_EQ(found.avx2, avx2 && cpu.avx2);
    CHECK_EQ(found.avx512, avx512 && cpu.avx512);
    CHECK_EQ(std::string(instruction_set()), found.avx512  ? "AVX-512"
                                             : found.avx2 ? "AVX2"
                                                          : "baseline");
  };
  check("baseline", false, false);
  check("avx2", true, false);
  check("avx512", true, true);
  check("", true, true);
  ::unsetenv("HOLDFAST_CPU");
}
#endif

TEST(is_zero_sees_every_byte) {
  std::vector<unsigned char> bytes(1500, 0);
  CHECK(is_zero(bytes.data(), 0));
  for (const std::size_t size : {1, 255, 256, 257, 1500}) {
    CHECK(is_zero(bytes.data(), size));
    for (std::size_t at = 0; at < size; ++at) {
      bytes[at] = 0x80;
      CHECK(!is_zero(bytes.data(), size));
      bytes[at] = 0;
    }
  }
}

}  // namespace holdfast
