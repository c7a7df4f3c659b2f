/* The client that outlives its daemon: its arithmetic, by lines of test_client.py, and what it does while that starts, stops
 * and ends the daemon. */
#define _POSIX_C_SOURCE 200809L
#include "kvrouted_steady.h"

#define CHECK(what)                                                                                  \
    do {                                                                                             \
        if (!(what)) {                                                                               \
            fprintf(stderr, "line %d: not so: %s; %s\n", __LINE__, #what, steady.client.message);    \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

static kvr_steady steady;
static kvr_answer answer;
static uint32_t tokens[70];

static void ask_for(const char *what) {
    char line[64];
    printf("%s\n", what);
    fflush(stdout);
    if (fgets(line, sizeof line, stdin) == NULL) exit(1);
}

/* ---- arithmetic: a line in, a line out ---- */

static char *word(void) {
    static char words[64][512];
    static size_t next;
    char *to = words[next++ % 64];
    if (scanf("%511s", to) != 1) exit(2);
    return to;
}

static uint64_t number(void) {
    return strtoull(word(), NULL, 10);
}

/* "-" is none. */
static const char *name(void) {
    const char *text = word();
    return strcmp(text, "-") == 0 ? NULL : text;
}

static void hash_of(void) {
    static uint8_t bytes[5000];
    size_t count = (size_t)number(), i;
    for (i = 0; i < count; i++) bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    printf("%llu\n", (unsigned long long)kvr_xxh3(bytes, count, number()));
}

static void choice(void) {
    static uint32_t prompt[64];
    static uint64_t hashes[64];
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    kvr_route_reply reply;
    size_t prefix = (size_t)number(), count, i;
    uint32_t key;
    request.block_size = (uint32_t)number();
    count = (size_t)number();
    for (i = 0; i < count; i++) {
        if (request.block_size == 0) prompt[i] = (uint32_t)number();
        else hashes[i] = number();
    }
    if (request.block_size == 0) request.tokens = prompt;
    else request.local_hashes = hashes;
    request.token_count = request.local_hash_count = count;
    request.lora = name();
    request.salt = name();
    request.affinity_session = name();
    key = kvr_fallback_key(&request, prefix);
    printf("%lu", (unsigned long)key);
    memset(&reply, 0, sizeof reply);
    count = (size_t)number();
    for (i = 0; i < count; i++) {
        kvr_worker worker;
        memset(&worker, 0, sizeof worker);
        worker.worker_id = number();
        worker.dp_rank = (uint32_t)number();
        worker.weight = strtod(word(), NULL);
        kvr_fallback_rank(&reply, KVR_CANDIDATES_MAX, key, &worker);
    }
    for (i = 0; i < reply.candidate_count; i++)
        printf(" %llu/%lu", (unsigned long long)reply.candidates[i].worker_id, (unsigned long)reply.candidates[i].dp_rank);
    printf("\n");
}

static int arithmetic(void) {
    char what[16];
    while (scanf("%15s", what) == 1) {
        if (strcmp(what, "cost") == 0) printf("%llu\n", (unsigned long long)kvr_fallback_surprise(number()));
        else if (strcmp(what, "hash") == 0) hash_of();
        else choice();
    }
    return 0;
}

/* ---- beside a daemon ---- */

static kvr_route_request asking(const char *request_id, uint32_t seed) {
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    size_t i;
    for (i = 0; i < 70; i++) tokens[i] = seed * 1000 + (uint32_t)i;
    request.request_id = request_id;
    request.tokens = tokens;
    request.token_count = 70;
    return request;
}

static void until_the_daemon_decides(void) {
    kvr_route_request request = asking(NULL, 1);
    struct timespec rest = {0, 5000000};
    do {
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK);
        nanosleep(&rest, NULL);
    } while (answer.is_fallback);
}

/* Everything that can be asked beside a route. */
static void questions_are_asked_of_the_daemon(void) {
    kvr_route_request request = asking(NULL, 1);
    kvr_engine_load load = {10, 20, 1, 0, 0.5};
    kvr_overlap overlaps[4];
    kvr_potential_load loads[4];
    kvr_worker workers[4];
    kvr_prompt_found found;
    size_t count;
    int accepted = 0;
    CHECK(kvr_steady_overlaps(&steady, "m", NULL, &request, overlaps, 4, &count, &found) == KVR_OK && count == 2);
    CHECK(found.request_blocks == 4);
    CHECK(kvr_steady_overlaps(&steady, "other", NULL, &request, overlaps, 4, &count, NULL) == KVR_UNKNOWN && count == 0);
    CHECK(kvr_steady_potential_loads(&steady, "m", NULL, &request, loads, 4, &count) == KVR_OK && count == 2);
    CHECK(kvr_steady_workers(&steady, "m", NULL, KVR_ANY_POOL, workers, 4, &count) == KVR_OK && count == 2);
    CHECK(kvr_steady_workers(&steady, "m", NULL, 1, workers, 4, &count) == KVR_UNKNOWN);
    CHECK(kvr_steady_report_load(&steady, "m", NULL, KVR_ANY_POOL, 1, 0, &load, &accepted) == KVR_OK && accepted);
    /* Of one that there is it would be left alone for a while. */
    CHECK(kvr_steady_report_failure(&steady, "m", NULL, 0, 99, 0, "it broke", NULL) == KVR_REFUSED && steady.is_connected);
}

/* Without the daemon, a request gets a worker that its constraints allow, as with the daemon. */
static void constraints_hold_without_the_daemon(void) {
    kvr_route_request request = asking("alone", 7);
    const kvr_worker_ref listed[2] = {{1, 0}, {2, KVR_EVERY_RANK}};
    const char *const label[1] = {"fast"};
    uint64_t first;
    size_t n;
    for (n = 0; n < 2; n++) {
        request.pin = &listed[n];
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
        CHECK(answer.reply.candidate_count == 1 && answer.reply.candidates[0].worker_id == n + 1);
        request.pin = NULL;
        request.allow = &listed[n];
        request.allow_count = 1;
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
        CHECK(answer.reply.candidate_count == 1 && answer.reply.candidates[0].worker_id == n + 1);
        request.allow = NULL;
    }
    request.required_taints = label;
    request.required_taint_count = 1;
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
    CHECK(answer.reply.candidate_count == 1 && answer.reply.candidates[0].worker_id == 1);
    request = asking("alone", 7);
    request.fallback_key = "the same";
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
    first = answer.reply.candidates[0].worker_id;
    for (n = 0; n < 20; n++) {
        request = asking("alone", (uint32_t)n);
        request.fallback_key = "the same";
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK);
        CHECK(answer.reply.candidates[0].worker_id == first);
    }
}

/* Connections have a lane, or none and a reason. */
static void the_lane_is_as_wanted(const char *way) {
    if (strcmp(way, "socket") == 0) CHECK(steady.lanes_opened == 0 && steady.lanes_refused == 0);
    if (strcmp(way, "lane") == 0) {
        CHECK(steady.lanes_opened == steady.connects && steady.lanes_refused == 0 && steady.lane_refusal[0] == 0);
        CHECK(steady.client.lane.words != NULL);
    }
    if (strcmp(way, "none") == 0) {
        CHECK(steady.lanes_opened == 0 && steady.lanes_refused == steady.connects);
        CHECK(strcmp(steady.lane_refusal, "the daemon has no lanes") == 0 && steady.client.lane.words == NULL);
    }
}

/* A lane that breaks at once is not had again on the next connection; the one after that has one. */
static void a_lane_that_breaks_is_done_without(void) {
    kvr_route_request request = asking(NULL, 1);
    uint64_t opened = steady.lanes_opened;
    int first_ms = steady.options.backoff_first_ms;
    steady.options.backoff_first_ms = 600000;
    __atomic_store_n(&steady.client.lane.words[KVR__REQUEST_HEAD], UINT64_MAX, __ATOMIC_RELEASE);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    CHECK(steady.client.lane.words == NULL && steady.lanes_opened == opened && steady.lanes_refused == 1);
    CHECK(strcmp(steady.lane_refusal, "the lane was closed or cannot be trusted") == 0);
    kvr__disconnect(&steady);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    CHECK(steady.client.lane.words != NULL && steady.lanes_opened == opened + 1 && steady.lane_refusal[0] == 0);
    steady.options.backoff_first_ms = first_ms;
}

static void beside_a_daemon(const char *path, const char *way, uint32_t spin_us) {
    kvr_steady_options options = KVR_STEADY_OPTIONS_INIT;
    kvr_route_request request = asking("life", 1);
    kvr_held old, held;
    kvr_outcome outcome;
    char longest[KVR_NAME_BYTES_MAX + 1];
    uint32_t seed;
    uint64_t first, seen = 0, connects;

    options.path = path;
    options.timeout_ms = 60000;
    options.backoff_first_ms = 1;
    options.backoff_most_ms = 20;
    options.hash_locally = 1;
    options.spin_us = spin_us;
    options.lane = strcmp(way, "socket") == 0 ? KVR_LANE_OFF : KVR_LANE_TRY;
    if (strcmp(way, "none") == 0) {
        options.lane = KVR_LANE_REQUIRE;
        kvr_steady_init(&steady, &options);
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_REFUSED && steady.client.error_code == 4);
        kvr_steady_close(&steady);
        options.lane = KVR_LANE_TRY;
    }
    kvr_steady_init(&steady, &options);
    CHECK(kvr_steady_route(&steady, "other", NULL, &request, &answer) == KVR_UNKNOWN);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    CHECK(answer.reply.request_blocks == 4 && answer.booking.booking.generation != 0);
    CHECK(kvr_steady_prefill_complete(&steady, &answer.booking, 7, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_steady_output_progress(&steady, &answer.booking, 7, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    CHECK(kvr_steady_free(&steady, &answer.booking, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    the_lane_is_as_wanted(way);
    questions_are_asked_of_the_daemon();

    /* A daemon that is silent: decided alone within the deadline, what comes late is freed, what is owed is said, all
     * on the connection that there is. */
    memset(longest, 'n', sizeof longest);
    longest[KVR_NAME_BYTES_MAX] = 0;
    CHECK(steady.client.timeout_ms > 1000);
    request = asking("held", 2);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    held = answer.booking;
    ask_for("stop");
    steady.options.timeout_ms = 100;
    steady.options.backoff_first_ms = steady.options.backoff_most_ms = 600000;
    connects = steady.connects;
    request = asking(longest, 3);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK);
    CHECK(answer.is_fallback && answer.why == KVR_TIMEOUT && answer.since_ms > 0 && answer.booking.booking.generation == 0);
    CHECK(steady.owed_count == 1 && strcmp(steady.owed[steady.owed_first].request_id, longest) == 0);
    /* It is left alone, which does not end the connection. */
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK);
    CHECK(answer.is_fallback && answer.why == KVR_SYSTEM && steady.is_connected && steady.owed_count == 1);
    CHECK(kvr_steady_free(&steady, &held, &outcome) == KVR_OK && outcome == KVR_BOOKING_UNKNOWN);
    ask_for("go on");
    steady.options.timeout_ms = 60000;
    steady.options.backoff_first_ms = 1;
    steady.options.backoff_most_ms = 20;
    steady.rests_until_ms = 0;
    until_the_daemon_decides();
    CHECK(steady.connects == connects && steady.owed_count == 0);
    ask_for("free");
    CHECK(kvr_steady_free(&steady, &held, &outcome) == KVR_OK && outcome == KVR_ALREADY_APPLIED);

    /* One that is gone: every prompt has its worker. */
    request = asking("old", 4);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    old = answer.booking;
    ask_for("kill");
    for (seed = 0; seed < 40; seed++) {
        request = asking("alone", seed);
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
        CHECK(answer.why == KVR_SYSTEM || answer.why == KVR_CLOSED);
        CHECK(answer.reply.candidate_count == 2 && !answer.all_down);
        first = answer.reply.candidates[0].worker_id;
        seen |= (uint64_t)1 << first;
        CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
        CHECK(answer.reply.candidates[0].worker_id == first);
    }
    CHECK(seen == 6 && steady.fallbacks >= 80);
    CHECK(kvr_steady_route(&steady, "other", NULL, &request, &answer) != KVR_OK);
    constraints_hold_without_the_daemon();

    /* One that takes no connections: as one that is gone, and left alone for longer each time. */
    ask_for("refuse");
    steady.options.backoff_first_ms = steady.options.backoff_most_ms = 600000;
    for (seed = 0; seed < 2; seed++) {
        int failures = steady.failures;
        steady.rests_until_ms = 0;
        if (seed == 0) CHECK(kvr_steady_free(&steady, &old, &outcome) == KVR_OK && outcome == KVR_BOOKING_UNKNOWN);
        else CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && answer.is_fallback);
        CHECK(steady.client.error_code == 13 && steady.client.retryable);
        CHECK(steady.failures == failures + 1 && steady.rests_until_ms > 0 && steady.owed_count > 0);
    }
    CHECK(answer.why == KVR_SYSTEM);
    steady.options.backoff_first_ms = 1;
    steady.options.backoff_most_ms = 20;
    steady.rests_until_ms = 0;
    ask_for("refuse no more");
    ask_for("number the spaces anew");

    ask_for("start");
    CHECK(steady.fleet.used > 0);
    until_the_daemon_decides();
    /* The remembered workers of its last run belong to other spaces. */
    CHECK(steady.fleet.used == 0 && steady.client.fleet.used > 0);
    /* A booking of another run. */
    request = asking("new", 5);
    CHECK(kvr_steady_route(&steady, "m", NULL, &request, &answer) == KVR_OK && !answer.is_fallback);
    CHECK(kvr_steady_free(&steady, &old, &outcome) == KVR_OK && outcome == KVR_BOOKING_UNKNOWN);
    CHECK(kvr_steady_free(&steady, &answer.booking, &outcome) == KVR_OK && outcome == KVR_APPLIED);
    the_lane_is_as_wanted(way);
    if (strcmp(way, "lane") == 0) a_lane_that_breaks_is_done_without();
    ask_for("free");
    kvr_steady_close(&steady);
}

int main(int count, char **arguments) {
    if (count < 4) return arithmetic();
    beside_a_daemon(arguments[1], arguments[2], (uint32_t)strtoul(arguments[3], NULL, 10));
    return 0;
}
