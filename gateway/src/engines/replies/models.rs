//! `GET /v1/models`, which both engines have.

use serde_json::Value;

use super::{name, object, tokens};
use crate::engines::facts::ModelFacts;
use crate::limits::MODELS_PER_ENGINE_MAX;

/// The models that an engine lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engines) struct Models {
    /// In the engine's order.
    pub(in crate::engines) list: Vec<ModelFacts>,
    /// Entries without a usable name, and entries beyond the bound.
    pub(in crate::engines) left_out: usize,
}

/// Reads the list. Entries without a usable name are left out and counted.
pub(in crate::engines) fn read_models(body: &[u8]) -> Result<Models, String> {
    let reply = object(body)?;
    let Some(Value::Array(entries)) = reply.get("data") else { return Err("has no list `data`".to_owned()) };
    let mut models = Models::default();
    for entry in entries {
        match model(entry) {
            Some(model) if models.list.len() < MODELS_PER_ENGINE_MAX => models.list.push(model),
            Some(_) | None => models.left_out += 1,
        }
    }
    if models.list.is_empty() { Err("lists no model".to_owned()) } else { Ok(models) }
}

fn model(entry: &Value) -> Option<ModelFacts> {
    let id = name(entry.get("id"))?.to_owned();
    let text = |field: &str| name(entry.get(field)).map(str::to_owned);
    Some(ModelFacts {
        parent: text("parent").filter(|parent| *parent != id),
        root: text("root"),
        tokens_max: tokens(entry.get("max_model_len")),
        created: entry.get("created").and_then(Value::as_u64).unwrap_or(0),
        owned_by: text("owned_by"),
        id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_models_and_adapters_are_told_apart() {
        let body = br#"{"object": "list", "data": [
            {"id": "llama", "object": "model", "created": 7, "owned_by": "vllm", "root": "/models/llama",
             "parent": null, "max_model_len": 4096, "permission": [{}]},
            {"id": "sql", "owned_by": "vllm", "root": "/adapters/sql", "parent": "llama"}]}"#;
        let models = read_models(body).expect("models");
        let [base, adapter] = models.list.as_slice() else { panic!("{models:?}") };
        assert_eq!((base.id.as_str(), base.tokens_max, base.created), ("llama", Some(4096), 7));
        assert_eq!((base.parent.as_deref(), base.root.as_deref()), (None, Some("/models/llama")));
        assert_eq!((adapter.parent.as_deref(), adapter.tokens_max), (Some("llama"), None));
    }

    #[test]
    fn nonsense_is_named() {
        for (body, words) in [
            ("", "not JSON"),
            ("<html>", "not JSON"),
            ("[]", "not a JSON object"),
            ("{}", "`data`"),
            (r#"{"data": {}}"#, "`data`"),
            (r#"{"data": []}"#, "no model"),
            (r#"{"data": [7, null, {"id": 3}, {"id": ""}, {"id": "a\u0000"}]}"#, "no model"),
        ] {
            assert!(read_models(body.as_bytes()).expect_err(body).contains(words), "{body}");
        }
        let deep = format!("{{\"data\": {}", "[".repeat(100_000));
        assert!(read_models(deep.as_bytes()).is_err());
        let odd =
            br#"{"data": [{"id": "a", "parent": "a", "max_model_len": -1, "created": "x", "root": []}, {"id": {}}]}"#;
        let models = read_models(odd).expect("models");
        let expected =
            ModelFacts { id: "a".into(), parent: None, root: None, tokens_max: None, created: 0, owned_by: None };
        assert_eq!((models.list, models.left_out), (vec![expected], 1));
    }
}
