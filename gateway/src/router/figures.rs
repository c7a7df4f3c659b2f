//! What the router counts.

macro_rules! figures {
    (
        $(#[$enum_doc:meta])* $figure:ident,
        $(#[$struct_doc:meta])* $figures:ident { $($(#[$doc:meta])* $variant:ident = $label:literal,)* }
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        pub enum $figure { $($(#[$doc])* $variant,)* }

        impl $figure {
            /// Every figure.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in metrics.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)* }
            }
        }

        $(#[$struct_doc])*
        #[derive(Debug)]
        pub struct $figures([::std::sync::atomic::AtomicU64; $figure::ALL.len()]);

        impl Default for $figures {
            fn default() -> Self {
                Self(std::array::from_fn(|_| ::std::sync::atomic::AtomicU64::new(0)))
            }
        }

        impl $figures {
            pub(in crate::router) fn count(&self, figure: $figure) {
                // Relaxed: a count on its own; no other memory depends on it.
                self.0[figure as usize].fetch_add(1, ::std::sync::atomic::Ordering::Relaxed);
            }

            /// The count since the start.
            #[must_use]
            pub fn get(&self, figure: $figure) -> u64 {
                self.0[figure as usize].load(::std::sync::atomic::Ordering::Relaxed)
            }
        }
    };
}

pub(super) use figures;

figures! {
    /// How a question to the router ended.
    RouterFigure,
    /// How the questions to the router ended, by [`RouterFigure`].
    RouterFigures {
        /// The daemon decided, by caches and load.
        Daemon = "daemon",
        /// The daemon decided by load alone, because the prompt has no tokens.
        LoadOnly = "load_only",
        /// The client's fallback decided, among the workers that the daemon last reported.
        Fallback = "fallback",
        /// The router decided by its own requests in flight: it knows no workers from the daemon, or the daemon does
        /// not know the model.
        Alone = "alone",
        /// No engine may run the request.
        Nobody = "nobody",
        /// Every engine is busy, or the queue is full.
        Busy = "busy",
        /// The request waited until its deadline.
        Deadline = "deadline",
        /// The daemon refused the request for another reason.
        Refused = "refused",
    }
}
