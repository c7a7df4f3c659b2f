/* What goes on under a call: how it fails, how replies are read, and how a frame goes out and its reply comes back, by the
 * socket or by a lane. Of kvrouted.h, which includes it.
 */
#ifndef KVROUTED_EXCHANGE_H
#define KVROUTED_EXCHANGE_H

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "kvrouted_types.h"

#ifdef __cplusplus
extern "C" {
#endif

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
    uint64_t window, seed_rule, block_size;
    view.bytes = body;
    view.length = length;
    at = kvr__vector(&view, kvr__root(&view), 4, 4, &count);
    if (view.bad || count > KVR__SPACES_MAX) return -1;
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
    block_size = kvr__read(&view, scheme, 0, 4);
    to->window = (uint8_t)window;
    if (window <= 1 && seed_rule == 0 && block_size <= KVR__BLOCK_SIZE_MAX) to->block_size = (uint32_t)block_size;
    return view.bad ? -1 : 1;
}

/* ---- the socket ---------------------------------------------------------------------------------------- */

static inline int64_t kvr__now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline kvr_status kvr__late(kvr_client *client) {
    return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
}

/* KVR_TIMEOUT once the call's deadline has passed. Every loop that a daemon can keep going by sending ever more asks this. */
static inline kvr_status kvr__check_deadline(kvr_client *client, int64_t deadline_ms) {
    return kvr__now_ms() < deadline_ms ? KVR_OK : kvr__late(client);
}

static inline kvr_status kvr__wait(kvr_client *client, short events, int64_t deadline_ms) {
    for (;;) {
        struct pollfd polled = {0, 0, 0};
        int64_t left = deadline_ms - kvr__now_ms();
        int ready;
        polled.fd = client->fd;
        polled.events = events;
        if (left <= 0) return kvr__late(client);
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

/* What the socket says beside a lane: an error of the daemon before it ends the connection, or its end. */
static inline kvr_status kvr__read_beside(kvr_client *client) {
    uint8_t said[1024];
    ssize_t bytes;
    do bytes = recv(client->fd, said, sizeof said, MSG_DONTWAIT);
    while (bytes < 0 && errno == EINTR);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return KVR_OK;
    if (bytes <= 0) return client->was_told ? KVR_CLOSED : kvr__gone(client);
    if (bytes > KVR__HEADER_BYTES && said[4] == 254)
        client->was_told = kvr__read_error(said + KVR__HEADER_BYTES, (size_t)bytes - KVR__HEADER_BYTES, client) != 0;
    return KVR_OK;
}

/* Whether the daemon said why it ends the connection. It says so by the socket before it empties the lane's memory and lets
 * go of the bell: who notices either has its words to read yet. */
static inline int kvr__has_told(kvr_client *client) {
    if (!client->was_told) kvr__read_beside(client);
    return client->was_told;
}

static inline kvr_status kvr__lane_fault(kvr_client *client) {
    if (kvr__has_told(client)) return KVR_CLOSED;
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
    if (left <= 0) return kvr__late(client);
    if (ready > 0 && polled[0].revents != 0 && !kvr__lane_hear(&client->lane))
        return kvr__has_told(client) ? KVR_CLOSED : kvr__gone(client);
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
        if (status == KVR_OK) status = kvr__check_deadline(client, deadline_ms);
        if (client->in.used > KVR__BODY_BYTES_CEILING) return kvr__fail(client, KVR_MALFORMED, "replies without end came");
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
            if (sent < client->out.used && kvr__check_deadline(client, deadline_ms) != KVR_OK)
                return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
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
    int is_late = 0;
    for (;;) {
        int is_whole = kvr__is_whole(&client->in, body_bytes);
        kvr_status status;
        if (is_whole < 0) return kvr__fail(client, KVR_MALFORMED, "what came is no frame of protocol version 1");
        if (is_whole) return KVR_OK;
        /* A frame that comes byte by byte is never waited for. */
        if (is_late) return kvr__late(client);
        status = kvr__receive(client, deadline_ms);
        if (status != KVR_OK) return status;
        is_late = kvr__now_ms() >= deadline_ms;
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

/* Sends what is in `out` and waits until the deadline for the reply to `id`, of this kind; it stays in `in` until
 * kvr__consume. */
static inline kvr_status kvr__exchange_until(
    kvr_client *client, uint64_t id, uint8_t kind, int64_t deadline_ms, size_t *frame_bytes) {
    kvr_status status = kvr__send(client, deadline_ms);
    if (status == KVR_OK && !client->was_told) client->message[0] = 0;
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
        if (status == KVR_OK) status = kvr__check_deadline(client, deadline_ms);
    }
    return status;
}

/* The same within the connection's timeout. */
static inline kvr_status kvr__exchange(kvr_client *client, uint64_t id, uint8_t kind, size_t *frame_bytes) {
    return kvr__exchange_until(client, id, kind, kvr__now_ms() + client->timeout_ms, frame_bytes);
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

#ifdef __cplusplus
}
#endif

#endif
