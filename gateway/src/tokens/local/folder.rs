//! A model's folder as Hugging Face lays it out: the tokenizer, the chat templates and the names of special tokens.
//!
//! * `tokenizer.json`: needed.
//! * `tokenizer_config.json`: `bos_token` and its like, and `chat_template`: a text, or a list of named ones.
//! * `special_tokens_map.json`: special tokens that `tokenizer_config.json` lacks.
//! * `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`: instead of those in `tokenizer_config.json`.
//!
//! The folder comes from elsewhere, so each file has a bound, and loading has a thread of its own: it may panic, or take
//! longer than its time, without more harm.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::request::{Templates, Text, text_of};
use super::template::ChatTemplate;
use crate::api::ApiPath;
use crate::limits::{
    LOCAL_CONFIG_BYTES_MAX, LOCAL_LOAD_MAX, LOCAL_TEMPLATE_BYTES_MAX, LOCAL_TEXT_BYTES_MAX, LOCAL_TOKENIZER_BYTES_MAX,
    PROMPT_TOKENS_MAX,
};

/// A tokenizer with its templates.
pub(super) struct Folder {
    tokenizer: Tokenizer,
    templates: Templates,
    /// Why chats are not tokenised, if they are not.
    pub(super) problem: Option<String>,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Value>,
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

impl Folder {
    /// Reads a folder. The error names the file.
    pub(super) fn load(path: &Path) -> Result<Self, String> {
        let (sender, loaded) = mpsc::channel();
        let folder = path.to_owned();
        let thread = std::thread::Builder::new().name("load-tokenizer".into());
        // Nobody receives what comes too late.
        let started = thread.spawn(move || drop(sender.send(Self::read(&folder))));
        started.map_err(|error| format!("no thread can be started: {error}"))?;
        match loaded.recv_timeout(LOCAL_LOAD_MAX) {
            Ok(loaded) => loaded,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(format!("it was not read within {} s", Duration::as_secs(&LOCAL_LOAD_MAX)))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err("tokenizer.json made its reader panic".to_owned()),
        }
    }

    fn read(path: &Path) -> Result<Self, String> {
        let bytes = read_bounded(&path.join("tokenizer.json"), LOCAL_TOKENIZER_BYTES_MAX)?;
        let bytes = bytes.ok_or("there is no tokenizer.json")?;
        let mut tokenizer =
            Tokenizer::from_bytes(&bytes).map_err(|error| format!("tokenizer.json cannot be used: {error}"))?;
        // Engines set both for each call, whatever the file says.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| format!("tokenizer.json cannot be used: {error}"))?;
        let config: TokenizerConfig = read_json(&path.join("tokenizer_config.json"))?.unwrap_or_default();
        let map: serde_json::Map<String, Value> = read_json(&path.join("special_tokens_map.json"))?.unwrap_or_default();
        let special = special_tokens(&config.others, &map);
        let [default, tool_use] = sources(path, config.chat_template.as_ref())?;
        let mut problem = None;
        let mut compile = |source: Option<String>| match source.map(|source| ChatTemplate::new(&source)) {
            None => None,
            Some(Ok(template)) => Some(template),
            Some(Err(why)) => {
                problem = Some(format!("its chat template cannot be compiled: {why}"));
                None
            }
        };
        let templates = Templates { default: compile(default), tool_use: compile(tool_use), special };
        if templates.default.is_none() && problem.is_none() {
            problem = Some("it has no chat template".to_owned());
        }
        Ok(Self { tokenizer, templates, problem })
    }

    /// The tokens of a body. The error has no part of a prompt.
    pub(super) fn tokenise(&self, path: ApiPath, body: &[u8]) -> Result<Vec<u32>, String> {
        let Text { text, add_special_tokens } = text_of(path, body, &self.templates)?;
        if text.len() > LOCAL_TEXT_BYTES_MAX {
            return Err(format!("the prompt has more than {LOCAL_TEXT_BYTES_MAX} bytes"));
        }
        let encoding = self.tokenizer.encode_fast(text.as_str(), add_special_tokens);
        let encoding = encoding.map_err(|_| "the tokenizer failed")?;
        match encoding.get_ids() {
            [] => Err("the prompt is empty".to_owned()),
            ids if ids.len() > PROMPT_TOKENS_MAX => Err(format!("the prompt has more than {PROMPT_TOKENS_MAX} tokens")),
            ids => Ok(ids.to_vec()),
        }
    }

    /// The text of some tokens; `None` = the tokenizer lacks one of them.
    pub(super) fn text_of_ids(&self, ids: &[u32]) -> Option<String> {
        if ids.iter().any(|id| self.tokenizer.id_to_token(*id).is_none()) {
            return None;
        }
        self.tokenizer.decode(ids, false).ok()
    }

    /// Whether a token is a special one.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.tokenizer.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }
}

/// A file up to its bound; `None` = there is none.
fn read_bounded(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>, String> {
    let name = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{} cannot be read: {error}", name())),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(|error| format!("{} cannot be read: {error}", name()))?;
    if bytes.len() as u64 > bytes_max {
        return Err(format!("{} has more than {bytes_max} bytes", name()));
    }
    Ok(Some(bytes))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    let Some(bytes) = read_bounded(path, LOCAL_CONFIG_BYTES_MAX)? else { return Ok(None) };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    serde_json::from_slice(&bytes).map(Some).map_err(|error| format!("{name} cannot be used: {error}"))
}

/// Names that end in `_token` with their text; those of the configuration first.
fn special_tokens(
    config: &serde_json::Map<String, Value>,
    map: &serde_json::Map<String, Value>,
) -> Vec<(String, String)> {
    let mut special: Vec<(String, String)> = Vec::new();
    for (name, value) in config.iter().chain(map) {
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        let is_new = name.ends_with("_token") && special.iter().all(|(known, _)| known != name);
        if let Some(text) = text.filter(|_| is_new) {
            special.push((name.clone(), text.to_owned()));
        }
    }
    special
}

/// The texts of the default template and of that for tools.
fn sources(path: &Path, configured: Option<&Value>) -> Result<[Option<String>; 2], String> {
    let file = |path: PathBuf| -> Result<Option<String>, String> {
        let Some(bytes) = read_bounded(&path, LOCAL_TEMPLATE_BYTES_MAX)? else { return Ok(None) };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        String::from_utf8(bytes).map(Some).map_err(|_| format!("{name} is no text"))
    };
    let of_file = file(path.join("chat_template.jinja"))?;
    if of_file.is_some() {
        return Ok([of_file, file(path.join("additional_chat_templates/tool_use.jinja"))?]);
    }
    let named = |wanted: &str| {
        let list = configured.and_then(Value::as_array).into_iter().flatten();
        let mut found = list.filter(|entry| entry.get("name").and_then(Value::as_str) == Some(wanted));
        found.next().and_then(|entry| entry.get("template")).and_then(Value::as_str).map(str::to_owned)
    };
    let single = configured.and_then(Value::as_str).map(str::to_owned);
    Ok([single.or_else(|| named("default")), named("tool_use")])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: &str = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2,
        "strategy": "LongestFirst", "stride": 0}, "padding": null, "added_tokens": [{"id": 0, "content": "<s>",
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "?": 1, "a": 2, "b": 3}, "unk_token": "?"}}"#;

    fn folder(files: &[(&str, &str)]) -> (tempfile::TempDir, Result<Folder, String>) {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        let loaded = Folder::load(folder.path());
        (folder, loaded)
    }

    fn ids(folder: &Folder, path: ApiPath, body: &str) -> Result<Vec<u32>, String> {
        folder.tokenise(path, body.as_bytes())
    }

    #[test]
    fn tokenizer_templates_and_special_tokens_are_read() {
        let config = r#"{"bos_token": {"content": "<s>"}, "x_token": "b", "chat_template": [
            {"name": "default", "template": "{{ bos_token }} a"}, {"name": "tool_use", "template": "{{ x_token }}"}]}"#;
        let (_files, loaded) = folder(&[("tokenizer.json", TOKENIZER), ("tokenizer_config.json", config)]);
        let folder_of_two = loaded.expect("a folder");
        let chat = |body: &str| ids(&folder_of_two, ApiPath::ChatCompletions, body);
        assert_eq!(chat(r#"{"messages": []}"#), Ok(vec![0, 2]));
        assert_eq!(chat(r#"{"messages": [], "tools": [{"function": {"name": "f"}}]}"#), Ok(vec![3]));
        assert_eq!(ids(&folder_of_two, ApiPath::Completions, r#"{"prompt": "a b a c"}"#), Ok(vec![2, 3, 2, 1]));
        assert!(folder_of_two.problem.is_none() && folder_of_two.is_special(0) && !folder_of_two.is_special(2));
        assert_eq!(folder_of_two.text_of_ids(&[9]), None);
        let files = [("tokenizer.json", TOKENIZER), ("tokenizer_config.json", config), ("chat_template.jinja", "b")];
        let (_files, loaded) = folder(&files);
        let tools = r#"{"messages": [], "tools": [{"function": {"name": "f"}}]}"#;
        assert_eq!(ids(&loaded.expect("a folder"), ApiPath::ChatCompletions, tools), Ok(vec![3]));
    }

    #[test]
    fn a_folder_without_a_usable_template_still_has_completions() {
        for (template, why) in [(None, "no chat template"), (Some("{% if %}"), "line 1"), (Some("{{ a"), "compiled")] {
            let config =
                template.map_or_else(|| "{}".to_owned(), |text| serde_json::json!({"chat_template": text}).to_string());
            let (_files, loaded) = folder(&[("tokenizer.json", TOKENIZER), ("tokenizer_config.json", &config)]);
            let loaded = loaded.expect("a folder");
            assert!(loaded.problem.as_ref().is_some_and(|problem| problem.contains(why)), "{:?}", loaded.problem);
            assert_eq!(ids(&loaded, ApiPath::Completions, r#"{"prompt": "a"}"#), Ok(vec![2]));
            assert!(ids(&loaded, ApiPath::ChatCompletions, r#"{"messages": []}"#).is_err());
        }
    }

    #[test]
    fn bad_folders_are_refused_by_name() {
        let deep = "[".repeat(100_000);
        let cut = &TOKENIZER[..TOKENIZER.len() / 2];
        let other = TOKENIZER.replace("WordLevel", "Unheard");
        let bad_regex = TOKENIZER.replace(
            r#"{"type": "Whitespace"}"#,
            r#"{"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false}"#,
        );
        for text in ["", "{}", "[1]", &deep, cut, &other, &bad_regex] {
            let error = folder(&[("tokenizer.json", text)]).1.err().expect("refused");
            assert!(error.contains("tokenizer.json"), "{error}");
        }
        assert!(folder(&[]).1.is_err_and(|error| error.contains("no tokenizer.json")));
        let files = [("tokenizer.json", TOKENIZER), ("tokenizer_config.json", "[")];
        assert!(folder(&files).1.is_err_and(|error| error.contains("tokenizer_config.json")));
        let long = "a".repeat(LOCAL_TEMPLATE_BYTES_MAX as usize + 1);
        let files = [("tokenizer.json", TOKENIZER), ("chat_template.jinja", long.as_str())];
        assert!(folder(&files).1.is_err_and(|error| error.contains("chat_template.jinja has more")));
        assert!(Folder::load(Path::new("/nonexistent")).is_err());
    }
}
