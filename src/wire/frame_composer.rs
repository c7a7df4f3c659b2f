//! Writes frames front to back, in one pass, into the send buffer.
//!
//! flatbuffers' builder finds the layout of every table anew, writes back to front, and copies the finished bytes. The tables
//! of frequent replies have a [`Layout`] that is known at compile time. The targets of their references are written after
//! them, and each reference once its target's place is known.

use flatbuffers::VOffsetT;

use super::header::{FRAME_IDENTIFIER, FrameHeader, FrameKind};
use crate::ids::CorrelationId;
use crate::limits::{FRAME_ALIGN_BYTES, FRAME_HEADER_BYTES};

/// The size of a reference to something that is written after it.
pub(super) const REFERENCE: usize = size_of::<u32>();
/// Bytes of a table that belong to no field.
pub(super) const PADDING: VOffsetT = 0;

/// The places of a table's fields. The table has `TABLE` bytes, its vtable `VTABLE` bytes.
pub(super) struct Layout<const TABLE: usize, const VTABLE: usize> {
    vtable: [u8; VTABLE],
}

impl<const TABLE: usize, const VTABLE: usize> Layout<TABLE, VTABLE> {
    /// The layout of these fields and their sizes in bytes, in their order after the table's first four bytes.
    ///
    /// A field that is not aligned, or sizes that differ from those of the type, are compile-time errors.
    pub(super) const fn of(fields: &[(VOffsetT, usize)]) -> Self {
        let mut vtable = [0; VTABLE];
        let (mut at, mut next) = (size_of::<i32>(), 0);
        while next < fields.len() {
            let (field, bytes) = fields[next];
            if field != PADDING {
                let align = if bytes < FRAME_ALIGN_BYTES { bytes } else { FRAME_ALIGN_BYTES };
                assert!(at.is_multiple_of(align), "a field is not aligned");
                [vtable[field as usize], vtable[field as usize + 1]] = (at as u16).to_le_bytes();
            }
            (at, next) = (at + bytes, next + 1);
        }
        assert!(at == TABLE && TABLE <= u16::MAX as usize, "the table is of another size");
        [vtable[0], vtable[1]] = (VTABLE as u16).to_le_bytes();
        [vtable[2], vtable[3]] = (TABLE as u16).to_le_bytes();
        Self { vtable }
    }

    /// The layout of these fields and their sizes in bytes, with as little padding as there can be: see [`places`].
    pub(super) const fn packed<const FIELDS: usize>(fields: &[(VOffsetT, usize); FIELDS]) -> Self {
        let (places, bytes) = places(fields);
        assert!(bytes == TABLE && vtable_bytes(fields) == VTABLE, "the sizes are those of the fields");
        let (mut vtable, mut next) = ([0; VTABLE], 0);
        while next < FIELDS {
            let field = fields[next].0 as usize;
            [vtable[field], vtable[field + 1]] = (places[next] as u16).to_le_bytes();
            next += 1;
        }
        [vtable[0], vtable[1]] = (VTABLE as u16).to_le_bytes();
        [vtable[2], vtable[3]] = (TABLE as u16).to_le_bytes();
        Self { vtable }
    }

    /// The place of a field in the table.
    pub(super) const fn at(&self, field: VOffsetT) -> usize {
        u16::from_le_bytes([self.vtable[field as usize], self.vtable[field as usize + 1]]) as usize
    }

    /// Overwrites a field in the bytes of a table of this layout.
    #[inline(always)]
    pub(super) fn overwrite<const BYTES: usize>(&self, table: &mut [u8], field: VOffsetT, value: [u8; BYTES]) {
        let at = self.at(field);
        table[at..at + BYTES].copy_from_slice(&value);
    }

    /// The vtable of a table that has all fields.
    pub(super) const fn vtable_bytes(&self) -> &[u8] {
        &self.vtable
    }

    /// A table without values.
    pub(super) const fn blank(&self) -> Table<'_, TABLE, VTABLE> {
        Table { layout: self, bytes: [0; TABLE], written: TABLE, vtable: self.vtable }
    }
}

/// A table and the string behind it, ready to be copied: `BYTES` bytes, of which the first `used` count.
#[derive(Clone, Copy)]
pub(super) struct Template<const BYTES: usize> {
    bytes: [u8; BYTES],
    used: usize,
}

impl<const BYTES: usize> Template<BYTES> {
    /// The template of a table and of a string to which `field` refers; `None` if both together exceed `BYTES`.
    pub(super) fn with_string<const T: usize, const V: usize>(
        (table, field): (&mut Table<'_, T, V>, VOffsetT),
        text: &str,
    ) -> Option<Self> {
        debug_assert_eq!(table.written, T, "a template has the whole table");
        table.refer_behind(field);
        let (text_at, text_end) = (T + REFERENCE, T + REFERENCE + text.len());
        // With the zero behind the text, and padded, so that what follows is aligned.
        let used = (text_end + 1).next_multiple_of(FRAME_ALIGN_BYTES);
        let mut bytes = [0; BYTES];
        bytes.get_mut(..used)?[..T].copy_from_slice(&table.bytes);
        bytes[T..text_at].copy_from_slice(&(text.len() as u32).to_le_bytes());
        bytes[text_at..text_end].copy_from_slice(text.as_bytes());
        Some(Self { bytes, used })
    }
}

/// Fields of more bytes have the last places of a packed table, so that a table without them ends before them.
const LARGE_FIELD_BYTES: usize = 16;

/// The places of fields with these sizes after a table's first four bytes, and the table's bytes. The next place goes to the
/// largest field that is aligned there, and the last places to large fields.
pub(super) const fn places<const FIELDS: usize>(fields: &[(VOffsetT, usize); FIELDS]) -> ([usize; FIELDS], usize) {
    let (mut places, mut at, mut placed) = ([0; FIELDS], size_of::<i32>(), 0);
    while placed < FIELDS {
        let (mut best, mut next) = (FIELDS, 0);
        while next < FIELDS {
            let bytes = fields[next].1;
            let is_large = bytes > LARGE_FIELD_BYTES;
            let align = if bytes < FRAME_ALIGN_BYTES { bytes } else { FRAME_ALIGN_BYTES };
            let is_free = places[next] == 0 && at.is_multiple_of(align);
            let is_better =
                best == FIELDS || fields[best].1 > LARGE_FIELD_BYTES || (!is_large && bytes > fields[best].1);
            if is_free && is_better {
                best = next;
            }
            next += 1;
        }
        if best < FIELDS {
            (places[best], at, placed) = (at, at + fields[best].1, placed + 1);
        } else {
            at += 1;
        }
    }
    (places, at.next_multiple_of(size_of::<i32>()))
}

/// The bytes of the vtable of a table with these fields.
pub(super) const fn vtable_bytes<const FIELDS: usize>(fields: &[(VOffsetT, usize); FIELDS]) -> usize {
    let (mut last, mut next) = (0, 0);
    while next < FIELDS {
        last = if fields[next].0 > last { fields[next].0 } else { last };
        next += 1;
    }
    last as usize + size_of::<VOffsetT>()
}

/// A value of a fixed size. A frame leaves it out if it is 0 or `false`.
pub(super) trait Plain {
    /// Sets a field to the value, or leaves it out.
    fn put<const TABLE: usize, const VTABLE: usize>(self, table: &mut Table<'_, TABLE, VTABLE>, field: VOffsetT);
}

macro_rules! plain {
    ($($type:ty)*) => {$(
        impl Plain for $type {
            #[inline]
            fn put<const T: usize, const V: usize>(self, table: &mut Table<'_, T, V>, field: VOffsetT) {
                let bytes = self.to_le_bytes();
                table.set_if(field, (bytes != [0; size_of::<Self>()]).then_some(bytes));
            }
        }
    )*};
}

plain!(u8 u32 i32 f64);

impl Plain for bool {
    #[inline]
    fn put<const T: usize, const V: usize>(self, table: &mut Table<'_, T, V>, field: VOffsetT) {
        u8::from(self).put(table, field);
    }
}

/// A table that is being filled. A field that is not set is zero.
pub(super) struct Table<'l, const TABLE: usize, const VTABLE: usize> {
    layout: &'l Layout<TABLE, VTABLE>,
    bytes: [u8; TABLE],
    /// The table ends after this many bytes.
    written: usize,
    vtable: [u8; VTABLE],
}

impl<const TABLE: usize, const VTABLE: usize> Table<'_, TABLE, VTABLE> {
    /// Its vtable.
    pub(super) const fn vtable_bytes(&self) -> &[u8] {
        &self.vtable
    }

    /// Its bytes, for [`Layout::overwrite`].
    pub(super) const fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Sets a field.
    #[inline]
    pub(super) fn set<const BYTES: usize>(&mut self, field: VOffsetT, value: [u8; BYTES]) {
        let at = self.layout.at(field);
        self.bytes[at..at + BYTES].copy_from_slice(&value);
    }

    /// Sets a field, or leaves it out.
    #[inline]
    pub(super) fn set_if<const BYTES: usize>(&mut self, field: VOffsetT, value: Option<[u8; BYTES]>) {
        match value {
            Some(value) => self.set(field, value),
            None => self.leave_out(field, true),
        }
    }

    /// Sets the field with the last place, or ends the table before it.
    #[inline]
    pub(super) fn set_last_if<const BYTES: usize>(&mut self, field: VOffsetT, value: Option<[u8; BYTES]>) {
        if value.is_none() {
            self.written = self.layout.at(field);
            [self.vtable[2], self.vtable[3]] = (self.written as u16).to_le_bytes();
        }
        self.set_if(field, value);
    }

    /// Lets a field refer to the string that follows the table.
    #[inline]
    fn refer_behind(&mut self, field: VOffsetT) {
        const { assert!(TABLE.is_multiple_of(REFERENCE), "the length of the string is aligned") };
        self.set(field, ((TABLE - self.layout.at(field)) as u32).to_le_bytes());
    }

    /// Leaves a field out if `is_absent`.
    #[inline]
    pub(super) fn leave_out(&mut self, field: VOffsetT, is_absent: bool) {
        if is_absent {
            self.vtable[usize::from(field)..][..size_of::<VOffsetT>()].fill(0);
        }
    }
}

/// A frame at the end of the send buffer. Places are offsets from the start of its body.
pub(super) struct FrameWriter<'o> {
    out: &'o mut Vec<u8>,
    frame_at: usize,
}

impl<'o> FrameWriter<'o> {
    /// Begins a frame, and reserves this many bytes for its body.
    pub(super) fn begin(out: &'o mut Vec<u8>, kind: FrameKind, id: CorrelationId, body_bytes: usize) -> Self {
        let frame_at = out.len();
        out.reserve(FRAME_HEADER_BYTES + body_bytes);
        out.extend_from_slice(&FrameHeader::new(kind, 0, id).encode());
        out.extend_from_slice(&[0; REFERENCE]);
        out.extend_from_slice(FRAME_IDENTIFIER.as_bytes());
        Self { out, frame_at }
    }

    /// The place of the next byte.
    pub(super) fn place(&self) -> usize {
        self.out.len() - self.frame_at - FRAME_HEADER_BYTES
    }

    /// Pads so that the place `ahead` bytes further on is aligned to a power of two.
    #[inline]
    fn align(&mut self, align: usize, ahead: usize) {
        debug_assert!(align.is_power_of_two() && align <= FRAME_ALIGN_BYTES);
        let padding = (self.place() + ahead).wrapping_neg() & (align - 1);
        if padding > 0 {
            // All eight bytes and back is faster than a copy of a few.
            let end = self.out.len() + padding;
            self.out.extend_from_slice(&[0; FRAME_ALIGN_BYTES]);
            self.out.truncate(end);
        }
    }

    /// Writes a reference at `from` to `to`, which lies after it.
    pub(super) fn refer(&mut self, from: usize, to: usize) {
        let at = self.frame_at + FRAME_HEADER_BYTES + from;
        self.out[at..at + REFERENCE].copy_from_slice(&((to - from) as u32).to_le_bytes());
    }

    /// Writes the reference of a field of the table at `table` to `to`.
    pub(super) fn refer_field<const T: usize, const V: usize>(
        &mut self,
        (layout, table): (&Layout<T, V>, usize),
        field: VOffsetT,
        to: usize,
    ) {
        self.refer(table + layout.at(field), to);
    }

    /// Appends the vtable of a layout. Returns its place.
    pub(super) fn vtable(&mut self, vtable: &[u8]) -> usize {
        self.align(size_of::<VOffsetT>(), 0);
        let place = self.place();
        self.out.extend_from_slice(vtable);
        place
    }

    /// Appends a table, after its vtable. Returns its place.
    pub(super) fn table<const T: usize, const V: usize>(&mut self, mut table: Table<'_, T, V>) -> usize {
        let vtable = self.vtable(&table.vtable);
        self.table_with_vtable(vtable, &mut table)
    }

    /// Appends a table with the vtable at `vtable`. Returns its place.
    #[inline]
    pub(super) fn table_with_vtable<const T: usize, const V: usize>(
        &mut self,
        vtable: usize,
        table: &mut Table<'_, T, V>,
    ) -> usize {
        self.align(FRAME_ALIGN_BYTES, 0);
        let place = self.place();
        table.bytes[..REFERENCE].copy_from_slice(&((place - vtable) as i32).to_le_bytes());
        self.out.extend_from_slice(&table.bytes[..table.written]);
        place
    }

    /// Appends a table of `TABLE` bytes, and the string behind it, with the vtable at `vtable`. Returns the table's place,
    /// and its bytes for what the template does not say.
    #[inline]
    pub(super) fn table_of_template<const TABLE: usize, const BYTES: usize>(
        &mut self,
        vtable: usize,
        template: &Template<BYTES>,
    ) -> (usize, &mut [u8]) {
        const { assert!(TABLE <= BYTES, "the template begins with the table") };
        self.align(FRAME_ALIGN_BYTES, 0);
        let (place, from) = (self.place(), self.out.len());
        // All bytes and back is faster than a copy of a number that is not known at compile time, and two short copies are
        // faster than a long one, which would be a call.
        let (first, rest) = template.bytes.split_at(BYTES / 2);
        self.out.extend_from_slice(first);
        self.out.extend_from_slice(rest);
        self.out.truncate(from + template.used);
        let table = &mut self.out[from..from + TABLE];
        table[..REFERENCE].copy_from_slice(&((place - vtable) as i32).to_le_bytes());
        (place, table)
    }

    /// Appends a string. Returns its place.
    pub(super) fn string(&mut self, text: &str) -> usize {
        let place = self.vector(text.len(), 1, text.as_bytes());
        self.out.push(0);
        place
    }

    /// Appends a vector of `len` elements with this alignment, given their bytes. Returns its place.
    pub(super) fn vector(&mut self, len: usize, align: usize, elements: &[u8]) -> usize {
        let place = self.begin_vector(len, align);
        self.out.extend_from_slice(elements);
        place
    }

    /// Appends the length of a vector; its elements come next. Returns its place.
    pub(super) fn begin_vector(&mut self, len: usize, align: usize) -> usize {
        self.align(align.max(REFERENCE), REFERENCE);
        let place = self.place();
        // The limits of its contents keep a body far below 4 GiB.
        self.out.extend_from_slice(&(len as u32).to_le_bytes());
        place
    }

    /// Appends a vector of `len` references. Returns its place; element `n` is at [`element`].
    pub(super) fn references(&mut self, len: usize) -> usize {
        let place = self.begin_vector(len, REFERENCE);
        self.out.resize(self.out.len() + len * REFERENCE, 0);
        place
    }

    /// Appends the bytes of a vector or a table.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Ends the frame, whose body is the table at `root`.
    pub(super) fn end(mut self, root: usize) {
        self.refer(0, root);
        self.align(FRAME_ALIGN_BYTES, 0);
        let body_bytes = self.place() as u32;
        self.out[self.frame_at..][..size_of::<u32>()].copy_from_slice(&body_bytes.to_le_bytes());
    }
}

/// The place of element `n` of a vector of references.
pub(super) const fn element(vector: usize, n: usize) -> usize {
    vector + REFERENCE * (n + 1)
}
