//! An Envoy process with a configuration of `gateway/recipes`.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::ports::free_address;

/// How long Envoy may take to start.
const START: Duration = Duration::from_secs(30);

/// A configuration of `gateway/recipes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipe {
    Pool,
    Observed,
    OriginalDst,
    /// The pool, which lets requests through if the picker is down.
    FailOpen,
    /// The pool, with subset hints by a header, with request trailers, and without retries: a release that retries
    /// sends a body with trailers twice.
    Extras,
}

/// Lets a request carry a subset hint.
const SUBSET_FILTER: &str = r#"          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-test-subset
                on_header_present:
                  metadata_namespace: envoy.lb.subset_hint
                  key: x-gateway-destination-endpoint-subset
                  type: STRING
                remove: true
"#;

impl Recipe {
    const fn file(self) -> &'static str {
        match self {
            Self::Pool | Self::FailOpen | Self::Extras => "envoy.yaml",
            Self::Observed => "envoy-observed.yaml",
            Self::OriginalDst => "envoy-original-dst.yaml",
        }
    }
}

/// The binary of a version, if `scripts/gateways/fetch` has installed it; else a line that `scripts/test` lists at its
/// end.
pub(crate) fn binary_or_skip(version: &str, what: &str) -> Option<PathBuf> {
    let cache = match std::env::var_os("KVROUTED_ENGINES") {
        Some(cache) => PathBuf::from(cache),
        None => Path::new(&std::env::var_os("HOME")?).join(".cache/kvrouted-engines"),
    };
    let path = cache.join("envoy").join(version).join("envoy/_bin/envoy");
    if path.is_file() {
        return Some(path);
    }
    // Past the test harness, which shows what tests print only if they fail.
    let line = format!("\nskipped: {what} with Envoy {version}: it is not installed; run scripts/gateways/fetch\n");
    std::io::stderr().lock().write_all(line.as_bytes()).expect("said");
    None
}

/// An Envoy that serves; it ends with the test.
pub(crate) struct Envoy {
    child: Child,
    folder: tempfile::TempDir,
    /// Where callers connect.
    pub(crate) callers: SocketAddr,
    admin: SocketAddr,
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill(); // gone already is as good
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("envoy.log")).unwrap_or_default();
            let tail: Vec<_> = log.lines().rev().take(20).collect();
            eprintln!("the end of Envoy's log, newest line first:\n{}", tail.join("\n"));
        }
    }
}

impl Envoy {
    /// Starts it, and waits until it serves and its health check has found the picker.
    pub(crate) async fn start(
        binary: &Path,
        version: &str,
        recipe: Recipe,
        picker: SocketAddr,
        engines: &[SocketAddr],
    ) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (callers, admin) = (free_address(), free_address());
        let mut ports = vec![(10000, callers.port()), (9901, admin.port()), (9002, picker.port())];
        ports.extend((8001..).zip(engines.iter().map(SocketAddr::port)));
        let config = folder.path().join("envoy.yaml");
        fs::write(&config, configuration(version, recipe, &ports)).expect("written");
        let output = File::create(folder.path().join("access.log")).expect("a file");
        let child = Command::new(binary)
            .arg("-c")
            .arg(&config)
            .args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning", "--log-path"])
            .arg(folder.path().join("envoy.log"))
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a file"))
            .stderr(output)
            .spawn()
            .expect("Envoy starts");
        let mut envoy = Self { child, folder, callers, admin };
        let ready = tokio::time::timeout(START, envoy.is_ready(picker)).await;
        assert!(ready.is_ok(), "Envoy is not ready");
        envoy
    }

    /// Waits until the health check has found that the picker is gone.
    pub(crate) async fn misses(&self, picker: SocketAddr) {
        let failed = format!("picker::{picker}::health_flags::/failed_active_hc");
        let missed = async {
            while !get(self.admin, "/clusters").await.is_some_and(|text| text.contains(&failed)) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(START, missed).await.is_ok(), "Envoy does not miss the picker");
    }

    async fn is_ready(&mut self, picker: SocketAddr) {
        let healthy = format!("picker::{picker}::health_flags::healthy");
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                panic!("Envoy ended at its start: {status}");
            }
            let clusters = get(self.admin, "/clusters").await;
            if get(self.admin, "/ready").await.is_some() && clusters.is_some_and(|text| text.contains(&healthy)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The body of a reply with status 200.
async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let request = Request::get(format!("http://{address}{path}")).body(Empty::new()).expect("a request");
    let reply = client.request(request).await.ok().filter(|reply| reply.status() == 200)?;
    let body = reply.into_body().collect().await.ok()?.to_bytes();
    Some(String::from_utf8_lossy(&body).into_owned())
}

/// The file with the test's ports, without what an old Envoy refuses, and with a faster health check.
fn configuration(version: &str, recipe: Recipe, ports: &[(u16, u16)]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes").join(recipe.file());
    let mut text = fs::read_to_string(path).expect("the recipe");
    for (written, used) in ports {
        let (from, to) = (format!("port_value: {written}}}"), format!("port_value: {used}}}"));
        assert!(recipe == Recipe::OriginalDst || text.contains(&from), "the recipe has no port {written}");
        text = text.replace(&from, &to);
    }
    if recipe == Recipe::FailOpen {
        assert!(text.contains("failure_mode_allow: false"), "the recipe fails closed");
        text = text.replace("failure_mode_allow: false", "failure_mode_allow: true");
    }
    if recipe == Recipe::Extras {
        text = with_extras(&text);
    }
    let minor: u32 = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).expect("a version");
    let is_kept = |line: &&str| minor >= 38 || !line.contains("selected_host_key");
    let lines: Vec<_> = text.lines().filter(is_kept).collect();
    let faster = |text: String| text.replace("interval: 1s", "interval: 0.1s");
    faster(lines.join("\n"))
}

fn with_extras(text: &str) -> String {
    let first_filter = "          http_filters:\n";
    let options = "          http_protocol_options: {enable_trailers: true}\n";
    let text = text.replace(first_filter, &format!("{options}{first_filter}{SUBSET_FILTER}"));
    let (before, rest) = text.split_once("                  retry_policy:\n").expect("retries");
    let (_, after) = rest.split_once(options).expect("the end of the route");
    format!("{before}{options}{after}")
}
