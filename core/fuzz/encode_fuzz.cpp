// Whatever is encoded comes back; what is then changed in a payload never does more than fail.
#include <vector>

#include "holdfast/compact.h"
#include "holdfast/excp.h"
#include "holdfast/replay.h"
#include "input.h"

using namespace holdfast;

namespace {

// Elements to encode, and those of other tensors; each may be null but the first.
struct Tensors {
  fuzz::Memory data, base, square, moment, moment_base;

  const float* floats(const fuzz::Memory& memory) const {
    return reinterpret_cast<const float*>(memory.get());
  }
};

struct Made {
  Mode mode = Mode::kRaw;
  std::vector<std::uint8_t> payload;
  fuzz::Memory decoded;  // as the encoder says; null: the elements themselves
};

class Coder {
 public:
  explicit Coder(const fuzz::Input& input) : input_(input) {
    const std::size_t bytes = count_ * 8;
    own_.base = input.relative(1, bytes);
    own_.square = input.relative(2, bytes);
    own_.moment = input.relative(3, bytes);
    own_.moment_base = input.relative(4, bytes);
    own_.data = fuzz::Memory(new std::uint8_t[bytes]);
    const fuzz::Memory data = input.relative(0, bytes);
    if (data != nullptr) {
      std::memcpy(own_.data.get(), data.get(), bytes);
    } else {
      std::memset(own_.data.get(), 0, bytes);
    }
    for (std::size_t i = 0; own_.square != nullptr && i < count_; ++i) {
      own_.square[4 * i + 3] &= 0x7F;  // of a square
    }
    if (is_compact() && input.choice() % 7 == 2) {
      for (std::size_t i = 0; i < count_; ++i) own_.data[4 * i + 3] &= 0x7F;
    }
    if (!is_lossless()) elements_ = input.f32();
    if (input.choice() % 7 == 4) elements_ = halves_or_floats();
  }

  std::size_t bytes() const { return elements_.size_bytes(); }
  const std::uint8_t* data() const { return own_.data.get(); }
  const std::uint8_t* base() const { return own_.base.get(); }

  Made encode(const CodecKernel& kernel) const {
    Made made;
    switch (input_.choice() % 7) {
      case 0:
      case 1:
        return encode_lossless_of(kernel);
      case 2:
      case 3:
      case 4:
        return encode_compact_of(kernel);
      case 5:
        return encode_excp_of(kernel);
      default:
        break;
    }
    made.mode = replayed();
    made.payload.resize(replay_bytes_max(count_));
    made.payload.resize(encode_replay(made.mode, data(), count_, replay_relatives(base()),
                                      made.payload.data(), kernel));
    if (made.payload.empty()) made.mode = Mode::kRaw;
    return made;
  }

  bool decode(Mode mode, std::span<const std::uint8_t> payload, const std::uint8_t* base,
              std::uint8_t* target, const CodecKernel& kernel) const {
    switch (input_.choice() % 7) {
      case 0:
      case 1:
        return decode_lossless(mode, payload, elements_,
                               {own_.moment_base.get(), own_.square.get(), base}, target, kernel);
      case 2:
      case 3:
      case 4:
        return decode_compact(mode, payload, elements_,
                              {base, own_.floats(own_.square), own_.moment_base.get()}, target,
                              kernel);
      case 5:
        return decode_excp(role(), payload, count_, excp_relatives(base),
                           reinterpret_cast<float*>(target), kernel);
      default:
        return decode_replay(mode, payload, count_, replay_relatives(base), target, kernel);
    }
  }

 private:
  bool is_lossless() const { return input_.choice() % 7 < 2; }
  bool is_compact() const { return input_.choice() % 7 >= 2 && input_.choice() % 7 <= 4; }

  Elements halves_or_floats() const {
    const bool half = input_.elements().kind == Kind::kBf16 || input_.elements().kind == Kind::kF16;
    return half ? input_.elements() : input_.f32();
  }

  Made encode_lossless_of(const CodecKernel& kernel) const {
    Made made;
    made.payload.resize(lossless_bytes_max(elements_));
    const Relatives relatives = {own_.moment_base.get(), own_.square.get(), base()};
    const Encoded found =
        input_.choice() % 7 == 0
            ? encode_lossless(elements_, data(), relatives, made.payload.data(), kernel)
            : encode_as_difference(elements_, data(), base(), made.payload.data(), kernel);
    made.mode = found.mode;
    made.payload.resize(found.mode == Mode::kRaw ? 0 : found.size_bytes);
    return made;
  }

  Made encode_compact_of(const CodecKernel& kernel) const {
    Made made;
    made.payload.resize(compact_bytes_max(elements_));
    made.decoded = fuzz::Memory(new std::uint8_t[bytes()]);
    constexpr Bound kBounds[] = {Bound::kNone, Bound::kShare, Bound::kLargest, Bound::kBits,
                                 Bound::kBf16};
    const Steps steps = {0.1 * (1 + input_.extra(0) % 40), kBounds[input_.extra(1) % 5],
                         static_cast<double>(input_.extra(2)) / 64};
    const Reference reference = {base(), own_.floats(own_.square), own_.moment_base.get()};
    std::uint8_t* const out = made.payload.data();
    void* const decoded = made.decoded.get();
    Lossy found;
    if (input_.choice() % 7 == 2) {
      found = encode_means(elements_, data(), input_.extra(3) % 2 == 1, out, decoded, kernel);
    } else if (input_.choice() % 7 == 3 && own_.square != nullptr) {
      found = encode_moment(elements_, data(), {.step = input_.extra(0) / 32.0}, reference, out,
                            decoded, kernel);
    } else {
      found = encode_steps(elements_, data(), steps, reference, out, decoded, kernel);
    }
    made.mode = found.mode;
    made.payload.resize(found.mode == Mode::kRaw ? 0 : found.size_bytes);
    return made;
  }

  ExcpRole role() const { return static_cast<ExcpRole>(input_.extra(0) % 3); }
  ExcpRelatives excp_relatives(const std::uint8_t* base) const {
    return {base, own_.moment_base.get(), own_.moment.get()};
  }

  Made encode_excp_of(const CodecKernel& kernel) const {
    Made made;
    if (base() == nullptr || own_.square == nullptr || own_.moment == nullptr) return made;
    const ExcpPart part = {count_, own_.floats(own_.data), own_.floats(own_.base),
                           own_.floats(own_.moment), own_.floats(own_.square), nullptr};
    const unsigned way = input_.extra(1);
    const ExcpRule rule = {.per_element = (way & 1) != 0,
                           .half_centres = (way & 2) != 0,
                           .optimal = (way & 4) != 0};
    const ExcpSurvey survey = survey_excp({&part, 1}, rule, kernel);
    made.payload.resize(excp_bytes_max(count_));
    made.decoded = fuzz::Memory(new std::uint8_t[bytes()]);
    made.payload.resize(encode_excp(survey, role(), part, excp_relatives(base()),
                                    made.payload.data(),
                                    reinterpret_cast<float*>(made.decoded.get()), kernel));
    if (!made.payload.empty()) made.mode = Mode::kSteps;  // any but kRaw
    return made;
  }

  Mode replayed() const {
    return input_.extra(0) % 2 == 0 ? Mode::kReplayMoment : Mode::kReplayWeight;
  }
  ReplayRelatives replay_relatives(const std::uint8_t* base) const {
    return {base, own_.moment.get(), own_.moment_base.get(), own_.square.get()};
  }

  const fuzz::Input& input_;
  std::size_t count_ = input_.count();
  Elements elements_ = input_.elements();
  Tensors own_;
};

// Changes bytes as the rest of the input says: where (two bytes), and what is changed of it.
void change(std::vector<std::uint8_t>& payload, std::span<const std::uint8_t> how) {
  for (; how.size() >= 3 && !payload.empty(); how = how.subspan(3)) {
    payload[static_cast<std::size_t>(how[0] | how[1] << 8) % payload.size()] ^= how[2];
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  if (input.count() == 0) return 0;
  const Coder coder(input);
  Made made = coder.encode(input.kernel());
  const Made other = coder.encode(input.kernel(1));
  const bool same = other.mode == made.mode && other.payload == made.payload;
  fuzz::expect(same, "kernels encode otherwise");
  if (made.mode == Mode::kRaw) return 0;
  const std::uint8_t* expected = made.decoded != nullptr ? made.decoded.get() : coder.data();
  const auto decode = [&](const CodecKernel& kernel, const std::uint8_t* base,
                          std::uint8_t* target) {
    // Of exactly its bytes, so that reading behind it is seen.
    const fuzz::Memory payload(new std::uint8_t[made.payload.size()]);
    std::copy(made.payload.begin(), made.payload.end(), payload.get());
    return coder.decode(made.mode, {payload.get(), made.payload.size()}, base, target, kernel);
  };
  fuzz::decode_twice(input, coder.bytes(), coder.base(), input.in_place(),
                     [&](const CodecKernel& kernel, const std::uint8_t* base, std::uint8_t* to) {
                       const bool good = decode(kernel, base, to);
                       fuzz::expect(good, "what was encoded is refused");
                       fuzz::expect(std::memcmp(to, expected, coder.bytes()) == 0,
                                    "what was encoded comes back otherwise");
                       return good;
                     });
  change(made.payload, input.payload());
  fuzz::decode_twice(input, coder.bytes(), coder.base(), input.in_place(), decode);
  return 0;
}
