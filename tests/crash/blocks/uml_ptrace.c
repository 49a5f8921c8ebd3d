// Lets User-Mode Linux 6.1 run where a task's registers take more room than it knows of (AMX).
//
// It writes them back through a buffer of 2696 bytes, which such a kernel refuses. Preloaded, this
// puts what it wrote over the whole of what there is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static char whole[1 << 16] __attribute__((aligned(64)));  // the tracer is one thread

long ptrace(enum __ptrace_request request, ...) {
  static long (*next)(int, int, void*, void*);
  if (!next) next = (long (*)(int, int, void*, void*))dlsym(RTLD_NEXT, "ptrace");
  va_list rest;
  va_start(rest, request);
  int task = va_arg(rest, int);
  void *address = va_arg(rest, void*), *data = va_arg(rest, void*);
  va_end(rest);
  if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
    const struct iovec* part = data;
    struct iovec all = {whole, sizeof whole};
    if (next(PTRACE_GETREGSET, task, address, &all) == 0 && part->iov_len < all.iov_len) {
      memcpy(whole, part->iov_base, part->iov_len);
      return next(request, task, address, &all);
    }
  }
  return next(request, task, address, data);
}
