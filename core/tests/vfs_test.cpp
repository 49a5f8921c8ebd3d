#include "holdfast/vfs.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <map>

#include "check.h"
#include "child.h"
#include "files.h"
#include "io/beneath.h"

namespace holdfast {
namespace {

bool failed_with(const Status& status, int error, const std::string& part) {
  return CHECK_EQ(status.error(), error) && CHECK(status.text().find(part) != std::string::npos);
}

Status closed(Vfs& vfs, const Result<int>& fd) {
  return fd.ok() ? vfs.close(fd.value()) : fd.status();
}

}  // namespace

TEST(what_is_written_is_read_back) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const std::string path = directory / "file";
  auto fd = vfs->create(path, false);
  if (!CHECK(fd.ok())) return;
  CHECK(vfs->allocate(fd.value(), 1 << 20).ok());
  CHECK(vfs->allocate(fd.value(), 0).ok());
  CHECK_EQ(vfs->size(fd.value()).value(), 1u << 20);
  CHECK(vfs->write(fd.value(), "holdfast", 8, 3).ok());
  CHECK(vfs->truncate(fd.value(), 11).ok());
  CHECK(vfs->sync(fd.value()).ok());
  CHECK(vfs->sync_directory(directory.path()).ok());
  char bytes[64];
  auto done = vfs->read(fd.value(), bytes, sizeof bytes, 3);
  CHECK_EQ(done.value(), 8u);
  CHECK_EQ(std::string(bytes, 8), "holdfast");
  CHECK_EQ(vfs->read(fd.value(), bytes, sizeof bytes, 11).value(), 0u);
  CHECK_EQ(bytes_after(fd.value(), 3), 8u);
  CHECK_EQ(bytes_after(fd.value(), 12), 0u);
  CHECK_EQ(bytes_after(-1, 0), 0u);
  CHECK(vfs->close(fd.value()).ok());
  failed_with(vfs->close(fd.value()), EBADF, "close");
}

TEST(create_and_link_refuse_what_exists) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  write_file(directory / "a", "a");
  write_file(directory / "b", "b");
  failed_with(vfs->create(directory / "a", false).status(), EEXIST, directory / "a");
  failed_with(vfs->link(directory / "a", directory / "b"), EEXIST, "to " + (directory / "b"));
  CHECK_EQ(read_file(directory / "b"), "b");
  CHECK(vfs->link(directory / "a", directory / "c").ok());
  CHECK_EQ(read_file(directory / "c"), "a");
  CHECK(vfs->rename(directory / "c", directory / "b").ok());
  CHECK(vfs->unlink(directory / "a").ok());
  failed_with(vfs->unlink(directory / "a"), ENOENT, "unlink");
  ::symlink("nowhere", (directory / "link").c_str());
  failed_with(vfs->create(directory / "link", false).status(), EEXIST, "create");
}

// As a client of NFS is told that asks again, because the reply was lost.
TEST(a_link_that_is_there_already_is_our_own) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  write_file(directory / "a", "a");
  write_file(directory / "b", "a");
  CHECK(vfs->link(directory / "a", directory / "c").ok());
  CHECK(vfs->link(directory / "a", directory / "c").ok());
  failed_with(vfs->link(directory / "b", directory / "c"), EEXIST, "to " + (directory / "c"));
  failed_with(vfs->rename(directory / "none", directory / "c"), ENOENT, "none");
  CHECK(vfs->rename(directory / "c", directory / "d").ok());
  failed_with(vfs->rename(directory / "c", directory / "d"), ENOENT, "to " + (directory / "d"));
}

TEST(open_takes_nothing_but_regular_files) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  write_file(directory / "file", "x");
  CHECK_EQ(::symlink("file", (directory / "link").c_str()), 0);
  CHECK_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  (directory / "socket").copy(address.sun_path, sizeof address.sun_path - 1);
  const bool bound = ::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  failed_with(vfs->open(directory / "link", false).status(), ELOOP, directory / "link");
  failed_with(vfs->open(directory / "fifo", false).status(), EINVAL, "fifo");
  failed_with(vfs->open(directory.path(), false).status(), EINVAL, directory.path());
  failed_with(vfs->open("/dev/null", false).status(), EINVAL, "/dev/null");
  failed_with(vfs->open(directory / "none", false).status(), ENOENT, "none");
  if (bound) failed_with(vfs->open(directory / "socket", false).status(), EINVAL, "socket");
  failed_with(vfs->open(directory.path() + std::string("/file\0x", 7), false).status(), EINVAL, "");
  ::close(listener);
  auto fd = vfs->open(directory / "file", false);
  if (!CHECK(fd.ok())) return;
  CHECK_EQ(::fcntl(fd.value(), F_GETFL) & O_NONBLOCK, 0);
  failed_with(vfs->write(fd.value(), "y", 1, 5), EBADF, "(1 bytes) at offset 5");
  CHECK(vfs->close(fd.value()).ok());
}

TEST(directories_are_made_listed_and_removed) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  CHECK(vfs->make_directory(directory / "b").value());
  CHECK(!vfs->make_directory(directory / "b").value());
  write_file(directory / "a", "12345");
  CHECK_EQ(::symlink("b", (directory / "c").c_str()), 0);
  failed_with(vfs->make_directory(directory / "a").status(), EEXIST, "make_directory");
  failed_with(vfs->make_directory(directory / "none" + "/x").status(), ENOENT, "none/x");
  auto entries = vfs->list_directory(directory.path());
  if (!CHECK_EQ(entries.value().size(), 3u)) return;
  CHECK_EQ(entries.value()[0].name + entries.value()[0].kind, "afile");
  CHECK_EQ(entries.value()[0].size, 5u);
  CHECK_EQ(entries.value()[1].name + entries.value()[1].kind, "bdirectory");
  CHECK_EQ(entries.value()[2].name + entries.value()[2].kind, "cother");
  failed_with(vfs->remove_directory(directory.path()), ENOTEMPTY, "remove_directory");
  CHECK(vfs->remove_directory(directory / "b").ok());
  failed_with(vfs->list_directory(directory / "b").status(), ENOENT, "list_directory");
  failed_with(vfs->sync_directory(directory / "b"), ENOENT, "sync_directory");
}

TEST(a_recording_logs_what_changes_the_disk_in_order) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::recording();
  const std::string path = directory / "x";
  CHECK(vfs->make_directory(path).ok());
  const int fd = vfs->create(path + "/f", false).value();
  CHECK(vfs->allocate(fd, 100).ok());
  CHECK(vfs->write(fd, "abc", 3, 7).ok());
  CHECK(vfs->sync(fd).ok());
  CHECK(vfs->size(fd).ok());
  CHECK(vfs->truncate(fd, 10).ok());
  CHECK(vfs->close(fd).ok());
  CHECK(!vfs->unlink(path + "/none").ok());
  CHECK(vfs->link(path + "/f", path + "/g").ok());
  CHECK(vfs->sync_directory(path).ok());
  CHECK(vfs->rename(path + "/f", path + "/h").ok());
  std::string log;
  for (const TraceEntry& entry : vfs->trace()) {
    log += std::string(name_of(entry.operation)) + " " + entry.path.substr(path.size());
    if (!entry.second.empty()) log += " " + entry.second.substr(path.size());
    log += " " + std::to_string(entry.number) + " " + std::to_string(entry.data.size()) + "\n";
  }
  CHECK_EQ(log,
           "make_directory  0 0\ncreate /f 0 0\nallocate /f 100 0\nwrite /f 7 3\nsync /f 0 0\n"
           "truncate /f 10 0\nlink /f /g 0 0\nsync_directory  0 0\nrename /f /h 0 0\n");
  CHECK_EQ(vfs->calls()["unlink"], 1u);
  CHECK_EQ(vfs->calls()["size"], 1u);
  CHECK(Vfs::posix()->calls().empty());
}

TEST(what_lies_below_is_opened_through_no_link) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const std::string root = directory / "root";
  CHECK(vfs->make_directory(root).ok() && vfs->make_directory(root + "/data").ok());
  write_file(root + "/data/file", "inside");
  write_file(directory / "secret", "outside");
  CHECK_EQ(::symlink("data", (root + "/linked").c_str()), 0);
  CHECK_EQ(::symlink("..", (root + "/up").c_str()), 0);
  CHECK_EQ(::symlink(root.c_str(), (directory / "alias").c_str()), 0);
  CHECK_EQ(::symlink("file", (root + "/data/name").c_str()), 0);
  CHECK_EQ(::symlink("/proc/self/fd/0", (root + "/data/magic").c_str()), 0);
  struct Way {
    const char* name;
    int error;  // of openat2, then of the walk
    int walked;
  };
  const Way ways[] = {{"data/file", 0, 0},
                      {"linked/file", ELOOP, ENOTDIR},
                      {"data/name", ELOOP, ELOOP},
                      {"data/magic", ELOOP, ELOOP},
                      {"up/secret", ELOOP, ENOTDIR},
                      {"../secret", EXDEV, EINVAL},
                      {"data/../../secret", EXDEV, EINVAL},
                      {"/etc/passwd", EXDEV, EINVAL},
                      {"data/./file", 0, EINVAL},
                      {"data//file", 0, EINVAL},
                      {"data/file/more", ENOTDIR, ENOTDIR},
                      {"none/file", ENOENT, ENOENT}};
  for (const std::string& place : {root, directory / "alias"}) {
    for (const Way& way : ways) {
      const int flags = O_RDONLY | O_NOFOLLOW | O_CLOEXEC;
      const int found = open_beneath(place, way.name, flags);
      const int walked = walk_beneath(place, way.name, flags);
      // Where the kernel has no openat2, the first is the second.
      CHECK(found >= 0 ? way.error == 0 : found == -way.error || found == -way.walked);
      CHECK(walked >= 0 ? way.walked == 0 : walked == -way.walked);
      if (found >= 0) ::close(found);
      if (walked >= 0) ::close(walked);
    }
    auto fd = vfs->open_beneath(place, "data/file", false);
    if (!CHECK(fd.ok())) return;
    CHECK(vfs->close(fd.value()).ok());
    CHECK_EQ(vfs->list_beneath(place, "data").value().size(), 3u);
  }
  failed_with(vfs->open_beneath(root, "data", false).status(), EINVAL, root + "/data");
  failed_with(vfs->open_beneath(root, "linked/file", false).status(), ELOOP, root + "/linked/file");
  failed_with(vfs->list_beneath(root, "linked").status(), ELOOP, root + "/linked");
  CHECK(!vfs->list_beneath(root, "..").ok());
  CHECK(!vfs->open_beneath(directory / "none", "file", false).ok());
  CHECK_EQ(walk_beneath(directory / "none", "file", O_RDONLY), -ENOENT);
  CHECK_EQ(walk_beneath(directory / "none", "", O_RDONLY), -ENOENT);
}

// Linux before 5.6, and containers that know only its calls.
TEST(what_lies_below_is_opened_without_openat2) {
  const TemporaryDirectory directory;
  CHECK(Vfs::posix()->make_directory(directory / "data").ok());
  write_file(directory / "data/file", "inside");
  CHECK_EQ(::symlink("data", (directory / "linked").c_str()), 0);
  for (const unsigned error : {ENOSYS, EPERM}) {
    in_child([&] {
      const auto vfs = Vfs::posix();
      forbid(SYS_openat2, error);
      for (int round = 0; round < 2; ++round) {
        auto fd = vfs->open_beneath(directory.path(), "data/file", false);
        if (!CHECK(fd.ok())) return;
        CHECK_EQ(vfs->size(fd.value()).value(), 6u);
        CHECK(vfs->close(fd.value()).ok());
        failed_with(vfs->open_beneath(directory.path(), "linked/file", false).status(), ENOTDIR,
                    "linked/file");
        CHECK_EQ(vfs->list_beneath(directory.path(), "data").value().size(), 1u);
      }
    });
  }
}

TEST(a_directory_that_cannot_be_read_is_an_error_and_no_empty_one) {
  const TemporaryDirectory directory;
  write_file(directory / "a", "1");
  CHECK(Vfs::posix()->make_directory(directory / "b").ok());
  const auto list = [&] { return Vfs::posix()->list_directory(directory.path()); };
  in_child([&] {
    forbid(SYS_getdents64, EIO);
    failed_with(list().status(), EIO, "list_directory " + directory.path());
  });
  in_child([&] {
    forbid_where(SYS_newfstatat, 3, AT_SYMLINK_NOFOLLOW, EACCES);
    failed_with(list().status(), EACCES, directory.path());
  });
  in_child([&] {
    forbid_where(SYS_newfstatat, 3, AT_SYMLINK_NOFOLLOW, ENOENT);  // removed meanwhile
    auto found = list();
    CHECK(found.ok() && found.value().empty());
  });
}

TEST(room_is_not_needed_where_a_file_system_cannot_promise_any) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const int fd = vfs->create(directory / "file", false).value();
  in_child([&] {
    forbid(SYS_fallocate, EOPNOTSUPP);
    CHECK(vfs->allocate(fd, 4096).ok());
  });
  in_child([&] {
    forbid(SYS_fallocate, ENOSPC);
    failed_with(vfs->allocate(fd, 4096), ENOSPC, "size 4096");
  });
  CHECK(vfs->close(fd).ok());
}

TEST(a_name_that_is_taken_by_a_link_to_nowhere_makes_no_directory) {
  const TemporaryDirectory directory;
  CHECK_EQ(::symlink("nowhere", (directory / "link").c_str()), 0);
  failed_with(Vfs::posix()->make_directory(directory / "link").status(), EEXIST, "link");
}

TEST(direct_descriptors_are_direct) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  write_file(directory / "file", "x");
  const Result<int> made[] = {vfs->create(directory / "made", true),
                              vfs->open(directory / "file", true),
                              vfs->open_beneath(directory.path(), "file", true)};
  for (const Result<int>& fd : made) {
    if (!fd.ok()) {
      CHECK_EQ(fd.status().error(), EINVAL);
      check::skip("no O_DIRECT");
      continue;
    }
    CHECK((::fcntl(fd.value(), F_GETFL) & O_DIRECT) != 0);
    CHECK(vfs->close(fd.value()).ok());
  }
}

// To the kernel, the name would end there: another file's.
TEST(a_name_with_a_nul_reaches_no_system_call) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::recording();
  write_file(directory / "file", "x");
  const std::string good = directory / "file", bad = good + std::string("\0x", 2);
  for (const Status& status :
       {vfs->create(bad, false).status(), vfs->open(bad, false).status(),
        vfs->open_beneath(directory.path(), std::string("file\0x", 6), false).status(),
        vfs->link(bad, directory / "a"), vfs->link(good, bad), vfs->rename(bad, directory / "a"),
        vfs->rename(good, bad), vfs->unlink(bad), vfs->make_directory(bad).status(),
        vfs->remove_directory(bad), vfs->sync_directory(bad), vfs->list_directory(bad).status()}) {
    CHECK_EQ(status.error(), EINVAL);
  }
  CHECK(vfs->calls().empty());
  CHECK_EQ(read_file(good), "x");
}

// Each on files that are there anew: a, b, an open one, and the empty directory d.
TEST(an_interrupted_call_of_any_kind_is_made_again_but_not_for_ever) {
  using Use = std::function<Status(Vfs&, const std::string&, int)>;
  char byte = 'x';
  const std::map<std::string, Use> uses = {
      {"create", [](Vfs& v, auto& at, int) { return closed(v, v.create(at + "new", false)); }},
      {"open", [](Vfs& v, auto& at, int) { return closed(v, v.open(at + "a", false)); }},
      {"write", [&](Vfs& v, auto&, int fd) { return v.write(fd, &byte, 1, 0); }},
      {"read", [&](Vfs& v, auto&, int fd) { return v.read(fd, &byte, 1, 0).status(); }},
      {"size", [](Vfs& v, auto&, int fd) { return v.size(fd).status(); }},
      {"allocate", [](Vfs& v, auto&, int fd) { return v.allocate(fd, 9); }},
      {"truncate", [](Vfs& v, auto&, int fd) { return v.truncate(fd, 9); }},
      {"sync", [](Vfs& v, auto&, int fd) { return v.sync(fd); }},
      {"sync_directory", [](Vfs& v, auto& at, int) { return v.sync_directory(at); }},
      {"link", [](Vfs& v, auto& at, int) { return v.link(at + "a", at + "c"); }},
      {"rename", [](Vfs& v, auto& at, int) { return v.rename(at + "a", at + "c"); }},
      {"unlink", [](Vfs& v, auto& at, int) { return v.unlink(at + "b"); }},
      {"make_directory",
       [](Vfs& v, auto& at, int) { return v.make_directory(at + "new").status(); }},
      {"remove_directory", [](Vfs& v, auto& at, int) { return v.remove_directory(at + "d"); }},
      {"list_directory", [](Vfs& v, auto& at, int) { return v.list_directory(at).status(); }},
  };
  CHECK_EQ(uses.size() + 1, kOperationNames.size());  // close is never called again
  for (const auto& [name, use] : uses) {
    for (const std::uint64_t error : {EINTR, EAGAIN, EIO}) {
      for (const bool persistent : {false, true}) {
        const TemporaryDirectory directory;
        const std::string at = directory / "";
        for (const char* file : {"a", "b", "open"}) write_file(at + file, "x");
        CHECK(Vfs::posix()->make_directory(at + "d").ok());
        const int fd = ::open((at + "open").c_str(), O_RDWR | O_CLOEXEC);
        const auto vfs = Vfs::faulty({{name, 1, persistent, "fail", error}}, nullptr).value();
        const bool again = error != EIO;
        const Status status = use(*vfs, at, fd);
        CHECK_EQ(status.error(), again && !persistent ? 0 : static_cast<int>(error));
        CHECK_EQ(vfs->calls()[name], !again ? 1u : persistent ? kRetriesMax + 1u : 2u);
        if (!status.ok()) CHECK(status.text().find(name + " " + directory.path()) == 0);
        ::close(fd);
      }
    }
  }
}

}  // namespace holdfast
