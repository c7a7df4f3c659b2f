/* A client of kvrouted, the daemon that says which worker should run a prompt.
 *
 * The client is headers only: this one and those that it includes. Read kvrouted_types.h first: it has the requests and
 * the replies. The headers are C99 or C++ for Linux, by GCC or Clang. Define _POSIX_C_SOURCE as 200809L or later before
 * the first include.
 * A connection serves one thread and one request at a time. A prompt is sent as tokens, or as local hashes that the
 * caller made by the scheme of the space. Every call ends within the connection's timeout.
 *
 *     kvr_client client;
 *     kvr_space space;
 *     kvr_route_reply reply;
 *     kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
 *
 *     if (kvr_connect(&client, "/run/kvrouted/kvrouted.sock", "my-gateway", NULL, 1000) == KVR_OK &&
 *         kvr_find_space(&client, "my-model", NULL, &space) == KVR_OK) {
 *         request.space_id = space.space_id;
 *         request.request_id = "request-1";       // books the worker; NULL books nothing
 *         request.tokens = tokens;
 *         request.token_count = count;
 *         if (kvr_route(&client, &request, &reply) == KVR_OK && reply.candidate_count > 0) {
 *             // send the prompt to reply.candidates[0].worker_id
 *             kvr_prefill_complete(&client, reply.booking, 0, NULL);  // at the first token
 *             kvr_free(&client, reply.booking, NULL);                 // at the end, however the request ended
 *         }
 *     }
 *     kvr_close(&client);
 *
 * After KVR_CLOSED, KVR_SYSTEM or KVR_MALFORMED, close the client and connect again with the same session: the daemon
 * still has the bookings, unless it was restarted. After KVR_TIMEOUT the client can be used further. If a reply comes
 * too late, the client frees its booking.
 *
 * kvr_open_lane moves requests and replies to memory that is shared with the daemon. client.spin_us makes a call
 * busy-poll for its reply that long before it sleeps. If the daemon busy-polls too (spin_us_max in its configuration),
 * a request takes no system call, but each side occupies a processor.
 *
 * kvrouted_steady.h reconnects by itself, and decides without the daemon while that does not answer. kvrouted_hash.h
 * makes local hashes.
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

/* Closes the connection and frees its memory. The daemon keeps the bookings for its grace period. */
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

/* Connects and sends hello. `client` may be uninitialised; call kvr_close whatever this returns. `session` NULL = a
 * session of its own. */
static inline kvr_status kvr_connect(
    kvr_client *client, const char *path, const char *name, const kvr_session *session, int timeout_ms) {
    struct sockaddr_un address;
    struct timeval send_timeout;
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
    /* The socket blocks until it is connected: at once, or when the listener's queue has room, within the timeout. */
    if (timeout_ms <= 0) return kvr__time_out(client);
    send_timeout.tv_sec = timeout_ms / 1000;
    send_timeout.tv_usec = (timeout_ms % 1000) * 1000;
    if (setsockopt(client->fd, SOL_SOCKET, SO_SNDTIMEO, &send_timeout, sizeof send_timeout) < 0)
        return kvr__fail_errno(client, "setsockopt");
    if (connect(client->fd, (struct sockaddr *)&address, sizeof address) < 0) return kvr__fail_errno(client, path);
    flags = fcntl(client->fd, F_GETFL);
    if (flags < 0 || fcntl(client->fd, F_SETFL, flags | O_NONBLOCK) < 0) return kvr__fail_errno(client, "fcntl");
    left = deadline_ms - kvr__now_ms();
    if (left <= 0) return kvr__time_out(client);
    client->timeout_ms = (int)left;
    status = kvr__hello(client, name, session);
    client->timeout_ms = timeout_ms;
    return status;
}

/* Receives a part of a frame and the descriptors with it. It keeps the first two, and closes any others. */
static inline kvr_status kvr__receive_with_descriptors(kvr_client *client, int descriptors[2], int64_t deadline_ms) {
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
    if (bytes <= 0) return kvr__closed(client);
    client->in.used += (size_t)bytes;
    for (at = CMSG_FIRSTHDR(&message); at != NULL; at = CMSG_NXTHDR(&message, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
        for (i = 0; i < (at->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int descriptor, slot;
            memcpy(&descriptor, CMSG_DATA(at) + i * sizeof descriptor, sizeof descriptor);
            slot = descriptors[0] < 0 ? 0 : 1;
            if (descriptors[slot] < 0) descriptors[slot] = descriptor;
            else close(descriptor);
        }
    }
    return kvr__check_deadline(client, deadline_ms);
}

/* Reads the reply to the request for a lane, which is whole, and maps the memory that came with it. */
static inline kvr_status kvr__map_opened_lane(
    kvr_client *client, uint64_t id, const int descriptors[2], size_t body_bytes) {
    kvr__view view = kvr__view_of(client->in.bytes + KVR__HEADER_BYTES, body_bytes);
    kvr__row root;
    uint32_t layout, request_bytes, reply_bytes;
    const char *fault;
    if (kvr__frame_kind(client) == KVR__KIND_ERROR) {
        if (kvr__read_error(view.bytes, view.length, client)) return KVR_REFUSED;
        return kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
    }
    root = kvr__root(&view);
    layout = kvr__read_u16(&view, root, KVR__OPEN_LANE_REPLY_LAYOUT);
    request_bytes = kvr__read_u32(&view, root, KVR__OPEN_LANE_REPLY_REQUEST_RING_BYTES);
    reply_bytes = kvr__read_u32(&view, root, KVR__OPEN_LANE_REPLY_REPLY_RING_BYTES);
    if (view.bad || kvr__frame_kind(client) != KVR__KIND_OPEN_LANE_REPLY || kvr__frame_id(client) != id)
        return kvr__fail(client, KVR_MALFORMED, "the reply has another kind than the request's");
    if (descriptors[0] < 0 || descriptors[1] < 0)
        fault = "the descriptors of a lane did not arrive: raise the limit of open files";
    else
        fault = kvr__lane_map(&client->lane, descriptors[0], descriptors[1], layout, request_bytes, reply_bytes);
    if (fault == NULL) return KVR_OK;
    return kvr__unsupported(client, fault, "go on over the socket, as this connection does");
}

/* Opens a lane: memory that this connection shares with the daemon, for all further requests and replies. It must be
 * the first request of the connection. KVR_REFUSED = the connection continues over its socket; kvr_client.message
 * says why. */
static inline kvr_status kvr_open_lane(kvr_client *client) {
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    int descriptors[2] = {-1, -1}, is_whole = 0;
    size_t body_bytes = 0;
    uint64_t id = client->next_id++;
    kvr_status status;
    if (id != 2) return kvr__fail(client, KVR_INVALID, "a lane must be the first request of a connection");
    if ((client->features & KVR__FEATURE_LANES) == 0)
        return kvr__unsupported(client, "the daemon has no lanes", "raise serve.lanes_max, or go without a lane");
    kvr__begin(&client->out, KVR__OPEN_LANE_FIELD_COUNT);
    status = kvr__end(client, KVR__KIND_OPEN_LANE, id);
    if (status == KVR_OK) status = kvr__send(client, deadline_ms);
    while (status == KVR_OK && is_whole == 0) {
        status = kvr__receive_with_descriptors(client, descriptors, deadline_ms);
        is_whole = kvr__is_whole(&client->in, &body_bytes);
        if (is_whole < 0) status = kvr__not_a_frame(client);
    }
    /* The connection ends: if the lane came later, no call would map it. */
    if (status == KVR_TIMEOUT) status = kvr__fail(client, KVR_CLOSED, "the daemon did not answer in time");
    if (status == KVR_OK) {
        status = kvr__map_opened_lane(client, id, descriptors, body_bytes);
        kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
    }
    if (descriptors[0] >= 0) close(descriptors[0]);
    if (descriptors[1] >= 0 && status != KVR_OK) close(descriptors[1]);
    return status;
}

/* Finds the pool of a model: role 1 prefill or 2 decode, in any namespace if that is NULL. KVR_UNKNOWN if no space
 * fits, or several. */
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

/* Finds the space of a model with one pool, in any namespace if that is NULL. */
static inline kvr_status kvr_find_space(
    kvr_client *client, const char *model, const char *name_space, kvr_space *found) {
    return kvr_find_pool(client, model, name_space, KVR_ANY_POOL, found);
}

/* The fields of a table that together name a prompt. */
typedef struct kvr__prompt_fields {
    size_t tokens, local_hashes, scheme, token_count, lora, salt, media;
} kvr__prompt_fields;

/* Writes which prompt it is: its tokens, or its local hashes with their scheme, and what else its blocks depend on. */
static inline void kvr__encode_prompt(
    kvr_buffer *out, kvr__table *table, const kvr__prompt_fields *fields, const kvr_route_request *request) {
    size_t from, at, i;
    if (request->local_hashes == NULL) {
        at = kvr__write_vector(out, kvr__write_offset(out, table, fields->tokens), request->token_count, 4);
        if (at != 0) kvr__put_tokens(out->bytes + at, request->tokens, request->token_count);
    } else {
        kvr__table scheme;
        kvr__write_u32(out, table, fields->token_count, (uint32_t)request->token_count);
        from = kvr__write_offset(out, table, fields->scheme);
        scheme = kvr__write_table(out, from, KVR__SCHEME_FIELD_COUNT);
        kvr__write_u32(out, &scheme, KVR__SCHEME_BLOCK_SIZE, request->block_size);
        kvr__write_u8(out, &scheme, KVR__SCHEME_WINDOW, request->window);
        from = kvr__write_offset(out, table, fields->local_hashes);
        at = kvr__write_vector(out, from, request->local_hash_count, 8);
        if (at != 0) kvr__put_hashes(out->bytes + at, request->local_hashes, request->local_hash_count);
    }
    if (request->media_count > 0) {
        from = kvr__write_offset(out, table, fields->media);
        at = kvr__write_vector(out, from, request->media_count, KVR__MEDIA_HASH_BYTES);
        for (i = 0; i < request->media_count && at != 0; i++, at += KVR__MEDIA_HASH_BYTES) {
            kvr__put(out->bytes + at + KVR__MEDIA_HASH_BLOCK_AT, request->media[i].block, 4);
            kvr__put(out->bytes + at + KVR__MEDIA_HASH_HASH_AT, request->media[i].hash, 8);
        }
    }
    kvr__write_text(out, table, fields->lora, request->lora);
    kvr__write_text(out, table, fields->salt, request->salt);
}

/* Writes which workers may be chosen, and which are preferred. */
static inline void kvr__encode_constraints(kvr_buffer *out, kvr__table *table, const kvr_route_request *request) {
    size_t at, i;
    if (request->pin != NULL)
        kvr__write_pair(out, table, KVR__ROUTE_PIN, request->pin->worker_id, request->pin->dp_rank);
    if (request->allow != NULL) {
        at = kvr__write_offset(out, table, KVR__ROUTE_ALLOW);
        at = kvr__write_vector(out, at, request->allow_count, KVR__WORKER_REF_BYTES);
        for (i = 0; i < request->allow_count && at != 0; i++, at += KVR__WORKER_REF_BYTES) {
            kvr__put(out->bytes + at + KVR__WORKER_REF_WORKER_ID_AT, request->allow[i].worker_id, 8);
            kvr__put(out->bytes + at + KVR__WORKER_REF_DP_RANK_AT, request->allow[i].dp_rank, 4);
        }
    }
    if (request->required_taint_count > 0) {
        at = kvr__write_offset(out, table, KVR__ROUTE_REQUIRED_TAINTS);
        at = kvr__write_vector(out, at, request->required_taint_count, 4);
        for (i = 0; i < request->required_taint_count && at != 0; i++)
            kvr__write_text_at(out, at + 4 * i, request->required_taints[i]);
    }
    if (request->preferred_taint_count > 0) {
        at = kvr__write_offset(out, table, KVR__ROUTE_PREFERRED_TAINTS);
        at = kvr__write_vector(out, at, request->preferred_taint_count, 4);
        for (i = 0; i < request->preferred_taint_count && at != 0; i++) {
            kvr__table taint = kvr__write_table(out, at + 4 * i, KVR__TAINT_FIELD_COUNT);
            kvr__write_double(out, &taint, KVR__TAINT_WEIGHT, request->preferred_taints[i].weight);
            kvr__write_text_at(out, kvr__write_offset(out, &taint, KVR__TAINT_KEY), request->preferred_taints[i].key);
        }
    }
    if (request->shared_hit_count > 0) {
        at = kvr__write_offset(out, table, KVR__ROUTE_SHARED_HITS);
        at = kvr__write_vector(out, at, request->shared_hit_count, KVR__BLOCK_RANGE_BYTES);
        for (i = 0; i < request->shared_hit_count && at != 0; i++, at += KVR__BLOCK_RANGE_BYTES) {
            kvr__put(out->bytes + at + KVR__BLOCK_RANGE_START_AT, request->shared_hits[i].start, 4);
            kvr__put(out->bytes + at + KVR__BLOCK_RANGE_END_AT, request->shared_hits[i].end, 4);
        }
    }
}

static inline void kvr__encode_overrides(kvr_buffer *out, kvr__table *table, const kvr_overrides *overrides) {
    size_t from = kvr__write_offset(out, table, KVR__ROUTE_OVERRIDES);
    kvr__table inner = kvr__write_table(out, from, KVR__OVERRIDES_FIELD_COUNT);
    kvr__write_u8(out, &inner, KVR__OVERRIDES_MODE, overrides->mode);
    if (!isnan(overrides->device_credit))
        kvr__write_double(out, &inner, KVR__OVERRIDES_DEVICE_CREDIT, overrides->device_credit);
    if (!isnan(overrides->prefill_load_scale))
        kvr__write_double(out, &inner, KVR__OVERRIDES_PREFILL_LOAD_SCALE, overrides->prefill_load_scale);
    if (!isnan(overrides->temperature))
        kvr__write_double(out, &inner, KVR__OVERRIDES_TEMPERATURE, overrides->temperature);
    if (!isnan(overrides->shared_multiplier))
        kvr__write_double(out, &inner, KVR__OVERRIDES_SHARED_MULTIPLIER, overrides->shared_multiplier);
    if (overrides->assume_kv_reuse >= 0)
        kvr__write_u8(out, &inner, KVR__OVERRIDES_ASSUME_KV_REUSE, overrides->assume_kv_reuse != 0);
    if (overrides->track_prefill_tokens >= 0)
        kvr__write_u8(out, &inner, KVR__OVERRIDES_TRACK_PREFILL_TOKENS, overrides->track_prefill_tokens != 0);
}

static inline void kvr__encode_trace(kvr_buffer *out, kvr__table *table, const kvr_trace *trace) {
    size_t at = kvr__place(out, table, KVR__ROUTE_TRACE, KVR__TRACE_CONTEXT_BYTES, 8);
    if (out->short_of_memory) return;
    kvr__put(out->bytes + at + KVR__TRACE_CONTEXT_TRACE_HI_AT, trace->trace_hi, 8);
    kvr__put(out->bytes + at + KVR__TRACE_CONTEXT_TRACE_LO_AT, trace->trace_lo, 8);
    kvr__put(out->bytes + at + KVR__TRACE_CONTEXT_SPAN_AT, trace->span, 8);
    kvr__put(out->bytes + at + KVR__TRACE_CONTEXT_FLAGS_AT, trace->flags, 4);
}

static inline kvr_status kvr__encode_route(kvr_client *client, const kvr_route_request *request, uint64_t id) {
    const kvr__prompt_fields prompt = {KVR__ROUTE_TOKENS, KVR__ROUTE_LOCAL_HASHES, KVR__ROUTE_SCHEME,
        KVR__ROUTE_TOKEN_COUNT, KVR__ROUTE_LORA, KVR__ROUTE_SALT, KVR__ROUTE_MEDIA};
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, KVR__ROUTE_FIELD_COUNT);
    uint64_t deadline_us = request->deadline_us;
    /* A booking may wait in the daemon's queue. 80 % of the timeout leave time for the daemon's answer that no worker
     * had room; without an answer the daemon would count as silent. */
    if (deadline_us == 0 && request->request_id != NULL && (client->features & KVR__FEATURE_QUEUE) != 0)
        deadline_us = (uint64_t)client->timeout_ms * 800;
    if (deadline_us > UINT32_MAX) deadline_us = UINT32_MAX;
    kvr__write_u32(out, &table, KVR__ROUTE_SPACE_ID, request->space_id);
#define KVR__WRITE_NUMBER(field, number) \
    if (request->field != 0) \
        kvr__write_number(out, &table, number, (uint64_t)request->field, sizeof request->field);
    KVR__EACH_NUMBER_OF_ROUTE(KVR__WRITE_NUMBER)
#undef KVR__WRITE_NUMBER
    kvr__write_u8(out, &table, KVR__ROUTE_BOOK, request->request_id != NULL);
    if (request->explain) kvr__write_u8(out, &table, KVR__ROUTE_EXPLAIN, 1);
    kvr__write_u32(out, &table, KVR__ROUTE_CANDIDATES_MAX, request->candidates_max);
    if (request->priority_jump < 0 || request->priority_jump > 0)
        kvr__write_double(out, &table, KVR__ROUTE_PRIORITY_JUMP, request->priority_jump);
    if (deadline_us != 0) kvr__write_u32(out, &table, KVR__ROUTE_DEADLINE_US, (uint32_t)deadline_us);
    if (request->disaggregate) kvr__write_u8(out, &table, KVR__ROUTE_DISAGGREGATE, 1);
    kvr__encode_constraints(out, &table, request);
    if (request->trace != NULL) kvr__encode_trace(out, &table, request->trace);
    if (request->overrides != NULL) kvr__encode_overrides(out, &table, request->overrides);
    kvr__encode_prompt(out, &table, &prompt, request);
    kvr__write_text(out, &table, KVR__ROUTE_REQUEST_ID, request->request_id);
    kvr__write_text(out, &table, KVR__ROUTE_AFFINITY_SESSION, request->affinity_session);
    return kvr__end(client, KVR__KIND_ROUTE, id);
}

/* KVR_INVALID unless the request names a prompt that the daemon takes. */
static inline kvr_status kvr__check_prompt(kvr_client *client, const kvr_route_request *request) {
    if ((request->tokens == NULL) == (request->local_hashes == NULL))
        return kvr__fail(client, KVR_INVALID, "set either tokens or local_hashes");
    if (request->token_count > client->prompt_tokens_max || request->local_hash_count > request->token_count)
        return kvr__fail(client, KVR_INVALID, "the prompt is longer than the daemon's limit");
    return KVR_OK;
}

/* Asks which worker should run a prompt, and books it if the request has a request_id. */
static inline kvr_status kvr_route(kvr_client *client, const kvr_route_request *request, kvr_route_reply *reply) {
    uint64_t id;
    size_t frame_bytes;
    kvr_status status;
    int read;
    kvr__clear_reply(reply);
    status = kvr__check_prompt(client, request);
    if (status != KVR_OK) return status;
    if (request->request_id != NULL && request->request_id[0] == 0)
        return kvr__fail(client, KVR_INVALID, "a booking needs a request_id that is not empty");
    id = client->next_id++;
    status = kvr__encode_route(client, request, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, KVR__KIND_ROUTE_REPLY, &frame_bytes);
    if (status != KVR_OK) return status;
    read = kvr__read_route(client->in.bytes + KVR__HEADER_BYTES, frame_bytes - KVR__HEADER_BYTES, reply);
    kvr__consume(&client->in, frame_bytes);
    return read ? KVR_OK : kvr__fail(client, KVR_MALFORMED, "the reply to a route cannot be read");
}

/* The four replies to reports have the same outcome field, or this divides by zero. */
enum {
    KVR__OUTCOMES_ARE_ALIKE = 1 / (KVR__SAME(KVR__PREFILL_COMPLETE_REPLY_OUTCOME, KVR__FREE_REPLY_OUTCOME) &&
                                      KVR__SAME(KVR__OUTPUT_PROGRESS_REPLY_OUTCOME, KVR__FREE_REPLY_OUTCOME) &&
                                      KVR__SAME(KVR__SERVED_REPLY_OUTCOME, KVR__FREE_REPLY_OUTCOME))
};

static inline kvr_status kvr__report(kvr_client *client, const kvr__booking_report *report, kvr_outcome *outcome) {
    uint64_t id = client->next_id++;
    kvr__view view;
    size_t frame_bytes;
    uint8_t value;
    kvr_status status = kvr__encode_report(client, report, id);
    /* The reply to a request has the next kind. */
    if (status == KVR_OK) status = kvr__exchange(client, id, (uint8_t)(report->kind + 1), &frame_bytes);
    if (status != KVR_OK) return status;
    view = kvr__reply_view(client, frame_bytes);
    value = kvr__read_u8(&view, kvr__root(&view), KVR__FREE_REPLY_OUTCOME);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply about a booking cannot be read");
    if (outcome != NULL) *outcome = value <= KVR_SUPERSEDED ? (kvr_outcome)value : KVR_BOOKING_UNKNOWN;
    return KVR_OK;
}

/* Reports that a booked prompt was computed, and in how many microseconds (0 = not known). `outcome` may be NULL. */
static inline kvr_status kvr_prefill_complete(
    kvr_client *client, kvr_booking booking, uint64_t prefill_us, kvr_outcome *outcome) {
    kvr__booking_report report = kvr__report_of(KVR__KIND_PREFILL_COMPLETE, booking, prefill_us, 0);
    return kvr__report(client, &report, outcome);
}

/* Reports how many tokens a booked request has generated since its start. `outcome` may be NULL. */
static inline kvr_status kvr_output_progress(
    kvr_client *client, kvr_booking booking, uint32_t output_tokens, kvr_outcome *outcome) {
    kvr__booking_report report = kvr__report_of(KVR__KIND_OUTPUT_PROGRESS, booking, output_tokens, 0);
    return kvr__report(client, &report, outcome);
}

/* Reports that another worker runs a booked request than the booked one. `outcome` may be NULL. */
static inline kvr_status kvr_served(
    kvr_client *client, kvr_booking booking, uint64_t worker_id, uint32_t dp_rank, kvr_outcome *outcome) {
    kvr__booking_report report = kvr__report_of(KVR__KIND_SERVED, booking, worker_id, dp_rank);
    return kvr__report(client, &report, outcome);
}

/* Frees a booking: its request has ended, however it ended. `outcome` may be NULL. */
static inline kvr_status kvr_free(kvr_client *client, kvr_booking booking, kvr_outcome *outcome) {
    kvr__booking_report report = kvr__report_of(KVR__KIND_FREE, booking, 0, 0);
    return kvr__report(client, &report, outcome);
}

/* Frees the booking of a request_id and an attempt. */
static inline kvr_status kvr_free_request(
    kvr_client *client, const char *request_id, uint32_t attempt, kvr_outcome *outcome) {
    const kvr_booking by_name = {0, 0};
    kvr__booking_report report = kvr__report_of(KVR__KIND_FREE, by_name, 0, 0);
    report.request_id = request_id;
    report.attempt = attempt;
    return kvr__report(client, &report, outcome);
}

/* Reports that a worker failed a request (KVR_EVERY_RANK: every rank of it), with a reason for the daemon's log.
 * `back_off_ms`, which may be NULL: how long requests avoid the worker while others can run them. It is 0 if reports
 * of this user already keep requests away from as many workers as the daemon's user_share_percent allows. */
static inline kvr_status kvr_report_failure(kvr_client *client, uint32_t space_id, uint64_t worker_id, uint32_t dp_rank,
    const char *reason, uint32_t *back_off_ms) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, KVR__REPORT_FAILURE_REASON + 1);
    uint64_t id = client->next_id++;
    kvr__view view;
    size_t frame_bytes;
    uint32_t value;
    kvr_status status;
    kvr__write_pair(out, &table, KVR__REPORT_FAILURE_WORKER, worker_id, dp_rank);
    kvr__write_u32(out, &table, KVR__REPORT_FAILURE_SPACE_ID, space_id);
    kvr__write_text(out, &table, KVR__REPORT_FAILURE_REASON, reason);
    status = kvr__end(client, KVR__KIND_REPORT_FAILURE, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, KVR__KIND_REPORT_FAILURE_REPLY, &frame_bytes);
    if (status != KVR_OK) return status;
    view = kvr__reply_view(client, frame_bytes);
    value = kvr__read_u32(&view, kvr__root(&view), KVR__REPORT_FAILURE_REPLY_BACK_OFF_MS);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply to a report cannot be read");
    if (back_off_ms != NULL) *back_off_ms = value;
    return KVR_OK;
}

/* The two questions about a prompt have the same fields, as have their replies, or this divides by zero. */
enum {
    KVR__QUESTIONS_ARE_ALIKE = 1 / (KVR__SAME(KVR__POTENTIAL_LOADS_SPACE_ID, KVR__OVERLAP_SPACE_ID) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_TOKENS, KVR__OVERLAP_TOKENS) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_LOCAL_HASHES, KVR__OVERLAP_LOCAL_HASHES) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_SCHEME, KVR__OVERLAP_SCHEME) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_TOKEN_COUNT, KVR__OVERLAP_TOKEN_COUNT) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_LORA, KVR__OVERLAP_LORA) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_SALT, KVR__OVERLAP_SALT) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_MEDIA, KVR__OVERLAP_MEDIA) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_MUST_UNDERSTAND, KVR__OVERLAP_MUST_UNDERSTAND) &&
                                       KVR__SAME(KVR__POTENTIAL_LOADS_FIELD_COUNT, KVR__OVERLAP_FIELD_COUNT))
};

/* Asks a question about a prompt, of this kind. The reply's body is in `view`, and stays in `in` until kvr__consume. */
static inline kvr_status kvr__question(
    kvr_client *client, const kvr_route_request *request, uint8_t kind, kvr__view *view, size_t *frame_bytes) {
    const kvr__prompt_fields prompt = {KVR__OVERLAP_TOKENS, KVR__OVERLAP_LOCAL_HASHES, KVR__OVERLAP_SCHEME,
        KVR__OVERLAP_TOKEN_COUNT, KVR__OVERLAP_LORA, KVR__OVERLAP_SALT, KVR__OVERLAP_MEDIA};
    kvr_buffer *out = &client->out;
    kvr__table table;
    uint64_t id;
    kvr_status status = kvr__check_prompt(client, request);
    if (status != KVR_OK) return status;
    id = client->next_id++;
    table = kvr__begin(out, KVR__OVERLAP_FIELD_COUNT);
    kvr__write_u32(out, &table, KVR__OVERLAP_SPACE_ID, request->space_id);
    if (request->must_understand != 0)
        kvr__write_u64(out, &table, KVR__OVERLAP_MUST_UNDERSTAND, request->must_understand);
    kvr__encode_prompt(out, &table, &prompt, request);
    status = kvr__end(client, kind, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, (uint8_t)(kind + 1), frame_bytes);
    if (status == KVR_OK) *view = kvr__reply_view(client, *frame_bytes);
    return status;
}

/* Asks what every worker of the space would have to do if it took the prompt. Reads as many workers as there is room
 * for; `count` is how many there are. Of the request only the prompt and the space matter. */
static inline kvr_status kvr_potential_loads(kvr_client *client, const kvr_route_request *request,
    kvr_potential_load *loads, size_t room, size_t *count) {
    kvr__view view;
    size_t frame_bytes, at, i;
    kvr_status status;
    *count = 0;
    status = kvr__question(client, request, KVR__KIND_POTENTIAL_LOADS, &view, &frame_bytes);
    if (status != KVR_OK) return status;
    at = kvr__read_vector(&view, kvr__root(&view), KVR__POTENTIAL_LOADS_REPLY_LOADS, 4, count);
    for (i = 0; i < *count && i < room && !view.bad; i++) {
        kvr__row row = kvr__row_in(&view, at, i);
        loads[i].worker_id = kvr__read_u64(&view, row, KVR__POTENTIAL_LOAD_WORKER_ID);
        loads[i].dp_rank = kvr__read_u32(&view, row, KVR__POTENTIAL_LOAD_DP_RANK);
        loads[i].active_requests = kvr__read_u32(&view, row, KVR__POTENTIAL_LOAD_ACTIVE_REQUESTS);
        loads[i].prefill_tokens = kvr__read_u64(&view, row, KVR__POTENTIAL_LOAD_PREFILL_TOKENS);
        loads[i].decode_blocks = kvr__read_u64(&view, row, KVR__POTENTIAL_LOAD_DECODE_BLOCKS);
    }
    kvr__consume(&client->in, frame_bytes);
    return view.bad ? kvr__fail(client, KVR_MALFORMED, "the potential loads cannot be read") : KVR_OK;
}

/* Asks how much of a prompt each worker of the space holds. Reads as many workers as there is room for; `count` is
 * how many there are. Of the request only the prompt and the space matter. `found` may be NULL. */
static inline kvr_status kvr_overlaps(kvr_client *client, const kvr_route_request *request, kvr_overlap *overlaps,
    size_t room, size_t *count, kvr_prompt_found *found) {
    kvr__view view;
    kvr__row root;
    size_t frame_bytes, at, i;
    kvr_status status;
    *count = 0;
    status = kvr__question(client, request, KVR__KIND_OVERLAP, &view, &frame_bytes);
    if (status != KVR_OK) return status;
    root = kvr__root(&view);
    at = kvr__read_vector(&view, root, KVR__OVERLAP_REPLY_WORKERS, 4, count);
    for (i = 0; i < *count && i < room && !view.bad; i++) {
        kvr__row row = kvr__row_in(&view, at, i);
        kvr__tiers tiers = kvr__read_tiers(&view, row, KVR__OVERLAP_ENTRY_OVERLAP);
        overlaps[i].worker_id = kvr__read_u64(&view, row, KVR__OVERLAP_ENTRY_WORKER_ID);
        overlaps[i].dp_rank = kvr__read_u32(&view, row, KVR__OVERLAP_ENTRY_DP_RANK);
        overlaps[i].device_blocks = tiers.device;
        overlaps[i].host_blocks = tiers.host;
        overlaps[i].disk_blocks = tiers.disk;
        overlaps[i].external_blocks = tiers.external;
        overlaps[i].trust = kvr__read_trust(&view, row, KVR__OVERLAP_ENTRY_TRUST);
    }
    if (found != NULL) {
        found->unmatchable = kvr__read_u8(&view, root, KVR__OVERLAP_REPLY_MATCH) != KVR__MATCH_STATUS_MATCHED;
        found->request_blocks = kvr__read_u32(&view, root, KVR__OVERLAP_REPLY_REQUEST_BLOCKS);
        found->notes = kvr__read_u64(&view, root, KVR__OVERLAP_REPLY_NOTES);
    }
    kvr__consume(&client->in, frame_bytes);
    return view.bad ? kvr__fail(client, KVR_MALFORMED, "the overlaps cannot be read") : KVR_OK;
}

/* Passes on how busy a worker's engine says it is. `accepted`, which may be NULL, becomes 0 if the worker has just
 * left, or if reports of this user are in force for as many workers as the daemon's user_share_percent allows. */
static inline kvr_status kvr_report_load(kvr_client *client, uint32_t space_id, uint64_t worker_id, uint32_t dp_rank,
    const kvr_engine_load *load, int *accepted) {
    kvr_buffer *out = &client->out;
    kvr__table table = kvr__begin(out, KVR__REPORT_LOAD_FIELD_COUNT);
    uint64_t id = client->next_id++;
    kvr__view view;
    size_t frame_bytes;
    uint8_t value;
    kvr_status status;
    kvr__write_pair(out, &table, KVR__REPORT_LOAD_WORKER, worker_id, dp_rank);
    kvr__write_u32(out, &table, KVR__REPORT_LOAD_SPACE_ID, space_id);
    kvr__write_u64(out, &table, KVR__REPORT_LOAD_ACTIVE_PREFILL_TOKENS, load->active_prefill_tokens);
    kvr__write_u64(out, &table, KVR__REPORT_LOAD_ACTIVE_DECODE_BLOCKS, load->active_decode_blocks);
    kvr__write_u32(out, &table, KVR__REPORT_LOAD_RUNNING_REQUESTS, load->running_requests);
    kvr__write_u32(out, &table, KVR__REPORT_LOAD_WAITING_REQUESTS, load->waiting_requests);
    kvr__write_double(out, &table, KVR__REPORT_LOAD_KV_USAGE, load->kv_usage);
    status = kvr__end(client, KVR__KIND_REPORT_LOAD, id);
    if (status == KVR_OK) status = kvr__exchange(client, id, KVR__KIND_REPORT_LOAD_REPLY, &frame_bytes);
    if (status != KVR_OK) return status;
    view = kvr__reply_view(client, frame_bytes);
    value = kvr__read_u8(&view, kvr__root(&view), KVR__REPORT_LOAD_REPLY_ACCEPTED);
    kvr__consume(&client->in, frame_bytes);
    if (view.bad) return kvr__fail(client, KVR_MALFORMED, "the reply to a report cannot be read");
    if (accepted != NULL) *accepted = value != 0;
    return KVR_OK;
}

/* Watches the workers of a space, or of KVR_EVERY_SPACE: the daemon sends them at once and after each change. Every
 * call stores what has arrived meanwhile; kvr_fleet reads it. A connection has one watch. */
static inline kvr_status kvr_watch(kvr_client *client, uint32_t space_id) {
    kvr__table table = kvr__begin(&client->out, KVR__WATCH_MUST_UNDERSTAND + 1);
    uint64_t id = client->next_id++;
    kvr_status status;
    kvr__write_u32(&client->out, &table, KVR__WATCH_SPACE_ID, space_id);
    status = kvr__end(client, KVR__KIND_WATCH, id);
    if (status != KVR_OK) return status;
    client->watch_id = id;
    return kvr__send(client, kvr__now_ms() + client->timeout_ms);
}

/* Waits for the watch's next fleet, within the connection's timeout. KVR_TIMEOUT = nothing has changed. */
static inline kvr_status kvr_watch_next(kvr_client *client) {
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    uint64_t before = client->fleets;
    if (client->watch_id == 0) return kvr__fail(client, KVR_INVALID, "nothing is watched");
    while (client->fleets == before) {
        size_t body_bytes;
        uint64_t id;
        kvr_status status = kvr__frame(client, deadline_ms, &body_bytes);
        if (status != KVR_OK) return status;
        id = kvr__frame_id(client);
        if (kvr__frame_kind(client) == KVR__KIND_ERROR && id == client->watch_id) {
            int read = kvr__read_error(client->in.bytes + KVR__HEADER_BYTES, body_bytes, client);
            kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
            client->watch_id = 0;
            return read ? KVR_REFUSED : kvr__fail(client, KVR_MALFORMED, "the daemon's error cannot be read");
        }
        status = kvr__handle_late(client, id, kvr__frame_kind(client), body_bytes, deadline_ms);
        kvr__consume(&client->in, KVR__HEADER_BYTES + body_bytes);
        if (status == KVR_OK && client->fleets == before) status = kvr__check_deadline(client, deadline_ms);
        if (status != KVR_OK) return status;
    }
    return KVR_OK;
}

/* The lists of workers in the replies to Workers and Watch have the same number, or this divides by zero. */
enum { KVR__FLEETS_ARE_ALIKE = 1 / (KVR__SAME(KVR__WORKERS_REPLY_WORKERS, KVR__WATCH_REPLY_WORKERS)) };

/* Reads the n-th worker of a list of them. Answers 1, 0 if there are fewer, -1 if it cannot be read. */
static inline int kvr__read_worker(const kvr_buffer *fleet, size_t n, kvr_worker *to) {
    kvr__view view = kvr__view_of(fleet->bytes, fleet->used);
    kvr__row row;
    size_t count, at, i;
    if (fleet->used == 0) return 0;
    at = kvr__read_vector(&view, kvr__root(&view), KVR__WORKERS_REPLY_WORKERS, 4, &count);
    if (view.bad || count > KVR__WORKERS_MAX) return -1;
    if (n >= count) return 0;
    row = kvr__row_in(&view, at, n);
    to->worker_id = kvr__read_u64(&view, row, KVR__WORKER_INFO_WORKER_ID);
    to->dp_rank = kvr__read_u32(&view, row, KVR__WORKER_INFO_DP_RANK);
    to->space_id = kvr__read_u32(&view, row, KVR__WORKER_INFO_SPACE_ID);
    kvr__read_text(&view, row, KVR__WORKER_INFO_NAME, to->name);
    to->state = kvr__read_u8(&view, row, KVR__WORKER_INFO_STATE);
    to->device_class = kvr__read_u8(&view, row, KVR__WORKER_INFO_DEVICE_CLASS);
    to->weight = kvr__read_double(&view, row, KVR__WORKER_INFO_WEIGHT);
    to->capacity_blocks = kvr__read_u64(&view, row, KVR__WORKER_INFO_CAPACITY_BLOCKS);
    to->batched_tokens_max = kvr__read_u64(&view, row, KVR__WORKER_INFO_BATCHED_TOKENS_MAX);
    at = kvr__read_vector(&view, row, KVR__WORKER_INFO_TAINTS, 4, &to->taint_count);
    for (i = 0; i < to->taint_count && i < KVR_TAINTS_MAX && !view.bad; i++)
        kvr__read_text_at(&view, at + 4 * i, to->taints[i], sizeof to->taints[i]);
    to->trust = kvr__read_trust(&view, row, KVR__WORKER_INFO_TRUST);
    return view.bad ? -1 : 1;
}

/* Whether the n-th worker of a list of them has a label, however many labels it has. */
static inline int kvr__has_taint(const kvr_buffer *fleet, size_t n, const char *label) {
    kvr__view view = kvr__view_of(fleet->bytes, fleet->used);
    size_t count, at = kvr__read_vector(&view, kvr__root(&view), KVR__WORKERS_REPLY_WORKERS, 4, &count), i;
    if (view.bad || n >= count) return 0;
    at = kvr__read_vector(&view, kvr__row_in(&view, at, n), KVR__WORKER_INFO_TAINTS, 4, &count);
    for (i = 0; i < count && i < KVR__LABELS_MAX && !view.bad; i++)
        if (kvr__is_text(&view, at + 4 * i, label)) return 1;
    return 0;
}

/* Asks for the workers of a space, or of KVR_EVERY_SPACE, as the daemon has them now. Reads as many as there is room
 * for; `count` is how many there are. */
static inline kvr_status kvr_workers(
    kvr_client *client, uint32_t space_id, kvr_worker *workers, size_t room, size_t *count) {
    kvr_buffer *out = &client->out;
    uint32_t cursor = 0;
    int64_t deadline_ms = kvr__now_ms() + client->timeout_ms;
    *count = 0;
    do {
        kvr__table table = kvr__begin(out, KVR__WORKERS_FIELD_COUNT);
        uint64_t id = client->next_id++;
        uint32_t next;
        kvr__view view;
        kvr_buffer page = {NULL, 0, 0, 0};
        kvr_worker beyond;
        size_t frame_bytes, n;
        int read;
        kvr_status status;
        kvr__write_u32(out, &table, KVR__WORKERS_SPACE_ID, space_id);
        kvr__write_u32(out, &table, KVR__WORKERS_CURSOR, cursor);
        status = kvr__end(client, KVR__KIND_WORKERS, id);
        if (status == KVR_OK)
            status = kvr__exchange_until(client, id, KVR__KIND_WORKERS_REPLY, deadline_ms, &frame_bytes);
        if (status != KVR_OK) return status;
        view = kvr__reply_view(client, frame_bytes);
        page.bytes = client->in.bytes + KVR__HEADER_BYTES;
        page.used = view.length;
        next = kvr__read_u32(&view, kvr__root(&view), KVR__WORKERS_REPLY_NEXT_CURSOR);
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

/* The workers that the watch sent last, as many as there is room for; `count` is how many were read. `fleet_version`,
 * which may be NULL, becomes 0 if the watch has sent nothing yet. */
static inline kvr_status kvr_fleet(
    kvr_client *client, kvr_worker *workers, size_t room, size_t *count, uint64_t *fleet_version) {
    kvr__view view = kvr__view_of(client->fleet.bytes, client->fleet.used);
    int read = 1;
    if (fleet_version != NULL) {
        *fleet_version = 0;
        if (view.length != 0)
            *fleet_version = kvr__read_u64(&view, kvr__root(&view), KVR__WATCH_REPLY_FLEET_VERSION);
    }
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
