//! Principals: who may call from other hosts. Each has a name, one or two tokens, and a number that takes the place of a
//! user's.
//!
//! A principal's number follows from its name alone, so that it stays over restarts and when tokens are replaced. The
//! kernel gives numbers from [`PRINCIPALS_FROM`] on to no account; the routing socket refuses a process that has one all
//! the same. Tokens are kept and compared as SHA-256 hashes, all of them each time.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use subtle::ConstantTimeEq as _;

use super::tls::{read_secret, unusable};
use crate::error::Result;
use crate::limits::{PRINCIPAL_NAME_BYTES_MAX, PRINCIPAL_TOKENS_MAX, PRINCIPALS_MAX, TOKEN_BYTES_MAX, TOKEN_BYTES_MIN};
use crate::shares::{HTTP_USER, PRINCIPALS_FROM};

/// The hash of a token.
type TokenHash = [u8; SHA256_OUTPUT_LEN];

/// A caller from other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    /// Its name in the file, in logs and in metrics.
    pub(crate) name: Arc<str>,
    /// The number that takes the place of a user's.
    pub(crate) user: u32,
}

/// A principal, and which of its tokens it has shown.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) principal: Principal,
    hash: TokenHash,
}

/// The principals of a file.
#[derive(Debug, Default)]
pub(crate) struct Principals {
    tokens: Vec<Holder>,
}

impl Principals {
    /// Reads a file of principals.
    ///
    /// # Errors
    /// `Config` with the line at fault, or if every user of this host may read the file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = read_secret(path)?;
        let refused = |why: String| {
            unusable(path, why, "write one `NAME TOKEN` on each line, the token 32 to 256 visible ASCII characters")
        };
        let text = str::from_utf8(&text).map_err(|_| refused("it is not UTF-8 text".to_owned()))?;
        Self::parse(text).map_err(refused)
    }

    /// Parses the lines of a file. A message about a line has no token in it.
    fn parse(text: &str) -> Result<Self, String> {
        let mut principals = Self::default();
        let mut numbers: HashMap<u32, (Arc<str>, usize)> = HashMap::new();
        for (at, line) in text.lines().enumerate() {
            let refused = |why: String| format!("line {}: {why}", at + 1);
            let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
            let Some(name) = words.next() else { continue };
            let token = words.next().ok_or_else(|| refused("there is no token after the name".to_owned()))?;
            if words.next().is_some() {
                return Err(refused("there is more than a name and a token".to_owned()));
            }
            let user = user_of(name).map_err(refused)?;
            check_token(token.as_bytes()).map_err(refused)?;
            let (owner, tokens) = numbers.entry(user).or_insert_with(|| (name.into(), 0));
            *tokens += 1;
            if **owner != *name {
                return Err(refused(format!("{name} and {owner} would have the same number; rename one of them")));
            }
            if *tokens > PRINCIPAL_TOKENS_MAX {
                return Err(refused(format!("{name} has more than {PRINCIPAL_TOKENS_MAX} tokens; remove the oldest")));
            }
            let hash = hash_of(token.as_bytes());
            if let Some(other) = principals.tokens.iter().find(|other| other.hash == hash) {
                return Err(refused(format!("{} has this token already; draw another", other.principal.name)));
            }
            principals.tokens.push(Holder { principal: Principal { name: Arc::clone(owner), user }, hash });
        }
        match numbers.len() {
            0 => Err("it names no principal".to_owned()),
            1..=PRINCIPALS_MAX => Ok(principals),
            count => Err(format!("it names {count} principals, at most {PRINCIPALS_MAX} are allowed")),
        }
    }

    /// The principal that has this token. It takes as long whichever token matches, or none.
    pub(crate) fn holder(&self, token: &[u8]) -> Option<Holder> {
        let hash = hash_of(token);
        let mut found = None;
        for holder in &self.tokens {
            if bool::from(holder.hash.ct_eq(&hash)) {
                found = Some(holder);
            }
        }
        found.cloned()
    }

    /// Whether a principal may still use the token that it has shown.
    pub(crate) fn still_lists(&self, holder: &Holder) -> bool {
        self.tokens.iter().any(|listed| listed.hash == holder.hash && listed.principal == holder.principal)
    }

    /// The number of principals.
    pub(crate) fn count(&self) -> usize {
        self.tokens.iter().map(|token| token.principal.user).collect::<std::collections::HashSet<_>>().len()
    }
}

/// Checks the length and the characters of a token.
///
/// # Errors
/// What is wrong, without the token.
pub(crate) fn check_token(token: &[u8]) -> Result<(), String> {
    match token.len() {
        TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX if token.iter().all(u8::is_ascii_graphic) => Ok(()),
        TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX => Err("the token has characters other than visible ASCII".to_owned()),
        bytes => Err(format!("the token has {bytes} bytes, but a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}")),
    }
}

fn hash_of(bytes: &[u8]) -> TokenHash {
    let mut hash = TokenHash::default();
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

/// The number of the principal with this name.
fn user_of(name: &str) -> Result<u32, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if name.len() > PRINCIPAL_NAME_BYTES_MAX || !name.bytes().all(is_plain) {
        return Err(format!(
            "a name has at most {PRINCIPAL_NAME_BYTES_MAX} of the characters a-z, A-Z, 0-9, `-`, `.` and `_`"
        ));
    }
    let [a, b, c, d, ..] = hash_of(name.as_bytes());
    match u32::from_le_bytes([a, b, c, d]) | PRINCIPALS_FROM {
        HTTP_USER => Err(format!("{name} would have the number of the HTTP port's clients; rename it")),
        user => Ok(user),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::error::Kind;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    const C: &str = "cccccccccccccccccccccccccccccccccccccccc";

    fn named(principals: &Principals, token: &str) -> Option<String> {
        principals.holder(token.as_bytes()).map(|holder| holder.principal.name.to_string())
    }

    #[test]
    fn a_token_names_its_principal_and_two_tokens_name_the_same_one() {
        let text = format!("# gateways\n\neast {A}  # old\neast {B}\nwest\t{C}\n");
        let principals = Principals::parse(&text).expect("valid");
        assert_eq!([A, B, C].map(|token| named(&principals, token).unwrap()), ["east", "east", "west"]);
        assert_eq!((named(&principals, "c"), named(&principals, &A[1..]), principals.count()), (None, None, 2));
        let rotated = Principals::parse(&format!("east {B}\nwest {C}")).expect("valid");
        let (old, new) = (principals.holder(A.as_bytes()).unwrap(), principals.holder(B.as_bytes()).unwrap());
        assert_eq!((rotated.still_lists(&old), rotated.still_lists(&new)), (false, true));
        assert_eq!(old.principal, new.principal, "the number follows from the name");
        let renamed = Principals::parse(&format!("north {B}")).expect("valid");
        assert!(!renamed.still_lists(&new), "a token of another principal now");
    }

    #[test]
    fn numbers_are_no_accounts_and_stay() {
        let numbers = ["gateway-a", "gateway-b"].map(|name| user_of(name).unwrap());
        assert_eq!(numbers, [2_813_456_623, 4_054_470_763], "bookings outlive a daemon, so numbers never change");
        assert!(numbers.iter().all(|user| *user >= PRINCIPALS_FROM && *user != HTTP_USER));
    }

    #[test]
    fn a_wrong_line_is_named_without_its_token() {
        let many: String = (0..=PRINCIPALS_MAX).map(|at| format!("p{at} {at:0>40}\n")).collect();
        for (text, word) in [
            (String::new(), "names no principal"),
            ("east".to_owned(), "line 1: there is no token"),
            (format!("\neast {A} {B}"), "line 2: there is more than"),
            (format!("ea/st {A}"), "a name has at most"),
            (format!("{} {A}", "n".repeat(65)), "a name has at most"),
            (format!("east {}", &A[..31]), "has 31 bytes"),
            (format!("east {}", A.repeat(7)), "has 280 bytes"),
            (format!("east {}\u{e9}", &A[..38]), "other than visible ASCII"),
            (format!("east {A}\neast {B}\neast {C}"), "line 3: east has more than 2 tokens"),
            (format!("east {A}\nwest {A}"), "line 2: east has this token already"),
            (many, "at most 256 are allowed"),
        ] {
            let refused = Principals::parse(&text).expect_err("refused");
            assert!(refused.contains(word) && !refused.contains(&A[..31]), "{refused}");
        }
    }

    #[test]
    fn two_names_with_one_number_are_refused() {
        // Found by trying names: SHA-256 agrees in the 31 bits that make the number.
        let (one, other) = colliding_names();
        let refused = Principals::parse(&format!("{one} {A}\n{other} {B}")).expect_err("refused");
        assert!(refused.contains("the same number; rename"), "{refused}");
    }

    /// Two names of one number, by the birthday paradox: about 60 000 names are tried.
    fn colliding_names() -> (String, String) {
        let mut seen = HashMap::new();
        let mut names = (0..).map(|at: u32| format!("n{at}"));
        names.find_map(|name| Some((seen.insert(user_of(&name).ok()?, name.clone())?, name))).expect("a collision")
    }

    #[test]
    fn a_file_that_all_may_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("principals");
        std::fs::write(&path, format!("east {A}\n")).unwrap();
        let mode = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(0o644);
        let refused = Principals::read(&path).expect_err("refused");
        assert!(refused.kind() == Kind::Config && refused.to_string().contains("chmod o="), "{refused}");
        mode(0o640);
        assert_eq!(Principals::read(&path).expect("valid").count(), 1);
        std::fs::write(&path, vec![b'x'; 2 << 20]).unwrap();
        assert!(Principals::read(&path).expect_err("refused").to_string().contains("bytes"));
        assert_eq!(Principals::read(folder.path()).expect_err("refused").kind(), Kind::Config);
    }
}
