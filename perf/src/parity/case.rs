//! What both sides are asked: a fleet with its caches, requests in flight, and one more request. Plain values that
//! follow from a seed; no side's types but the name of a tier.

use rand::seq::SliceRandom;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::mix::mix;

/// Labels of workers.
const TAINTS: [&str; 4] = ["a100", "rack-7", "spot", "zone-b"];
/// Adapters of workers and prompts.
const ADAPTERS: [&str; 2] = ["en-de", "sql"];
/// Salts of prompts.
const SALTS: [&str; 2] = ["tenant-1", "tenant-2"];
/// Nanoseconds between two steps of a case, at most.
const PAUSE_NS_MAX: u64 = 40_000_000;

/// One case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// What it follows from.
    pub(crate) seed: u64,
    /// Tokens per block.
    pub(crate) block_size: u32,
    /// Whether blocks overlap by one token.
    pub(crate) bigram: bool,
    /// Whether the pool only decodes.
    pub(crate) is_decode_pool: bool,
    /// How workers are chosen.
    pub(crate) knobs: Knobs,
    /// Engines, ascending by id.
    pub(crate) engines: Vec<Engine>,
    /// What is cached.
    pub(crate) held: Vec<Held>,
    /// What happened before, in order.
    pub(crate) steps: Vec<(u64, Step)>,
    /// When the question comes.
    pub(crate) now_ns: u64,
    /// The question.
    pub(crate) ask: Ask,
}

/// The parameters of a decision that both sides have.
#[derive(Clone, Debug)]
pub(crate) struct Knobs {
    /// Credit of a block in device memory.
    pub(crate) device_credit: f64,
    /// How fast a backlog lessens it.
    pub(crate) credit_decay: f64,
    /// Factor of the prefill term.
    pub(crate) prefill_load_scale: f64,
    /// Cost of a request in flight.
    pub(crate) active_request_weight: f64,
    /// Weight of a block in host memory.
    pub(crate) host_hit_weight: f64,
    /// Weight of a block on disk or in an external store.
    pub(crate) disk_hit_weight: f64,
    /// Credit of a block that all workers share.
    pub(crate) shared_multiplier: f64,
    /// How much chance there is.
    pub(crate) temperature: f64,
    /// Whether the prefill term counts.
    pub(crate) track_prefill_tokens: bool,
    /// Whether the decode term counts.
    pub(crate) track_active_blocks: bool,
    /// Whether prompts in flight share their blocks.
    pub(crate) assume_kv_reuse: bool,
    /// A rank with more prefill tokens is busy.
    pub(crate) busy_prefill_tokens: Option<u64>,
    /// Nanoseconds of a prefill: for itself, for a token computed, for a token cached. `None` = not known.
    pub(crate) prefill_ns: Option<[u64; 3]>,
}

/// One engine with its ranks, from 0.
#[derive(Clone, Debug)]
pub(crate) struct Engine {
    /// Its id.
    pub(crate) id: u64,
    /// Its ranks.
    pub(crate) ranks: u32,
    /// Its labels.
    pub(crate) taints: Vec<&'static str>,
    /// Its adapters.
    pub(crate) adapters: Vec<&'static str>,
}

/// A rank of an engine: who is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Rank {
    /// The engine's id.
    pub(crate) engine: u64,
    /// The rank.
    pub(crate) rank: u32,
}

/// A prompt and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    /// Its tokens.
    pub(crate) tokens: Vec<u32>,
    /// Its adapter.
    pub(crate) lora: Option<&'static str>,
    /// Its salt.
    pub(crate) salt: Option<&'static str>,
}

/// Blocks of a text that a rank holds, from the first on.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Who.
    pub(crate) rank: Rank,
    /// What.
    pub(crate) text: Text,
    /// Blocks in device memory, the run behind them in host memory, on disk, and in an external store.
    pub(crate) tiers: [usize; 4],
}

/// What a request sets in place of the parameters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Overrides {
    /// In place of `device_credit`.
    pub(crate) device_credit: Option<f64>,
    /// In place of `prefill_load_scale`.
    pub(crate) prefill_load_scale: Option<f64>,
    /// In place of `temperature`.
    pub(crate) temperature: Option<f64>,
    /// In place of `shared_multiplier`.
    pub(crate) shared_multiplier: Option<f64>,
    /// In place of `assume_kv_reuse`.
    pub(crate) assume_kv_reuse: Option<bool>,
    /// In place of `track_prefill_tokens`.
    pub(crate) track_prefill_tokens: Option<bool>,
}

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// Its prompt.
    pub(crate) text: Text,
    /// What it sets.
    pub(crate) overrides: Overrides,
    /// The only rank it may go to, which need not exist.
    pub(crate) pin: Option<Rank>,
    /// The only engines it may go to.
    pub(crate) allow: Option<Vec<u64>>,
    /// Labels its worker must have.
    pub(crate) required: Vec<&'static str>,
    /// Labels its worker should have, or should not.
    pub(crate) preferred: Vec<(&'static str, f32)>,
    /// Blocks that all workers share, as ranges in order.
    pub(crate) shared: Vec<(u32, u32)>,
}

/// Something that happened before.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// A request was booked: its number is its place among these.
    Booked(Box<Ask>),
    /// The prefill of a request was done.
    Prefilled(usize),
    /// A request ended.
    Freed(usize),
}

impl Case {
    /// The case of a seed, always the same.
    #[must_use]
    pub(crate) fn of(seed: u64) -> Self {
        Maker { chance: Xoshiro256PlusPlus::seed_from_u64(mix(seed, 1)) }.case(seed)
    }

    /// Every rank, ascending.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = (Rank, &Engine)> {
        let ranks_of =
            |engine| (0..Engine::ranks(engine)).map(move |rank| (Rank { engine: Engine::id(engine), rank }, engine));
        self.engines.iter().flat_map(ranks_of)
    }

    /// Whole blocks of a text.
    #[must_use]
    pub(crate) fn blocks(&self, text: &Text) -> usize {
        text.tokens.len().saturating_sub(usize::from(self.bigram)) / self.block_size as usize
    }
}

impl Engine {
    const fn ranks(&self) -> u32 {
        self.ranks
    }

    const fn id(&self) -> u64 {
        self.id
    }
}

struct Maker {
    chance: Xoshiro256PlusPlus,
}

impl Maker {
    fn case(&mut self, seed: u64) -> Case {
        let block_size = self.one_of(&[1, 4, 16, 16, 16, 64]);
        let engines = self.engines();
        let ranks: Vec<Rank> =
            engines.iter().flat_map(|engine| (0..engine.ranks).map(|rank| Rank { engine: engine.id, rank })).collect();
        let texts = self.texts(block_size);
        let mut case = Case {
            seed,
            block_size,
            bigram: self.is(0.15),
            is_decode_pool: self.is(0.25),
            knobs: self.knobs(block_size),
            engines,
            held: Vec::new(),
            steps: Vec::new(),
            now_ns: 0,
            ask: self.ask(block_size, &texts),
        };
        case.held = self.held(&case, &ranks, &texts);
        self.history(&mut case, &ranks, &texts);
        self.constrain(&mut case, &ranks);
        case
    }

    fn is(&mut self, share: f64) -> bool {
        self.chance.random_bool(share)
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.chance.random_range(0..of.len())]
    }

    /// One of the usual values, or any up to `most`.
    fn number(&mut self, usual: &[f64], most: f64) -> f64 {
        if self.is(0.5) { self.one_of(usual) } else { self.chance.random_range(0.0..most) }
    }

    fn engines(&mut self) -> Vec<Engine> {
        let count = if self.is(0.5) { self.chance.random_range(1..=8) } else { self.chance.random_range(1..=64) };
        let ranks = if self.is(0.5) { 1 } else { self.chance.random_range(1..=4) };
        let mut id = self.chance.random_range(0..1000);
        let some = |maker: &mut Self, of: &[&'static str], share| {
            of.iter().copied().filter(|_| maker.is(share)).collect::<Vec<_>>()
        };
        (0..count)
            .map(|_| {
                id += self.chance.random_range(1..9);
                Engine { id, ranks, taints: some(self, &TAINTS, 0.4), adapters: some(self, &ADAPTERS, 0.3) }
            })
            .collect()
    }

    fn knobs(&mut self, block_size: u32) -> Knobs {
        let chance_share = if self.is(0.5) { 0.0 } else { 1.0 };
        Knobs {
            device_credit: self.number(&[1.0, 1.0, 0.0, 0.5], 3.0),
            credit_decay: self.number(&[0.0, 0.0, 1.0], 4.0),
            prefill_load_scale: self.number(&[1.0, 1.0, 0.0], 3.0),
            active_request_weight: self.number(&[0.0, 0.0, 1.0], 5.0),
            host_hit_weight: self.number(&[0.75, 0.0, 1.0], 1.0),
            disk_hit_weight: self.number(&[0.25, 0.0, 1.0], 1.0),
            shared_multiplier: self.number(&[0.0, 0.5, 1.0], 1.0),
            temperature: chance_share * self.number(&[0.1, 0.5, 1.0], 3.0),
            track_prefill_tokens: self.is(0.8),
            track_active_blocks: self.is(0.85),
            assume_kv_reuse: self.is(0.8),
            busy_prefill_tokens: self.is(0.15).then(|| self.chance.random_range(0..60 * u64::from(block_size))),
            prefill_ns: self
                .is(0.5)
                .then(|| [5_000_000, 200_000, 10_000].map(|most| self.chance.random_range(0..most))),
        }
    }

    /// Texts, some of which begin like the first.
    fn texts(&mut self, block_size: u32) -> Vec<Text> {
        let longest = block_size as usize * self.one_of(&[4, 12, 40, 40]);
        let mut texts: Vec<Text> = Vec::new();
        for _ in 0..self.chance.random_range(1..=4) {
            let mut tokens: Vec<u32> = (0..longest).map(|_| self.chance.next_u32() % 50_000).collect();
            if let Some(first) = texts.first().filter(|_| self.is(0.6)) {
                let common = self.chance.random_range(0..longest);
                tokens[..common].copy_from_slice(&first.tokens[..common]);
            }
            let lora = self.is(0.25).then(|| self.one_of(&ADAPTERS));
            let salt = self.is(0.25).then(|| self.one_of(&SALTS));
            texts.push(Text { tokens, lora, salt });
        }
        texts
    }

    /// The beginning of a text, maybe with an end of its own, maybe somebody else's.
    fn text(&mut self, block_size: u32, texts: &[Text]) -> Text {
        let of = self.chance.random_range(0..texts.len());
        let mut text = texts[of].clone();
        let tokens =
            if self.is(0.1) { self.chance.random_range(0..3) } else { self.chance.random_range(0..=text.tokens.len()) };
        text.tokens.truncate(tokens);
        if self.is(0.5) {
            let own = self.chance.random_range(0..4 * block_size as usize);
            text.tokens.extend((0..own).map(|_| self.chance.next_u32() % 50_000));
        }
        if self.is(0.1) {
            text.salt = self.is(0.5).then(|| self.one_of(&SALTS));
        }
        text
    }

    fn ask(&mut self, block_size: u32, texts: &[Text]) -> Ask {
        let mut overrides = Overrides::default();
        if self.is(0.4) {
            overrides.device_credit = self.is(0.5).then(|| self.number(&[0.0, 1.0], 2.0));
            overrides.prefill_load_scale = self.is(0.3).then(|| self.number(&[0.0, 1.0], 2.0));
            overrides.temperature = self.is(0.3).then(|| self.number(&[0.0, 0.5], 2.0));
            overrides.shared_multiplier = self.is(0.3).then(|| self.number(&[0.0, 0.5], 1.0));
            overrides.assume_kv_reuse = self.is(0.4).then(|| self.is(0.5));
            overrides.track_prefill_tokens = self.is(0.4).then(|| self.is(0.5));
        }
        let text = self.text(block_size, texts);
        Ask { text, overrides, pin: None, allow: None, required: Vec::new(), preferred: Vec::new(), shared: Vec::new() }
    }

    fn held(&mut self, case: &Case, ranks: &[Rank], texts: &[Text]) -> Vec<Held> {
        let lower = self.is(0.5);
        let mut held = Vec::new();
        for rank in ranks {
            for text in texts {
                if self.is(0.4) {
                    continue;
                }
                let mut left = case.blocks(text);
                let tiers = [0, 1, 2, 3].map(|tier| {
                    let some = if tier == 0 || lower { self.chance.random_range(0..=left) } else { 0 };
                    left -= some;
                    some
                });
                held.push(Held { rank: *rank, text: text.clone(), tiers });
            }
        }
        held
    }

    /// Requests that were booked, and how far they have come.
    fn history(&mut self, case: &mut Case, ranks: &[Rank], texts: &[Text]) {
        let booked = self.chance.random_range(0..=(4 * ranks.len()).min(60));
        let mut order: Vec<(u64, Step)> = Vec::new();
        for number in 0..booked {
            let pin = Some(self.one_of(ranks));
            let at = self.chance.random_range(0..1000);
            order.push((at, Step::Booked(Box::new(Ask { pin, ..self.ask(case.block_size, texts) }))));
            let prefilled = self.is(0.5).then(|| at + self.chance.random_range(1..400));
            order.extend(prefilled.map(|at| (at, Step::Prefilled(number))));
            let freed = self.is(0.4).then(|| prefilled.unwrap_or(at) + self.chance.random_range(1..400));
            order.extend(freed.map(|at| (at, Step::Freed(number))));
        }
        // Numbers count bookings in the order they are made in.
        let mut made: Vec<(u64, usize)> = Vec::new();
        for (at, step) in &order {
            if let Step::Booked(_) = step {
                made.push((*at, made.len()));
            }
        }
        made.sort_by_key(|(at, _)| *at);
        let place = |number: usize| made.iter().position(|(_, of)| *of == number).unwrap_or(0);
        order.sort_by_key(|(at, _)| *at);
        let mut now_ns = 0;
        for (_, step) in order {
            now_ns += self.chance.random_range(0..PAUSE_NS_MAX);
            let step = match step {
                Step::Booked(ask) => Step::Booked(ask),
                Step::Prefilled(number) => Step::Prefilled(place(number)),
                Step::Freed(number) => Step::Freed(place(number)),
            };
            case.steps.push((now_ns, step));
        }
        case.now_ns = now_ns + self.chance.random_range(0..PAUSE_NS_MAX);
    }

    /// Limits who may be chosen.
    fn constrain(&mut self, case: &mut Case, ranks: &[Rank]) {
        let blocks = case.blocks(&case.ask.text) as u32;
        let ask = &mut case.ask;
        if self.is(0.1) {
            ask.pin = Some(self.one_of(ranks));
            if self.is(0.1) {
                ask.pin =
                    Some(Rank { engine: self.chance.random_range(0..2000), rank: self.chance.random_range(0..5) });
            }
        }
        if self.is(0.2) {
            let share = self.one_of(&[0.1, 0.5, 0.9]);
            let mut allow: Vec<u64> = case.engines.iter().map(|engine| engine.id).filter(|_| self.is(share)).collect();
            allow.shuffle(&mut self.chance);
            ask.allow = Some(allow);
        }
        if self.is(0.15) {
            ask.required = vec![self.one_of(&TAINTS)];
        }
        if self.is(0.2) {
            ask.preferred = TAINTS.iter().filter(|_| self.chance.random_bool(0.5)).map(|taint| (*taint, 0.0)).collect();
            ask.preferred.iter_mut().for_each(|(_, weight)| *weight = self.chance.random_range(-2.0..2.0));
        }
        if self.is(0.3) && blocks > 0 {
            let mut from = 0;
            while from < blocks {
                let start = self.chance.random_range(from..blocks);
                let end = self.chance.random_range(start..=blocks);
                ask.shared.extend((start < end).then_some((start, end)));
                from = end + 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_the_whole_case() {
        let (a, b) = (format!("{:?}", Case::of(7)), format!("{:?}", Case::of(7)));
        assert_eq!(a, b);
        assert_ne!(a, format!("{:?}", Case::of(8)));
    }

    #[test]
    fn steps_speak_of_bookings_that_were_made_before() {
        for seed in 0..200 {
            let case = Case::of(seed);
            let (mut made, mut ended) = (0, Vec::new());
            for (at, step) in &case.steps {
                assert!(*at <= case.now_ns);
                match step {
                    Step::Booked(_) => made += 1,
                    Step::Prefilled(number) => assert!(*number < made && !ended.contains(number), "case {seed}"),
                    Step::Freed(number) => {
                        assert!(*number < made && !ended.contains(number), "case {seed}");
                        ended.push(*number);
                    }
                }
            }
        }
    }
}
