//! What is known of an engine.

use crate::api::ApiPath;

/// The kind of server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM
    Vllm,
    /// SGLang
    Sglang,
}

impl Dialect {
    /// The name in logs and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
        }
    }
}

/// One model or adapter that an engine lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    /// The name that bodies use.
    pub id: String,
    /// The base model, if this is a LoRA adapter.
    pub parent: Option<String>,
    /// The path or repository that the engine loaded the model from. Names of one root are aliases.
    pub root: Option<String>,
    /// The most tokens of a prompt and its output.
    pub tokens_max: Option<u32>,
    /// When the engine says that the model was made, in seconds since 1970.
    pub created: u64,
    /// `owned_by` of the engine's list.
    pub owned_by: Option<String>,
}

/// Where one data-parallel rank publishes its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSource {
    /// The rank, from 0.
    pub rank: u32,
    /// Its publisher; `None` = the rank publishes nothing.
    pub endpoint: Option<String>,
    /// Where lost events are asked for again.
    pub replay: Option<String>,
    /// The topic of its events.
    pub topic: String,
}

/// A path with a renderer: the same body gives tokens instead of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RenderPath {
    /// `/v1/chat/completions/render`
    ChatCompletions,
    /// `/v1/completions/render`
    Completions,
    /// `/v1/responses/render`
    Responses,
    /// `/v1/messages/render`
    Messages,
}

impl RenderPath {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::ChatCompletions, Self::Completions, Self::Responses, Self::Messages];

    /// The renderer's path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions/render",
            Self::Completions => "/v1/completions/render",
            Self::Responses => "/v1/responses/render",
            Self::Messages => "/v1/messages/render",
        }
    }

    /// The renderer for a caller's path.
    #[must_use]
    pub const fn of(path: ApiPath) -> Option<Self> {
        match path {
            ApiPath::ChatCompletions => Some(Self::ChatCompletions),
            ApiPath::Completions => Some(Self::Completions),
            ApiPath::Responses => Some(Self::Responses),
            ApiPath::Messages => Some(Self::Messages),
            _ => None,
        }
    }

    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The renderers that an engine has. A value without any is the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenderSupport(u8);

impl RenderSupport {
    /// Whether the engine renders this path.
    #[must_use]
    pub const fn has(self, path: RenderPath) -> bool {
        self.0 & path.bit() != 0
    }

    /// The same with one path more.
    #[must_use]
    pub const fn with(self, path: RenderPath) -> Self {
        Self(self.0 | path.bit())
    }

    /// Whether the engine has no renderer.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Facts that the operator names because the engine does not tell them. They win over what the engine says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedFacts {
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// Where the ranks publish; empty = what the engine says.
    pub ranks: Vec<RankSource>,
    /// The port of SGLang's bootstrap server.
    pub bootstrap_port: Option<u16>,
}

/// What is known of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineFacts {
    /// The kind of server.
    pub dialect: Dialect,
    /// Its version, if it tells.
    pub version: Option<String>,
    /// Models and adapters in the engine's order: the first base model is what its events are about.
    pub models: Vec<ModelFacts>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// Where each rank publishes. Wildcards are replaced by the URL's host.
    pub ranks: Vec<RankSource>,
    /// The paths with a renderer.
    pub renders: RenderSupport,
    /// Where decode engines meet this prefill engine of SGLang: the port of its bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// What could not be learnt or is set badly: each a sentence with the remedy.
    pub problems: Vec<String>,
}

impl EngineFacts {
    /// The base model: the first listed model that is no adapter.
    #[must_use]
    pub fn base(&self) -> Option<&ModelFacts> {
        self.models.iter().find(|model| model.parent.is_none())
    }

    /// The facts with what the operator named by hand.
    #[must_use]
    pub fn with_named(mut self, named: &NamedFacts) -> Self {
        self.block_size = named.block_size.or(self.block_size);
        self.bootstrap_port = named.bootstrap_port.or(self.bootstrap_port);
        if !named.ranks.is_empty() {
            self.ranks.clone_from(&named.ranks);
        }
        self
    }
}
