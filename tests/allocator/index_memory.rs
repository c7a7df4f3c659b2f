//! The memory of an emptied worker goes back to the system.
//!
//! A process of its own measures it, with the daemon's allocator.

use kvrouted::ids::{EngineHash, GroupId, LocalHash, Seed, ShardId, Tier, WorkerSlot};
use kvrouted::index::{ShardLimits, ShardWriter, StoreBlocks, shard};
use std::time::Duration;

use crate::kit::test_of_this_binary;

/// Chains of one block each.
const SHORT_CHAINS: u64 = 120_000;
/// Chains of many blocks.
const LONG_CHAINS: u64 = 1_000;
const LONG_BLOCKS: u64 = 1_000;

/// Memory of this process that is in RAM, bytes.
fn resident_bytes() -> u64 {
    crate::kit::resident_kib(std::process::id()) << 10
}

fn store(writer: &mut ShardWriter, slot: WorkerSlot, first: u64, blocks: u64) {
    let names: Vec<EngineHash> = (first..first + blocks).map(EngineHash).collect();
    let locals: Vec<LocalHash> = (first..first + blocks).map(LocalHash).collect();
    let (tier, group, seed) = (Tier::Device, GroupId(0), Seed(0));
    let blocks = StoreBlocks { parent: None, hashes: &names, locals: &locals, tier, group, seed };
    writer.begin_batch(slot);
    assert_eq!(writer.store(slot, &blocks).refused, None);
}

/// All that an ingest thread does when no event arrives.
fn rest(writer: &mut ShardWriter) {
    for _ in 0..64 {
        while writer.sweep(8192) {}
        writer.reclaim();
        writer.publish();
    }
}

#[test]
fn an_emptied_worker_gives_its_memory_back_to_the_system() {
    let measured = test_of_this_binary("index_memory::measured_in_a_process_of_its_own").output().expect("it runs");
    let said = String::from_utf8_lossy(&measured.stdout);
    assert!(
        measured.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&measured.stderr)
    );
}

#[test]
#[ignore = "another test starts it in a process of its own"]
fn measured_in_a_process_of_its_own() {
    let (mut writer, _reader) = shard(ShardId(0), ShardLimits::default());
    let slots = [(); 2].map(|()| writer.add_worker().expect("room"));
    // The other worker holds something that stays.
    store(&mut writer, slots[1], 1 << 60, 50);
    let (resident_before, account_before) = (resident_bytes(), writer.memory().bytes());
    for by_clear in [false, true] {
        (0..SHORT_CHAINS).for_each(|chain| store(&mut writer, slots[0], 1 + chain, 1));
        let first = |chain: u64| (1 << 40) + chain * LONG_BLOCKS;
        (0..LONG_CHAINS).for_each(|chain| store(&mut writer, slots[0], first(chain), LONG_BLOCKS));
        let (resident_full, account_full) = (resident_bytes(), writer.memory().bytes());
        let (resident, account) = (resident_full - resident_before, account_full - account_before);
        assert!(account > 60 << 20 && resident > 60 << 20, "{account} bytes by the account, {resident} resident");
        if by_clear {
            writer.clear(slots[0], None);
        } else {
            let (tier, group) = (Tier::Device, GroupId(0));
            for chain in 0..SHORT_CHAINS {
                assert_eq!(writer.remove(slots[0], tier, group, &[EngineHash(1 + chain)]).removed, 1);
            }
            for chain in 0..LONG_CHAINS {
                let names: Vec<EngineHash> = (first(chain)..first(chain) + LONG_BLOCKS).map(EngineHash).collect();
                assert_eq!(u64::from(writer.remove(slots[0], tier, group, &names).removed), LONG_BLOCKS);
            }
        }
        rest(&mut writer);
        let account_left = writer.memory().bytes().saturating_sub(account_before);
        assert!(account_left < 12 << 20, "{account_left} of {account} bytes stay in the account");
        // The allocator returns pages some time later, during a call.
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            drop(vec![0_u8; 1 << 20]);
        }
        let resident_left = resident_bytes().saturating_sub(resident_before);
        assert!(resident_left < resident / 2, "{resident_left} of {resident} bytes stay resident");
    }
}
