/* Tests kvrouted.h against a daemon. Each printed line asks test_client.py to start, pause or stop that daemon. */
#define _POSIX_C_SOURCE 200809L
#include "kvrouted.h"
#include "kvrouted_hash.h"

#define CHECK(what)                                                                              \
    do {                                                                                         \
        if (!(what)) {                                                                           \
            fprintf(stderr, "line %d: not so: %s; %s\n", __LINE__, #what, client.message);       \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

static kvr_client client;
static kvr_session session = {3, 5};
static kvr_space space;
static kvr_route_reply reply;
static uint32_t tokens[70];

/* Lets the other side do something; its answer is what it has done. */
static void ask_for(const char *what) {
    char line[64];
    printf("%s\n", what);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL) exit(1);
}

static kvr_route_request asking(const char *request_id) {
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    request.space_id = space.space_id;
    request.request_id = request_id;
    request.tokens = tokens;
    request.token_count = 70;
    return request;
}

static void a_booking_lives_from_its_route_to_its_free(void) {
    kvr_route_request request = asking("life");
    kvr_outcome outcome;
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    CHECK(reply.candidate_count == 2 && reply.eligible == 2 && reply.request_blocks == 4 && !reply.unmatchable);
    CHECK(reply.candidates[0].worker_id == 1 || reply.candidates[0].worker_id == 2);
    CHECK(reply.candidates[0].worker_id != 1 || strcmp(reply.candidates[0].name, "one") == 0);
    CHECK(reply.candidates[0].trust_level == 1 && reply.candidates[0].state == 1 && reply.candidates[0].cost > 0);
    CHECK(reply.booking.generation != 0 && reply.nobody == 0);
    CHECK(kvr_route(&client, &request, &reply) == KVR_REFUSED);
    CHECK(client.error_code == 11 && client.remedy[0] != 0 && !client.retryable);
    request.attempt = 1;
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    CHECK(kvr_prefill_complete(&client, reply.booking, 1500, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_prefill_complete(&client, reply.booking, 0, &outcome) == KVR_OK && outcome == KVR_ALREADY_APPLIED);
    CHECK(kvr_free(&client, reply.booking, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_free(&client, reply.booking, NULL) == KVR_OK);
}

static void hashes_of_the_caller_are_the_same_prompt(const char *listed) {
    kvr_route_request request = asking(NULL);
    uint64_t hashes[4];
    char *at = (char *)listed;
    int predicted = 0, i;
    for (i = 0; i < 4; i++) hashes[i] = strtoull(at, &at, 16);
    request.tokens = NULL;
    request.local_hashes = hashes;
    request.local_hash_count = 4;
    request.block_size = space.block_size;
    /* What was booked above is predicted a moment later, under the same adapter and salt. */
    for (i = 0; i < 5000 && !predicted; i++) {
        size_t j;
        struct timespec rest = {0, 2000000};
        CHECK(kvr_route(&client, &request, &reply) == KVR_OK && reply.request_blocks == 4);
        CHECK(reply.booking.generation == 0);
        for (j = 0; j < reply.candidate_count; j++) predicted |= reply.candidates[j].device_blocks == 4;
        nanosleep(&rest, NULL);
    }
    CHECK(predicted);
    request.lora = "adapter";
    request.salt = "tenant";
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    {
        uint64_t made[4];
        uint8_t scratch[17 * 4];
        CHECK(kvr_local_hashes(tokens, 70, 16, 0, NULL, NULL, scratch, made, 4) == 4);
        CHECK(memcmp(made, hashes, sizeof made) == 0);
    }
    request.block_size = 32;
    request.local_hash_count = 2;
    CHECK(kvr_route(&client, &request, &reply) == KVR_REFUSED && client.error_code == 8);
}

static void a_booking_waits_within_the_connections_timeout(void) {
    kvr_route_request request = asking("waits");
    uint64_t features = client.features;
    kvr__view view = {NULL, 0, 0};
    client.features |= KVR__FEATURE_QUEUE;
    CHECK(kvr__encode_route(&client, &request, 1) == KVR_OK);
    client.features = features;
    view.bytes = client.out.bytes + KVR__HEADER_BYTES;
    view.length = client.out.used - KVR__HEADER_BYTES;
    CHECK(kvr__read_u32(&view, kvr__root(&view), KVR__ROUTE_DEADLINE_US) == 48000000 && !view.bad);
}

static void a_booking_is_reported_on_until_it_ends(void) {
    kvr_route_request request = asking("reported");
    kvr_potential_load before[4], after[4];
    size_t count, n;
    uint64_t other;
    uint32_t back_off_ms;
    kvr_outcome outcome;
    CHECK(kvr_potential_loads(&client, &request, before, 4, &count) == KVR_OK && count == 2);
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK && reply.prefill_count == 0);
    CHECK(kvr_potential_loads(&client, &request, after, 1, &count) == KVR_OK && count == 2);
    CHECK(kvr_potential_loads(&client, &request, after, 4, &count) == KVR_OK && count == 2);
    n = reply.candidates[0].worker_id == after[0].worker_id ? 0 : 1;
    CHECK(after[n].active_requests == before[n].active_requests + 1);
    CHECK(after[1 - n].active_requests == before[1 - n].active_requests);
    CHECK(after[n].prefill_tokens > before[n].prefill_tokens);
    CHECK(kvr_output_progress(&client, reply.booking, 40, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    other = 3 - reply.candidates[0].worker_id;
    CHECK(kvr_served(&client, reply.booking, other, 0, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_served(&client, reply.booking, 99, 0, &outcome) == KVR_REFUSED);
    CHECK(kvr_free_request(&client, "reported", 0, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_report_failure(&client, space.space_id, 1, KVR_EVERY_RANK, "it broke", &back_off_ms) == KVR_OK);
    CHECK(back_off_ms > 0);
    request = asking(NULL);
    request.local_hashes = (const uint64_t *)before;
    CHECK(kvr_potential_loads(&client, &request, after, 4, &count) == KVR_INVALID && count == 0);
}

static void requests_of_a_session_come_to_one_worker(void) {
    kvr_route_request request = asking("talk");
    uint64_t first = 0;
    int n;
    request.affinity_session = "conversation";
    for (n = 0; n < 6; n++) {
        CHECK(kvr_route(&client, &request, &reply) == KVR_OK && reply.candidate_count > 0);
        if (n == 0) first = reply.candidates[0].worker_id;
        CHECK(reply.candidates[0].worker_id == first);
        CHECK(kvr_free(&client, reply.booking, NULL) == KVR_OK);
    }
}

static void one_reply_names_a_worker_to_prefill_and_one_to_decode(void) {
    kvr_route_request request = asking("pair");
    kvr_outcome outcome;
    kvr_space pools;
    CHECK(kvr_find_space(&client, "pair", NULL, &pools) == KVR_UNKNOWN);
    CHECK(kvr_find_pool(&client, "pair", NULL, 2, &pools) == KVR_OK && pools.role == 2);
    request.space_id = pools.space_id;
    request.disaggregate = 1;
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    CHECK(reply.prefill_count == 1 && reply.prefill[0].worker_id == 3 && reply.candidates[0].worker_id == 4);
    CHECK(kvr_free(&client, reply.prefill_booking, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_free(&client, reply.booking, &outcome) == KVR_OK && outcome == KVR_APPLIED);
}

/* The worker that is chosen for a request, or 0. */
static uint64_t chosen(const kvr_route_request *request) {
    CHECK(kvr_route(&client, request, &reply) == KVR_OK);
    return reply.candidate_count == 0 ? 0 : reply.candidates[0].worker_id;
}

static void a_request_is_bound_by_its_constraints(void) {
    kvr_route_request request = asking(NULL);
    const kvr_worker_ref both[2] = {{1, KVR_EVERY_RANK}, {2, 0}}, nobody = {9, 0};
    const char *const labels[2] = {"fast", "near"};
    const char *const other[1] = {"slow"};
    const kvr_taint wanted = {"near", 1.0};
    uint64_t n;
    request.pin = &both[1];
    CHECK(chosen(&request) == 2 && reply.candidate_count == 1);
    request.pin = NULL;
    for (n = 0; n < 2; n++) {
        request.allow = &both[n];
        request.allow_count = 1;
        CHECK(chosen(&request) == n + 1 && reply.eligible == 1);
    }
    request.allow = both;
    request.allow_count = 2;
    CHECK(chosen(&request) != 0 && reply.eligible == 2);
    request.allow_count = 0;
    CHECK(chosen(&request) == 0 && reply.nobody == 23);
    request.allow = &nobody;
    request.allow_count = 1;
    request.explain = 1;
    CHECK(chosen(&request) == 0 && reply.nobody == 23 && reply.removal_count == 1);
    CHECK(strcmp(reply.removals[0].rule, "not_allowed") == 0 && reply.removals[0].worker_count == 2);
    CHECK(reply.removals[0].first.worker_id == 1 || reply.removals[0].first.worker_id == 2);
    request = asking(NULL);
    request.required_taints = labels;
    request.required_taint_count = 2;
    CHECK(chosen(&request) == 1 && reply.eligible == 1);
    request.required_taints = other;
    request.required_taint_count = 1;
    CHECK(chosen(&request) == 0);
    request.required_taint_count = 0;
    request.preferred_taints = &wanted;
    request.preferred_taint_count = 1;
    request.explain = 1;
    CHECK(chosen(&request) != 0 && reply.candidate_count == 2 && reply.candidates[0].has_terms);
    n = reply.candidates[0].worker_id == 1 ? 0 : 1;
    CHECK(reply.candidates[n].terms.taint_factor < reply.candidates[1 - n].terms.taint_factor);
    CHECK(reply.candidates[0].terms.request_blocks > 0 && reply.candidates[0].terms.affinity_factor > 0);
    CHECK(memcmp(&reply.candidates[0].terms.cost, &reply.candidates[0].cost, sizeof(double)) == 0);
}

static void a_request_overrides_its_policy(void) {
    const kvr_trace trace = {(uint64_t)1 << 63, 2, 3, 1};
    kvr_route_request request = asking(NULL);
    kvr_overrides overrides = KVR_OVERRIDES_INIT;
    const kvr_block_range shared = {0, 4};
    const kvr_media media = {1, 77};
    double scaled;
    request.explain = 1;
    request.overrides = &overrides;
    CHECK(chosen(&request) != 0 && reply.mode == 1 && reply.ties > 0 && reply.policy_version > 0);
    overrides.prefill_load_scale = 3;
    overrides.track_prefill_tokens = 1;
    CHECK(chosen(&request) != 0);
    scaled = reply.candidates[0].terms.prefill;
    overrides.prefill_load_scale = 1;
    CHECK(chosen(&request) != 0 && reply.candidates[0].terms.prefill < scaled);
    overrides.mode = 5;
    CHECK(chosen(&request) != 0 && reply.mode == 5);
    request.overrides = NULL;
    request.shared_hits = &shared;
    request.shared_hit_count = 1;
    CHECK(chosen(&request) != 0);
    request.shared_hits = NULL;
    request.shared_hit_count = 0;
    request.media = &media;
    request.media_count = 1;
    request.priority = -1;
    request.priority_jump = 0.5;
    request.trace = &trace;
    CHECK(chosen(&request) != 0 && reply.candidates[0].device_blocks <= 1);
    request.must_understand = (uint64_t)1 << 63;
    CHECK(kvr_route(&client, &request, &reply) == KVR_REFUSED && client.error_code == 4);
}

static void overlaps_are_reported_without_a_decision(void) {
    kvr_route_request request = asking(NULL);
    kvr_overlap overlaps[4];
    kvr_prompt_found found;
    size_t count, n;
    uint32_t most = 0;
    CHECK(kvr_overlaps(&client, &request, overlaps, 1, &count, NULL) == KVR_OK && count == 2);
    CHECK(kvr_overlaps(&client, &request, overlaps, 4, &count, &found) == KVR_OK && count == 2);
    CHECK(found.request_blocks == 4 && !found.unmatchable);
    for (n = 0; n < count; n++) {
        CHECK(overlaps[n].trust.level == 1 && overlaps[n].host_blocks == 0);
        if (overlaps[n].device_blocks > most) most = overlaps[n].device_blocks;
    }
    CHECK(most == 4);
    request.tokens = NULL;
    CHECK(kvr_overlaps(&client, &request, overlaps, 4, &count, NULL) == KVR_INVALID && count == 0);
}

static void workers_are_listed_and_their_loads_are_reported(void) {
    kvr_engine_load load = {100, 7, 2, 1, 0.25};
    kvr_worker workers[4];
    size_t count;
    int accepted = 0;
    CHECK(kvr_workers(&client, space.space_id, workers, 1, &count) == KVR_OK && count == 2);
    CHECK(kvr_workers(&client, KVR_EVERY_SPACE, workers, 4, &count) == KVR_OK && count == 4);
    CHECK(workers[0].worker_id == 1 && strcmp(workers[0].name, "one") == 0 && workers[0].taint_count == 2);
    CHECK(strcmp(workers[0].taints[0], "fast") == 0 && strcmp(workers[0].taints[1], "near") == 0);
    CHECK(workers[1].taint_count == 0 && workers[1].trust.level == 1 && workers[1].device_class == 0);
    CHECK(kvr_report_load(&client, space.space_id, 1, 0, &load, &accepted) == KVR_OK && accepted);
    CHECK(kvr_report_load(&client, space.space_id, 99, 0, &load, NULL) == KVR_REFUSED);
}

/* Longer than the rings of a lane are, and answered as by the socket. */
static void a_long_prompt_gets_the_same_answer_by_every_way(const char *path) {
    static uint32_t longer[131072];
    static kvr_route_reply others;
    kvr_route_request request = asking(NULL);
    kvr_client socket;
    size_t i;
    for (i = 0; i < 131072; i++) longer[i] = i < 70 ? tokens[i] : (uint32_t)i;
    request.tokens = longer;
    CHECK(kvr_connect(&socket, path, "c-test", &session, 60000) == KVR_OK);
    for (request.token_count = 0; request.token_count <= 131072; request.token_count += 16384) {
        CHECK(kvr_route(&client, &request, &reply) == KVR_OK && kvr_route(&socket, &request, &others) == KVR_OK);
        CHECK(reply.candidate_count == 2 && others.candidate_count == 2);
        CHECK(reply.request_blocks == request.token_count / 16 && others.request_blocks == reply.request_blocks);
        for (i = 0; i < 2; i++) {
            const kvr_candidate *one = &reply.candidates[i];
            const kvr_candidate *other = &others.candidates[one->worker_id == others.candidates[0].worker_id ? 0 : 1];
            CHECK(one->worker_id == other->worker_id && one->device_blocks == other->device_blocks);
            CHECK(one->cost <= other->cost && one->cost >= other->cost && one->trust_level == other->trust_level);
        }
    }
    kvr_close(&socket);
}

/* Whatever is written into the memory of a lane, nothing is read or written outside of its rings. */
static void a_lane_that_lies_is_not_believed(const char *path) {
    kvr_route_request request = asking(NULL);
    static const size_t positions[2] = {KVR__REPLY_TAIL, KVR__REQUEST_HEAD};
    static const uint64_t lies[3] = {UINT64_MAX, 0, 1 << 20};
    size_t i, j;
    for (i = 0; i < 2; i++) {
        for (j = 0; j < 3; j++) {
            kvr_client lied_to;
            CHECK(kvr_connect(&lied_to, path, "c-test", &session, 60000) == KVR_OK && kvr_open_lane(&lied_to) == KVR_OK);
            /* So often that it has seen both positions move. */
            CHECK(kvr_route(&lied_to, &request, &reply) == KVR_OK && kvr_route(&lied_to, &request, &reply) == KVR_OK);
            CHECK(lied_to.lane.reply_tail > 0 && lied_to.lane.request_head > 0);
            __atomic_store_n(&lied_to.lane.words[positions[i]], lies[j], __ATOMIC_RELEASE);
            if (i == 1) {
                /* A busy-poll reads the position once no word is known to be free. It then takes no line. */
                lied_to.lane.request_tail = lied_to.lane.request_head + lied_to.lane.request_words;
                lied_to.lane.request_owned = lied_to.lane.request_tail;
                kvr__lane_own_ahead(&lied_to.lane);
                CHECK(lied_to.lane.request_owned == lied_to.lane.request_tail);
            }
            /* (Before the daemon moves that position itself.) */
            if (i == 0) CHECK(kvr__read_lane(&lied_to) == KVR_CLOSED);
            else CHECK(kvr_route(&lied_to, &request, &reply) == KVR_CLOSED);
            CHECK(lied_to.lane_broke);
            kvr_close(&lied_to);
        }
    }
}

static void the_fleet_arrives_at_once_and_after_each_change(void) {
    kvr_route_request request = asking(NULL);
    kvr_worker workers[8];
    uint64_t first, next;
    size_t count;
    CHECK(kvr_watch_next(&client) == KVR_INVALID);
    CHECK(kvr_watch(&client, KVR_EVERY_SPACE) == KVR_OK && kvr_watch_next(&client) == KVR_OK);
    CHECK(kvr_fleet(&client, workers, 8, &count, &first) == KVR_OK && count == 4 && first > 0);
    CHECK(workers[0].worker_id == 1 && strcmp(workers[0].name, "one") == 0 && workers[0].weight > 0);
    CHECK(kvr_fleet(&client, workers, 1, &count, NULL) == KVR_OK && count == 1);
    client.timeout_ms = 20;
    CHECK(kvr_watch_next(&client) == KVR_TIMEOUT);
    client.timeout_ms = 60000;
    ask_for("drain 2");
    do CHECK(kvr_watch_next(&client) == KVR_OK && kvr_fleet(&client, workers, 8, &count, &next) == KVR_OK);
    while (workers[1].state != 2);
    CHECK(next > first);
    ask_for("undrain 2");
    /* The fleet arrives during other calls too. */
    do CHECK(kvr_route(&client, &request, &reply) == KVR_OK && kvr_fleet(&client, workers, 8, &count, &next) == KVR_OK);
    while (workers[1].state != 1);
}

static void an_invalid_request_is_refused_unsent(void) {
    kvr_route_request request = asking("");
    kvr_space other;
    CHECK(kvr_route(&client, &request, &reply) == KVR_INVALID);
    request = asking(NULL);
    request.tokens = NULL;
    CHECK(kvr_route(&client, &request, &reply) == KVR_INVALID);
    request = asking(NULL);
    request.token_count = (size_t)client.prompt_tokens_max + 1;
    CHECK(kvr_route(&client, &request, &reply) == KVR_INVALID);
    CHECK(kvr_find_space(&client, "other", NULL, &other) == KVR_UNKNOWN);
}

/* Under the sanitizers: nothing outside of a body is read, however it is broken. */
static void broken_replies_are_read_within_their_bytes(void) {
    kvr_route_request request = asking(NULL);
    size_t frame_bytes, length, at, cut;
    uint64_t id = client.next_id++;
    unsigned read = 0;
    uint8_t *body;
    CHECK(kvr__encode_route(&client, &request, id) == KVR_OK);
    CHECK(kvr__exchange(&client, id, KVR__KIND_ROUTE_REPLY, &frame_bytes) == KVR_OK);
    length = frame_bytes - KVR__HEADER_BYTES;
    for (at = 0; at < length; at++) {
        static const uint8_t wrong[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
        size_t i;
        for (i = 0; i < sizeof wrong; i++) {
            body = (uint8_t *)malloc(length);
            memcpy(body, client.in.bytes + KVR__HEADER_BYTES, length);
            body[at] = wrong[i];
            read += (unsigned)kvr__read_route(body, length, &reply);
            free(body);
        }
    }
    for (cut = 0; cut < length; cut++) {
        body = (uint8_t *)malloc(cut + 1);
        memcpy(body, client.in.bytes + KVR__HEADER_BYTES, cut);
        read += (unsigned)kvr__read_route(body, cut, &reply);
        free(body);
    }
    CHECK(read > 0);
    kvr__consume(&client.in, frame_bytes);
    for (at = 0, read = 0; at < client.fleet.used; at++) {
        static const uint8_t wrong[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
        kvr_buffer fleet = client.fleet;
        kvr_worker worker;
        size_t i, n;
        for (i = 0; i <= sizeof wrong; i++) {
            body = (uint8_t *)malloc(fleet.used);
            memcpy(body, client.fleet.bytes, fleet.used);
            fleet.bytes = body;
            /* At last it is cut short. */
            if (i < sizeof wrong) body[at] = wrong[i];
            else fleet.used = at;
            for (n = 0; n < 8 && kvr__read_worker(&fleet, n, &worker) > 0; n++) read++;
            free(body);
        }
    }
    CHECK(read > 0);
}

static void a_late_booking_is_freed(void) {
    kvr_route_request request = asking("late");
    client.timeout_ms = 50;
    ask_for("stop");
    CHECK(kvr_route(&client, &request, &reply) == KVR_TIMEOUT);
    ask_for("go on");
    client.timeout_ms = 60000;
    request.request_id = NULL;
    /* Read past the late reply, and past the free that it leads to. */
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    request.request_id = "late";
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    CHECK(kvr_free(&client, reply.booking, NULL) == KVR_OK);
}

/* A gateway that does not end its frame learns from the call that fails why its lane has ended, whether that call waited
 * for it or came afterwards, and whether or not anything had passed before: memory that was emptied is a fault only then. */
static void a_frame_that_is_not_ended_is_answered_with_why(const char *path, uint32_t spin_us) {
    /* The header of a route of 64 KiB. */
    static const uint8_t header[KVR__HEADER_BYTES] = {0, 0, 1, 0, 3, 0, 1, 0, 99};
    kvr_route_request request;
    int i, again;
    for (i = 0; i < 4; i++) {
        const int has_passed = i & 1, comes_afterwards = i & 2;
        CHECK(kvr_connect(&client, path, "c-test", &session, 60000) == KVR_OK && kvr_open_lane(&client) == KVR_OK);
        client.spin_us = spin_us;
        CHECK(kvr_find_space(&client, "m", NULL, &space) == KVR_OK);
        request = asking(NULL);
        if (has_passed) CHECK(kvr_route(&client, &request, &reply) == KVR_OK && kvr_route(&client, &request, &reply) == KVR_OK);
        CHECK((client.lane.reply_tail > 0) == has_passed && (client.lane.request_head > 0) == has_passed);
        CHECK(kvr__lane_push(&client.lane, header, sizeof header) == (int64_t)sizeof header);
        if (comes_afterwards) {
            struct pollfd polled = {0, 0, 0};
            polled.fd = client.lane.bell;
            CHECK(poll(&polled, 1, 60000) == 1 && (polled.revents & POLLHUP) != 0);
        }
        for (again = 0; again < 2; again++) {
            CHECK(kvr_route(&client, &request, &reply) == KVR_CLOSED);
            CHECK(client.error_code == 1 && !client.retryable && !client.lane_broke);
            CHECK(strcmp(client.message, "the rest of a frame has not come within 300 ms") == 0);
            CHECK(strstr(client.remedy, "serve.frame_timeout_ms") != NULL);
        }
        kvr_close(&client);
    }
}

int main(int count, char **arguments) {
    kvr_route_request request;
    size_t i;
    int by_lane;
    if (count != 5) return 64;
    by_lane = strcmp(arguments[3], "lane") == 0;
    for (i = 0; i < 70; i++) tokens[i] = (uint32_t)(i * 31);
    if (strcmp(arguments[3], "overdue") == 0) {
        a_frame_that_is_not_ended_is_answered_with_why(arguments[1], (uint32_t)strtoul(arguments[4], NULL, 10));
        return 0;
    }
    CHECK(kvr_connect(&client, arguments[1], "c-test", &session, 60000) == KVR_OK);
    CHECK(client.instance_id != 0 && (client.features & 7) == 7);
    if (by_lane) CHECK(kvr_open_lane(&client) == KVR_OK && client.lane.words != NULL);
    client.spin_us = (uint32_t)strtoul(arguments[4], NULL, 10);
    CHECK(kvr_find_space(&client, "m", NULL, &space) == KVR_OK);
    CHECK(space.block_size == 16 && space.window == 0 && space.role == 0);

    a_booking_lives_from_its_route_to_its_free();
    hashes_of_the_caller_are_the_same_prompt(arguments[2]);
    CHECK(kvr_open_lane(&client) == KVR_INVALID);
    a_long_prompt_gets_the_same_answer_by_every_way(arguments[1]);
    overlaps_are_reported_without_a_decision();
    a_request_is_bound_by_its_constraints();
    a_request_overrides_its_policy();
    workers_are_listed_and_their_loads_are_reported();
    a_booking_waits_within_the_connections_timeout();
    requests_of_a_session_come_to_one_worker();
    a_booking_is_reported_on_until_it_ends();
    one_reply_names_a_worker_to_prefill_and_one_to_decode();
    the_fleet_arrives_at_once_and_after_each_change();
    an_invalid_request_is_refused_unsent();
    broken_replies_are_read_within_their_bytes();
    a_late_booking_is_freed();

    if (by_lane) a_lane_that_lies_is_not_believed(arguments[1]);
    request = asking(NULL);
    ask_for("kill");
    CHECK(kvr_route(&client, &request, &reply) == KVR_CLOSED);
    kvr_close(&client);
    CHECK(kvr_connect(&client, arguments[1], "c-test", &session, 60000) == KVR_SYSTEM);
    kvr_close(&client);
    ask_for("start");
    CHECK(kvr_connect(&client, arguments[1], "c-test", &session, 60000) == KVR_OK);
    if (by_lane) CHECK(kvr_open_lane(&client) == KVR_OK);
    CHECK(kvr_route(&client, &request, &reply) == KVR_OK);
    kvr_close(&client);
    return 0;
}
