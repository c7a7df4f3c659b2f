/* What a gateway asks and is answered, as plain values. Of kvrouted.h, which includes it. */
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

#ifdef __cplusplus
}
#endif

#endif
