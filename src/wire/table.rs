//! Reading the tables of a body in one go, each value checked where it is taken.
//!
//! flatbuffers goes over a body twice: its verifier proves all of it, then accessors look everything up again. Here a
//! value is proven as it is read, by the verifier's rules of bounds, alignment, UTF-8 and apparent size. A body that
//! breaks one of them is not judged here: `None` hands it to the verifier, which has the last word and says what is
//! wrong with it.

use std::marker::PhantomData;

use flatbuffers::{Follow, ForwardsUOffset, VOffsetT, Vector, Verifiable};

use super::header::FRAME_IDENTIFIER;
use super::verify::{self, APPARENT_SIZE_FACTOR};
use crate::error::Result;
use crate::schema_generated::routing as fb;

/// What is counted for a field beforehand, bytes; larger ones count for the rest when they are read.
const FIELD_BYTES_COUNTED: usize = 16;

/// Tables in a vector that is read in one go: more is the verifier's to bound.
const LISTED_MAX: usize = 1 << 10;

/// One table of a body.
pub(super) struct TableReader<'a> {
    body: &'a [u8],
    /// Where the table starts.
    at: usize,
    /// The body from there on; fields lie in it.
    fields: &'a [u8],
    /// Where in it: a `u16` for each field, 0 = absent.
    vtable: &'a [u8],
    /// Bytes that what is read may still seem to take: parts that overlap count each time.
    bytes_left: usize,
}

impl<'a> TableReader<'a> {
    /// The table that a body is.
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
        // What lies before the table has a distance above zero.
        let vtable_at = at.checked_add_signed((distance as isize).checked_neg()?)?;
        let vtable_bytes = usize::from(u16::from_le_bytes(scalar_at(body, vtable_at)?));
        if !vtable_bytes.is_multiple_of(size_of::<VOffsetT>()) {
            return None;
        }
        let vtable = body.get(vtable_at..)?.get(..vtable_bytes)?;
        // Counted at once for every field that may be there; the verifier counts those that are.
        let entries = vtable_bytes / size_of::<VOffsetT>();
        let fields_bytes = entries * (size_of::<VOffsetT>() + FIELD_BYTES_COUNTED);
        let bytes_left =
            bytes_left.checked_sub(size_of::<i32>() + size_of::<VOffsetT>() + vtable_bytes + fields_bytes)?;
        Some(Self { body, at, fields: body.get(at..)?, vtable, bytes_left })
    }

    /// Where a field lies behind the table's start, if it is there.
    #[inline]
    pub(super) fn place(&self, field: VOffsetT) -> Option<usize> {
        let entry = self.vtable.get(usize::from(field)..)?.first_chunk()?;
        match u16::from_le_bytes(*entry) {
            0 => None,
            behind => Some(usize::from(behind)),
        }
    }

    /// What lies at a place behind the table's start, aligned to its own size.
    #[inline]
    fn scalar<const BYTES: usize>(&self, behind: usize) -> Option<[u8; BYTES]> {
        let value = self.fields.get(behind..)?.first_chunk()?;
        (self.at + behind).is_multiple_of(BYTES).then_some(*value)
    }

    /// A struct at a place behind the table's start.
    #[inline]
    fn packed<const BYTES: usize>(&mut self, behind: usize) -> Option<[u8; BYTES]> {
        self.bytes_left = self.bytes_left.checked_sub(BYTES.saturating_sub(FIELD_BYTES_COUNTED))?;
        self.fields.get(behind..)?.first_chunk().copied()
    }

    /// Where in the body the offset at a place behind the table's start leads.
    #[inline]
    fn follow(&self, behind: usize) -> Option<usize> {
        let forward = u32::from_le_bytes(self.scalar(behind)?) as usize;
        (self.at + behind).checked_add(forward)
    }

    /// The fields of a table that this one refers to, at a place in the body.
    #[inline]
    fn inner<T: HotTable<'a>>(&mut self, start: usize) -> Option<T> {
        let mut inner = Self::table_at(self.body, start, self.bytes_left)?;
        let fields = T::read(&mut inner)?;
        self.bytes_left = inner.bytes_left;
        Some(fields)
    }

    /// The fields of a table that a field of this one refers to.
    #[inline]
    pub(super) fn nested<T: HotTable<'a>>(&mut self, behind: usize) -> Option<T> {
        let start = self.follow(behind)?;
        self.inner(start)
    }

    /// The elements of a vector, one behind the other.
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

/// What lies at a place in a body, aligned to its own size.
#[inline]
fn scalar_at<const BYTES: usize>(body: &[u8], at: usize) -> Option<[u8; BYTES]> {
    let value = body.get(at..)?.first_chunk()?;
    at.is_multiple_of(BYTES).then_some(*value)
}

/// What a field may hold.
pub(super) trait Field<'a>: Default {
    /// What the generated accessor of such a field gives.
    type Accessed;

    /// Takes it from a table that is verified.
    fn of(accessed: Self::Accessed) -> Self;

    /// Reads what lies at a place behind the table's start; `None` = it is for the verifier to judge.
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
    /// Those that lie one behind the other.
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

structs!(WorkerRef BookingHandle MediaHash BlockRange TierBlocks Trust);

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
    /// They, none where the field is absent.
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

/// A table whose fields are read in one go.
pub(super) trait HotTable<'a>: Sized {
    /// The same of the schema.
    type Table: Follow<'a, Inner = Self::Table> + Verifiable + 'a;

    /// Takes the fields of a table that is verified.
    fn of(table: Self::Table) -> Self;

    /// Reads them; `None` = it is for the verifier to judge.
    fn read(table: &mut TableReader<'a>) -> Option<Self>;

    /// The fields of the table that a body is, read in one go where nothing is odd about it.
    ///
    /// # Errors
    /// As [`verify::root`].
    #[inline]
    fn of_body(body: &'a [u8], tables_max: usize) -> Result<Self> {
        match TableReader::root(body).and_then(|mut table| Self::read(&mut table)) {
            Some(fields) => {
                debug_assert!(verify::root::<Self::Table>(body, tables_max).is_ok(), "nothing gets past the verifier");
                Ok(fields)
            }
            None => verify::root::<Self::Table>(body, tables_max).map(Self::of),
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
        // Each is looked at once more.
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

/// Lists the fields of tables once, for both ways of reading them: `name: type`, then what it holds where it is absent,
/// if that is not its type's default. `unless` names fields that only the verifier's way can read; the table is kept for
/// them.
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
