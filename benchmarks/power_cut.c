/* Drops what was not synced: preload it, and at a chosen operation the process ends as if the power were cut.

   What would be on the disk then is under $POWER_CUT_DISK: objects/ID holds a file's bytes as of its last fsync, and
   folders/ID a folder's names (a line each: name, "d" or "f", ID) as of the folder's. A file that was never synced has
   no bytes, and a name whose folder was not synced since is not there. An ID is the inode and the time of its birth, so
   no later file takes an earlier one's place.

   power_cut_in(n): after n more operations (renames, removals, new folders, syncs) the process ends, before the next one
   is done. power_cut_done(): how many there were since. power_cut_identity(): a path's ID. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long done, last = -1;

void power_cut_in(long n) { done = 0; last = n; }
long power_cut_done(void) { return done; }

static void operation(void) {
    if (last >= 0 && ++done > last) _exit(9);
}

static int identity(int fd, const char *name, char *id, size_t size, int *folder) {
    struct statx found;
    int flags = AT_SYMLINK_NOFOLLOW | (*name ? 0 : AT_EMPTY_PATH);
    if (statx(fd, name, flags, STATX_BASIC_STATS | STATX_BTIME, &found)) return -1;
    snprintf(id, size, "%llu-%lld-%u", (unsigned long long)found.stx_ino, (long long)found.stx_btime.tv_sec,
             found.stx_btime.tv_nsec);
    *folder = S_ISDIR(found.stx_mode);
    return S_ISDIR(found.stx_mode) || S_ISREG(found.stx_mode) ? 0 : -1;
}

int power_cut_identity(const char *path, char *id, size_t size) {
    int folder;
    return identity(AT_FDCWD, path, id, size, &folder);
}

/* Keep what `fd` holds, as the disk would. */
static void keep(int fd) {
    const char *disk = getenv("POWER_CUT_DISK");
    char id[80], path[4096], new[4160], memory[65536];
    int folder, saved = errno;
    if (!disk || last < 0 || identity(fd, "", id, sizeof id, &folder)) { errno = saved; return; }
    snprintf(path, sizeof path, "%s/%s/%s", disk, folder ? "folders" : "objects", id);
    snprintf(new, sizeof new, "%s-new", path);
    FILE *file = fopen(new, "wb");
    if (!file) _exit(10);
    if (folder) {
        DIR *names = fdopendir(openat(fd, ".", O_RDONLY | O_DIRECTORY));
        for (struct dirent *entry; names && (entry = readdir(names));) {
            if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
            if (!identity(fd, entry->d_name, id, sizeof id, &folder))
                fprintf(file, "%s\t%c\t%s\n", entry->d_name, folder ? 'd' : 'f', id);
        }
        if (names) closedir(names);
    } else {
        char own[64];
        snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
        int reading = open(own, O_RDONLY); /* `fd` may be for writing alone */
        for (ssize_t n; (n = read(reading, memory, sizeof memory)) > 0;) fwrite(memory, 1, n, file);
        close(reading);
    }
    fclose(file);
    syscall(SYS_renameat2, AT_FDCWD, new, AT_FDCWD, path, 0);
    errno = saved;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fsync(int fd) {
    operation();
    keep(fd);
    return 0; /* the disk itself need not wait */
}
int fdatasync(int fd) { return fsync(fd); }
int rename(const char *from, const char *to) {
    operation();
    return REAL(rename)(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    operation();
    return REAL(renameat)(from_fd, from, to_fd, to);
}
int unlink(const char *path) {
    operation();
    return REAL(unlink)(path);
}
int unlinkat(int fd, const char *path, int flags) {
    operation();
    return REAL(unlinkat)(fd, path, flags);
}
int rmdir(const char *path) {
    operation();
    return REAL(rmdir)(path);
}
int mkdir(const char *path, mode_t mode) {
    operation();
    return REAL(mkdir)(path, mode);
}
