// A double of S3 for benchmarks: it costs its caller as little processor time as a server can.
//
//   g++ -std=c++20 -O2 -pthread -o discard_server benchmarks/discard_server.cpp && ./discard_server 9000
//
// Bodies of more than 1 MiB are thrown away in the kernel (MSG_TRUNC), but for the first and last
// 64 KiB, which a copy reads back. Those with a key below "kept/" stay in memory as they are, and a
// GET gives the same bytes. It keeps to conditions
// (If-None-Match, If-Match), lists, counts requests, and checks no signature and no checksum.
// GET /?counts gives what it counted since the last one, as JSON. A thread for each connection.
// A second argument is the bytes a second that all bodies together may take in each direction, as
// on a network card: "9000 1250000000" for 10 Gbit/s.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "discard_store.h"

namespace {

using namespace discard;

constexpr std::size_t kKeptBytesMax = 1 << 20;  // of a body that is kept anyway: MANIFEST, LATEST
constexpr std::size_t kEndBytes = 1 << 16;  // of one that is thrown away
constexpr std::size_t kHeadBytesMax = 1 << 16;
constexpr std::size_t kScratchBytes = 1 << 20;

class Connection {
 public:
  explicit Connection(int fd) : fd_(fd), scratch_(kScratchBytes) {}
  ~Connection() { close(fd_); }

  void serve() {
    Request request;
    while (read_head(request) && read_body(request)) answer(request);
  }

 private:
  bool read_head(Request& request) {
    std::size_t end;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos) {
      const auto got = recv(fd_, scratch_.data(), 8192, 0);
      if (got <= 0 || buffer_.size() > kHeadBytesMax) return false;
      buffer_.append(scratch_.data(), static_cast<std::size_t>(got));
    }
    const auto head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    request = Request();
    auto line = head.find("\r\n");
    const auto first = head.find(' '), second = head.find(' ', first + 1);
    request.method = head.substr(0, first);
    const auto target = head.substr(first + 1, second - first - 1);
    const auto mark = target.find('?');
    request.path = unquoted(std::string_view(target).substr(1, std::min(mark, target.size()) - 1));
    while (!request.path.empty() && request.path.back() == '/') request.path.pop_back();
    if (mark != std::string::npos) request.query = target.substr(mark + 1);
    for (auto at = line + 2; at < head.size(); at = line + 2) {
      line = head.find("\r\n", at);
      const auto colon = head.find(':', at);
      auto name = head.substr(at, colon - at);
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      const auto value = head.find_first_not_of(' ', colon + 1);
      request.headers[name] = head.substr(value, line - value);
    }
    return true;
  }

  bool read_body(Request& request) {
    request.body = std::make_shared<Blob>();
    const auto size = std::strtoull(request.header("content-length").c_str(), nullptr, 10);
    if (!request.header("expect").empty()) say("HTTP/1.1 100 Continue\r\n\r\n");
    const auto& path = request.path;
    const bool keeps = size <= kKeptBytesMax || path.find("/kept/") != std::string::npos;
    request.body->size = size;
    if (keeps) return read_into(request.body->data, size);
    if (!read_into(request.body->data, kEndBytes)) return false;
    auto left = size - 2 * kEndBytes;
    const auto had = std::min<std::size_t>(left, buffer_.size());
    buffer_.erase(0, had);
    left -= had;
    while (left > 0) {  // counted and forgotten: nothing is copied
      const auto most = up.most(std::min<std::size_t>(left, 64 << 20));
      const auto got = recv(fd_, scratch_.data(), most, MSG_TRUNC);
      if (got <= 0) return false;
      up.pass(static_cast<std::size_t>(got));
      left -= static_cast<std::size_t>(got);
    }
    return read_into(request.body->tail, kEndBytes);
  }

  // Reads the next bytes of a body.
  bool read_into(std::string& target, std::size_t size) {
    target.resize(size);
    const auto had = std::min(size, buffer_.size());
    std::memcpy(target.data(), buffer_.data(), had);
    buffer_.erase(0, had);
    for (auto at = had; at < size;) {
      const auto got = recv(fd_, target.data() + at, up.most(size - at), 0);
      if (got <= 0) return false;
      up.pass(static_cast<std::size_t>(got));
      at += static_cast<std::size_t>(got);
    }
    return true;
  }

  void answer(Request& request) {
    if (request.asks("counts")) return reply(200, counted());
    const auto slash = request.path.find('/');
    const bool is_bucket = slash == std::string::npos;
    const auto& method = request.method;
    {
      const std::lock_guard held(lock);
      const bool is_delete = method == "POST" && request.asks("delete");
      ++counts[is_delete ? "DELETE" : method == "GET" && is_bucket ? "LIST" : method];
    }
    if (is_bucket) {
      if (method == "GET") return list(request);
      if (method == "POST" && request.asks("delete")) return remove_many(request);
      return reply(200);
    }
    if (method == "PUT" && request.asks("partNumber")) return put_part(request);
    if (method == "PUT") return put(request);
    if (method == "POST") return request.asks("uploads") ? begin(request) : complete(request);
    if (method == "GET" || method == "HEAD") return get(request);
    if (method == "DELETE") {
      const std::lock_guard held(lock);
      if (request.asks("uploadId")) {
        uploads.erase(request.value("uploadId"));
      } else {
        objects.erase(request.path);
      }
      return reply(204);
    }
    reply(405);
  }

  void put_part(Request& request) {
    const auto number = std::stoi(request.value("partNumber"));
    const std::lock_guard held(lock);
    uploads[request.value("uploadId")][number] = request.body;
    reply(200, "", "ETag: \"part\"\r\n");
  }

  void put(Request& request) {
    Object made;
    const auto source = unquoted(request.header("x-amz-copy-source"));
    const std::lock_guard held(lock);
    if (!source.empty()) {
      const auto found = objects.find(source.substr(source[0] == '/'));
      if (found == objects.end()) return error(404, "NoSuchKey");
      made.parts = found->second.parts;
    } else if (request.body->size > 0) {
      made.parts = {request.body};
    }
    if (!store(request, made)) return;
    const auto etag = "\"" + objects[request.path].etag + "\"";
    if (source.empty()) return reply(200, "", "ETag: " + etag + "\r\n");
    reply(200, "<CopyObjectResult><ETag>" + etag + "</ETag><LastModified>" +
                   time_text(std::time(nullptr), "%Y-%m-%dT%H:%M:%S.000Z") +
                   "</LastModified></CopyObjectResult>");
  }

  void begin(const Request& request) {
    const std::lock_guard held(lock);
    const auto id = "upload-" + std::to_string(next_number++);
    uploads[id];
    reply(200, "<InitiateMultipartUploadResult><Key>" + request.path + "</Key><UploadId>" + id +
                   "</UploadId></InitiateMultipartUploadResult>");
  }

  void complete(const Request& request) {
    const std::lock_guard held(lock);
    const auto found = uploads.find(request.value("uploadId"));
    if (found == uploads.end()) return error(404, "NoSuchUpload");
    Object made;
    for (const auto& [number, part] : found->second) made.parts.push_back(part);
    if (!store(request, made)) return;
    uploads.erase(found);
    reply(200, "<CompleteMultipartUploadResult><ETag>\"" + objects[request.path].etag +
                   "\"</ETag></CompleteMultipartUploadResult>");
  }

  // With the lock held: gives an object its key, if the conditions hold.
  bool store(const Request& request, Object& made) {
    const auto found = objects.find(request.path);
    const auto wanted = request.header("if-match");
    if (!request.header("if-none-match").empty() && found != objects.end()) {
      error(412, "PreconditionFailed");
      return false;
    }
    if (!wanted.empty() && found == objects.end()) {
      error(404, "NoSuchKey");
      return false;
    }
    if (!wanted.empty() && wanted.find(found->second.etag) == std::string::npos) {
      error(412, "PreconditionFailed");
      return false;
    }
    for (const auto& part : made.parts) made.size += part->size;
    made.etag = "e" + std::to_string(next_number++) + "e";
    made.modified = std::time(nullptr);
    objects[request.path] = std::move(made);
    return true;
  }

  void get(const Request& request) {
    Object object;
    {
      const std::lock_guard held(lock);
      const auto found = objects.find(request.path);
      if (found == objects.end()) return error(404, "NoSuchKey", request.method == "HEAD");
      object = found->second;
    }
    std::size_t from = 0, end = object.size;
    const auto range = request.header("range");
    if (!range.empty()) {  // bytes=from-last
      from = std::strtoull(range.c_str() + 6, nullptr, 10);
      const auto last = range.substr(range.find('-') + 1);
      if (!last.empty()) end = std::min<std::size_t>(end, std::stoull(last) + 1);
      if (from >= end) return error(416, "InvalidRange");
    }
    auto head = "HTTP/1.1 " + std::string(range.empty() ? "200 OK" : "206 Partial Content") +
                "\r\nContent-Length: " + std::to_string(end - from) + "\r\nETag: \"" +
                object.etag + "\"\r\nAccept-Ranges: bytes\r\nLast-Modified: " +
                time_text(object.modified, "%a, %d %b %Y %H:%M:%S GMT") + "\r\n";
    if (!range.empty()) {
      head += "Content-Range: bytes " + std::to_string(from) + "-" + std::to_string(end - 1) +
              "/" + std::to_string(object.size) + "\r\n";
    }
    say(head + "\r\n");
    if (request.method == "HEAD") return;
    {
      const std::lock_guard held(lock);
      sent_bytes += end - from;
    }
    std::size_t at = 0;
    for (const auto& part : object.parts) {
      const auto first = std::max(at, from), last = std::min(at + part->size, end);
      if (first < last) send_part(*part, first - at, last - first);
      at += part->size;
    }
  }

  void send_part(const Blob& part, std::size_t from, std::size_t size) {
    static const std::string zeros(kScratchBytes, '\0');
    const auto tail_at = part.size - part.tail.size();
    while (size > 0) {
      auto most = down.most(size);
      const char* bytes = zeros.data();
      if (from < part.data.size()) {
        most = std::min(most, part.data.size() - from);
        bytes = part.data.data() + from;
      } else if (from >= tail_at) {
        bytes = part.tail.data() + (from - tail_at);
      } else {
        most = std::min({most, zeros.size(), tail_at - from});
      }
      down.pass(most);
      say({bytes, most});
      from += most;
      size -= most;
    }
  }

  void list(const Request& request) {
    const auto bucket = request.path + "/", prefix = bucket + request.value("prefix");
    const bool is_flat = request.value("delimiter").empty();
    auto after = request.value("continuation-token");
    if (after.empty()) after = request.value("start-after");
    const auto most = request.value("max-keys");
    const std::size_t limit = most.empty() ? 1000 : std::stoull(most);
    std::string contents, next;
    std::set<std::string> prefixes;
    std::size_t count = 0;
    const std::lock_guard held(lock);
    for (auto it = objects.lower_bound(prefix); it != objects.end(); ++it) {
      const auto& [path, object] = *it;
      if (path.compare(0, prefix.size(), prefix) != 0) break;
      const auto key = path.substr(bucket.size());
      if (key <= after) continue;
      if (count == limit) {
        next = std::prev(it)->first.substr(bucket.size());
        break;
      }
      const auto slash = is_flat ? std::string::npos : path.find('/', prefix.size());
      if (slash != std::string::npos) {
        const auto shared = key.substr(0, slash + 1 - bucket.size());
        count += prefixes.insert(shared).second;
        continue;
      }
      ++count;
      contents += "<Contents><Key>" + key + "</Key><LastModified>" +
                  time_text(object.modified, "%Y-%m-%dT%H:%M:%S.000Z") + "</LastModified><ETag>\"" +
                  object.etag + "\"</ETag><Size>" + std::to_string(object.size) +
                  "</Size><StorageClass>STANDARD</StorageClass></Contents>";
    }
    std::string text = "<ListBucketResult><IsTruncated>" +
                       std::string(next.empty() ? "false" : "true") + "</IsTruncated>";
    if (!next.empty()) text += "<NextContinuationToken>" + next + "</NextContinuationToken>";
    text += "<KeyCount>" + std::to_string(count) + "</KeyCount>" + contents;
    for (const auto& shared : prefixes) {
      text += "<CommonPrefixes><Prefix>" + shared + "</Prefix></CommonPrefixes>";
    }
    reply(200, text + "</ListBucketResult>");
  }

  void remove_many(const Request& request) {
    const auto& text = request.body->data;
    std::string deleted;
    const std::lock_guard held(lock);
    for (auto at = text.find("<Key>"); at != std::string::npos; at = text.find("<Key>", at + 5)) {
      const auto key = text.substr(at + 5, text.find("</Key>", at) - at - 5);
      objects.erase(request.path + "/" + key);
      deleted += "<Deleted><Key>" + key + "</Key></Deleted>";
    }
    reply(200, "<DeleteResult>" + deleted + "</DeleteResult>");
  }

  static std::string counted() {
    const std::lock_guard held(lock);
    std::string text = "{\"sent_bytes\": " + std::to_string(sent_bytes);
    for (const auto& [name, count] : counts) {
      text += ", \"" + name + "\": " + std::to_string(count);
    }
    counts.clear();
    sent_bytes = 0;
    return text + "}";
  }

  void error(int status, const std::string& code, bool is_bare = false) {
    const auto text = "<Error><Code>" + code + "</Code><Message>" + code + "</Message></Error>";
    reply(status, is_bare ? "" : text);
  }

  void reply(int status, const std::string& body = "", const std::string& headers = "") {
    auto text = "HTTP/1.1 " + std::to_string(status) + " -\r\n" + headers;
    if (!body.empty()) text += "Content-Type: application/xml\r\n";
    if (status != 204) text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
    say(text + "\r\n" + body);
  }

  void say(std::string_view text) {
    while (!text.empty()) {
      const auto done = send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
      if (done <= 0) return;
      text.remove_prefix(static_cast<std::size_t>(done));
    }
  }

  int fd_;
  std::string buffer_;  // read, and not used yet
  std::vector<char> scratch_;
};

}  // namespace

int main(int count, char** words) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(count > 1 ? std::atoi(words[1]) : 9000));
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || listen(fd, 128)) {
    std::perror("listen");
    return 1;
  }
  const double bytes_per_s = count > 2 ? std::atof(words[2]) : 0;
  up.set(bytes_per_s);
  down.set(bytes_per_s);
  for (;;) {
    const int accepted = accept(fd, nullptr, nullptr);
    if (accepted < 0) continue;
    setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    std::thread([accepted] { Connection(accepted).serve(); }).detach();
  }
}
