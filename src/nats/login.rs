//! How a client shows a server who it is.

use std::fmt;

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Map, Value};

/// The first bytes of a seed, which base 32 shows as `SU`: the seed of a user. Each letter has 5 bits.
const SEED_OF_USER: [u8; 2] = [0x95, 0];
/// The first byte of a user's public key: `U`.
const PUBLIC_OF_USER: u8 = 20 << 3;
const KEY_BYTES: usize = 32;
const CHECKSUM_BYTES: usize = 2;

/// What a client shows.
pub(crate) enum Login {
    /// Nothing.
    Anonymous,
    /// A token.
    Token(String),
    /// A user's name and password.
    Password { user: String, password: String },
    /// A key, with which it signs what the server asks, and the claims that name the key, if there are any.
    Key { key: Box<Ed25519KeyPair>, claims: Option<String> },
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Token(_) => "Token",
            Self::Password { .. } => "Password",
            Self::Key { .. } => "Key",
        })
    }
}

/// Why credentials cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadCredentials(&'static str);

impl Login {
    /// Reads a credentials file as NATS's tools write it: a JWT and the seed of a user's key between lines of dashes. A
    /// seed alone will do for a server that knows the key itself.
    ///
    /// # Errors
    /// It has no seed of a user.
    pub(crate) fn of_credentials(text: &str) -> Result<Self, BadCredentials> {
        let mut words = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.contains("---"));
        let is_seed = |word: &&str| word.starts_with("SU") && !word.contains([' ', '.']);
        let seed =
            words.clone().find(is_seed).ok_or(BadCredentials("it has no line with the seed of a user, SU..."))?;
        let claims = words.find(|word| word.starts_with("ey") && word.split('.').count() == 3).map(str::to_owned);
        Ok(Self::Key { key: Box::new(key_of(seed)?), claims })
    }

    /// The options with which a client answers a server that sent this nonce; `None` = it sent none, and a key must sign one.
    pub(super) fn options(&self, nonce: Option<&str>) -> Option<Map<String, Value>> {
        let named = |options: &[(&str, &str)]| {
            options.iter().map(|(name, value)| ((*name).to_owned(), Value::from(*value))).collect()
        };
        Some(match self {
            Self::Anonymous => Map::new(),
            Self::Token(token) => named(&[("auth_token", token)]),
            Self::Password { user, password } => named(&[("user", user), ("pass", password)]),
            Self::Key { key, claims } => {
                let signature = BASE64URL_NOPAD.encode(key.sign(nonce?.as_bytes()).as_ref());
                match claims {
                    Some(claims) => named(&[("jwt", claims), ("sig", &signature)]),
                    None => named(&[("nkey", &public_text(key)), ("sig", &signature)]),
                }
            }
        })
    }
}

/// The key of a seed: two bytes of kind, the seed, and a checksum, in base 32.
fn key_of(seed: &str) -> Result<Ed25519KeyPair, BadCredentials> {
    let bytes = BASE32_NOPAD.decode(seed.as_bytes()).map_err(|_| BadCredentials("its seed is no base 32"))?;
    let (checked, checksum) =
        bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(BadCredentials("its seed is too short"))?;
    if crc16(checked) != u16::from_le_bytes(*checksum) {
        return Err(BadCredentials("the checksum of its seed is wrong"));
    }
    let seed = checked.strip_prefix(&SEED_OF_USER).ok_or(BadCredentials("its seed is not a user's"))?;
    Ed25519KeyPair::from_seed_unchecked(seed).map_err(|_| BadCredentials("its seed has another length"))
}

/// A user's public key as servers name it.
fn public_text(key: &Ed25519KeyPair) -> String {
    let mut bytes = Vec::with_capacity(1 + KEY_BYTES + CHECKSUM_BYTES);
    bytes.push(PUBLIC_OF_USER);
    bytes.extend_from_slice(key.public_key().as_ref());
    let checksum = crc16(&bytes);
    bytes.extend(checksum.to_le_bytes());
    BASE32_NOPAD.encode(&bytes)
}

/// The checksum of NATS's keys: CRC-16 with the polynomial 0x1021, from 0, most significant bit first.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ u16::from(*byte) << 8,
            |crc: u16, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(kind: &[u8], key: &[u8]) -> String {
        let mut bytes = [kind, key].concat();
        let checksum = crc16(&bytes);
        bytes.extend(checksum.to_le_bytes());
        BASE32_NOPAD.encode(&bytes)
    }

    #[test]
    fn the_checksum_is_that_of_its_published_test() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
    }

    #[test]
    fn credentials_sign_the_nonce_of_the_server() {
        let seed = text_of(&SEED_OF_USER, &[7; KEY_BYTES]);
        assert!(seed.starts_with("SU") && seed.len() == 58, "{seed}");
        let file = format!(
            "-----BEGIN NATS USER JWT-----\neyJ0.eyJ1.sig\n------END NATS USER JWT------\n\n* IMPORTANT *\nSUCH keys are secret.\n\
             \n-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        );
        let login = Login::of_credentials(&file).expect("credentials");
        assert_eq!(login.options(None), None, "nothing to sign");
        let options = login.options(Some("nonce")).expect("options");
        assert_eq!(options["jwt"], "eyJ0.eyJ1.sig");
        let key = Ed25519KeyPair::from_seed_unchecked(&[7; KEY_BYTES]).expect("a key");
        assert_eq!(options["sig"], BASE64URL_NOPAD.encode(key.sign(b"nonce").as_ref()));
        let alone = Login::of_credentials(&seed).expect("a seed").options(Some("n")).expect("options");
        let public = alone["nkey"].as_str().expect("a key");
        assert!(public.starts_with('U') && public.len() == 56 && !alone.contains_key("jwt"), "{public}");
        assert_eq!(format!("{login:?}"), "Key");
    }

    #[test]
    fn what_is_no_seed_of_a_user_is_refused() {
        let seed = text_of(&SEED_OF_USER, &[7; KEY_BYTES]);
        let account = text_of(&[18 << 3, 0], &[7; KEY_BYTES]);
        let short = text_of(&SEED_OF_USER, &[7; KEY_BYTES - 1]);
        let torn = seed.replace(&seed[20..21], if &seed[20..21] == "A" { "B" } else { "A" });
        for wrong in ["", "SU", "SU!", &account, &short, &torn, &seed[..40]] {
            assert!(Login::of_credentials(wrong).is_err(), "{wrong}");
        }
    }
}
