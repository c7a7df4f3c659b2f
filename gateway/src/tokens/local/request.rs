//! The text that a body gives to the tokenizer, by vLLM 0.32's rules, or why this body is not tokenised here.
//!
//! The rules are those of `ChatCompletionRequest` (`entrypoints/openai/chat_completion/protocol.py`), of
//! `parse_chat_messages` (`renderers/chat_utils.py`), of `safe_apply_chat_template` (`renderers/hf.py`) and of
//! `render_jinja_template` (transformers 5.19, `utils/chat_template_utils.py`). A field that is not known to leave the
//! prompt alone, or whose rule is not built here, forbids local tokens: images, audio and video, a template of the
//! request's own, truncation, the role `developer`, tools with another `tool_choice` than `auto`.

use minijinja::Value;

use super::json::{Json, Values};
use super::template::ChatTemplate;
use crate::api::ApiPath;
use crate::tokens::body::{Fields, fields};
use crate::tokens::tokenize::{NEUTRAL, shown};

/// Fields of a chat that change its prompt, and that are followed.
const CHAT: [&str; 10] = [
    "model",
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
];
const COMPLETION: [&str; 3] = ["model", "prompt", "add_special_tokens"];

/// Names that `chat_template_kwargs` must not have: parameters of transformers' `apply_chat_template`, and what the
/// template's environment defines.
const RESERVED: [&str; 26] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "cycler",
    "dict",
    "documents",
    "joiner",
    "lipsum",
    "loop",
    "max_length",
    "messages",
    "namespace",
    "padding",
    "processor_kwargs",
    "raise_exception",
    "range",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "self",
    "strftime_now",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// What transformers appends to the message that is to be continued, to find its end in the rendered text.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// System texts that begin so lose their first line (`_strip_claude_code_billing_header`).
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// A text for the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::tokens) struct Text {
    pub(in crate::tokens) text: String,
    pub(super) add_special_tokens: bool,
}

/// The templates of a folder, and the special tokens that they may use: `bos_token` and its like.
#[derive(Debug, Default)]
pub(in crate::tokens) struct Templates {
    pub(in crate::tokens) default: Option<ChatTemplate>,
    /// Used for requests with tools, if the folder has one.
    pub(in crate::tokens) tool_use: Option<ChatTemplate>,
    pub(in crate::tokens) special: Vec<(String, String)>,
}

/// The text of a body. The error says why it is not to be had, without a part of the prompt.
pub(in crate::tokens) fn text_of(path: ApiPath, body: &[u8], templates: &Templates) -> Result<Text, String> {
    let mut fields = fields(body).ok_or("the body is no JSON object")?;
    fields.retain(|_, raw| raw.get() != "null");
    let body = RawBody { fields, values: Values::of_a_body() };
    let (followed, is_chat): (&[&str], bool) = match path {
        ApiPath::ChatCompletions => (&CHAT, true),
        ApiPath::Completions => (&COMPLETION, false),
        _ => return Err("this path is not tokenised locally".to_owned()),
    };
    let is_known = |field: &str| followed.contains(&field) || NEUTRAL.contains(&field);
    if let Some(field) = body.fields.keys().find(|field| !is_known(field)) {
        return Err(format!("the local tokenizer does not follow the field {}", shown(field)));
    }
    let add_special_tokens = flag(&body, "add_special_tokens", !is_chat)?;
    let text = if is_chat { chat(&body, templates)? } else { completion(&body)? };
    Ok(Text { text, add_special_tokens })
}

/// A body as it is read.
struct RawBody<'a> {
    fields: Fields<'a>,
    values: Values,
}

/// Of several prompts the first one.
fn completion(body: &RawBody<'_>) -> Result<String, String> {
    match json(body, "prompt")? {
        Some(Json::Text(text)) => Ok(text),
        Some(Json::List(prompts)) => match prompts.into_iter().next() {
            Some(Json::Text(text)) => Ok(text),
            _ => Err("the first prompt is no text".to_owned()),
        },
        _ => Err("the body has no prompt as text".to_owned()),
    }
}

fn chat(body: &RawBody<'_>, templates: &Templates) -> Result<String, String> {
    let tools = json(body, "tools")?.map(|tools| tools_of(&tools)).transpose()?;
    if tools.is_some() && json(body, "tool_choice")?.is_some_and(|choice| choice.text() != Some("auto")) {
        return Err("tools with this tool_choice are not followed".to_owned());
    }
    let for_tools = templates.tool_use.as_ref().filter(|_| tools.is_some());
    let template = for_tools.or(templates.default.as_ref()).ok_or("the folder has no chat template")?;
    let generates = flag(body, "add_generation_prompt", true)?;
    let continues = flag(body, "continue_final_message", false)?;
    if generates && continues {
        return Err("a message cannot be continued behind a generation prompt".to_owned());
    }
    let messages = json(body, "messages")?.ok_or("the body has no messages")?;
    let messages = messages.list().ok_or("the messages are no list")?;
    let message_of = |message: &Json| message_of(message, template.takes_parts(), &body.values);
    let mut messages = messages.iter().map(message_of).collect::<Result<Vec<_>, _>>()?;
    let continued = continues.then(|| mark(messages.last_mut(), template)).transpose()?;
    let special = templates.special.iter();
    let mut context: Vec<(String, Value)> =
        special.map(|(name, token)| (name.clone(), Value::from(token.as_str()))).collect();
    context.extend(template_kwargs(body)?);
    let messages: Vec<Value> = messages.into_iter().map(Message::into_value).collect();
    // Templates see these four always, if only as None.
    context.extend([
        ("messages".to_owned(), Value::from(messages)),
        ("tools".to_owned(), tools.unwrap_or(Value::from(()))),
        ("documents".to_owned(), documents_of(body)?),
        ("add_generation_prompt".to_owned(), Value::from(generates)),
    ]);
    let text = template.render(Value::from_pairs(context)).map_err(|why| format!("the chat template failed: {why}"))?;
    match continued {
        Some(end) => cut(&text, &end),
        None => Ok(text),
    }
}

fn json(body: &RawBody<'_>, field: &str) -> Result<Option<Json>, String> {
    let read = |raw: &&serde_json::value::RawValue| body.values.read(raw.get());
    body.fields.get(field).map(read).transpose().map_err(|_| format!("{field} cannot be read as the engine reads it"))
}

fn flag(body: &RawBody<'_>, field: &str, default: bool) -> Result<bool, String> {
    match json(body, field)? {
        None => Ok(default),
        Some(value) => value.bool().ok_or_else(|| format!("{field} is neither true nor false")),
    }
}

/// A message for the template.
struct Message {
    role: String,
    content: Content,
    /// Members behind the content.
    more: Vec<(&'static str, Value)>,
}

enum Content {
    Text(String),
    Parts(Vec<String>),
}

impl Message {
    fn into_value(self) -> Value {
        let content = match self.content {
            Content::Text(text) => Value::from(text),
            Content::Parts(texts) => {
                let part =
                    |text: String| Value::from_pairs([("type", Value::from("text")), ("text", Value::from(text))]);
                Value::from(texts.into_iter().map(part).collect::<Vec<_>>())
            }
        };
        let members = [("role", Value::from(self.role)), ("content", content)];
        Value::from_pairs(members.into_iter().chain(self.more))
    }
}

/// `_parse_chat_message_content` and `_postprocess_messages` for messages of text.
fn message_of(message: &Json, takes_parts: bool, values: &Values) -> Result<Message, String> {
    let members = message.map().ok_or("a message is no object")?;
    let role = message.get("role").and_then(Json::text).ok_or("a message has no role")?;
    let of_role: &[&str] = match role {
        "system" | "user" => &["name"],
        "assistant" => &["name", "tool_calls", "reasoning", "reasoning_content"],
        "tool" => &["name", "tool_call_id"],
        _ => return Err("a message has a role that is not followed".to_owned()),
    };
    let is_known = |key: &str| ["role", "content"].contains(&key) || of_role.contains(&key);
    if let Some((key, _)) = members.iter().find(|(key, value)| *value != Json::Null && !is_known(key)) {
        return Err(format!("messages with {} are not followed", shown(key)));
    }
    let texts = texts_of(message.get("content"))?;
    if role == "system" && texts.iter().any(|text| text.starts_with(BILLING_HEADER)) {
        return Err("a system message whose first line the engine drops is not followed".to_owned());
    }
    let content = match (takes_parts, role) {
        (true, "tool") => Content::Text(texts.join("\n")),
        (true, _) => Content::Parts(texts),
        (false, _) => Content::Text(texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n")),
    };
    let mut more = Vec::new();
    if let Some(calls) = message.get("tool_calls") {
        let calls = calls.list().ok_or("tool_calls is no list")?;
        if !calls.is_empty() {
            let calls = calls.iter().map(|call| tool_call_of(call, values)).collect::<Result<Vec<_>, _>>()?;
            more.push(("tool_calls", Value::from(calls)));
        }
    }
    let reasoning = message.get("reasoning").or_else(|| message.get("reasoning_content"));
    if let Some(reasoning) = reasoning {
        let reasoning = Value::from(reasoning.text().ok_or("a message has reasoning that is no text")?);
        more.extend([("reasoning", reasoning.clone()), ("reasoning_content", reasoning)]);
    }
    for key in ["tool_call_id", "name"] {
        if let Some(value) = message.get(key) {
            more.push((key, Value::from(value.text().ok_or_else(|| format!("{key} of a message is no text"))?)));
        }
    }
    Ok(Message { role: role.to_owned(), content, more })
}

fn texts_of(content: Option<&Json>) -> Result<Vec<String>, String> {
    let parts = match content {
        None => return Ok(Vec::new()),
        Some(Json::Text(text)) => return Ok(vec![text.clone()]),
        Some(content) => content.list().ok_or("a message has content that is neither text nor a list")?,
    };
    let text_of = |part: &Json| -> Option<String> {
        let is_text = part.get("type")?.text()? == "text" && part.map()?.len() == 2;
        part.get("text").filter(|_| is_text)?.text().map(str::to_owned)
    };
    let texts: Option<Vec<String>> = parts.iter().map(text_of).collect();
    texts.ok_or_else(|| "only parts of text are tokenised locally".to_owned())
}

/// A call with its arguments as an object. Its members come in the order of OpenAI's types, as pydantic puts them.
fn tool_call_of(call: &Json, values: &Values) -> Result<Value, String> {
    let not_followed = || "tool calls of this form are not followed".to_owned();
    let has_only = |of: &Json, keys: &[&str]| {
        of.map().is_some_and(|members| members.iter().all(|(key, _)| keys.contains(&key.as_str())))
    };
    let text = |of: &Json, key: &str| of.get(key).and_then(Json::text).map(str::to_owned).ok_or_else(not_followed);
    let function = call.get("function").ok_or_else(not_followed)?;
    if !has_only(call, &["id", "type", "function"]) || !has_only(function, &["name", "arguments"]) {
        return Err(not_followed());
    }
    if text(call, "type")? != "function" {
        return Err(not_followed());
    }
    let arguments = text(function, "arguments")?;
    // What is no object becomes an empty one. Python's parser takes a little more than JSON (NaN), and other numbers.
    let arguments = match values.read(&arguments) {
        Ok(arguments @ Json::Map(_)) => arguments,
        Ok(_) => Json::Map(Vec::new()),
        Err(_) if arguments.is_empty() => Json::Map(Vec::new()),
        Err(_) => return Err("arguments of a tool call that may be read otherwise are not followed".to_owned()),
    };
    let function = [("arguments", arguments.value()), ("name", Value::from(text(function, "name")?))];
    let members = [
        ("id", Value::from(text(call, "id")?)),
        ("function", Value::from_pairs(function)),
        ("type", Value::from("function")),
    ];
    Ok(Value::from_pairs(members))
}

/// `ChatCompletionToolsParam.model_dump()`: fields in their order, those that are missing as None.
fn tools_of(tools: &Json) -> Result<Value, String> {
    let not_followed = || "tools of this form are not followed".to_owned();
    let tools = tools.list().filter(|tools| !tools.is_empty()).ok_or_else(not_followed)?;
    let tool_of = |tool: &Json| -> Option<Value> {
        let is_known = |members: &[(String, Json)], keys: &[&str]| {
            members.iter().all(|(key, value)| *value == Json::Null || keys.contains(&key.as_str()))
        };
        let is_function = tool.get("type").is_none_or(|kind| kind.text() == Some("function"));
        let function = tool.get("function")?;
        let is_followed = is_function
            && is_known(tool.map()?, &["type", "function"])
            && is_known(function.map()?, &["name", "description", "parameters", "strict"]);
        if !is_followed {
            return None;
        }
        let or_none = |value: Option<Value>| value.unwrap_or(Value::from(()));
        let described = function.get("description").map(|text| text.text().map(Value::from));
        let parameters = function.get("parameters").map(|schema| schema.map().map(|_| schema.value()));
        let strict = function.get("strict").map(|strict| strict.bool().map(Value::from));
        let mut members = vec![
            ("name", Value::from(function.get("name")?.text()?)),
            ("description", or_none(described.map_or(Some(None), |text| text.map(Some))?)),
            ("parameters", or_none(parameters.map_or(Some(None), |schema| schema.map(Some))?)),
        ];
        if let Some(strict) = strict {
            members.push(("strict", strict?));
        }
        Some(Value::from_pairs([("type", Value::from("function")), ("function", Value::from_pairs(members))]))
    };
    let tools: Option<Vec<Value>> = tools.iter().map(tool_of).collect();
    tools.map(Value::from).ok_or_else(not_followed)
}

/// Documents of texts, as `list[dict[str, str]]` takes them.
fn documents_of(body: &RawBody<'_>) -> Result<Value, String> {
    let Some(documents) = json(body, "documents")? else { return Ok(Value::from(())) };
    let is_texts =
        |document: &Json| document.map().is_some_and(|all| all.iter().all(|(_, text)| text.text().is_some()));
    let is_followed = documents.list().is_some_and(|documents| documents.iter().all(is_texts));
    is_followed.then(|| documents.value()).ok_or_else(|| "documents of this form are not followed".to_owned())
}

/// What `build_chat_params` passes on beside the messages. `null` and `"auto"` count as unset.
fn template_kwargs(body: &RawBody<'_>) -> Result<Vec<(String, Value)>, String> {
    let given = json(body, "chat_template_kwargs")?.unwrap_or(Json::Map(Vec::new()));
    let given = given.map().ok_or("chat_template_kwargs is no object")?;
    if let Some((name, _)) = given.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
        return Err(format!("chat_template_kwargs with {} is not followed", shown(name)));
    }
    let effort = json(body, "reasoning_effort")?;
    let is_set = |value: &Json| *value != Json::Null && value.text() != Some("auto");
    let mut kwargs: Vec<(String, Value)> = Vec::new();
    for (name, value) in given.iter().filter(|(_, value)| is_set(value)) {
        kwargs.push((name.clone(), value.value()));
    }
    if let Some(effort) = effort {
        let effort = effort.text().ok_or("reasoning_effort is no text")?;
        kwargs.push(("reasoning_effort".to_owned(), Value::from(effort)));
        if !given.iter().any(|(name, _)| name == "enable_thinking") {
            kwargs.push(("enable_thinking".to_owned(), Value::from(effort != "none")));
        }
    }
    Ok(kwargs)
}

/// Appends the tag to the message that is to be continued. Answers the message's text without it.
fn mark(message: Option<&mut Message>, template: &ChatTemplate) -> Result<String, String> {
    let text = match message.map(|message| &mut message.content) {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(texts)) => texts.last_mut().ok_or("the last message has no text to continue")?,
        None => return Err("there is no message to continue".to_owned()),
    };
    if !template.mentions("content") {
        return Err("the chat template cannot continue a message".to_owned());
    }
    let end = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok(end)
}

/// The rendered text up to the tag.
fn cut(text: &str, end: &str) -> Result<String, String> {
    let at = text.rfind(CONTINUE_TAG.trim_end()).filter(|_| text.contains(end.trim()));
    let at = at.ok_or("the chat template does not show the message that is to be continued")?;
    let before = &text[..at];
    // A template that trims messages has taken the tag's blank away, and what was before the tag is trimmed too.
    Ok(if text[at..].starts_with(CONTINUE_TAG) { before } else { before.trim_end() }.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::LOCAL_VALUES_MAX;
    use proptest::prelude::*;
    use serde_json::{Value as Body, json};

    const PLAIN: &str = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
        {% if tools %}{{ tools|tojson }}{% endif %}{% if documents %}{{ documents|tojson }}{% endif %}\
        {% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}{% if add_generation_prompt %}<a>{% endif %}";
    const PARTS: &str = "{% for m in messages %}{% for p in m['content'] %}{{ p.text|trim }}.{% endfor %}{% endfor %}";

    fn templates(source: &str) -> Templates {
        let special = vec![("bos_token".to_owned(), "<s>".to_owned())];
        Templates { default: Some(ChatTemplate::new(source).expect("a template")), tool_use: None, special }
    }

    fn chat_by(source: &str, body: &Body) -> Result<String, String> {
        let text = text_of(ApiPath::ChatCompletions, body.to_string().as_bytes(), &templates(source))?;
        assert!(!text.add_special_tokens, "a template writes them");
        Ok(text.text)
    }

    fn user(text: &str, more: &Body) -> Body {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0.5});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    }

    #[test]
    fn a_chat_is_rendered_with_what_the_request_sets() {
        for (more, expected) in [
            (json!({}), "<s><user>x<a>"),
            (json!({"add_generation_prompt": false}), "<s><user>x"),
            (json!({"add_generation_prompt": false, "continue_final_message": true}), "<s><user>x"),
            (json!({"reasoning_effort": "none"}), "<s><user>x[False]<a>"),
            (json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 3}}), "<s><user>x[3]<a>"),
            (json!({"chat_template_kwargs": {"enable_thinking": null, "bos_token": "B"}}), "B<user>x<a>"),
            (json!({"documents": [{"title": "t"}]}), "<s><user>x[{\"title\": \"t\"}]<a>"),
        ] {
            assert_eq!(chat_by(PLAIN, &user("x", &more)), Ok(expected.to_owned()), "{more}");
        }
        let tools = json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1}}}]});
        let expected = "<s><user>x[{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": null, \
            \"parameters\": {\"b\": 1}}}]<a>";
        assert_eq!(chat_by(PLAIN, &user("x", &tools)), Ok(expected.to_owned()));
        let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
            {"type": "text", "text": ""}, {"type": "text", "text": " b "}]}]});
        assert_eq!(chat_by(PLAIN, &parts), Ok("<s><user>a\n b <a>".to_owned()));
        assert_eq!(chat_by(PARTS, &parts), Ok("a..b.".to_owned()));
        let mut opened = parts;
        opened["continue_final_message"] = json!(true);
        opened["add_generation_prompt"] = json!(false);
        assert_eq!(chat_by(PARTS, &opened), Ok("a..b".to_owned()));
    }

    #[test]
    fn completions_take_their_first_prompt() {
        let of = |body: Body| text_of(ApiPath::Completions, body.to_string().as_bytes(), &Templates::default());
        let text = |text: &str, add_special_tokens| Ok(Text { text: text.to_owned(), add_special_tokens });
        assert_eq!(of(json!({"prompt": "a", "max_tokens": 3})), text("a", true));
        assert_eq!(of(json!({"prompt": ["a", "b"], "add_special_tokens": false})), text("a", false));
        for body in [json!({"prompt": [1]}), json!({"prompt": []}), json!({}), json!({"prompt": "a", "suffix": "b"})] {
            assert!(of(body.clone()).is_err(), "{body}");
        }
    }

    /// Memory: each value takes some 250 bytes, and `0,` has two.
    #[test]
    fn of_a_body_so_many_values_are_read() {
        let zeros = |count: usize| format!("[{}0]", "0,".repeat(count - 1));
        let of = |prompts: &str| {
            let body = format!("{{\"prompt\": {prompts}}}");
            text_of(ApiPath::Completions, body.as_bytes(), &Templates::default())
        };
        assert_eq!(of(&zeros(LOCAL_VALUES_MAX - 1)), Err("the first prompt is no text".to_owned()));
        assert!(of(&zeros(LOCAL_VALUES_MAX)).is_err_and(|why| why.contains("cannot be read")));
        let call =
            |arguments: &str| json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let called = |times: usize| {
            let arguments = format!("{{\"a\": {}}}", zeros(LOCAL_VALUES_MAX / 4));
            let calls = vec![call(&arguments); times];
            let messages = json!([{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}]);
            chat_by(PLAIN, &json!({"messages": messages}))
        };
        assert!(called(3).is_ok());
        assert!(called(4).is_err(), "those of all arguments count together");
    }

    #[test]
    fn what_is_not_followed_is_named_and_not_repeated() {
        let secret = "a secret";
        for more in [
            json!({"chat_template": secret}),
            json!({"truncate_prompt_tokens": 5}),
            json!({"mm_processor_kwargs": {}}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": secret}}]}]}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": secret, "x": 1}]}]}),
            json!({"messages": [{"role": "developer", "content": secret}]}),
            json!({"messages": [{"role": "user", "content": secret, "task": "x"}]}),
            json!({"messages": [{"role": "system", "content": format!("{BILLING_HEADER}: {secret}")}]}),
            json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}),
            json!({"messages": secret}),
            json!({"tools": []}),
            json!({"tools": [{"type": "function", "function": {"name": "f", "x": secret}}]}),
            json!({"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}),
            json!({"chat_template_kwargs": {"messages": [secret]}}),
            json!({"chat_template_kwargs": {"x": 1e300}}),
            json!({"documents": [secret]}),
            json!({"continue_final_message": true}),
            json!({"add_generation_prompt": "yes"}),
        ] {
            let error = chat_by(PLAIN, &user(secret, &more)).expect_err(&more.to_string());
            assert!(!error.contains("secret"), "{error}");
        }
        assert!(text_of(ApiPath::Responses, b"{}", &templates(PLAIN)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = text_of(ApiPath::ChatCompletions, &bytes, &templates(PLAIN));
        }

        #[test]
        fn a_message_is_continued_where_it_ends(text in "\\PC{1,20}") {
            prop_assume!(!text.trim().is_empty() && !text.contains("CONTINUE"));
            let more = json!({"add_generation_prompt": false, "continue_final_message": true});
            prop_assert_eq!(chat_by(PLAIN, &user(&text, &more)), Ok(format!("<s><user>{text}")));
        }
    }
}
