//! Prompts to tokens without an engine: the last source, and only where it has been proved equal to the engine.
//!
//! ```text
//! folder.rs    a model's folder: tokenizer, templates, special tokens
//! request.rs   a body's text, by vLLM's rules, or why there is none
//! template.rs  chat templates, bounded
//! json.rs      JSON as Python reads and writes it
//! proof.rs     the state of a proof, and the likeliest cause of a difference
//! ```
//!
//! While a renderer or `/tokenize` answers, prompts are tokenised here too, away from the request's path, and compared
//! id for id. What cannot be tokenised here (an image, a field whose rule is not built) is not compared and never used.

mod folder;
mod json;
mod proof;
mod request;
mod template;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use xxhash_rust::xxh3::xxh3_64;

use self::folder::Folder;
use self::proof::{Change, Compared, Proof, likeliest};
use super::rendered::Rendered;
use super::source::TokenSource;
use crate::api::ApiPath;
use crate::engines::ServedModel;
use crate::limits::{LOCAL_CHECKS_IN_FLIGHT_MAX, LOCAL_IN_FLIGHT_MAX, LOCAL_PROOF_PROMPTS, LOCAL_PROOFS_MAX};

pub use proof::LocalCause;
pub(super) use request::{Templates, text_of};
pub(super) use template::ChatTemplate;

/// A folder of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalFolder {
    /// The base model, as the engines name it.
    pub model: String,
    /// Where its files are.
    pub folder: PathBuf,
    /// Whether local tokens come before renderers and `/tokenize` where they are proved.
    pub prefer: bool,
}

/// Prompts by what the local tokenizer did. For metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalCounts {
    /// Comparisons that were equal.
    pub equal: u64,
    /// Comparisons that differed.
    pub different: u64,
    /// Prompts that could not be tokenised here.
    pub not_tokenised: u64,
    /// Prompts not compared because too many comparisons were under way.
    pub skipped: u64,
    /// Panics.
    pub panicked: u64,
    /// Models and paths whose proof holds.
    pub proved: u64,
    /// Models and paths that differed, and whose proof does not hold again yet.
    pub disproved: u64,
}

/// A local tokenizer that gives other tokens than the engine, or that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalFinding {
    /// What is wrong.
    pub what: String,
    /// The likeliest cause and the remedy.
    pub remedy: String,
}

#[derive(Debug, Default)]
struct Counters {
    equal: AtomicU64,
    different: AtomicU64,
    not_tokenised: AtomicU64,
    skipped: AtomicU64,
    panicked: AtomicU64,
    /// Prompts that could have been compared.
    comparable: AtomicU64,
}

struct Model {
    folder: Arc<Folder>,
    prefer: bool,
}

type ProofKey = (ServedModel, ApiPath);

/// The local tokenizers of all models.
#[derive(Clone)]
pub struct LocalTokenizers(Arc<Shared>);

struct Shared {
    models: HashMap<String, Model>,
    proofs: Mutex<HashMap<ProofKey, Proof>>,
    /// Threads for comparisons, and for requests that wait.
    checks: Arc<Semaphore>,
    uses: Arc<Semaphore>,
    counters: Counters,
}

impl std::fmt::Debug for LocalTokenizers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let models: Vec<&String> = self.0.models.keys().collect();
        f.debug_struct("LocalTokenizers").field("models", &models).finish_non_exhaustive()
    }
}

fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl LocalTokenizers {
    /// Reads the folders. Takes seconds for large ones.
    ///
    /// # Errors
    /// A folder that cannot be used.
    pub fn load(folders: &[LocalFolder]) -> Result<Self, String> {
        let mut models = HashMap::new();
        for LocalFolder { model, folder, prefer } in folders {
            let loaded = Folder::load(folder);
            let loaded =
                loaded.map_err(|why| format!("the tokenizer in {} cannot be used: {why}", folder.display()))?;
            if let Some(problem) = &loaded.problem {
                tracing::warn!(
                    model,
                    "the folder of the local tokenizer: {problem}; its chats are not tokenised locally"
                );
            }
            models.insert(model.clone(), Model { folder: Arc::new(loaded), prefer: *prefer });
        }
        let (checks, uses) = (Semaphore::new(LOCAL_CHECKS_IN_FLIGHT_MAX), Semaphore::new(LOCAL_IN_FLIGHT_MAX));
        let (proofs, counters) = (Mutex::default(), Counters::default());
        Ok(Self(Arc::new(Shared { models, proofs, checks: Arc::new(checks), uses: Arc::new(uses), counters })))
    }

    /// Whether local tokens may be used for a model and a path.
    pub(super) fn is_proved(&self, path: ApiPath, model: &ServedModel) -> bool {
        self.0.models.contains_key(&model.base) && self.0.proof(path, model, |proof| proof.is_some_and(Proof::holds))
    }

    /// Whether local tokens come first: they are proved and preferred, and it is not this prompt's turn to be compared.
    pub(super) fn comes_first(&self, path: ApiPath, model: &ServedModel) -> bool {
        let is_preferred = self.0.models.get(&model.base).is_some_and(|model| model.prefer);
        is_preferred && self.is_proved(path, model) && !self.0.is_turn(path, model)
    }

    /// The tokens of a body, whether proved or not. The error has no part of the prompt.
    pub(super) async fn tokens(
        &self,
        path: ApiPath,
        model: &ServedModel,
        body: &Bytes,
        deadline: Instant,
    ) -> Result<Rendered, String> {
        let folder = self.0.models.get(&model.base).map(|model| Arc::clone(&model.folder));
        let folder = folder.ok_or("the model has no local tokenizer")?;
        let body = body.clone();
        let tokenised = async {
            let permit = Arc::clone(&self.0.uses).acquire_owned().await;
            // The permit is held by the thread, which goes on when nobody waits any more.
            let thread = tokio::task::spawn_blocking(move || {
                let _permit = permit;
                folder.tokenise(path, &body)
            });
            thread.await.unwrap_or_else(|_| {
                bump(&self.0.counters.panicked);
                Err("the local tokenizer panicked".to_owned())
            })
        };
        let tokenised = tokio::time::timeout_at(deadline.into(), tokenised).await;
        let tokenised = tokenised.unwrap_or_else(|_| Err("the local tokenizer took too long".to_owned()));
        let ids = tokenised.inspect_err(|_| bump(&self.0.counters.not_tokenised))?;
        Ok(Rendered { tokens: ids.into(), media: Arc::from([]), salt: None, source: TokenSource::Local })
    }

    /// Compares local tokens with those of an engine, in the background and within bounds.
    pub(super) fn compare(&self, path: ApiPath, model: &ServedModel, body: &Bytes, engine: &Rendered) {
        let Some(Model { folder, prefer }) = self.0.models.get(&model.base) else { return };
        // Where local tokens come first, the prompts that reach an engine are those whose turn it was.
        let has_had_turn = *prefer && self.is_proved(path, model);
        if !engine.media.is_empty() || !(has_had_turn || self.0.is_turn(path, model)) {
            return;
        }
        let folder = Arc::clone(folder);
        let Ok(permit) = Arc::clone(&self.0.checks).try_acquire_owned() else {
            bump(&self.0.counters.skipped);
            return;
        };
        let (shared, model, body) = (Arc::clone(&self.0), model.clone(), body.clone());
        let engine = Arc::clone(&engine.tokens);
        tokio::spawn(async move {
            let thread = tokio::task::spawn_blocking(move || {
                let ids = folder.tokenise(path, &body)?;
                if *ids == *engine {
                    return Ok((Compared::Equal(hash_of(&ids)), ids.len(), engine.len(), 0));
                }
                let same = ids.iter().zip(&*engine).take_while(|(local, engine)| local == engine).count();
                let text_of = |ids: &[u32]| folder.text_of_ids(ids);
                let cause = likeliest(&ids, &engine, |id| folder.is_special(id), text_of);
                Ok::<_, String>((Compared::Different(cause), ids.len(), engine.len(), same))
            });
            match thread.await {
                Ok(Ok((compared, local, engine, same))) => {
                    let change = shared.observe(path, &model, compared);
                    shared.log(path, &model, change, &format!("local={local} engine={engine} same={same}"));
                }
                Ok(Err(why)) => {
                    bump(&shared.counters.not_tokenised);
                    tracing::debug!(model = model.base, path = path.label(), why, "a prompt is not tokenised locally");
                }
                Err(_) => bump(&shared.counters.panicked),
            }
            drop(permit);
        });
    }

    /// Whether no comparison is under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.checks.available_permits() == LOCAL_CHECKS_IN_FLIGHT_MAX
    }

    /// What shows without a comparison that a proof does not hold.
    pub(super) fn disprove(&self, path: ApiPath, model: &ServedModel, cause: LocalCause) {
        if self.0.models.contains_key(&model.base) {
            let change = self.0.observe(path, model, Compared::Different(cause));
            self.0.log(path, model, change, "");
        }
    }

    /// The counts so far.
    #[must_use]
    pub fn counts(&self) -> LocalCounts {
        let counters = &self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let proofs = self.0.proofs.lock();
        let count = |is: fn(&Proof) -> bool| proofs.values().filter(|proof| is(proof)).count() as u64;
        LocalCounts {
            equal: read(&counters.equal),
            different: read(&counters.different),
            not_tokenised: read(&counters.not_tokenised),
            skipped: read(&counters.skipped),
            panicked: read(&counters.panicked),
            proved: count(Proof::holds),
            disproved: count(|proof| proof.cause().is_some()),
        }
    }

    /// What the operator should know, by model and path.
    #[must_use]
    pub fn findings(&self) -> Vec<LocalFinding> {
        let mut findings = Vec::new();
        for (name, model) in &self.0.models {
            if let Some(problem) = &model.folder.problem {
                let what = format!("model {name:?}: chats are not tokenised locally: {problem}");
                let remedy = "put chat_template.jinja into the folder, or correct it".to_owned();
                findings.push(LocalFinding { what, remedy });
            }
        }
        for ((model, path), proof) in &*self.0.proofs.lock() {
            let Some(cause) = proof.cause() else { continue };
            let adapter = model.lora.as_ref().map_or_else(String::new, |lora| format!(" with adapter {lora:?}"));
            let what = format!(
                "model {:?}{adapter}, {}: the local tokenizer gives other tokens than the engine; it is not used until \
                 {LOCAL_PROOF_PROMPTS} prompts in a row are equal",
                model.base,
                path.label()
            );
            findings.push(LocalFinding { what, remedy: cause.remedy().to_owned() });
        }
        findings.sort_by(|a, b| a.what.cmp(&b.what));
        findings
    }
}

fn hash_of(ids: &[u32]) -> u64 {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

impl Shared {
    fn proof<T>(&self, path: ApiPath, model: &ServedModel, read: impl FnOnce(Option<&Proof>) -> T) -> T {
        read(self.proofs.lock().get(&(model.clone(), path)))
    }

    /// Whether it is this prompt's turn to be compared.
    fn is_turn(&self, path: ApiPath, model: &ServedModel) -> bool {
        let every = self.proof(path, model, |proof| proof.map_or(1, Proof::check_every));
        self.counters.comparable.fetch_add(1, Ordering::Relaxed).is_multiple_of(every)
    }

    fn observe(&self, path: ApiPath, model: &ServedModel, compared: Compared) -> Change {
        bump(match compared {
            Compared::Equal(_) => &self.counters.equal,
            Compared::Different(_) => &self.counters.different,
        });
        let mut proofs = self.proofs.lock();
        let key = (model.clone(), path);
        // Without room for its state a model has no proof, so that its local tokens are not used.
        if !proofs.contains_key(&key) && proofs.len() >= LOCAL_PROOFS_MAX {
            return Change::None;
        }
        proofs.entry(key).or_default().observe(compared)
    }

    fn log(&self, path: ApiPath, model: &ServedModel, change: Change, tokens: &str) {
        let (model, adapter, path) = (&model.base, model.lora.as_deref(), path.label());
        match change {
            Change::None => {}
            Change::Proved => tracing::info!(model, adapter, path, "the local tokenizer is proved equal to the engine"),
            Change::Disproved(cause) => tracing::warn!(
                model,
                adapter,
                path,
                cause = cause.label(),
                tokens,
                "the local tokenizer gives other tokens than the engine and is not used: {}",
                cause.remedy()
            ),
        }
    }
}
