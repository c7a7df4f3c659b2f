//! A double of the Kubernetes API server: lists in pages and watches, as the handlers of `k8s.io/apiserver` 1.33 answer
//! them (`pkg/endpoints/handlers/get.go` and `watch.go`, `pkg/storage/cacher`), with tokens, TLS and RBAC, and with the
//! ways in which a server, or what is in its place, can fail.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;

use super::objects::NAMESPACE;
use super::rbac::Rule;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// What the next request gets in place of its answer.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// A status, a type and a body.
    Reply(u16, &'static str, String),
    /// A watch that begins, sends these pieces with pauses, and then stays silent.
    Pieces(Vec<String>),
    /// No answer, ever.
    Hang,
    /// A watch that is too old, as a status in place of an event.
    Gone,
}

/// A request as RBAC sees it, with its query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) verb: &'static str,
    pub(crate) group: String,
    pub(crate) resource: String,
    pub(crate) query: BTreeMap<String, String>,
}

/// What an open watch is sent.
enum Sent {
    Bytes(Bytes),
    Break,
}

struct Watch {
    resource: String,
    query: BTreeMap<String, String>,
    sender: UnboundedSender<Sent>,
}

struct Change {
    version: u64,
    resource: String,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Default)]
struct Inner {
    version: u64,
    /// Changes up to this version are no longer known.
    compacted: u64,
    objects: BTreeMap<(String, String), Value>,
    changes: Vec<Change>,
    watches: Vec<Watch>,
    /// Rests of lists by their `continue`.
    rests: BTreeMap<String, (u64, Vec<Value>)>,
    token: Option<String>,
    rules: Option<Vec<Rule>>,
    faults: BTreeMap<(String, &'static str), VecDeque<Fault>>,
    asked: Vec<Asked>,
    expires_next_page: bool,
}

/// The double. It ends, with all connections, when it is dropped.
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    pub(crate) url: String,
    inner: Arc<Mutex<Inner>>,
    server: tokio::task::JoinHandle<()>,
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl Drop for Api {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Api {
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), Arc::default(), None).await
    }

    /// A server with a certificate for 127.0.0.1.
    pub(crate) async fn start_tls(certified: &rcgen::CertifiedKey<rcgen::KeyPair>) -> Self {
        let key = rustls::pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .expect("a server");
        Self::start_at("127.0.0.1:0".parse().expect("an address"), Arc::default(), Some(Arc::new(tls))).await
    }

    async fn start_at(address: SocketAddr, inner: Arc<Mutex<Inner>>, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        let listener = TcpListener::bind(address).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = tokio::spawn(accept(listener, Arc::clone(&inner), tls.clone()));
        Self { address, url: format!("{scheme}://{address}"), inner, server, tls }
    }

    /// Ends the server and its connections. [`Api::start_again`] brings it back with what it knows.
    pub(crate) async fn stop(&mut self) {
        self.server.abort();
        // It was aborted.
        let _ = (&mut self.server).await;
        self.inner.lock().watches.clear();
    }

    pub(crate) async fn start_again(&mut self) {
        let again = Self::start_at(self.address, Arc::clone(&self.inner), self.tls.clone()).await;
        *self = again;
    }

    /// Makes or changes an object. Its resource is the plural.
    pub(crate) fn put(&self, resource: &str, mut object: Value) {
        let mut inner = self.inner.lock();
        inner.version += 1;
        let (group, kind) = names_of(resource);
        object["kind"] = kind.into();
        object["apiVersion"] = group.into();
        object["metadata"]["resourceVersion"] = inner.version.to_string().into();
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let before = inner.objects.insert((resource.to_owned(), name), object.clone());
        inner.change(resource, before, Some(object));
    }

    pub(crate) fn delete(&self, resource: &str, name: &str) {
        let mut inner = self.inner.lock();
        inner.version += 1;
        let version = inner.version.to_string();
        let mut before = inner.objects.remove(&(resource.to_owned(), name.to_owned())).expect("it is there");
        // The last state of the object, with the version of its deletion.
        before["metadata"]["resourceVersion"] = version.into();
        inner.change(resource, Some(before), None);
    }

    /// Sends a bookmark to all watches of a resource.
    pub(crate) fn bookmark(&self, resource: &str) {
        let mut inner = self.inner.lock();
        inner.version += 1; // of another resource: versions are the whole cluster's
        let (group, kind) = names_of(resource);
        let mut object = json!({"kind": kind, "apiVersion": group,
            "metadata": {"resourceVersion": inner.version.to_string(), "creationTimestamp": null}});
        match resource {
            "endpointslices" => {
                (object["addressType"], object["endpoints"], object["ports"]) = ("".into(), Value::Null, Value::Null)
            }
            _ => (object["spec"], object["status"]) = (json!({"containers": null}), json!({})),
        }
        let line = line(&json!({"type": "BOOKMARK", "object": object}));
        inner.send(resource, &line);
    }

    /// Forgets all changes so far, as etcd's compaction does.
    pub(crate) fn compact(&self) {
        let mut inner = self.inner.lock();
        inner.compacted = inner.version;
        inner.changes.clear();
        inner.rests.clear();
    }

    /// Ends all watches as the end of their time does.
    pub(crate) fn end_watches(&self) {
        self.inner.lock().watches.clear();
    }

    /// Cuts the connections of all watches.
    pub(crate) fn break_watches(&self) {
        for watch in self.inner.lock().watches.drain(..) {
            // Without a receiver it has ended already.
            let _ = watch.sender.send(Sent::Break);
        }
    }

    /// Sends bytes to all watches of a resource.
    pub(crate) fn send(&self, resource: &str, bytes: &str) {
        self.inner.lock().send(resource, &Bytes::copy_from_slice(bytes.as_bytes()));
    }

    pub(crate) fn open_watches(&self, resource: &str) -> usize {
        self.inner.lock().watches.iter().filter(|it| it.resource == resource && !it.sender.is_closed()).count()
    }

    pub(crate) fn require_token(&self, token: &str) {
        self.inner.lock().token = Some(token.to_owned());
    }

    pub(crate) fn set_rules(&self, rules: Vec<Rule>) {
        self.inner.lock().rules = Some(rules);
    }

    /// The next request for a further page is too late.
    pub(crate) fn expire_next_page(&self) {
        self.inner.lock().expires_next_page = true;
    }

    /// The next request of a verb for a resource gets a fault.
    pub(crate) fn fault(&self, verb: &'static str, resource: &str, fault: Fault) {
        self.inner.lock().faults.entry((resource.to_owned(), verb)).or_default().push_back(fault);
    }

    /// The requests so far, of a verb for a resource.
    pub(crate) fn asked(&self, verb: &str, resource: &str) -> Vec<Asked> {
        self.inner.lock().asked.iter().filter(|it| it.verb == verb && it.resource == resource).cloned().collect()
    }

    /// All requests so far.
    pub(crate) fn all_asked(&self) -> Vec<Asked> {
        self.inner.lock().asked.clone()
    }
}

impl Inner {
    fn change(&mut self, resource: &str, before: Option<Value>, after: Option<Value>) {
        let change = Change { version: self.version, resource: resource.to_owned(), before, after };
        for watch in self.watches.iter().filter(|watch| watch.resource == resource) {
            if let Some(bytes) = event(&change, &watch.query) {
                // Without a receiver it has ended already.
                let _ = watch.sender.send(Sent::Bytes(bytes));
            }
        }
        self.changes.push(change);
    }

    fn send(&mut self, resource: &str, bytes: &Bytes) {
        for watch in self.watches.iter().filter(|watch| watch.resource == resource) {
            let _ = watch.sender.send(Sent::Bytes(bytes.clone()));
        }
    }
}

/// Group/version and kind of a resource.
fn names_of(resource: &str) -> (&'static str, &'static str) {
    match resource {
        "endpointslices" => ("discovery.k8s.io/v1", "EndpointSlice"),
        "inferencepools" => ("inference.networking.k8s.io/v1", "InferencePool"),
        "pods" => ("v1", "Pod"),
        other => panic!("{other} is no resource of the double"),
    }
}

fn line(event: &Value) -> Bytes {
    Bytes::from(format!("{event}\n"))
}

/// The event of a change for a watch: an object that begins to match is new to it, one that no longer does is gone.
fn event(change: &Change, query: &BTreeMap<String, String>) -> Option<Bytes> {
    let matching = |object: &&Value| selects(query, object);
    let (before, after) = (change.before.as_ref().filter(matching), change.after.as_ref().filter(matching));
    let (kind, mut object) = match (before, after) {
        (None, Some(after)) => ("ADDED", after.clone()),
        (Some(_), Some(after)) => ("MODIFIED", after.clone()),
        (Some(before), None) => ("DELETED", before.clone()),
        (None, None) => return None,
    };
    object["metadata"]["resourceVersion"] = change.version.to_string().into();
    Some(line(&json!({"type": kind, "object": object})))
}

fn selects(query: &BTreeMap<String, String>, object: &Value) -> bool {
    let labels = query.get("labelSelector").map_or("", String::as_str);
    let has_label = |pair: &str| {
        let (key, value) = pair.split_once('=').expect("an equality");
        object["metadata"]["labels"][key] == value
    };
    let field = query.get("fieldSelector").and_then(|field| field.strip_prefix("metadata.name="));
    labels.split(',').filter(|pair| !pair.is_empty()).all(has_label)
        && field.is_none_or(|name| object["metadata"]["name"] == name)
}

async fn accept(listener: TcpListener, inner: Arc<Mutex<Inner>>, tls: Option<Arc<rustls::ServerConfig>>) {
    // The tasks end with the server, and with them its connections.
    let mut tasks = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { return };
        let (inner, tls) = (Arc::clone(&inner), tls.clone());
        tasks.spawn(async move {
            match tls {
                None => serve(stream, inner).await,
                Some(tls) => {
                    // A client that does not trust the certificate hangs up.
                    let Ok(stream) = tokio_rustls::TlsAcceptor::from(tls).accept(stream).await else { return };
                    serve(stream, inner).await;
                }
            }
        });
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, inner: Arc<Mutex<Inner>>) {
    let service = service_fn(move |request| answer(request, Arc::clone(&inner)));
    // A client that hangs up is none of the double's errors.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

fn reply(status: u16, kind: &str, body: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    Response::builder().status(status).header("content-type", kind).body(body).expect("a response")
}

/// A `Status`, as `k8s.io/apimachinery/pkg/api/errors` makes it.
fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code})
}

fn refuse(code: u16, reason: &str, message: &str) -> Response<Body> {
    reply(code, "application/json", status(code, reason, message).to_string())
}

async fn answer(request: Request<Incoming>, inner: Arc<Mutex<Inner>>) -> Result<Response<Body>, io::Error> {
    let Some((group, resource)) = resource_of(request.uri().path()) else {
        return Ok(reply(404, "text/plain; charset=utf-8", "404 page not found\n"));
    };
    let query = query_of(request.uri().query().unwrap_or_default());
    let verb = if query.get("watch").is_some_and(|watch| watch == "true") { "watch" } else { "list" };
    let asked = Asked { verb, group, resource, query };
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let fault = {
        let mut inner = inner.lock();
        inner.asked.push(asked.clone());
        if inner.token.as_ref().is_some_and(|wanted| token != format!("Bearer {wanted}")) {
            return Ok(refuse(401, "Unauthorized", "Unauthorized"));
        }
        if inner.rules.as_ref().is_some_and(|rules| !rules.iter().any(|rule| rule.allows(&asked))) {
            let Asked { group, resource, .. } = &asked;
            let message = format!(
                "{resource} is forbidden: User \"system:serviceaccount:{NAMESPACE}:kvrouted\" cannot {verb} resource \
                 \"{resource}\" in API group \"{group}\" in the namespace \"{NAMESPACE}\""
            );
            return Ok(refuse(403, "Forbidden", &message));
        }
        inner.faults.get_mut(&(asked.resource.clone(), verb)).and_then(VecDeque::pop_front)
    };
    match fault {
        Some(Fault::Reply(status, kind, body)) => return Ok(reply(status, kind, body)),
        Some(Fault::Pieces(pieces)) => return Ok(slow(pieces)),
        Some(Fault::Hang) => return std::future::pending().await,
        Some(Fault::Gone) => return Ok(refuse(410, "Expired", "too old resource version: 1 (1000)")),
        None => {}
    }
    let mut inner = inner.lock();
    Ok(if verb == "watch" { watch(&mut inner, asked) } else { list(&mut inner, &asked) })
}

/// Group and resource of a path in the namespace.
fn resource_of(path: &str) -> Option<(String, String)> {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts.as_slice() {
        ["api", "v1", "namespaces", NAMESPACE, resource] => Some((String::new(), (*resource).to_owned())),
        ["apis", group, version, "namespaces", NAMESPACE, resource] => {
            let known = ["endpointslices", "inferencepools"].contains(resource)
                && names_of(resource).0 == format!("{group}/{version}");
            known.then(|| ((*group).to_owned(), (*resource).to_owned()))
        }
        _ => None,
    }
}

fn query_of(query: &str) -> BTreeMap<String, String> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=')?;
        Some((key.to_owned(), decoded(value)))
    };
    query.split('&').filter_map(pair).collect()
}

fn decoded(text: &str) -> String {
    let (mut out, mut bytes) = (Vec::new(), text.bytes());
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits: Vec<u8> = bytes.by_ref().take(2).collect();
                let digits = std::str::from_utf8(&digits).expect("digits");
                out.push(u8::from_str_radix(digits, 16).expect("two hex digits"));
            }
            b'+' => out.push(b' '),
            byte => out.push(byte),
        }
    }
    String::from_utf8(out).expect("UTF-8")
}

fn list(inner: &mut Inner, asked: &Asked) -> Response<Body> {
    let (version, items) = match asked.query.get("continue") {
        None => {
            let all = inner.objects.iter().filter(|((resource, _), _)| *resource == asked.resource);
            let items = all.map(|(_, object)| object).filter(|object| selects(&asked.query, object));
            (inner.version, items.cloned().collect::<Vec<_>>())
        }
        Some(token) => match inner.rests.remove(token) {
            Some(rest) if !std::mem::take(&mut inner.expires_next_page) => rest,
            _ => {
                let message = "The provided continue parameter is too old to display a consistent list result. You can \
                    start a new list without the continue parameter, or use the continue token in this response to \
                    retrieve the remainder of the results.";
                return refuse(410, "Expired", message);
            }
        },
    };
    let limit = asked.query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let (group, kind) = names_of(&asked.resource);
    let mut metadata = json!({"resourceVersion": version.to_string()});
    let (page, rest) = items.split_at(limit.min(items.len()));
    if !rest.is_empty() {
        // As opaque as the real one, which is base64, with characters that a URL must not have.
        let token = format!("eyJ2IjoibWV0YSIsInJ2Ijo{version}+{}/==&", rest.len());
        metadata["continue"] = token.clone().into();
        metadata["remainingItemCount"] = rest.len().into();
        inner.rests.insert(token, (version, rest.to_vec()));
    }
    // The items of a list have neither kind nor version.
    let bare = |object: &Value| {
        let mut object = object.clone();
        let fields = object.as_object_mut().expect("an object");
        fields.remove("kind");
        fields.remove("apiVersion");
        object
    };
    let items: Vec<Value> = page.iter().map(bare).collect();
    let body = json!({"kind": format!("{kind}List"), "apiVersion": group, "metadata": metadata, "items": items});
    reply(200, "application/json", body.to_string())
}

fn watch(inner: &mut Inner, asked: Asked) -> Response<Body> {
    let (sender, receiver) = unbounded_channel();
    let from: u64 = asked.query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or_default();
    if from < inner.compacted {
        // The watch cache answers with an event.
        let message = format!("too old resource version: {from} ({})", inner.compacted);
        let event = json!({"type": "ERROR", "object": status(410, "Expired", &message)});
        sender.send(Sent::Bytes(line(&event))).expect("a receiver");
        return stream_of(receiver);
    }
    for change in inner.changes.iter().filter(|change| change.version > from && change.resource == asked.resource) {
        if let Some(bytes) = event(change, &asked.query) {
            sender.send(Sent::Bytes(bytes)).expect("a receiver");
        }
    }
    inner.watches.push(Watch { resource: asked.resource, query: asked.query, sender });
    stream_of(receiver)
}

fn stream_of(receiver: UnboundedReceiver<Sent>) -> Response<Body> {
    let frames = stream::unfold(receiver, |mut receiver| async move {
        let frame = match receiver.recv().await? {
            Sent::Bytes(bytes) => Ok(Frame::data(bytes)),
            Sent::Break => Err(io::Error::other("cut")),
        };
        Some((frame, receiver))
    });
    let body = StreamBody::new(frames).boxed_unsync();
    Response::builder().header("content-type", "application/json").body(body).expect("a response")
}

fn slow(pieces: Vec<String>) -> Response<Body> {
    let frames = stream::unfold(pieces.into_iter(), |mut pieces| async move {
        let Some(piece) = pieces.next() else { return std::future::pending().await };
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        Some((Ok(Frame::data(Bytes::from(piece))), pieces))
    });
    let body = StreamBody::new(frames).boxed_unsync();
    Response::builder().header("content-type", "application/json").body(body).expect("a response")
}
