//! The ways from the caller to the upstream, each with processes and a folder of its own.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::bodies::MODEL;
use super::envoy::{self, Ports};
use super::processes::{Spent, end};
use super::programs::{Programs, said_version};
use crate::args::Way;
use crate::failure::Failure;

/// What a way is named with.
const HOST: &str = "127.0.0.1";

/// A way that is running. Its processes end with this.
#[derive(Debug)]
pub(crate) struct Proxy {
    /// Which way.
    pub(crate) way: Way,
    /// Where callers ask.
    pub(crate) port: u16,
    /// Where our own tells its metrics.
    pub(crate) admin: Option<u16>,
    /// What the proxy says of its version.
    pub(crate) version: Option<String>,
    /// The command lines, with the last parts of paths only.
    pub(crate) commands: Vec<String>,
    children: Vec<Child>,
    folder: PathBuf,
}

impl Proxy {
    /// What its processes have used so far.
    #[must_use]
    pub(crate) fn spent(&self) -> Spent {
        Spent::of(&self.children)
    }

    /// Whether one of its processes has ended.
    #[must_use]
    pub(crate) fn has_ended(&mut self) -> bool {
        self.children.iter_mut().any(|child| matches!(child.try_wait(), Ok(Some(_)) | Err(_)))
    }

    /// The last line that its processes wrote, for people.
    #[must_use]
    pub(crate) fn last_line(&self) -> Option<String> {
        let logs = (0..self.children.len()).rev();
        logs.filter_map(|number| {
            let text = std::fs::read(log(&self.folder, number)).ok()?;
            let text = String::from_utf8_lossy(&text).into_owned();
            text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned)
        })
        .next()
    }

    fn command(&mut self, program: &Path) -> Command {
        self.commands.push(program.file_name().unwrap_or_default().to_string_lossy().into_owned());
        let mut command = Command::new(program);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    /// Starts a process with these arguments.
    fn spawn(&mut self, program: &Path, arguments: &[String]) -> Result<(), String> {
        let mut command = self.command(program);
        command.args(arguments);
        if let Some(line) = self.commands.last_mut() {
            for argument in arguments {
                let short =
                    if argument.starts_with('/') { argument.rsplit('/').next().unwrap_or_default() } else { argument };
                line.push(' ');
                line.push_str(short);
            }
        }
        let file = File::create(log(&self.folder, self.children.len())).map_err(|error| error.to_string())?;
        let errors = file.try_clone().map_err(|error| error.to_string())?;
        let child = command.stdout(file).stderr(errors).spawn().map_err(|error| format!("does not start: {error}"))?;
        self.children.push(child);
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<String, String> {
        let file = self.folder.join(name);
        std::fs::write(&file, text).map_err(|error| error.to_string())?;
        Ok(file.to_string_lossy().into_owned())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        end(&mut self.children);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn log(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("{number}.log"))
}

/// Starts the upstream.
///
/// # Errors
/// It does not start.
pub(crate) fn upstream() -> Result<Proxy, Failure> {
    let own = std::env::current_exe().map_err(Failure::system("find this program"))?;
    let mut proxy = empty(Way::Direct)?;
    let arguments = ["gateway-upstream".to_owned(), "--port".to_owned(), proxy.port.to_string()];
    proxy.spawn(&own, &arguments).map_err(Failure::Child)?;
    Ok(proxy)
}

/// Starts a way to the upstream.
///
/// # Errors
/// Why it cannot be had.
pub(crate) fn start(way: Way, programs: &Programs, upstream: u16) -> Result<Proxy, String> {
    let mut proxy = empty(way).map_err(|failure| failure.to_string())?;
    match way {
        Way::Direct => proxy.port = upstream,
        Way::Nginx => nginx(&mut proxy, programs, upstream)?,
        Way::Envoy => envoy(&mut proxy, programs, upstream, None)?,
        Way::Gateway => {
            let listen = format!("{HOST}:{}", proxy.port);
            kvrouted_gateway(&mut proxy, programs, upstream, &["serve", "--listen", &listen])?;
        }
        Way::EnvoyPicker => {
            let picker = free_port().map_err(|failure| failure.to_string())?;
            let listen = format!("{HOST}:{picker}");
            kvrouted_gateway(&mut proxy, programs, upstream, &["epp", "--listen", &listen])?;
            envoy(&mut proxy, programs, upstream, Some(picker))?;
        }
        Way::SglangRouter => {
            let program = programs.router(way.name(), "python")?;
            proxy.version = package_version(&program, way);
            let mut arguments = strings(&["-m", "sglang_router.launch_router"]);
            arguments.extend(router(proxy.port, upstream)?);
            proxy.spawn(&program, &arguments)?;
        }
        Way::VllmRouter => {
            let program = programs.router(way.name(), "vllm-router")?;
            proxy.version = package_version(&program, way);
            let arguments = router(proxy.port, upstream)?;
            proxy.spawn(&program, &arguments)?;
        }
        Way::ProductionStack => {
            let missing = "PyPI has it under no name that is known here: its package vllm-router is another router";
            let program = programs.router(way.name(), "vllm-router").map_err(|_| missing)?;
            let (port, backend) = (proxy.port.to_string(), format!("http://{HOST}:{upstream}"));
            let arguments = ["--host", HOST, "--port", &port, "--service-discovery", "static", "--static-backends"];
            let more =
                [backend.as_str(), "--static-models", MODEL, "--routing-logic", "roundrobin", "--log-level", "error"];
            proxy.spawn(&program, &strings(&[&arguments[..], &more[..]].concat()))?;
        }
    }
    Ok(proxy)
}

/// What the Python environment of a program says of its router's version.
fn package_version(program: &Path, way: Way) -> Option<String> {
    let code = format!("import importlib.metadata; print(importlib.metadata.version('{}'))", way.name());
    said_version(&program.with_file_name("python"), &["-c", &code])
}

/// One worker, and all else at its default: cache-aware.
fn router(port: u16, upstream: u16) -> Result<Vec<String>, String> {
    let (port, worker) = (port.to_string(), format!("http://{HOST}:{upstream}"));
    let prometheus = free_port().map_err(|failure| failure.to_string())?.to_string();
    let arguments = ["--host", HOST, "--port", &port, "--worker-urls", &worker, "--prometheus-port", &prometheus];
    Ok(strings(&[&arguments[..], &["--log-level", "error"]].concat()))
}

fn nginx(proxy: &mut Proxy, programs: &Programs, upstream: u16) -> Result<(), String> {
    let program = programs.nginx()?;
    proxy.version = said_version(&program, &["-v"]);
    let (port, workers) = (proxy.port, processors());
    let config = format!(
        "worker_processes {workers};
daemon off;
pid nginx.pid;
error_log error.log error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    client_body_buffer_size 64k;
    keepalive_requests 1000000000;
    upstream engines {{
        server {HOST}:{upstream};
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        listen {HOST}:{port};
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
            proxy_buffering off;
        }}
    }}
}}
"
    );
    let file = proxy.write("nginx.conf", &config)?;
    let folder = format!("{}/", proxy.folder.display());
    proxy.spawn(&program, &strings(&["-p", &folder, "-e", "error.log", "-c", &file]))
}

fn envoy(proxy: &mut Proxy, programs: &Programs, upstream: u16, picker: Option<u16>) -> Result<(), String> {
    let program = programs.envoy()?;
    proxy.version = said_version(&program, &["--version"]);
    let admin = free_port().map_err(|failure| failure.to_string())?;
    let config = envoy::configuration(Ports { callers: proxy.port, admin, upstream, picker })?;
    let file = proxy.write("envoy.yaml", &config)?;
    let concurrency = processors().to_string();
    let arguments = ["-c", &file, "--disable-hot-restart", "--concurrency", &concurrency, "--log-level", "error"];
    proxy.spawn(&program, &strings(&arguments))
}

fn kvrouted_gateway(proxy: &mut Proxy, programs: &Programs, upstream: u16, command: &[&str]) -> Result<(), String> {
    let program = programs.gateway()?;
    let admin = free_port().map_err(|failure| failure.to_string())?;
    let (engine, admin_address) = (format!("http://{HOST}:{upstream}"), format!("{HOST}:{admin}"));
    let common = ["--engine", &engine, "--admin", &admin_address, "--log-level", "error"];
    let mut arguments = strings(&[command, &common[..]].concat());
    if let Some(kvrouted) = &programs.kvrouted {
        arguments.extend(["--kvrouted".to_owned(), kvrouted.to_string_lossy().into_owned()]);
    }
    proxy.version = said_version(&program, &["--version"]);
    proxy.admin = Some(admin);
    proxy.spawn(&program, &arguments)
}

fn empty(way: Way) -> Result<Proxy, Failure> {
    let name = format!("perf-gateway-{}-{}-{:x}", way.name(), std::process::id(), crate::ingest::clock_ns());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
    let (port, admin, version) = (free_port()?, None, None);
    Ok(Proxy { way, port, admin, version, commands: Vec::new(), children: Vec::new(), folder })
}

fn free_port() -> Result<u16, Failure> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    Ok(free.map_err(Failure::system("find a free port"))?.port())
}

/// Processors that this process may use.
#[must_use]
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}
