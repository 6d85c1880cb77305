// Makes calls on a host KV store's file fail; it is preloaded before libc. As soon as the file STORE_FAULT_WHEN exists,
// each call fails as STORE_FAULT names: a number of errno, "cut" (the file is truncated where the read begins), or
// "kill" (the process is killed in a write).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_affected(int fd) {
  char link[64], path[512];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strstr(path, "sgl-batch-kv-store-") != NULL && access(getenv("STORE_FAULT_WHEN"), F_OK) == 0;
}

static int fails(int fd, off_t at, int writes) {
  if (!is_affected(fd)) return 0;
  const char* fault = getenv("STORE_FAULT");
  if (strcmp(fault, "kill") == 0) {
    if (writes) raise(SIGKILL);
  } else if (strcmp(fault, "cut") == 0) {
    if (!writes && ftruncate(fd, at) != 0) abort();
  } else {
    errno = atoi(fault);
    return 1;
  }
  return 0;
}

#define CALL(NAME, WRITES)                                                                          \
  ssize_t NAME(int fd, const struct iovec* pieces, int count, off_t at) {                           \
    ssize_t (*real)(int, const struct iovec*, int, off_t) = dlsym(RTLD_NEXT, #NAME);                \
    if (fails(fd, at, WRITES)) return -1;                                                           \
    return real(fd, pieces, count, at);                                                             \
  }

CALL(preadv, 0)
CALL(preadv64, 0)
CALL(pwritev, 1)
CALL(pwritev64, 1)
