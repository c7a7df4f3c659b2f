//! HTTP/1.1 by hand.

use std::io::{Error, Read as _, Result, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

/// A reply that was read to its end.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// A connection with deadlines for each read and write.
pub(crate) fn connect(address: &str, deadline: Duration) -> Result<TcpStream> {
    let stream = TcpStream::connect(address.trim_start_matches("http://"))?;
    stream.set_read_timeout(Some(deadline))?;
    stream.set_write_timeout(Some(deadline))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The head of a POST of JSON, without the line that ends it.
pub(crate) fn post(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n")
}

/// A whole POST.
pub(crate) fn posted(path: &str, body: &[u8]) -> Vec<u8> {
    [format!("{}content-length: {}\r\n\r\n", post(path), body.len()).as_bytes(), body].concat()
}

/// A chat of one message.
pub(crate) fn chat(model: &str, text: &str, stream: bool) -> Value {
    json!({"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]})
}

/// Reads one reply, after interim ones.
pub(crate) fn reply(stream: &mut TcpStream) -> Result<Reply> {
    let (head, status) = loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(byte(stream)?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let status: u16 =
            head.split(' ').nth(1).and_then(|text| text.parse().ok()).ok_or_else(|| Error::other(head.clone()))?;
        if status >= 200 {
            break (head, status);
        }
    };
    let body = match header(&head, "content-length") {
        Some(length) => exactly(stream, length.parse().map_err(Error::other)?)?,
        None if header(&head, "transfer-encoding").is_some() => chunks(stream)?,
        None => {
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest)?;
            rest
        }
    };
    Ok(Reply { status, body })
}

/// The value of a header.
pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (of, value) = line.split_once(':')?;
        of.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Sends a request and reads its reply.
pub(crate) fn ask(stream: &mut TcpStream, request: &[u8]) -> Result<Reply> {
    stream.write_all(request)?;
    reply(stream)
}

fn byte(stream: &mut TcpStream) -> Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn exactly(stream: &mut TcpStream, bytes: usize) -> Result<Vec<u8>> {
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body)?;
    Ok(body)
}

fn chunks(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(byte(stream)?);
        }
        let length = usize::from_str_radix(String::from_utf8_lossy(&line).trim(), 16).map_err(Error::other)?;
        let chunk = exactly(stream, length + 2)?;
        body.extend_from_slice(&chunk[..length]);
        if length == 0 {
            return Ok(body);
        }
    }
}

/// The sum of a counter's values on a page of metrics, of those with a label.
pub(crate) fn counted(admin: &str, name: &str, label: &str) -> u64 {
    let page = connect(admin, Duration::from_secs(10)).and_then(|mut stream| {
        ask(&mut stream, b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    });
    let text = String::from_utf8(page.expect("a page").body).expect("text");
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}
