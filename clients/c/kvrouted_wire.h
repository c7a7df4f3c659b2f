/* The bytes of frames: how bodies are built, and how they are read without trusting them. kvrouted.h includes this
 * header. The layout is that of flatbuffers. kvrouted_fields.h has the numbers of the schema, schemas/routing.fbs.
 */
#ifndef KVROUTED_WIRE_H
#define KVROUTED_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvrouted_fields.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a name or message that a struct holds, its end included. Longer ones are cut. */
#define KVR_TEXT_BYTES 256

typedef struct kvr_buffer {
    uint8_t *bytes;
    size_t used, room;
    int short_of_memory;
} kvr_buffer;

/* ---- bytes ---------------------------------------------------------------------------------------- */

/* A frame's header: its bytes, the offsets of its fields, and the protocol version that it names. */
enum {
    KVR__HEADER_BYTES = 16,
    KVR__HEADER_BODY_BYTES_AT = 0,
    KVR__HEADER_KIND_AT = 4,
    KVR__HEADER_FLAGS_AT = 5,
    KVR__HEADER_VERSION_AT = 6,
    KVR__HEADER_ID_AT = 8,
    KVR__PROTOCOL_VERSION = 1
};
/* Bytes for the fields of a root table, and of a table within it. */
enum { KVR__TABLE_BYTES = 192, KVR__INNER_TABLE_BYTES = 64 };
#define KVR__BODY_BYTES_CEILING (64u << 20)
/* The most entries of a reply's lists: far more than any daemon sends. Entries of a list may share their bytes, so
 * its length is bounded by these and not by the bytes of the reply. */
#define KVR__SPACES_MAX (4u << 10)
#define KVR__WORKERS_MAX (64u << 10)
#define KVR__LABELS_MAX 256u
/* The most tokens per block, as in the daemon. */
#define KVR__BLOCK_SIZE_MAX (64u << 10)

static inline void kvr__put(uint8_t *at, uint64_t value, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

/* Little-endian numbers. A little-endian host copies them. */
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

/* Makes room for more bytes at the end. Answers whether there is memory for them. */
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

/* Adds zeroed bytes at the end. Answers with their offset. */
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

/* ---- building a body: a table, then the tables, vectors and texts that it points at. The frame's 16 bytes of header keep
 * every alignment. ---- */

typedef struct kvr__table {
    size_t at, vtable, used, room;
} kvr__table;

/* Begins a frame and its root table, which has this many fields. */
static inline kvr__table kvr__begin(kvr_buffer *out, size_t field_count) {
    kvr__table table = {0, 0, 4, KVR__TABLE_BYTES};
    out->used = 0;
    out->short_of_memory = 0;
    kvr__grow(out, KVR__HEADER_BYTES + 8);
    table.vtable = kvr__grow(out, 4 + 2 * field_count);
    kvr__align(out, 8);
    table.at = kvr__grow(out, KVR__TABLE_BYTES);
    if (out->short_of_memory) return table;
    memcpy(out->bytes + KVR__HEADER_BYTES + 4, "KVRT", 4);
    kvr__put(out->bytes + KVR__HEADER_BYTES, table.at - KVR__HEADER_BYTES, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * field_count, 2);
    return table;
}

/* Begins a table that the offset at `from` points to. */
static inline kvr__table kvr__write_table(kvr_buffer *out, size_t from, size_t field_count) {
    kvr__table table = {0, 0, 4, KVR__INNER_TABLE_BYTES};
    kvr__align(out, 8);
    table.vtable = kvr__grow(out, 4 + 2 * field_count);
    kvr__align(out, 8);
    table.at = kvr__grow(out, KVR__INNER_TABLE_BYTES);
    if (out->short_of_memory) return table;
    kvr__put(out->bytes + from, table.at - from, 4);
    kvr__put(out->bytes + table.at, table.at - table.vtable, 4);
    kvr__put(out->bytes + table.vtable, 4 + 2 * field_count, 2);
    return table;
}

/* Gives a field its place in the table. Answers with its offset. */
static inline size_t kvr__place(kvr_buffer *out, kvr__table *table, size_t field, size_t bytes, size_t align) {
    size_t place = (table->used + align - 1) / align * align;
    if (place + bytes > table->room) out->short_of_memory = 1;
    if (out->short_of_memory) return 0;
    table->used = place + bytes;
    kvr__put(out->bytes + table->vtable + 4 + 2 * field, place, 2);
    kvr__put(out->bytes + table->vtable + 2, table->used, 2);
    return table->at + place;
}

static inline void kvr__write_number(kvr_buffer *out, kvr__table *table, size_t field, uint64_t value, size_t bytes) {
    size_t at = kvr__place(out, table, field, bytes, bytes);
    if (!out->short_of_memory) kvr__put(out->bytes + at, value, bytes);
}

static inline void kvr__write_u8(kvr_buffer *out, kvr__table *table, size_t field, uint8_t value) {
    kvr__write_number(out, table, field, value, 1);
}

static inline void kvr__write_u16(kvr_buffer *out, kvr__table *table, size_t field, uint16_t value) {
    kvr__write_number(out, table, field, value, 2);
}

static inline void kvr__write_u32(kvr_buffer *out, kvr__table *table, size_t field, uint32_t value) {
    kvr__write_number(out, table, field, value, 4);
}

static inline void kvr__write_u64(kvr_buffer *out, kvr__table *table, size_t field, uint64_t value) {
    kvr__write_number(out, table, field, value, 8);
}

static inline void kvr__put_double(uint8_t *at, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    kvr__put(at, bits, 8);
}

static inline void kvr__write_double(kvr_buffer *out, kvr__table *table, size_t field, double value) {
    size_t at = kvr__place(out, table, field, 8, 8);
    if (!out->short_of_memory) kvr__put_double(out->bytes + at, value);
}

/* A struct of two numbers, the second in its second eight bytes: WorkerRef, SessionToken, BookingHandle. */
static inline void kvr__write_pair(kvr_buffer *out, kvr__table *table, size_t field, uint64_t first, uint64_t second) {
    size_t at = kvr__place(out, table, field, 16, 8);
    if (out->short_of_memory) return;
    kvr__put(out->bytes + at, first, 8);
    kvr__put(out->bytes + at + 8, second, 8);
}

/* Places an offset, which then points to a table, a vector or a text. Answers with where it is. */
static inline size_t kvr__write_offset(kvr_buffer *out, kvr__table *table, size_t field) {
    return kvr__place(out, table, field, 4, 4);
}

/* A vector that the offset at `from` points to. Answers with the offset of its elements, which the caller writes, or
 * with 0 if there is no memory. */
static inline size_t kvr__write_vector(kvr_buffer *out, size_t from, size_t count, size_t bytes) {
    size_t at, elements;
    /* The length precedes the elements. The elements are aligned. */
    kvr__align(out, 4);
    if (bytes % 8 == 0 && (out->used + 4) % 8 != 0) kvr__grow(out, 4);
    at = kvr__grow(out, 4);
    elements = kvr__grow(out, count * bytes);
    if (out->short_of_memory) return 0;
    kvr__put(out->bytes + from, at - from, 4);
    kvr__put(out->bytes + at, count, 4);
    return elements;
}

/* A text that the offset at `from` points to. */
static inline void kvr__write_text_at(kvr_buffer *out, size_t from, const char *text) {
    size_t at = kvr__write_vector(out, from, strlen(text), 1);
    kvr__grow(out, 1);
    if (!out->short_of_memory) memcpy(out->bytes + at, text, strlen(text));
}

/* Writes a text, unless it is NULL or empty. */
static inline void kvr__write_text(kvr_buffer *out, kvr__table *table, size_t field, const char *text) {
    if (text != NULL && text[0] != 0) kvr__write_text_at(out, kvr__write_offset(out, table, field), text);
}

/* Ends the frame: pads it and writes its header. Answers whether there was memory for all of it. */
static inline int kvr__finish(kvr_buffer *out, uint8_t kind, uint64_t id) {
    kvr__align(out, 8);
    if (out->short_of_memory) return 0;
    kvr__put(out->bytes + KVR__HEADER_BODY_BYTES_AT, out->used - KVR__HEADER_BYTES, 4);
    out->bytes[KVR__HEADER_KIND_AT] = kind;
    out->bytes[KVR__HEADER_FLAGS_AT] = 0;
    kvr__put(out->bytes + KVR__HEADER_VERSION_AT, KVR__PROTOCOL_VERSION, 2);
    kvr__put(out->bytes + KVR__HEADER_ID_AT, id, 8);
    return 1;
}

/* Drops the first bytes of what was received. */
static inline void kvr__consume(kvr_buffer *in, size_t bytes) {
    memmove(in->bytes, in->bytes + bytes, in->used - bytes);
    in->used -= bytes;
}

/* ---- reading a body: nothing outside of it is read, whatever its bytes are ------------------------------ */

typedef struct kvr__view {
    const uint8_t *bytes;
    size_t length;
    int bad; /* 1 = something pointed outside: the values read so far mean nothing */
} kvr__view;

static inline kvr__view kvr__view_of(const uint8_t *body, size_t length) {
    kvr__view view = {NULL, 0, 0};
    view.bytes = body;
    view.length = length;
    return view;
}

/* A table of a body. */
typedef struct kvr__row {
    size_t at, vtable, fields;
} kvr__row;

static inline int kvr__holds(kvr__view *view, size_t at, size_t bytes) {
    if (at <= view->length && bytes <= view->length - at) return 1;
    view->bad = 1;
    return 0;
}

/* The target of the offset at `at`. */
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

/* The offset of a field; 0 = it is absent. */
static inline size_t kvr__find(kvr__view *view, kvr__row row, size_t field, size_t bytes) {
    size_t place;
    if (view->bad || field >= row.fields) return 0;
    place = (size_t)kvr__get(view->bytes + row.vtable + 4 + 2 * field, 2);
    if (place == 0 || !kvr__holds(view, row.at + place, bytes)) return 0;
    return row.at + place;
}

/* A number; 0 if it is absent. */
static inline uint64_t kvr__read_number(kvr__view *view, kvr__row row, size_t field, size_t bytes) {
    size_t at = kvr__find(view, row, field, bytes);
    return at == 0 ? 0 : kvr__get(view->bytes + at, bytes);
}

static inline uint8_t kvr__read_u8(kvr__view *view, kvr__row row, size_t field) {
    return (uint8_t)kvr__read_number(view, row, field, 1);
}

static inline uint16_t kvr__read_u16(kvr__view *view, kvr__row row, size_t field) {
    return (uint16_t)kvr__read_number(view, row, field, 2);
}

static inline uint32_t kvr__read_u32(kvr__view *view, kvr__row row, size_t field) {
    return (uint32_t)kvr__read_number(view, row, field, 4);
}

static inline uint64_t kvr__read_u64(kvr__view *view, kvr__row row, size_t field) {
    return kvr__read_number(view, row, field, 8);
}

static inline double kvr__read_double(kvr__view *view, kvr__row row, size_t field) {
    uint64_t bits = kvr__read_u64(view, row, field);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The offset of a vector's elements, which have this many bytes each, and their count; 0 elements if it is absent. */
static inline size_t kvr__read_vector(kvr__view *view, kvr__row row, size_t field, size_t bytes, size_t *count) {
    size_t from = kvr__find(view, row, field, 4), at;
    *count = 0;
    if (from == 0) return 0;
    at = kvr__follow(view, from);
    if (view->bad) return 0;
    *count = (size_t)kvr__get(view->bytes + at, 4);
    if (*count > view->length || !kvr__holds(view, at + 4, *count * bytes)) {
        view->bad = 1;
        *count = 0;
        return 0;
    }
    return at + 4;
}

/* Whether the offset at `at` points to this text. */
static inline int kvr__is_text(kvr__view *view, size_t at, const char *text) {
    size_t from = kvr__follow(view, at), bytes = strlen(text);
    if (view->bad || kvr__get(view->bytes + from, 4) != bytes || !kvr__holds(view, from + 4, bytes)) return 0;
    return memcmp(view->bytes + from + 4, text, bytes) == 0;
}

/* Copies the text that the offset at `at` points to, as much as there is room for. */
static inline void kvr__read_text_at(kvr__view *view, size_t at, char *to, size_t room) {
    size_t from = kvr__follow(view, at), bytes = view->bad ? 0 : (size_t)kvr__get(view->bytes + from, 4);
    if (view->bad || !kvr__holds(view, from + 4, bytes)) bytes = 0;
    if (bytes >= room) bytes = room - 1;
    if (bytes > 0) memcpy(to, view->bytes + from + 4, bytes);
    to[bytes] = 0;
}

static inline void kvr__read_text(kvr__view *view, kvr__row row, size_t field, char *to) {
    size_t from = kvr__find(view, row, field, 4);
    to[0] = 0;
    if (from != 0) kvr__read_text_at(view, from, to, KVR_TEXT_BYTES);
}

static inline kvr__row kvr__read_row(kvr__view *view, kvr__row row, size_t field) {
    kvr__row none = {0, 0, 0};
    size_t from = kvr__find(view, row, field, 4);
    return from == 0 ? none : kvr__row_at(view, kvr__follow(view, from));
}

/* The n-th table of a vector of tables whose elements begin at `at`. */
static inline kvr__row kvr__row_in(kvr__view *view, size_t at, size_t n) {
    return kvr__row_at(view, kvr__follow(view, at + 4 * n));
}

#ifdef __cplusplus
}
#endif

#endif
