#include "holdfast/copy.h"

#include <setjmp.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "holdfast/checksum.h"
#include "io_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t kUnitBytes = 4 << 20;    // of work: threads that start late still get a share
constexpr std::size_t kThreadBytes = 8 << 20;  // below, starting a thread costs more than it saves

std::vector<Piece> cut(std::span<const Piece> pieces) {
  std::vector<Piece> units;
  for (const Piece& piece : pieces) {
    for (std::size_t at = 0; at < piece.size; at += kUnitBytes) {
      units.push_back(
          {piece.target + at, piece.source + at, std::min(kUnitBytes, piece.size - at)});
    }
  }
  return units;
}

constexpr std::array kFaults = {SIGSEGV, SIGBUS};  // unmapped; mapped from a file cut shorter

// What the thread that copies is reading, and where it goes on when that is not there.
struct Guarded {
  std::uintptr_t begin;
  std::uintptr_t end;
  sigjmp_buf out;
};
thread_local Guarded* guarded = nullptr;

std::array<struct sigaction, kFaults.size()> before;  // guarded by the mutex of copy_if_there

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (guarded != nullptr && at >= guarded->begin && at < guarded->end) {
    siglongjmp(guarded->out, 1);
  }
  const struct sigaction& other = before[signal == SIGSEGV ? 0 : 1];
  if ((other.sa_flags & SA_SIGINFO) != 0) {
    other.sa_sigaction(signal, info, context);
  } else if (other.sa_handler == SIG_DFL || other.sa_handler == SIG_IGN) {
    ::sigaction(signal, &other, nullptr);  // the instruction runs again, and ends the process
  } else {
    other.sa_handler(signal);
  }
}

}  // namespace

void copy_pieces(std::span<const Piece> pieces, std::size_t threads) {
  const std::vector<Piece> units = cut(pieces);
  std::size_t total = 0;
  for (const Piece& unit : units) total += unit.size;
  std::atomic<std::size_t> next = 0;
  const auto work = [&units, &next] {
    for (std::size_t i = next++; i < units.size(); i = next++) {
      copy_chunk(units[i].target, units[i].source, units[i].size);
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min(threads, total / kThreadBytes); ++i) {
      others.push_back(start_io_thread(work));
    }
  } catch (const std::system_error&) {  // no more threads: those there are do it all
  }
  work();
  for (std::thread& thread : others) thread.join();
}

bool copy_if_there(std::byte* target, const std::byte* source, std::size_t size) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  struct sigaction handler {};
  handler.sa_sigaction = on_fault;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&handler.sa_mask);
  for (std::size_t i = 0; i < kFaults.size(); ++i) ::sigaction(kFaults[i], &handler, &before[i]);
  const auto begin = reinterpret_cast<std::uintptr_t>(source);
  Guarded here{begin, begin + size, {}};
  guarded = &here;
  const bool there = sigsetjmp(here.out, /*savemask=*/1) == 0;
  if (there) copy_chunk(target, source, size);
  guarded = nullptr;
  for (std::size_t i = 0; i < kFaults.size(); ++i) ::sigaction(kFaults[i], &before[i], nullptr);
  return there;
}

}  // namespace holdfast
