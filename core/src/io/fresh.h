// What a network file system has, past the caches of its client: `look_anew`, and what needs it.
#pragma once

#include <cstdint>
#include <string>

namespace holdfast {

// `look_anew` for what lies below a directory: as `open_beneath`, it follows no link on the way.
void look_anew_beneath(const std::string& root, const std::string& name);

struct FileId {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;

  bool is_that_of(const FileId& other) const {
    return inode != 0 && device == other.device && inode == other.inode;
  }
};

// Which file has a name right now; no file is like what cannot be opened.
FileId id_of(const std::string& path);

}  // namespace holdfast
