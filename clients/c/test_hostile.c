/* One call to a daemon that means harm: prints how the call ended, its milliseconds, the descriptors that it left open, and
 * by how many KiB the program's memory grew.
 *
 *     test_hostile SOCKET route|workers|watch|lane|hash
 */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "kvrouted_steady.h"

enum { TIMEOUT_MS = 300, TOKENS = 64 };

static int open_descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    while (folder != NULL && readdir(folder) != NULL) count++;
    if (folder != NULL) closedir(folder);
    return count;
}

static long peak_kib(void) {
    struct rusage used;
    memset(&used, 0, sizeof used);
    getrusage(RUSAGE_SELF, &used);
    return used.ru_maxrss;
}

static kvr_status call(kvr_client *client, const char *what) {
    static kvr_worker workers[4];
    static kvr_route_reply reply;
    uint32_t tokens[TOKENS] = {0};
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    size_t count;
    kvr_status status;
    request.tokens = tokens;
    request.token_count = TOKENS;
    if (strcmp(what, "route") == 0) return kvr_route(client, &request, &reply);
    if (strcmp(what, "workers") == 0) return kvr_workers(client, KVR_EVERY_SPACE, workers, 4, &count);
    if (strcmp(what, "lane") == 0) return kvr_open_lane(client);
    status = kvr_watch(client, KVR_EVERY_SPACE);
    return status == KVR_OK ? kvr_watch_next(client) : status;
}

/* A steady client that hashes by the scheme that the daemon names. */
static kvr_status hash(const char *path) {
    static kvr_answer answer;
    kvr_steady steady;
    kvr_steady_options options = KVR_STEADY_OPTIONS_INIT;
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    uint32_t tokens[TOKENS] = {0};
    kvr_status status;
    options.path = path;
    options.timeout_ms = TIMEOUT_MS;
    options.hash_locally = 1;
    options.fallback = 0;
    request.tokens = tokens;
    request.token_count = TOKENS;
    kvr_steady_init(&steady, &options);
    status = kvr_steady_route(&steady, "m", NULL, &request, &answer);
    kvr_steady_close(&steady);
    return status;
}

int main(int argc, char **argv) {
    kvr_client client;
    kvr_status status;
    int before, after;
    long memory_kib;
    int64_t began_ms, took_ms;
    if (argc != 3) return 2;
    memset(&client, 0, sizeof client);
    client.fd = -1;
    if (strcmp(argv[2], "hash") != 0) {
        status = kvr_connect(&client, argv[1], "hostile", NULL, TIMEOUT_MS);
        if (status != KVR_OK) {
            fprintf(stderr, "%s\n", client.message);
            return 1;
        }
    }
    before = open_descriptors();
    memory_kib = peak_kib();
    began_ms = kvr__now_ms();
    status = strcmp(argv[2], "hash") == 0 ? hash(argv[1]) : call(&client, argv[2]);
    took_ms = kvr__now_ms() - began_ms;
    after = open_descriptors();
    printf("%d %lld %d %ld\n", (int)status, (long long)took_ms, after - before, peak_kib() - memory_kib);
    kvr_close(&client);
    return 0;
}
