//! One completion: what a gateway asks of kvrouted and tells it.

use std::collections::HashMap;
use std::time::Instant;

use kvrouted::client::{Answer, AsyncClient, Booking};
use kvrouted::error::Error;
use kvrouted::ids::{SpaceId, Worker};
use kvrouted::route::{BookingRequest, Prompt, RouteRequest};
use tokio::sync::mpsc::Sender;

use crate::engine::{Engine, Event, Gone};

/// Times that a request is put to another worker after the one that ran it was lost.
const RETRIES_MAX: u32 = 3;

/// What all requests share.
pub(crate) struct Gateway {
    pub(crate) client: AsyncClient,
    pub(crate) space: SpaceId,
    pub(crate) model: String,
    pub(crate) engines: HashMap<u64, Engine>,
}

/// What a caller asks for.
pub(crate) struct Asked {
    /// The gateway's name of the request.
    pub(crate) id: String,
    /// The conversation it belongs to; its requests go to one worker, also without the daemon.
    pub(crate) session: Option<String>,
    pub(crate) prompt: Vec<u32>,
    /// What the simulated engine is to generate.
    pub(crate) output: Vec<u32>,
}

/// A part of the answer.
pub(crate) enum Chunk {
    /// Tokens, and where they come from.
    Tokens { tokens: Vec<u32>, worker: Worker, is_fallback: bool, cached_blocks: Option<u32>, is_last: bool },
    /// No more comes.
    Failed(String),
}

/// A booking that is freed however the request ends: also where the caller hangs up, and its task is dropped.
struct Booked {
    client: AsyncClient,
    booking: Option<Booking>,
}

impl Drop for Booked {
    fn drop(&mut self) {
        let Some(booking) = self.booking.take() else { return };
        let client = self.client.clone();
        // What cannot be said at once the client says when the daemon is back.
        tokio::spawn(async move { client.free(booking).await });
    }
}

/// How a run on one worker ended.
enum Ended {
    Done,
    /// The worker went.
    Lost,
    /// The caller hung up.
    Unwanted,
}

impl Gateway {
    /// Runs a prompt where kvrouted says, and sends what is to be streamed.
    ///
    /// A worker that is lost halfway is no loss: what it put out becomes part of the prompt of the next one.
    pub(crate) async fn complete(&self, asked: &Asked, to: &Sender<Chunk>) {
        let mut put_out = 0;
        for attempt in 0..=RETRIES_MAX {
            let (done, rest) = asked.output.split_at(put_out);
            let prompt = [asked.prompt.as_slice(), done].concat();
            let answer = match self.route(asked, &prompt, rest.len(), attempt).await {
                Ok(answer) => answer,
                Err(error) => return fail(to, &error.to_string()).await,
            };
            let booked = Booked { client: self.client.clone(), booking: answer.booking() };
            match self.run(&answer, &prompt, rest, to).await {
                (Ended::Done | Ended::Unwanted, _) => return,
                (Ended::Lost, more) => put_out += more,
            }
            drop(booked);
        }
        fail(to, "no worker that was tried could run it").await;
    }

    async fn route(&self, asked: &Asked, prompt: &[u32], output: usize, attempt: u32) -> Result<Answer, Error> {
        let request = RouteRequest {
            book: Some(BookingRequest { request_id: &asked.id, attempt }),
            affinity_session: asked.session.as_deref(),
            expected_output_tokens: output as u32,
            ..RouteRequest::new(self.space, Prompt::of_tokens(prompt))
        };
        let answer = self.client.route(&request).await?;
        match &answer {
            // Nobody is eligible: why is in the reply.
            Answer::Daemon { reply, .. } => reply.chosen().map(drop)?,
            Answer::Fallback(_) => {}
        }
        Ok(answer)
    }

    /// Runs a prompt on the best worker that can be reached. Answers with how many tokens it put out, too.
    async fn run(&self, answer: &Answer, prompt: &[u32], output: &[u32], to: &Sender<Chunk>) -> (Ended, usize) {
        for worker in answer.workers() {
            let began = Instant::now();
            let events = self.engines.get(&worker.id.0).ok_or(Gone).and_then(|engine| engine.run(prompt, output));
            let Ok(mut events) = events else {
                self.failed(worker, "cannot be reached").await;
                continue;
            };
            let mut put_out = 0;
            loop {
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = to.closed() => return (Ended::Unwanted, put_out),
                };
                let is_last = matches!(event, Some(Event::Done));
                let cached_blocks = match event {
                    Some(Event::Prefilled { cached_blocks }) => {
                        self.prefilled(answer, worker, began).await;
                        Some(cached_blocks)
                    }
                    Some(Event::Done) => None,
                    None => {
                        self.failed(worker, "was lost").await;
                        return (Ended::Lost, put_out);
                    }
                };
                // The first token comes with the prefill, the others at the end.
                let upto = if is_last { output.len() } else { 1.min(output.len()) };
                let tokens = output[put_out..upto].to_vec();
                put_out = upto;
                let is_fallback = answer.is_fallback();
                let chunk = Chunk::Tokens { tokens, worker, is_fallback, cached_blocks, is_last };
                if to.send(chunk).await.is_err() {
                    return (Ended::Unwanted, put_out);
                }
                if is_last {
                    self.progressed(answer, put_out).await;
                    return (Ended::Done, put_out);
                }
            }
        }
        (Ended::Lost, 0)
    }

    /// The prompt is computed.
    async fn prefilled(&self, answer: &Answer, worker: Worker, began: Instant) {
        let Some(booking) = answer.booking() else { return };
        if answer.best() != Some(worker) {
            // The first could not be reached: the load is this one's.
            drop(self.client.served(booking, worker).await);
        }
        let prefill_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        drop(self.client.prefill_complete(booking, prefill_us).await);
        self.progressed(answer, 1).await;
    }

    async fn progressed(&self, answer: &Answer, output_tokens: usize) {
        if let Some(booking) = answer.booking() {
            drop(self.client.output_progress(booking, output_tokens as u32).await);
        }
    }

    /// Others are warned of the worker; without the daemon there is nobody to warn.
    async fn failed(&self, worker: Worker, how: &str) {
        drop(self.client.report_failure(self.space, worker, how).await);
    }
}

async fn fail(to: &Sender<Chunk>, why: &str) {
    // Whoever has hung up needs no word.
    drop(to.send(Chunk::Failed(why.to_owned())).await);
}
