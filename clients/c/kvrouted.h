/* A client of kvrouted, the daemon that says which worker should run a prompt.
 *
 * All of it is this header: C99 or C++ and POSIX (define _POSIX_C_SOURCE as 200809L or later before the first include).
 * A connection serves one thread and one request at a time. Prompts go as tokens, or as local hashes that the caller made
 * by the scheme of the space. Every call ends within the connection's timeout.
 *
 *     kvr_client client;
 *     kvr_space space;
 *     kvr_route_reply reply;
 *     kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
 *
 *     if (kvr_connect(&client, "/run/kvrouted/kvrouted.sock", "my-gateway", NULL, 1000) == KVR_OK &&
 *         kvr_find_space(&client, "my-model", NULL, &space) == KVR_OK) {
 *         request.space_id = space.space_id;
 *         request.request_id = "request-1";       // books; NULL only asks
 *         request.tokens = tokens;
 *         request.token_count = count;
 *         if (kvr_route(&client, &request, &reply) == KVR_OK && reply.candidate_count > 0) {
 *             // send the prompt to reply.candidates[0].worker_id
 *             kvr_prefill_complete(&client, reply.booking, 0, NULL);  // when its first token comes
 *             kvr_free(&client, reply.booking, NULL);                 // when it has ended, however it ended
 *         }
 *     }
 *     kvr_close(&client);
 *
 * After KVR_CLOSED, KVR_SYSTEM or KVR_MALFORMED close the client and connect again, with the same session: the bookings
 * are still there if the daemon is. After KVR_TIMEOUT it can be used on; a booking whose reply comes too late is freed.
 *
 * kvrouted_steady.h connects again by itself and decides without the daemon where that does not answer;
 * kvrouted_hash.h makes local hashes.
 */
#ifndef KVROUTED_H
#define KVROUTED_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Candidates that a reply has room for. */
#define KVR_CANDIDATES_MAX 16
/* Bytes of a name or message that is kept, its end included; longer ones are cut. */
#define KVR_TEXT_BYTES 256
/* Bytes of the longest name that the daemon takes, without an end. */
#define KVR_NAME_BYTES_MAX 256

/* How a call ended. What else is known: kvr_client.message. */
typedef enum kvr_status {
    KVR_OK = 0,
    KVR_REFUSED = 1,   /* the daemon's own error: kvr_client.error_code, remedy, retryable */
    KVR_TIMEOUT = 2,   /* no answer in time */
    KVR_CLOSED = 3,    /* the daemon has closed the connection */
    KVR_SYSTEM = 4,    /* a system call failed: kvr_client.message */
    KVR_MALFORMED = 5, /* the daemon sent what cannot be read */
    KVR_INVALID = 6,   /* the request means nothing; nothing was sent */
    KVR_UNKNOWN = 7    /* no such space, or several */
} kvr_status;

/* What became of a report about a booking. */
typedef enum kvr_outcome {
    KVR_APPLIED = 0,
    KVR_ALREADY_APPLIED = 1,
    KVR_BOOKING_UNKNOWN = 2,
    KVR_SUPERSEDED = 3
} kvr_outcome;

/* 128 bits that the connections of a gateway share, and with them their bookings. */
typedef struct kvr_session {
    uint64_t hi, lo;
} kvr_session;

/* An opaque name of a booking; all zero = none. */
typedef struct kvr_booking {
    uint64_t slot, generation;
} kvr_booking;

typedef struct kvr_space {
    uint32_t space_id;
    uint8_t role;        /* 0 both, 1 prefill, 2 decode */
    uint32_t block_size; /* tokens; 0 = not yet known, or hashed in a way that this header does not know */
    uint8_t window;      /* 0 a block's own tokens, 1 the one after as well */
    char model[KVR_TEXT_BYTES];
    char name_space[KVR_TEXT_BYTES];
} kvr_space;

typedef struct kvr_route_request {
    uint32_t space_id;
    const char *request_id; /* books under this name; NULL = only ask */
    uint32_t attempt;
    /* The prompt: tokens, or local hashes with the scheme they were made by; token_count goes with both. */
    const uint32_t *tokens;
    size_t token_count;
    const uint64_t *local_hashes;
    size_t local_hash_count;
    uint32_t block_size;
    uint8_t window;
    const char *lora; /* NULL = none */
    const char *salt; /* NULL = none */
    uint32_t candidates_max;
    uint32_t expected_output_tokens;
    uint32_t deadline_us; /* how long a booking may wait for a worker; 0 = most of the connection's timeout */
    const char *affinity_session; /* the conversation whose requests are to come to one worker; NULL = none */
    uint8_t disaggregate;         /* 1 = choose a worker of the model's prefill pool too; the space is the decode pool's */
} kvr_route_request;

#define KVR_ROUTE_REQUEST_INIT {0, NULL, 0, NULL, 0, NULL, 0, 0, 0, NULL, NULL, 8, 0, 0, NULL, 0}

typedef struct kvr_candidate {
    uint64_t worker_id;
    uint32_t dp_rank;
    uint32_t device_blocks, host_blocks, disk_blocks, external_blocks; /* held; each counts what extends the one before */
    uint8_t trust_level;                                               /* 0 none .. 4 exact */
    uint64_t trust_reasons;                                            /* bits of schemas/README.md */
    uint8_t state;                                                     /* 0 joining, 1 ready, 2 draining, 3 down */
    double cost;
    char name[KVR_TEXT_BYTES];
} kvr_candidate;

typedef struct kvr_route_reply {
    size_t candidate_count; /* 0 = nobody was eligible */
    kvr_candidate candidates[KVR_CANDIDATES_MAX]; /* the chosen one first, then by ascending cost */
    uint32_t eligible;
    uint8_t unmatchable; /* the prompt could not be looked up */
    uint64_t notes;      /* bits of schemas/README.md */
    uint32_t request_blocks;
    uint64_t fleet_version;
    kvr_booking booking;     /* all zero = nothing was booked */
    uint16_t nobody;         /* why nobody was eligible: an error code; 0 = somebody was */
    uint32_t retry_after_us; /* where nobody was and time may change that */
    size_t prefill_count;    /* 0 = who is chosen above prefills too */
    kvr_candidate prefill[KVR_CANDIDATES_MAX]; /* who prefills, the chosen one first */
    kvr_booking prefill_booking;               /* the booking of that half */
} kvr_route_reply;

/* What a worker would have to do if it took a prompt. */
typedef struct kvr_potential_load {
    uint64_t worker_id;
    uint32_t dp_rank;
    uint32_t active_requests; /* now */
    uint64_t prefill_tokens;  /* with this prompt's */
    uint64_t decode_blocks;   /* with this prompt's */
} kvr_potential_load;

/* A worker, as the fleet knows it. */
typedef struct kvr_worker {
    uint64_t worker_id;
    uint32_t dp_rank;
    uint32_t space_id;
    uint8_t state; /* 0 joining, 1 ready, 2 draining, 3 down */
    double weight;
    char name[KVR_TEXT_BYTES];
} kvr_worker;

/* Every space, where one is named. */
#define KVR_EVERY_SPACE UINT32_MAX
/* Every data-parallel rank of a worker, where one is named. */
#define KVR_EVERY_RANK UINT32_MAX

typedef struct kvr_buffer {
    uint8_t *bytes;
    size_t used, room;
    int short_of_memory;
} kvr_buffer;

typedef struct kvr_client {
    int fd;
    int timeout_ms;
    uint64_t next_id;
    uint64_t instance_id; /* of the daemon: drawn when it starts */
    uint64_t features;    /* bits of schemas/README.md */
    uint32_t prompt_tokens_max;
    /* Of the last call that failed. */
    uint16_t error_code;
    uint8_t retryable;
    uint32_t retry_after_us;
    char message[KVR_TEXT_BYTES];
    char remedy[KVR_TEXT_BYTES];
    /* Of this header. */
    kvr_buffer out, in, hello, fleet;
    uint64_t watch_id, fleets; /* 0 = nothing is watched; how many fleets came */
} kvr_client;

/* ---- bytes ---------------------------------------------------------------------------------------- */

enum { KVR__HEADER_BYTES = 16, KVR__TABLE_BYTES = 160 };
#define KVR__BODY_BYTES_CEILING (64u << 20)
#define KVR__FEATURE_QUEUE (1u << 12)

static inline void kvr__put(uint8_t *at, uint64_t value, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static inline uint64_t kvr__get(const uint8_t *at, size_t bytes) {
    uint64_t value = 0;
    size_t i;
    for (i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

/* Makes room for more bytes at the end, zeroed; answers with where they begin. */
static inline size_t kvr__grow(kvr_buffer *buffer, size_t bytes) {
    size_t at = buffer->used;
    if (bytes > buffer->room - buffer->used) {
        size_t room = (buffer->used + bytes) * 2 + 1024;
        uint8_t *grown = (uint8_t *)realloc(buffer->bytes, room);
        if (grown == NULL) {
            buffer->short_of_memory = 1;
            return 0;
        }
        buffer->bytes = grown;
        buffer->room = room;
    }
    memset(buffer->bytes + at, 0, bytes);
    buffer->used += bytes;
    return at;
}

static inline void kvr__align(kvr_buffer *buffer, size_t to) {
    kvr__grow(buffer, (to - buffer->used % to) % to);
}

/* ---- building a body: a table, then what it points at. The frame header's 16 bytes keep every alignment. ---- */

typedef struct kvr__table {
    size_t at, vtable, used;
} kvr__table;

/* Begins a frame and its one root table of so many fields. */
static inline kvr__table kvr__begin(kvr_buffer *out, size_t fields) {
    kvr__table table = {0, 0, 4};
    out->used = 0;
    out->short_of_memory = 0;
    kvr__grow(out, KVR__HEADER_BYTES + 8);
    table.vtable = kvr__grow(out, 4 + 2 * fields);
    kvr__align(out, 8);
    table.at = kvr__grow(out, KVR__TABLE_BYTES);
    if (out->short_of_memory) return table;
    memcpy(out->bytes + KVR__HEADER_BYTES + 4, "KVRT", 4);
    kvr__put(out->bytes + KVR__HEADER_BYTES, table.at - KVR__HEADER_BYTES, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * fields, 2);
    return table;
}

/* A second table after the first; `from` is the field that points at it. */
static inline kvr__table kvr__inner(kvr_buffer *out, size_t fields, size_t from) {
    kvr__table table = {0, 0, 4};
    kvr__align(out, 8);
    table.vtable = kvr__grow(out, 4 + 2 * fields);
    kvr__align(out, 8);
    table.at = kvr__grow(out, 32);
    if (out->short_of_memory) return table;
    kvr__put(out->bytes + from, table.at - from, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * fields, 2);
    return table;
}

/* Gives a field its place in the table. */
static inline size_t kvr__field(kvr_buffer *out, kvr__table *table, size_t index, size_t bytes, size_t align) {
    size_t place = (table->used + align - 1) / align * align;
    if (out->short_of_memory) return 0;
    table->used = place + bytes;
    kvr__put(out->bytes + table->vtable + 4 + 2 * index, place, 2);
    kvr__put(out->bytes + table->vtable + 2, table->used, 2);
    return table->at + place;
}

static inline void kvr__number(kvr_buffer *out, kvr__table *table, size_t index, uint64_t value, size_t bytes) {
    size_t at = kvr__field(out, table, index, bytes, bytes);
    if (!out->short_of_memory) kvr__put(out->bytes + at, value, bytes);
}

static inline void kvr__pair(kvr_buffer *out, kvr__table *table, size_t index, uint64_t first, uint64_t second) {
    size_t at = kvr__field(out, table, index, 16, 8);
    if (out->short_of_memory) return;
    kvr__put(out->bytes + at, first, 8);
    kvr__put(out->bytes + at + 8, second, 8);
}

/* The elements of a vector, yet to be written; 0 if there is no memory. */
static inline size_t kvr__elements(kvr_buffer *out, size_t from, size_t count, size_t bytes) {
    size_t at, elements;
    /* Its length is before the elements, which are aligned. */
    kvr__align(out, 4);
    if (bytes == 8 && (out->used + 4) % 8 != 0) kvr__grow(out, 4);
    at = kvr__grow(out, 4);
    elements = kvr__grow(out, count * bytes);
    if (out->short_of_memory) return 0;
    kvr__put(out->bytes + from, at - from, 4);
    kvr__put(out->bytes + at, count, 4);
    return elements;
}

static inline void kvr__text(kvr_buffer *out, size_t from, const char *text) {
    size_t at = kvr__elements(out, from, strlen(text), 1);
    kvr__grow(out, 1);
    if (!out->short_of_memory) memcpy(out->bytes + at, text, strlen(text));
}

static inline kvr_status kvr__fail(kvr_client *client, kvr_status status, const char *message) {
    snprintf(client->message, sizeof client->message, "%s", message);
    return status;
}

static inline kvr_status kvr__fail_errno(kvr_client *client, const char *what) {
    snprintf(client->message, sizeof client->message, "%s: %s", what, strerror(errno));
    return KVR_SYSTEM;
}

/* Ends the frame: pads it and writes its header. */
static inline kvr_status kvr__end(kvr_client *client, uint8_t kind, uint64_t id) {
    kvr_buffer *out = &client->out;
    kvr__align(out, 8);
    if (out->short_of_memory) return kvr__fail(client, KVR_INVALID, "no memory for the request");
    kvr__put(out->bytes, out->used - KVR__HEADER_BYTES, 4);
    out->bytes[4] = kind;
    out->bytes[5] = 0;
    kvr__put(out->bytes + 6, 1, 2);
    kvr__put(out->bytes + 8, id, 8);
    return KVR_OK;
}

/* ---- reading a body: nothing is read outside of it, whatever it says ----------------------------------- */

typedef struct kvr__view {
    const uint8_t *bytes;
    size_t length;
    int bad;
} kvr__view;

typedef struct kvr__row {
    size_t at, vtable, fields;
} kvr__row;

static inline int kvr__holds(kvr__view *view, size_t at, size_t bytes) {
    if (at <= view->length && bytes <= view->length - at) return 1;
    view->bad = 1;
    return 0;
}

/* Where the offset at `at` points. */
static inline size_t kvr__follow(kvr__view *view, size_t at) {
    size_t to;
    if (!kvr__holds(view, at, 4)) return 0;
    to = at + (size_t)kvr__get(view->bytes + at, 4);
    return kvr__holds(view, to, 4) ? to : 0;
}

static inline kvr__row kvr__row_at(kvr__view *view, size_t at) {
    kvr__row row = {0, 0, 0};
    int64_t vtable;
    size_t bytes;
    if (view->bad || !kvr__holds(view, at, 4)) return row;
    vtable = (int64_t)at - (int32_t)(uint32_t)kvr__get(view->bytes + at, 4);
    if (vtable < 0 || !kvr__holds(view, (size_t)vtable, 4)) {
        view->bad = 1;
        return row;
    }
    bytes = (size_t)kvr__get(view->bytes + vtable, 2);
    if (bytes < 4 || !kvr__holds(view, (size_t)vtable, bytes)) {
        view->bad = 1;
        return row;
    }
    row.at = at;
    row.vtable = (size_t)vtable;
    row.fields = (bytes - 4) / 2;
    return row;
}

static inline kvr__row kvr__root(kvr__view *view) {
    kvr__row none = {0, 0, 0};
    if (!kvr__holds(view, 0, 8) || memcmp(view->bytes + 4, "KVRT", 4) != 0) {
        view->bad = 1;
        return none;
    }
    return kvr__row_at(view, kvr__follow(view, 0));
}

/* Where a field lies; 0 = it is absent. */
static inline size_t kvr__find(kvr__view *view, kvr__row row, size_t index, size_t bytes) {
    size_t place;
    if (view->bad || index >= row.fields) return 0;
    place = (size_t)kvr__get(view->bytes + row.vtable + 4 + 2 * index, 2);
    if (place == 0 || !kvr__holds(view, row.at + place, bytes)) return 0;
    return row.at + place;
}

static inline uint64_t kvr__read(kvr__view *view, kvr__row row, size_t index, size_t bytes) {
    size_t at = kvr__find(view, row, index, bytes);
    return at == 0 ? 0 : kvr__get(view->bytes + at, bytes);
}

static inline double kvr__read_double(kvr__view *view, kvr__row row, size_t index) {
    uint64_t bits = kvr__read(view, row, index, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A vector's elements and how many; 0 elements where it is absent. */
static inline size_t kvr__vector(kvr__view *view, kvr__row row, size_t index, size_t bytes, size_t *count) {
    size_t field = kvr__find(view, row, index, 4), at;
    *count = 0;
    if (field == 0) return 0;
    at = kvr__follow(view, field);
    if (view->bad) return 0;
    *count = (size_t)kvr__get(view->bytes + at, 4);
    if (*count > view->length || !kvr__holds(view, at + 4, *count * bytes)) {
        view->bad = 1;
        *count = 0;
        return 0;
    }
    return at + 4;
}

static inline void kvr__read_text(kvr__view *view, kvr__row row, size_t index, char *to) {
    size_t bytes, at = kvr__vector(view, row, index, 1, &bytes);
    if (bytes >= KVR_TEXT_BYTES) bytes = KVR_TEXT_BYTES - 1;
    if (bytes > 0) memcpy(to, view->bytes + at, bytes);
    to[bytes] = 0;
}

static inline kvr__row kvr__read_row(kvr__view *view, kvr__row row, size_t index) {
    kvr__row none = {0, 0, 0};
    size_t field = kvr__find(view, row, index, 4);
    return field == 0 ? none : kvr__row_at(view, kvr__follow(view, field));
}

static inline kvr_booking kvr__read_booking(kvr__view *view, kvr__row row, size_t index) {
    kvr_booking booking = {0, 0};
    size_t at = kvr__find(view, row, index, 16);
    if (at != 0) {
        booking.slot = kvr__get(view->bytes + at, 8);
        booking.generation = kvr__get(view->bytes + at + 8, 8);
    }
    return booking;
}

static inline void kvr__read_candidate(kvr__view *view, kvr__row row, kvr_candidate *to) {
    size_t tiers = kvr__find(view, row, 3, 16), trust = kvr__find(view, row, 4, 40);
    memset(to, 0, sizeof *to);
    to->worker_id = kvr__read(view, row, 0, 8);
    to->dp_rank = (uint32_t)kvr__read(view, row, 1, 4);
    kvr__read_text(view, row, 2, to->name);
    if (tiers != 0) {
        to->device_blocks = (uint32_t)kvr__get(view->bytes + tiers, 4);
        to->host_blocks = (uint32_t)kvr__get(view->bytes + tiers + 4, 4);
        to->disk_blocks = (uint32_t)kvr__get(view->bytes + tiers + 8, 4);
        to->external_blocks = (uint32_t)kvr__get(view->bytes + tiers + 12, 4);
    }
    if (trust != 0) {
        to->trust_level = view->bytes[trust];
        to->trust_reasons = kvr__get(view->bytes + trust + 8, 8);
    }
    to->cost = kvr__read_double(view, row, 5);
    to->state = (uint8_t)kvr__read(view, row, 6, 1);
}

/* Reads a list of candidates, as many as there is room for; answers with how many. */
static inline size_t kvr__read_candidates(kvr__view *view, kvr__row root, size_t index, kvr_candidate *to) {
    size_t count, at = kvr__vector(view, root, index, 4, &count), i;
    for (i = 0; i < count && i < KVR_CANDIDATES_MAX && !view->bad; i++)
        kvr__read_candidate(view, kvr__row_at(view, kvr__follow(view, at + 4 * i)), &to[i]);
    return i;
}

/* Reads the reply to a route; answers whether it could be read. */
static inline int kvr__read_route(const uint8_t *body, size_t length, kvr_route_reply *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row root;
    view.bytes = body;
    view.length = length;
    root = kvr__root(&view);
    memset(to, 0, sizeof *to);
    to->candidate_count = kvr__read_candidates(&view, root, 0, to->candidates);
    to->prefill_count = kvr__read_candidates(&view, root, 14, to->prefill);
    to->prefill_booking = kvr__read_booking(&view, root, 15);
    to->eligible = (uint32_t)kvr__read(&view, root, 1, 4);
    to->unmatchable = kvr__read(&view, root, 2, 1) != 0;
    to->notes = kvr__read(&view, root, 3, 8);
    to->request_blocks = (uint32_t)kvr__read(&view, root, 4, 4);
    to->fleet_version = kvr__read(&view, root, 6, 8);
    to->booking = kvr__read_booking(&view, root, 8);
    to->nobody = (uint16_t)kvr__read(&view, root, 11, 2);
    to->retry_after_us = (uint32_t)kvr__read(&view, root, 12, 4);
    return !view.bad;
}

/* Reads an error of the daemon; answers whether it could be read. */
static inline int kvr__read_error(const uint8_t *body, size_t length, kvr_client *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row root;
    view.bytes = body;
    view.length = length;
    root = kvr__root(&view);
    to->error_code = (uint16_t)kvr__read(&view, root, 0, 2);
    to->retryable = kvr__read(&view, root, 2, 1) != 0;
    to->retry_after_us = (uint32_t)kvr__read(&view, root, 3, 4);
    kvr__read_text(&view, root, 4, to->message);
    kvr__read_text(&view, root, 5, to->remedy);
    return !view.bad;
}

/* Reads the n-th space of a hello; answers 1, 0 if there are fewer, -1 if it cannot be read. */
static inline int kvr__read_space(const uint8_t *body, size_t length, size_t n, kvr_space *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row row, scheme;
    size_t count, at;
    uint64_t window, seed_rule;
    view.bytes = body;
    view.length = length;
    at = kvr__vector(&view, kvr__root(&view), 4, 4, &count);
    if (view.bad) return -1;
    if (n >= count) return 0;
    row = kvr__row_at(&view, kvr__follow(&view, at + 4 * n));
    memset(to, 0, sizeof *to);
    to->space_id = (uint32_t)kvr__read(&view, row, 0, 4);
    kvr__read_text(&view, row, 1, to->model);
    kvr__read_text(&view, row, 2, to->name_space);
    to->role = (uint8_t)kvr__read(&view, row, 3, 1);
    scheme = kvr__read_row(&view, row, 4);
    window = kvr__read(&view, scheme, 1, 1);
    seed_rule = kvr__read(&view, scheme, 2, 1);
    to->window = (uint8_t)window;
    to->block_size = window <= 1 && seed_rule == 0 ? (uint32_t)kvr__read(&view, scheme, 0, 4) : 0;
    return view.bad ? -1 : 1;
}

/* ---- the socket ---------------------------------------------------------------------------------------- */

static inline int64_t kvr__now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline kvr_status kvr__wait(kvr_client *client, short events, int64_t deadline_ms) {
    for (;;) {
        struct pollfd polled = {0, 0, 0};
        int64_t left = deadline_ms - kvr__now_ms();
        int ready;
        polled.fd = client->fd;
        polled.events = events;
        if (left <= 0) return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
        ready = poll(&polled, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (ready > 0) return KVR_OK;
        if (ready < 0 && errno != EINTR) return kvr__fail_errno(client, "poll");
    }
}

static inline kvr_status kvr__send(kvr_client *client, int64_t deadline_ms) {
    size_t sent = 0;
    while (sent < client->out.used) {
        ssize_t bytes = send(client->fd, client->out.bytes + sent, client->out.used - sent, MSG_NOSIGNAL);
        if (bytes >= 0) {
            sent += (size_t)bytes;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            kvr_status status = kvr__wait(client, POLLOUT, deadline_ms);
            /* Part of the frame may be gone: the connection is of no more use. */
            if (status == KVR_TIMEOUT && sent > 0) return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
            if (status != KVR_OK) return status;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            return kvr__fail(client, KVR_CLOSED, "the daemon has closed the connection");
        } else if (errno != EINTR) {
            return kvr__fail_errno(client, "send");
        }
    }
    return KVR_OK;
}

/* Drops the first so many bytes of what came. */
static inline void kvr__consume(kvr_buffer *in, size_t bytes) {
    memmove(in->bytes, in->bytes + bytes, in->used - bytes);
    in->used -= bytes;
}

/* Reads on until the first frame is whole; answers with the bytes of its body. */
static inline kvr_status kvr__frame(kvr_client *client, int64_t deadline_ms, size_t *body_bytes) {
    kvr_buffer *in = &client->in;
    for (;;) {
        ssize_t bytes;
        size_t at;
        if (in->used >= KVR__HEADER_BYTES) {
            *body_bytes = (size_t)kvr__get(in->bytes, 4);
            if (in->bytes[4] == 0 || in->bytes[5] != 0 || kvr__get(in->bytes + 6, 2) != 1 || *body_bytes % 8 != 0 ||
                *body_bytes > KVR__BODY_BYTES_CEILING)
                return kvr__fail(client, KVR_MALFORMED, "what came is no frame of protocol version 1");
            if (in->used - KVR__HEADER_BYTES >= *body_bytes) return KVR_OK;
        }
        at = kvr__grow(in, 65536);
        if (in->short_of_memory) return kvr__fail(client, KVR_SYSTEM, "no memory for a reply");
        bytes = recv(client->fd, in->bytes + at, 65536, 0);
        in->used = at + (bytes > 0 ? (size_t)bytes : 0);
        if (bytes == 0 || (bytes < 0 && errno == ECONNRESET))
            return kvr__fail(client, KVR_CLOSED, "the daemon has closed the connection");
        if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            kvr_status status = kvr__wait(client, POLLIN, deadline_ms);
            if (status != KVR_OK) return status;
        } else if (bytes < 0 && errno != EINTR) {
            return kvr__fail_errno(client, "recv");
        }
    }
}

/* What is said of a booking: of prefill complete (5) in microseconds, of output progress (9) in tokens, of served (11) by
 * whom, id and rank; of free (7) nothing. A booking of generation 0 is named by `request_id` and `attempt`. */
typedef struct kvr__word {
    uint8_t kind;
    kvr_booking booking;
    const char *request_id;
    uint32_t attempt;
    uint64_t value;
    uint32_t rank;
} kvr__word;

static inline kvr_status kvr__encode_word(kvr_client *client, const kvr__word *word, uint64_t id) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, 4);
    if (word->booking.generation != 0) kvr__pair(out, &table, 0, word->booking.slot, word->booking.generation);
    if (word->kind == 5 && word->value != 0) kvr__number(out, &table, 3, word->value, 8);
    if (word->kind == 9) kvr__number(out, &table, 3, word->value, 4);
    if (word->kind == 11) kvr__pair(out, &table, 3, word->value, word->rank);
    if (word->booking.generation == 0 && word->request_id != NULL) {
        kvr__number(out, &table, 2, word->attempt, 4);
        kvr__text(out, kvr__field(out, &table, 1, 4, 4), word->request_id);
    }
    return kvr__end(client, word->kind, id);
}

static inline kvr_status kvr__encode_free(kvr_client *client, kvr_booking booking, uint64_t id) {
    kvr__word word = {7, {0, 0}, NULL, 0, 0, 0};
    word.booking = booking;
    return kvr__encode_word(client, &word, id);
}

/* Keeps what a watch tells. */
static inline void kvr__keep_fleet(kvr_client *client, const uint8_t *body, size_t bytes) {
    client->fleet.used = 0;
    kvr__grow(&client->fleet, bytes);
    if (client->fleet.short_of_memory) return;
    memcpy(client->fleet.bytes, body, bytes);
    client->fleets++;
}

/* A frame that nobody waits for: a fleet is kept, and what an earlier request booked, whose caller has given up, is
 * freed, because nobody else ever would. */
static inline kvr_status kvr__stray(kvr_client *client, uint64_t of, uint8_t got, size_t body_bytes, int64_t deadline_ms) {
    const uint8_t *body = client->in.bytes + KVR__HEADER_BYTES;
    kvr_booking left[2];
    kvr_route_reply late;
    size_t i;
    if (of == client->watch_id && of != 0) {
        if (got == 24) kvr__keep_fleet(client, body, body_bytes);
        else client->watch_id = 0;
        return KVR_OK;
    }
    if (got != 4 || !kvr__read_route(body, body_bytes, &late)) return KVR_OK;
    left[0] = late.booking;
    left[1] = late.prefill_booking;
    for (i = 0; i < 2; i++) {
        kvr_status status;
        if (left[i].generation == 0) continue;
        status = kvr__encode_free(client, left[i], client->next_id++);
        if (status == KVR_OK) status = kvr__send(client, deadline_ms);
        if (status != KVR_OK) return status;
    }
    return KVR_OK;
}

/* Sends what is in `out` and waits for the reply to `id`, of this kind; it stays in `in` until kvr__consume. */
static inline kvr_status kvr__exchange(kvr_client *client, uint64_t id, uint8_t kind, size_t *frame_bytes) {
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    kvr_status status = kvr__send(client, deadline_ms);
    client->message[0] = status == KVR_OK ? 0 : client->message[0];
    while (status == KVR_OK) {
        size_t body_bytes;
        uint64_t of;
        uint8_t got;
        status = kvr__frame(client, deadline_ms, &body_bytes);
        if (status != KVR_OK) break;
        *frame_bytes = KVR__HEADER_BYTES + body_bytes;
        of = kvr__get(client->in.bytes + 8, 8);
        got = client->in.bytes[4];
        /* A connection that is refused is told so on no request's id. */
        if (got == 254 && (of == id || of == 0)) {
            int read = kvr__read_error(client->in.bytes + KVR__HEADER_BYTES, body_bytes, client);
            kvr__consume(&client->in, *frame_bytes);
            return read ? KVR_REFUSED : kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
        }
        if (of == id) {
            if (got == kind) return KVR_OK;
            kvr__consume(&client->in, *frame_bytes);
            return kvr__fail(client, KVR_MALFORMED, "the reply is of another kind");
        }
        status = kvr__stray(client, of, got, body_bytes, deadline_ms);
        kvr__consume(&client->in, *frame_bytes);
    }
    return status;
}

static inline kvr_status kvr__hello(kvr_client *client, const char *name, const kvr_session *session) {
    kvr__table table = kvr__begin(&client->out, 4);
    uint64_t id = client->next_id++;
    kvr__view view = {NULL, 0, 0};
    kvr__row root, limits;
    size_t frame_bytes, at;
    kvr_status status;
    kvr__number(&client->out, &table, 0, 1, 2);
    kvr__number(&client->out, &table, 1, 1, 2);
    if (session != NULL) kvr__pair(&client->out, &table, 3, session->hi, session->lo);
    at = kvr__field(&client->out, &table, 2, 4, 4);
    kvr__text(&client->out, at, name);
    status = kvr__end(client, 1, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, 2, &frame_bytes);
    if (status != KVR_OK) return status;
    /* Kept, because it names the spaces. */
    at = kvr__grow(&client->hello, frame_bytes - KVR__HEADER_BYTES);
    if (client->hello.short_of_memory) return kvr__fail(client, KVR_SYSTEM, "no memory for the hello");
    memcpy(client->hello.bytes + at, client->in.bytes + KVR__HEADER_BYTES, client->hello.used - at);
    kvr__consume(&client->in, frame_bytes);
    view.bytes = client->hello.bytes;
    view.length = client->hello.used;
    root = kvr__root(&view);
    limits = kvr__read_row(&view, root, 2);
    client->instance_id = kvr__read(&view, root, 1, 8);
    client->features = kvr__read(&view, root, 3, 8);
    client->prompt_tokens_max = (uint32_t)kvr__read(&view, limits, 1, 4);
    if (view.bad || kvr__read(&view, root, 0, 2) != 1)
        return kvr__fail(client, KVR_MALFORMED, "the first reply is no hello of protocol version 1");
    return KVR_OK;
}

/* ---- what there is to call ------------------------------------------------------------------------------- */

/* Closes the connection and gives its memory back. What is booked stays so for the daemon's grace. */
static inline void kvr_close(kvr_client *client) {
    if (client->fd >= 0) close(client->fd);
    client->fd = -1;
    free(client->out.bytes);
    free(client->in.bytes);
    free(client->hello.bytes);
    free(client->fleet.bytes);
    memset(&client->out, 0, sizeof client->out);
    memset(&client->in, 0, sizeof client->in);
    memset(&client->hello, 0, sizeof client->hello);
    memset(&client->fleet, 0, sizeof client->fleet);
}

/* Connects and says hello. `client` may be uninitialised; close it however this ends. `session` NULL = one of its own. */
static inline kvr_status kvr_connect(
    kvr_client *client, const char *path, const char *name, const kvr_session *session, int timeout_ms) {
    struct sockaddr_un address;
    struct timeval patience;
    int64_t deadline_ms = kvr__now_ms() + timeout_ms, left;
    kvr_status status;
    int flags;
    memset(client, 0, sizeof *client);
    memset(&address, 0, sizeof address);
    client->fd = -1;
    client->timeout_ms = timeout_ms;
    client->next_id = 1;
    if (strlen(path) >= sizeof address.sun_path) return kvr__fail(client, KVR_INVALID, "the socket's path is too long");
    address.sun_family = AF_UNIX;
    strcpy(address.sun_path, path);
    client->fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (client->fd < 0) return kvr__fail_errno(client, "socket");
    flags = fcntl(client->fd, F_GETFD);
    if (flags < 0 || fcntl(client->fd, F_SETFD, flags | FD_CLOEXEC) < 0) return kvr__fail_errno(client, "fcntl");
    /* Blocking until here: a Unix socket connects at once, or waits so long for room in the listener's queue. */
    if (timeout_ms <= 0) return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
    patience.tv_sec = timeout_ms / 1000;
    patience.tv_usec = (timeout_ms % 1000) * 1000;
    if (setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) < 0)
        return kvr__fail_errno(client, "setsockopt");
    if (connect(client->fd, (struct sockaddr *)&address, sizeof address) < 0) return kvr__fail_errno(client, path);
    flags = fcntl(client->fd, F_GETFL);
    if (flags < 0 || fcntl(client->fd, F_SETFL, flags | O_NONBLOCK) < 0) return kvr__fail_errno(client, "fcntl");
    left = deadline_ms - kvr__now_ms();
    if (left <= 0) return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
    client->timeout_ms = (int)left;
    status = kvr__hello(client, name, session);
    client->timeout_ms = timeout_ms;
    return status;
}

/* Any of a model's pools, where one is named. */
#define KVR_ANY_POOL 255

/* The pool of a model, 1 prefill or 2 decode, in a namespace unless that is NULL. KVR_UNKNOWN if none fits, or several. */
static inline kvr_status kvr_find_pool(
    kvr_client *client, const char *model, const char *name_space, uint8_t role, kvr_space *found) {
    size_t n, fits = 0;
    for (n = 0;; n++) {
        kvr_space space;
        int read = kvr__read_space(client->hello.bytes, client->hello.used, n, &space);
        if (read < 0) return kvr__fail(client, KVR_MALFORMED, "the hello's spaces cannot be read");
        if (read == 0) break;
        if (role != KVR_ANY_POOL && space.role != role) continue;
        if (strcmp(space.model, model) == 0 && (name_space == NULL || strcmp(space.name_space, name_space) == 0)) {
            *found = space;
            fits++;
        }
    }
    if (fits == 1) return KVR_OK;
    return kvr__fail(client, KVR_UNKNOWN, fits == 0 ? "the daemon has no such model" : "the model has several spaces");
}

/* The space of a model that has one pool, in a namespace unless that is NULL. */
static inline kvr_status kvr_find_space(
    kvr_client *client, const char *model, const char *name_space, kvr_space *found) {
    return kvr_find_pool(client, model, name_space, KVR_ANY_POOL, found);
}

/* A text, unless it is NULL or empty. */
static inline void kvr__named(kvr_buffer *out, kvr__table *table, size_t index, const char *text) {
    if (text != NULL && text[0] != 0) kvr__text(out, kvr__field(out, table, index, 4, 4), text);
}

/* Which prompt it is: tokens, local hashes, scheme, token count, adapter and salt, from a field on. */
static inline void kvr__encode_prompt(
    kvr_buffer *out, kvr__table *table, size_t first, const kvr_route_request *request) {
    size_t from, at, i;
    if (request->local_hashes == NULL) {
        from = kvr__field(out, table, first, 4, 4);
        at = kvr__elements(out, from, request->token_count, 4);
        for (i = 0; i < request->token_count && at != 0; i++) kvr__put(out->bytes + at + 4 * i, request->tokens[i], 4);
    } else {
        kvr__table scheme;
        kvr__number(out, table, first + 3, request->token_count, 4);
        from = kvr__field(out, table, first + 2, 4, 4);
        scheme = kvr__inner(out, 3, from);
        kvr__number(out, &scheme, 0, request->block_size, 4);
        kvr__number(out, &scheme, 1, request->window, 1);
        from = kvr__field(out, table, first + 1, 4, 4);
        at = kvr__elements(out, from, request->local_hash_count, 8);
        for (i = 0; i < request->local_hash_count && at != 0; i++)
            kvr__put(out->bytes + at + 8 * i, request->local_hashes[i], 8);
    }
    kvr__named(out, table, first + 4, request->lora);
    kvr__named(out, table, first + 5, request->salt);
}

static inline kvr_status kvr__encode_route(kvr_client *client, const kvr_route_request *request, uint64_t id) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, 26);
    uint64_t deadline_us = request->deadline_us;
    /* Where it may wait, the daemon is to say that nobody had room before its silence is taken for its end. */
    if (deadline_us == 0 && request->request_id != NULL && (client->features & KVR__FEATURE_QUEUE) != 0)
        deadline_us = (uint64_t)client->timeout_ms * 800;
    kvr__number(out, &table, 0, request->space_id, 4);
    kvr__number(out, &table, 3, request->attempt, 4);
    kvr__number(out, &table, 11, request->request_id != NULL, 1);
    kvr__number(out, &table, 13, request->candidates_max, 4);
    kvr__number(out, &table, 18, request->expected_output_tokens, 4);
    if (deadline_us != 0) kvr__number(out, &table, 24, deadline_us > UINT32_MAX ? UINT32_MAX : deadline_us, 4);
    if (request->disaggregate) kvr__number(out, &table, 25, 1, 1);
    kvr__encode_prompt(out, &table, 4, request);
    kvr__named(out, &table, 2, request->request_id);
    kvr__named(out, &table, 21, request->affinity_session);
    return kvr__end(client, 3, id);
}

/* A prompt that a question can be asked about. */
static inline kvr_status kvr__check_prompt(kvr_client *client, const kvr_route_request *request) {
    if ((request->tokens == NULL) == (request->local_hashes == NULL))
        return kvr__fail(client, KVR_INVALID, "give tokens or local_hashes, one of them");
    if (request->token_count > client->prompt_tokens_max || request->local_hash_count > request->token_count)
        return kvr__fail(client, KVR_INVALID, "the prompt is longer than the daemon takes");
    return KVR_OK;
}

/* Which worker should run a prompt? */
static inline kvr_status kvr_route(kvr_client *client, const kvr_route_request *request, kvr_route_reply *reply) {
    uint64_t id;
    size_t frame_bytes;
    kvr_status status;
    int read;
    memset(reply, 0, sizeof *reply);
    status = kvr__check_prompt(client, request);
    if (status != KVR_OK) return status;
    if (request->request_id != NULL && request->request_id[0] == 0)
        return kvr__fail(client, KVR_INVALID, "a booking needs a name");
    id = client->next_id++;
    status = kvr__encode_route(client, request, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, 4, &frame_bytes);
    if (status != KVR_OK) return status;
    read = kvr__read_route(client->in.bytes + KVR__HEADER_BYTES, frame_bytes - KVR__HEADER_BYTES, reply);
    kvr__consume(&client->in, frame_bytes);
    return read ? KVR_OK : kvr__fail(client, KVR_MALFORMED, "the reply to a route cannot be read");
}

static inline kvr_status kvr__report(kvr_client *client, const kvr__word *word, kvr_outcome *outcome) {
    uint64_t id = client->next_id++;
    kvr__view view = {NULL, 0, 0};
    size_t frame_bytes;
    uint64_t said;
    kvr_status status = kvr__encode_word(client, word, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, (uint8_t)(word->kind + 1), &frame_bytes);
    if (status != KVR_OK) return status;
    view.bytes = client->in.bytes + KVR__HEADER_BYTES;
    view.length = frame_bytes - KVR__HEADER_BYTES;
    said = kvr__read(&view, kvr__root(&view), 0, 1);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply about a booking cannot be read");
    if (outcome != NULL) *outcome = said <= 3 ? (kvr_outcome)said : KVR_BOOKING_UNKNOWN;
    return KVR_OK;
}

static inline kvr__word kvr__word_of(uint8_t kind, kvr_booking booking, uint64_t value, uint32_t rank) {
    kvr__word word = {0, {0, 0}, NULL, 0, 0, 0};
    word.kind = kind;
    word.booking = booking;
    word.value = value;
    word.rank = rank;
    return word;
}

/* Says that a booked prompt has been computed, in so many microseconds (0 = not said). `outcome` may be NULL. */
static inline kvr_status kvr_prefill_complete(
    kvr_client *client, kvr_booking booking, uint64_t prefill_us, kvr_outcome *outcome) {
    kvr__word word = kvr__word_of(5, booking, prefill_us, 0);
    return kvr__report(client, &word, outcome);
}

/* Says how many tokens a booked request has put out so far, all of them. `outcome` may be NULL. */
static inline kvr_status kvr_output_progress(
    kvr_client *client, kvr_booking booking, uint32_t output_tokens, kvr_outcome *outcome) {
    kvr__word word = kvr__word_of(9, booking, output_tokens, 0);
    return kvr__report(client, &word, outcome);
}

/* Says that another worker runs a booked request than the one it was booked on. `outcome` may be NULL. */
static inline kvr_status kvr_served(
    kvr_client *client, kvr_booking booking, uint64_t worker_id, uint32_t dp_rank, kvr_outcome *outcome) {
    kvr__word word = kvr__word_of(11, booking, worker_id, dp_rank);
    return kvr__report(client, &word, outcome);
}

/* Says that a booked request has ended, however it ended. `outcome` may be NULL. */
static inline kvr_status kvr_free(kvr_client *client, kvr_booking booking, kvr_outcome *outcome) {
    kvr__word word = kvr__word_of(7, booking, 0, 0);
    return kvr__report(client, &word, outcome);
}

/* The same of whatever is booked under a name. */
static inline kvr_status kvr_free_request(
    kvr_client *client, const char *request_id, uint32_t attempt, kvr_outcome *outcome) {
    kvr__word word = {7, {0, 0}, NULL, 0, 0, 0};
    word.request_id = request_id;
    word.attempt = attempt;
    return kvr__report(client, &word, outcome);
}

/* Says that a worker failed a request (KVR_EVERY_RANK: every rank of it), and how, for the log. `back_off_ms`, which may
 * be NULL: how long it is left alone while others can run requests. */
static inline kvr_status kvr_report_failure(kvr_client *client, uint32_t space_id, uint64_t worker_id, uint32_t dp_rank,
    const char *reason, uint32_t *back_off_ms) {
    kvr__table table = kvr__begin(&client->out, 3);
    uint64_t id = client->next_id++, said;
    kvr__view view = {NULL, 0, 0};
    size_t frame_bytes;
    kvr_status status;
    kvr__pair(&client->out, &table, 0, worker_id, dp_rank);
    kvr__number(&client->out, &table, 1, space_id, 4);
    kvr__named(&client->out, &table, 2, reason);
    status = kvr__end(client, 13, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, 14, &frame_bytes);
    if (status != KVR_OK) return status;
    view.bytes = client->in.bytes + KVR__HEADER_BYTES;
    view.length = frame_bytes - KVR__HEADER_BYTES;
    said = kvr__read(&view, kvr__root(&view), 0, 4);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply to a report cannot be read");
    if (back_off_ms != NULL) *back_off_ms = (uint32_t)said;
    return KVR_OK;
}

/* What every worker of the space would have to do if it took the prompt, as many as there is room for; `count` is how many
 * there are. Of the request only what says which prompt it is matters. */
static inline kvr_status kvr_potential_loads(kvr_client *client, const kvr_route_request *request,
    kvr_potential_load *loads, size_t room, size_t *count) {
    kvr_buffer *out = &client->out;
    kvr__table table;
    uint64_t id;
    kvr__view view = {NULL, 0, 0};
    size_t frame_bytes, at, i;
    kvr_status status = kvr__check_prompt(client, request);
    *count = 0;
    if (status != KVR_OK) return status;
    id = client->next_id++;
    table = kvr__begin(out, 9);
    kvr__number(out, &table, 0, request->space_id, 4);
    kvr__encode_prompt(out, &table, 1, request);
    status = kvr__end(client, 17, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, 18, &frame_bytes);
    if (status != KVR_OK) return status;
    view.bytes = client->in.bytes + KVR__HEADER_BYTES;
    view.length = frame_bytes - KVR__HEADER_BYTES;
    at = kvr__vector(&view, kvr__root(&view), 0, 4, count);
    for (i = 0; i < *count && i < room && !view.bad; i++) {
        kvr__row row = kvr__row_at(&view, kvr__follow(&view, at + 4 * i));
        loads[i].worker_id = kvr__read(&view, row, 0, 8);
        loads[i].dp_rank = (uint32_t)kvr__read(&view, row, 1, 4);
        loads[i].active_requests = (uint32_t)kvr__read(&view, row, 2, 4);
        loads[i].prefill_tokens = kvr__read(&view, row, 3, 8);
        loads[i].decode_blocks = kvr__read(&view, row, 4, 8);
    }
    kvr__consume(&client->in, frame_bytes);
    return view.bad ? kvr__fail(client, KVR_MALFORMED, "the potential loads cannot be read") : KVR_OK;
}

/* Has the daemon tell of the workers of a space, or of KVR_EVERY_SPACE, at once and after each change. What it tells is
 * kept as it comes, during whatever call; kvr_fleet reads it. One watch for each connection. */
static inline kvr_status kvr_watch(kvr_client *client, uint32_t space_id) {
    kvr__table table = kvr__begin(&client->out, 3);
    uint64_t id = client->next_id++;
    kvr_status status;
    kvr__number(&client->out, &table, 0, space_id, 4);
    status = kvr__end(client, 23, id);
    if (status != KVR_OK) return status;
    client->watch_id = id;
    return kvr__send(client, kvr__now_ms() + client->timeout_ms);
}

/* Waits until a watch tells again, no longer than the connection's timeout: KVR_TIMEOUT = nothing has changed. */
static inline kvr_status kvr_watch_next(kvr_client *client) {
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    uint64_t before = client->fleets;
    if (client->watch_id == 0) return kvr__fail(client, KVR_INVALID, "nothing is watched");
    while (client->fleets == before) {
        size_t body_bytes;
        uint64_t of;
        kvr_status status = kvr__frame(client, deadline_ms, &body_bytes);
        if (status != KVR_OK) return status;
        of = kvr__get(client->in.bytes + 8, 8);
        if (client->in.bytes[4] == 254 && of == client->watch_id) {
            int read = kvr__read_error(client->in.bytes + KVR__HEADER_BYTES, body_bytes, client);
            kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
            client->watch_id = 0;
            return read ? KVR_REFUSED : kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
        }
        status = kvr__stray(client, of, client->in.bytes[4], body_bytes, deadline_ms);
        kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
        if (status != KVR_OK) return status;
    }
    return KVR_OK;
}

/* Reads the n-th worker of what a watch told; answers 1, 0 if there are fewer, -1 if it cannot be read. */
static inline int kvr__read_worker(const kvr_buffer *fleet, size_t n, kvr_worker *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row row;
    size_t count, at;
    if (fleet->used == 0) return 0;
    view.bytes = fleet->bytes;
    view.length = fleet->used;
    at = kvr__vector(&view, kvr__root(&view), 0, 4, &count);
    if (view.bad) return -1;
    if (n >= count) return 0;
    row = kvr__row_at(&view, kvr__follow(&view, at + 4 * n));
    memset(to, 0, sizeof *to);
    to->worker_id = kvr__read(&view, row, 0, 8);
    to->dp_rank = (uint32_t)kvr__read(&view, row, 1, 4);
    to->space_id = (uint32_t)kvr__read(&view, row, 2, 4);
    kvr__read_text(&view, row, 3, to->name);
    to->state = (uint8_t)kvr__read(&view, row, 4, 1);
    to->weight = kvr__read_double(&view, row, 6);
    return view.bad ? -1 : 1;
}

/* The workers that the watch last told of, as many as there is room for; `count` is how many were read, `fleet_version`,
 * which may be NULL, is 0 where nothing was told yet. */
static inline kvr_status kvr_fleet(
    kvr_client *client, kvr_worker *workers, size_t room, size_t *count, uint64_t *fleet_version) {
    kvr__view view = {NULL, 0, 0};
    int read = 1;
    view.bytes = client->fleet.bytes;
    view.length = client->fleet.used;
    if (fleet_version != NULL)
        *fleet_version = view.length == 0 ? 0 : kvr__read(&view, kvr__root(&view), 1, 8);
    for (*count = 0; *count < room; (*count)++) {
        read = kvr__read_worker(&client->fleet, *count, &workers[*count]);
        if (read <= 0) break;
    }
    return read < 0 || view.bad ? kvr__fail(client, KVR_MALFORMED, "the fleet cannot be read") : KVR_OK;
}

#ifdef __cplusplus
}
#endif

#endif
