/* Asks a daemon for a worker, books it, and ends the request; over a shm lane if the daemon offers one.
 *
 *     cc -std=c99 -O2 -o example example.c && ./example SOCKET MODEL
 */
#define _POSIX_C_SOURCE 200809L
#include "kvrouted.h"

static int failed(const kvr_client *client, const char *what) {
    fprintf(stderr, "%s: %s\n", what, client->message);
    if (client->remedy[0] != 0) fprintf(stderr, "to do: %s\n", client->remedy);
    return 1;
}

int main(int count, char **arguments) {
    uint32_t tokens[64];
    kvr_client client;
    kvr_space space;
    kvr_route_reply reply;
    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    size_t i;
    int status = 0;

    if (count != 3) {
        fprintf(stderr, "usage: %s SOCKET MODEL\n", arguments[0]);
        return 64;
    }
    for (i = 0; i < 64; i++) tokens[i] = (uint32_t)(i * 31);
    status = kvr_connect(&client, arguments[1], "c-example", NULL, 1000) != KVR_OK;
    /* Uses memory that is shared with the daemon, or else the socket. */
    if (!status && kvr_open_lane(&client) != KVR_OK) fprintf(stderr, "no lane: %s\n", client.message);
    if (status || kvr_find_space(&client, arguments[2], NULL, &space) != KVR_OK) {
        status = failed(&client, arguments[1]);
        kvr_close(&client);
        return status;
    }
    printf("%s: %u tokens a block\n", space.model, (unsigned)space.block_size);

    request.space_id = space.space_id;
    request.request_id = "example-1";
    request.tokens = tokens;
    request.token_count = 64;
    if (kvr_route(&client, &request, &reply) != KVR_OK) {
        status = failed(&client, "route");
    } else if (reply.candidate_count == 0) {
        printf("no worker is eligible: error code %u\n", (unsigned)reply.nobody);
    } else {
        kvr_candidate *best = &reply.candidates[0];
        printf("worker %llu/%u holds %u of %u blocks, cost %.2f\n", (unsigned long long)best->worker_id,
            (unsigned)best->dp_rank, (unsigned)best->device_blocks, (unsigned)reply.request_blocks, best->cost);
        /* Here the prompt would be sent there. Its first token has come: */
        if (kvr_prefill_complete(&client, reply.booking, 0, NULL) != KVR_OK) status = failed(&client, "prefill");
        /* Its last has come: */
        if (kvr_free(&client, reply.booking, NULL) != KVR_OK) status = failed(&client, "free");
    }
    kvr_close(&client);
    return status;
}
