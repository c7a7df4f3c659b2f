//! Keys of callers: a file with their hashes, compared in constant time, and limits for each key.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::StatusCode;
use hyper::header::{self, HeaderMap};
use parking_lot::Mutex;
use serde::Deserialize;
use subtle::ConstantTimeEq as _;

use super::headers::X_API_KEY;
use crate::api::ApiError;
use crate::limits::{CALLER_KEYS_BYTES_MAX, CALLER_KEYS_MAX};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    #[serde(default)]
    key: Vec<RawKey>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawKey {
    name: String,
    sha256: String,
    requests_per_minute: Option<u32>,
    burst: Option<u32>,
    concurrent_max: Option<usize>,
    tenant: Option<String>,
    priority_max: Option<i32>,
}

/// A rate limit: a bucket that fills evenly, from which each request takes one. Time is an argument.
#[derive(Debug)]
struct Bucket {
    per_minute: u32,
    burst: u32,
    /// When the bucket would be full, if nothing more were taken.
    full_at: Option<Instant>,
}

impl Bucket {
    /// Takes one, or says how long to wait for it.
    fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let one = Duration::from_secs(60) / self.per_minute.max(1);
        let full_at = self.full_at.map_or(now, |at| at.max(now));
        let next = full_at + one;
        let over = next.duration_since(now).saturating_sub(one * self.burst.max(1));
        if !over.is_zero() {
            return Err(over);
        }
        self.full_at = Some(next);
        Ok(())
    }
}

/// A caller's key, without the key itself.
#[derive(Debug)]
pub(crate) struct CallerKey {
    pub(crate) name: String,
    pub(crate) tenant: String,
    pub(crate) priority_max: Option<i32>,
    sha256: [u8; 32],
    concurrent_max: Option<usize>,
    running: Arc<AtomicUsize>,
    bucket: Option<Arc<Mutex<Bucket>>>,
}

/// A request under way with a key: counts against the key's limit until it is dropped.
#[derive(Debug)]
pub(crate) struct KeyUse {
    pub(crate) key: Arc<CallerKey>,
}

impl Drop for KeyUse {
    fn drop(&mut self) {
        self.key.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All keys of a file.
pub struct CallerKeys {
    path: PathBuf,
    keys: ArcSwap<Vec<Arc<CallerKey>>>,
}

impl CallerKeys {
    /// Reads the file.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn load(path: &Path) -> Result<Self, String> {
        let keys = read(path, &[])?;
        Ok(Self { path: path.to_owned(), keys: ArcSwap::from_pointee(keys) })
    }

    /// Reads the file again. Keys that stay keep their counts.
    ///
    /// # Errors
    /// What is wrong with it. The keys stay as they were.
    pub fn reload(&self) -> Result<usize, String> {
        let keys = read(&self.path, &self.keys.load())?;
        let count = keys.len();
        self.keys.store(Arc::new(keys));
        Ok(count)
    }

    /// Admits a request by its key.
    ///
    /// # Errors
    /// 401 without a known key, 429 beyond the key's limits.
    pub(crate) fn admit(&self, headers: &HeaderMap, now: Instant) -> Result<KeyUse, ApiError> {
        let Some(presented) = presented(headers) else {
            let message = "an API key is required; send it as `Authorization: Bearer KEY`";
            return Err(ApiError::caller(StatusCode::UNAUTHORIZED, "missing_api_key", message));
        };
        let Some(key) = self.find(presented) else {
            let message = "the API key is not known; ask the operator for one";
            return Err(ApiError::caller(StatusCode::UNAUTHORIZED, "invalid_api_key", message));
        };
        let running = key.running.fetch_add(1, Ordering::Relaxed);
        // From here on, dropping it gives the place back.
        let key_use = KeyUse { key };
        let key = &key_use.key;
        if let Some(most) = key.concurrent_max.filter(|most| running >= *most) {
            let message = format!("this API key may have {most} requests under way; wait until one has ended");
            let error = ApiError::caller(StatusCode::TOO_MANY_REQUESTS, "concurrency_limit", message);
            return Err(error.retry_after(1));
        }
        if let Some(bucket) = &key.bucket {
            let mut bucket = bucket.lock();
            let per_minute = bucket.per_minute;
            bucket.take(now).map_err(|wait| {
                let message = format!("this API key may send {per_minute} requests a minute; send fewer");
                let seconds = u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).saturating_add(1);
                ApiError::caller(StatusCode::TOO_MANY_REQUESTS, "rate_limit", message).retry_after(seconds)
            })?;
        }
        Ok(key_use)
    }

    /// Compares with every key, so that the time says nothing of which one matched.
    fn find(&self, presented: &[u8]) -> Option<Arc<CallerKey>> {
        let digest = ring::digest::digest(&ring::digest::SHA256, presented);
        let keys = self.keys.load();
        let mut found = None;
        for key in keys.iter() {
            if bool::from(key.sha256.ct_eq(digest.as_ref())) {
                found = Some(Arc::clone(key));
            }
        }
        found
    }
}

/// The key of a request: `Authorization: Bearer`, or `x-api-key`.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        return scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii());
    }
    headers.get(X_API_KEY).map(|value| value.as_bytes().trim_ascii())
}

fn read(path: &Path, before: &[Arc<CallerKey>]) -> Result<Vec<Arc<CallerKey>>, String> {
    let wrong = |why: String| format!("the file of caller keys {}: {why}", path.display());
    let size = std::fs::metadata(path).map_err(|error| wrong(format!("cannot be read: {error}")))?.len();
    if size > CALLER_KEYS_BYTES_MAX {
        return Err(wrong(format!("has {size} bytes; at most {CALLER_KEYS_BYTES_MAX} are read")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    parse(&text, before).map_err(wrong)
}

fn parse(text: &str, before: &[Arc<CallerKey>]) -> Result<Vec<Arc<CallerKey>>, String> {
    // The message of the parser would repeat the line, which may hold a key that somebody wrote by mistake.
    let file: RawFile = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        format!("line {line}: {}; each key is a table [[key]] with name and sha256", error.message())
    })?;
    if file.key.is_empty() {
        return Err("has no [[key]], so that nobody would be served; add one".into());
    }
    if file.key.len() > CALLER_KEYS_MAX {
        return Err(format!("has {} keys; at most {CALLER_KEYS_MAX} are compared", file.key.len()));
    }
    let mut keys: Vec<Arc<CallerKey>> = Vec::with_capacity(file.key.len());
    for raw in file.key {
        let key = key(raw, before)?;
        if keys.iter().any(|other| other.name == key.name || other.sha256 == key.sha256) {
            return Err(format!("`{}` is there twice, by name or by sha256; remove one", key.name));
        }
        keys.push(Arc::new(key));
    }
    Ok(keys)
}

fn key(raw: RawKey, before: &[Arc<CallerKey>]) -> Result<CallerKey, String> {
    let RawKey { name, sha256, requests_per_minute, burst, concurrent_max, tenant, priority_max } = raw;
    let Some(sha256) = unhex(&sha256) else {
        return Err(format!(
            "sha256 of `{name}` is not 64 hexadecimal digits; printf %s \"$KEY\" | sha256sum makes them"
        ));
    };
    if requests_per_minute == Some(0) || burst == Some(0) || concurrent_max == Some(0) {
        return Err(format!("a limit of `{name}` is 0, so that it would never be served; remove the key or the limit"));
    }
    let old = before.iter().find(|old| old.name == name && old.sha256 == sha256);
    let running = old.map_or_else(Arc::default, |old| Arc::clone(&old.running));
    let bucket = requests_per_minute.map(|per_minute| {
        let burst = burst.unwrap_or_else(|| (per_minute / 10).max(1));
        let full_at = old.and_then(|old| old.bucket.as_ref()).and_then(|bucket| bucket.lock().full_at);
        Arc::new(Mutex::new(Bucket { per_minute, burst, full_at }))
    });
    let tenant = tenant.unwrap_or_else(|| name.clone());
    Ok(CallerKey { name, tenant, priority_max, sha256, concurrent_max, running, bucket })
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let bytes = text.as_bytes();
    if bytes.len() != 64 || !bytes.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut out = [0; 32];
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    /// `printf %s secret | sha256sum`
    const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

    fn keys(text: &str) -> CallerKeys {
        let keys = parse(text, &[]).expect("good keys");
        CallerKeys { path: PathBuf::new(), keys: ArcSwap::from_pointee(keys) }
    }

    fn bearer(key: &str) -> HeaderMap {
        let value = HeaderValue::from_str(&format!("Bearer {key}")).expect("a header");
        HeaderMap::from_iter([(header::AUTHORIZATION, value)])
    }

    #[test]
    fn only_a_known_key_is_admitted() {
        let keys = keys(&format!("[[key]]\nname = \"a\"\nsha256 = \"{SECRET}\""));
        let now = Instant::now();
        assert_eq!(keys.admit(&bearer("secret"), now).expect("known").key.tenant, "a");
        let anthropic = HeaderMap::from_iter([(X_API_KEY, HeaderValue::from_static("secret"))]);
        assert!(keys.admit(&anthropic, now).is_ok());
        for headers in [bearer("Secret"), bearer(""), bearer(SECRET), HeaderMap::new()] {
            assert_eq!(keys.admit(&headers, now).expect_err("unknown").status, StatusCode::UNAUTHORIZED);
        }
    }

    #[test]
    fn places_come_back_when_requests_end() {
        let keys = keys(&format!("[[key]]\nname = \"a\"\nsha256 = \"{SECRET}\"\nconcurrent_max = 1"));
        let now = Instant::now();
        let first = keys.admit(&bearer("secret"), now).expect("a place");
        for _ in 0..3 {
            assert_eq!(keys.admit(&bearer("secret"), now).expect_err("full").code, "concurrency_limit");
        }
        drop(first);
        assert!(keys.admit(&bearer("secret"), now).is_ok());
    }

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut bucket = Bucket { per_minute: 60, burst: 2, full_at: None };
        let start = Instant::now();
        assert_eq!(bucket.take(start), Ok(()));
        assert_eq!(bucket.take(start), Ok(()));
        assert_eq!(bucket.take(start), Err(Duration::from_secs(1)));
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Ok(()));
        assert!(bucket.take(start + Duration::from_secs(1)).is_err());
        let later = start + Duration::from_secs(100);
        assert_eq!((bucket.take(later), bucket.take(later)), (Ok(()), Ok(())));
        assert!(bucket.take(later).is_err());
    }

    #[test]
    fn a_reload_keeps_the_counts_of_keys_that_stay() {
        let text = format!("[[key]]\nname = \"a\"\nsha256 = \"{SECRET}\"\nconcurrent_max = 1");
        let before = keys(&text);
        let running = before.admit(&bearer("secret"), Instant::now()).expect("a place");
        let after = parse(&text, &before.keys.load()).expect("good keys");
        let after = CallerKeys { path: PathBuf::new(), keys: ArcSwap::from_pointee(after) };
        assert!(after.admit(&bearer("secret"), Instant::now()).is_err());
        drop(running);
        assert!(after.admit(&bearer("secret"), Instant::now()).is_ok());
    }

    #[test]
    fn a_bad_file_says_what_is_wrong_and_repeats_no_key() {
        for (text, part) in [
            ("", "no [[key]]"),
            ("[[key]]\nname = \"a\"\nsha256 = \"sk-mistake\"", "64 hexadecimal digits"),
            ("[[key]]\nname = \"a\"\nkey = \"sk-mistake\"", "line 3"),
            ("sk-mistake", "line 1"),
        ] {
            let error = parse(text, &[]).expect_err("bad");
            assert!(error.contains(part), "{error}");
            assert!(!error.contains("sk-mistake"), "{error}");
        }
    }
}
