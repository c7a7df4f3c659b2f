//! Which seed a stored chain is hashed under: pure.
//!
//! LoRA and salt enter the hash of every block of a chain, but engines name the salt only at the root.
//! So a child takes the seed of its parent's binding, and where that is not known the event must say
//! enough by itself. Binding under a guessed seed could show one tenant's blocks to another's prompt,
//! so whatever is not certain is not bound.
//!
//! | salt of the event | parent | its seed | then |
//! |---|---|---|---|
//! | unknown | any | any | unknown root |
//! | a relay's seed | held | another | conflict |
//! | a relay's seed | any other | | bind under it |
//! | inherited, or named | none | | bind under LoRA and salt (inherited = none) |
//! | named | held | that of LoRA and salt | bind under it |
//! | named | held | another | conflict |
//! | inherited | held | that of neither LoRA nor salt, and the event names a LoRA | conflict |
//! | inherited | held | any other | bind under the parent's |
//! | named | not held | | bind under LoRA and salt |
//! | inherited | not held, the space has no salts | | bind under LoRA |
//! | inherited | not held, the space may have salts | | unknown root |
//!
//! A seed cannot be taken apart again, so a LoRA name that contradicts a salted parent is not noticed here. The
//! engine's own block hash covers the LoRA, so no engine builds such a chain.

use crate::event::Salt;
use crate::hash;
use crate::ids::Seed;

/// What precedes the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Nothing: it starts at the root.
    Root,
    /// A block bound under this seed.
    Held(Seed),
    /// A block that is not bound.
    NotHeld,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeedOf {
    /// Hash and bind under this seed.
    Known(Seed),
    /// The seed cannot be known.
    UnknownRoot,
    /// The event contradicts its parent.
    Conflict,
}

/// Decides by the table above. `salts_possible` is false where the space's record says that none are used.
pub(super) fn seed_of(before: Before, lora: Option<&str>, salt: Salt<'_>, salts_possible: bool) -> SeedOf {
    let said = match salt {
        Salt::Unknown => return SeedOf::UnknownRoot,
        Salt::Inherited => None,
        Salt::Of(salt) => Some(salt),
        Salt::Seed(seed) => return relayed(before, seed),
    };
    match before {
        Before::Root => SeedOf::Known(hash::seed(lora, said)),
        Before::Held(parent) => {
            let contradicts = match said {
                Some(_) => hash::seed(lora, said) != parent,
                None => lora.is_some() && parent == hash::seed(None, None),
            };
            if contradicts { SeedOf::Conflict } else { SeedOf::Known(parent) }
        }
        Before::NotHeld if said.is_some() || !salts_possible => SeedOf::Known(hash::seed(lora, said)),
        Before::NotHeld => SeedOf::UnknownRoot,
    }
}

/// Decides where a relay says the seed itself.
fn relayed(before: Before, seed: Seed) -> SeedOf {
    match before {
        Before::Held(parent) if parent != seed => SeedOf::Conflict,
        Before::Root | Before::Held(_) | Before::NotHeld => SeedOf::Known(seed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_table() {
        let (plain, lora, salted) = (hash::seed(None, None), hash::seed(Some("l"), None), hash::seed(None, Some("s")));
        let both = hash::seed(Some("l"), Some("s"));
        let rows: &[(Before, Option<&str>, Salt<'_>, bool, SeedOf)] = &[
            (Before::Root, None, Salt::Unknown, true, SeedOf::UnknownRoot),
            (Before::Root, None, Salt::Unknown, false, SeedOf::UnknownRoot),
            (Before::Held(plain), None, Salt::Unknown, true, SeedOf::UnknownRoot),
            (Before::Root, None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Held(both), None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Held(plain), None, Salt::Seed(both), false, SeedOf::Conflict),
            (Before::NotHeld, None, Salt::Seed(both), true, SeedOf::Known(both)),
            (Before::Root, None, Salt::Inherited, true, SeedOf::Known(plain)),
            (Before::Root, Some("l"), Salt::Inherited, true, SeedOf::Known(lora)),
            (Before::Root, None, Salt::Of("s"), true, SeedOf::Known(salted)),
            (Before::Root, Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::Held(both), Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::Held(plain), None, Salt::Of("s"), true, SeedOf::Conflict),
            (Before::Held(lora), Some("l"), Salt::Of("s"), true, SeedOf::Conflict),
            (Before::Held(plain), Some("l"), Salt::Inherited, true, SeedOf::Conflict),
            (Before::Held(salted), None, Salt::Inherited, true, SeedOf::Known(salted)),
            (Before::Held(both), Some("l"), Salt::Inherited, true, SeedOf::Known(both)),
            (Before::Held(lora), None, Salt::Inherited, true, SeedOf::Known(lora)),
            (Before::NotHeld, Some("l"), Salt::Of("s"), true, SeedOf::Known(both)),
            (Before::NotHeld, Some("l"), Salt::Inherited, false, SeedOf::Known(lora)),
            (Before::NotHeld, None, Salt::Inherited, false, SeedOf::Known(plain)),
            (Before::NotHeld, Some("l"), Salt::Inherited, true, SeedOf::UnknownRoot),
        ];
        for (before, lora, salt, salts_possible, seed) in rows {
            let got = seed_of(*before, *lora, *salt, *salts_possible);
            assert_eq!(got, *seed, "{before:?} {lora:?} {salt:?} {salts_possible}");
        }
    }
}
