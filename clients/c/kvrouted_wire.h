/* The bytes of frames: how bodies are built, and how they are read without trusting them. Of kvrouted.h, which includes it;
 * the layout is that of flatbuffers, for the tables of schemas/routing.fbs.
 */
#ifndef KVROUTED_WIRE_H
#define KVROUTED_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a name or message that is kept, its end included; longer ones are cut. */
#define KVR_TEXT_BYTES 256

typedef struct kvr_buffer {
    uint8_t *bytes;
    size_t used, room;
    int short_of_memory;
} kvr_buffer;

/* ---- bytes ---------------------------------------------------------------------------------------- */

/* Bytes of a frame's header, and of what the fields of a root table and of one within it take at most. */
enum { KVR__HEADER_BYTES = 16, KVR__TABLE_BYTES = 160, KVR__INNER_TABLE_BYTES = 64 };
#define KVR__BODY_BYTES_CEILING (64u << 20)
/* What a reply may list: far more than any daemon does. A list may name one row ever again, so its length is bounded by
 * these and not by the bytes that it came in. */
#define KVR__SPACES_MAX (4u << 10)
#define KVR__WORKERS_MAX (64u << 10)
#define KVR__LABELS_MAX 256u
/* Tokens per block, at most: as in the daemon. */
#define KVR__BLOCK_SIZE_MAX (64u << 10)

static inline void kvr__put(uint8_t *at, uint64_t value, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

/* Numbers one after the other: copied, where the host keeps them so too. */
static inline void kvr__put_tokens(uint8_t *at, const uint32_t *tokens, size_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (count > 0) memcpy(at, tokens, 4 * count);
#else
    size_t i;
    for (i = 0; i < count; i++) kvr__put(at + 4 * i, tokens[i], 4);
#endif
}

static inline void kvr__put_hashes(uint8_t *at, const uint64_t *hashes, size_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (count > 0) memcpy(at, hashes, 8 * count);
#else
    size_t i;
    for (i = 0; i < count; i++) kvr__put(at + 8 * i, hashes[i], 8);
#endif
}

static inline uint64_t kvr__get(const uint8_t *at, size_t bytes) {
    uint64_t value = 0;
    size_t i;
    for (i = 0; i < bytes; i++) value |= (uint64_t)at[i] << (8 * i);
    return value;
}

/* Makes room for more bytes behind what is used; answers whether there is memory for them. */
static inline int kvr__reserve(kvr_buffer *buffer, size_t bytes) {
    size_t room = (buffer->used + bytes) * 2 + 1024;
    uint8_t *grown;
    if (bytes <= buffer->room - buffer->used) return 1;
    grown = (uint8_t *)realloc(buffer->bytes, room);
    if (grown == NULL) {
        buffer->short_of_memory = 1;
        return 0;
    }
    buffer->bytes = grown;
    buffer->room = room;
    return 1;
}

/* Adds bytes at the end, zeroed; answers with where they begin. */
static inline size_t kvr__grow(kvr_buffer *buffer, size_t bytes) {
    size_t at = buffer->used;
    if (!kvr__reserve(buffer, bytes)) return 0;
    memset(buffer->bytes + at, 0, bytes);
    buffer->used += bytes;
    return at;
}

static inline void kvr__align(kvr_buffer *buffer, size_t to) {
    kvr__grow(buffer, (to - buffer->used % to) % to);
}

/* ---- building a body: a table, then what it points at. The frame header's 16 bytes keep every alignment. ---- */

typedef struct kvr__table {
    size_t at, vtable, used, room;
} kvr__table;

/* Begins a frame and its one root table of so many fields. */
static inline kvr__table kvr__begin(kvr_buffer *out, size_t fields) {
    kvr__table table = {0, 0, 4, KVR__TABLE_BYTES};
    out->used = 0;
    out->short_of_memory = 0;
    kvr__grow(out, KVR__HEADER_BYTES + 8);
    table.vtable = kvr__grow(out, 4 + 2 * fields);
    kvr__align(out, 8);
    table.at = kvr__grow(out, KVR__TABLE_BYTES);
    if (out->short_of_memory) return table;
    memcpy(out->bytes + KVR__HEADER_BYTES + 4, "KVRT", 4);
    kvr__put(out->bytes + KVR__HEADER_BYTES, table.at - KVR__HEADER_BYTES, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * fields, 2);
    return table;
}

/* A second table after the first; `from` is the field that points at it. */
static inline kvr__table kvr__inner(kvr_buffer *out, size_t fields, size_t from) {
    kvr__table table = {0, 0, 4, KVR__INNER_TABLE_BYTES};
    kvr__align(out, 8);
    table.vtable = kvr__grow(out, 4 + 2 * fields);
    kvr__align(out, 8);
    table.at = kvr__grow(out, KVR__INNER_TABLE_BYTES);
    if (out->short_of_memory) return table;
    kvr__put(out->bytes + from, table.at - from, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * fields, 2);
    return table;
}

/* Gives a field its place in the table. */
static inline size_t kvr__field(kvr_buffer *out, kvr__table *table, size_t index, size_t bytes, size_t align) {
    size_t place = (table->used + align - 1) / align * align;
    if (place + bytes > table->room) out->short_of_memory = 1;
    if (out->short_of_memory) return 0;
    table->used = place + bytes;
    kvr__put(out->bytes + table->vtable + 4 + 2 * index, place, 2);
    kvr__put(out->bytes + table->vtable + 2, table->used, 2);
    return table->at + place;
}

static inline void kvr__number(kvr_buffer *out, kvr__table *table, size_t index, uint64_t value, size_t bytes) {
    size_t at = kvr__field(out, table, index, bytes, bytes);
    if (!out->short_of_memory) kvr__put(out->bytes + at, value, bytes);
}

static inline void kvr__put_double(uint8_t *at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    kvr__put(at, bits, 8);
}

static inline void kvr__double(kvr_buffer *out, kvr__table *table, size_t index, double value) {
    size_t at = kvr__field(out, table, index, 8, 8);
    if (!out->short_of_memory) kvr__put_double(out->bytes + at, value);
}

static inline void kvr__pair(kvr_buffer *out, kvr__table *table, size_t index, uint64_t first, uint64_t second) {
    size_t at = kvr__field(out, table, index, 16, 8);
    if (out->short_of_memory) return;
    kvr__put(out->bytes + at, first, 8);
    kvr__put(out->bytes + at + 8, second, 8);
}

/* The elements of a vector, yet to be written; 0 if there is no memory. */
static inline size_t kvr__elements(kvr_buffer *out, size_t from, size_t count, size_t bytes) {
    size_t at, elements;
    /* Its length is before the elements, which are aligned. */
    kvr__align(out, 4);
    if (bytes % 8 == 0 && (out->used + 4) % 8 != 0) kvr__grow(out, 4);
    at = kvr__grow(out, 4);
    elements = kvr__grow(out, count * bytes);
    if (out->short_of_memory) return 0;
    kvr__put(out->bytes + from, at - from, 4);
    kvr__put(out->bytes + at, count, 4);
    return elements;
}

static inline void kvr__text(kvr_buffer *out, size_t from, const char *text) {
    size_t at = kvr__elements(out, from, strlen(text), 1);
    kvr__grow(out, 1);
    if (!out->short_of_memory) memcpy(out->bytes + at, text, strlen(text));
}

/* Ends the frame: pads it and writes its header; answers whether there was memory for it. */
static inline int kvr__finish(kvr_buffer *out, uint8_t kind, uint64_t id) {
    kvr__align(out, 8);
    if (out->short_of_memory) return 0;
    kvr__put(out->bytes, out->used - KVR__HEADER_BYTES, 4);
    out->bytes[4] = kind;
    out->bytes[5] = 0;
    kvr__put(out->bytes + 6, 1, 2);
    kvr__put(out->bytes + 8, id, 8);
    return 1;
}

/* Drops the first so many bytes of what came. */
static inline void kvr__consume(kvr_buffer *in, size_t bytes) {
    memmove(in->bytes, in->bytes + bytes, in->used - bytes);
    in->used -= bytes;
}

/* ---- reading a body: nothing is read outside of it, whatever it says ----------------------------------- */

typedef struct kvr__view {
    const uint8_t *bytes;
    size_t length;
    int bad;
} kvr__view;

typedef struct kvr__row {
    size_t at, vtable, fields;
} kvr__row;

static inline int kvr__holds(kvr__view *view, size_t at, size_t bytes) {
    if (at <= view->length && bytes <= view->length - at) return 1;
    view->bad = 1;
    return 0;
}

/* Where the offset at `at` points. */
static inline size_t kvr__follow(kvr__view *view, size_t at) {
    size_t to;
    if (!kvr__holds(view, at, 4)) return 0;
    to = at + (size_t)kvr__get(view->bytes + at, 4);
    return kvr__holds(view, to, 4) ? to : 0;
}

static inline kvr__row kvr__row_at(kvr__view *view, size_t at) {
    kvr__row row = {0, 0, 0};
    int64_t vtable;
    size_t bytes;
    if (view->bad || !kvr__holds(view, at, 4)) return row;
    vtable = (int64_t)at - (int32_t)(uint32_t)kvr__get(view->bytes + at, 4);
    if (vtable < 0 || !kvr__holds(view, (size_t)vtable, 4)) {
        view->bad = 1;
        return row;
    }
    bytes = (size_t)kvr__get(view->bytes + vtable, 2);
    if (bytes < 4 || !kvr__holds(view, (size_t)vtable, bytes)) {
        view->bad = 1;
        return row;
    }
    row.at = at;
    row.vtable = (size_t)vtable;
    row.fields = (bytes - 4) / 2;
    return row;
}

static inline kvr__row kvr__root(kvr__view *view) {
    kvr__row none = {0, 0, 0};
    if (!kvr__holds(view, 0, 8) || memcmp(view->bytes + 4, "KVRT", 4) != 0) {
        view->bad = 1;
        return none;
    }
    return kvr__row_at(view, kvr__follow(view, 0));
}

/* Where a field lies; 0 = it is absent. */
static inline size_t kvr__find(kvr__view *view, kvr__row row, size_t index, size_t bytes) {
    size_t place;
    if (view->bad || index >= row.fields) return 0;
    place = (size_t)kvr__get(view->bytes + row.vtable + 4 + 2 * index, 2);
    if (place == 0 || !kvr__holds(view, row.at + place, bytes)) return 0;
    return row.at + place;
}

static inline uint64_t kvr__read(kvr__view *view, kvr__row row, size_t index, size_t bytes) {
    size_t at = kvr__find(view, row, index, bytes);
    return at == 0 ? 0 : kvr__get(view->bytes + at, bytes);
}

static inline double kvr__read_double(kvr__view *view, kvr__row row, size_t index) {
    uint64_t bits = kvr__read(view, row, index, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A vector's elements and how many; 0 elements where it is absent. */
static inline size_t kvr__vector(kvr__view *view, kvr__row row, size_t index, size_t bytes, size_t *count) {
    size_t field = kvr__find(view, row, index, 4), at;
    *count = 0;
    if (field == 0) return 0;
    at = kvr__follow(view, field);
    if (view->bad) return 0;
    *count = (size_t)kvr__get(view->bytes + at, 4);
    if (*count > view->length || !kvr__holds(view, at + 4, *count * bytes)) {
        view->bad = 1;
        *count = 0;
        return 0;
    }
    return at + 4;
}

/* Whether the text that the offset at `at` points to is this one. */
static inline int kvr__is_text(kvr__view *view, size_t at, const char *text) {
    size_t from = kvr__follow(view, at), bytes = strlen(text);
    if (view->bad || kvr__get(view->bytes + from, 4) != bytes || !kvr__holds(view, from + 4, bytes)) return 0;
    return memcmp(view->bytes + from + 4, text, bytes) == 0;
}

/* The text that the offset at `at` points to, as much as there is room for. */
static inline void kvr__read_text_at(kvr__view *view, size_t at, char *to, size_t room) {
    size_t from = kvr__follow(view, at), bytes = view->bad ? 0 : (size_t)kvr__get(view->bytes + from, 4);
    if (view->bad || !kvr__holds(view, from + 4, bytes)) bytes = 0;
    if (bytes >= room) bytes = room - 1;
    if (bytes > 0) memcpy(to, view->bytes + from + 4, bytes);
    to[bytes] = 0;
}

static inline void kvr__read_text(kvr__view *view, kvr__row row, size_t index, char *to) {
    size_t field = kvr__find(view, row, index, 4);
    to[0] = 0;
    if (field != 0) kvr__read_text_at(view, field, to, KVR_TEXT_BYTES);
}

static inline kvr__row kvr__read_row(kvr__view *view, kvr__row row, size_t index) {
    kvr__row none = {0, 0, 0};
    size_t field = kvr__find(view, row, index, 4);
    return field == 0 ? none : kvr__row_at(view, kvr__follow(view, field));
}

#ifdef __cplusplus
}
#endif

#endif
