//! Reading the tables of a body in one go, each value checked where it is taken.
//!
//! flatbuffers goes over a body twice: its verifier proves all of it, then accessors look everything up again. Here a
//! value is proven as it is read, by the verifier's rules of bounds, alignment, UTF-8 and apparent size. A body that
//! breaks one of them is not judged here: `None` hands it to the verifier, which has the last word and says what is
//! wrong with it.

use std::marker::PhantomData;

use flatbuffers::{VOffsetT, Vector};

use super::header::FRAME_IDENTIFIER;
use super::verify::APPARENT_SIZE_FACTOR;
use crate::schema_generated::routing as fb;

/// One table of a body.
pub(super) struct TableReader<'a> {
    body: &'a [u8],
    /// Where the table starts; fields lie behind it.
    at: usize,
    /// Where behind it: a `u16` for each field, 0 = absent.
    vtable: &'a [u8],
    /// Bytes that what is read may still seem to take: parts that overlap count each time.
    bytes_left: usize,
}

impl<'a> TableReader<'a> {
    /// The table that a body is.
    pub(super) fn root(body: &'a [u8]) -> Option<Self> {
        if body.get(4..8)? != FRAME_IDENTIFIER.as_bytes() {
            return None;
        }
        let bytes_left = body.len().saturating_mul(APPARENT_SIZE_FACTOR);
        let mut nowhere = Self { body, at: 0, vtable: &[], bytes_left };
        let at = nowhere.follow(0)?;
        nowhere.table_at(at)
    }

    /// The table at a place; it takes over what may still be read.
    fn table_at(&mut self, at: usize) -> Option<Self> {
        let distance = i32::from_le_bytes(self.scalar_at(at)?);
        // What lies before the table has a distance above zero.
        let vtable_at = at.checked_add_signed((distance as isize).checked_neg()?)?;
        let vtable_bytes = usize::from(u16::from_le_bytes(self.scalar_at(vtable_at)?));
        if !vtable_bytes.is_multiple_of(size_of::<VOffsetT>()) {
            return None;
        }
        let vtable = self.bytes_at(vtable_at, vtable_bytes)?;
        // Its entries count again when they are looked up.
        let bytes_left = self.bytes_left.checked_sub(vtable_bytes)?;
        Some(Self { body: self.body, at, vtable, bytes_left })
    }

    fn bytes_at(&mut self, at: usize, bytes: usize) -> Option<&'a [u8]> {
        self.bytes_left = self.bytes_left.checked_sub(bytes)?;
        self.body.get(at..)?.get(..bytes)
    }

    /// What is aligned to its own size.
    fn scalar_at<const BYTES: usize>(&mut self, at: usize) -> Option<[u8; BYTES]> {
        if !at.is_multiple_of(BYTES) {
            return None;
        }
        self.bytes_at(at, BYTES)?.try_into().ok()
    }

    /// Where the offset at a place leads.
    fn follow(&mut self, at: usize) -> Option<usize> {
        at.checked_add(u32::from_le_bytes(self.scalar_at(at)?) as usize)
    }

    /// Where a field lies, if it is there.
    fn place(&self, field: VOffsetT) -> Option<usize> {
        let entry = self.vtable.get(usize::from(field)..)?.first_chunk()?;
        match u16::from_le_bytes(*entry) {
            0 => None,
            behind => Some(self.at + usize::from(behind)),
        }
    }

    /// Whether a field is there.
    pub(super) fn has(&self, field: VOffsetT) -> bool {
        self.place(field).is_some()
    }

    /// The elements of a vector, one behind the other.
    fn elements_at(&mut self, at: usize, (element_bytes, align): (usize, usize)) -> Option<&'a [u8]> {
        let start = self.follow(at)?;
        let len = u32::from_le_bytes(self.scalar_at(start)?) as usize;
        let first = start + size_of::<u32>();
        if !first.is_multiple_of(align) {
            return None;
        }
        self.bytes_at(first, len.checked_mul(element_bytes)?)
    }
}

/// What a field may hold.
pub(super) trait Field<'a>: Default {
    /// What the generated accessor of such a field gives.
    type Accessed;

    /// Takes it from a table that is verified.
    fn of(accessed: Self::Accessed) -> Self;

    /// Reads what lies at a place; `None` = it is for the verifier to judge.
    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self>;

    /// Reads a field, or what it holds where it is absent.
    fn read(table: &mut TableReader<'a>, field: VOffsetT, absent: Self) -> Option<Self> {
        match table.place(field) {
            Some(at) => Self::at(table, at),
            None => Some(absent),
        }
    }
}

macro_rules! scalar_fields {
    ($($type:ident)*) => {$(
        impl Field<'_> for $type {
            type Accessed = Self;

            fn of(accessed: Self) -> Self {
                accessed
            }

            fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
                table.scalar_at(at).map(Self::from_le_bytes)
            }
        }
    )*};
}

scalar_fields!(u8 u16 u32 u64 i32 f64);

impl Field<'_> for bool {
    type Accessed = Self;

    fn of(accessed: Self) -> Self {
        accessed
    }

    fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
        u8::at(table, at).map(|byte| byte != 0)
    }
}

macro_rules! enum_fields {
    ($($type:ident)*) => {$(
        impl Field<'_> for fb::$type {
            type Accessed = Self;

            fn of(accessed: Self) -> Self {
                accessed
            }

            fn at(table: &mut TableReader<'_>, at: usize) -> Option<Self> {
                u8::at(table, at).map(Self)
            }
        }
    )*};
}

enum_fields!(Window SeedRule);

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

            fn of(accessed: Self::Accessed) -> Self {
                accessed.copied()
            }

            fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
                let bytes = table.bytes_at(at, size_of::<fb::$type>())?;
                Some(Some(fb::$type(bytes.try_into().ok()?)))
            }
        }
    )*};
}

structs!(WorkerRef BookingHandle MediaHash BlockRange);

impl<'a> Field<'a> for Option<&'a str> {
    type Accessed = Self;

    fn of(accessed: Self) -> Self {
        accessed
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        let bytes = table.elements_at(at, (1, 1))?;
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

    fn of(accessed: Self::Accessed) -> Self {
        Self { bytes: accessed.map(|vector| vector.bytes()), of: PhantomData }
    }

    fn at(table: &mut TableReader<'a>, at: usize) -> Option<Self> {
        let bytes = table.elements_at(at, (size_of::<T>(), align_of::<T>()))?;
        Some(Self { bytes: Some(bytes), of: PhantomData })
    }
}

/// A table whose fields are read in one go.
pub(super) trait HotTable<'a>: Sized {
    /// The same of the schema.
    type Table: flatbuffers::Follow<'a> + flatbuffers::Verifiable + 'a;

    /// Takes the fields of a table that is verified.
    fn of(table: <Self::Table as flatbuffers::Follow<'a>>::Inner) -> Self;

    /// Reads them; `None` = it is for the verifier to judge.
    fn read(table: &mut TableReader<'a>) -> Option<Self>;
}

/// Reads a table that another refers to.
pub(super) fn nested<'a, T: HotTable<'a>>(table: &mut TableReader<'a>, at: usize) -> Option<T> {
    let start = table.follow(at)?;
    let mut inner = table.table_at(start)?;
    let fields = T::read(&mut inner)?;
    table.bytes_left = inner.bytes_left;
    Some(fields)
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

            fn of(table: fb::$table<'a>) -> Self {
                Self {
                    $($field: <$type>::of(table.$field()),)*
                    $($kept: Some(table),)?
                    lifetime: std::marker::PhantomData,
                }
            }

            fn read(table: &mut TableReader<'a>) -> Option<Self> {
                $(if $(table.has(fb::$table::$rare))||* {
                    return None;
                })?
                Some(Self {
                    $($field: <$type>::read(table, fb::$table::$slot, hot_tables!(@absent $($absent)?))?,)*
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
