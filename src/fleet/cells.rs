//! Cells that one ingest thread writes per event batch and every serving thread reads per decision.

use crate::ids::{EventSeq, Scheme, Window};
use crate::sync::{AtomicU64, Ordering};
use crate::trust::{Trust, TrustLevel, TrustReasons};

/// Counts changes of trust, so that a reader with cached trust knows when to read again.
#[derive(Debug)]
struct TrustChanges(AtomicU64);

/// Over all cells.
#[cfg(not(all(test, kvrouted_loom)))]
static TRUST_CHANGES: TrustChanges = TrustChanges(AtomicU64::new(0));
/// The model checker's atomics cannot be constants.
#[cfg(all(test, kvrouted_loom))]
static TRUST_CHANGES: std::sync::LazyLock<TrustChanges> = std::sync::LazyLock::new(|| TrustChanges(AtomicU64::new(0)));

impl TrustChanges {
    /// Call this after the cell shows the change.
    fn count(&self) {
        // Release: pairs with the Acquire in `seen`.
        self.0.fetch_add(1, Ordering::Release);
    }

    /// The count so far. A cell that is loaded after this call shows all counted changes.
    #[inline]
    fn seen(&self) -> u64 {
        // Acquire: pairs with the Release in `count`.
        self.0.load(Ordering::Acquire)
    }
}

/// Counts changes of the level, the reasons, or the start time of any worker's trust. Cells that are loaded after this
/// call are at least as new.
#[must_use]
#[inline]
pub fn trust_changes() -> u64 {
    TRUST_CHANGES.seen()
}

const NO_SEQ: u64 = u64::MAX;
const LEVEL_SHIFT: u32 = 56;

/// A worker's trust. Written by the worker's ingest thread, read by every core.
///
/// | atomic | written | read |
/// |---|---|---|
/// | `as_of_seq` | Release, after the index shows the whole batch | Acquire, before the index is read |
/// | level, reasons | Release: a fall before the index shows any of its cause, a rise after all of it | Acquire, before and after the index is read |
/// | [`trust_changes`] | Release, after level and reasons | Acquire, before level and reasons |
/// | the rest | Relaxed: each is whole by itself, and no other memory hangs on it | Relaxed |
///
/// Why no reader finds a worker emptied and still `exact`: the writer stores the fallen level before it empties the
/// worker. Emptying is the Release store HOLDERS of `index::shared_index` (for a removal, CLOSE of a node's header). A
/// reader whose Acquire load sees that store also sees the fallen level, because it loads the level again after the
/// walk ([`TrustCell::changed_since`]). `Stream::empty` keeps the writer's order: it takes the reason that lowers the
/// trust together with the order to empty.
#[derive(Debug)]
pub struct TrustCell {
    /// Level in the top byte, reasons below.
    packed: AtomicU64,
    since_unix_ms: AtomicU64,
    as_of_seq: AtomicU64,
    as_of_unix_ms: AtomicU64,
}

impl TrustCell {
    /// A cell that holds `trust`.
    #[must_use]
    pub fn new(trust: Trust) -> Self {
        let cell = Self::blank();
        cell.store(trust);
        cell
    }

    /// A cell that no other thread reads yet.
    fn blank() -> Self {
        Self {
            packed: AtomicU64::new(0),
            since_unix_ms: AtomicU64::new(0),
            as_of_seq: AtomicU64::new(NO_SEQ),
            as_of_unix_ms: AtomicU64::new(0),
        }
    }

    /// Replaces the trust. Call it after the index shows what `trust` speaks of; for a level that falls, also before.
    pub fn store(&self, trust: Trust) {
        self.store_counted(&trust, &TRUST_CHANGES);
    }

    fn store_counted(&self, trust: &Trust, changes: &TrustChanges) {
        if self.replace(trust) {
            changes.count();
        }
        self.as_of_unix_ms.store(trust.as_of_unix_ms, Ordering::Relaxed);
        // Release: pairs with the Acquire in `load`; a reader that sees this sequence sees its blocks.
        self.as_of_seq.store(trust.as_of_seq.map_or(NO_SEQ, |seq| seq.0), Ordering::Release);
    }

    /// Replaces level, reasons and start time. Returns whether any of them changed.
    fn replace(&self, trust: &Trust) -> bool {
        let packed = pack_trust(trust);
        let since_unix_ms = self.since_unix_ms.swap(trust.since_unix_ms, Ordering::Relaxed);
        // Release: pairs with the Acquire in `load`; a reader that sees a risen level sees the index that earned it.
        let before = self.packed.swap(packed, Ordering::Release);
        (before, since_unix_ms) != (packed, trust.since_unix_ms)
    }

    /// The current trust. Load it before the index is read, so that the index is at least as new. Load it again after,
    /// so that blocks which the index lost meanwhile are not trusted ([`Trust::meet`]).
    #[must_use]
    #[inline]
    pub fn load(&self) -> Trust {
        // Acquire: pairs with the Release in `store`.
        let seq = self.as_of_seq.load(Ordering::Acquire);
        // Acquire: pairs with the Release in `store`.
        let packed = self.packed.load(Ordering::Acquire);
        Trust {
            level: TrustLevel::from_u8((packed >> LEVEL_SHIFT) as u8).unwrap_or_default(),
            reasons: TrustReasons::from_bits(packed & ((1 << LEVEL_SHIFT) - 1)),
            since_unix_ms: self.since_unix_ms.load(Ordering::Relaxed),
            as_of_seq: (seq != NO_SEQ).then_some(EventSeq(seq)),
            as_of_unix_ms: self.as_of_unix_ms.load(Ordering::Relaxed),
        }
    }

    /// The last batch that the index shows as a whole, and when it came. Load it before the index is read.
    #[must_use]
    #[inline]
    pub fn as_of(&self) -> (Option<EventSeq>, u64) {
        // Acquire: pairs with the Release in `store`.
        let seq = self.as_of_seq.load(Ordering::Acquire);
        ((seq != NO_SEQ).then_some(EventSeq(seq)), self.as_of_unix_ms.load(Ordering::Relaxed))
    }

    /// The current trust, if it differs from `before`, which was loaded from this cell. The two then
    /// [meet](Trust::meet).
    #[must_use]
    #[inline]
    pub fn changed_since(&self, before: &Trust) -> Option<Trust> {
        // Acquire: pairs with the Release in `store`. Relaxed: see the table.
        let (packed, since_unix_ms) = (self.packed.load(Ordering::Acquire), self.since_unix_ms.load(Ordering::Relaxed));
        (packed != pack_trust(before) || since_unix_ms != before.since_unix_ms).then(|| self.load())
    }
}

/// Level in the top byte, known reasons below. A reason bit of another version must not reach the level.
const fn pack_trust(trust: &Trust) -> u64 {
    (trust.level as u64) << LEVEL_SHIFT | trust.reasons.known().bits()
}

const _: () = assert!(TrustReasons::KNOWN_BITS < 1 << LEVEL_SHIFT, "a reason would reach the level");

/// A space's hash scheme: configured, or learnt from the first worker that shows one; zero = unknown. Beside it, the
/// forms in which the salts of the space's workers came.
#[derive(Debug, Default)]
pub struct SchemeCell {
    scheme: AtomicU64,
    /// Bits of the forms in which salts came.
    salt_forms: AtomicU64,
}

impl SchemeCell {
    /// A cell that holds `scheme`; `None` = not known yet.
    #[must_use]
    pub fn new(scheme: Option<Scheme>) -> Self {
        Self { scheme: AtomicU64::new(scheme.map_or(0, pack)), salt_forms: AtomicU64::new(0) }
    }

    /// The scheme, once known.
    #[must_use]
    pub fn get(&self) -> Option<Scheme> {
        // Relaxed: the number publishes no other memory.
        unpack(self.scheme.load(Ordering::Relaxed))
    }

    /// Sets the scheme if none is known. Returns the scheme that holds now.
    pub fn learn(&self, scheme: Scheme) -> Scheme {
        // Relaxed: see `get`.
        match self.scheme.compare_exchange(0, pack(scheme), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => scheme,
            Err(held) => unpack(held).unwrap_or(scheme),
        }
    }

    /// Replaces the scheme.
    pub fn set(&self, scheme: Scheme) {
        self.scheme.store(pack(scheme), Ordering::Relaxed);
    }

    /// Forgets a learnt scheme, so that it can be learnt again.
    pub fn forget(&self) {
        self.scheme.store(0, Ordering::Relaxed);
    }

    /// Salts came without, or with, the prefix that some gateways put before them.
    pub fn note_salts(&self, plain: bool, prefixed: bool) {
        // Relaxed: the bits are all there is.
        self.salt_forms.fetch_or(u64::from(plain) | u64::from(prefixed) << 1, Ordering::Relaxed);
    }

    /// Whether salts of both forms came, from whichever workers.
    #[must_use]
    pub fn has_salts_of_two_forms(&self) -> bool {
        // Relaxed: see `note_salts`.
        self.salt_forms.load(Ordering::Relaxed) == 0b11
    }
}

const fn pack(scheme: Scheme) -> u64 {
    scheme.block_size as u64 | (matches!(scheme.window, Window::Bigram) as u64) << 32
}

const fn unpack(packed: u64) -> Option<Scheme> {
    if packed == 0 {
        return None;
    }
    let window = if packed >> 32 != 0 { Window::Bigram } else { Window::Plain };
    Some(Scheme { block_size: packed as u32, window })
}

/// A reader that caches trust, concurrent with the writer, under every order of accesses that the memory model allows:
/// `RUSTFLAGS="--cfg kvrouted_loom" cargo test --lib --release fleet::cells`
#[cfg(all(test, kvrouted_loom))]
mod loom {
    use std::sync::Arc;

    use super::*;

    /// Cached trust, and the count of changes that it shows.
    struct CachedTrust {
        changes: u64,
        trust: Trust,
    }

    impl CachedTrust {
        /// Reads the trust again if the count changed.
        fn refresh(&mut self, cell: &TrustCell, changes: &TrustChanges) {
            let seen = changes.seen();
            if self.changes != seen {
                *self = Self { changes: seen, trust: cell.load() };
            }
        }
    }

    /// Stores fallen trust by `store`, concurrent with a caching reader.
    fn falls(store: fn(&TrustCell, &Trust, &TrustChanges)) {
        ::loom::model(move || {
            let before = Trust { level: TrustLevel::Exact, since_unix_ms: 1, ..Trust::default() };
            let after = Trust { level: TrustLevel::LowerBound, since_unix_ms: 2, ..before };
            let shared = Arc::new((TrustCell::blank(), TrustChanges(AtomicU64::new(0))));
            let (cell, changes) = &*shared;
            cell.store_counted(&before, changes);
            let mut cached = CachedTrust { changes: changes.seen(), trust: cell.load() };
            let writers = Arc::clone(&shared);
            let writer = ::loom::thread::spawn(move || store(&writers.0, &after, &writers.1));
            cached.refresh(cell, changes);
            writer.join().expect("it ended");
            cached.refresh(cell, changes);
            assert_eq!(cached.trust, after, "cached trust stays stale");
        });
    }

    #[test]
    fn cached_trust_does_not_stay_stale() {
        falls(TrustCell::store_counted);
    }

    #[test]
    #[should_panic(expected = "cached trust stays stale")]
    fn counted_before_the_change_it_stays_stale() {
        falls(|cell, trust, changes| {
            changes.count();
            cell.replace(trust);
        });
    }

    #[test]
    #[should_panic(expected = "cached trust stays stale")]
    fn counted_without_release_it_stays_stale() {
        falls(|cell, trust, changes| {
            cell.replace(trust);
            changes.0.fetch_add(1, Ordering::Relaxed);
        });
    }
}

#[cfg(all(test, not(kvrouted_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trust::TrustReason;

    #[test]
    fn trust_round_trips() {
        let trust = Trust {
            level: TrustLevel::LowerBound,
            reasons: [TrustReason::Gap, TrustReason::JoinedLate].into_iter().collect(),
            since_unix_ms: 7,
            as_of_seq: Some(EventSeq(41)),
            as_of_unix_ms: 9,
        };
        let cell = TrustCell::new(Trust::default());
        assert_eq!(cell.load(), Trust::default());
        cell.store(trust);
        assert_eq!(cell.load(), trust);
        cell.store(Trust { level: TrustLevel::None, reasons: TrustReasons::from_bits(1 << 58), ..trust });
        assert_eq!(cell.load().level, TrustLevel::None, "bit 58 beside level 0 would be level 4");
    }

    proptest! {
        #[test]
        fn no_reason_becomes_trust(
            level in 0_u8..5,
            bits in prop_oneof![any::<u64>(), (0_u32..64).prop_map(|bit| 1 << bit)],
        ) {
            let level = TrustLevel::from_u8(level).expect("a level");
            let said = Trust { level, reasons: TrustReasons::from_bits(bits), ..Trust::default() };
            let cell = TrustCell::new(said);
            let read = cell.load();
            prop_assert_eq!(read.level, said.level);
            prop_assert_eq!(read.reasons.is_empty(), said.reasons.is_empty());
            prop_assert!(read.reasons.cap() <= said.reasons.cap());
            prop_assert_eq!(read.reasons, said.reasons.known(), "every reason that is known here, and a word for the others");
            prop_assert_eq!(cell.changed_since(&read), None);
            prop_assert_eq!(cell.changed_since(&said), None);
        }
    }

    #[test]
    fn a_scheme_is_learnt_once() {
        let cell = SchemeCell::default();
        let (first, second) =
            (Scheme { block_size: 16, window: Window::Bigram }, Scheme { block_size: 64, window: Window::Plain });
        assert_eq!(cell.get(), None);
        assert_eq!(cell.learn(first), first);
        assert_eq!(cell.learn(second), first);
        assert_eq!(cell.get(), Some(first));
        cell.forget();
        assert_eq!(cell.learn(second), second);
    }
}
