//! A prompt as the engine's tokens.
//!
//! The sources, in this order:
//! 1. **Body**: token ids in the body.
//! 2. **Renderer**: the engine's own renderer gets the caller's body and answers the tokens that it would run.
//! 3. **Tokenize**: the engine's `/tokenize`, if every field of the body that could change the prompt can be passed on.
//! 4. **Local**: a tokenizer of the gateway's own ([`LocalTokenizers`]), only while it has been proved equal to the
//!    engine on the model's own traffic. Where the operator prefers it, it comes before the renderer.
//! 5. **None**: the request is routed by load, and [`PromptTokens::why_none`] says why.
//!
//! Wrong tokens are worse than none: they predict overlaps that no engine has. So a body is tokenised only where the
//! result is the engine's by construction, and [`Tokeniser::observe`] compares the number of tokens with the engine's.
//!
//! Rendered prompts are cached by the exact body. A second key over the body without its sampling fields would find
//! more: it is left out. It would have to parse every body, which costs more than the hash it saves; which fields are
//! sampling fields depends on the engine's version and on the model's template; and in practice bodies that repeat a
//! prompt are either equal or longer by a turn.

mod body;
mod cache;
mod exchange;
mod local;
mod media;
#[doc(hidden)]
pub mod readers;
mod rendered;
mod source;
mod tokeniser;
mod tokenize;

pub use local::{LocalCause, LocalCounts, LocalFinding, LocalFolder, LocalTokenizers};
pub use source::{PromptTokens, TokenSource};
pub use tokeniser::{TokenCounts, TokenSettings, Tokeniser};
