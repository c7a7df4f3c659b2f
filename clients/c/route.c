/* Asks a daemon for a worker, books it, and ends the request: what a gateway does for each request.
 *
 *     cc -std=c99 -O2 -o route route.c && ./route SOCKET MODEL
 */
#define _POSIX_C_SOURCE 200809L
#include "kvrouted.h"

static int failed(kvr_client *client) {
    fprintf(stderr, "%s\n", client->message[0] != 0 ? client->message : "no worker is eligible");
    kvr_close(client);
    return 1;
}

int main(int count, char **arguments) {
    const uint32_t tokens[4] = {1, 2, 3, 4};
    static kvr_client client;
    static kvr_space space;
    static kvr_route_reply reply; /* about 16 KiB: off the stack */
    if (count != 3) {
        fprintf(stderr, "usage: %s SOCKET MODEL\n", arguments[0]);
        return 64;
    }

    kvr_route_request request = KVR_ROUTE_REQUEST_INIT;
    if (kvr_connect(&client, arguments[1], "my-gateway", NULL, 1000) != KVR_OK) return failed(&client);
    if (kvr_find_space(&client, arguments[2], NULL, &space) != KVR_OK) return failed(&client);
    request.space_id = space.space_id, request.request_id = "request-1";
    request.tokens = tokens, request.token_count = 4;
    if (kvr_route(&client, &request, &reply) != KVR_OK || reply.candidate_count == 0) return failed(&client);
    printf("send the prompt to worker %llu\n", (unsigned long long)reply.candidates[0].worker_id);
    kvr_prefill_complete(&client, reply.booking, 0, NULL); /* when the first token has come */
    kvr_free(&client, reply.booking, NULL);                /* when the request has ended */
    kvr_close(&client);
    return 0;
}
