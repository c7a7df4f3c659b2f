//! A macro for lists of reasons: one line holds a reason's name, its meaning and all its other columns.

/// Makes an enum with a method for each column.
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
/// Besides the columns the enum has `ALL`, `name`, and `meaning`, which is the variant's doc comment. A variant may
/// have a number: `Unreadable(0) = "unreadable", …`.
macro_rules! reasons {
    (
        $(#[$of_list:meta])*
        $list:ident { $($columns:tt)* }
        $(#[doc = $doc:literal] $variant:ident $(($number:literal))? = $name:literal $(, $value:expr)*;)*
    ) => {
        $(#[$of_list])*
        pub enum $list { $(#[doc = $doc] $variant $(= $number)?,)* }

        impl $list {
            /// Every variant, in order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name used in logs, metrics and JSON.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What it means, in one sentence.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $doc.trim_ascii(),)* }
            }
        }

        $crate::reasons::reasons!(@column $list [$($variant ($($value),*))*] $($columns)*);
    };
    // One column: takes the first remaining value of every line.
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
