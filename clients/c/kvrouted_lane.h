/* A lane: memory that a gateway shares with the daemon, through which frames pass without a system call. kvrouted.h
 * includes this header. schemas/README.md, "Lanes", specifies the layout, and the order of the stores of each side.
 *
 * All accesses are atomic accesses of words, because the other side may write anything anywhere at any time. Each
 * side keeps its own position, and the last valid position of the other side, in memory of its own. The builtins of
 * GCC and Clang stand for C11's atomics, so that this compiles as C99 and C++ too.
 */
#ifndef KVROUTED_LANE_H
#define KVROUTED_LANE_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A gateway's end of a lane. */
typedef struct kvr_lane {
    uint64_t *words; /* mapped; NULL = there is no lane */
    size_t bytes;
    int bell;                            /* a socket: a byte on it means "read the positions again" */
    uint64_t request_words, reply_words; /* of the rings: powers of two */
    uint64_t request_tail, request_head; /* this side's position, and the last valid one of the daemon */
    uint64_t request_owned;              /* the end of the lines that this side has taken; see kvr__lane_own */
    uint64_t reply_head, reply_tail;     /* the same of the replies */
} kvr_lane;

/* What a sleeping side waits for. */
enum { KVR__AWAITS_DATA = 1, KVR__AWAITS_ROOM = 2, KVR__AWAITS_BOTH = 3 };
/* The layout that this header knows, and the places of its words. */
enum {
    KVR__LANE_LAYOUT = 1,
    KVR__REQUEST_TAIL = 0,
    KVR__REQUEST_HEAD = 16,
    KVR__REPLY_TAIL = 32,
    KVR__REPLY_HEAD = 48,
    KVR__GATEWAY_WAITS = 64,
    KVR__DAEMON_WAITS = 80,
    KVR__CONTROL_WORDS = 512
};
/* How requests are written. src/limits/serving.rs has the same numbers, the first three in bytes. */
enum {
    KVR__LINE_WORDS = 8,        /* words of a cache line */
    KVR__PUBLISHED_WORDS = 512, /* words of a long frame that are published at once */
    KVR__OWNED_WORDS = 8192,    /* words beyond the tail whose cache lines a busy-poll may take */
    KVR__LINES_PER_POLL = 16    /* cache lines that it takes at once */
};
/* The limits of a ring's bytes. */
#define KVR__RING_BYTES_MIN (4u << 10)
#define KVR__RING_BYTES_MAX (64u << 20)
/* Polls of a silent lane between two readings of the clock. */
#define KVR__POLLS_PER_CLOCK 16

/* Tells the processor that this is a busy-poll. */
static inline void kvr__pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int kvr__is_ring(uint32_t bytes) {
    return bytes >= KVR__RING_BYTES_MIN && bytes <= KVR__RING_BYTES_MAX && (bytes & (bytes - 1)) == 0;
}

/* Maps the memory of an opened lane. Answers with NULL, or with the fault. If it succeeds, it owns the bell. */
static inline const char *kvr__lane_map(
    kvr_lane *lane, int memory, int bell, uint32_t layout, uint32_t request_bytes, uint32_t reply_bytes) {
    /* F_GET_SEALS, F_SEAL_SEAL and F_SEAL_SHRINK of Linux. Headers define them only under _GNU_SOURCE. */
    enum { GET_SEALS = 1034, SEALED = 1 | 2 };
    struct stat found;
    void *mapped;
    int seals, flags = MAP_SHARED;
    size_t bytes = 8 * (size_t)KVR__CONTROL_WORDS + request_bytes + reply_bytes;
    if (layout != KVR__LANE_LAYOUT) return "this header does not know the layout of the daemon's lanes";
    if (!kvr__is_ring(request_bytes) || !kvr__is_ring(reply_bytes))
        return "the daemon's lane has rings of an invalid size";
    /* If the memory could shrink, an access could fail. */
    seals = fcntl(memory, GET_SEALS);
    if (seals < 0 || (seals & SEALED) != SEALED) return "the daemon's lane is not sealed";
    if (fstat(memory, &found) < 0 || found.st_size < 0 || (uint64_t)found.st_size != bytes)
        return "the daemon's lane has another size than its reply says";
#ifdef MAP_POPULATE
    flags |= MAP_POPULATE;
#endif
    mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, memory, 0);
    if (mapped == MAP_FAILED) return "the daemon's lane cannot be mapped";
    memset(lane, 0, sizeof *lane);
    lane->words = (uint64_t *)mapped;
    lane->bytes = bytes;
    lane->bell = bell;
    lane->request_words = request_bytes / 8;
    lane->reply_words = reply_bytes / 8;
    return NULL;
}

/* Closes a lane, if there is one. */
static inline void kvr__lane_close(kvr_lane *lane) {
    if (lane->words == NULL) return;
    munmap(lane->words, lane->bytes);
    close(lane->bell);
    memset(lane, 0, sizeof *lane);
}

/* The words that can be written now; -1 = the daemon's position is invalid. */
static inline int64_t kvr__lane_room(kvr_lane *lane) {
    /* Acquire: pairs with the daemon's release of the head. Words written from here on come after its copies. */
    uint64_t head = __atomic_load_n(&lane->words[KVR__REQUEST_HEAD], __ATOMIC_ACQUIRE);
    if (head < lane->request_head || head > lane->request_tail) return -1;
    lane->request_head = head;
    return (int64_t)(lane->request_words - (lane->request_tail - head));
}

/* The words that can be read now; -1 = the daemon's position is invalid. */
static inline int64_t kvr__lane_ready(kvr_lane *lane) {
    /* Acquire: pairs with the daemon's release of the tail. The words before it are there. */
    uint64_t tail = __atomic_load_n(&lane->words[KVR__REPLY_TAIL], __ATOMIC_ACQUIRE);
    if (tail < lane->reply_tail || tail - lane->reply_head > lane->reply_words) return -1;
    lane->reply_tail = tail;
    return (int64_t)(tail - lane->reply_head);
}

/* Whether the awaited words or room are there; -1 = a position of the daemon is invalid. */
static inline int kvr__lane_has(kvr_lane *lane, uint64_t awaited) {
    int64_t words = kvr__lane_ready(lane);
    if (words == 0 && awaited != KVR__AWAITS_DATA) words = kvr__lane_room(lane);
    return words < 0 ? -1 : words > 0;
}

/* Announces what this side is about to sleep for. It must check once more before it sleeps. */
static inline void kvr__lane_announce(kvr_lane *lane, uint64_t awaited) {
    /* Relaxed: the fence orders it. */
    __atomic_fetch_or(&lane->words[KVR__GATEWAY_WAITS], awaited, __ATOMIC_RELAXED);
    /* Sequentially consistent: pairs with the daemon's fence between the move of its position and its read of this
     * word. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Withdraws the announcement. */
static inline void kvr__lane_settle(kvr_lane *lane) {
    /* Relaxed: if the daemon does not see it yet, it rings once too often. */
    __atomic_fetch_and(&lane->words[KVR__GATEWAY_WAITS], ~(uint64_t)KVR__AWAITS_BOTH, __ATOMIC_RELAXED);
}

/* Rings for the daemon if it sleeps for what this side has just made available by moving a position. */
static inline void kvr__lane_ring(kvr_lane *lane, uint64_t moved) {
    uint64_t *waits = &lane->words[KVR__DAEMON_WAITS];
    const uint8_t rung = 1;
    /* Sequentially consistent: pairs with the daemon's fence between its announcement and its last check. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    /* Relaxed: the fence orders the load, and the exchange publishes nothing. */
    if ((__atomic_load_n(waits, __ATOMIC_RELAXED) & moved) == 0) return;
    if (__atomic_exchange_n(waits, 0, __ATOMIC_RELAXED) == 0) return;
    /* A full bell has rung already. If the other end is closed, the connection's socket shows it. */
    while (send(lane->bell, &rung, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
}

/* Empties the bell. Answers whether the daemon still holds the other end. */
static inline int kvr__lane_hear(kvr_lane *lane) {
    uint8_t rings[256];
    ssize_t heard;
    do heard = recv(lane->bell, rings, sizeof rings, MSG_DONTWAIT);
    while (heard < 0 && errno == EINTR);
    return heard > 0 || (heard < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
}

static inline void kvr__words_in(uint64_t *words, const uint8_t *bytes, uint64_t count) {
    uint64_t i, word;
    for (i = 0; i < count; i++) {
        memcpy(&word, bytes + 8 * i, 8);
        /* Relaxed: the release of the tail publishes it. */
        __atomic_store_n(&words[i], word, __ATOMIC_RELAXED);
    }
}

/* Reads the last word first. If it reads upwards, a processor may fetch the lines that follow, which the daemon is about to
 * write. */
static inline void kvr__words_out(uint64_t *words, uint8_t *bytes, uint64_t count) {
    uint64_t i, word;
    for (i = count; i-- > 0;) {
        /* Relaxed: the acquire of the tail came before. */
        word = __atomic_load_n(&words[i], __ATOMIC_RELAXED);
        memcpy(bytes + 8 * i, &word, 8);
    }
}

/* Takes up to `lines_max` cache lines before `end`. Every word up to there must be free. It stores a word to each line, so that
 * the processor asks for several lines at a time. With a store for each word, the stores of a few lines fill its queue. Answers
 * whether it took any. */
static inline int kvr__lane_own(kvr_lane *lane, uint64_t end, uint64_t lines_max) {
    uint64_t *ring = lane->words + KVR__CONTROL_WORDS, lines = 0;
    if (lane->request_owned < lane->request_tail) lane->request_owned = lane->request_tail;
    for (; lines < lines_max && lane->request_owned < end; lines++) {
        /* Relaxed: nothing reads this word before it is written and published. */
        __atomic_store_n(&ring[lane->request_owned & (lane->request_words - 1)], 0, __ATOMIC_RELAXED);
        lane->request_owned = (lane->request_owned / KVR__LINE_WORDS + 1) * KVR__LINE_WORDS;
    }
    return lines > 0;
}

/* Takes a few of the lines that the next request will be written to, so that it need not wait for them. For a busy-poll. */
static inline void kvr__lane_own_ahead(kvr_lane *lane) {
    uint64_t half = lane->request_words / 2, free_end;
    uint64_t end = lane->request_tail + (half < KVR__OWNED_WORDS ? half : (uint64_t)KVR__OWNED_WORDS);
    if (lane->request_owned >= end) return;
    /* The next request finds an invalid position. */
    if (end - lane->request_head > lane->request_words && kvr__lane_room(lane) < 0) return;
    free_end = lane->request_head + lane->request_words;
    if (!kvr__lane_own(lane, end < free_end ? end : free_end, KVR__LINES_PER_POLL)) return;
    /* Sequentially consistent: orders nothing, and pairs with no other. It waits for these stores: with more of them pending,
     * the fence of the next request would wait for all. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Writes as many whole words as there is room for, and publishes them in pieces, so that the daemon can copy the first while
 * the rest is written. Answers with their bytes, or with -1 if the daemon's position is invalid. */
static inline int64_t kvr__lane_push(kvr_lane *lane, const uint8_t *bytes, size_t length) {
    uint64_t *ring = lane->words + KVR__CONTROL_WORDS;
    uint64_t count = length / 8, done, piece, at, first;
    /* Also if the known room is large enough: with older positions, long requests take longer. */
    int64_t room = kvr__lane_room(lane);
    if (room < 0) return -1;
    if (count > (uint64_t)room) count = (uint64_t)room;
    if (count == 0) return 0;
    for (done = 0; done < count; done += piece, bytes += 8 * piece) {
        piece = count - done < KVR__PUBLISHED_WORDS ? count - done : (uint64_t)KVR__PUBLISHED_WORDS;
        kvr__lane_own(lane, lane->request_tail + piece, UINT64_MAX);
        at = lane->request_tail & (lane->request_words - 1);
        first = piece < lane->request_words - at ? piece : lane->request_words - at;
        kvr__words_in(ring + at, bytes, first);
        kvr__words_in(ring, bytes + 8 * first, piece - first);
        lane->request_tail += piece;
        /* Release: pairs with the daemon's acquire of the tail. */
        __atomic_store_n(&lane->words[KVR__REQUEST_TAIL], lane->request_tail, __ATOMIC_RELEASE);
    }
    kvr__lane_ring(lane, KVR__AWAITS_DATA);
    return (int64_t)(8 * count);
}

/* Reads `count` words, no more than are ready. Each is read once. */
static inline void kvr__lane_pop(kvr_lane *lane, uint8_t *bytes, uint64_t count) {
    uint64_t *ring = lane->words + KVR__CONTROL_WORDS + lane->request_words;
    uint64_t at = lane->reply_head & (lane->reply_words - 1);
    uint64_t first = count < lane->reply_words - at ? count : lane->reply_words - at;
    kvr__words_out(ring, bytes + 8 * first, count - first);
    kvr__words_out(ring + at, bytes, first);
    lane->reply_head += count;
    /* Release: pairs with the daemon's acquire of the head. */
    __atomic_store_n(&lane->words[KVR__REPLY_HEAD], lane->reply_head, __ATOMIC_RELEASE);
    kvr__lane_ring(lane, KVR__AWAITS_ROOM);
}

#ifdef __cplusplus
}
#endif

#endif
