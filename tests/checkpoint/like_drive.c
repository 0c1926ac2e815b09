/* A folder as a network drive may have it: preload it, and choose with like_drive() what fails below a folder.

   FOLDER_SYNC: fsync of folders. LOCKS: record locks and flock. FOLDER_RENAME: renaming folders. CLOSE: closing a file
   that is open for writing (it is closed), after `after` others; WRITE: writing, alike. ONCE: one of them alone.
   `code` is the errno.
   like_drive_done(): closes or writes of such files so far. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FOLDER_SYNC = 1, LOCKS = 2, FOLDER_RENAME = 4, CLOSE = 8, WRITE = 16, ONCE = 32 };

static char below[4096];
static int fails, with;
static long passing, done;

void like_drive(const char *folder, int modes, int code, long after) {
    snprintf(below, sizeof below, "%s", folder);
    fails = modes; with = code; passing = after; done = 0;
}
long like_drive_done(void) { return done; }

static int is_below(const char *path) {
    return *below && !strncmp(path, below, strlen(below));
}

static int is_file_below(int fd, int kind) {
    char link[64], path[4096];
    struct stat found;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    int is = length > 0 && is_below(path) && !fstat(fd, &found) && (found.st_mode & S_IFMT) == (mode_t)kind;
    errno = saved;
    return is;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL do { errno = with; return -1; } while (0)

static int is_due(int mode) {
    if (!(fails & mode)) return 0;
    long before = __atomic_fetch_add(&done, 1, __ATOMIC_SEQ_CST);
    return fails & ONCE ? before == passing : before >= passing;
}

int fsync(int fd) {
    if ((fails & FOLDER_SYNC) && is_file_below(fd, S_IFDIR)) FAIL;
    return REAL(fsync)(fd);
}

static int refuses_lock(int fd, int command) {
    return (fails & LOCKS) && (command == F_SETLK || command == F_SETLKW) && is_file_below(fd, S_IFREG);
}
int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if (refuses_lock(fd, command)) FAIL;
    return REAL(fcntl)(fd, command, argument);
}
int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
int flock(int fd, int operation) {
    if ((fails & LOCKS) && is_file_below(fd, S_IFREG)) FAIL;
    return REAL(flock)(fd, operation);
}

static int refuses_rename(const char *from) {
    struct stat found;
    return (fails & FOLDER_RENAME) && is_below(from) && !lstat(from, &found) && S_ISDIR(found.st_mode);
}
int rename(const char *from, const char *to) {
    if (refuses_rename(from)) FAIL;
    return REAL(rename)(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    if (refuses_rename(from)) FAIL;
    return REAL(renameat)(from_fd, from, to_fd, to);
}

int close(int fd) {
    int saved = errno, flags = fails & CLOSE ? REAL(fcntl)(fd, F_GETFL) : -1;
    int is_due_here = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && is_file_below(fd, S_IFREG) && is_due(CLOSE);
    errno = saved;
    int result = REAL(close)(fd);
    if (is_due_here) FAIL;
    return result;
}

ssize_t write(int fd, const void *memory, size_t size) {
    if ((fails & WRITE) && is_file_below(fd, S_IFREG) && is_due(WRITE)) FAIL;
    return REAL(write)(fd, memory, size);
}
