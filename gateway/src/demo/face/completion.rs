//! Running a prompt on a simulated engine.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::stream::poll_fn;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::Value;
use tokio::sync::mpsc;

use super::prompt::{Asked, CallKind, read};
use super::replies::{self, Head, LAST_EVENT};
use super::{Body, Shared, json, refusal};
use crate::demo::engine::{BLOCK_TOKENS, DECODE_BLOCK, Ended, Progress};
use crate::demo::tokenizer;
use crate::limits::{DEMO_READY_WAIT, DEMO_TOKENS_MAX};

/// Numbers replies, for their ids.
static REPLIES: AtomicU64 = AtomicU64::new(0);
/// Events that wait for a slow caller.
const EVENTS_WAITING_MAX: usize = 16;

/// Answers a request with a body.
pub(super) async fn answer(kind: CallKind, body: &[u8], shared: &Arc<Shared>) -> io::Result<Response<Body>> {
    let asked = match read(kind, body, &shared.model) {
        Ok(asked) => asked,
        Err(refused) => {
            let status = StatusCode::from_u16(refused.status).unwrap_or(StatusCode::BAD_REQUEST);
            return Ok(refusal(status, &refused.why));
        }
    };
    // Relaxed: only a name.
    let number = REPLIES.fetch_add(1, Ordering::Relaxed);
    let is_chat = match kind {
        CallKind::Chat => true,
        CallKind::Completion => false,
        CallKind::Tokenize => return Ok(json(StatusCode::OK, replies::tokenized(&asked.prompt))),
        CallKind::RenderChat | CallKind::RenderCompletion => {
            let is_chat = kind == CallKind::RenderChat;
            let body = replies::rendered(&format!("render-{number}"), &shared.model, &asked.prompt, is_chat);
            return Ok(json(StatusCode::OK, body));
        }
    };
    if !shared.engine.ready(Instant::now() + DEMO_READY_WAIT).await {
        return Ok(refusal(StatusCode::SERVICE_UNAVAILABLE, "no daemon has subscribed to the simulated engine yet"));
    }
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let prefix = if is_chat { "chatcmpl" } else { "cmpl" };
    let head = Head { id: format!("{prefix}-{number}"), created, model: shared.model.clone(), is_chat };
    let run = Run::start(&asked, head, shared).map_err(io::Error::other)?;
    if asked.is_stream { Ok(streamed(run, asked.wants_usage)) } else { run.whole().await }
}

/// A prompt that runs.
struct Run {
    head: Head,
    text: String,
    finish_reason: &'static str,
    prompt_tokens: usize,
    progress: mpsc::UnboundedReceiver<Progress>,
}

impl Run {
    fn start(asked: &Asked, head: Head, shared: &Shared) -> Result<Self, Ended> {
        let mut text = tokenizer::reply(&asked.prompt);
        let room = DEMO_TOKENS_MAX - asked.prompt.len();
        let output_max = asked.output_max.unwrap_or(room).min(room);
        let finish_reason = if text.len() > output_max { "length" } else { "stop" };
        // A token is one byte of ASCII.
        text.truncate(output_max);
        let progress = shared.engine.run(&asked.prompt, &tokenizer::text_tokens(&text))?;
        Ok(Self { head, text, finish_reason, prompt_tokens: asked.prompt.len(), progress })
    }

    /// The next step; an error if the engine ended.
    async fn next(&mut self) -> io::Result<Progress> {
        self.progress.recv().await.ok_or_else(|| io::Error::other(Ended))
    }

    fn usage(&self, cached_blocks: u32) -> Value {
        replies::usage(self.prompt_tokens, self.text.len(), cached_blocks)
    }

    /// The reply in one piece.
    async fn whole(mut self) -> io::Result<Response<Body>> {
        let mut cached = 0;
        while let Progress::Prefilled { cached_blocks } = self.next().await? {
            cached = cached_blocks;
        }
        let body = self.head.whole(&self.text, self.finish_reason, &self.usage(cached));
        Ok(json(StatusCode::OK, body))
    }

    /// The reply as events: the first token when the prompt is computed, then a block at a time, the last one when the
    /// engine is done.
    async fn stream(mut self, wants_usage: bool, to: &mpsc::Sender<io::Result<String>>) -> io::Result<()> {
        let (mut cached, mut sent) = (0, 0);
        while let Progress::Prefilled { cached_blocks } = self.next().await? {
            cached = cached_blocks;
            sent = 1.min(self.text.len());
            let begin = self.head.begin().unwrap_or_default();
            send(to, format!("{begin}{}", self.head.part(&self.text[..sent], None))).await?;
            while self.text.len() - sent > BLOCK_TOKENS && self.progress.is_empty() {
                tokio::time::sleep(DECODE_BLOCK).await;
                send(to, self.head.part(&self.text[sent..sent + BLOCK_TOKENS], None)).await?;
                sent += BLOCK_TOKENS;
            }
        }
        send(to, self.head.part(&self.text[sent..], Some(self.finish_reason))).await?;
        if wants_usage {
            send(to, self.head.usage(&self.usage(cached))).await?;
        }
        send(to, LAST_EVENT.to_owned()).await
    }
}

async fn send(to: &mpsc::Sender<io::Result<String>>, event: String) -> io::Result<()> {
    to.send(Ok(event)).await.map_err(|_| io::Error::other("the caller hung up"))
}

fn streamed(run: Run, wants_usage: bool) -> Response<Body> {
    let (to, mut events) = mpsc::channel(EVENTS_WAITING_MAX);
    tokio::spawn(async move {
        if let Err(error) = run.stream(wants_usage, &to).await {
            // The connection is cut off, if the caller is still there.
            drop(to.send(Err(error)).await);
        }
    });
    let frames = poll_fn(move |context| {
        events.poll_recv(context).map(|event| event.map(|event| event.map(|text| Frame::data(Bytes::from(text)))))
    });
    let mut response = Response::new(StreamBody::new(frames).boxed());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}
