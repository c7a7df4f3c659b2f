//! Images of no, one and some bookings.

use kvrouted::ids::{LocalHash, SpaceId, Worker};
use kvrouted::load::{
    KeptBlocks, KeptBooking, KeptLoads, KeptNumbers, KeptRun, KeptSession, KeptSlice, KeptWorker, RecentWork,
    SessionId, SessionToken,
};
use kvrouted::requests::Identity;
use kvrouted::route::KeptBinding;
use kvrouted::snapshot::{BookingsImage, ImageFacts, ImageTime, encode_bookings};

pub(super) fn images() -> Vec<Vec<u8>> {
    [0, 1, 3, 9].into_iter().map(|count| encode_bookings(&image(count)).expect("memory")).collect()
}

fn image(count: u32) -> BookingsImage {
    let runs = (0..count).map(|at| KeptRun { parent: at.checked_sub(2), blocks: 1 + at % 2 }).collect::<Vec<_>>();
    let blocks: u32 = runs.iter().map(|run| run.blocks).sum();
    let token = Some(SessionToken { hi: 1, lo: 2 });
    let slice = KeptSlice {
        bookings: (0..count).map(booking).collect(),
        sessions: (0..count.min(2))
            .map(|id| KeptSession { id: SessionId(id), token: token.filter(|_| id == 0), uid: 7 + id })
            .collect(),
        runs,
        hashes: (0..u64::from(blocks)).map(LocalHash).collect(),
    };
    let recent = RecentWork { prefill_share: 0.5, at_ms: 100, decode_s: 2.0, decodes: 9 };
    let worker = |at: u32| KeptWorker { worker: worker(at), elapsed_ns: 1000, recent };
    let binding = |at: u32| KeptBinding { key: [u64::from(at), 5], worker: Worker::new(1, 0), user: 7, age_s: 60 * at };
    BookingsImage {
        facts: ImageFacts {
            number: 5,
            identity: Identity { instance_id: 1, secret: 2, affinity_secret: 3, fleet_version: 4 },
            taken: ImageTime { boot: 6, since_boot_ns: 7, unix_ms: 8 },
            spaces: vec![9],
        },
        loads: KeptLoads {
            numbers: KeptNumbers { complete_to: 20, generations: 21, next_session: 2, lost: vec![3..=4, 9..=12] },
            slices: vec![slice],
            workers: (0..count).map(worker).collect(),
        },
        bindings: (0..count).map(binding).collect(),
    }
}

/// Of three workers, the third is not there.
fn worker(at: u32) -> Worker {
    Worker::new(u64::from(at % 3), 0)
}

fn booking(at: u32) -> KeptBooking {
    KeptBooking {
        slot: 2 * at,
        generation: 1 + u64::from(at),
        session: SessionId(at % 2),
        name: [u64::from(at), 1],
        attempt: at % 3,
        worker: worker(at),
        space: SpaceId(0),
        prompt_tokens: [100, 20],
        blocks: if at.is_multiple_of(3) { KeptBlocks::Alone(5) } else { KeptBlocks::Run(at) },
        block_size: 16,
        expected_output_tokens: 50,
        output_tokens: 10 * at,
        prefilling: at.is_multiple_of(2),
        is_prefill_half: at == 4,
        age_ns: 1_000_000_000 * u64::from(at),
        since_first_token_ns: 1_000_000 * u64::from(at % 2),
    }
}
