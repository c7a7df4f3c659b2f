/* A client of kvrouted, the daemon that says which worker should run a prompt.
 *
 * All of it is headers: this one with what it includes, kvrouted_types.h first, which says what is asked and answered. C99 or
 * C++ on Linux, by GCC or Clang (define _POSIX_C_SOURCE as 200809L or later before the first include).
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
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "kvrouted_exchange.h"
#include "kvrouted_types.h"

#ifdef __cplusplus
extern "C" {
#endif

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
    if (timeout_ms <= 0) return kvr__late(client);
    patience.tv_sec = timeout_ms / 1000;
    patience.tv_usec = (timeout_ms % 1000) * 1000;
    if (setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) < 0)
        return kvr__fail_errno(client, "setsockopt");
    if (connect(client->fd, (struct sockaddr *)&address, sizeof address) < 0) return kvr__fail_errno(client, path);
    flags = fcntl(client->fd, F_GETFL);
    if (flags < 0 || fcntl(client->fd, F_SETFL, flags | O_NONBLOCK) < 0) return kvr__fail_errno(client, "fcntl");
    left = deadline_ms - kvr__now_ms();
    if (left <= 0) return kvr__late(client);
    client->timeout_ms = (int)left;
    status = kvr__hello(client, name, session);
    client->timeout_ms = timeout_ms;
    return status;
}

/* Receives a part of a frame and the descriptors that come with it: the first two are kept, any others are closed. */
static inline kvr_status kvr__receive_handed(kvr_client *client, int descriptors[2], int64_t deadline_ms) {
    union {
        struct cmsghdr aligned;
        uint8_t bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct msghdr message;
    struct iovec part;
    struct cmsghdr *at;
    ssize_t bytes;
    size_t i;
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
        for (i = 0; i < (at->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int came, slot;
            memcpy(&came, CMSG_DATA(at) + i * sizeof came, sizeof came);
            slot = descriptors[0] < 0 ? 0 : 1;
            if (descriptors[slot] < 0) descriptors[slot] = came;
            else close(came);
        }
    }
    return kvr__check_deadline(client, deadline_ms);
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
 * be NULL: how long it is left alone while others can run requests; 0 where reports of this user keep requests away from as
 * many workers as the daemon's user_share_percent allows. */
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

/* Says how busy a worker says it is. `accepted`, which may be NULL: 0 = the worker has just left, or reports of
 * this user are in force for as many workers as the daemon's user_share_percent allows. */
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
        if (status == KVR_OK && client->fleets == before) status = kvr__check_deadline(client, deadline_ms);
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
    if (view.bad || count > KVR__WORKERS_MAX) return -1;
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
    for (i = 0; i < count && i < KVR__LABELS_MAX && !view.bad; i++)
        if (kvr__is_text(&view, at + 4 * i, label)) return 1;
    return 0;
}

/* The workers of a space, or of KVR_EVERY_SPACE, as the daemon has them now: as many as there is room for; `count` is how
 * many there are. */
static inline kvr_status kvr_workers(
    kvr_client *client, uint32_t space_id, kvr_worker *workers, size_t room, size_t *count) {
    uint64_t cursor = 0;
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
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
        if (status == KVR_OK) status = kvr__exchange_until(client, id, 22, deadline_ms, &frame_bytes);
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
        if (*count > KVR__WORKERS_MAX) return kvr__fail(client, KVR_MALFORMED, "the daemon's pages do not end");
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
