/* The requests and replies of a gateway, as plain values. kvrouted.h includes this header. */
#ifndef KVROUTED_TYPES_H
#define KVROUTED_TYPES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "kvrouted_lane.h"
#include "kvrouted_wire.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The room of a reply: candidates. */
#define KVR_CANDIDATES_MAX 16
/* The room of a reply: rules that excluded workers, and bytes of a rule's name, its end included. */
#define KVR_REMOVALS_MAX 16
#define KVR_RULE_BYTES 64
/* The room of a worker's record: labels. */
#define KVR_TAINTS_MAX 8
/* Bytes of the longest name that the daemon takes, without its end. */
#define KVR_NAME_BYTES_MAX 256

/* How a call ended. kvr_client.message says more. */
typedef enum kvr_status {
    KVR_OK = 0,
    KVR_REFUSED = 1,   /* the daemon's own error: kvr_client.error_code, remedy, retryable */
    KVR_TIMEOUT = 2,   /* no answer in time */
    KVR_CLOSED = 3,    /* the daemon closed the connection */
    KVR_SYSTEM = 4,    /* a system call failed: kvr_client.message */
    KVR_MALFORMED = 5, /* the daemon sent something that cannot be read */
    KVR_INVALID = 6,   /* the request is invalid; nothing was sent */
    KVR_UNKNOWN = 7    /* there is no such space, or several */
} kvr_status;

/* The outcome of a report about a booking. */
typedef enum kvr_outcome {
    KVR_APPLIED = 0,
    KVR_ALREADY_APPLIED = 1,
    KVR_BOOKING_UNKNOWN = 2,
    KVR_SUPERSEDED = 3
} kvr_outcome;

/* 128 bits that name a gateway. Connections with the same session share their bookings. */
typedef struct kvr_session {
    uint64_t hi, lo;
} kvr_session;

/* The opaque name of a booking; all zero = none. */
typedef struct kvr_booking {
    uint64_t slot, generation;
} kvr_booking;

typedef struct kvr_space {
    uint32_t space_id;
    uint8_t role;        /* 0 both, 1 prefill, 2 decode */
    uint32_t block_size; /* tokens; 0 = not known yet, or this header does not know how the blocks are hashed */
    uint8_t window;      /* 0: a block's hash covers its own tokens; 1: also the token after them */
    char model[KVR_TEXT_BYTES];
    char name_space[KVR_TEXT_BYTES];
} kvr_space;

/* One data-parallel rank of a worker, or KVR_EVERY_RANK. */
typedef struct kvr_worker_ref {
    uint64_t worker_id;
    uint32_t dp_rank;
} kvr_worker_ref;

/* A preferred label of workers, with the weight of the preference. */
typedef struct kvr_taint {
    const char *key;
    double weight;
} kvr_taint;

/* A multimodal object: a block of the prompt that it touches, and its hash. */
typedef struct kvr_media {
    uint32_t block;
    uint64_t hash;
} kvr_media;

/* Blocks [start, end). */
typedef struct kvr_block_range {
    uint32_t start, end;
} kvr_block_range;

/* A W3C trace context: the ids of the header `traceparent` as numbers. One with an id of 0 counts as none. */
typedef struct kvr_trace {
    uint64_t trace_hi, trace_lo; /* the first 16 hexadecimal digits of the trace id, and the other 16 */
    uint64_t span;               /* the caller's span */
    uint32_t flags;              /* bit 0 = the caller records the trace */
} kvr_trace;

/* What a request changes of its space's policy. A number that is NaN, and a switch that is negative, change nothing. */
typedef struct kvr_overrides {
    uint8_t mode; /* 0 = the policy's; otherwise the Mode of schemas/routing.fbs */
    double device_credit, prefill_load_scale, temperature, shared_multiplier;
    int8_t assume_kv_reuse, track_prefill_tokens;
} kvr_overrides;

#define KVR_OVERRIDES_INIT {0, NAN, NAN, NAN, NAN, -1, -1}

/* A request about a prompt. Begin with KVR_ROUTE_REQUEST_INIT. A field that is 0 or NULL is not sent. The caller
 * keeps the lists. */
typedef struct kvr_route_request {
    uint32_t space_id;
    const char *request_id; /* the name of the booking; NULL = book nothing */
    uint32_t attempt;
    /* The prompt: tokens, or local hashes with their scheme. token_count belongs to both. */
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
    uint32_t deadline_us; /* the longest wait of a booking for a worker; 0 = 80 % of the connection's timeout */
    const char *affinity_session; /* a conversation whose requests should go to one worker; NULL = none */
    uint8_t disaggregate;         /* 1 = also choose a worker of the model's prefill pool; the space is the decode pool */
    uint8_t explain;              /* 1 = the reply has the terms of each cost, and the excluded workers */
    uint8_t role;                 /* for kvrouted_steady.h, which finds the space: 1 prefill, 2 decode, or KVR_ANY_POOL */
    const kvr_worker_ref *allow;  /* the only workers that may be chosen; NULL = all workers */
    size_t allow_count;
    const kvr_worker_ref *pin; /* the one worker that may be chosen; NULL = any */
    const char *const *required_taints; /* labels that a worker must have */
    size_t required_taint_count;
    const kvr_taint *preferred_taints;
    size_t preferred_taint_count;
    const kvr_media *media;
    size_t media_count;
    const kvr_block_range *shared_hits; /* whole blocks in a cache that all workers share */
    size_t shared_hit_count;
    int32_t priority;     /* in the queue, the highest first */
    double priority_jump; /* seconds or a weight, by the queue's policy */
    const kvr_overrides *overrides; /* NULL = none */
    const kvr_trace *trace;         /* the caller's trace, for the spans that the daemon exports; NULL = none */
    uint64_t must_understand;       /* feature bits: a daemon without them must refuse this request */
    /* For kvrouted_steady.h: the key of a decision without the daemon, in place of the session. It is never sent. */
    const char *fallback_key;
} kvr_route_request;

/* The plain numbers of a route: F(field, its number). Each has the size that it has on the
 * wire. One that is 0 is not sent. A new one is added here, to the struct above and to its initial values below. */
#define KVR__EACH_NUMBER_OF_ROUTE(F) \
    F(attempt, KVR__ROUTE_ATTEMPT) \
    F(expected_output_tokens, KVR__ROUTE_EXPECTED_OUTPUT_TOKENS) \
    F(priority, KVR__ROUTE_PRIORITY) \
    F(must_understand, KVR__ROUTE_MUST_UNDERSTAND)

/* Any pool of a model, in place of one. */
#define KVR_ANY_POOL 255

#define KVR_ROUTE_REQUEST_INIT                                                                                        \
    {0, NULL, 0, NULL, 0, NULL, 0, 0, 0, NULL, NULL, 8, 0, 0, NULL, 0, 0, KVR_ANY_POOL, NULL, 0, NULL, NULL, 0, NULL, \
        0, NULL, 0, NULL, 0, 0, 0, NULL, NULL, 0, NULL}

/* How far an overlap may be believed. */
typedef struct kvr_trust {
    uint8_t level;    /* 0 none, 1 predicted, 2 unproven, 3 lower bound, 4 exact */
    uint64_t reasons; /* why the level is not higher: bits of schemas/README.md */
} kvr_trust;

/* kvr_terms, the terms of a cost, is in kvrouted_fields.h. */

typedef struct kvr_candidate {
    uint64_t worker_id;
    uint32_t dp_rank;
    /* Blocks held. Each tier counts only what extends the tier before. */
    uint32_t device_blocks, host_blocks, disk_blocks, external_blocks;
    uint8_t trust_level;                                               /* 0 none .. 4 exact */
    uint64_t trust_reasons;                                            /* bits of schemas/README.md */
    uint8_t state;                                                     /* 0 joining, 1 ready, 2 draining, 3 down */
    double cost;
    char name[KVR_TEXT_BYTES];
    uint8_t has_terms; /* 1 = it was explained */
    kvr_terms terms;
} kvr_candidate;

/* A rule, and the workers that it excluded. */
typedef struct kvr_removal {
    char rule[KVR_RULE_BYTES];
    size_t worker_count;
    kvr_worker_ref first; /* one of them */
} kvr_removal;

/* The entries of a list after its count are not set. */
typedef struct kvr_route_reply {
    size_t candidate_count; /* 0 = no worker was eligible */
    uint32_t eligible;
    uint8_t unmatchable; /* the prompt could not be looked up */
    uint64_t notes;      /* bits of schemas/README.md */
    uint32_t request_blocks;
    uint64_t policy_version, fleet_version, index_epoch;
    uint32_t ties;               /* how many candidates shared the lowest cost */
    uint8_t mode;                /* the Mode of schemas/routing.fbs that chose; it defines what a cost means */
    kvr_booking booking;         /* all zero = nothing was booked */
    uint16_t nobody;             /* the error code that says why no worker was eligible; 0 = some were */
    uint32_t retry_after_us;     /* if no worker was eligible and time may change that */
    size_t prefill_count;        /* 0 = the worker chosen above prefills too */
    kvr_booking prefill_booking; /* the booking of the worker that prefills */
    size_t removal_count;        /* if no worker was eligible, or the request has `explain` */
    kvr_candidate candidates[KVR_CANDIDATES_MAX]; /* the chosen worker first, then by ascending cost */
    kvr_candidate prefill[KVR_CANDIDATES_MAX];    /* workers to prefill, the chosen one first */
    kvr_removal removals[KVR_REMOVALS_MAX];
} kvr_route_reply;

/* How much of a prompt a worker holds. */
typedef struct kvr_overlap {
    uint64_t worker_id;
    uint32_t dp_rank;
    /* Blocks held. Each tier counts only what extends the tier before. */
    uint32_t device_blocks, host_blocks, disk_blocks, external_blocks;
    kvr_trust trust;
} kvr_overlap;

/* What an answer about a prompt says beside its list. */
typedef struct kvr_prompt_found {
    uint8_t unmatchable; /* the prompt could not be looked up */
    uint32_t request_blocks;
    uint64_t notes; /* bits of schemas/README.md */
} kvr_prompt_found;

/* An engine's own report of its load. */
typedef struct kvr_engine_load {
    uint64_t active_prefill_tokens, active_decode_blocks;
    uint32_t running_requests, waiting_requests;
    double kv_usage; /* share of its KV blocks in use, 0 to 1 */
} kvr_engine_load;

/* The work of a worker if it took a prompt. */
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
    size_t taint_count; /* how many labels it has; `taints` has room for the first ones */
    char taints[KVR_TAINTS_MAX][KVR_RULE_BYTES];
} kvr_worker;

/* Every space, in place of one. */
#define KVR_EVERY_SPACE UINT32_MAX
/* Every data-parallel rank of a worker, in place of one. */
#define KVR_EVERY_RANK UINT32_MAX

/* A connection. A program may set timeout_ms and spin_us at any time. */
typedef struct kvr_client {
    int fd;
    int timeout_ms;
    uint32_t spin_us;     /* how long a call busy-polls for its reply before it sleeps; 0 = not at all */
    uint64_t next_id;
    uint64_t instance_id; /* of the daemon run: drawn when the daemon starts */
    uint64_t features;    /* bits of schemas/README.md */
    uint32_t prompt_tokens_max;
    /* About the last call that failed. */
    uint16_t error_code;
    uint8_t retryable;
    uint32_t retry_after_us;
    char message[KVR_TEXT_BYTES];
    char remedy[KVR_TEXT_BYTES];
    /* For this client's own use. */
    kvr_buffer out, in, hello, fleet;
    uint64_t watch_id, fleets; /* 0 = no watch; how many fleets the watch has sent */
    kvr_lane lane;
    uint8_t lane_broke; /* 1 = the daemon wrote invalid positions into the lane */
    uint8_t was_told;   /* 1 = the daemon sent, beside the lane, why it ends the connection */
} kvr_client;

#ifdef __cplusplus
}
#endif

#endif
