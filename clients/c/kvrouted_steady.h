/* A client of kvrouted for a gateway that outlives its daemon. It reconnects with back-off, and keeps one deadline for
 * each call. While the daemon does not answer, it decides by itself: by rendezvous hashing over the workers that the
 * daemon last reported as healthy.
 *
 * It serves one thread, like kvrouted.h, which it includes. Clients in every language give a prompt to the same worker
 * if they know the same workers: ../../tests/fixtures/fallback_vectors.json.
 *
 *     kvr_steady steady;
 *     kvr_steady_options options = KVR_STEADY_OPTIONS_INIT;
 *     kvr_answer answer;
 *     kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
 *
 *     options.path = "/run/kvrouted/kvrouted.sock";
 *     kvr_steady_init(&steady, &options);
 *     ...                                            // the request as in kvrouted.h, without its space
 *     if (kvr_steady_route(&steady, "my-model", NULL, &request, &answer) == KVR_OK && answer.reply.candidate_count > 0) {
 *         // send the prompt to answer.reply.candidates[0]; answer.is_fallback says who decided
 *         kvr_steady_free(&steady, &answer.booking, NULL);
 *     }
 *     kvr_steady_close(&steady);
 */
#ifndef KVROUTED_STEADY_H
#define KVROUTED_STEADY_H

#include "kvrouted.h"
#include "kvrouted_hash.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The most reports that wait for the daemon's return. Beyond it the oldest are dropped and counted; the daemon ends
 * their bookings by age. */
#define KVR_OWED_MAX 1024

/* Whether a client uses a lane: memory shared with the daemon. */
typedef enum kvr_lane_use {
    KVR_LANE_OFF = 0,    /* the socket */
    KVR_LANE_TRY = 1,    /* a lane, or the socket if the daemon refuses: kvr_steady.lane_refusal says why */
    KVR_LANE_REQUIRE = 2 /* a lane, or no connection */
} kvr_lane_use;

typedef struct kvr_steady_options {
    const char *path;           /* the daemon's socket; the caller keeps it, and the name */
    const char *name;           /* the client's name in the daemon's logs */
    kvr_session session;        /* all zero = a random one */
    int timeout_ms;             /* of a call, connecting included */
    int backoff_first_ms;       /* the pause after the daemon did not answer; it doubles each time */
    int backoff_most_ms;        /* the longest pause */
    int hash_locally;           /* 1 = send 8 bytes a block instead of 4 a token, if the space's scheme is known */
    int fallback;               /* 1 = decide without the daemon while it does not answer */
    size_t fallback_prefix_tokens; /* hash this much of a prompt that names no session; 0 = all */
    kvr_lane_use lane;          /* requested anew on each connection */
    uint32_t spin_us;           /* busy-poll for a reply this long before sleeping; 0 = never */
} kvr_steady_options;

#define KVR_STEADY_OPTIONS_INIT {NULL, "c", {0, 0}, 1000, 50, 2000, 0, 1, 4096, KVR_LANE_OFF, 0}

/* A booking, and the daemon run that holds it. */
typedef struct kvr_held {
    kvr_booking booking; /* all zero = none */
    uint64_t instance_id;
} kvr_held;

typedef struct kvr_answer {
    kvr_route_reply reply; /* of a fallback, only the candidates' names, states and costs are set */
    kvr_held booking, prefill_booking;
    int is_fallback;        /* 1 = the client decided: no booking, no regard to caches */
    /* Why the daemon did not decide: KVR_TIMEOUT, KVR_CLOSED, KVR_SYSTEM (not reached, or it takes no connections now),
     * KVR_REFUSED (draining). */
    kvr_status why;
    int64_t since_ms;       /* the start of the daemon's silence, by CLOCK_MONOTONIC */
    int all_down;           /* the daemon last reported every worker as down */
} kvr_answer;

/* A report that waits for the daemon's return. */
typedef struct kvr__owed {
    kvr__booking_report report;
    uint64_t instance_id;
    char request_id[KVR_NAME_BYTES_MAX + 1];
} kvr__owed;

typedef struct kvr_steady {
    kvr_steady_options options;
    kvr_client client; /* message, remedy and error_code are of the last call that failed */
    int is_connected;
    int failures;
    int64_t rests_until_ms, silent_since_ms; /* 0 = it answered the last request */
    /* Counted since the start. */
    uint64_t fallbacks, reports_forgotten, connects, lanes_opened, lanes_refused;
    char lane_refusal[KVR_TEXT_BYTES]; /* why the connection has no lane, though one was requested */
    /* For this client's own use. */
    kvr_buffer hello, fleet, hashes, scratch;
    uint64_t instance_id, chance;
    int64_t connected_ms;
    int is_lane_doubted; /* 1 = the last connection's lane broke at once: the next connection uses its socket */
    uint32_t refuses_hashes_of; /* 1 + the space that refused hashes by the scheme of its hello */
    kvr__owed *owed;
    size_t owed_first, owed_count;
} kvr_steady;

/* ---- rendezvous ------------------------------------------------------------------------------------------ */

/* CRC-32 (IEEE) over more bytes; begins with 0. */
static inline uint32_t kvr__crc32(uint32_t crc, const uint8_t *bytes, size_t count) {
    static const uint32_t nibbles[16] = {
        0x00000000, 0x1DB71064, 0x3B6E20C8, 0x26D930AC, 0x76DC4190, 0x6B6B51F4, 0x4DB26158, 0x5005713C,
        0xEDB88320, 0xF00F9344, 0xD6D6A3E8, 0xCB61B38C, 0x9B64C2B0, 0x86D3D2D4, 0xA00AE278, 0xBDBDF21C};
    size_t i;
    crc = ~crc;
    for (i = 0; i < count; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ nibbles[crc & 15];
        crc = crc >> 4 ^ nibbles[crc & 15];
    }
    return ~crc;
}

/* A number that is equal for requests that should go to the same worker: made of their session, or else of the
 * beginning of their prompts. */
static inline uint32_t kvr_fallback_key(const kvr_route_request *request, size_t prefix_tokens) {
    const char *names[2];
    uint8_t bytes[8];
    uint32_t crc = 0;
    size_t i, count = request->token_count;
    if (request->fallback_key != NULL && request->fallback_key[0] != 0)
        return kvr__crc32(0, (const uint8_t *)request->fallback_key, strlen(request->fallback_key));
    if (request->affinity_session != NULL && request->affinity_session[0] != 0)
        return kvr__crc32(0, (const uint8_t *)request->affinity_session, strlen(request->affinity_session));
    if (request->local_hashes == NULL) {
        if (prefix_tokens > 0 && count > prefix_tokens) count = prefix_tokens;
        for (i = 0; i < count; i++) {
            kvr__put(bytes, request->tokens[i], 4);
            crc = kvr__crc32(crc, bytes, 4);
        }
    } else {
        size_t blocks = prefix_tokens / (request->block_size == 0 ? 1 : request->block_size);
        count = request->local_hash_count;
        if (blocks == 0) blocks = 1;
        if (prefix_tokens > 0 && count > blocks) count = blocks;
        for (i = 0; i < count; i++) {
            kvr__put(bytes, request->local_hashes[i], 8);
            crc = kvr__crc32(crc, bytes, 8);
        }
    }
    names[0] = request->lora;
    names[1] = request->salt;
    for (i = 0; i < 2; i++) {
        /* UTF-8 has no such byte, so it separates the two names. */
        bytes[0] = 0xFF;
        crc = kvr__crc32(crc, bytes, 1);
        if (names[i] != NULL) crc = kvr__crc32(crc, (const uint8_t *)names[i], strlen(names[i]));
    }
    return crc;
}

/* The output of SplitMix64 for a state. */
static inline uint64_t kvr__next(uint64_t state) {
    state += 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    return state ^ state >> 31;
}

/* The number that a worker draws for a key. */
static inline uint64_t kvr_fallback_draw(uint32_t key, uint64_t worker_id, uint32_t dp_rank) {
    return kvr__next(kvr__next(kvr__next(key) ^ worker_id) ^ dp_rank);
}

/* -log2((draw | 1) / 2^64) in units of 2^-32, in whole numbers: the same bits everywhere. Never rises. */
static inline uint64_t kvr_fallback_surprise(uint64_t draw) {
    uint64_t mantissa = draw | 1, fraction = 0, whole = 63;
    int i;
    while (mantissa >> 63 == 0) {
        mantissa <<= 1;
        whole--;
    }
    mantissa >>= 32;
    for (i = 0; i < 32; i++) {
        mantissa = mantissa * mantissa >> 31;
        fraction <<= 1;
        if (mantissa >> 32 != 0) {
            mantissa >>= 1;
            fraction |= 1;
        }
    }
    return ((uint64_t)64 << 32) - (whole << 32 | fraction);
}

/* The cost of a worker, by its draw. The lowest cost is chosen: each worker then gets requests in proportion to its
 * weight. */
static inline double kvr_fallback_cost(uint64_t draw, double weight) {
    return (double)kvr_fallback_surprise(draw) / (weight > 0 && weight - weight == 0 ? weight : 1.0);
}

/* Whether a worker precedes another: by cost, then by the higher draw, then by id and rank. */
static inline int kvr__is_before(const kvr_candidate *one, const kvr_candidate *other, uint32_t key) {
    uint64_t drawn, others;
    if (one->cost < other->cost || one->cost > other->cost) return one->cost < other->cost;
    drawn = kvr_fallback_draw(key, one->worker_id, one->dp_rank);
    others = kvr_fallback_draw(key, other->worker_id, other->dp_rank);
    if (drawn != others) return drawn > others;
    return one->worker_id != other->worker_id ? one->worker_id < other->worker_id : one->dp_rank < other->dp_rank;
}

/* Inserts a worker into the best candidates so far, which are in order. */
static inline void kvr_fallback_rank(kvr_route_reply *reply, size_t most, uint32_t key, const kvr_worker *worker) {
    kvr_candidate candidate;
    size_t at = reply->candidate_count;
    memset(&candidate, 0, sizeof candidate);
    candidate.worker_id = worker->worker_id;
    candidate.dp_rank = worker->dp_rank;
    candidate.state = worker->state;
    candidate.cost = kvr_fallback_cost(kvr_fallback_draw(key, worker->worker_id, worker->dp_rank), worker->weight);
    memcpy(candidate.name, worker->name, sizeof candidate.name);
    reply->eligible++;
    if (at == most && !kvr__is_before(&candidate, &reply->candidates[at - 1], key)) return;
    if (at < most) reply->candidate_count = at + 1;
    else at--;
    for (; at > 0 && kvr__is_before(&candidate, &reply->candidates[at - 1], key); at--)
        reply->candidates[at] = reply->candidates[at - 1];
    reply->candidates[at] = candidate;
}

/* ---- connecting and reconnecting ------------------------------------------------------------------------- */

static inline void kvr_steady_init(kvr_steady *steady, const kvr_steady_options *options) {
    struct timespec now;
    memset(steady, 0, sizeof *steady);
    steady->options = *options;
    steady->client.fd = -1;
    clock_gettime(CLOCK_REALTIME, &now);
    steady->chance = kvr__next((uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)getpid() << 44);
    if (steady->options.session.hi == 0 && steady->options.session.lo == 0) {
        steady->options.session.hi = steady->chance | 1;
        steady->options.session.lo = kvr__next(steady->chance);
    }
}

/* Replaces a buffer's bytes, unless the new ones are empty. */
static inline void kvr__replace(kvr_buffer *to, const kvr_buffer *from) {
    if (from->used == 0) return;
    to->used = 0;
    kvr__grow(to, from->used);
    if (!to->short_of_memory) memcpy(to->bytes, from->bytes, from->used);
}

/* Ends the connection. The spaces and the workers that it named stay known. */
static inline void kvr__disconnect(kvr_steady *steady) {
    char message[KVR_TEXT_BYTES];
    if (!steady->is_connected && steady->client.fd < 0) return;
    /* The hello of a connection that was never ready may be unreadable. */
    if (steady->is_connected) {
        kvr__replace(&steady->hello, &steady->client.hello);
        kvr__replace(&steady->fleet, &steady->client.fleet);
    }
    steady->is_lane_doubted = steady->client.lane_broke && steady->options.lane == KVR_LANE_TRY &&
                              kvr__now_ms() - steady->connected_ms < steady->options.backoff_first_ms;
    if (steady->is_lane_doubted) {
        steady->lanes_refused++;
        snprintf(steady->lane_refusal, sizeof steady->lane_refusal, "%s", steady->client.message);
    }
    memcpy(message, steady->client.message, sizeof message);
    kvr_close(&steady->client);
    memcpy(steady->client.message, message, sizeof message);
    steady->is_connected = 0;
}

/* Begins a back-off after the daemon did not answer: a random pause, up to a quarter shorter or longer. */
static inline void kvr__failed(kvr_steady *steady) {
    int64_t now = kvr__now_ms(), wait = steady->options.backoff_first_ms;
    int i;
    if (now < steady->rests_until_ms) return;
    for (i = 0; i < steady->failures && wait < steady->options.backoff_most_ms; i++) wait *= 2;
    if (wait > steady->options.backoff_most_ms) wait = steady->options.backoff_most_ms;
    steady->chance = kvr__next(steady->chance);
    steady->rests_until_ms = now + wait * 3 / 4 + wait * (int64_t)(steady->chance % 1024) / 2048;
    if (steady->failures == 0) steady->silent_since_ms = now;
    if (steady->failures < 30) steady->failures++;
}

static inline void kvr__answered(kvr_steady *steady) {
    steady->failures = 0;
    steady->rests_until_ms = steady->silent_since_ms = 0;
}

/* Stores a report for the next connection, except counts of output tokens: the next count replaces them. */
static inline void kvr__owe(kvr_steady *steady, const kvr__booking_report *report, uint64_t instance_id) {
    kvr__owed *owed;
    /* The daemon refused a name that is too long. */
    if (report->request_id != NULL && strlen(report->request_id) > KVR_NAME_BYTES_MAX) return;
    if (report->kind == KVR__KIND_OUTPUT_PROGRESS) return;
    if (steady->instance_id != 0 && instance_id != steady->instance_id) return;
    if (steady->owed == NULL) steady->owed = (kvr__owed *)calloc(KVR_OWED_MAX, sizeof *steady->owed);
    if (steady->owed == NULL || steady->owed_count == KVR_OWED_MAX) {
        steady->reports_forgotten++;
        if (steady->owed == NULL) return;
        steady->owed_first = (steady->owed_first + 1) % KVR_OWED_MAX;
        steady->owed_count--;
    }
    owed = &steady->owed[(steady->owed_first + steady->owed_count++) % KVR_OWED_MAX];
    owed->report = *report;
    owed->instance_id = instance_id;
    owed->request_id[0] = 0;
    if (report->request_id != NULL) snprintf(owed->request_id, sizeof owed->request_id, "%s", report->request_id);
}

/* Gives the next step the rest of the call's time. */
static inline kvr_status kvr__in_time(kvr_steady *steady, int64_t deadline_ms) {
    int64_t left = deadline_ms - kvr__now_ms();
    if (left <= 0) return kvr__time_out(&steady->client);
    steady->client.timeout_ms = left > INT_MAX ? INT_MAX : (int)left;
    return KVR_OK;
}

/* Sends the stored reports. A report that fails with the connection stays stored. */
static inline kvr_status kvr__send_owed(kvr_steady *steady, int64_t deadline_ms) {
    while (steady->owed_count > 0) {
        kvr__owed *owed = &steady->owed[steady->owed_first];
        kvr_status status = kvr__in_time(steady, deadline_ms);
        if (status == KVR_OK && owed->instance_id == steady->instance_id) {
            owed->report.request_id = owed->request_id[0] == 0 ? NULL : owed->request_id;
            status = kvr__report(&steady->client, &owed->report, NULL);
        }
        if (status != KVR_OK && status != KVR_REFUSED) return status;
        steady->owed_first = (steady->owed_first + 1) % KVR_OWED_MAX;
        steady->owed_count--;
    }
    return KVR_OK;
}

/* Draws the consequences of a step: it closes a connection that is broken, and begins a back-off after a timeout. */
static inline void kvr__judge(kvr_steady *steady, kvr_status status) {
    if (status == KVR_TIMEOUT) kvr__failed(steady);
    else if (status == KVR_OK || status == KVR_REFUSED) kvr__answered(steady);
    if (status == KVR_CLOSED || status == KVR_SYSTEM || status == KVR_MALFORMED) kvr__disconnect(steady);
}

/* Whether two hellos give the same spaces the same numbers. Their schemes may differ: a daemon may learn a scheme
 * later. */
static inline int kvr__same_spaces(const kvr_buffer *one, const kvr_buffer *other) {
    size_t n;
    for (n = 0;; n++) {
        kvr_space mine, others;
        int read = kvr__read_space(one->bytes, one->used, n, &mine);
        if (read != kvr__read_space(other->bytes, other->used, n, &others) || read < 0) return 0;
        if (read == 0) return 1;
        if (mine.space_id != others.space_id || mine.role != others.role || strcmp(mine.model, others.model) != 0 ||
            strcmp(mine.name_space, others.name_space) != 0)
            return 0;
    }
}

/* Takes over the hello of a new connection. */
static inline void kvr__greeted(kvr_steady *steady) {
    uint64_t before = steady->instance_id;
    steady->connects++;
    kvr__answered(steady);
    steady->instance_id = steady->client.instance_id;
    steady->refuses_hashes_of = 0;
    /* Another run of the daemon has no bookings of the last one. */
    if (before != 0 && before != steady->instance_id) steady->owed_first = steady->owed_count = 0;
    /* The remembered workers would belong to spaces with other numbers. */
    if (steady->fleet.used > 0 && !kvr__same_spaces(&steady->hello, &steady->client.hello)) steady->fleet.used = 0;
}

/* Requests a lane on a new connection, if the options say so. */
static inline kvr_status kvr__open_lane(kvr_steady *steady, int64_t deadline_ms) {
    kvr_status status;
    steady->client.spin_us = steady->options.spin_us;
    if (steady->options.lane == KVR_LANE_OFF || steady->is_lane_doubted) return KVR_OK;
    status = kvr__in_time(steady, deadline_ms);
    if (status == KVR_OK) status = kvr_open_lane(&steady->client);
    if (status == KVR_OK) {
        steady->lanes_opened++;
        steady->lane_refusal[0] = 0;
    }
    if (status != KVR_REFUSED || steady->options.lane == KVR_LANE_REQUIRE) return status;
    steady->lanes_refused++;
    snprintf(steady->lane_refusal, sizeof steady->lane_refusal, "%s", steady->client.message);
    return KVR_OK;
}

/* Connects, and watches the workers of every space. */
static inline kvr_status kvr__open(kvr_steady *steady, int64_t deadline_ms) {
    int64_t left = deadline_ms - kvr__now_ms();
    kvr_status status;
    if (left <= 0) return kvr__time_out(&steady->client);
    status = kvr_connect(
        &steady->client, steady->options.path, steady->options.name, &steady->options.session, (int)left);
    if (status == KVR_OK) status = kvr__open_lane(steady, deadline_ms);
    if (status != KVR_OK) {
        kvr__failed(steady);
        kvr__disconnect(steady);
        /* A daemon that is overloaded or draining counts as one that cannot be reached. */
        return status == KVR_REFUSED && steady->client.retryable ? KVR_SYSTEM : status;
    }
    steady->is_connected = 1;
    steady->connected_ms = kvr__now_ms();
    kvr__greeted(steady);
    if (!steady->options.fallback || (steady->client.features & KVR__FEATURE_WATCH) == 0) return KVR_OK;
    status = kvr__in_time(steady, deadline_ms);
    if (status == KVR_OK) status = kvr_watch(&steady->client, KVR_EVERY_SPACE);
    if (status != KVR_OK) {
        /* A connection without a watch would never learn of the workers. */
        kvr__failed(steady);
        kvr__disconnect(steady);
        return status;
    }
    status = kvr__in_time(steady, deadline_ms);
    if (status == KVR_OK) status = kvr_watch_next(&steady->client);
    if (status == KVR_REFUSED) return KVR_OK;
    if (status != KVR_OK) kvr__judge(steady, status);
    return status;
}

/* Connects unless there is a connection, and sends the stored reports. During a back-off it fails at once, and the
 * connection stays. It draws the consequences of its own steps. */
static inline kvr_status kvr__connected(kvr_steady *steady, int64_t deadline_ms) {
    kvr_status status = KVR_OK;
    if (kvr__now_ms() < steady->rests_until_ms)
        return kvr__fail(&steady->client, KVR_SYSTEM, "the daemon did not answer; the next try is soon");
    if (!steady->is_connected) status = kvr__open(steady, deadline_ms);
    if (status != KVR_OK) return status;
    status = kvr__send_owed(steady, deadline_ms);
    if (status != KVR_OK) kvr__judge(steady, status);
    return status;
}

/* Closes the connection and frees its memory. Stored reports are dropped. The daemon ends the bookings after its grace
 * period. */
static inline void kvr_steady_close(kvr_steady *steady) {
    kvr_close(&steady->client);
    free(steady->hello.bytes);
    free(steady->fleet.bytes);
    free(steady->hashes.bytes);
    free(steady->scratch.bytes);
    free(steady->owed);
    memset(steady, 0, sizeof *steady);
    steady->client.fd = -1;
}

/* ---- calls ----------------------------------------------------------------------------------------------- */

/* Finds the space of a model, by the latest hello. */
static inline kvr_status kvr__space_of(
    kvr_steady *steady, const char *model, const char *name_space, uint8_t role, kvr_space *found) {
    kvr_status status;
    kvr_buffer hello = steady->client.hello;
    if (!steady->is_connected) steady->client.hello = steady->hello;
    status = kvr_find_pool(&steady->client, model, name_space, role, found);
    steady->client.hello = hello;
    return status;
}

static inline int kvr__names(const kvr_worker_ref *listed, const kvr_worker *worker) {
    return listed->worker_id == worker->worker_id &&
           (listed->dp_rank == KVR_EVERY_RANK || listed->dp_rank == worker->dp_rank);
}

/* Whether the n-th worker of the fleet may run a request. */
static inline int kvr__may_run(
    const kvr_buffer *fleet, size_t n, const kvr_worker *worker, const kvr_route_request *request) {
    size_t i;
    if (request->pin != NULL && !kvr__names(request->pin, worker)) return 0;
    if (request->allow != NULL) {
        for (i = 0; i < request->allow_count && !kvr__names(&request->allow[i], worker); i++) {
        }
        if (i == request->allow_count) return 0;
    }
    for (i = 0; i < request->required_taint_count; i++)
        if (!kvr__has_taint(fleet, n, request->required_taints[i])) return 0;
    return 1;
}

/* An answer with empty lists. */
static inline void kvr__clear_answer(kvr_answer *answer) {
    kvr__clear_reply(&answer->reply);
    memset(&answer->booking, 0, sizeof answer->booking);
    memset(&answer->prefill_booking, 0, sizeof answer->prefill_booking);
    answer->is_fallback = answer->all_down = 0;
    answer->why = KVR_OK;
    answer->since_ms = 0;
}

/* Decides without the daemon. Answers with `why` if no worker is known. */
static inline kvr_status kvr__decide_alone(kvr_steady *steady, const char *model, const char *name_space,
    const kvr_route_request *request, kvr_status why, kvr_answer *answer) {
    const kvr_buffer *fleet = steady->client.fleet.used > 0 ? &steady->client.fleet : &steady->fleet;
    size_t n, most = request->candidates_max, pass;
    uint32_t key = kvr_fallback_key(request, steady->options.fallback_prefix_tokens);
    kvr_space space;
    kvr_worker worker;
    if (!steady->options.fallback || kvr__space_of(steady, model, name_space, request->role, &space) != KVR_OK)
        return why;
    if (most == 0) most = 1;
    if (most > KVR_CANDIDATES_MAX) most = KVR_CANDIDATES_MAX;
    kvr__clear_answer(answer);
    /* As the daemon does: a worker that is down is used only if no other worker is left. */
    for (pass = 0; pass < 2 && answer->reply.candidate_count == 0; pass++) {
        answer->all_down = (int)pass;
        for (n = 0; kvr__read_worker(fleet, n, &worker) > 0; n++) {
            int is_wanted =
                pass == 0 ? worker.state <= KVR__WORKER_STATE_READY : worker.state == KVR__WORKER_STATE_DOWN;
            if (worker.space_id == space.space_id && is_wanted && kvr__may_run(fleet, n, &worker, request))
                kvr_fallback_rank(&answer->reply, most, key, &worker);
        }
    }
    if (answer->reply.candidate_count == 0) return why;
    answer->reply.unmatchable = 1;
    answer->is_fallback = 1;
    answer->why = why;
    answer->since_ms = steady->silent_since_ms == 0 ? kvr__now_ms() : steady->silent_since_ms;
    steady->fallbacks++;
    return KVR_OK;
}

/* Hashes a request's prompt, if the options say so and the space's scheme is known. */
static inline void kvr__hash(kvr_steady *steady, const kvr_space *space, kvr_route_request *request) {
    size_t count;
    int is_refused = steady->refuses_hashes_of == space->space_id + 1;
    if (!steady->options.hash_locally || request->tokens == NULL || space->block_size == 0 || is_refused) return;
    /* Multimodal objects change the hashes of their blocks: only the daemon computes those. */
    if (request->media_count > 0) return;
    count = kvr_block_count(request->token_count, space->block_size, space->window);
    steady->hashes.used = steady->scratch.used = 0;
    kvr__grow(&steady->hashes, 8 * (count + 1));
    kvr__grow(&steady->scratch, 4 * ((size_t)space->block_size + 1));
    if (steady->hashes.short_of_memory || steady->scratch.short_of_memory) return;
    kvr_local_hashes(request->tokens, request->token_count, space->block_size, space->window, request->lora,
        request->salt, steady->scratch.bytes, (uint64_t *)(void *)steady->hashes.bytes, count);
    request->tokens = NULL;
    request->local_hashes = (const uint64_t *)(const void *)steady->hashes.bytes;
    request->local_hash_count = count;
    request->block_size = space->block_size;
    request->window = space->window;
}

/* Tries a route once, on the present connection or a new one. */
static inline kvr_status kvr__try_route(kvr_steady *steady, const char *model, const char *name_space,
    const kvr_route_request *request, int64_t deadline_ms, kvr_answer *answer) {
    kvr_route_request asked = *request;
    kvr_space space;
    kvr_status status = kvr__connected(steady, deadline_ms);
    if (status == KVR_OK) status = kvr__space_of(steady, model, name_space, request->role, &space);
    if (status == KVR_OK) status = kvr__in_time(steady, deadline_ms);
    if (status != KVR_OK) return status;
    asked.space_id = space.space_id;
    kvr__hash(steady, &space, &asked);
    status = kvr_route(&steady->client, &asked, &answer->reply);
    if (status == KVR_REFUSED && steady->client.error_code == KVR__ERROR_CODE_SCHEME_MISMATCH &&
        asked.tokens == NULL && request->tokens != NULL) {
        /* The daemon has learnt the space's scheme since its hello. From now on the tokens are sent, and it hashes
         * them. */
        steady->refuses_hashes_of = space.space_id + 1;
        asked = *request;
        asked.space_id = space.space_id;
        status = kvr__in_time(steady, deadline_ms);
        if (status == KVR_OK) status = kvr_route(&steady->client, &asked, &answer->reply);
    }
    if (request->request_id != NULL && status != KVR_OK && status != KVR_REFUSED && status != KVR_INVALID) {
        /* The request may be booked, now or later. Its booking is freed by name, before the next request is sent. */
        const kvr_booking by_name = {0, 0};
        kvr__booking_report report = kvr__report_of(KVR__KIND_FREE, by_name, 0, 0);
        report.request_id = request->request_id;
        report.attempt = request->attempt;
        kvr__owe(steady, &report, steady->instance_id);
    }
    kvr__judge(steady, status);
    return status;
}

/* Asks which worker should run a prompt. The request's space is that of the model. If the connection ends, it tries
 * once more on another. KVR_OK also if the client decided without the daemon: see `answer`. */
static inline kvr_status kvr_steady_route(kvr_steady *steady, const char *model, const char *name_space,
    const kvr_route_request *request, kvr_answer *answer) {
    int64_t deadline_ms = kvr__now_ms() + steady->options.timeout_ms;
    kvr_status status = KVR_SYSTEM;
    int tries, is_draining;
    kvr__clear_answer(answer);
    for (tries = 0; tries < 2; tries++) {
        int was_connected = steady->is_connected;
        status = kvr__try_route(steady, model, name_space, request, deadline_ms, answer);
        if (!was_connected || steady->is_connected) break;
    }
    if (status == KVR_OK) {
        answer->booking.booking = answer->reply.booking;
        answer->prefill_booking.booking = answer->reply.prefill_booking;
        answer->booking.instance_id = answer->prefill_booking.instance_id = steady->instance_id;
        return KVR_OK;
    }
    is_draining = status == KVR_REFUSED && steady->client.error_code == KVR__ERROR_CODE_DRAINING;
    if (status == KVR_TIMEOUT || status == KVR_CLOSED || status == KVR_SYSTEM || is_draining)
        return kvr__decide_alone(steady, model, name_space, request, status, answer);
    return status;
}

/* Sends a report about a booking, or stores it until the daemon is back. Then it is KVR_OK too, and the outcome
 * unknown. */
static inline kvr_status kvr__steady_report(
    kvr_steady *steady, const kvr_held *held, kvr__booking_report report, kvr_outcome *outcome) {
    int64_t deadline_ms = kvr__now_ms() + steady->options.timeout_ms;
    kvr_status status;
    if (outcome != NULL) *outcome = KVR_BOOKING_UNKNOWN;
    if (held->booking.generation == 0) return KVR_OK;
    status = kvr__connected(steady, deadline_ms);
    /* Another run of the daemon does not know the booking. */
    if (status == KVR_OK && held->instance_id != steady->instance_id) return KVR_OK;
    if (status == KVR_OK) {
        status = kvr__in_time(steady, deadline_ms);
        if (status == KVR_OK) status = kvr__report(&steady->client, &report, outcome);
        kvr__judge(steady, status);
    }
    if (status == KVR_OK || status == KVR_REFUSED) return status;
    /* The daemon may have received it: a report that arrives twice changes nothing. */
    kvr__owe(steady, &report, held->instance_id);
    return KVR_OK;
}

/* As kvr_prefill_complete. */
static inline kvr_status kvr_steady_prefill_complete(
    kvr_steady *steady, const kvr_held *held, uint64_t prefill_us, kvr_outcome *outcome) {
    return kvr__steady_report(
        steady, held, kvr__report_of(KVR__KIND_PREFILL_COMPLETE, held->booking, prefill_us, 0), outcome);
}

/* As kvr_output_progress. */
static inline kvr_status kvr_steady_output_progress(
    kvr_steady *steady, const kvr_held *held, uint32_t output_tokens, kvr_outcome *outcome) {
    return kvr__steady_report(
        steady, held, kvr__report_of(KVR__KIND_OUTPUT_PROGRESS, held->booking, output_tokens, 0), outcome);
}

/* As kvr_served. */
static inline kvr_status kvr_steady_served(
    kvr_steady *steady, const kvr_held *held, uint64_t worker_id, uint32_t dp_rank, kvr_outcome *outcome) {
    return kvr__steady_report(
        steady, held, kvr__report_of(KVR__KIND_SERVED, held->booking, worker_id, dp_rank), outcome);
}

/* As kvr_free. */
static inline kvr_status kvr_steady_free(kvr_steady *steady, const kvr_held *held, kvr_outcome *outcome) {
    return kvr__steady_report(steady, held, kvr__report_of(KVR__KIND_FREE, held->booking, 0, 0), outcome);
}

/* Connects for a question, unless there is a connection, and finds its space. The connection gets the rest of the
 * call's time. */
static inline kvr_status kvr__ready_to_ask(
    kvr_steady *steady, const char *model, const char *name_space, uint8_t role, kvr_space *space) {
    int64_t deadline_ms = kvr__now_ms() + steady->options.timeout_ms;
    kvr_status status = kvr__connected(steady, deadline_ms);
    if (status == KVR_OK) status = kvr__space_of(steady, model, name_space, role, space);
    return status == KVR_OK ? kvr__in_time(steady, deadline_ms) : status;
}

/* As kvr_overlaps, of the model's space. It fails without the daemon: only the daemon knows the caches. */
static inline kvr_status kvr_steady_overlaps(kvr_steady *steady, const char *model, const char *name_space,
    const kvr_route_request *request, kvr_overlap *overlaps, size_t room, size_t *count, kvr_prompt_found *found) {
    kvr_route_request asked = *request;
    kvr_space space;
    kvr_status status = kvr__ready_to_ask(steady, model, name_space, request->role, &space);
    *count = 0;
    if (status != KVR_OK) return status;
    asked.space_id = space.space_id;
    status = kvr_overlaps(&steady->client, &asked, overlaps, room, count, found);
    kvr__judge(steady, status);
    return status;
}

/* As kvr_potential_loads, of the model's space. */
static inline kvr_status kvr_steady_potential_loads(kvr_steady *steady, const char *model, const char *name_space,
    const kvr_route_request *request, kvr_potential_load *loads, size_t room, size_t *count) {
    kvr_route_request asked = *request;
    kvr_space space;
    kvr_status status = kvr__ready_to_ask(steady, model, name_space, request->role, &space);
    *count = 0;
    if (status != KVR_OK) return status;
    asked.space_id = space.space_id;
    status = kvr_potential_loads(&steady->client, &asked, loads, room, count);
    kvr__judge(steady, status);
    return status;
}

/* As kvr_workers, of the model's space. */
static inline kvr_status kvr_steady_workers(kvr_steady *steady, const char *model, const char *name_space, uint8_t role,
    kvr_worker *workers, size_t room, size_t *count) {
    kvr_space space;
    kvr_status status = kvr__ready_to_ask(steady, model, name_space, role, &space);
    *count = 0;
    if (status != KVR_OK) return status;
    status = kvr_workers(&steady->client, space.space_id, workers, room, count);
    kvr__judge(steady, status);
    return status;
}

/* As kvr_report_load, of a worker of the model's space. */
static inline kvr_status kvr_steady_report_load(kvr_steady *steady, const char *model, const char *name_space, uint8_t role,
    uint64_t worker_id, uint32_t dp_rank, const kvr_engine_load *load, int *accepted) {
    kvr_space space;
    kvr_status status = kvr__ready_to_ask(steady, model, name_space, role, &space);
    if (status != KVR_OK) return status;
    status = kvr_report_load(&steady->client, space.space_id, worker_id, dp_rank, load, accepted);
    kvr__judge(steady, status);
    return status;
}

/* As kvr_report_failure, of a worker of the model's space. */
static inline kvr_status kvr_steady_report_failure(kvr_steady *steady, const char *model, const char *name_space,
    uint8_t role, uint64_t worker_id, uint32_t dp_rank, const char *reason, uint32_t *back_off_ms) {
    kvr_space space;
    kvr_status status = kvr__ready_to_ask(steady, model, name_space, role, &space);
    if (status != KVR_OK) return status;
    status = kvr_report_failure(&steady->client, space.space_id, worker_id, dp_rank, reason, back_off_ms);
    kvr__judge(steady, status);
    return status;
}

#ifdef __cplusplus
}
#endif

#endif
