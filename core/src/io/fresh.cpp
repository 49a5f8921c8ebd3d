#include "io/fresh.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/vfs.h"
#include "io/beneath.h"
#include "io/descriptor.h"

namespace holdfast {
namespace {

constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_CLOEXEC;

// False: nothing of this name is there, as far as is known.
bool is_asked(int fd, int error) {
  const Descriptor opened(fd);
  return fd >= 0 || (error != ENOENT && error != ESTALE);
}

// Asks of the directory that a path is in: `ask` opens one of those on its way. Where it is not
// there, up to one that is, and down again: those between may have been made meanwhile.
// False: none of them is there.
template <class Ask>
bool ask_above(const std::string& path, Ask ask) {
  std::vector<std::size_t> absent;
  bool found = false;
  for (std::size_t end = path.rfind('/'); !found && end != std::string::npos && end > 0;
       end = path.rfind('/', end - 1)) {
    found = ask(path.substr(0, end));
    if (!found) absent.push_back(end);
  }
  for (; !absent.empty() && ask(path.substr(0, absent.back())); found = true) absent.pop_back();
  return found;
}

// Whether a file begins so; -ENOTDIR where something on its path is a file.
int begins_so(const std::string& path, std::string_view beginning) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) return errno == ENOTDIR ? -ENOTDIR : 0;
  std::string found(beginning.size(), '\0');
  return ::pread(file.get(), found.data(), found.size(), 0) == ssize_t(found.size()) &&
         found == beginning;
}

}  // namespace

Result<std::string> above_with(const std::string& path, const std::string& name,
                               std::string_view beginning) {
  std::string above = path;
  while (!above.empty()) {
    above.resize(std::min(above.rfind('/'), above.size() - 1));
    const int found = begins_so(above + '/' + name, beginning);
    if (found < 0) return Status::system(-found, "find " + path);
    if (found > 0) return above.empty() ? "/" : above;
  }
  return above;
}

void look_anew(const std::string& path) {
  ask_above(path, [](const std::string& directory) {
    const int fd = ::open(directory.c_str(), kDirectory);
    return is_asked(fd, errno);
  });
}

void look_anew_beneath(const std::string& root, const std::string& name) {
  const auto ask = [&](const std::string& directory) {
    const int fd = open_beneath(root, directory, kDirectory);
    return is_asked(fd, -fd);
  };
  if (ask_above(name, ask)) return;
  look_anew(root + "/.");
  ask_above(name, ask);
}

FileId id_of(const std::string& path) {
  look_anew(path);
  // Opened, since a client of NFS asks its server about what it opens; a removed file is told so.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat info{};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) return {};
  return {.device = info.st_dev, .inode = info.st_ino};
}

}  // namespace holdfast
