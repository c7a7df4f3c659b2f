//! A client of a daemon's HTTP port.

use std::time::Duration;

use serde_json::Value;

use crate::kit::ports::free_port;
use crate::kit::{Daemon, WAIT_MAX};

/// A daemon with an HTTP port.
pub(crate) struct Served {
    pub(crate) daemon: Daemon,
    pub(crate) port: u16,
}

impl Served {
    /// One of a space `m` with blocks of 16 tokens, and of what the flags say.
    pub(crate) fn start(flags: &[&str]) -> Self {
        let port = free_port();
        let daemon = Daemon::start(&[&["--http-port", &port.to_string()], flags].concat());
        Self { daemon, port }
    }

    /// One whose configuration has these tables, the table `[http]` begun first.
    pub(crate) fn configured(http: &str, tables: &str) -> Self {
        let port = free_port();
        let daemon = Daemon::configured(&format!("[http]\nport = {port}\n{http}\n{tables}"));
        Self { daemon, port }
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        let answer = agent(WAIT_MAX).get(self.url(path)).call().expect("an answer");
        told(answer)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.post_text(path, "application/json", &body.to_string())
    }

    pub(crate) fn post_text(&self, path: &str, kind: &str, body: &str) -> (u16, Value) {
        told(agent(WAIT_MAX).post(self.url(path)).header("Content-Type", kind).send(body).expect("an answer"))
    }

    /// As `post`, with a timeout.
    pub(crate) fn post_for(&self, path: &str, body: &Value, timeout: Duration) -> Option<(u16, Value)> {
        let request = agent(timeout).post(self.url(path)).header("Content-Type", "application/json");
        request.send(body.to_string()).ok().map(told)
    }

    pub(crate) fn patch(&self, path: &str, body: &Value) -> (u16, Value) {
        let request = agent(WAIT_MAX).patch(self.url(path)).header("Content-Type", "application/json");
        told(request.send(body.to_string()).expect("an answer"))
    }

    pub(crate) fn delete(&self, path: &str) -> (u16, Value) {
        told(agent(WAIT_MAX).delete(self.url(path)).call().expect("an answer"))
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }
}

fn agent(timeout: Duration) -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(timeout)).proxy(None);
    config.build().into()
}

fn told(mut answer: ureq::http::Response<ureq::Body>) -> (u16, Value) {
    let text = answer.body_mut().read_to_string().expect("text");
    let said = serde_json::from_str(&text).unwrap_or(Value::String(text));
    (answer.status().as_u16(), said)
}
