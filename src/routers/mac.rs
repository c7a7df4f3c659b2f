//! The MAC of messages between routers: keyed BLAKE3 over the whole message.

use std::fmt;

use thiserror::Error;

use crate::limits::ROUTER_SECRET_BYTES_MIN;

/// Bytes of a MAC.
pub(super) const MAC_BYTES: usize = blake3::OUT_LEN;

/// What the key of the MAC is derived for. Another use of the same secret gets another key.
const CONTEXT: &str = "kvrouted load events 1 message authentication";

/// What the secret of affinity sessions is derived for.
const SESSIONS_CONTEXT: &str = "kvrouted load events 1 session names";

/// A secret is shorter than [`ROUTER_SECRET_BYTES_MIN`].
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the secret has {0} bytes; at least {ROUTER_SECRET_BYTES_MIN} are needed: head -c 32 /dev/urandom | base64")]
pub struct ShortSecret(pub usize);

/// The keys of a fleet's routers: one that signs, and one more that is accepted while the secret is being changed.
///
/// To change the secret, give every router the new secret as the second one, then swap the two at every router, then
/// remove the old one.
#[derive(Clone)]
pub struct Keys {
    signing: [u8; 32],
    accepted: Option<[u8; 32]>,
    affinity_secret: u64,
}

impl Keys {
    /// The keys of a secret that signs, and of another that is only accepted.
    ///
    /// # Errors
    /// A secret is too short.
    pub fn new(signing: &[u8], accepted: Option<&[u8]>) -> Result<Self, ShortSecret> {
        let [a, b, c, d, e, f, g, h, ..] = blake3::derive_key(SESSIONS_CONTEXT, signing);
        let affinity_secret = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Ok(Self { signing: key_of(signing)?, accepted: accepted.map(key_of).transpose()?, affinity_secret })
    }

    /// The secret of the hashes of affinity sessions, the same at all routers that sign with this secret.
    #[must_use]
    pub const fn affinity_secret(&self) -> u64 {
        self.affinity_secret
    }

    /// The MAC of the parts, one after the other.
    pub(super) fn sign(&self, parts: [&[u8]; 2]) -> [u8; MAC_BYTES] {
        *mac(&self.signing, parts).as_bytes()
    }

    /// Whether one of the keys made this MAC of the parts. Takes the same time wherever the bytes differ.
    pub(super) fn verify(&self, parts: [&[u8]; 2], tag: &[u8; MAC_BYTES]) -> bool {
        // The comparison with an array of `blake3::Hash` takes constant time.
        std::iter::once(&self.signing).chain(&self.accepted).any(|key| mac(key, parts) == *tag)
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keys").field("rotating", &self.accepted.is_some()).finish_non_exhaustive()
    }
}

fn key_of(secret: &[u8]) -> Result<[u8; 32], ShortSecret> {
    if secret.len() < ROUTER_SECRET_BYTES_MIN {
        return Err(ShortSecret(secret.len()));
    }
    Ok(blake3::derive_key(CONTEXT, secret))
}

fn mac(key: &[u8; 32], parts: [&[u8]; 2]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize()
}
