//! A caller that speaks bytes.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::ends;

/// A reply as it came.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    /// Whether the reply ended as its head said.
    pub(crate) is_whole: bool,
    pub(crate) trailers: String,
}

impl Reply {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }

    /// `error.code` of the body.
    pub(crate) fn code(&self) -> String {
        let body: serde_json::Value = serde_json::from_slice(&self.body).expect("JSON");
        let error = &body["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
        error["code"].as_str().expect("a code").to_owned()
    }
}

/// A request for inference, with further header lines.
pub(crate) fn post(path: &str, headers: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
    .into_bytes()
}

pub(crate) fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n").into_bytes()
}

pub(crate) const CHAT: &str = r#"{"model":"m", "messages":[{"role":"user","content":"hi"}]}"#;
pub(crate) const STREAMED_CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}"#;
pub(crate) const CHAT_PATH: &str = "/v1/chat/completions";

pub(crate) fn chat() -> Vec<u8> {
    post(CHAT_PATH, "", CHAT)
}

pub(crate) fn streamed_chat() -> Vec<u8> {
    post(CHAT_PATH, "", STREAMED_CHAT)
}

/// Sends bytes and reads to the end.
pub(crate) async fn exchange(to: SocketAddr, request: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(to).await.expect("a connection");
    // A gateway that refuses need not read all of it.
    let _ = stream.write_all(request).await;
    read_reply(&mut stream).await
}

/// Reads a reply until the connection ends.
pub(crate) async fn read_reply<S: AsyncRead + Unpin>(stream: &mut S) -> Reply {
    let mut bytes = Vec::new();
    // A connection that breaks off ends the reply as well.
    let _ = ends("a reply", stream.read_to_end(&mut bytes)).await;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Reply {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|text| text.parse().ok()).expect("a status");
    let headers: BTreeMap<String, String> = head
        .lines()
        .skip(1)
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let raw = &bytes[end + 4..];
    if headers.get("transfer-encoding").is_some_and(|value| value == "chunked") {
        let (body, rest) = unchunk(raw);
        let trailers = rest.map(|rest| String::from_utf8_lossy(rest).into_owned());
        return Reply { status, headers, body, is_whole: trailers.is_some(), trailers: trailers.unwrap_or_default() };
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(raw.len());
    Reply { status, body: raw.to_vec(), is_whole: raw.len() == length, headers, trailers: String::new() }
}

/// The data of chunks, and what follows the last one if it came.
pub(crate) fn unchunk(mut raw: &[u8]) -> (Vec<u8>, Option<&[u8]>) {
    let mut body = Vec::new();
    loop {
        let Some(line) = raw.windows(2).position(|window| window == b"\r\n") else { return (body, None) };
        let size = std::str::from_utf8(&raw[..line]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let Some(size) = size else { return (body, None) };
        raw = &raw[line + 2..];
        if size == 0 {
            return (body, Some(raw));
        }
        if raw.len() < size + 2 {
            body.extend_from_slice(&raw[..raw.len().min(size)]);
            return (body, None);
        }
        body.extend_from_slice(&raw[..size]);
        raw = &raw[size + 2..];
    }
}
