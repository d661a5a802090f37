/* Preloaded into a program by scripts/campaign: counts and records its calls that touch files below FAULTS_ROOT, and makes one of them fail,
 * end the process or send it a signal.
 *
 *   FAULTS_ROOT=/folder       calls on other files pass through unseen (an absolute path without links)
 *   FAULTS_STATE=/file        8 bytes: how many calls matched; shared by a launcher and the program that it becomes
 *   FAULTS_LOG=/file          a record of each call is appended: see `record`
 *   FAULTS_DATA=1             records hold what was written
 *   FAULTS_CALL="KIND K PATH" the K-th call (from 1) of this kind on this path; KIND may be "any" and PATH "*"
 *   FAULTS_DO=fail:ERRNO      that call does nothing and returns the error
 *   FAULTS_DO=short           reads or writes half of the bytes
 *   FAULTS_CLOCK=1            the time of day jumps by up to ten years at each look, back and forth
 *   FAULTS_DO=signal:NUMBER   the signal is sent before the call; a write writes half before SIGKILL
 *
 * In paths the process's own id is replaced by PID, so that a call has the same name in every run. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LONGEST 4096
#define HIGH 700 /* descriptors of our own */

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char root[LONGEST], wanted_kind[32], wanted_path[LONGEST];
static size_t root_length;
static int log_fd = -1, keeps_data, fault_errno, fault_signal, is_short;
static long wanted_number;
static volatile uint64_t *matched;

#define NEXT(name) ({ static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); next; })

static int own_descriptor(const char *path, int flags) {
    int fd = syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0600);
    int high = fd < 0 ? -1 : (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH);
    if (fd >= 0) syscall(SYS_close, fd);
    return high;
}

static void start(void) {
    const char *value = getenv("FAULTS_ROOT");
    if (!value) return;
    snprintf(root, sizeof root, "%s", value);
    root_length = strlen(root);
    if ((value = getenv("FAULTS_LOG"))) log_fd = own_descriptor(value, O_WRONLY | O_APPEND | O_CREAT);
    keeps_data = getenv("FAULTS_DATA") != NULL;
    if ((value = getenv("FAULTS_CALL"))) sscanf(value, "%31s %ld %4095[^\n]", wanted_kind, &wanted_number, wanted_path);
    if ((value = getenv("FAULTS_DO"))) {
        sscanf(value, "fail:%d", &fault_errno);
        sscanf(value, "signal:%d", &fault_signal);
        is_short = strcmp(value, "short") == 0;
    }
    if ((value = getenv("FAULTS_STATE"))) {
        int fd = own_descriptor(value, O_RDWR);
        void *map = fd < 0 ? MAP_FAILED : (void *)syscall(SYS_mmap, NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) matched = map;
    }
}

/* Our path of what `path` names from the folder `at`: absolute, without "." and "..". NULL if it is not below the root. */
static const char *below_root(int at, const char *path, char *out) {
    char whole[2 * LONGEST];
    pthread_once(&once, start);
    if (!root_length || !path) return NULL;
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        char link[64];
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        ssize_t length = syscall(SYS_readlink, link, whole, LONGEST - 1);
        if (length < 0) return NULL;
        snprintf(whole + length, sizeof whole - length, "/%s", path);
    }
    size_t end = 0;
    for (char *rest = whole, *part; (part = strtok_r(rest, "/", &rest));) {
        if (strcmp(part, ".") == 0) continue;
        if (strcmp(part, "..") == 0) {
            while (end > 0 && out[--end] != '/') {}
            continue;
        }
        if (end + strlen(part) + 2 >= LONGEST) return NULL;
        out[end++] = '/';
        strcpy(out + end, part);
        end += strlen(part);
    }
    out[end] = 0;
    return strncmp(out, root, root_length) == 0 && (out[root_length] == '/' || out[root_length] == 0) ? out : NULL;
}

/* As `below_root`, of an open file. */
static const char *of_descriptor(int fd, char *out) {
    char link[64], path[LONGEST];
    pthread_once(&once, start);
    if (!root_length || fd < 0 || fd >= HIGH) return NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return NULL;
    path[length] = 0;
    return below_root(AT_FDCWD, path, out);
}

/* A path below the root, with PID for the process's own id. */
static void name_of(const char *path, char *out) {
    char id[32], *found;
    snprintf(id, sizeof id, ".%d.", (int)getpid());
    snprintf(out, LONGEST, "%s", path[root_length] ? path + root_length + 1 : ".");
    if ((found = strstr(out, id))) {
        char rest[LONGEST];
        snprintf(rest, sizeof rest, "%s", found + strlen(id));
        snprintf(found, LONGEST - (found - out), ".PID.%s", rest);
    }
}

/* Appends a record: one line "kind result offset length-of-data path\tsecond path\n", then the data. */
static void record(const char *kind, long result, off_t offset, const char *path, const char *second, const struct iovec *data, int count) {
    if (log_fd < 0) return;
    char name[LONGEST], other[LONGEST] = "", line[3 * LONGEST];
    name_of(path, name);
    if (second) name_of(second, other);
    size_t left = keeps_data && result > 0 ? (size_t)result : 0;
    struct iovec parts[64];
    int used = 1, length;
    if (!data) left = 0;
    length = snprintf(line, sizeof line, "%s %ld %lld %zu %s\t%s\n", kind, result, (long long)offset, left, name, other);
    parts[0] = (struct iovec){line, length};
    for (int i = 0; i < count && left > 0 && used < 64; i++) {
        size_t take = data[i].iov_len < left ? data[i].iov_len : left;
        parts[used++] = (struct iovec){data[i].iov_base, take};
        left -= take;
    }
    syscall(SYS_writev, log_fd, parts, used);
}

enum action { PASS, FAIL, SHORT, KILL };

/* Counts a call, and says what becomes of it. */
static enum action next_call(const char *kind, const char *path) {
    char name[LONGEST];
    if (!matched || !wanted_number) return PASS;
    if (strcmp(wanted_kind, "any") != 0 && strcmp(wanted_kind, kind) != 0) return PASS;
    if (strcmp(wanted_path, "*") != 0) {
        name_of(path, name);
        if (strcmp(wanted_path, name) != 0) return PASS;
    }
    if ((long)++*matched != wanted_number) return PASS;
    if (fault_errno) return FAIL;
    if (is_short) return SHORT;
    if (fault_signal == SIGKILL) return KILL;
    if (fault_signal) syscall(SYS_kill, getpid(), fault_signal);
    return PASS;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* The body of a call on `path`: counted, done, recorded, one at a time. A fault returns -1; a process that is killed does nothing more. */
#define AROUND(kind, path, second, type, failed, call) \
    ({ \
        type result; \
        pthread_mutex_lock(&one_at_a_time); \
        enum action action = next_call(kind, path); \
        if (action == KILL) die(); \
        if (action == FAIL) { \
            record(kind, -fault_errno, -1, path, second, NULL, 0); \
            errno = fault_errno; \
            result = failed; \
        } else { \
            result = call; \
            int error = errno; \
            record(kind, result == failed ? -error : 0, -1, path, second, NULL, 0); \
            errno = error; \
        } \
        pthread_mutex_unlock(&one_at_a_time); \
        result; \
    })

static int open_below(int at, const char *path, const char *whole, int flags, mode_t mode) {
    struct stat before;
    pthread_mutex_lock(&one_at_a_time);
    int is_new = (flags & O_CREAT) && syscall(SYS_newfstatat, at, path, &before, 0) != 0;
    enum action action = next_call("open", whole);
    int fd = -1, error = fault_errno;
    if (action == KILL) die();
    if (action != FAIL) {
        fd = syscall(SYS_openat, at, path, flags, mode);
        error = errno;
    }
    const char *kind = fd < 0 || !(is_new || flags & O_TRUNC) ? "open" : is_new ? "create" : "truncate";
    record(kind, fd < 0 ? -error : 0, 0, whole, NULL, NULL, 0);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error;
    return fd;
}

#define OPEN(at, path, flags) \
    char buffer[LONGEST]; \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    } \
    const char *whole = below_root(at, path, buffer); \
    if (whole) return open_below(at, path, whole, flags, mode); \
    return syscall(SYS_openat, at, path, flags, mode)

int open(const char *path, int flags, ...) { OPEN(AT_FDCWD, path, flags); }
int open64(const char *path, int flags, ...) { OPEN(AT_FDCWD, path, flags | O_LARGEFILE); }
int openat(int at, const char *path, int flags, ...) { OPEN(at, path, flags); }
int openat64(int at, const char *path, int flags, ...) { OPEN(at, path, flags | O_LARGEFILE); }

int close(int fd) {
    char buffer[LONGEST];
    const char *path = of_descriptor(fd, buffer);
    if (!path) return syscall(SYS_close, fd);
    pthread_mutex_lock(&one_at_a_time);
    enum action action = next_call("close", path);
    if (action == KILL) die();
    int result = syscall(SYS_close, fd), error = errno;
    if (action == FAIL) result = -1, error = fault_errno;
    record("close", result < 0 ? -error : 0, -1, path, NULL, NULL, 0);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error;
    return result;
}

/* Half of the bytes, at least one. */
static int halve(const struct iovec *all, int count, struct iovec *half) {
    size_t left = 0;
    int used = 0;
    for (int i = 0; i < count; i++) left += all[i].iov_len;
    left = left > 1 ? left / 2 : left;
    for (int i = 0; i < count && left > 0; i++) {
        half[used] = all[i];
        if (half[used].iov_len > left) half[used].iov_len = left;
        left -= half[used++].iov_len;
    }
    return used;
}

/* Reads or writes at `at`, or at the file's own place if that is -1. */
static ssize_t transfer(int fd, const struct iovec *all, int count, off_t at, int writes) {
    long number = at >= 0 ? (writes ? SYS_pwritev : SYS_preadv) : (writes ? SYS_writev : SYS_readv);
    char buffer[LONGEST];
    const char *path = of_descriptor(fd, buffer);
    if (!path || count > 1024) {
        if (writes && (fd == 1 || fd == 2) && root_length) { /* what the user is told, beside what was done by then */
            pthread_mutex_lock(&one_at_a_time);
            ssize_t told = syscall(number, fd, all, count, at, 0);
            int error = errno;
            record(fd == 1 ? "stdout" : "stderr", told, -1, root, NULL, all, count);
            pthread_mutex_unlock(&one_at_a_time);
            errno = error;
            return told;
        }
        return syscall(number, fd, all, count, at, 0);
    }
    const char *kind = writes ? "write" : "read";
    struct iovec half[1024];
    pthread_mutex_lock(&one_at_a_time);
    enum action action = next_call(kind, path);
    ssize_t done = -1;
    int error = fault_errno;
    if (action == KILL && !writes) die();
    if (action == SHORT || action == KILL) count = halve(all, count, half), all = half;
    if (action != FAIL) {
        done = syscall(number, fd, all, count, at, 0);
        error = errno;
    }
    if (action == KILL) die();
    off_t place = at >= 0 ? at : (off_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) - (done > 0 ? done : 0);
    record(kind, done < 0 ? -error : done, place, path, NULL, writes ? all : NULL, count);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error;
    return done;
}

#define ONE(bytes, size) &(struct iovec){(void *)(bytes), size}, 1

ssize_t write(int fd, const void *bytes, size_t size) { return transfer(fd, ONE(bytes, size), -1, 1); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return transfer(fd, parts, count, -1, 1); }
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) { return transfer(fd, ONE(bytes, size), at, 1); }
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at) { return transfer(fd, ONE(bytes, size), at, 1); }
ssize_t read(int fd, void *bytes, size_t size) { return transfer(fd, ONE(bytes, size), -1, 0); }
ssize_t readv(int fd, const struct iovec *parts, int count) { return transfer(fd, parts, count, -1, 0); }
ssize_t pread(int fd, void *bytes, size_t size, off_t at) { return transfer(fd, ONE(bytes, size), at, 0); }
ssize_t pread64(int fd, void *bytes, size_t size, off64_t at) { return transfer(fd, ONE(bytes, size), at, 0); }

/* Copies within the kernel are refused, so that every byte passes `write`. */
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    char buffer[LONGEST];
    if (of_descriptor(out, buffer)) return errno = ENOSYS, -1;
    return syscall(SYS_copy_file_range, in, in_at, out, out_at, size, flags);
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    char buffer[LONGEST];
    if (of_descriptor(out, buffer)) return errno = ENOSYS, -1;
    return syscall(SYS_sendfile, out, in, at, size);
}

#define ON_DESCRIPTOR(kind, fd, call) \
    char buffer[LONGEST]; \
    const char *path = of_descriptor(fd, buffer); \
    if (!path) return call; \
    return AROUND(kind, path, NULL, int, -1, call)

int fsync(int fd) { ON_DESCRIPTOR("fsync", fd, (int)syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { ON_DESCRIPTOR("fdatasync", fd, (int)syscall(SYS_fdatasync, fd)); }

static int truncate_to(int fd, off_t size) {
    char buffer[LONGEST];
    const char *path = of_descriptor(fd, buffer);
    if (!path) return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&one_at_a_time);
    enum action action = next_call("ftruncate", path);
    if (action == KILL) die();
    int result = action == FAIL ? -1 : (int)syscall(SYS_ftruncate, fd, size), error = action == FAIL ? fault_errno : errno;
    record("ftruncate", result < 0 ? -error : 0, size, path, NULL, NULL, 0);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error;
    return result;
}
int ftruncate(int fd, off_t size) { return truncate_to(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncate_to(fd, size); }

#define ON_PATH(kind, at, named, call) \
    char buffer[LONGEST]; \
    const char *path = below_root(at, named, buffer); \
    if (!path) return call; \
    return AROUND(kind, path, NULL, int, -1, call)

int mkdir(const char *name, mode_t mode) { ON_PATH("mkdir", AT_FDCWD, name, (int)syscall(SYS_mkdirat, AT_FDCWD, name, mode)); }
int mkdirat(int at, const char *name, mode_t mode) { ON_PATH("mkdir", at, name, (int)syscall(SYS_mkdirat, at, name, mode)); }
int unlink(const char *name) { ON_PATH("unlink", AT_FDCWD, name, (int)syscall(SYS_unlinkat, AT_FDCWD, name, 0)); }
int rmdir(const char *name) { ON_PATH("rmdir", AT_FDCWD, name, (int)syscall(SYS_unlinkat, AT_FDCWD, name, AT_REMOVEDIR)); }
int unlinkat(int at, const char *name, int flags) {
    ON_PATH(flags & AT_REMOVEDIR ? "rmdir" : "unlink", at, name, (int)syscall(SYS_unlinkat, at, name, flags));
}
int statx(int at, const char *name, int flags, unsigned mask, struct statx *out) {
    char buffer[LONGEST];
    const char *volatile given = name; /* Rust asks with NULL whether the kernel knows the call; the header promises that nobody does */
    const char *path = given && !*given ? of_descriptor(at, buffer) : below_root(at, given, buffer);
    if (!path) return syscall(SYS_statx, at, name, flags, mask, out);
    return AROUND("stat", path, NULL, int, -1, (int)syscall(SYS_statx, at, name, flags, mask, out));
}

static int move(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    char buffer[LONGEST], other[LONGEST];
    const char *path = below_root(from_at, from, buffer), *second = below_root(to_at, to, other);
    if (!path || !second) return syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    const char *kind = flags & RENAME_EXCHANGE ? "exchange" : "rename";
    return AROUND(kind, path, second, int, -1, (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags));
}
int rename(const char *from, const char *to) { return move(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_at, const char *from, int to_at, const char *to) { return move(from_at, from, to_at, to, 0); }
int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) { return move(from_at, from, to_at, to, flags); }

static int link_to(int from_at, const char *from, int to_at, const char *to, int flags) {
    char buffer[LONGEST], other[LONGEST];
    const char *path = below_root(from_at, from, buffer), *second = below_root(to_at, to, other);
    if (!path || !second) return syscall(SYS_linkat, from_at, from, to_at, to, flags);
    return AROUND("link", path, second, int, -1, (int)syscall(SYS_linkat, from_at, from, to_at, to, flags));
}
int link(const char *from, const char *to) { return link_to(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_at, const char *from, int to_at, const char *to, int flags) { return link_to(from_at, from, to_at, to, flags); }

static void *map_file(void *near, size_t size, int protection, int flags, int fd, off_t at) {
    char buffer[LONGEST];
    const char *path = flags & MAP_ANONYMOUS ? NULL : of_descriptor(fd, buffer);
    if (!path) return (void *)syscall(SYS_mmap, near, size, protection, flags, fd, at);
    const char *kind = (flags & MAP_SHARED) && (protection & PROT_WRITE) ? "mmap-to-write" : "mmap";
    return AROUND(kind, path, NULL, void *, MAP_FAILED, (void *)syscall(SYS_mmap, near, size, protection, flags, fd, at));
}
void *mmap(void *near, size_t size, int protection, int flags, int fd, off_t at) { return map_file(near, size, protection, flags, fd, at); }
void *mmap64(void *near, size_t size, int protection, int flags, int fd, off64_t at) { return map_file(near, size, protection, flags, fd, at); }

DIR *opendir(const char *name) {
    char buffer[LONGEST];
    const char *path = below_root(AT_FDCWD, name, buffer);
    if (!path) return NEXT(opendir)(name);
    return AROUND("opendir", path, NULL, DIR *, NULL, NEXT(opendir)(name));
}

/* The end of a folder is no error: NULL with errno 0. */
struct dirent64 *readdir64(DIR *folder) {
    char buffer[LONGEST];
    const char *path = of_descriptor(dirfd(folder), buffer);
    if (!path) return NEXT(readdir64)(folder);
    pthread_mutex_lock(&one_at_a_time);
    enum action action = next_call("readdir", path);
    if (action == KILL) die();
    int before = errno;
    errno = 0;
    struct dirent64 *entry = action == FAIL ? NULL : NEXT(readdir64)(folder);
    int error = action == FAIL ? fault_errno : errno;
    record("readdir", -error, -1, path, NULL, NULL, 0);
    pthread_mutex_unlock(&one_at_a_time);
    errno = error ? error : before;
    return entry;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int jumps = -1;
    static volatile uint32_t looks;
    if (jumps < 0) jumps = getenv("FAULTS_CLOCK") != NULL;
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (!result && jumps && clock == CLOCK_REALTIME) now->tv_sec += 31536000L * ((int)(++looks * 2654435761u >> 16) % 21 - 10);
    return result;
}
