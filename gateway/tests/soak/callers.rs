//! Callers: those who behave, whose every answer is checked, and those who do not.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::kit::Caller;
use crate::report::Tally;

const CHAT: &str = "/v1/chat/completions";
/// What a request may take, engines that die included. It is longer than a simulated engine waits for its daemon.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Chance from a seed (SplitMix64).
pub(crate) struct Draw(u64);

impl Draw {
    /// The draws of one caller.
    pub(crate) fn of(seed: u64, caller: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(caller.wrapping_mul(0xd134_2543_de82_ef95)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `low` up to, not including, `high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low)
    }

    fn text(&mut self, bytes: u64) -> String {
        let mut text = String::new();
        while (text.len() as u64) < bytes {
            // Writing to a string cannot fail.
            let _ = write!(text, "{:x} ", self.next());
        }
        text
    }
}

/// What all callers share.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) url: String,
    pub(crate) seed: u64,
    pub(crate) until: Instant,
    pub(crate) tally: Arc<Tally>,
}

impl Plan {
    fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }
}

/// How the answer to a request ended.
#[derive(Debug)]
enum Ended {
    /// Whole: the text, and the tokens of the prompt as the engine counts them.
    Whole { text: String, prompt_tokens: Option<u64> },
    /// A status other than 200.
    Refused(u16, String),
    /// It began, and then the connection broke or an event told an error.
    Error,
    /// It ended as if it were whole, and is not.
    Silent(String),
    /// Nothing began.
    Nothing(String),
    /// It took longer than [`ANSWER_MAX`].
    Late,
}

async fn ask(caller: &Caller, body: &Value, headers: &[(&str, &str)]) -> Ended {
    let answer = async {
        let response = match caller.send(CHAT, body, headers).await {
            Ok(response) => response,
            Err(error) => return Ended::Nothing(error),
        };
        let (status, is_stream) = (response.status().as_u16(), body["stream"] == true);
        let Ok(bytes) = response.into_body().collect().await.map(http_body_util::Collected::to_bytes) else {
            return Ended::Error;
        };
        let text = String::from_utf8_lossy(&bytes);
        match (status, is_stream) {
            (200, true) => of_stream(&text),
            (200, false) => of_whole(&text),
            _ => Ended::Refused(status, text.into_owned()),
        }
    };
    tokio::time::timeout(ANSWER_MAX, answer).await.unwrap_or(Ended::Late)
}

fn of_whole(text: &str) -> Ended {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    match body["choices"][0]["message"]["content"].as_str() {
        Some(content) => {
            Ended::Whole { text: content.to_owned(), prompt_tokens: body["usage"]["prompt_tokens"].as_u64() }
        }
        None => Ended::Silent(text.to_owned()),
    }
}

fn of_stream(text: &str) -> Ended {
    let (mut said, mut prompt_tokens) = (String::new(), None);
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            return Ended::Whole { text: said, prompt_tokens };
        }
        let Ok(event) = serde_json::from_str::<Value>(data) else { return Ended::Silent(text.to_owned()) };
        if !event["error"].is_null() {
            return Ended::Error;
        }
        said += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        prompt_tokens = event["usage"]["prompt_tokens"].as_u64().or(prompt_tokens);
    }
    Ended::Silent(text.to_owned())
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

fn chat(messages: &[Value], is_stream: bool) -> Value {
    let mut body = json!({"model": "demo", "messages": messages, "stream": is_stream});
    if is_stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body
}

/// Conversations with shared system prompts. Each request must be answered: one engine is always there.
pub(crate) async fn well_behaved(plan: Plan, number: u64) {
    let (mut draw, caller) = (Draw::of(plan.seed, number), Caller::of(&plan.url));
    while plan.goes_on() {
        let system = Draw::of(plan.seed, 500 + draw.between(0, 12)).text(1_500);
        let mut messages = vec![message("system", &system)];
        for _ in 0..draw.between(1, 6) {
            let asked = draw.between(20, 400);
            messages.push(message("user", &draw.text(asked)));
            let body = chat(&messages, draw.between(0, 2) == 0);
            let name = format!("{:x}", draw.next());
            let ended = ask(&caller, &body, &[("x-request-id", &name)]).await;
            let Some(text) = judge(&plan.tally, ended) else { break };
            messages.push(message("assistant", &text));
            if !plan.goes_on() {
                return;
            }
        }
    }
}

/// Counts the end of a well-behaved caller's request; the text of a whole answer.
fn judge(tally: &Tally, ended: Ended) -> Option<String> {
    match ended {
        Ended::Whole { text, prompt_tokens } => {
            tally.count("well-behaved: whole");
            let read = prompt_tokens.map(|tokens| format!("has read {tokens} tokens and says: "));
            let is_whole = read.is_some_and(|read| text.contains(&read)) && text.ends_with(").");
            tally.must(is_whole, || format!("an answer of {prompt_tokens:?} tokens is not the engine's: {text:?}"));
            return Some(text);
        }
        Ended::Error => tally.count("well-behaved: ended with an error after the first byte"),
        Ended::Refused(status, why) => tally.must(false, || format!("a good request got {status}: {why}")),
        Ended::Silent(text) => tally.must(false, || format!("an answer ended early and said nothing of it: {text:?}")),
        Ended::Nothing(why) => tally.must(false, || format!("a good request got no answer: {why}")),
        Ended::Late => tally.must(false, || format!("a good request got no answer in {ANSWER_MAX:?}")),
    }
    None
}

/// How a caller misbehaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vice {
    /// Hangs up before or in the answer.
    HangsUp,
    /// Sends bodies of up to 40 MiB.
    Large,
    /// Sends bodies that are not what they should be.
    Malformed,
    /// Sends what is not HTTP, or less than it said.
    Garbage,
    /// Reads nothing for a while, then leaves.
    Deaf,
}

impl Vice {
    /// All of them; hanging up twice, since it is the most usual one.
    pub(crate) const ALL: [Self; 6] =
        [Self::HangsUp, Self::HangsUp, Self::Large, Self::Malformed, Self::Garbage, Self::Deaf];
}

/// Misbehaves until the end.
pub(crate) async fn misbehave(plan: Plan, vice: Vice) {
    let mut draw = Draw::of(plan.seed, 100 + vice as u64);
    let caller = Caller::of(&plan.url);
    while plan.goes_on() {
        match vice {
            Vice::HangsUp => hang_up(&plan, &caller, &mut draw).await,
            Vice::Large => large(&plan, &caller, &mut draw).await,
            Vice::Malformed => malformed(&plan, &caller, &mut draw).await,
            Vice::Garbage => garbage(&plan, &mut draw).await,
            Vice::Deaf => deaf(&plan, &mut draw).await,
        }
        let pause = Duration::from_millis(draw.between(5, 60));
        tokio::time::sleep(pause).await;
    }
}

async fn hang_up(plan: &Plan, caller: &Caller, draw: &mut Draw) {
    let body = chat(&[message("user", &draw.text(3_000))], draw.between(0, 4) > 0);
    let after = Duration::from_micros(draw.between(0, 40_000));
    let asking = async {
        if let Ok(response) = caller.send(CHAT, &body, &[]).await {
            let mut body = response.into_body();
            while body.frame().await.is_some() {}
        }
    };
    let ended = tokio::time::timeout(after, asking).await;
    plan.tally.count(if ended.is_ok() { "hangs up: too late" } else { "hangs up" });
}

async fn large(plan: &Plan, caller: &Caller, draw: &mut Draw) {
    // The simulated engines take 1 MiB, the gateway 32 MiB.
    let bytes = match draw.between(0, 12) {
        0 => 40 << 20,
        1..=3 => draw.between(2 << 20, 8 << 20),
        _ => draw.between(200_000, 900_000),
    };
    let mut body = chat(&[message("user", &draw.text(200))], draw.between(0, 2) == 0);
    body["user"] = "x".repeat(bytes as usize).into();
    let ended = ask(caller, &body, &[]).await;
    let is_good = bytes < 1 << 20;
    match ended {
        Ended::Refused(413, _) if !is_good => plan.tally.count("large: refused with 413"),
        // A connection that is closed while the body is still being sent takes the answer with it.
        Ended::Nothing(_) | Ended::Error if !is_good => plan.tally.count("large: cut off"),
        Ended::Error => plan.tally.count("large: ended with an error after the first byte"),
        Ended::Whole { .. } if is_good => plan.tally.count("large: whole"),
        ended => plan.tally.must(false, || format!("a body of {bytes} bytes got {ended:.300?}")),
    }
}

async fn malformed(plan: &Plan, caller: &Caller, draw: &mut Draw) {
    let (body, wanted) = match draw.between(0, 7) {
        0 => (json!([1, 2, 3]), 400),
        1 => (json!({"model": "demo", "messages": "text"}), 400),
        2 => (json!({"model": "nobody", "messages": []}), 404),
        3 => (json!({"model": 7, "messages": []}), 400),
        4 => (json!({"model": "demo", "messages": [{"role": "oracle", "content": draw.text(10)}]}), 400),
        5 => (json!({"model": "demo", "messages": [message("user", &draw.text(9_000))]}), 400),
        _ => (json!({"model": "demo", "stream": "perhaps", "messages": [message("user", "a")]}), 400),
    };
    match ask(caller, &body, &[]).await {
        Ended::Refused(status, _) if status == wanted => plan.tally.count(format!("malformed: {status}")),
        ended => plan.tally.must(false, || format!("{:.200} got {ended:.300?}, not {wanted}", body.to_string())),
    }
}

async fn garbage(plan: &Plan, draw: &mut Draw) {
    let address = plan.url.trim_start_matches("http://");
    let Ok(mut stream) = TcpStream::connect(address).await else {
        plan.tally.must(false, || "the gateway takes no connection".to_owned());
        return;
    };
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n";
    let bytes = match draw.between(0, 6) {
        0 => draw.text(500).into_bytes(),
        1 => format!("{head}content-length: 5000\r\n\r\n{{\"model\":").into_bytes(),
        2 => format!("{head}content-length: 9\r\n\r\nnot json!").into_bytes(),
        3 => format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n").into_bytes(),
        4 => format!("{head}x-bomb: {}\r\n\r\n", "b".repeat(200_000)).into_bytes(),
        _ => format!("{head}content-length: 5\r\ncontent-length: 6\r\n\r\n{{}}").into_bytes(),
    };
    // The gateway may close before it has read everything.
    let _ = stream.write_all(&bytes).await;
    let mut answer = [0; 64];
    let read = tokio::time::timeout(Duration::from_millis(200), stream.read(&mut answer)).await;
    let text = match read {
        Ok(Ok(count)) => String::from_utf8_lossy(&answer[..count]).into_owned(),
        Ok(Err(_)) | Err(_) => String::new(),
    };
    let status = text.split(' ').nth(1).unwrap_or("no answer").to_owned();
    plan.tally.must(status == "no answer" || status.starts_with('4'), || format!("garbage got {text:?}"));
    plan.tally.count(format!("garbage: {status}"));
}

async fn deaf(plan: &Plan, draw: &mut Draw) {
    let caller = Caller::of(&plan.url);
    let body = chat(&[message("user", &draw.text(1_000))], true);
    let response = tokio::time::timeout(ANSWER_MAX, caller.send(CHAT, &body, &[])).await;
    tokio::time::sleep(Duration::from_millis(draw.between(10, 2_000))).await;
    drop(response);
    plan.tally.count("deaf");
}
