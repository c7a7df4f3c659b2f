//! Reads the tables of a body: frequent ones on a fast path in one pass, and all others through flatbuffers' verifier.
//!
//! flatbuffers goes over a body twice: its verifier checks all of it, and accessors then look everything up again. The fast
//! path checks each value as it reads it, by the verifier's rules for bounds, alignment, UTF-8 and apparent size. If a body
//! breaks one of them, the fast path returns `None`, and the verifier decides and names the fault. Nothing is read from a
//! body that is not verified in one of the two ways.

use std::marker::PhantomData;

use flatbuffers::{Follow, ForwardsUOffset, InvalidFlatbuffer, VOffsetT, Vector, Verifiable, VerifierOptions};

use super::header::FRAME_IDENTIFIER;
use crate::error::{Error, Kind, Result};
use crate::limits::{FRAME_TABLE_DEPTH_MAX, NAME_BYTES_MAX};
use crate::schema_generated::routing as fb;

/// The bytes counted for each field beforehand. The rest of a larger field counts when it is read.
const FIELD_BYTES_COUNTED: usize = 16;

/// The most tables of a vector on the fast path; the verifier bounds longer ones.
const LISTED_MAX: usize = 1 << 10;

/// One table of a body.
pub(super) struct TableReader<'a> {
    body: &'a [u8],
    /// Where the table starts.
    at: usize,
    /// The body from there on; fields lie in it.
    fields: &'a [u8],
    /// The places of the fields: a `u16` for each, 0 = absent.
    vtable: &'a [u8],
    /// The remaining apparent size, bytes. Parts that overlap count each time.
    bytes_left: usize,
}

impl<'a> TableReader<'a> {
    /// The root table of a body.
    #[inline]
    pub(super) fn root(body: &'a [u8]) -> Option<Self> {
        let (head, _) = body.split_first_chunk::<8>()?;
        if head[4..] != *FRAME_IDENTIFIER.as_bytes() {
            return None;
        }
        let bytes_left = body.len().saturating_mul(APPARENT_SIZE_FACTOR).checked_sub(size_of::<u32>())?;
        Self::table_at(body, scalar_at(body, 0).map(u32::from_le_bytes)? as usize, bytes_left)
    }

    /// The table at a place.
    #[inline]
    fn table_at(body: &'a [u8], at: usize, bytes_left: usize) -> Option<Self> {
        let distance = i32::from_le_bytes(scalar_at(body, at)?);
        // A vtable before the table has a distance above zero.
        let vtable_at = at.checked_add_signed((distance as isize).checked_neg()?)?;
        let vtable_bytes = usize::from(u16::from_le_bytes(scalar_at(body, vtable_at)?));
        if !vtable_bytes.is_multiple_of(size_of::<VOffsetT>()) {
            return None;
        }
        let vtable = body.get(vtable_at..)?.get(..vtable_bytes)?;
        // Counts every field that may be there at once; the verifier counts those that are.
        let entries = vtable_bytes / size_of::<VOffsetT>();
        let fields_bytes = entries * (size_of::<VOffsetT>() + FIELD_BYTES_COUNTED);
        let bytes_left =
            bytes_left.checked_sub(size_of::<i32>() + size_of::<VOffsetT>() + vtable_bytes + fields_bytes)?;
        Some(Self { body, at, fields: body.get(at..)?, vtable, bytes_left })
    }

    /// The place of a field after the table's start, if it is there.
    #[inline]
    pub(super) fn place(&self, field: VOffsetT) -> Option<usize> {
        let entry = self.vtable.get(usize::from(field)..)?.first_chunk()?;
        match u16::from_le_bytes(*entry) {
            0 => None,
            behind => Some(usize::from(behind)),
        }
    }

    /// The value at a place after the table's start, aligned to its own size.
    #[inline]
    fn scalar<const BYTES: usize>(&self, behind: usize) -> Option<[u8; BYTES]> {
        let value = self.fields.get(behind..)?.first_chunk()?;
        (self.at + behind).is_multiple_of(BYTES).then_some(*value)
    }

    /// A struct at a place after the table's start.
    #[inline]
    fn packed<const BYTES: usize>(&mut self, behind: usize) -> Option<[u8; BYTES]> {
        self.bytes_left = self.bytes_left.checked_sub(BYTES.saturating_sub(FIELD_BYTES_COUNTED))?;
        self.fields.get(behind..)?.first_chunk().copied()
    }

    /// The target, in the body, of the offset at a place after the table's start.
    #[inline]
    fn follow(&self, behind: usize) -> Option<usize> {
        let forward = u32::from_le_bytes(self.scalar(behind)?) as usize;
        (self.at + behind).checked_add(forward)
    }

    /// The fields of another table, at a place in the body.
    #[inline]
    fn inner<T: HotTable<'a>>(&mut self, start: usize) -> Option<T> {
        let mut inner = Self::table_at(self.body, start, self.bytes_left)?;
        let fields = T::read(&mut inner)?;
        self.bytes_left = inner.bytes_left;
        Some(fields)
    }

    /// The fields of the table that a field of this one refers to.
    #[inline]
    pub(super) fn nested<T: HotTable<'a>>(&mut self, behind: usize) -> Option<T> {
        let start = self.follow(behind)?;
        self.inner(start)
    }

    /// The elements of a vector, as one slice of bytes.
    #[inline]
    fn elements(&mut self, behind: usize, (element_bytes, align): (usize, usize)) -> Option<&'a [u8]> {
        let start = self.follow(behind)?;
        let len = u32::from_le_bytes(scalar_at(self.body, start)?) as usize;
        let first = start + size_of::<u32>();
        let bytes = len.checked_mul(element_bytes)?;
        self.bytes_left = self.bytes_left.checked_sub(size_of::<u32>())?.checked_sub(bytes)?;
        let elements = self.body.get(first..)?.get(..bytes)?;
        first.is_multiple_of(align).then_some(elements)
    }
}

/// The value at a place in a body, aligned to its own size.
#[inline]
fn scalar_at<const BYTES: usize>(body: &[u8], at: usize) -> Option<[u8; BYTES]> {
    let value = body.get(at..)?.first_chunk()?;
    at.is_multiple_of(BYTES).then_some(*value)
}

/// A value of a field.
pub(super) trait Field<'a>: Default {
    /// The value of the generated accessor.
    type Accessed;

    /// Converts the value of a verified table.
    fn of(accessed: Self::Accessed) -> Self;

    /// Reads the value at a place after the table's start; `None` = the verifier decides.
    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self>;
}

macro_rules! scalar_fields {
    ($($type:ident)*) => {$(
        impl Field<'_> for $type {
            type Accessed = Self;

            #[inline]
            fn of(accessed: Self) -> Self {
                accessed
            }

            #[inline]
            fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
                table.scalar(at).map(Self::from_le_bytes)
            }
        }
    )*};
}

scalar_fields!(u8 u16 u32 u64 i32 f64);

impl Field<'_> for bool {
    type Accessed = Self;

    #[inline]
    fn of(accessed: Self) -> Self {
        accessed
    }

    #[inline]
    fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
        u8::at(table, at).map(|byte| byte != 0)
    }
}

macro_rules! enum_fields {
    ($($type:ident)*) => {$(
        impl Field<'_> for fb::$type {
            type Accessed = Self;

            #[inline]
            fn of(accessed: Self) -> Self {
                accessed
            }

            #[inline]
            fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
                u8::at(table, at).map(Self)
            }
        }
    )*};
}

enum_fields!(Window SeedRule MatchStatus Mode WorkerState);

/// A struct of the schema: bytes in a fixed order.
pub(super) trait Struct: Copy {
    /// The structs in a slice of bytes.
    fn all(bytes: &[u8]) -> impl ExactSizeIterator<Item = Self>;
}

macro_rules! structs {
    ($($type:ident)*) => {$(
        impl Struct for fb::$type {
            fn all(bytes: &[u8]) -> impl ExactSizeIterator<Item = Self> {
                bytes.as_chunks().0.iter().copied().map(Self)
            }
        }

        impl<'a> Field<'a> for Option<fb::$type> {
            type Accessed = Option<&'a fb::$type>;

            #[inline]
            fn of(accessed: Self::Accessed) -> Self {
                accessed.copied()
            }

            #[inline]
            fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
                Some(Some(fb::$type(table.packed(at)?)))
            }
        }
    )*};
}

structs!(WorkerRef BookingHandle MediaHash BlockRange TierBlocks Trust TraceContext);

impl<'a> Field<'a> for Option<&'a str> {
    type Accessed = Self;

    #[inline]
    fn of(accessed: Self) -> Self {
        accessed
    }

    #[inline]
    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        let bytes = table.elements(at, (1, 1))?;
        Some(Some(std::str::from_utf8(bytes).ok()?))
    }
}

/// The bytes of a vector of numbers or structs.
pub(super) struct Elements<'a, T> {
    /// `None` = the field is absent.
    pub(super) bytes: Option<&'a [u8]>,
    of: PhantomData<T>,
}

impl<T: Struct> Elements<'_, T> {
    /// The elements; none if the field is absent.
    pub(super) fn structs(&self) -> impl ExactSizeIterator<Item = T> {
        T::all(self.bytes.unwrap_or_default())
    }
}

impl<T> Default for Elements<'_, T> {
    fn default() -> Self {
        Self { bytes: None, of: PhantomData }
    }
}

impl<'a, T: 'a> Field<'a> for Elements<'a, T> {
    type Accessed = Option<Vector<'a, T>>;

    #[inline]
    fn of(accessed: Self::Accessed) -> Self {
        Self { bytes: accessed.map(|vector| vector.bytes()), of: PhantomData }
    }

    #[inline]
    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        let bytes = table.elements(at, (size_of::<T>(), align_of::<T>()))?;
        Some(Self { bytes: Some(bytes), of: PhantomData })
    }
}

/// A table with a fast path.
pub(super) trait HotTable<'a>: Sized {
    /// The generated type of the table.
    type Table: Follow<'a, Inner = Self::Table> + Verifiable + 'a;

    /// Converts the fields of a verified table.
    fn of(table: Self::Table) -> Self;

    /// Reads the fields; `None` = the verifier decides.
    fn read(table: &mut TableReader<'a>) -> Option<Self>;

    /// The fields of the root table of a body: on the fast path, or by the verifier.
    ///
    /// # Errors
    /// As [`root`].
    #[inline]
    fn of_body(body: &'a [u8], tables_max: usize) -> Result<Self> {
        match TableReader::root(body).and_then(|mut table| Self::read(&mut table)) {
            Some(fields) => {
                debug_assert!(root::<Self::Table>(body, tables_max).is_ok(), "nothing gets past the verifier");
                Ok(fields)
            }
            None => root::<Self::Table>(body, tables_max).map(Self::of),
        }
    }
}

/// Tables that a vector refers to.
pub(super) struct Listed<T>(pub(super) Vec<T>);

impl<T> Default for Listed<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'a, T: HotTable<'a>> Field<'a> for Listed<T> {
    type Accessed = Vector<'a, ForwardsUOffset<T::Table>>;

    fn of(accessed: Self::Accessed) -> Self {
        Self(accessed.iter().map(T::of).collect())
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        let references = table.elements(at, (size_of::<u32>(), align_of::<u32>()))?;
        // The verifier reads each once more.
        table.bytes_left = table.bytes_left.checked_sub(references.len())?;
        let references = references.as_chunks().0;
        if references.len() > LISTED_MAX {
            return None;
        }
        let mut place = table.follow(at)? + size_of::<u32>();
        let mut listed = Vec::with_capacity(references.len());
        for reference in references {
            let start = place.checked_add(u32::from_le_bytes(*reference) as usize)?;
            listed.push(table.inner(start)?);
            place += size_of::<u32>();
        }
        Some(Self(listed))
    }
}

impl<'a, T: HotTable<'a>> Field<'a> for Option<Listed<T>> {
    type Accessed = Option<Vector<'a, ForwardsUOffset<T::Table>>>;

    fn of(accessed: Self::Accessed) -> Self {
        accessed.map(Listed::of)
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        Listed::at(table, at).map(Some)
    }
}

/// Lists the fields of tables once, for both ways of reading them: `name: type`, then the value of an absent field, if that is
/// not its type's default. `unless` names fields that only the verifier's way reads; the table is kept for them.
macro_rules! hot_tables {
    ($($(#[$doc:meta])* $name:ident of $table:ident $(unless $kept:ident: $($rare:ident)|*)? {
        $($field:ident: $type:ty = $slot:ident $(or $absent:expr)?,)*
    })*) => {$(
        $(#[$doc])*
        pub(super) struct $name<'a> {
            $(pub(super) $field: $type,)*
            $(pub(super) $kept: Option<fb::$table<'a>>,)?
            lifetime: std::marker::PhantomData<&'a ()>,
        }

        impl<'a> HotTable<'a> for $name<'a> {
            type Table = fb::$table<'a>;

            #[inline]
            fn of(table: fb::$table<'a>) -> Self {
                Self {
                    $($field: <$type>::of(table.$field()),)*
                    $($kept: Some(table),)?
                    lifetime: std::marker::PhantomData,
                }
            }

            #[inline]
            fn read(table: &mut TableReader<'a>) -> Option<Self> {
                $(if $(table.place(fb::$table::$rare).is_some())||* {
                    return None;
                })?
                Some(Self {
                    $($field: match table.place(fb::$table::$slot) {
                        Some(at) => <$type>::at(table, at)?,
                        None => hot_tables!(@absent $($absent)?),
                    },)*
                    $($kept: None,)?
                    lifetime: std::marker::PhantomData,
                })
            }
        }
    )*};
    (@absent) => { Default::default() };
    (@absent $absent:expr) => { $absent };
}

pub(super) use hot_tables;

/// The apparent size of a body's objects may be this many times its own size. Vectors may share elements, and tables vtables,
/// but a small body must not cost a large walk.
pub(super) const APPARENT_SIZE_FACTOR: usize = 8;

/// Verifies a body, and returns its root table.
///
/// # Errors
/// [`Kind::Malformed`] with the verifier's reason.
pub(super) fn root<'a, T>(body: &'a [u8], tables_max: usize) -> Result<T::Inner>
where
    T: Follow<'a> + Verifiable + 'a,
{
    if body.get(4..8) != Some(FRAME_IDENTIFIER.as_bytes()) {
        return Err(malformed("the body does not carry the identifier KVRT"));
    }
    let options = VerifierOptions {
        max_depth: FRAME_TABLE_DEPTH_MAX,
        max_tables: tables_max,
        max_apparent_size: body.len().saturating_mul(APPARENT_SIZE_FACTOR),
        ignore_missing_null_terminator: true,
    };
    flatbuffers::root_with_opts::<T>(&options, body).map_err(|fault| malformed(&reason(&fault)))
}

/// A verifier's reason on one line, with the field that it names.
fn reason(fault: &InvalidFlatbuffer) -> String {
    let text = fault.to_string();
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > NAME_BYTES_MAX {
        line.truncate(line.floor_char_boundary(NAME_BYTES_MAX));
    }
    line
}

/// The error for a body that does not fit its header.
pub(super) fn malformed(what: &str) -> Error {
    Error::new(
        Kind::Malformed,
        what,
        "encode the body with schemas/routing.fbs and the file identifier KVRT, padded to 8 bytes",
    )
}
