//! What this module reads of bodies and replies, for the fuzz targets: without engines and without a tokenizer.

use bytes::Bytes;

use super::body::{may_skip_cache, without_payload};
use super::local::{ChatTemplate, Templates, text_of};
use super::media::blocks_of;
use super::rendered::{Rendered, read_rendered, read_tokenized};
use super::source::TokenSource;
use super::tokenize::tokenize_body;
use crate::api::ApiPath;
use crate::engines::Dialect;

/// Blocks that hold multimodal objects, by their number, each with the hash of the object.
pub type MediaBlocks = Vec<(u32, u64)>;

/// The tokens of a renderer's reply, and the blocks of `block_size` tokens that hold multimodal objects; else those of a
/// reply of `/tokenize`.
#[must_use]
pub fn rendered(reply: &[u8], block_size: u32) -> Option<(Vec<u32>, MediaBlocks)> {
    let read = read_rendered(reply, TokenSource::Renderer).or_else(|_| read_tokenized(reply));
    let Rendered { tokens, media, .. } = read.ok()?;
    let blocks = blocks_of(&media, tokens.len(), block_size);
    Some((tokens.to_vec(), blocks))
}

/// The body of `/tokenize` for a request's body, of vLLM or of SGLang.
#[must_use]
pub fn tokenize_request(path: ApiPath, is_sglang: bool, body: &[u8]) -> Option<Vec<u8>> {
    let dialect = if is_sglang { Dialect::Sglang } else { Dialect::Vllm };
    tokenize_body(dialect, path, body).ok()
}

/// What is kept of a body in place of it, if its tokens may come from the cache.
#[must_use]
pub fn cached(body: &Bytes) -> Option<Bytes> {
    (!may_skip_cache(body)).then(|| without_payload(body))
}

/// The text for a local tokenizer that a template makes of a body.
///
/// # Errors
/// The template cannot be compiled, or the body has no text here.
pub fn local_text(path: ApiPath, body: &[u8], template: &str) -> Result<String, String> {
    let template = ChatTemplate::new(template)?;
    let special = vec![("bos_token".to_owned(), "<s>".to_owned())];
    let templates = Templates { default: Some(template), tool_use: None, special };
    text_of(path, body, &templates).map(|text| text.text)
}
