//! Masks words that look like secrets in texts that leave the machine.
//!
//! No rule recognises every secret. So leave out a text that may hold one, unless a reader needs it: values of configuration
//! fields, names, addresses and messages.

/// What stands in place of a secret.
pub const MASK: &str = "(masked)";

/// Least length of a run of letters and digits that is masked if it changes between the two [`CHANGES`] times.
const RUN_CHARS: usize = 20;
/// Least number of changes between letters and digits in such a run.
const CHANGES: usize = 3;
/// Least length of a run that is masked if it has letters of both cases.
const LETTERS: usize = 32;
/// Least number of characters, without `-` and `_`, of a word that is masked if it has letters of both cases and
/// [`JOINED_DIGITS`] digits.
const JOINED_CHARS: usize = 40;
/// Least number of digits in such a word.
const JOINED_DIGITS: usize = 5;
/// Hexadecimal digits of a UUID.
const UUID_DIGITS: usize = 32;
/// The beginnings of well-known tokens.
const PREFIXES: [&str; 15] = [
    "sk-",
    "sk_",
    "pk_",
    "hf_",
    "ghp_",
    "gho_",
    "github_pat_",
    "glpat-",
    "xoxb-",
    "xoxp-",
    "nvapi-",
    "npm_",
    "AKIA",
    "ASIA",
    "eyJ",
];
/// Least number of characters after such a beginning.
const PREFIXED_CHARS: usize = 8;
/// Endings of names whose value is a secret, in lower case. A name is compared without all but its letters and digits.
const SECRET_NAMES: [&str; 13] = [
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "secretkey",
    "token",
    "accesstoken",
    "apikey",
    "bearer",
    "authorization",
    "credential",
    "credentials",
];

/// The text with [`MASK`] in place of user parts and queries of URLs, values after a name such as `password`, and words that
/// look like keys or tokens.
#[must_use]
pub fn masked(text: &str) -> String {
    // The user part is everything between the first `://` and the last `@` after it: a password may hold any character.
    let user = text.split_once("://").and_then(|(before, rest)| Some((before, rest.rsplit_once('@')?.1)));
    let Some((before, after)) = user else { return words_masked(text) };
    let (address, rest) = after.split_at(after.find(separates).unwrap_or(after.len()));
    format!("{}://{MASK}@{}{}", words_masked(before), address_masked(address), words_masked(rest))
}

/// Whether a value with this name is a secret. For a name such as `nats_secret_file`, whose value is a path, this is false.
#[must_use]
pub fn is_secret_name(name: &str) -> bool {
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let name = name.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|secret| name.ends_with(secret))
}

const fn separates(c: char) -> bool {
    c.is_ascii_whitespace()
        || matches!(c, '"' | '\'' | '`' | ',' | ';' | '(' | ')' | '<' | '>' | '[' | ']' | '{' | '}' | '|')
}

fn words_masked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut next) = (text, Next::Any);
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(separates).unwrap_or(rest.len()));
        if !word.is_empty() {
            let is_sign = matches!(word, "=" | ":");
            let is_secret = next == Next::Value && !is_sign;
            out.push_str(&if is_secret { MASK.to_owned() } else { word_masked(word) });
            next = if is_sign && next != Next::Any { Next::Value } else { Next::after(word) };
        }
        let (between, after) = after.split_at(after.find(|c: char| !separates(c)).unwrap_or(after.len()));
        out.push_str(between);
        rest = after;
    }
    out
}

/// The kind of the next word of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Any,
    /// An `=` or `:`, and then a secret, or any other word.
    Sign,
    /// A secret.
    Value,
}

impl Next {
    /// The kind of the word after `password:`, `token =` or `Bearer`.
    fn after(word: &str) -> Self {
        let name = word.trim_end_matches([':', '=']);
        let has_value = name.len() < word.len() || name.eq_ignore_ascii_case("bearer");
        match (is_secret_name(name), has_value) {
            (false, _) => Self::Any,
            (true, false) => Self::Sign,
            (true, true) => Self::Value,
        }
    }
}

fn word_masked(word: &str) -> String {
    if let Some((scheme, rest)) = word.split_once("://") {
        return format!("{scheme}://{}", address_masked(rest));
    }
    if let Some((path, query)) = word.split_once('?')
        && !query.is_empty()
    {
        return format!("{}?{MASK}", word_masked(path));
    }
    if word.contains('&') {
        return word.split('&').map(word_masked).collect::<Vec<_>>().join("&");
    }
    if let Some(masked) = value_masked(word) {
        return masked;
    }
    if let Some((user, host)) = word.rsplit_once('@')
        && user.contains(':')
    {
        return format!("{MASK}@{host}");
    }
    if word.starts_with(['/', '.', '~']) { segments_masked(word) } else { segment_masked(word) }
}

/// The word with the value of its secret name masked; `None` = it has no secret name.
fn value_masked(word: &str) -> Option<String> {
    let at = word.find(['=', ':'])?;
    let ((name, sign), value) = (word[..=at].split_at(at), &word[at + 1..]);
    if value.is_empty() {
        return None;
    }
    if is_secret_name(name) {
        return Some(format!("{name}={MASK}"));
    }
    value_masked(value).map(|value| format!("{}{sign}{value}", segment_masked(name)))
}

/// Masks the part of a URL after its scheme and its user part.
fn address_masked(address: &str) -> String {
    match address.split_once(['?', '#']) {
        Some((path, _)) => format!("{}?{MASK}", segments_masked(path)),
        None => segments_masked(address),
    }
}

fn segments_masked(path: &str) -> String {
    path.split('/').map(segment_masked).collect::<Vec<_>>().join("/")
}

fn segment_masked(segment: &str) -> String {
    if looks_secret(segment) { MASK.to_owned() } else { segment.to_owned() }
}

/// Whether a word looks random, as keys and tokens do.
fn looks_secret(word: &str) -> bool {
    let is_prefixed = |prefix: &str| word.strip_prefix(prefix).is_some_and(|rest| rest.len() >= PREFIXED_CHARS);
    if PREFIXES.iter().any(|prefix| is_prefixed(prefix)) {
        return true;
    }
    let mut runs = word.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '+' | '=' | '~' | '%' | '$' | '!')));
    runs.any(is_random_run) || is_random_joined(word)
}

fn is_random_run(run: &str) -> bool {
    let bytes = run.as_bytes();
    let has = |is: fn(&u8) -> bool| bytes.iter().any(is);
    // A name followed by a number changes only once.
    let changes = bytes.windows(2).filter(|pair| pair[0].is_ascii_digit() != pair[1].is_ascii_digit()).count();
    let is_mixed = has(u8::is_ascii_lowercase) && has(u8::is_ascii_uppercase);
    (bytes.len() >= RUN_CHARS && changes >= CHANGES) || (bytes.len() >= LETTERS && is_mixed)
}

fn is_random_joined(word: &str) -> bool {
    let joined: Vec<u8> = word.bytes().filter(|byte| !matches!(byte, b'-' | b'_')).collect();
    let count = |is: fn(&u8) -> bool| joined.iter().filter(|byte| is(byte)).count();
    let is_uuid =
        joined.len() >= UUID_DIGITS && joined.iter().all(u8::is_ascii_hexdigit) && count(u8::is_ascii_alphabetic) > 0;
    let is_token = joined.len() >= JOINED_CHARS
        && joined.iter().all(u8::is_ascii_alphanumeric)
        && count(u8::is_ascii_digit) >= JOINED_DIGITS
        && count(u8::is_ascii_lowercase) > 0
        && count(u8::is_ascii_uppercase) > 0;
    is_uuid || is_token
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn secrets_are_masked_wherever_they_stand() {
        for (text, secrets) in [
            ("nats://alice:hunter2@n1:4222", &["alice", "hunter2"][..]),
            ("http://u:p/a,s w@h:1/x?key=abc", &["p/a", "s w", "abc"]),
            ("say tcp://10.0.0.1:5557?token=zzz", &["zzz"]),
            ("alice:hunter2@h", &["hunter2"]),
            ("password=hunter2", &["hunter2"]),
            ("h:8000/x?password=hunter2", &["hunter2"]),
            ("user=a&password=hunter2", &["hunter2"]),
            ("/path?token=abc", &["abc"]),
            ("x:token=abc", &["abc"]),
            ("Authorization: Bearer abc.def", &["abc"]),
            ("the api_key = \"hunter2\" is wrong", &["hunter2"]),
            ("hf_abcdefghij", &["abcdefghij"]),
            ("0123456789abcdef0123456789abcdef", &["0123456789abcdef"]),
            ("7f3c9a52-1c0e-4b57-9d42-0a7f6a5e4d3c", &["7f3c9a52", "0a7f6a5e4d3c"]),
            ("/run/0123456789abcdef0123456789abcdef/s", &["0123456789abcdef"]),
            ("SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY", &["SUACSSL3"]),
            ("Zm9v-YmFyYmF6_cXV4cXV1eDE-yMzQ1Njc4OTBhYmNk", &["Zm9v", "yMzQ"]),
        ] {
            let shown = masked(text);
            assert!(shown.contains(MASK), "{text} -> {shown}");
            for secret in secrets {
                assert!(!shown.contains(secret), "{text} -> {shown}");
            }
        }
    }

    #[test]
    fn what_is_no_secret_stays() {
        for text in [
            "tcp://10.0.0.8:5557",
            "nats://n1.example:4222",
            "/etc/kvrouted/routers.secret",
            "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8",
            "vllm-decode-7d9c6b8f5d-x2k4q",
            "kvrouted_worker_blocks_stored_total{worker_id=\"18446744073709551615\",dp_rank=\"3\"} 1.2345678901234567e-05",
            "w18446744073709551615",
            "worker 3/1 is unproven: joined_late, 120 tokens",
            "router 0123456789abcdef",
        ] {
            assert_eq!(masked(text), text);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_masked_without_a_panic(text in any::<String>()) {
            prop_assert_eq!(masked(&text).is_empty(), text.is_empty());
        }
    }
}
