/* Block hashes of tokens, bit for bit as kvrouted computes them, to send 8 bytes a block instead of 4 a token.
 *
 * C99 or C++, without other headers of this client. It is XXH3-64 by its specification, plain and portable. It saves
 * work of the daemon, not of the gateway: vector code would hash several blocks at once.
 */
#ifndef KVROUTED_HASH_H
#define KVROUTED_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVR__P32_1 0x9E3779B1u
#define KVR__P32_2 0x85EBCA77u
#define KVR__P32_3 0xC2B2AE3Du
#define KVR__P64_1 0x9E3779B185EBCA87u
#define KVR__P64_2 0xC2B2AE3D27D4EB4Fu
#define KVR__P64_3 0x165667B19E3779F9u
#define KVR__P64_4 0x85EBCA77C2B2AE63u
#define KVR__P64_5 0x27D4EB2F165667C5u
enum { KVR__SECRET_BYTES = 192, KVR__STRIPE_BYTES = 64, KVR__STRIPES_PER_BLOCK = 16, KVR__XXH_LANES = 8 };

/* XXH3's default secret. */
static const uint8_t kvr__secret[KVR__SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t kvr__le(const uint8_t *at, size_t bytes) {
    uint64_t value = 0;
    size_t i;
    for (i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static inline uint64_t kvr__le64(const uint8_t *at) {
    return kvr__le(at, 8);
}

static inline uint64_t kvr__rotl(uint64_t value, int by) {
    return value << by | value >> (64 - by);
}

static inline uint64_t kvr__swap(uint64_t value, size_t bytes) {
    uint64_t swapped = 0;
    size_t i;
    for (i = 0; i < bytes; i++) swapped |= (value >> (8 * i) & 0xFF) << (8 * (bytes - 1 - i));
    return swapped;
}

/* The two halves of the 128-bit product, combined by XOR. */
static inline uint64_t kvr__fold(uint64_t a, uint64_t b) {
    uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), high = (a >> 32) * (b >> 32);
    uint64_t one = (a >> 32) * (b & 0xFFFFFFFFu), other = (a & 0xFFFFFFFFu) * (b >> 32);
    uint64_t middle = (low >> 32) + (one & 0xFFFFFFFFu) + other;
    return (high + (one >> 32) + (middle >> 32)) ^ (middle << 32 | (low & 0xFFFFFFFFu));
}

static inline uint64_t kvr__avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

static inline uint64_t kvr__avalanche_64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * KVR__P64_2;
    hash = (hash ^ hash >> 29) * KVR__P64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t kvr__mix(const uint8_t *in, const uint8_t *secret, uint64_t seed) {
    return kvr__fold(kvr__le64(in) ^ (kvr__le64(secret) + seed), kvr__le64(in + 8) ^ (kvr__le64(secret + 8) - seed));
}

/* Up to 16 bytes. */
static inline uint64_t kvr__xxh3_short(const uint8_t *in, size_t bytes, uint64_t seed) {
    const uint8_t *secret = kvr__secret;
    uint64_t low, high, hash;
    if (bytes > 8) {
        low = kvr__le64(in) ^ ((kvr__le64(secret + 24) ^ kvr__le64(secret + 32)) + seed);
        high = kvr__le64(in + bytes - 8) ^ ((kvr__le64(secret + 40) ^ kvr__le64(secret + 48)) - seed);
        return kvr__avalanche(bytes + kvr__swap(low, 8) + high + kvr__fold(low, high));
    }
    if (bytes >= 4) {
        seed ^= kvr__swap(seed & 0xFFFFFFFFu, 4) << 32;
        hash = kvr__le(in + bytes - 4, 4) + (kvr__le(in, 4) << 32);
        hash ^= (kvr__le64(secret + 8) ^ kvr__le64(secret + 16)) - seed;
        hash ^= kvr__rotl(hash, 49) ^ kvr__rotl(hash, 24);
        hash *= 0x9FB21C651E98DF25u;
        hash ^= (hash >> 35) + bytes;
        hash *= 0x9FB21C651E98DF25u;
        return hash ^ hash >> 28;
    }
    if (bytes > 0) {
        hash = (uint64_t)in[0] << 16 | (uint64_t)in[bytes >> 1] << 24 | in[bytes - 1] | (uint64_t)bytes << 8;
        return kvr__avalanche_64(hash ^ ((kvr__le(secret, 4) ^ kvr__le(secret + 4, 4)) + seed));
    }
    return kvr__avalanche_64(seed ^ kvr__le64(secret + 56) ^ kvr__le64(secret + 64));
}

/* 17 to 240 bytes. */
static inline uint64_t kvr__xxh3_middle(const uint8_t *in, size_t bytes, uint64_t seed) {
    uint64_t hash = bytes * KVR__P64_1;
    size_t i;
    if (bytes <= 128) {
        /* From both ends towards the middle. */
        for (i = (bytes - 1) / 32 + 1; i-- > 0;) {
            hash += kvr__mix(in + 16 * i, kvr__secret + 32 * i, seed);
            hash += kvr__mix(in + bytes - 16 * (i + 1), kvr__secret + 32 * i + 16, seed);
        }
        return kvr__avalanche(hash);
    }
    for (i = 0; i < 8; i++) hash += kvr__mix(in + 16 * i, kvr__secret + 16 * i, seed);
    hash = kvr__avalanche(hash);
    for (i = 8; i < bytes / 16; i++) hash += kvr__mix(in + 16 * i, kvr__secret + 16 * (i - 8) + 3, seed);
    return kvr__avalanche(hash + kvr__mix(in + bytes - 16, kvr__secret + 136 - 17, seed));
}

static inline void kvr__stripe(uint64_t *lanes, const uint8_t *in, const uint8_t *secret) {
    size_t i;
    for (i = 0; i < KVR__XXH_LANES; i++) {
        uint64_t data = kvr__le64(in + 8 * i), key = data ^ kvr__le64(secret + 8 * i);
        lanes[i ^ 1] += data;
        lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

/* More than 240 bytes. */
static inline uint64_t kvr__xxh3_long(const uint8_t *in, size_t bytes, uint64_t seed) {
    uint64_t lanes[KVR__XXH_LANES] = {KVR__P32_3, KVR__P64_1, KVR__P64_2, KVR__P64_3,
                                      KVR__P64_4, KVR__P32_2, KVR__P64_5, KVR__P32_1};
    uint8_t secret[KVR__SECRET_BYTES];
    uint64_t hash = bytes * KVR__P64_1;
    size_t i, j, stripes = (bytes - 1) / KVR__STRIPE_BYTES;
    for (i = 0; i < KVR__SECRET_BYTES; i += 8) {
        uint64_t word = kvr__le64(kvr__secret + i);
        word = i % 16 == 0 ? word + seed : word - seed;
        for (j = 0; j < 8; j++) secret[i + j] = (uint8_t)(word >> (8 * j));
    }
    for (i = 0; i < stripes; i++) {
        kvr__stripe(lanes, in + KVR__STRIPE_BYTES * i, secret + 8 * (i % KVR__STRIPES_PER_BLOCK));
        if (i % KVR__STRIPES_PER_BLOCK != KVR__STRIPES_PER_BLOCK - 1) continue;
        for (j = 0; j < KVR__XXH_LANES; j++) {
            uint64_t lane = lanes[j] ^ lanes[j] >> 47;
            lanes[j] = (lane ^ kvr__le64(secret + KVR__SECRET_BYTES - KVR__STRIPE_BYTES + 8 * j)) * KVR__P32_1;
        }
    }
    kvr__stripe(lanes, in + bytes - KVR__STRIPE_BYTES, secret + KVR__SECRET_BYTES - KVR__STRIPE_BYTES - 7);
    for (i = 0; i < KVR__XXH_LANES; i += 2)
        hash += kvr__fold(lanes[i] ^ kvr__le64(secret + 11 + 8 * i), lanes[i + 1] ^ kvr__le64(secret + 19 + 8 * i));
    return kvr__avalanche(hash);
}

/* XXH3-64 under a seed. */
static inline uint64_t kvr_xxh3(const void *bytes, size_t count, uint64_t seed) {
    const uint8_t *in = (const uint8_t *)bytes;
    if (count <= 16) return kvr__xxh3_short(in, count, seed);
    return count <= 240 ? kvr__xxh3_middle(in, count, seed) : kvr__xxh3_long(in, count, seed);
}

/* The number of whole blocks in a number of tokens. Window 1: a block needs the token after its last. */
static inline size_t kvr_block_count(size_t token_count, uint32_t block_size, uint8_t window) {
    size_t overlap = window == 1 ? 1 : 0;
    return block_size == 0 || token_count < overlap ? 0 : (token_count - overlap) / block_size;
}

/* Writes the local hash of every whole block, as many as there is room for. Answers with how many blocks there are.
 * `scratch` holds a block's tokens as bytes: (block_size + 1) * 4. `lora` and `salt` NULL or empty = none. */
static inline size_t kvr_local_hashes(const uint32_t *tokens, size_t token_count, uint32_t block_size, uint8_t window,
    const char *lora, const char *salt, uint8_t *scratch, uint64_t *hashes, size_t room) {
    size_t count = kvr_block_count(token_count, block_size, window), block, i;
    size_t span = (size_t)block_size + (window == 1 ? 1 : 0);
    uint64_t seed = 1337;
    if (lora != NULL && lora[0] != 0) seed += kvr_xxh3(lora, strlen(lora), 0);
    if (salt != NULL && salt[0] != 0) seed += kvr_xxh3(salt, strlen(salt), 1);
    for (block = 0; block < count && block < room; block++) {
        for (i = 0; i < span; i++) {
            uint32_t token = tokens[block * block_size + i];
            scratch[4 * i] = (uint8_t)token;
            scratch[4 * i + 1] = (uint8_t)(token >> 8);
            scratch[4 * i + 2] = (uint8_t)(token >> 16);
            scratch[4 * i + 3] = (uint8_t)(token >> 24);
        }
        hashes[block] = kvr_xxh3(scratch, 4 * span, seed);
    }
    return count;
}

#ifdef __cplusplus
}
#endif

#endif
