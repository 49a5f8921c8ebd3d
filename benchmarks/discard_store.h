// What the double of S3 (discard_server.cpp) keeps, what it reads of a request, and the wire that all
// connections share.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace discard {

constexpr std::size_t kWireBytes = 256 << 10;  // that go through a slow wire at once

// One direction of a wire that all connections share.
class Wire {
 public:
  // Returns how many bytes go at once; then `pass` them.
  std::size_t most(std::size_t size) const {
    return bytes_per_s_ > 0 ? std::min(size, kWireBytes) : size;
  }

  // Sleeps until these bytes are through. Who wakes up late makes up for a millisecond of it.
  void pass(std::size_t size) {
    if (bytes_per_s_ <= 0) return;
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> taken(static_cast<double>(size) / bytes_per_s_);
    Clock::time_point until;
    {
      const std::lock_guard held(lock_);
      free_ = std::max(free_, Clock::now() - std::chrono::milliseconds(1)) +
              std::chrono::duration_cast<Clock::duration>(taken);
      until = free_;
    }
    std::this_thread::sleep_until(until);
  }

  void set(double bytes_per_s) { bytes_per_s_ = bytes_per_s; }

 private:
  std::mutex lock_;
  std::chrono::steady_clock::time_point free_;
  double bytes_per_s_ = 0;  // 0: no limit
};

inline Wire up, down;

struct Blob {
  std::size_t size = 0;
  std::string data, tail;  // all of it, or both ends; between them it was thrown away
};

struct Object {
  std::string etag;
  std::time_t modified = 0;
  std::size_t size = 0;
  std::vector<std::shared_ptr<Blob>> parts;
};

using Upload = std::map<int, std::shared_ptr<Blob>>;

inline std::mutex lock;  // of all below
inline std::map<std::string, Object> objects;  // "bucket/key" →
inline std::map<std::string, Upload> uploads;
inline std::map<std::string, std::uint64_t> counts;
inline std::uint64_t sent_bytes = 0, next_number = 1;

struct Request {
  std::string method, path, query;
  std::map<std::string, std::string> headers;  // names in lower case
  std::shared_ptr<Blob> body;

  std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? "" : found->second;
  }
  bool asks(std::string_view name) const {  // whether the query has a key
    const auto text = "&" + query;
    const auto at = text.find("&" + std::string(name));
    const auto end = at + 1 + name.size();
    return at != std::string::npos && (end == text.size() || text[end] == '=' || text[end] == '&');
  }
  std::string value(std::string_view name) const;
};

inline std::string unquoted(std::string_view text) {
  std::string made;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      made += static_cast<char>(std::stoi(std::string(text.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    } else {
      made += text[i] == '+' ? ' ' : text[i];
    }
  }
  return made;
}

inline std::string Request::value(std::string_view name) const {
  const auto text = "&" + query;
  const auto sought = "&" + std::string(name) + "=";
  const auto at = text.find(sought);
  if (at == std::string::npos) return "";
  const auto begin = at + sought.size();
  return unquoted(std::string_view(text).substr(begin, text.find('&', begin) - begin));
}

inline std::string time_text(std::time_t when, const char* format) {
  char text[64];
  std::tm parts{};
  gmtime_r(&when, &parts);
  return {text, std::strftime(text, sizeof text, format, &parts)};
}

}  // namespace discard
