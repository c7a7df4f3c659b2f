//! Engines' names of media, and how complete the events of each are.
//!
//! | name | sent by | tier | a store contains | removals | a clear without a medium |
//! |---|---|---|---|---|---|
//! | none, `GPU`, `DEVICE` | every engine | device | everything | yes | empties it |
//! | `CPU_PINNED` | SGLang's HiCache | host | everything | yes | empties it |
//! | `CPU` | vLLM's offloading connector, simple offload and UMBP | host | hashes only | yes | does not say |
//! | `cpu` | vLLM's Mooncake store connector, LMCache | none: left out | no salt, no media | never | does not say |
//! | `STORAGE`, `FS`, `OBJ` without an owner | vLLM's file and object tiers | none: left out | hashes only | never | does not say |
//! | the same with an `ownership` | vLLM's KVCR tier | disk | hashes only | yes | does not say |
//! | `DISK`, `EXTERNAL` and others | no engine known | disk, external | hashes only | assumed | does not say |
//!
//! "Hashes only": vLLM's offloading connector describes its blocks without their extra keys (salt, images). UMBP leaves
//! out the LoRA adapter too, and placeholders leave out the tokens. A plain prompt gives the same event. So only the
//! hashes of these stores are used. An engine's hash covers all of the prompt up to the block.

use crate::event::Medium;
use crate::ids::Tier;

/// The medium of copies in vLLM's Mooncake store and LMCache, which never announce removals.
const NEVER_REMOVED: &[u8] = b"cpu";
/// Tiers of vLLM without announced removals, unless the event names an owner.
const STORAGE: &[&str] = &["STORAGE", "FS", "OBJ"];
/// Names in any case.
const NAMES: [(Medium, &[&str]); 5] = [
    (Medium::Tier(Tier::Device), &["GPU", "DEVICE"]),
    (Medium::Tier(Tier::Host), &["CPU_PINNED"]),
    (Medium::Offloaded(Tier::Host), &["CPU", "CPU_TIER1"]),
    (Medium::Offloaded(Tier::Disk), &["CPU_TIER2", "DISK", "NVME"]),
    (Medium::Offloaded(Tier::External), &["EXTERNAL", "NETWORK", "REMOTE", "SHARED"]),
];

/// The medium of an event, by its name and by whether the event names an owner.
pub(super) fn medium_of(name: &[u8], is_owned: bool) -> Medium {
    // Nearly every event has this name.
    if name == b"GPU" {
        return Medium::Tier(Tier::Device);
    }
    let is_one_of = |names: &[&str]| names.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes()));
    if is_one_of(STORAGE) {
        return if is_owned { Medium::Offloaded(Tier::Disk) } else { Medium::NeverRemoved };
    }
    if name == NEVER_REMOVED {
        return Medium::NeverRemoved;
    }
    NAMES.iter().find(|(_, names)| is_one_of(names)).map_or(Medium::Unknown, |(medium, _)| *medium)
}
