//! Lists of reasons: one line says what a reason is called, what it says, and whatever else is known of every one.

/// Makes an enum of a list, and a method of each column.
///
/// ```text
/// reasons! {
///     #[derive(Clone, Copy)]
///     List {
///         /// What an operator can do about it.
///         remedy: &'static str;
///     }
///     /// The file cannot be read.
///     Unreadable = "unreadable", "check the disk";
/// }
/// ```
///
/// Beside the columns there are `ALL`, `name` and `meaning`, which is the variant's doc. Where numbers matter a variant
/// has its own: `Unreadable(0) = "unreadable", …`.
macro_rules! reasons {
    (
        $(#[$of_list:meta])*
        $list:ident { $($columns:tt)* }
        $(#[doc = $doc:literal] $variant:ident $(($number:literal))? = $name:literal $(, $value:expr)*;)*
    ) => {
        $(#[$of_list])*
        pub enum $list { $(#[doc = $doc] $variant $(= $number)?,)* }

        impl $list {
            /// Every one, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in logs, metrics and JSON.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What it says, in one sentence.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $doc.trim_ascii(),)* }
            }
        }

        $crate::reasons::reasons!(@column $list [$($variant ($($value),*))*] $($columns)*);
    };
    // One column: the first value that is left of every line.
    (
        @column $list:ident [$($variant:ident ($value:expr $(, $rest:expr)*))*]
        $(#[$of_column:meta])* $column:ident: $type:ty;
        $($columns:tt)*
    ) => {
        impl $list {
            $(#[$of_column])*
            #[must_use]
            pub const fn $column(self) -> $type {
                match self { $(Self::$variant => $value,)* }
            }
        }

        $crate::reasons::reasons!(@column $list [$($variant ($($rest),*))*] $($columns)*);
    };
    (@column $list:ident [$($variant:ident ())*]) => {};
}

pub(crate) use reasons;
