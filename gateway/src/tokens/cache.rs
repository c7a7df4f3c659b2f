//! The cache of rendered prompts by exact body, and one rendering at a time for each body.
//!
//! A rendering is a task of its own: a caller that hangs up, or whose deadline passes, does not end it for the
//! others, and its result is cached even if nobody waits any more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::watch;
use xxhash_rust::xxh3::Xxh3;

use super::rendered::Rendered;
use crate::api::ApiPath;
use crate::engines::ServedModel;
use crate::limits::{RENDERS_IN_FLIGHT_MAX, TOKEN_CACHE_ENTRY_BYTES, TOKEN_CACHE_USUAL_ENTRY_BYTES};

/// The hash of a path, a model and a body.
pub(super) type Key = u128;
/// A rendered prompt, or why there is none.
pub(super) type Outcome = Result<Arc<Rendered>, Arc<str>>;
type InFlight = Mutex<HashMap<Key, watch::Receiver<Option<Outcome>>>>;

#[derive(Clone, Debug)]
struct Weight;

impl Weighter<Key, Arc<Rendered>> for Weight {
    fn weight(&self, _: &Key, rendered: &Arc<Rendered>) -> u64 {
        let salt = rendered.salt.as_ref().map_or(0, |salt| salt.len());
        let bytes = size_of_val(&*rendered.tokens) + size_of_val(&*rendered.media) + salt;
        TOKEN_CACHE_ENTRY_BYTES + bytes as u64
    }
}

/// Rendered prompts, bounded by bytes.
pub(super) struct TokenCache {
    cache: Arc<Cache<Key, Arc<Rendered>, Weight>>,
    in_flight: Arc<InFlight>,
    /// Drawn at the start, so that nobody can make two bodies with one hash.
    seed: u64,
}

/// Removes a body's entry when its rendering ends, however it ends.
struct Finish {
    in_flight: Arc<InFlight>,
    key: Key,
}

impl Drop for Finish {
    fn drop(&mut self) {
        self.in_flight.lock().remove(&self.key);
    }
}

impl TokenCache {
    pub(super) fn new(bytes_max: u64, seed: u64) -> Self {
        let items = (bytes_max / TOKEN_CACHE_USUAL_ENTRY_BYTES).max(1) as usize;
        Self { cache: Arc::new(Cache::with_weighter(items, bytes_max, Weight)), in_flight: Arc::default(), seed }
    }

    pub(super) fn key(&self, path: ApiPath, model: &ServedModel, body: &[u8]) -> Key {
        let mut hash = Xxh3::with_seed(self.seed);
        let lora = model.lora.as_deref().unwrap_or_default();
        for part in [path.label(), &model.base, lora] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.update(body);
        hash.digest128()
    }

    pub(super) fn get(&self, key: Key) -> Option<Arc<Rendered>> {
        self.cache.get(&key)
    }

    pub(super) fn remove(&self, key: Key) {
        self.cache.remove(&key);
    }

    pub(super) fn clear(&self) {
        self.cache.clear();
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> u64 {
        self.cache.weight()
    }

    /// Waits for the rendering of a body, which `render` makes if there is none under way. `render` must end by itself.
    pub(super) async fn wait<F>(&self, key: Key, deadline: Instant, render: impl FnOnce() -> F) -> Outcome
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let Some(mut receiver) = self.join(key, render) else {
            return Err(Arc::from("too many prompts are being rendered at once"));
        };
        let outcome = match tokio::time::timeout_at(deadline.into(), receiver.wait_for(Option::is_some)).await {
            Ok(Ok(outcome)) => outcome.clone(),
            Ok(Err(_)) => Some(Err(Arc::from("the rendering ended without a result"))),
            Err(_) => Some(Err(Arc::from("the renderer did not answer before the request's deadline"))),
        };
        outcome.unwrap_or_else(|| Err(Arc::from("the rendering ended without a result")))
    }

    /// The rendering under way, or a new one; `None` = too many are under way.
    fn join<F>(&self, key: Key, render: impl FnOnce() -> F) -> Option<watch::Receiver<Option<Outcome>>>
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let mut in_flight = self.in_flight.lock();
        let has_room = in_flight.len() < RENDERS_IN_FLIGHT_MAX;
        let vacant = match in_flight.entry(key) {
            Entry::Occupied(under_way) => return Some(under_way.get().clone()),
            Entry::Vacant(vacant) => vacant,
        };
        if !has_room {
            return None;
        }
        let (sender, receiver) = watch::channel(None);
        vacant.insert(receiver.clone());
        let (cache, finish) = (self.cache.clone(), Finish { in_flight: self.in_flight.clone(), key });
        let rendering = render();
        tokio::spawn(async move {
            let outcome = rendering.await;
            if let Ok(rendered) = &outcome {
                cache.insert(finish.key, rendered.clone());
            }
            // First out of the map, so that who comes now finds the cache; then to those that wait.
            drop(finish);
            sender.send_replace(Some(outcome));
        });
        Some(receiver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::TokenSource;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn rendered(tokens: usize) -> Arc<Rendered> {
        let tokens: Vec<u32> = (0..tokens as u32).collect();
        Arc::new(Rendered { tokens: tokens.into(), media: Arc::from([]), salt: None, source: TokenSource::Renderer })
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn model(base: &str, lora: Option<&str>) -> ServedModel {
        ServedModel { base: base.to_owned(), lora: lora.map(str::to_owned) }
    }

    #[tokio::test]
    async fn one_rendering_serves_all_that_wait() {
        let cache = Arc::new(TokenCache::new(1 << 20, 7));
        let count = Arc::new(AtomicUsize::new(0));
        let (release, gate) = oneshot::channel::<()>();
        let mut gate = Some(gate);
        let mut waiters = Vec::new();
        for _ in 0..10 {
            let (cache, count, gate) = (cache.clone(), count.clone(), gate.take());
            waiters.push(tokio::spawn(async move {
                cache
                    .wait(1, soon(), || async move {
                        count.fetch_add(1, Ordering::SeqCst);
                        if let Some(gate) = gate {
                            let _ = gate.await;
                        }
                        Ok(rendered(3))
                    })
                    .await
            }));
            tokio::task::yield_now().await;
        }
        release.send(()).expect("the rendering waits");
        for waiter in waiters {
            assert_eq!(waiter.await.expect("no panic").expect("tokens").tokens.len(), 3);
        }
        assert_eq!(count.load(Ordering::SeqCst), 1);
        assert!(cache.get(1).is_some() && cache.in_flight.lock().is_empty());
    }

    #[tokio::test]
    async fn a_caller_that_leaves_does_not_end_the_rendering() {
        let cache = Arc::new(TokenCache::new(1 << 20, 7));
        let (release, gate) = oneshot::channel::<()>();
        let leaver = tokio::spawn({
            let cache = cache.clone();
            async move {
                let render = || async move {
                    let _ = gate.await;
                    Ok(rendered(2))
                };
                cache.wait(5, soon(), render).await
            }
        });
        tokio::task::yield_now().await;
        let stayer = tokio::spawn({
            let cache = cache.clone();
            async move { cache.wait(5, soon(), || async { Err(Arc::from("a second rendering")) }).await }
        });
        tokio::task::yield_now().await;
        leaver.abort();
        let _ = leaver.await;
        release.send(()).expect("the rendering goes on");
        assert_eq!(stayer.await.expect("no panic").expect("tokens").tokens.len(), 2);
    }

    #[tokio::test]
    async fn a_deadline_ends_the_wait_and_not_the_rendering() {
        let cache = TokenCache::new(1 << 20, 7);
        let (release, gate) = oneshot::channel::<()>();
        let render = || async move {
            let _ = gate.await;
            Ok(rendered(2))
        };
        let outcome = cache.wait(5, Instant::now(), render).await;
        assert!(outcome.expect_err("no tokens yet").contains("deadline"));
        let mut under_way = cache.join(5, || async { Err(Arc::from("a second rendering")) }).expect("there is room");
        release.send(()).expect("the rendering goes on");
        under_way.wait_for(Option::is_some).await.expect("an outcome");
        assert!(cache.get(5).is_some());
    }

    #[tokio::test]
    async fn failures_and_panics_are_not_cached() {
        let cache = TokenCache::new(1 << 20, 7);
        let outcome = cache.wait(1, soon(), || async { Err(Arc::from("refused")) }).await;
        assert_eq!(outcome.expect_err("no tokens").as_ref(), "refused");
        let outcome = cache.wait(2, soon(), || async { panic!("a test's panic") }).await;
        assert!(outcome.expect_err("no tokens").contains("without a result"));
        assert!(cache.get(1).is_none() && cache.in_flight.lock().is_empty());
        assert!(cache.wait(2, soon(), || async { Ok(rendered(1)) }).await.is_ok());
    }

    #[tokio::test]
    async fn renderings_in_flight_are_bounded() {
        let cache = TokenCache::new(1 << 20, 7);
        for key in 0..RENDERS_IN_FLIGHT_MAX as Key {
            assert!(cache.join(key, std::future::pending).is_some());
        }
        assert!(cache.join(Key::MAX, std::future::pending).is_none());
        assert!(cache.join(0, std::future::pending).is_some(), "one more waits for a rendering under way");
        let outcome = cache.wait(Key::MAX, soon(), || async { Ok(rendered(1)) }).await;
        assert!(outcome.expect_err("no room").contains("too many"));
    }

    #[test]
    fn path_model_and_body_make_the_key() {
        let cache = TokenCache::new(1 << 20, 7);
        let path = ApiPath::Completions;
        let keys = [
            cache.key(path, &model("a", None), b"b"),
            cache.key(path, &model("ab", None), b""),
            cache.key(path, &model("a", Some("b")), b""),
            cache.key(path, &model("a", None), b"c"),
            cache.key(ApiPath::ChatCompletions, &model("a", None), b"b"),
            TokenCache::new(1 << 20, 8).key(path, &model("a", None), b"b"),
        ];
        let distinct: std::collections::HashSet<_> = keys.into_iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(keys[0], cache.key(path, &model("a", None), b"b"));
    }

    proptest! {
        #[test]
        fn the_cache_holds_no_more_bytes_than_it_may(sizes in proptest::collection::vec(1_usize..3000, 1..200)) {
            let bytes_max = 64 << 10;
            let cache = TokenCache::new(bytes_max, 7);
            for (key, size) in sizes.into_iter().enumerate() {
                cache.cache.insert(key as Key, rendered(size));
                prop_assert!(cache.bytes() <= bytes_max);
            }
        }
    }
}
