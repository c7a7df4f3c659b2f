/* A client of kvrouted, the daemon that says which worker should run a prompt.
 *
 * All of it is headers: this one, with kvrouted_wire.h and kvrouted_lane.h beside it. C99 or C++ on Linux, by GCC or Clang
 * (define _POSIX_C_SOURCE as 200809L or later before the first include).
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
 * kvr_open_lane has requests and replies go by memory that is shared with the daemon, and client.spin_us has a call look
 * for its reply for so long before it sleeps: without a system call where the daemon looks too (spin_us_max in its
 * configuration), at the price of a processor on each side.
 *
 * kvrouted_steady.h connects again by itself and decides without the daemon where that does not answer;
 * kvrouted_hash.h makes local hashes.
 */
#ifndef KVROUTED_H
#define KVROUTED_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
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

#include "kvrouted_lane.h"
#include "kvrouted_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Candidates that a reply has room for. */
#define KVR_CANDIDATES_MAX 16
/* Rules that a reply has room for, and bytes of the name of one that are kept, its end included. */
#define KVR_REMOVALS_MAX 16
#define KVR_RULE_BYTES 64
/* Labels of a worker that a record has room for. */
#define KVR_TAINTS_MAX 8
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

/* One data-parallel rank of a worker, or KVR_EVERY_RANK of it. */
typedef struct kvr_worker_ref {
    uint64_t worker_id;
    uint32_t dp_rank;
} kvr_worker_ref;

/* A label that is preferred in a worker, and how much. */
typedef struct kvr_taint {
    const char *key;
    double weight;
} kvr_taint;

/* A multimodal object: the block of the prompt that it touches, and its hash. */
typedef struct kvr_media {
    uint32_t block;
    uint64_t hash;
} kvr_media;

/* Blocks [start, end). */
typedef struct kvr_block_range {
    uint32_t start, end;
} kvr_block_range;

/* What a request wants otherwise than its space's policy. A number that is NaN and a switch that is negative keep the
 * policy's. */
typedef struct kvr_overrides {
    uint8_t mode; /* 0 = the policy's; else as in schemas/routing.fbs */
    double device_credit, prefill_load_scale, temperature, shared_multiplier;
    int8_t assume_kv_reuse, track_prefill_tokens;
} kvr_overrides;

#define KVR_OVERRIDES_INIT {0, NAN, NAN, NAN, NAN, -1, -1}

/* A question about a prompt. What is 0 or NULL here is not said, but for what KVR_ROUTE_REQUEST_INIT sets. Lists are the
 * caller's. */
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
    uint8_t explain;              /* 1 = the reply says what costs are made of, and who was taken out of the running */
    uint8_t role;                 /* of kvrouted_steady.h, which finds the space: 1 prefill, 2 decode, or KVR_ANY_POOL */
    const kvr_worker_ref *allow;  /* the only workers that may be chosen; NULL = every worker */
    size_t allow_count;
    const kvr_worker_ref *pin; /* the one worker that may be chosen; NULL = none is named */
    const char *const *required_taints; /* labels that a worker must have */
    size_t required_taint_count;
    const kvr_taint *preferred_taints;
    size_t preferred_taint_count;
    const kvr_media *media;
    size_t media_count;
    const kvr_block_range *shared_hits; /* what a cache shared by all workers holds, of whole blocks */
    size_t shared_hit_count;
    int32_t priority;     /* in the queue: the highest first */
    double priority_jump; /* seconds, or a weight: the queue's policy says which */
    const kvr_overrides *overrides; /* NULL = the policy's */
    uint64_t must_understand;       /* bits of features that a daemon must know to answer this */
    const char *fallback_key; /* of kvrouted_steady.h: what it hashes to decide alone, before the session; never sent */
} kvr_route_request;

/* Any of a model's pools, where one is named. */
#define KVR_ANY_POOL 255

#define KVR_ROUTE_REQUEST_INIT                                                                                        \
    {0, NULL, 0, NULL, 0, NULL, 0, 0, 0, NULL, NULL, 8, 0, 0, NULL, 0, 0, KVR_ANY_POOL, NULL, 0, NULL, NULL, 0, NULL, \
        0, NULL, 0, NULL, 0, 0, 0, NULL, 0, NULL}

/* What is believed of what is known of a worker's cache. */
typedef struct kvr_trust {
    uint8_t level;    /* 0 none, 1 predicted, 2 unproven, 3 lower bound, 4 exact */
    uint64_t reasons; /* why not more: bits of schemas/README.md */
} kvr_trust;

/* What a cost was made of, in the order of the computation; blocks unless the name says otherwise. */
typedef struct kvr_terms {
    double request_blocks, cached_tokens, effective_overlap, active_prefill_tokens, decay;
    double device_credit, host_credit, disk_credit, shared_credit, prefill;
    double active_decode_blocks, additional_decode_blocks, decode;
    double active_requests, active_requests_cost, capability_weight, taint_factor, cost, affinity_factor;
} kvr_terms;

typedef struct kvr_candidate {
    uint64_t worker_id;
    uint32_t dp_rank;
    uint32_t device_blocks, host_blocks, disk_blocks, external_blocks; /* held; each counts what extends the one before */
    uint8_t trust_level;                                               /* 0 none .. 4 exact */
    uint64_t trust_reasons;                                            /* bits of schemas/README.md */
    uint8_t state;                                                     /* 0 joining, 1 ready, 2 draining, 3 down */
    double cost;
    char name[KVR_TEXT_BYTES];
    uint8_t has_terms; /* 1 = it was explained */
    kvr_terms terms;
} kvr_candidate;

/* A rule, and how many workers it took out of the running. */
typedef struct kvr_removal {
    char rule[KVR_RULE_BYTES];
    size_t worker_count;
    kvr_worker_ref first; /* one of them */
} kvr_removal;

/* Of the lists, what is beyond their counts means nothing. */
typedef struct kvr_route_reply {
    size_t candidate_count; /* 0 = nobody was eligible */
    uint32_t eligible;
    uint8_t unmatchable; /* the prompt could not be looked up */
    uint64_t notes;      /* bits of schemas/README.md */
    uint32_t request_blocks;
    uint64_t policy_version, fleet_version, index_epoch;
    uint32_t ties;               /* how many candidates shared the lowest cost */
    uint8_t mode;                /* how the first was chosen, and so what costs are costs of: as in schemas/routing.fbs */
    kvr_booking booking;         /* all zero = nothing was booked */
    uint16_t nobody;             /* why nobody was eligible: an error code; 0 = somebody was */
    uint32_t retry_after_us;     /* where nobody was and time may change that */
    size_t prefill_count;        /* 0 = who is chosen above prefills too */
    kvr_booking prefill_booking; /* the booking of that half */
    size_t removal_count;        /* where nobody was eligible, or it was to be explained */
    kvr_candidate candidates[KVR_CANDIDATES_MAX]; /* the chosen one first, then by ascending cost */
    kvr_candidate prefill[KVR_CANDIDATES_MAX];    /* who prefills, the chosen one first */
    kvr_removal removals[KVR_REMOVALS_MAX];
} kvr_route_reply;

/* How much of a prompt a worker holds. */
typedef struct kvr_overlap {
    uint64_t worker_id;
    uint32_t dp_rank;
    uint32_t device_blocks, host_blocks, disk_blocks, external_blocks; /* each counts what extends the one before */
    kvr_trust trust;
} kvr_overlap;

/* What there is to say of all of an answer about a prompt. */
typedef struct kvr_prompt_found {
    uint8_t unmatchable; /* the prompt could not be looked up */
    uint32_t request_blocks;
    uint64_t notes; /* bits of schemas/README.md */
} kvr_prompt_found;

/* How busy a worker says it is. */
typedef struct kvr_engine_load {
    uint64_t active_prefill_tokens, active_decode_blocks;
    uint32_t running_requests, waiting_requests;
    double kv_usage; /* share of its KV blocks in use, 0 to 1 */
} kvr_engine_load;

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
    uint8_t device_class;        /* 0 gpu, 1 cpu */
    uint64_t capacity_blocks;    /* 0 = not known */
    uint64_t batched_tokens_max; /* 0 = not known */
    kvr_trust trust;
    size_t taint_count; /* its labels, of which as many are kept as there is room for */
    char taints[KVR_TAINTS_MAX][KVR_RULE_BYTES];
} kvr_worker;

/* Every space, where one is named. */
#define KVR_EVERY_SPACE UINT32_MAX
/* Every data-parallel rank of a worker, where one is named. */
#define KVR_EVERY_RANK UINT32_MAX

/* A connection. What of it a program is to set: timeout_ms, spin_us. */
typedef struct kvr_client {
    int fd;
    int timeout_ms;
    uint32_t spin_us;     /* how long a call looks for its reply before it sleeps; 0 = not at all; to be set at any time */
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
    kvr_lane lane;
    uint8_t lane_broke; /* 1 = what the daemon wrote into the lane cannot be */
    uint8_t was_told;   /* 1 = the daemon said beside the lane why it ends the connection */
} kvr_client;

/* ---- how calls fail --------------------------------------------------------------------------------------- */

#define KVR__FEATURE_QUEUE (1u << 12)
#define KVR__FEATURE_LANES (1u << 17)

/* What a call that failed before this one left. */
static inline void kvr__forget_error(kvr_client *client) {
    client->error_code = 0;
    client->retryable = 0;
    client->retry_after_us = 0;
    client->remedy[0] = 0;
}

static inline kvr_status kvr__fail(kvr_client *client, kvr_status status, const char *message) {
    kvr__forget_error(client);
    snprintf(client->message, sizeof client->message, "%s", message);
    return status;
}

/* As the daemon would refuse what it does not serve. */
static inline kvr_status kvr__unsupported(kvr_client *client, const char *message, const char *remedy) {
    kvr__fail(client, KVR_REFUSED, message);
    client->error_code = 4;
    snprintf(client->remedy, sizeof client->remedy, "%s", remedy);
    return KVR_REFUSED;
}

static inline kvr_status kvr__fail_errno(kvr_client *client, const char *what) {
    kvr__forget_error(client);
    snprintf(client->message, sizeof client->message, "%s: %s", what, strerror(errno));
    return KVR_SYSTEM;
}

/* Ends the frame in `out`. */
static inline kvr_status kvr__end(kvr_client *client, uint8_t kind, uint64_t id) {
    if (!kvr__finish(&client->out, kind, id)) return kvr__fail(client, KVR_INVALID, "no memory for the request");
    return KVR_OK;
}

/* ---- what replies say -------------------------------------------------------------------------------------- */

static inline kvr_booking kvr__read_booking(kvr__view *view, kvr__row row, size_t index) {
    kvr_booking booking = {0, 0};
    size_t at = kvr__find(view, row, index, 16);
    if (at != 0) {
        booking.slot = kvr__get(view->bytes + at, 8);
        booking.generation = kvr__get(view->bytes + at + 8, 8);
    }
    return booking;
}

/* Reads the blocks held by tier, and the trust in that, of a row that has them side by side from a field on. */
static inline void kvr__read_held(kvr__view *view, kvr__row row, size_t first, uint32_t *blocks[4], kvr_trust *trust) {
    size_t tiers = kvr__find(view, row, first, 16), trusted = kvr__find(view, row, first + 1, 40), i;
    for (i = 0; i < 4; i++) *blocks[i] = tiers == 0 ? 0 : (uint32_t)kvr__get(view->bytes + tiers + 4 * i, 4);
    trust->level = trusted == 0 ? 0 : view->bytes[trusted];
    trust->reasons = trusted == 0 ? 0 : kvr__get(view->bytes + trusted + 8, 8);
}

/* The terms of a cost, in the order of the schema. */
static inline void kvr__read_terms(kvr__view *view, kvr__row row, kvr_terms *to) {
    double *each[19];
    size_t i;
    each[0] = &to->request_blocks, each[1] = &to->cached_tokens, each[2] = &to->effective_overlap;
    each[3] = &to->active_prefill_tokens, each[4] = &to->decay, each[5] = &to->device_credit;
    each[6] = &to->host_credit, each[7] = &to->disk_credit, each[8] = &to->shared_credit, each[9] = &to->prefill;
    each[10] = &to->active_decode_blocks, each[11] = &to->additional_decode_blocks, each[12] = &to->decode;
    each[13] = &to->active_requests, each[14] = &to->active_requests_cost, each[15] = &to->capability_weight;
    each[16] = &to->taint_factor, each[17] = &to->cost, each[18] = &to->affinity_factor;
    for (i = 0; i < 18; i++) *each[i] = kvr__read_double(view, row, i);
    /* The one whose default is not 0. */
    *each[18] = kvr__find(view, row, 18, 8) == 0 ? 1 : kvr__read_double(view, row, 18);
}

static inline void kvr__read_candidate(kvr__view *view, kvr__row row, kvr_candidate *to) {
    kvr_trust trust;
    uint32_t *blocks[4];
    memset(to, 0, sizeof *to);
    blocks[0] = &to->device_blocks, blocks[1] = &to->host_blocks;
    blocks[2] = &to->disk_blocks, blocks[3] = &to->external_blocks;
    to->worker_id = kvr__read(view, row, 0, 8);
    to->dp_rank = (uint32_t)kvr__read(view, row, 1, 4);
    kvr__read_text(view, row, 2, to->name);
    kvr__read_held(view, row, 3, blocks, &trust);
    to->trust_level = trust.level;
    to->trust_reasons = trust.reasons;
    to->cost = kvr__read_double(view, row, 5);
    to->state = (uint8_t)kvr__read(view, row, 6, 1);
    to->has_terms = kvr__find(view, row, 7, 4) != 0;
    if (to->has_terms) kvr__read_terms(view, kvr__read_row(view, row, 7), &to->terms);
}

/* Reads who was taken out of the running by which rule, as many rules as there is room for; answers with how many. */
static inline size_t kvr__read_removals(kvr__view *view, kvr__row root, size_t index, kvr_removal *to) {
    size_t count, at = kvr__vector(view, root, index, 4, &count), i;
    for (i = 0; i < count && i < KVR_REMOVALS_MAX && !view->bad; i++) {
        kvr__row row = kvr__row_at(view, kvr__follow(view, at + 4 * i));
        size_t rule = kvr__find(view, row, 0, 4), workers;
        memset(&to[i], 0, sizeof to[i]);
        if (rule != 0) kvr__read_text_at(view, rule, to[i].rule, sizeof to[i].rule);
        workers = kvr__vector(view, row, 1, 16, &to[i].worker_count);
        if (to[i].worker_count == 0 || view->bad) continue;
        to[i].first.worker_id = kvr__get(view->bytes + workers, 8);
        to[i].first.dp_rank = (uint32_t)kvr__get(view->bytes + workers + 8, 4);
    }
    return i;
}

/* Reads a list of candidates, as many as there is room for; answers with how many. */
static inline size_t kvr__read_candidates(kvr__view *view, kvr__row root, size_t index, kvr_candidate *to) {
    size_t count, at = kvr__vector(view, root, index, 4, &count), i;
    for (i = 0; i < count && i < KVR_CANDIDATES_MAX && !view->bad; i++)
        kvr__read_candidate(view, kvr__row_at(view, kvr__follow(view, at + 4 * i)), &to[i]);
    return i;
}

/* A reply in which nothing is listed. */
static inline void kvr__clear_reply(kvr_route_reply *reply) {
    memset(reply, 0, offsetof(kvr_route_reply, candidates));
}

/* Reads the reply to a route; answers whether it could be read. */
static inline int kvr__read_route(const uint8_t *body, size_t length, kvr_route_reply *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row root;
    view.bytes = body;
    view.length = length;
    root = kvr__root(&view);
    kvr__clear_reply(to);
    to->candidate_count = kvr__read_candidates(&view, root, 0, to->candidates);
    to->prefill_count = kvr__read_candidates(&view, root, 14, to->prefill);
    to->prefill_booking = kvr__read_booking(&view, root, 15);
    to->eligible = (uint32_t)kvr__read(&view, root, 1, 4);
    to->unmatchable = kvr__read(&view, root, 2, 1) != 0;
    to->notes = kvr__read(&view, root, 3, 8);
    to->request_blocks = (uint32_t)kvr__read(&view, root, 4, 4);
    to->policy_version = kvr__read(&view, root, 5, 8);
    to->fleet_version = kvr__read(&view, root, 6, 8);
    to->index_epoch = kvr__read(&view, root, 7, 8);
    to->removal_count = kvr__read_removals(&view, root, 9, to->removals);
    to->ties = (uint32_t)kvr__read(&view, root, 10, 4);
    to->mode = (uint8_t)kvr__read(&view, root, 13, 1);
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

static inline kvr_status kvr__gone(kvr_client *client) {
    return kvr__fail(client, KVR_CLOSED, "the daemon has closed the connection");
}

/* Bytes read at once. */
enum { KVR__READ_BYTES = 65536 };

/* Reads what the socket has; KVR_TIMEOUT = nothing now. */
static inline kvr_status kvr__read_socket(kvr_client *client) {
    kvr_buffer *in = &client->in;
    for (;;) {
        ssize_t bytes;
        if (!kvr__reserve(in, KVR__READ_BYTES)) return kvr__fail(client, KVR_SYSTEM, "no memory for a reply");
        bytes = recv(client->fd, in->bytes + in->used, KVR__READ_BYTES, MSG_DONTWAIT);
        if (bytes > 0) {
            in->used += (size_t)bytes;
            return KVR_OK;
        }
        if (bytes == 0 || errno == ECONNRESET) return kvr__gone(client);
        if (errno == EAGAIN || errno == EWOULDBLOCK) return KVR_TIMEOUT;
        if (errno != EINTR) return kvr__fail_errno(client, "recv");
    }
}

static inline int64_t kvr__now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static inline kvr_status kvr__lane_fault(kvr_client *client) {
    client->lane_broke = 1;
    return kvr__fail(client, KVR_CLOSED, "the lane was closed or cannot be trusted");
}

/* Reads what the lane has; KVR_TIMEOUT = nothing now. */
static inline kvr_status kvr__read_lane(kvr_client *client) {
    kvr_buffer *in = &client->in;
    int64_t words = kvr__lane_ready(&client->lane);
    if (words < 0) return kvr__lane_fault(client);
    if (words == 0) return KVR_TIMEOUT;
    if (!kvr__reserve(in, 8 * (size_t)words)) return kvr__fail(client, KVR_SYSTEM, "no memory for a reply");
    kvr__lane_pop(&client->lane, in->bytes + in->used, (uint64_t)words);
    in->used += 8 * (size_t)words;
    return KVR_OK;
}

/* What the socket says beside a lane: an error of the daemon before it ends the connection, or its end. */
static inline kvr_status kvr__read_beside(kvr_client *client) {
    uint8_t said[1024];
    ssize_t bytes = recv(client->fd, said, sizeof said, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return KVR_OK;
    if (bytes <= 0) return client->was_told ? KVR_CLOSED : kvr__gone(client);
    if (bytes > KVR__HEADER_BYTES && said[4] == 254)
        client->was_told = kvr__read_error(said + KVR__HEADER_BYTES, (size_t)bytes - KVR__HEADER_BYTES, client) != 0;
    return KVR_OK;
}

/* Sleeps until the lane has what is awaited, or the socket or the bell has something to say. */
static inline kvr_status kvr__sleep_by_lane(kvr_client *client, uint64_t awaited, int64_t deadline_ms) {
    struct pollfd polled[2] = {{0, 0, 0}, {0, 0, 0}};
    int64_t left = deadline_ms - kvr__now_ms();
    int there, ready = 0, failed = 0;
    polled[0].fd = client->lane.bell;
    polled[1].fd = client->fd;
    polled[0].events = polled[1].events = POLLIN;
    kvr__lane_announce(&client->lane, awaited);
    /* What came before the daemon could know that this side sleeps. */
    there = kvr__lane_has(&client->lane, awaited);
    if (there == 0 && left > 0) {
        ready = poll(polled, 2, left > INT_MAX ? INT_MAX : (int)left);
        failed = ready < 0 && errno != EINTR;
    }
    kvr__lane_settle(&client->lane);
    if (there == 0) there = kvr__lane_has(&client->lane, awaited);
    if (there != 0) return there < 0 ? kvr__lane_fault(client) : KVR_OK;
    if (failed) return kvr__fail_errno(client, "poll");
    if (left <= 0) return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
    if (ready > 0 && polled[0].revents != 0 && !kvr__lane_hear(&client->lane)) return kvr__gone(client);
    return ready > 0 && polled[1].revents != 0 ? kvr__read_beside(client) : KVR_OK;
}

/* Waits for what is awaited of the lane, by looking for a while and then asleep. */
static inline kvr_status kvr__wait_by_lane(kvr_client *client, uint64_t awaited, int64_t deadline_ms) {
    int64_t until_us = client->spin_us == 0 ? 0 : kvr__now_us() + client->spin_us;
    int there;
    do {
        int look;
        for (look = 0; look < KVR__LOOKS_PER_CLOCK; look++) {
            there = kvr__lane_has(&client->lane, awaited);
            if (there != 0) return there < 0 ? kvr__lane_fault(client) : KVR_OK;
            kvr__pause();
        }
    } while (until_us != 0 && kvr__now_us() < until_us);
    for (;;) {
        kvr_status status = kvr__sleep_by_lane(client, awaited, deadline_ms);
        there = kvr__lane_has(&client->lane, awaited);
        if (there < 0) return kvr__lane_fault(client);
        /* What the daemon wrote before it ended the connection is read first. */
        if (there > 0 || status != KVR_OK) return there > 0 ? KVR_OK : status;
    }
}

/* Sends `out` by the lane. A daemon whose replies find no room reads no more: they are read meanwhile. */
static inline kvr_status kvr__send_by_lane(kvr_client *client, int64_t deadline_ms) {
    size_t sent = 0;
    for (;;) {
        int64_t moved = kvr__lane_push(&client->lane, client->out.bytes + sent, client->out.used - sent);
        kvr_status status;
        if (moved < 0) return kvr__lane_fault(client);
        sent += (size_t)moved;
        if (sent >= client->out.used) return KVR_OK;
        status = kvr__read_lane(client);
        if (status == KVR_TIMEOUT) status = kvr__wait_by_lane(client, KVR__AWAITS_BOTH, deadline_ms);
        /* Part of the frame may be gone: the connection is of no more use. */
        if (status == KVR_TIMEOUT && sent > 0) return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
        if (status != KVR_OK) return status;
    }
}

static inline kvr_status kvr__send(kvr_client *client, int64_t deadline_ms) {
    size_t sent = 0;
    if (client->lane.words != NULL) return kvr__send_by_lane(client, deadline_ms);
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
            return kvr__gone(client);
        } else if (errno != EINTR) {
            return kvr__fail_errno(client, "send");
        }
    }
    return KVR_OK;
}

/* Reads what comes next, by looking for a while and then asleep. */
static inline kvr_status kvr__receive(kvr_client *client, int64_t deadline_ms) {
    int64_t until_us = client->spin_us == 0 ? 0 : kvr__now_us() + client->spin_us;
    kvr_status status = KVR_TIMEOUT, read;
    if (client->lane.words != NULL) {
        status = kvr__read_lane(client);
        return status == KVR_TIMEOUT ? kvr__wait_by_lane(client, KVR__AWAITS_DATA, deadline_ms) : status;
    }
    while (status == KVR_TIMEOUT && until_us != 0 && kvr__now_us() < until_us) status = kvr__read_socket(client);
    if (status != KVR_TIMEOUT) return status;
    status = kvr__wait(client, POLLIN, deadline_ms);
    if (status != KVR_OK && status != KVR_TIMEOUT) return status;
    /* Also where the time is over: what has come has come. And what woke it may have been nothing. */
    read = kvr__read_socket(client);
    return read == KVR_TIMEOUT ? status : read;
}

/* Answers whether the first frame is whole, with the bytes of its body; -1 = it is no frame. */
static inline int kvr__is_whole(const kvr_buffer *in, size_t *body_bytes) {
    if (in->used < KVR__HEADER_BYTES) return 0;
    *body_bytes = (size_t)kvr__get(in->bytes, 4);
    if (in->bytes[4] == 0 || in->bytes[5] != 0 || kvr__get(in->bytes + 6, 2) != 1 || *body_bytes % 8 != 0 ||
        *body_bytes > KVR__BODY_BYTES_CEILING)
        return -1;
    return in->used - KVR__HEADER_BYTES >= *body_bytes;
}

/* Reads on until the first frame is whole; answers with the bytes of its body. */
static inline kvr_status kvr__frame(kvr_client *client, int64_t deadline_ms, size_t *body_bytes) {
    for (;;) {
        int is_whole = kvr__is_whole(&client->in, body_bytes);
        kvr_status status;
        if (is_whole < 0) return kvr__fail(client, KVR_MALFORMED, "what came is no frame of protocol version 1");
        if (is_whole) return KVR_OK;
        status = kvr__receive(client, deadline_ms);
        if (status != KVR_OK) return status;
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
    kvr__lane_close(&client->lane);
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

/* Receives a part of a frame and the descriptors that come with it, up to two. */
static inline kvr_status kvr__receive_handed(kvr_client *client, int descriptors[2], int64_t deadline_ms) {
    union {
        struct cmsghdr aligned;
        uint8_t bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct msghdr message;
    struct iovec part;
    struct cmsghdr *at;
    ssize_t bytes;
    size_t count = 0;
    if (!kvr__reserve(&client->in, KVR__READ_BYTES)) return kvr__fail(client, KVR_SYSTEM, "no memory for a reply");
    memset(&message, 0, sizeof message);
    part.iov_base = client->in.bytes + client->in.used;
    part.iov_len = KVR__READ_BYTES;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    bytes = recvmsg(client->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kvr__wait(client, POLLIN, deadline_ms);
    if (bytes < 0 && errno == EINTR) return KVR_OK;
    if (bytes < 0 && errno != ECONNRESET) return kvr__fail_errno(client, "recvmsg");
    if (bytes <= 0) return kvr__gone(client);
    client->in.used += (size_t)bytes;
    for (at = CMSG_FIRSTHDR(&message); at != NULL; at = CMSG_NXTHDR(&message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
        count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(descriptors, CMSG_DATA(at), (count > 2 ? 2 : count) * sizeof(int));
    }
    return KVR_OK;
}

/* Reads the reply to the request for a lane, which is whole, and maps what came with it. */
static inline kvr_status kvr__take_over(kvr_client *client, uint64_t id, const int descriptors[2], size_t body_bytes) {
    const uint8_t *body = client->in.bytes + KVR__HEADER_BYTES;
    kvr__view view = {NULL, 0, 0};
    kvr__row root;
    uint32_t layout, request_bytes, reply_bytes;
    const char *wrong;
    uint8_t got = client->in.bytes[4];
    uint64_t of = kvr__get(client->in.bytes + 8, 8);
    if (got == 254) {
        if (kvr__read_error(body, body_bytes, client)) return KVR_REFUSED;
        return kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
    }
    view.bytes = body;
    view.length = body_bytes;
    root = kvr__root(&view);
    layout = (uint32_t)kvr__read(&view, root, 0, 2);
    request_bytes = (uint32_t)kvr__read(&view, root, 1, 4);
    reply_bytes = (uint32_t)kvr__read(&view, root, 2, 4);
    if (view.bad || got != 34 || of != id) return kvr__fail(client, KVR_MALFORMED, "the reply is of another kind");
    if (descriptors[0] < 0 || descriptors[1] < 0)
        wrong = "the descriptors of a lane did not arrive: raise the limit of open files";
    else
        wrong = kvr__lane_map(&client->lane, descriptors[0], descriptors[1], layout, request_bytes, reply_bytes);
    if (wrong == NULL) return KVR_OK;
    return kvr__unsupported(client, wrong, "go on by the socket, as this connection does");
}

/* Asks for a lane, before anything else is asked on this connection. Everything goes by it then, and it ends with its
 * connection. KVR_REFUSED = the connection goes on by its socket: kvr_client.message says why. */
static inline kvr_status kvr_open_lane(kvr_client *client) {
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    int descriptors[2] = {-1, -1}, is_whole = 0;
    size_t body_bytes = 0;
    uint64_t id = client->next_id++;
    kvr_status status;
    if (id != 2) return kvr__fail(client, KVR_INVALID, "a lane is asked for before anything else");
    if ((client->features & KVR__FEATURE_LANES) == 0)
        return kvr__unsupported(client, "the daemon has no lanes", "raise serve.lanes_max, or go without a lane");
    kvr__begin(&client->out, 3);
    status = kvr__end(client, 33, id);
    if (status == KVR_OK) status = kvr__send(client, deadline_ms);
    while (status == KVR_OK && is_whole == 0) {
        status = kvr__receive_handed(client, descriptors, deadline_ms);
        is_whole = kvr__is_whole(&client->in, &body_bytes);
        if (is_whole < 0) status = kvr__fail(client, KVR_MALFORMED, "what came is no frame of protocol version 1");
    }
    /* A lane that comes late would be one that nobody knows of. */
    if (status == KVR_TIMEOUT) status = kvr__fail(client, KVR_CLOSED, "the daemon did not answer in time");
    if (status == KVR_OK) {
        status = kvr__take_over(client, id, descriptors, body_bytes);
        kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
    }
    if (descriptors[0] >= 0) close(descriptors[0]);
    if (descriptors[1] >= 0 && status != KVR_OK) close(descriptors[1]);
    return status;
}

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
        if (at != 0) kvr__put_tokens(out->bytes + at, request->tokens, request->token_count);
    } else {
        kvr__table scheme;
        kvr__number(out, table, first + 3, request->token_count, 4);
        from = kvr__field(out, table, first + 2, 4, 4);
        scheme = kvr__inner(out, 3, from);
        kvr__number(out, &scheme, 0, request->block_size, 4);
        kvr__number(out, &scheme, 1, request->window, 1);
        from = kvr__field(out, table, first + 1, 4, 4);
        at = kvr__elements(out, from, request->local_hash_count, 8);
        if (at != 0) kvr__put_hashes(out->bytes + at, request->local_hashes, request->local_hash_count);
    }
    if (request->media_count > 0) {
        from = kvr__field(out, table, first + 6, 4, 4);
        at = kvr__elements(out, from, request->media_count, 16);
        for (i = 0; i < request->media_count && at != 0; i++) {
            kvr__put(out->bytes + at + 16 * i, request->media[i].block, 4);
            kvr__put(out->bytes + at + 16 * i + 8, request->media[i].hash, 8);
        }
    }
    kvr__named(out, table, first + 4, request->lora);
    kvr__named(out, table, first + 5, request->salt);
}

/* Which workers it may have, and which it prefers. */
static inline void kvr__encode_constraints(kvr_buffer *out, kvr__table *table, const kvr_route_request *request) {
    size_t at, i;
    if (request->pin != NULL) kvr__pair(out, table, 15, request->pin->worker_id, request->pin->dp_rank);
    if (request->allow != NULL) {
        at = kvr__elements(out, kvr__field(out, table, 14, 4, 4), request->allow_count, 16);
        for (i = 0; i < request->allow_count && at != 0; i++) {
            kvr__put(out->bytes + at + 16 * i, request->allow[i].worker_id, 8);
            kvr__put(out->bytes + at + 16 * i + 8, request->allow[i].dp_rank, 4);
        }
    }
    if (request->required_taint_count > 0) {
        at = kvr__elements(out, kvr__field(out, table, 16, 4, 4), request->required_taint_count, 4);
        for (i = 0; i < request->required_taint_count && at != 0; i++)
            kvr__text(out, at + 4 * i, request->required_taints[i]);
    }
    if (request->preferred_taint_count > 0) {
        at = kvr__elements(out, kvr__field(out, table, 17, 4, 4), request->preferred_taint_count, 4);
        for (i = 0; i < request->preferred_taint_count && at != 0; i++) {
            kvr__table taint = kvr__inner(out, 2, at + 4 * i);
            kvr__double(out, &taint, 1, request->preferred_taints[i].weight);
            kvr__text(out, kvr__field(out, &taint, 0, 4, 4), request->preferred_taints[i].key);
        }
    }
    if (request->shared_hit_count > 0) {
        at = kvr__elements(out, kvr__field(out, table, 20, 4, 4), request->shared_hit_count, 8);
        for (i = 0; i < request->shared_hit_count && at != 0; i++) {
            kvr__put(out->bytes + at + 8 * i, request->shared_hits[i].start, 4);
            kvr__put(out->bytes + at + 8 * i + 4, request->shared_hits[i].end, 4);
        }
    }
}

static inline void kvr__encode_overrides(kvr_buffer *out, kvr__table *table, const kvr_overrides *overrides) {
    kvr__table inner = kvr__inner(out, 7, kvr__field(out, table, 19, 4, 4));
    const double numbers[4] = {overrides->device_credit, overrides->prefill_load_scale, overrides->temperature,
        overrides->shared_multiplier};
    size_t i;
    kvr__number(out, &inner, 0, overrides->mode, 1);
    for (i = 0; i < 4; i++)
        if (!isnan(numbers[i])) kvr__double(out, &inner, 1 + i, numbers[i]);
    if (overrides->assume_kv_reuse >= 0) kvr__number(out, &inner, 5, overrides->assume_kv_reuse != 0, 1);
    if (overrides->track_prefill_tokens >= 0) kvr__number(out, &inner, 6, overrides->track_prefill_tokens != 0, 1);
}

static inline kvr_status kvr__encode_route(kvr_client *client, const kvr_route_request *request, uint64_t id) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, 26);
    uint64_t deadline_us = request->deadline_us;
    /* Where it may wait, the daemon is to say that nobody had room before its silence is taken for its end. */
    if (deadline_us == 0 && request->request_id != NULL && (client->features & KVR__FEATURE_QUEUE) != 0)
        deadline_us = (uint64_t)client->timeout_ms * 800;
    kvr__number(out, &table, 0, request->space_id, 4);
    if (request->must_understand != 0) kvr__number(out, &table, 1, request->must_understand, 8);
    kvr__number(out, &table, 3, request->attempt, 4);
    kvr__number(out, &table, 11, request->request_id != NULL, 1);
    if (request->explain) kvr__number(out, &table, 12, 1, 1);
    kvr__number(out, &table, 13, request->candidates_max, 4);
    kvr__number(out, &table, 18, request->expected_output_tokens, 4);
    if (request->priority != 0) kvr__number(out, &table, 22, (uint32_t)request->priority, 4);
    if (request->priority_jump < 0 || request->priority_jump > 0) kvr__double(out, &table, 23, request->priority_jump);
    if (deadline_us != 0) kvr__number(out, &table, 24, deadline_us > UINT32_MAX ? UINT32_MAX : deadline_us, 4);
    if (request->disaggregate) kvr__number(out, &table, 25, 1, 1);
    kvr__encode_constraints(out, &table, request);
    if (request->overrides != NULL) kvr__encode_overrides(out, &table, request->overrides);
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
    kvr__clear_reply(reply);
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

/* Asks about a prompt what decides nothing, by kind; the reply's body is in `view`, and stays in `in`. */
static inline kvr_status kvr__question(
    kvr_client *client, const kvr_route_request *request, uint8_t kind, kvr__view *view, size_t *frame_bytes) {
    kvr_buffer *out = &client->out;
    kvr__table table;
    uint64_t id;
    kvr_status status = kvr__check_prompt(client, request);
    if (status != KVR_OK) return status;
    id = client->next_id++;
    table = kvr__begin(out, 9);
    kvr__number(out, &table, 0, request->space_id, 4);
    if (request->must_understand != 0) kvr__number(out, &table, 8, request->must_understand, 8);
    kvr__encode_prompt(out, &table, 1, request);
    status = kvr__end(client, kind, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, (uint8_t)(kind + 1), frame_bytes);
    if (status != KVR_OK) return status;
    view->bytes = client->in.bytes + KVR__HEADER_BYTES;
    view->length = *frame_bytes - KVR__HEADER_BYTES;
    view->bad = 0;
    return KVR_OK;
}

/* What the replies to such questions say of all of it. */
static inline void kvr__read_found(kvr__view *view, kvr_prompt_found *found) {
    kvr__row root = kvr__root(view);
    if (found == NULL) return;
    found->unmatchable = kvr__read(view, root, 1, 1) != 0;
    found->request_blocks = (uint32_t)kvr__read(view, root, 2, 4);
    found->notes = kvr__read(view, root, 3, 8);
}

/* What every worker of the space would have to do if it took the prompt, as many as there is room for; `count` is how many
 * there are. Of the request only what says which prompt it is matters. */
static inline kvr_status kvr_potential_loads(kvr_client *client, const kvr_route_request *request,
    kvr_potential_load *loads, size_t room, size_t *count) {
    kvr__view view;
    size_t frame_bytes, at, i;
    kvr_status status;
    *count = 0;
    status = kvr__question(client, request, 17, &view, &frame_bytes);
    if (status != KVR_OK) return status;
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

/* How much of a prompt each worker of the space holds, as many workers as there is room for; `count` is how many there are.
 * Of the request only what says which prompt it is matters. `found` may be NULL. */
static inline kvr_status kvr_overlaps(kvr_client *client, const kvr_route_request *request, kvr_overlap *overlaps,
    size_t room, size_t *count, kvr_prompt_found *found) {
    kvr__view view;
    size_t frame_bytes, at, i;
    kvr_status status;
    *count = 0;
    status = kvr__question(client, request, 19, &view, &frame_bytes);
    if (status != KVR_OK) return status;
    at = kvr__vector(&view, kvr__root(&view), 0, 4, count);
    for (i = 0; i < *count && i < room && !view.bad; i++) {
        kvr__row row = kvr__row_at(&view, kvr__follow(&view, at + 4 * i));
        uint32_t *blocks[4];
        blocks[0] = &overlaps[i].device_blocks, blocks[1] = &overlaps[i].host_blocks;
        blocks[2] = &overlaps[i].disk_blocks, blocks[3] = &overlaps[i].external_blocks;
        overlaps[i].worker_id = kvr__read(&view, row, 0, 8);
        overlaps[i].dp_rank = (uint32_t)kvr__read(&view, row, 1, 4);
        kvr__read_held(&view, row, 2, blocks, &overlaps[i].trust);
    }
    kvr__read_found(&view, found);
    kvr__consume(&client->in, frame_bytes);
    return view.bad ? kvr__fail(client, KVR_MALFORMED, "the overlaps cannot be read") : KVR_OK;
}

/* Says how busy a worker says it is. `accepted`, which may be NULL: 0 = the worker has just left. */
static inline kvr_status kvr_report_load(kvr_client *client, uint32_t space_id, uint64_t worker_id, uint32_t dp_rank,
    const kvr_engine_load *load, int *accepted) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, 8);
    uint64_t id = client->next_id++, said;
    kvr__view view = {NULL, 0, 0};
    size_t frame_bytes;
    kvr_status status;
    kvr__pair(out, &table, 0, worker_id, dp_rank);
    kvr__number(out, &table, 1, space_id, 4);
    kvr__number(out, &table, 2, load->active_prefill_tokens, 8);
    kvr__number(out, &table, 3, load->active_decode_blocks, 8);
    kvr__number(out, &table, 4, load->running_requests, 4);
    kvr__number(out, &table, 5, load->waiting_requests, 4);
    kvr__double(out, &table, 6, load->kv_usage);
    status = kvr__end(client, 15, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, 16, &frame_bytes);
    if (status != KVR_OK) return status;
    view.bytes = client->in.bytes + KVR__HEADER_BYTES;
    view.length = frame_bytes - KVR__HEADER_BYTES;
    said = kvr__read(&view, kvr__root(&view), 0, 1);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply to a report cannot be read");
    if (accepted != NULL) *accepted = said != 0;
    return KVR_OK;
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

/* Reads the n-th worker of a list of them; answers 1, 0 if there are fewer, -1 if it cannot be read. */
static inline int kvr__read_worker(const kvr_buffer *fleet, size_t n, kvr_worker *to) {
    kvr__view view = {NULL, 0, 0};
    kvr__row row;
    size_t count, at, i, trusted;
    if (fleet->used == 0) return 0;
    view.bytes = fleet->bytes;
    view.length = fleet->used;
    at = kvr__vector(&view, kvr__root(&view), 0, 4, &count);
    if (view.bad) return -1;
    if (n >= count) return 0;
    row = kvr__row_at(&view, kvr__follow(&view, at + 4 * n));
    to->worker_id = kvr__read(&view, row, 0, 8);
    to->dp_rank = (uint32_t)kvr__read(&view, row, 1, 4);
    to->space_id = (uint32_t)kvr__read(&view, row, 2, 4);
    kvr__read_text(&view, row, 3, to->name);
    to->state = (uint8_t)kvr__read(&view, row, 4, 1);
    to->device_class = (uint8_t)kvr__read(&view, row, 5, 1);
    to->weight = kvr__read_double(&view, row, 6);
    to->capacity_blocks = kvr__read(&view, row, 7, 8);
    to->batched_tokens_max = kvr__read(&view, row, 8, 8);
    at = kvr__vector(&view, row, 9, 4, &to->taint_count);
    for (i = 0; i < to->taint_count && i < KVR_TAINTS_MAX && !view.bad; i++)
        kvr__read_text_at(&view, at + 4 * i, to->taints[i], sizeof to->taints[i]);
    trusted = kvr__find(&view, row, 10, 40);
    to->trust.level = trusted == 0 ? 0 : view.bytes[trusted];
    to->trust.reasons = trusted == 0 ? 0 : kvr__get(view.bytes + trusted + 8, 8);
    return view.bad ? -1 : 1;
}

/* Whether the n-th worker of a list of them has a label, however many it has. */
static inline int kvr__has_taint(const kvr_buffer *fleet, size_t n, const char *label) {
    kvr__view view = {NULL, 0, 0};
    size_t count, at, i;
    view.bytes = fleet->bytes;
    view.length = fleet->used;
    at = kvr__vector(&view, kvr__root(&view), 0, 4, &count);
    if (view.bad || n >= count) return 0;
    at = kvr__vector(&view, kvr__row_at(&view, kvr__follow(&view, at + 4 * n)), 9, 4, &count);
    for (i = 0; i < count && !view.bad; i++)
        if (kvr__is_text(&view, at + 4 * i, label)) return 1;
    return 0;
}

/* The workers of a space, or of KVR_EVERY_SPACE, as the daemon has them now: as many as there is room for; `count` is how
 * many there are. */
static inline kvr_status kvr_workers(
    kvr_client *client, uint32_t space_id, kvr_worker *workers, size_t room, size_t *count) {
    uint64_t cursor = 0;
    *count = 0;
    do {
        kvr__table table = kvr__begin(&client->out, 4);
        uint64_t id = client->next_id++, next;
        kvr__view view = {NULL, 0, 0};
        kvr_buffer page = {NULL, 0, 0, 0};
        kvr_worker beyond;
        size_t frame_bytes, n;
        int read;
        kvr_status status;
        kvr__number(&client->out, &table, 0, space_id, 4);
        kvr__number(&client->out, &table, 1, cursor, 4);
        status = kvr__end(client, 21, id);
        if (status == KVR_OK) status = kvr__exchange(client, id, 22, &frame_bytes);
        if (status != KVR_OK) return status;
        page.bytes = client->in.bytes + KVR__HEADER_BYTES;
        page.used = frame_bytes - KVR__HEADER_BYTES;
        view.bytes = page.bytes;
        view.length = page.used;
        next = kvr__read(&view, kvr__root(&view), 1, 4);
        for (n = 0; (read = kvr__read_worker(&page, n, *count < room ? &workers[*count] : &beyond)) > 0; n++)
            ++*count;
        kvr__consume(&client->in, frame_bytes);
        if (read < 0 || view.bad) return kvr__fail(client, KVR_MALFORMED, "the workers cannot be read");
        if (next != 0 && next <= cursor) return kvr__fail(client, KVR_MALFORMED, "the daemon's pages do not advance");
        cursor = next;
    } while (cursor != 0);
    return KVR_OK;
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
