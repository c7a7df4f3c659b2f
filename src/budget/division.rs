//! The division of the budget among the parts: pure.
//!
//! Each part has a row: what it reserves, what it takes at most, and its share of what is left once every part has its
//! reserve. A part gets its reserve and its share, but no more than its most. The index gets everything else, because
//! only more blocks make answers better.

use super::{MemoryPart, PARTS};
use crate::error::{Error, Kind, Result};
use crate::limits::{
    ACTIVE_WORDS_MAX, ACTIVE_WORDS_MIN, AFFINITY_SESSION_BYTES, BOOKING_BYTES, BOOKINGS_MAX, BOOKINGS_MIN,
    CONNECTION_BYTES, CONNECTIONS_MIN, CORE_RECEIVE_BYTES_MAX, CORE_REPLIES_BYTES_MAX, CORE_REPLIES_BYTES_MIN,
    DUMP_BYTES, EMPTY_SHARD_BYTES, ENDED_BOOKING_BYTES, HTTP_BYTES_MAX, HTTP_BYTES_MIN, INDEX_BYTES_MIN,
    JOURNAL_WAITING_WORKERS_MAX, JOURNAL_WAITING_WORKERS_MIN, JOURNAL_WORKER_BYTES, LANE_CONTROL_BYTES,
    METRICS_PAGES_BYTES_MAX, METRICS_PAGES_BYTES_MIN, PREDICTED_MEMORY_BYTES_MIN, PROCESS_BYTES, QUEUE_BYTES_MAX,
    QUEUE_BYTES_MIN, REMOTE_CONNECTION_BYTES, ROUTER_BYTES, SHARD_HELD_BYTES_MAX, SHARD_HELD_BYTES_MIN,
    SHARD_MESSAGES_BYTES_MAX, SHARD_MESSAGES_BYTES_MIN, SHARD_REPLAYS_BYTES_MAX, SHARD_REPLAYS_BYTES_MIN,
    SNAPSHOTS_BYTES, THREAD_BYTES, THREADS_BESIDE, TRACE_RECORD_BYTES, WORKER_TABLE_BYTES,
};

/// The numbers of everything that takes memory, as the configuration has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demands {
    /// Serving threads.
    pub cores: u64,
    /// Ingest threads.
    pub shards: u64,
    /// Spaces.
    pub spaces: u64,
    /// Workers that the configuration names.
    pub workers: u64,
    /// The most connections to the routing socket.
    pub connections_max: u64,
    /// The largest body of a frame, bytes.
    pub frame_body_bytes_max: u64,
    /// The most shm lanes.
    pub lanes_max: u64,
    /// The largest ring of a lane, bytes.
    pub lane_ring_bytes_max: u64,
    /// Spaces whose caches are predicted.
    pub predicted_spaces: u64,
    /// The configured memory of all predictions, bytes.
    pub predictions_bytes_max: u64,
    /// The configured memory of the index of all spaces, bytes; `None` = a space has no limit of its own.
    pub index_bytes_max: Option<u64>,
    /// The most affinity sessions.
    pub affinity_sessions_max: u64,
    /// The most other routers whose bookings add to the load.
    pub routers_max: u64,
    /// Ended bookings that may wait for the journal.
    pub ended_bookings_max: u64,
    /// Traced decisions that may wait for their spans.
    pub traced_max: u64,
    /// The largest body of the HTTP port, bytes; `None` = there is no such port.
    pub http_body_bytes_max: Option<u64>,
    /// Connections from other hosts, open and half open.
    pub remote_connections_max: u64,
    /// Whether snapshots are on.
    pub snapshots: bool,
}

/// What a part may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    part: MemoryPart,
    /// Reserved from the start, bytes.
    reserve: u64,
    /// The most that it ever takes, bytes.
    most: u64,
    /// Its share of what the reserves leave, percent.
    share_percent: u64,
    /// Fields of the configuration that lower the reserve.
    fields: &'static str,
}

impl Row {
    const fn fixed(part: MemoryPart, bytes: u64, fields: &'static str) -> Self {
        Self { part, reserve: bytes, most: bytes, share_percent: 0, fields }
    }

    fn between(part: MemoryPart, reserve: u64, most: u64, share_percent: u64, fields: &'static str) -> Self {
        Self { part, reserve, most: most.max(reserve), share_percent, fields }
    }
}

/// Fields that lower what is of fixed size.
const PROCESS_FIELDS: &str =
    "serve.cores, ingest.shards, policy.affinity_sessions_max, journal.ring_records_max, traces.queue_max";

/// Bytes of a lane with the largest rings.
const fn lane_bytes(ring_bytes_max: u64) -> u64 {
    2 * ring_bytes_max + LANE_CONTROL_BYTES as u64
}

/// The rows of all parts but the index.
fn rows(demands: &Demands) -> Vec<Row> {
    [serving(demands).as_slice(), &receiving(demands), &keeping(demands)].concat()
}

/// What serves gateways.
fn serving(demands: &Demands) -> [Row; 5] {
    let Demands { cores, connections_max, lanes_max, .. } = *demands;
    let frames = 2 * demands.frame_body_bytes_max;
    let process = PROCESS_BYTES
        + (cores + demands.shards + THREADS_BESIDE) * THREAD_BYTES
        + demands.workers * WORKER_TABLE_BYTES
        + demands.affinity_sessions_max * AFFINITY_SESSION_BYTES
        + demands.routers_max * ROUTER_BYTES
        + demands.ended_bookings_max * ENDED_BOOKING_BYTES
        + demands.traced_max * TRACE_RECORD_BYTES;
    let (least, most) = (CONNECTIONS_MIN as u64 * CONNECTION_BYTES, connections_max * CONNECTION_BYTES);
    let cores_of = "serve.cores";
    let frames_of = "serve.cores, serve.frame_body_bytes_max";
    let frames_max = frames.max(CORE_RECEIVE_BYTES_MAX as u64);
    [
        Row::fixed(MemoryPart::Process, process, PROCESS_FIELDS),
        Row::between(MemoryPart::Connections, least, most, 4, ""),
        Row::between(MemoryPart::Frames, cores * frames, cores * frames_max, 6, frames_of),
        Row::between(MemoryPart::Replies, cores * CORE_REPLIES_BYTES_MIN, cores * CORE_REPLIES_BYTES_MAX, 3, cores_of),
        Row::between(MemoryPart::Lanes, 0, lanes_max * lane_bytes(demands.lane_ring_bytes_max), 3, ""),
    ]
}

/// What receives events, and what is sent from the index.
fn receiving(demands: &Demands) -> [Row; 6] {
    let shards = demands.shards;
    let of_each = |part, least: u64, most: u64| Row::between(part, shards * least, shards * most, 4, "ingest.shards");
    let (least, most) = (demands.predicted_spaces * PREDICTED_MEMORY_BYTES_MIN, demands.predictions_bytes_max);
    [
        Row::between(MemoryPart::Predictions, least, most, 8, "[[space]] approximate"),
        of_each(MemoryPart::EventMessages, SHARD_MESSAGES_BYTES_MIN, SHARD_MESSAGES_BYTES_MAX),
        of_each(MemoryPart::HeldEvents, SHARD_HELD_BYTES_MIN, SHARD_HELD_BYTES_MAX),
        of_each(MemoryPart::Replays, SHARD_REPLAYS_BYTES_MIN, SHARD_REPLAYS_BYTES_MAX),
        Row::fixed(MemoryPart::Dumps, shards * DUMP_BYTES, "ingest.shards"),
        Row::fixed(MemoryPart::Snapshots, if demands.snapshots { SNAPSHOTS_BYTES } else { 0 }, "snapshot.dir"),
    ]
}

/// What is kept of requests, and the other ports.
fn keeping(demands: &Demands) -> [Row; 6] {
    let http = demands.http_body_bytes_max;
    // The port decides as a serving thread does.
    let deciding = demands.cores + u64::from(http.is_some());
    let journal = |workers: u64| deciding * workers * JOURNAL_WORKER_BYTES;
    let (least, most) = (journal(JOURNAL_WAITING_WORKERS_MIN), journal(JOURNAL_WAITING_WORKERS_MAX as u64));
    let bookings = |bookings: u64, words: u64| bookings * BOOKING_BYTES + words * 8;
    let bookings_least = bookings(BOOKINGS_MIN, ACTIVE_WORDS_MIN);
    let bookings_most = bookings(BOOKINGS_MAX as u64, ACTIVE_WORDS_MAX as u64);
    let of_remote = demands.remote_connections_max * REMOTE_CONNECTION_BYTES;
    let of_http =
        |body| Row::between(MemoryPart::Http, HTTP_BYTES_MIN + 2 * body, HTTP_BYTES_MAX, 5, "http.body_bytes_max");
    [
        Row::between(MemoryPart::Queue, QUEUE_BYTES_MIN, QUEUE_BYTES_MAX as u64, 2, ""),
        Row::between(MemoryPart::Bookings, bookings_least, bookings_most, 6, ""),
        Row::between(MemoryPart::Journal, least, most, 1, "serve.cores"),
        http.map_or(Row::fixed(MemoryPart::Http, 0, ""), of_http),
        Row::fixed(MemoryPart::Remote, of_remote, "remote.connections_max"),
        Row::between(MemoryPart::MetricsPages, METRICS_PAGES_BYTES_MIN, METRICS_PAGES_BYTES_MAX, 1, ""),
    ]
}

/// The bound of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    bytes_max: u64,
    bounds: [u64; PARTS],
    fixed: [bool; PARTS],
}

/// The sum of all reserves, bytes: the least budget that can be divided.
#[must_use]
pub fn least(demands: &Demands) -> u64 {
    rows(demands).iter().map(|row| row.reserve).sum::<u64>() + index_reserve(demands)
}

const fn index_reserve(demands: &Demands) -> u64 {
    INDEX_BYTES_MIN + demands.shards * demands.spaces * EMPTY_SHARD_BYTES
}

/// Divides a budget of `bytes_max`.
///
/// # Errors
/// [`Kind::Config`] with the sum if the reserves of all parts exceed it.
pub fn divide(bytes_max: u64, demands: &Demands) -> Result<Division> {
    let rows = rows(demands);
    let (reserves, index_reserve) = (least(demands), index_reserve(demands));
    let Some(left) = bytes_max.checked_sub(reserves) else {
        return Err(refusal(bytes_max, reserves, index_reserve, &rows));
    };
    let (mut bounds, mut fixed) = ([0; PARTS], [false; PARTS]);
    let mut others = 0;
    for row in &rows {
        let bytes = row.most.min(row.reserve + left / 100 * row.share_percent);
        (bounds[row.part as usize], fixed[row.part as usize]) = (bytes, row.share_percent == 0);
        others += bytes;
    }
    let rest = bytes_max - others;
    bounds[MemoryPart::Index as usize] = demands.index_bytes_max.map_or(rest, |own| own.max(index_reserve).min(rest));
    Ok(Division { bytes_max, bounds, fixed })
}

/// The error for a budget below the sum of all reserves. It names the largest of them.
fn refusal(bytes_max: u64, reserves: u64, index_reserve: u64, rows: &[Row]) -> Error {
    let index = Row::fixed(MemoryPart::Index, index_reserve, "ingest.shards, [[space]]");
    let mut largest: Vec<&Row> = rows.iter().chain([&index]).filter(|row| row.reserve > 0).collect();
    largest.sort_by_key(|row| std::cmp::Reverse(row.reserve));
    let named: Vec<String> = largest.iter().take(4).map(|row| format!("{} {}", row.part.name(), row.reserve)).collect();
    let fields: Vec<&str> = largest.iter().take(4).map(|row| row.fields).filter(|fields| !fields.is_empty()).collect();
    Error::new(
        Kind::Config,
        format!(
            "a memory budget of {bytes_max} bytes is too small: the fixed parts take {reserves} bytes, most of them {}",
            named.join(", ")
        ),
        format!("set process.memory_bytes_max to at least {reserves}, or lower {}", fields.join(", ")),
    )
}

impl Division {
    /// The division of a budget without a limit: each part has only its own bounds.
    #[must_use]
    pub const fn unlimited() -> Self {
        Self { bytes_max: u64::MAX, bounds: [u64::MAX; PARTS], fixed: [false; PARTS] }
    }

    /// The whole budget, bytes.
    #[must_use]
    pub const fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The most that a part may take, bytes.
    #[must_use]
    pub const fn bound(&self, part: MemoryPart) -> u64 {
        self.bounds[part as usize]
    }

    /// The same as a number of objects of `bytes` each.
    #[must_use]
    pub fn objects(&self, part: MemoryPart, bytes: u64) -> usize {
        usize::try_from(self.bound(part) / bytes.max(1)).unwrap_or(usize::MAX)
    }

    /// The same for each of `owners` that have equal parts.
    #[must_use]
    pub fn of_each(&self, part: MemoryPart, owners: usize) -> usize {
        usize::try_from(self.bound(part) / owners.max(1) as u64).unwrap_or(usize::MAX)
    }

    /// Whether a part takes its bound from the start.
    #[must_use]
    pub const fn is_fixed(&self, part: MemoryPart) -> bool {
        self.fixed[part as usize]
    }

    /// The bookings, and the words of their prompts, that fit.
    #[must_use]
    pub fn bookings(&self) -> (usize, usize) {
        let bytes = |bookings: u64, words: u64| bookings * BOOKING_BYTES + words * 8;
        let least = bytes(BOOKINGS_MIN, ACTIVE_WORDS_MIN);
        let more = bytes(BOOKINGS_MAX as u64, ACTIVE_WORDS_MAX as u64) - least;
        let left = self.bound(MemoryPart::Bookings).saturating_sub(least).min(more);
        // Both grow in proportion.
        let of = |all: usize, least: u64| {
            let fits = u128::from(all as u64 - least) * u128::from(left) / u128::from(more);
            least as usize + fits as usize
        };
        (of(BOOKINGS_MAX, BOOKINGS_MIN), of(ACTIVE_WORDS_MAX, ACTIVE_WORDS_MIN))
    }

    /// The shm lanes that fit.
    #[must_use]
    pub fn lanes(&self, ring_bytes_max: u64) -> usize {
        self.objects(MemoryPart::Lanes, lane_bytes(ring_bytes_max))
    }

    /// The memory of the predictions of one space, for which `configured` bytes are configured. The spaces with
    /// predictions, and the sum that is configured for all of them, are `in_all`.
    #[must_use]
    pub fn predictions_of(&self, configured: u64, in_all: (u64, u64)) -> u64 {
        let (spaces, sum) = in_all;
        let bound = self.bound(MemoryPart::Predictions);
        if sum <= bound {
            return configured;
        }
        // In proportion beyond the least.
        let least = |spaces: u64| spaces * PREDICTED_MEMORY_BYTES_MIN;
        let (more, more_in_all) = (configured.saturating_sub(least(1)), sum.saturating_sub(least(spaces)).max(1));
        let left = bound.saturating_sub(least(spaces));
        least(1) + (u128::from(more) * u128::from(left) / u128::from(more_in_all)) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::ORIGINS_MAX;

    /// A daemon with one space, two serving threads, and nothing optional.
    const PLAIN: Demands = Demands {
        cores: 2,
        shards: 1,
        spaces: 1,
        workers: 8,
        connections_max: 4096,
        frame_body_bytes_max: 8 << 20,
        lanes_max: 64,
        lane_ring_bytes_max: 1 << 20,
        predicted_spaces: 0,
        predictions_bytes_max: 0,
        index_bytes_max: None,
        affinity_sessions_max: 1 << 16,
        routers_max: 0,
        ended_bookings_max: 0,
        traced_max: 0,
        http_body_bytes_max: None,
        remote_connections_max: 0,
        snapshots: false,
    };

    fn sum(division: &Division) -> u64 {
        MemoryPart::ALL.iter().map(|part| division.bound(*part)).sum()
    }

    #[test]
    fn an_ample_budget_leaves_every_part_its_own_bound_and_the_index_the_rest() {
        let division = divide(1 << 40, &PLAIN).unwrap();
        let expected = [
            (MemoryPart::Connections, 4096 * CONNECTION_BYTES),
            (MemoryPart::Frames, 2 * CORE_RECEIVE_BYTES_MAX as u64),
            (MemoryPart::Queue, QUEUE_BYTES_MAX as u64),
            (MemoryPart::Lanes, 64 * ((2 << 20) + LANE_CONTROL_BYTES as u64)),
            (MemoryPart::Http, 0),
            (MemoryPart::Snapshots, 0),
        ];
        for (part, bound) in expected {
            assert_eq!(division.bound(part), bound, "{part:?}");
        }
        assert_eq!((division.bookings(), division.lanes(1 << 20)), ((BOOKINGS_MAX, ACTIVE_WORDS_MAX), 64));
        assert_eq!(sum(&division), 1 << 40);
        assert!(division.bound(MemoryPart::Index) > (1 << 40) / 10 * 9);
        let fixed: Vec<_> = MemoryPart::ALL.iter().filter(|part| division.is_fixed(**part)).collect();
        let expected =
            [MemoryPart::Process, MemoryPart::Dumps, MemoryPart::Http, MemoryPart::Remote, MemoryPart::Snapshots];
        assert_eq!(fixed, expected.iter().collect::<Vec<_>>());
    }

    #[test]
    fn an_index_with_a_limit_of_its_own_gets_no_more() {
        let division = divide(1 << 40, &Demands { index_bytes_max: Some(1 << 30), ..PLAIN }).unwrap();
        assert_eq!(division.bound(MemoryPart::Index), 1 << 30);
        let small = divide(1 << 28, &Demands { index_bytes_max: Some(1 << 30), ..PLAIN }).unwrap();
        assert!(small.bound(MemoryPart::Index) < 1 << 28 && sum(&small) <= 1 << 28);
    }

    #[test]
    fn a_budget_below_the_fixed_parts_is_refused_with_the_sum_and_a_remedy() {
        let many = Demands { shards: 64, spaces: 256, ..PLAIN };
        let refused = divide(1 << 30, &many).unwrap_err();
        assert_eq!(refused.kind(), Kind::Config);
        let needed = 64 * 256 * EMPTY_SHARD_BYTES;
        assert!(refused.message().contains("fixed parts take") && refused.message().contains("index"), "{refused}");
        assert!(refused.remedy().contains("process.memory_bytes_max") && refused.remedy().contains("ingest.shards"));
        let named: u64 =
            refused.remedy().split_whitespace().find_map(|word| word.trim_end_matches(',').parse().ok()).unwrap();
        assert!(named > needed);
        assert_eq!(named, least(&many));
        assert!(divide(named, &many).is_ok() && divide(named - 1, &many).is_err(), "the sum that it names suffices");
    }

    #[test]
    fn what_other_routers_say_is_reserved_and_takes_nothing_from_bookings() {
        let shared = Demands { routers_max: 8, ..PLAIN };
        assert_eq!(least(&shared), least(&PLAIN) + 8 * ROUTER_BYTES);
        let [alone, beside] = [&PLAIN, &shared].map(|demands| divide(least(demands), demands).unwrap());
        assert_eq!(beside.bound(MemoryPart::Process), alone.bound(MemoryPart::Process) + 8 * ROUTER_BYTES);
        assert_eq!(
            (beside.bookings(), beside.bound(MemoryPart::Index)),
            (alone.bookings(), alone.bound(MemoryPart::Index))
        );
    }

    #[test]
    fn a_division_without_a_limit_changes_nothing() {
        let division = Division::unlimited();
        assert_eq!(division.bookings(), (BOOKINGS_MAX, ACTIVE_WORDS_MAX));
        assert_eq!(division.predictions_of(7, (1, 7)), 7);
        assert_eq!(division.of_each(MemoryPart::Frames, 4), usize::MAX / 4);
    }

    fn demands() -> impl Strategy<Value = Demands> {
        let numbers = (1_u64..257, 1_u64..65, 1_u64..257, 0_u64..4097, 64_u64..4097, 0..=ORIGINS_MAX as u64);
        let sizes = (4096_u64..1 << 28, 0_u64..4097, 4096_u64..1 << 26, 0_u64..1 << 24);
        let optional = (
            0_u64..9,
            0_u64..1 << 33,
            prop::option::of(0_u64..1 << 40),
            (prop::option::of(0_u64..1 << 27), 0_u64..4225),
            0_u64..1 << 22,
            any::<bool>(),
        );
        (numbers, sizes, optional).prop_map(|(numbers, sizes, optional)| {
            let (cores, shards, spaces, workers, connections_max, routers_max) = numbers;
            let (frame_body_bytes_max, lanes_max, lane_ring_bytes_max, affinity_sessions_max) = sizes;
            let (predicted_spaces, more, index_bytes_max, ports, ended_bookings_max, snapshots) = optional;
            let (http_body_bytes_max, remote_connections_max) = ports;
            let predictions_bytes_max = predicted_spaces * PREDICTED_MEMORY_BYTES_MIN + more * predicted_spaces.min(1);
            Demands {
                cores,
                shards,
                spaces,
                workers,
                connections_max,
                frame_body_bytes_max,
                lanes_max,
                lane_ring_bytes_max,
                predicted_spaces,
                predictions_bytes_max,
                index_bytes_max,
                affinity_sessions_max,
                routers_max,
                ended_bookings_max,
                traced_max: ended_bookings_max / 4,
                remote_connections_max,
                http_body_bytes_max,
                snapshots,
            }
        })
    }

    proptest! {
        /// The bounds never exceed the budget, nor a part's own bound; and what is made of them stays within them.
        #[test]
        fn the_sum_of_all_bounds_is_within_the_budget(bytes_max in 1_u64 << 26..1 << 42, demands in demands()) {
            let Ok(division) = divide(bytes_max, &demands) else { return Ok(()) };
            prop_assert!(sum(&division) <= bytes_max);
            for row in rows(&demands) {
                let bound = division.bound(row.part);
                prop_assert!(row.reserve <= bound && bound <= row.most, "{row:?} {bound}");
            }
            prop_assert!(division.bound(MemoryPart::Index) >= INDEX_BYTES_MIN);
            let (bookings, words) = division.bookings();
            prop_assert!(bookings as u64 * BOOKING_BYTES + words as u64 * 8 <= division.bound(MemoryPart::Bookings));
            let lanes = division.lanes(demands.lane_ring_bytes_max) as u64;
            prop_assert!(lanes * lane_bytes(demands.lane_ring_bytes_max) <= division.bound(MemoryPart::Lanes));
            let spaces = demands.predicted_spaces;
            if spaces > 0 {
                let in_all = (spaces, demands.predictions_bytes_max);
                let more = (demands.predictions_bytes_max - spaces * PREDICTED_MEMORY_BYTES_MIN) / spaces;
                let each = division.predictions_of(PREDICTED_MEMORY_BYTES_MIN + more, in_all);
                prop_assert!(each >= PREDICTED_MEMORY_BYTES_MIN && each * spaces <= division.bound(MemoryPart::Predictions));
            }
        }
    }
}
