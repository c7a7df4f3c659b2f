//! Keeps the objects of one kind as they are: by a list in pages, then a watch from there on, for ever.
//!
//! | what ends a watch | what follows |
//! |---|---|
//! | its time, a broken connection | another watch from the last `resourceVersion` |
//! | `410 Gone`, as a status or as an event | another list |
//! | an event that cannot be read | another list: it is not known which object has changed |
//!
//! Between them is a pause, which doubles with each failure and has some chance in it, so that many pickers do not ask
//! a server together that has just come back. While nothing can be had, the objects stay as they were.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::access::ApiAccess;
use super::client::{ApiClient, RequestError, shown};
use super::figures::{KindFigures, KubernetesFigure, KubernetesFigures};
use super::fleet::Problem;
use super::objects::{EventKind, OnlyMeta, Page, Resource, WatchEvent, read_object};
use crate::engines::back_off;
use crate::limits::{
    BACK_OFF_MAX, KUBERNETES_OBJECTS_BYTES_MAX, KUBERNETES_OBJECTS_MAX, KUBERNETES_PAGE_OBJECTS,
    KUBERNETES_WATCH_HEALTHY_MIN, KUBERNETES_WATCH_SECONDS,
};

/// Which objects of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) namespace: String,
    /// `labelSelector` or `fieldSelector`, and its value.
    pub(super) selector: (&'static str, String),
}

/// The objects as they were last seen.
#[derive(Debug)]
pub(super) struct Observed<T> {
    /// By name: all are of one namespace.
    pub(super) objects: BTreeMap<String, Arc<T>>,
    /// Whether a whole list has come.
    pub(super) is_listed: bool,
    /// Why nothing new is heard.
    pub(super) problem: Option<Problem>,
    /// Names of objects that cannot be read, as far as they have one.
    pub(super) unreadable: Vec<String>,
}

impl<T> Default for Observed<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), is_listed: false, problem: None, unreadable: Vec::new() }
    }
}

impl<T> Clone for Observed<T> {
    fn clone(&self) -> Self {
        Self {
            objects: self.objects.clone(),
            is_listed: self.is_listed,
            problem: self.problem.clone(),
            unreadable: self.unreadable.clone(),
        }
    }
}

/// Bytes of JSON of the objects that are kept. What is read of an object takes at most a few times as many.
#[derive(Debug, Default)]
struct Sizes {
    by_name: BTreeMap<String, usize>,
    total: usize,
}

impl Sizes {
    fn set(&mut self, name: &str, bytes: usize) {
        self.remove(name);
        self.by_name.insert(name.to_owned(), bytes);
        self.total = self.total.saturating_add(bytes);
    }

    fn remove(&mut self, name: &str) {
        self.total = self.total.saturating_sub(self.by_name.remove(name).unwrap_or(0));
    }

    fn check(&self) -> Result<(), RequestError> {
        match self.total > KUBERNETES_OBJECTS_BYTES_MAX {
            true => {
                Err(RequestError::Nonsense(format!("the objects have more than {KUBERNETES_OBJECTS_BYTES_MAX} bytes")))
            }
            false => Ok(()),
        }
    }
}

/// Follows the objects of a selection.
pub(super) struct Reflector<T> {
    access: Arc<ApiAccess>,
    selection: Selection,
    figures: Arc<KubernetesFigures>,
    observed: watch::Sender<Observed<T>>,
    sizes: Sizes,
    /// Where the next watch begins; `None` = the objects must be listed.
    version: Option<String>,
    /// Whether the last watch has begun.
    has_begun: bool,
    /// Whether it brought an event.
    has_heard: bool,
}

impl<T: Resource> Reflector<T> {
    /// Follows a selection until the receiver is gone. Objects that are known from another selection stay until the
    /// first list.
    pub(super) fn start(
        access: Arc<ApiAccess>,
        selection: Selection,
        figures: Arc<KubernetesFigures>,
        known: Observed<T>,
    ) -> watch::Receiver<Observed<T>> {
        let (observed, seen) = watch::channel(known);
        let reflector = Self {
            access,
            selection,
            figures,
            observed,
            sizes: Sizes::default(),
            version: None,
            has_begun: false,
            has_heard: false,
        };
        tokio::spawn(reflector.run());
        seen
    }

    fn counts(&self) -> &KindFigures {
        self.figures.of(T::KIND)
    }

    async fn run(mut self) {
        let mut failures = 0_u32;
        loop {
            let asked = Instant::now();
            (self.has_begun, self.has_heard) = (false, false);
            let observed = self.observed.clone();
            let ended = tokio::select! {
                ended = self.list_and_watch() => ended,
                () = observed.closed() => return,
            };
            let lasted = asked.elapsed();
            if self.has_heard || (self.has_begun && lasted >= KUBERNETES_WATCH_HEALTHY_MIN) {
                failures = 0;
            }
            failures = failures.saturating_add(1);
            let mut pause = back_off(failures, rand::random());
            if let Err(error) = ended {
                if let RequestError::Refused { after: Some(after), .. } = &error {
                    pause = pause.max((*after).min(BACK_OFF_MAX));
                }
                self.failed(&error);
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = observed.closed() => return,
            }
        }
    }

    /// Counts and tells a failure, and forgets the version if the objects must be listed again.
    fn failed(&mut self, error: &RequestError) {
        let figure = match error {
            RequestError::Expired => KubernetesFigure::Expired,
            RequestError::Unauthorized | RequestError::Forbidden(_) | RequestError::Missing => {
                KubernetesFigure::Refused
            }
            _ => KubernetesFigure::Failed,
        };
        self.counts().count(figure);
        let was_listed = self.version.is_some();
        let verb = if was_listed { "watch" } else { "list" };
        // An account that may list but not watch still hears of changes, by lists.
        if matches!(error, RequestError::Expired | RequestError::Nonsense(_) | RequestError::Forbidden(_)) {
            self.version = None;
        }
        // Two things are no problem yet: a version that is too old for a watch, after which a list comes, and a watch that
        // broke, after which another comes.
        let is_usual = match error {
            RequestError::Expired => was_listed,
            RequestError::Lost(_) => self.has_begun,
            _ => false,
        };
        if !is_usual {
            self.tell(Some(self.problem(error, verb)));
        }
    }

    fn problem(&self, error: &RequestError, verb: &str) -> Problem {
        let (resource, group) = (T::KIND.label(), T::GROUP);
        let namespace = &self.selection.namespace;
        let at = &self.access.url;
        let what = format!("Kubernetes ({at}): {verb} {resource} in {namespace}: {error}");
        let known = "what is known of the pods stays in use";
        let remedy = match error {
            RequestError::Forbidden(_) => format!(
                "grant the verb \"{verb}\" on the resource \"{resource}\" of the API group {group:?} in the namespace \
                 {namespace:?} to this account, as in ops/kubernetes/base/rights.yaml; {known}"
            ),
            RequestError::Unauthorized => format!("name a token that the server accepts; {known}"),
            RequestError::Missing => format!(
                "the cluster has no {resource} of {group}/{}; install that API, or name a service in place of a pool",
                T::VERSION
            ),
            RequestError::Access(_) => format!("correct it; {known}"),
            RequestError::Nonsense(_) => format!("correct the API server's URL; {known}"),
            _ => format!("it is asked again; {known}"),
        };
        Problem { what, remedy }
    }

    /// Says a problem, or that there is none, and logs what is new.
    fn tell(&self, problem: Option<Problem>) {
        self.observed.send_if_modified(|observed| {
            if observed.problem == problem {
                return false;
            }
            match &problem {
                Some(problem) => tracing::warn!("{}; {}", problem.what, problem.remedy),
                None => tracing::info!(resource = T::KIND.label(), "Kubernetes answers again"),
            }
            observed.problem = problem;
            true
        });
    }

    /// Lists the objects if they are not known, and follows one watch to its end.
    async fn list_and_watch(&mut self) -> Result<(), RequestError> {
        let client = ApiClient::new(&self.access)?;
        let mut version = match self.version.clone() {
            Some(version) => version,
            None => self.list(&client).await?,
        };
        self.version = Some(version.clone());
        // Chance keeps the watches of many pickers from ending together.
        let seconds = KUBERNETES_WATCH_SECONDS + rand::random_range(0..KUBERNETES_WATCH_SECONDS);
        let version_encoded = encoded(&version);
        let query =
            format!("&watch=true&allowWatchBookmarks=true&resourceVersion={version_encoded}&timeoutSeconds={seconds}");
        let mut events = client.watch(&self.path(&query), Duration::from_secs(seconds)).await?;
        self.counts().count(KubernetesFigure::Watched);
        self.has_begun = true;
        self.tell(None);
        while let Some(line) = events.next().await? {
            self.apply(&line, &mut version)?;
            self.version = Some(version.clone());
            self.has_heard = true;
        }
        Ok(())
    }

    /// Reads all pages. The objects are replaced only by a whole list.
    async fn list(&mut self, client: &ApiClient) -> Result<String, RequestError> {
        let (mut objects, mut unreadable, mut sizes) = (BTreeMap::new(), Vec::new(), Sizes::default());
        let mut bytes_left = KUBERNETES_OBJECTS_BYTES_MAX;
        let mut next = String::new();
        let mut seen = 0_usize;
        let version = loop {
            let mut query = format!("&limit={KUBERNETES_PAGE_OBJECTS}");
            if !next.is_empty() {
                query.push_str("&continue=");
                query.push_str(&encoded(&next));
            }
            let body = client.page(&self.path(&query)).await?;
            bytes_left = bytes_left.checked_sub(body.len()).ok_or_else(|| {
                RequestError::Nonsense(format!("the list has more than {KUBERNETES_OBJECTS_BYTES_MAX} bytes"))
            })?;
            let nonsense = |error: serde_json::Error| RequestError::Nonsense(shown(&error.to_string()));
            let page: Page<'_> = serde_json::from_slice(&body).map_err(nonsense)?;
            let items = page.items.unwrap_or_default();
            // A page without items and with another one after it would never end.
            seen = seen.saturating_add(items.len().max(1));
            if seen > KUBERNETES_OBJECTS_MAX {
                let why = format!("the list has more than {KUBERNETES_OBJECTS_MAX} objects; narrow the selector");
                return Err(RequestError::Nonsense(why));
            }
            for item in items {
                match read_object::<T>(item) {
                    Some(object) => {
                        sizes.set(&object.metadata().name, item.get().len());
                        objects.insert(object.metadata().name.clone(), Arc::new(object));
                    }
                    None => unreadable.push(name_of(item.get())),
                }
            }
            if page.metadata.next.is_empty() {
                break page.metadata.resource_version;
            }
            next = page.metadata.next;
        };
        if version.is_empty() {
            return Err(RequestError::Nonsense("the list has no resourceVersion".to_owned()));
        }
        self.sizes = sizes;
        self.counts().count(KubernetesFigure::Listed);
        self.counts().add(KubernetesFigure::Unreadable, unreadable.len() as u64);
        self.observed.send_modify(|observed| {
            observed.objects = objects;
            observed.unreadable = unreadable;
            observed.is_listed = true;
        });
        Ok(version)
    }

    /// Applies one event.
    fn apply(&mut self, line: &[u8], version: &mut String) -> Result<(), RequestError> {
        let nonsense = |error: serde_json::Error| RequestError::Nonsense(shown(&error.to_string()));
        let event: WatchEvent<'_> = serde_json::from_slice(line).map_err(nonsense)?;
        self.counts().count(KubernetesFigure::Event);
        if event.kind == EventKind::Error {
            let status = serde_json::from_str(event.object.get()).map_err(nonsense)?;
            return Err(RequestError::of_status(&status, None));
        }
        let OnlyMeta { metadata } = serde_json::from_str(event.object.get()).map_err(nonsense)?;
        if metadata.resource_version.is_empty() {
            return Err(RequestError::Nonsense("an event has no resourceVersion".to_owned()));
        }
        let name = &metadata.name;
        match event.kind {
            EventKind::Bookmark | EventKind::Error => {}
            EventKind::Deleted => {
                self.sizes.remove(name);
                self.observed.send_modify(|observed| {
                    observed.objects.remove(name);
                    observed.unreadable.retain(|unreadable| unreadable != name);
                });
            }
            EventKind::Added | EventKind::Modified => {
                self.sizes.set(name, line.len());
                self.sizes.check()?;
                self.put(read_object::<T>(event.object), name)?;
            }
        }
        *version = metadata.resource_version;
        Ok(())
    }

    fn put(&self, object: Option<T>, name: &str) -> Result<(), RequestError> {
        let mut is_full = false;
        self.observed.send_modify(|observed| {
            observed.unreadable.retain(|unreadable| unreadable != name);
            match object {
                Some(object) => drop(observed.objects.insert(name.to_owned(), Arc::new(object))),
                None => {
                    observed.objects.remove(name);
                    observed.unreadable.push(shown(name));
                    self.counts().count(KubernetesFigure::Unreadable);
                }
            }
            is_full = observed.objects.len() + observed.unreadable.len() > KUBERNETES_OBJECTS_MAX;
        });
        match is_full {
            true => Err(RequestError::Nonsense(format!("there are more than {KUBERNETES_OBJECTS_MAX} objects"))),
            false => Ok(()),
        }
    }

    fn path(&self, query: &str) -> String {
        let Selection { namespace, selector: (kind, value) } = &self.selection;
        let group = match T::GROUP {
            "" => format!("/api/{}", T::VERSION),
            group => format!("/apis/{group}/{}", T::VERSION),
        };
        let (namespace, value) = (encoded(namespace), encoded(value));
        format!("{group}/namespaces/{namespace}/{}?{kind}={value}{query}", T::KIND.label())
    }
}

/// The name of an object that cannot be read, for people.
fn name_of(text: &str) -> String {
    let OnlyMeta { metadata } = serde_json::from_str(text).unwrap_or_default();
    if metadata.name.is_empty() { "(without a name)".to_owned() } else { shown(&metadata.name) }
}

/// Percent-encoding of a part of a URL: every byte that RFC 3986 does not call unreserved.
fn encoded(text: &str) -> String {
    use std::fmt::Write as _;
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            // Writing to a string cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::objects::{EndpointSlice, Pod};

    fn reflector<T: Resource>(selector: (&'static str, String)) -> (Reflector<T>, watch::Receiver<Observed<T>>) {
        let (observed, seen) = watch::channel(Observed::default());
        let access = ApiAccess { url: "https://api".into(), token_file: None, ca_file: None };
        let selection = Selection { namespace: "serving".into(), selector };
        let figures = Arc::new(KubernetesFigures::default());
        let reflector = Reflector {
            access: Arc::new(access),
            selection,
            figures,
            observed,
            sizes: Sizes::default(),
            version: None,
            has_begun: false,
            has_heard: false,
        };
        (reflector, seen)
    }

    #[test]
    fn a_path_names_group_namespace_and_selector() {
        let (slices, _) = reflector::<EndpointSlice>(("labelSelector", "kubernetes.io/service-name=vllm".to_owned()));
        let path = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices\
                    ?labelSelector=kubernetes.io%2Fservice-name%3Dvllm&limit=1";
        assert_eq!(slices.path("&limit=1"), path);
        let (pods, _) = reflector::<Pod>(("labelSelector", "a=b&watch=true#".to_owned()));
        assert_eq!(pods.path(""), "/api/v1/namespaces/serving/pods?labelSelector=a%3Db%26watch%3Dtrue%23");
    }

    #[test]
    fn a_version_that_is_too_old_is_a_problem_only_of_a_list() {
        let (mut pods, seen) = reflector::<Pod>(("labelSelector", "a=b".to_owned()));
        pods.version = Some("1".to_owned());
        pods.failed(&RequestError::Expired);
        assert_eq!((&pods.version, &seen.borrow().problem), (&None, &None), "a list follows");
        pods.failed(&RequestError::Expired);
        assert!(seen.borrow().problem.as_ref().is_some_and(|problem| problem.what.contains("list pods")));
    }

    #[test]
    fn sizes_are_those_of_the_objects_that_are_kept() {
        let mut sizes = Sizes::default();
        sizes.set("a", KUBERNETES_OBJECTS_BYTES_MAX);
        sizes.set("a", KUBERNETES_OBJECTS_BYTES_MAX);
        assert!(sizes.check().is_ok(), "the same object again");
        sizes.set("b", 1);
        assert!(sizes.check().is_err());
        sizes.remove("a");
        sizes.remove("a");
        assert!(sizes.check().is_ok() && sizes.total == 1);
    }

    #[test]
    fn events_change_the_objects_and_a_wrong_one_asks_for_a_list() {
        let (mut pods, seen) = reflector::<Pod>(("labelSelector", "a=b".to_owned()));
        let mut version = "1".to_owned();
        let mut apply = |text: &str| pods.apply(text.as_bytes(), &mut version).map(|()| version.clone());
        let event = |kind: &str, name: &str, version: u32, rest: &str| {
            let meta = format!(r#"{{"name":"{name}","resourceVersion":"{version}"}}"#);
            format!(r#"{{"type":"{kind}","object":{{"metadata":{meta}{rest}}}}}"#)
        };
        let names = || seen.borrow().objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(apply(&event("ADDED", "a", 2, "")).expect("applied"), "2");
        assert_eq!(apply(&event("MODIFIED", "b", 3, "")).expect("applied"), "3");
        assert_eq!(names(), ["a", "b"]);
        assert_eq!(apply(&event("BOOKMARK", "", 9, "")).expect("applied"), "9");
        apply(&event("MODIFIED", "b", 10, r#","status":7"#)).expect("applied");
        assert_eq!((names(), seen.borrow().unreadable.clone()), (vec!["a".to_owned()], vec!["b".to_owned()]));
        apply(&event("DELETED", "a", 11, "")).expect("applied");
        apply(&event("DELETED", "b", 12, "")).expect("applied");
        assert!(names().is_empty() && seen.borrow().unreadable.is_empty());
        let expired = r#"{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}"#;
        assert!(matches!(apply(expired), Err(RequestError::Expired)));
        for wrong in ["", "{", "[]", r#"{"type":"OTHER","object":{}}"#, r#"{"type":"ADDED","object":{}}"#] {
            assert!(matches!(apply(wrong), Err(RequestError::Nonsense(_))), "{wrong}");
        }
    }
}
