/* What happens in a call: how it fails, how replies are read, and how a frame is sent and its reply received, over
 * the socket or over shared memory (a lane). kvrouted.h includes this header.
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

/* Feature bits of schemas/README.md. */
#define KVR__FEATURE_QUEUE (1u << 12)
#define KVR__FEATURE_WATCH (1u << 16)
#define KVR__FEATURE_LANES (1u << 17)
/* Error codes of schemas/README.md. */
#define KVR__ERROR_CODE_UNSUPPORTED 4
#define KVR__ERROR_CODE_SCHEME_MISMATCH 8
#define KVR__ERROR_CODE_DRAINING 12

/* Clears what an earlier call left. */
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

/* Fails as if the daemon had refused with `unsupported`. */
static inline kvr_status kvr__unsupported(kvr_client *client, const char *message, const char *remedy) {
    kvr__fail(client, KVR_REFUSED, message);
    client->error_code = KVR__ERROR_CODE_UNSUPPORTED;
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

/* ---- reading replies --------------------------------------------------------------------------------------- */

static inline kvr_booking kvr__read_booking(kvr__view *view, kvr__row row, size_t field) {
    kvr_booking booking = {0, 0};
    size_t at = kvr__find(view, row, field, KVR__BOOKING_HANDLE_BYTES);
    if (at != 0) {
        booking.slot = kvr__get(view->bytes + at + KVR__BOOKING_HANDLE_SLOT_AT, 8);
        booking.generation = kvr__get(view->bytes + at + KVR__BOOKING_HANDLE_GENERATION_AT, 8);
    }
    return booking;
}

static inline kvr_trust kvr__read_trust(kvr__view *view, kvr__row row, size_t field) {
    kvr_trust trust = {0, 0};
    size_t at = kvr__find(view, row, field, KVR__TRUST_BYTES);
    if (at != 0) {
        trust.level = view->bytes[at + KVR__TRUST_LEVEL_AT];
        trust.reasons = kvr__get(view->bytes + at + KVR__TRUST_REASONS_AT, 8);
    }
    return trust;
}

/* Blocks by tier. */
typedef struct kvr__tiers {
    uint32_t device, host, disk, external;
} kvr__tiers;

static inline kvr__tiers kvr__read_tiers(kvr__view *view, kvr__row row, size_t field) {
    kvr__tiers tiers = {0, 0, 0, 0};
    size_t at = kvr__find(view, row, field, KVR__TIER_BLOCKS_BYTES);
    if (at != 0) {
        tiers.device = (uint32_t)kvr__get(view->bytes + at + KVR__TIER_BLOCKS_DEVICE_AT, 4);
        tiers.host = (uint32_t)kvr__get(view->bytes + at + KVR__TIER_BLOCKS_HOST_AT, 4);
        tiers.disk = (uint32_t)kvr__get(view->bytes + at + KVR__TIER_BLOCKS_DISK_AT, 4);
        tiers.external = (uint32_t)kvr__get(view->bytes + at + KVR__TIER_BLOCKS_EXTERNAL_AT, 4);
    }
    return tiers;
}

static inline void kvr__read_terms(kvr__view *view, kvr__row row, kvr_terms *to) {
#define KVR__READ_TERM(name, number, absent) \
    to->name = kvr__find(view, row, number, 8) == 0 ? absent : kvr__read_double(view, row, number);
    KVR__EACH_OF_COST_TERMS(KVR__READ_TERM)
#undef KVR__READ_TERM
}

static inline void kvr__read_candidate(kvr__view *view, kvr__row row, kvr_candidate *to) {
    kvr__tiers tiers = kvr__read_tiers(view, row, KVR__CANDIDATE_OVERLAP);
    kvr_trust trust = kvr__read_trust(view, row, KVR__CANDIDATE_TRUST);
    memset(to, 0, sizeof *to);
    to->worker_id = kvr__read_u64(view, row, KVR__CANDIDATE_WORKER_ID);
    to->dp_rank = kvr__read_u32(view, row, KVR__CANDIDATE_DP_RANK);
    kvr__read_text(view, row, KVR__CANDIDATE_NAME, to->name);
    to->device_blocks = tiers.device;
    to->host_blocks = tiers.host;
    to->disk_blocks = tiers.disk;
    to->external_blocks = tiers.external;
    to->trust_level = trust.level;
    to->trust_reasons = trust.reasons;
    to->cost = kvr__read_double(view, row, KVR__CANDIDATE_COST);
    to->state = kvr__read_u8(view, row, KVR__CANDIDATE_STATE);
    to->has_terms = kvr__find(view, row, KVR__CANDIDATE_TERMS, 4) != 0;
    if (to->has_terms) kvr__read_terms(view, kvr__read_row(view, row, KVR__CANDIDATE_TERMS), &to->terms);
}

/* Reads the excluded workers by rule, as many rules as there is room for. Answers with how many rules it read. */
static inline size_t kvr__read_removals(kvr__view *view, kvr__row root, size_t field, kvr_removal *to) {
    size_t count, at = kvr__read_vector(view, root, field, 4, &count), i;
    for (i = 0; i < count && i < KVR_REMOVALS_MAX && !view->bad; i++) {
        kvr__row row = kvr__row_in(view, at, i);
        size_t rule = kvr__find(view, row, KVR__REMOVAL_RULE, 4), workers;
        memset(&to[i], 0, sizeof to[i]);
        if (rule != 0) kvr__read_text_at(view, rule, to[i].rule, sizeof to[i].rule);
        workers = kvr__read_vector(view, row, KVR__REMOVAL_WORKERS, KVR__WORKER_REF_BYTES, &to[i].worker_count);
        if (to[i].worker_count == 0 || view->bad) continue;
        to[i].first.worker_id = kvr__get(view->bytes + workers + KVR__WORKER_REF_WORKER_ID_AT, 8);
        to[i].first.dp_rank = (uint32_t)kvr__get(view->bytes + workers + KVR__WORKER_REF_DP_RANK_AT, 4);
    }
    return i;
}

/* Reads a list of candidates, as many as there is room for. Answers with how many it read. */
static inline size_t kvr__read_candidates(kvr__view *view, kvr__row root, size_t field, kvr_candidate *to) {
    size_t count, at = kvr__read_vector(view, root, field, 4, &count), i;
    for (i = 0; i < count && i < KVR_CANDIDATES_MAX && !view->bad; i++)
        kvr__read_candidate(view, kvr__row_in(view, at, i), &to[i]);
    return i;
}

/* A reply with empty lists. */
static inline void kvr__clear_reply(kvr_route_reply *reply) {
    memset(reply, 0, offsetof(kvr_route_reply, candidates));
}

/* Reads the reply to a route. Answers whether it could be read. */
static inline int kvr__read_route(const uint8_t *body, size_t length, kvr_route_reply *to) {
    kvr__view view = kvr__view_of(body, length);
    kvr__row root = kvr__root(&view);
    kvr__clear_reply(to);
    to->candidate_count = kvr__read_candidates(&view, root, KVR__ROUTE_REPLY_CANDIDATES, to->candidates);
    to->prefill_count = kvr__read_candidates(&view, root, KVR__ROUTE_REPLY_PREFILL, to->prefill);
    to->prefill_booking = kvr__read_booking(&view, root, KVR__ROUTE_REPLY_PREFILL_BOOKING);
    to->eligible = kvr__read_u32(&view, root, KVR__ROUTE_REPLY_ELIGIBLE);
    to->unmatchable = kvr__read_u8(&view, root, KVR__ROUTE_REPLY_MATCH) != KVR__MATCH_STATUS_MATCHED;
    to->notes = kvr__read_u64(&view, root, KVR__ROUTE_REPLY_NOTES);
    to->request_blocks = kvr__read_u32(&view, root, KVR__ROUTE_REPLY_REQUEST_BLOCKS);
    to->policy_version = kvr__read_u64(&view, root, KVR__ROUTE_REPLY_POLICY_VERSION);
    to->fleet_version = kvr__read_u64(&view, root, KVR__ROUTE_REPLY_FLEET_VERSION);
    to->index_epoch = kvr__read_u64(&view, root, KVR__ROUTE_REPLY_INDEX_EPOCH);
    to->removal_count = kvr__read_removals(&view, root, KVR__ROUTE_REPLY_REMOVED, to->removals);
    to->ties = kvr__read_u32(&view, root, KVR__ROUTE_REPLY_TIES);
    to->mode = kvr__read_u8(&view, root, KVR__ROUTE_REPLY_MODE);
    to->booking = kvr__read_booking(&view, root, KVR__ROUTE_REPLY_BOOKING);
    to->nobody = kvr__read_u16(&view, root, KVR__ROUTE_REPLY_NOBODY);
    to->retry_after_us = kvr__read_u32(&view, root, KVR__ROUTE_REPLY_RETRY_AFTER_US);
    return !view.bad;
}

/* Reads an error of the daemon. Answers whether it could be read. */
static inline int kvr__read_error(const uint8_t *body, size_t length, kvr_client *to) {
    kvr__view view = kvr__view_of(body, length);
    kvr__row root = kvr__root(&view);
    to->error_code = kvr__read_u16(&view, root, KVR__ERROR_CODE);
    to->retryable = kvr__read_u8(&view, root, KVR__ERROR_RETRYABLE) != 0;
    to->retry_after_us = kvr__read_u32(&view, root, KVR__ERROR_RETRY_AFTER_US);
    kvr__read_text(&view, root, KVR__ERROR_MESSAGE, to->message);
    kvr__read_text(&view, root, KVR__ERROR_REMEDY, to->remedy);
    return !view.bad;
}

/* Reads the n-th space of a hello. Answers 1, 0 if there are fewer, -1 if it cannot be read. */
static inline int kvr__read_space(const uint8_t *body, size_t length, size_t n, kvr_space *to) {
    kvr__view view = kvr__view_of(body, length);
    kvr__row row, scheme;
    size_t count, at = kvr__read_vector(&view, kvr__root(&view), KVR__HELLO_REPLY_SPACES, 4, &count);
    uint8_t window, seed_rule;
    uint32_t block_size;
    if (view.bad || count > KVR__SPACES_MAX) return -1;
    if (n >= count) return 0;
    row = kvr__row_in(&view, at, n);
    memset(to, 0, sizeof *to);
    to->space_id = kvr__read_u32(&view, row, KVR__SPACE_SPACE_ID);
    kvr__read_text(&view, row, KVR__SPACE_MODEL, to->model);
    kvr__read_text(&view, row, KVR__SPACE_NAMESPACE, to->name_space);
    to->role = kvr__read_u8(&view, row, KVR__SPACE_ROLE);
    scheme = kvr__read_row(&view, row, KVR__SPACE_SCHEME);
    window = kvr__read_u8(&view, scheme, KVR__SCHEME_WINDOW);
    seed_rule = kvr__read_u8(&view, scheme, KVR__SCHEME_SEED_RULE);
    block_size = kvr__read_u32(&view, scheme, KVR__SCHEME_BLOCK_SIZE);
    to->window = window;
    /* The block size stays 0 where this header does not know how the blocks are hashed. */
    if (window <= KVR__WINDOW_BIGRAM && seed_rule == KVR__SEED_RULE_XXH3_ADDITIVE && block_size <= KVR__BLOCK_SIZE_MAX)
        to->block_size = block_size;
    return view.bad ? -1 : 1;
}

/* ---- the socket ---------------------------------------------------------------------------------------- */

static inline int64_t kvr__now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static inline kvr_status kvr__time_out(kvr_client *client) {
    return kvr__fail(client, KVR_TIMEOUT, "the daemon did not answer in time");
}

/* KVR_TIMEOUT once the call's deadline has passed. Every loop that a daemon can prolong by sending more calls this. */
static inline kvr_status kvr__check_deadline(kvr_client *client, int64_t deadline_ms) {
    return kvr__now_ms() < deadline_ms ? KVR_OK : kvr__time_out(client);
}

static inline kvr_status kvr__wait(kvr_client *client, short events, int64_t deadline_ms) {
    for (;;) {
        struct pollfd polled = {0, 0, 0};
        int64_t left = deadline_ms - kvr__now_ms();
        int ready;
        polled.fd = client->fd;
        polled.events = events;
        if (left <= 0) return kvr__time_out(client);
        ready = poll(&polled, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (ready > 0) return KVR_OK;
        if (ready < 0 && errno != EINTR) return kvr__fail_errno(client, "poll");
    }
}

static inline kvr_status kvr__closed(kvr_client *client) {
    return kvr__fail(client, KVR_CLOSED, "the daemon has closed the connection");
}

/* Bytes of one read. */
enum { KVR__READ_BYTES = 65536 };

/* Reads what the socket has now. KVR_TIMEOUT = nothing. */
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
        if (bytes == 0 || errno == ECONNRESET) return kvr__closed(client);
        if (errno == EAGAIN || errno == EWOULDBLOCK) return KVR_TIMEOUT;
        if (errno != EINTR) return kvr__fail_errno(client, "recv");
    }
}

static inline int64_t kvr__now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Reads the socket of a connection with a lane: it carries the daemon's last error, or the end of the connection. */
static inline kvr_status kvr__read_socket_beside_lane(kvr_client *client) {
    uint8_t frame[1024];
    ssize_t bytes;
    do bytes = recv(client->fd, frame, sizeof frame, MSG_DONTWAIT);
    while (bytes < 0 && errno == EINTR);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return KVR_OK;
    if (bytes <= 0) return client->was_told ? KVR_CLOSED : kvr__closed(client);
    if (bytes > KVR__HEADER_BYTES && frame[KVR__HEADER_KIND_AT] == KVR__KIND_ERROR)
        client->was_told = kvr__read_error(frame + KVR__HEADER_BYTES, (size_t)bytes - KVR__HEADER_BYTES, client) != 0;
    return KVR_OK;
}

/* Whether the daemon sent the reason why it ends the connection. It sends the reason over the socket before it
 * empties the lane's memory and closes the bell, so a client that notices either finds the reason in the socket. */
static inline int kvr__has_close_reason(kvr_client *client) {
    if (!client->was_told) kvr__read_socket_beside_lane(client);
    return client->was_told;
}

static inline kvr_status kvr__lane_fault(kvr_client *client) {
    if (kvr__has_close_reason(client)) return KVR_CLOSED;
    client->lane_broke = 1;
    return kvr__fail(client, KVR_CLOSED, "the lane was closed or cannot be trusted");
}

/* Reads what the lane has now. KVR_TIMEOUT = nothing. */
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

/* Sleeps until the lane has the awaited words or room, or until the socket or the bell has bytes. */
static inline kvr_status kvr__sleep_for_lane(kvr_client *client, uint64_t awaited, int64_t deadline_ms) {
    struct pollfd polled[2] = {{0, 0, 0}, {0, 0, 0}};
    int64_t left = deadline_ms - kvr__now_ms();
    int there, ready = 0, failed = 0;
    polled[0].fd = client->lane.bell;
    polled[1].fd = client->fd;
    polled[0].events = polled[1].events = POLLIN;
    kvr__lane_announce(&client->lane, awaited);
    /* Words that arrived before the daemon could know that this side sleeps. */
    there = kvr__lane_has(&client->lane, awaited);
    if (there == 0 && left > 0) {
        ready = poll(polled, 2, left > INT_MAX ? INT_MAX : (int)left);
        failed = ready < 0 && errno != EINTR;
    }
    kvr__lane_settle(&client->lane);
    if (there == 0) there = kvr__lane_has(&client->lane, awaited);
    if (there != 0) return there < 0 ? kvr__lane_fault(client) : KVR_OK;
    if (failed) return kvr__fail_errno(client, "poll");
    if (left <= 0) return kvr__time_out(client);
    if (ready > 0 && polled[0].revents != 0 && !kvr__lane_hear(&client->lane))
        return kvr__has_close_reason(client) ? KVR_CLOSED : kvr__closed(client);
    return ready > 0 && polled[1].revents != 0 ? kvr__read_socket_beside_lane(client) : KVR_OK;
}

/* Waits for words or room in the lane: busy-polls for spin_us, then sleeps. */
static inline kvr_status kvr__wait_for_lane(kvr_client *client, uint64_t awaited, int64_t deadline_ms) {
    int64_t until_us = client->spin_us == 0 ? 0 : kvr__now_us() + client->spin_us;
    int there;
    do {
        int i;
        for (i = 0; i < KVR__POLLS_PER_CLOCK; i++) {
            there = kvr__lane_has(&client->lane, awaited);
            if (there != 0) return there < 0 ? kvr__lane_fault(client) : KVR_OK;
            if (until_us != 0) kvr__lane_own_ahead(&client->lane);
            kvr__pause();
        }
    } while (until_us != 0 && kvr__now_us() < until_us);
    for (;;) {
        kvr_status status = kvr__sleep_for_lane(client, awaited, deadline_ms);
        there = kvr__lane_has(&client->lane, awaited);
        if (there < 0) return kvr__lane_fault(client);
        /* Words that the daemon wrote before it ended the connection are read first. */
        if (there > 0 || status != KVR_OK) return there > 0 ? KVR_OK : status;
    }
}

/* Sends `out` over the lane. Meanwhile it reads replies: a daemon without room for replies reads no requests. */
static inline kvr_status kvr__send_over_lane(kvr_client *client, int64_t deadline_ms) {
    size_t sent = 0;
    for (;;) {
        int64_t moved = kvr__lane_push(&client->lane, client->out.bytes + sent, client->out.used - sent);
        kvr_status status;
        if (moved < 0) return kvr__lane_fault(client);
        sent += (size_t)moved;
        if (sent >= client->out.used) return KVR_OK;
        status = kvr__read_lane(client);
        if (status == KVR_TIMEOUT) status = kvr__wait_for_lane(client, KVR__AWAITS_BOTH, deadline_ms);
        if (status == KVR_OK) status = kvr__check_deadline(client, deadline_ms);
        if (client->in.used > KVR__BODY_BYTES_CEILING)
            return kvr__fail(client, KVR_MALFORMED, "the daemon sends replies without end");
        /* A part of the frame may be sent: the connection cannot be used any more. */
        if (status == KVR_TIMEOUT && sent > 0) return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
        if (status != KVR_OK) return status;
    }
}

static inline kvr_status kvr__send(kvr_client *client, int64_t deadline_ms) {
    size_t sent = 0;
    if (client->lane.words != NULL) return kvr__send_over_lane(client, deadline_ms);
    while (sent < client->out.used) {
        ssize_t bytes = send(client->fd, client->out.bytes + sent, client->out.used - sent, MSG_NOSIGNAL);
        if (bytes >= 0) {
            sent += (size_t)bytes;
            if (sent < client->out.used && kvr__check_deadline(client, deadline_ms) != KVR_OK)
                return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            kvr_status status = kvr__wait(client, POLLOUT, deadline_ms);
            /* A part of the frame may be sent: the connection cannot be used any more. */
            if (status == KVR_TIMEOUT && sent > 0) return kvr__fail(client, KVR_CLOSED, "the daemon takes no more");
            if (status != KVR_OK) return status;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            return kvr__closed(client);
        } else if (errno != EINTR) {
            return kvr__fail_errno(client, "send");
        }
    }
    return KVR_OK;
}

/* Reads the next bytes: busy-polls for spin_us, then sleeps. */
static inline kvr_status kvr__receive(kvr_client *client, int64_t deadline_ms) {
    int64_t until_us = client->spin_us == 0 ? 0 : kvr__now_us() + client->spin_us;
    kvr_status status = KVR_TIMEOUT, read;
    if (client->lane.words != NULL) {
        status = kvr__read_lane(client);
        return status == KVR_TIMEOUT ? kvr__wait_for_lane(client, KVR__AWAITS_DATA, deadline_ms) : status;
    }
    while (status == KVR_TIMEOUT && until_us != 0 && kvr__now_us() < until_us) status = kvr__read_socket(client);
    if (status != KVR_TIMEOUT) return status;
    status = kvr__wait(client, POLLIN, deadline_ms);
    if (status != KVR_OK && status != KVR_TIMEOUT) return status;
    /* Also after the deadline: bytes may have arrived. And the wake-up may have been for nothing. */
    read = kvr__read_socket(client);
    return read == KVR_TIMEOUT ? status : read;
}

static inline kvr_status kvr__not_a_frame(kvr_client *client) {
    return kvr__fail(client, KVR_MALFORMED, "the daemon sent something else than a frame of protocol version 1");
}

/* Answers whether the first frame is whole, with the bytes of its body. -1 = it is not a frame. */
static inline int kvr__is_whole(const kvr_buffer *in, size_t *body_bytes) {
    if (in->used < KVR__HEADER_BYTES) return 0;
    *body_bytes = (size_t)kvr__get(in->bytes + KVR__HEADER_BODY_BYTES_AT, 4);
    if (in->bytes[KVR__HEADER_KIND_AT] == KVR__KIND_NONE || in->bytes[KVR__HEADER_FLAGS_AT] != 0 ||
        kvr__get(in->bytes + KVR__HEADER_VERSION_AT, 2) != KVR__PROTOCOL_VERSION || *body_bytes % 8 != 0 ||
        *body_bytes > KVR__BODY_BYTES_CEILING)
        return -1;
    return in->used - KVR__HEADER_BYTES >= *body_bytes;
}

/* The kind of the first received frame, and the id that it answers. */
static inline uint8_t kvr__frame_kind(const kvr_client *client) {
    return client->in.bytes[KVR__HEADER_KIND_AT];
}

static inline uint64_t kvr__frame_id(const kvr_client *client) {
    return kvr__get(client->in.bytes + KVR__HEADER_ID_AT, 8);
}

/* Receives until the first frame is whole. Answers with the bytes of its body. */
static inline kvr_status kvr__frame(kvr_client *client, int64_t deadline_ms, size_t *body_bytes) {
    int is_late = 0;
    for (;;) {
        int is_whole = kvr__is_whole(&client->in, body_bytes);
        kvr_status status;
        if (is_whole < 0) return kvr__not_a_frame(client);
        if (is_whole) return KVR_OK;
        /* A frame that arrives byte by byte does not prolong the call. */
        if (is_late) return kvr__time_out(client);
        status = kvr__receive(client, deadline_ms);
        if (status != KVR_OK) return status;
        is_late = kvr__now_ms() >= deadline_ms;
    }
}

/* A report about a booking. A booking of generation 0 is named by `request_id` and `attempt`. */
typedef struct kvr__booking_report {
    uint8_t kind; /* KVR__KIND_PREFILL_COMPLETE, _OUTPUT_PROGRESS, _SERVED or _FREE */
    kvr_booking booking;
    const char *request_id;
    uint32_t attempt;
    uint64_t value; /* microseconds of the prefill, generated tokens, or the id of the worker that runs the request */
    uint32_t rank;  /* of the worker that served */
} kvr__booking_report;

/* Compares numbers of two tables. */
#define KVR__SAME(one, other) ((int)(one) == (int)(other))

/* The four reports name their booking by the same fields. If the schema changes that, this divides by zero, and the
 * header does not compile. */
enum {
    KVR__REPORTS_ARE_ALIKE = 1 / (KVR__SAME(KVR__PREFILL_COMPLETE_BOOKING, KVR__FREE_BOOKING) &&
                                     KVR__SAME(KVR__PREFILL_COMPLETE_REQUEST_ID, KVR__FREE_REQUEST_ID) &&
                                     KVR__SAME(KVR__PREFILL_COMPLETE_ATTEMPT, KVR__FREE_ATTEMPT) &&
                                     KVR__SAME(KVR__OUTPUT_PROGRESS_BOOKING, KVR__FREE_BOOKING) &&
                                     KVR__SAME(KVR__OUTPUT_PROGRESS_REQUEST_ID, KVR__FREE_REQUEST_ID) &&
                                     KVR__SAME(KVR__OUTPUT_PROGRESS_ATTEMPT, KVR__FREE_ATTEMPT) &&
                                     KVR__SAME(KVR__SERVED_BOOKING, KVR__FREE_BOOKING) &&
                                     KVR__SAME(KVR__SERVED_REQUEST_ID, KVR__FREE_REQUEST_ID) &&
                                     KVR__SAME(KVR__SERVED_ATTEMPT, KVR__FREE_ATTEMPT))
};

static inline kvr_status kvr__encode_report(kvr_client *client, const kvr__booking_report *report, uint64_t id) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, KVR__SERVED_WORKER + 1);
    if (report->booking.generation != 0)
        kvr__write_pair(out, &table, KVR__FREE_BOOKING, report->booking.slot, report->booking.generation);
    if (report->kind == KVR__KIND_PREFILL_COMPLETE && report->value != 0)
        kvr__write_u64(out, &table, KVR__PREFILL_COMPLETE_PREFILL_US, report->value);
    if (report->kind == KVR__KIND_OUTPUT_PROGRESS)
        kvr__write_u32(out, &table, KVR__OUTPUT_PROGRESS_OUTPUT_TOKENS, (uint32_t)report->value);
    if (report->kind == KVR__KIND_SERVED)
        kvr__write_pair(out, &table, KVR__SERVED_WORKER, report->value, report->rank);
    if (report->booking.generation == 0 && report->request_id != NULL) {
        kvr__write_u32(out, &table, KVR__FREE_ATTEMPT, report->attempt);
        kvr__write_text_at(out, kvr__write_offset(out, &table, KVR__FREE_REQUEST_ID), report->request_id);
    }
    return kvr__end(client, report->kind, id);
}

static inline kvr__booking_report kvr__report_of(uint8_t kind, kvr_booking booking, uint64_t value, uint32_t rank) {
    kvr__booking_report report = {0, {0, 0}, NULL, 0, 0, 0};
    report.kind = kind;
    report.booking = booking;
    report.value = value;
    report.rank = rank;
    return report;
}

/* Stores the fleet that a watch sent. */
static inline void kvr__keep_fleet(kvr_client *client, const uint8_t *body, size_t bytes) {
    client->fleet.used = 0;
    kvr__grow(&client->fleet, bytes);
    if (client->fleet.short_of_memory) return;
    memcpy(client->fleet.bytes, body, bytes);
    client->fleets++;
}

/* Handles a frame that no call waits for. It stores a fleet. It frees the bookings of a reply that came too late:
 * their caller has given up, so nothing else would free them. */
static inline kvr_status kvr__handle_late(
    kvr_client *client, uint64_t id, uint8_t kind, size_t body_bytes, int64_t deadline_ms) {
    const uint8_t *body = client->in.bytes + KVR__HEADER_BYTES;
    kvr_booking left[2];
    kvr_route_reply late;
    size_t i;
    if (id == client->watch_id && id != 0) {
        if (kind == KVR__KIND_WATCH_REPLY) kvr__keep_fleet(client, body, body_bytes);
        else client->watch_id = 0;
        return KVR_OK;
    }
    if (kind != KVR__KIND_ROUTE_REPLY || !kvr__read_route(body, body_bytes, &late)) return KVR_OK;
    left[0] = late.booking;
    left[1] = late.prefill_booking;
    for (i = 0; i < 2; i++) {
        kvr__booking_report report = kvr__report_of(KVR__KIND_FREE, left[i], 0, 0);
        kvr_status status;
        if (left[i].generation == 0) continue;
        status = kvr__encode_report(client, &report, client->next_id++);
        if (status == KVR_OK) status = kvr__send(client, deadline_ms);
        if (status != KVR_OK) return status;
    }
    return KVR_OK;
}

/* Sends `out` and waits until the deadline for the reply to `id`, of this kind. The reply stays in `in` until
 * kvr__consume. */
static inline kvr_status kvr__exchange_until(
    kvr_client *client, uint64_t id, uint8_t kind, int64_t deadline_ms, size_t *frame_bytes) {
    kvr_status status = kvr__send(client, deadline_ms);
    if (status == KVR_OK && !client->was_told) client->message[0] = 0;
    while (status == KVR_OK) {
        size_t body_bytes;
        uint64_t got_id;
        uint8_t got_kind;
        status = kvr__frame(client, deadline_ms, &body_bytes);
        if (status != KVR_OK) break;
        *frame_bytes = KVR__HEADER_BYTES + body_bytes;
        got_id = kvr__frame_id(client);
        got_kind = kvr__frame_kind(client);
        /* An error about the whole connection has the id 0. */
        if (got_kind == KVR__KIND_ERROR && (got_id == id || got_id == 0)) {
            int read = kvr__read_error(client->in.bytes + KVR__HEADER_BYTES, body_bytes, client);
            kvr__consume(&client->in, *frame_bytes);
            return read ? KVR_REFUSED : kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
        }
        if (got_id == id) {
            if (got_kind == kind) return KVR_OK;
            kvr__consume(&client->in, *frame_bytes);
            return kvr__fail(client, KVR_MALFORMED, "the reply has another kind than the request's");
        }
        status = kvr__handle_late(client, got_id, got_kind, body_bytes, deadline_ms);
        kvr__consume(&client->in, *frame_bytes);
        if (status == KVR_OK) status = kvr__check_deadline(client, deadline_ms);
    }
    return status;
}

/* The same, within the connection's timeout. */
static inline kvr_status kvr__exchange(kvr_client *client, uint64_t id, uint8_t kind, size_t *frame_bytes) {
    return kvr__exchange_until(client, id, kind, kvr__now_ms() + client->timeout_ms, frame_bytes);
}

/* The body of the received frame, which has this many bytes with its header. */
static inline kvr__view kvr__reply_view(const kvr_client *client, size_t frame_bytes) {
    return kvr__view_of(client->in.bytes + KVR__HEADER_BYTES, frame_bytes - KVR__HEADER_BYTES);
}

static inline kvr_status kvr__hello(kvr_client *client, const char *name, const kvr_session *session) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, KVR__HELLO_FIELD_COUNT);
    uint64_t id = client->next_id++;
    kvr__view view;
    kvr__row root, limits;
    size_t frame_bytes, at;
    kvr_status status;
    kvr__write_u16(out, &table, KVR__HELLO_VERSION_MIN, KVR__PROTOCOL_VERSION);
    kvr__write_u16(out, &table, KVR__HELLO_VERSION_MAX, KVR__PROTOCOL_VERSION);
    if (session != NULL) kvr__write_pair(out, &table, KVR__HELLO_SESSION, session->hi, session->lo);
    kvr__write_text_at(out, kvr__write_offset(out, &table, KVR__HELLO_CLIENT_NAME), name);
    status = kvr__end(client, KVR__KIND_HELLO, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, KVR__KIND_HELLO_REPLY, &frame_bytes);
    if (status != KVR_OK) return status;
    /* The hello is kept, because it names the spaces. */
    at = kvr__grow(&client->hello, frame_bytes - KVR__HEADER_BYTES);
    if (client->hello.short_of_memory) return kvr__fail(client, KVR_SYSTEM, "no memory for the hello");
    memcpy(client->hello.bytes + at, client->in.bytes + KVR__HEADER_BYTES, client->hello.used - at);
    kvr__consume(&client->in, frame_bytes);
    view = kvr__view_of(client->hello.bytes, client->hello.used);
    root = kvr__root(&view);
    limits = kvr__read_row(&view, root, KVR__HELLO_REPLY_LIMITS);
    client->instance_id = kvr__read_u64(&view, root, KVR__HELLO_REPLY_INSTANCE_ID);
    client->features = kvr__read_u64(&view, root, KVR__HELLO_REPLY_FEATURES);
    client->prompt_tokens_max = kvr__read_u32(&view, limits, KVR__LIMITS_PROMPT_TOKENS_MAX);
    if (view.bad || kvr__read_u16(&view, root, KVR__HELLO_REPLY_VERSION) != KVR__PROTOCOL_VERSION)
        return kvr__fail(client, KVR_MALFORMED, "the first reply is not a hello of protocol version 1");
    return KVR_OK;
}

#ifdef __cplusplus
}
#endif

#endif
